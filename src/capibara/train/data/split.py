"""Which documents are for training and which are held out, by what they say and never by chance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from capibara.errors import rule_error
from capibara.train.data.tokens import Tokens

__all__ = ["Documents", "split"]


@dataclass(frozen=True)
class Documents:
    """Documents of some tokens, end to end: a stream of `total` tokens, or `len` pieces of it."""

    tokens: Tokens
    begins: npt.NDArray[Any]
    """Where each lies among the tokens."""
    offsets: npt.NDArray[Any]
    """Where each begins in the stream, and after them its length."""
    which: str
    """In words and numbers, for the fingerprint."""

    def __len__(self) -> int:
        return len(self.begins)

    @property
    def total(self) -> int:
        return int(self.offsets[-1])

    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.offsets)

    def read(self, array: npt.NDArray[Any], first: int, last: int, low: int, high: int) -> npt.NDArray[Any]:
        """Tokens low to high of the stream, from an array of all tokens; they lie in documents first to last - 1."""
        begins, offsets = self.begins[first:last], self.offsets[first : last + 1]
        shifts = begins - offsets[:-1]
        if shifts[0] == shifts[-1] and np.all(shifts == shifts[0]):  # they lie side by side, as all do without a split
            return np.asarray(array[low + shifts[0] : high + shifts[0]])
        edges = np.clip(offsets, low, high)
        pieces = zip(edges[:-1] + shifts, edges[1:] + shifts, strict=True)
        return np.concatenate([array[begin:end] for begin, end in pieces])


def split(tokens: Tokens, share: float, part: str) -> Documents:
    """The documents of "train" or "eval" when `share` of them is held out.

    Held out are those whose content's hash is lowest, so that it does not depend on a seed or on the order of files,
    and copies of a document are on the same side. A share that is less than one document is taken from the end of
    each, since text may come as one long file.
    """
    starts = tokens.starts
    if not share:
        return Documents(tokens, starts[:-1], starts, "all")
    count = round(share * tokens.documents)
    if count:
        hashes = tokens.hashes if tokens.hashes is not None else _scattered(tokens.documents)
        held = np.asarray(hashes) <= np.partition(hashes, count - 1)[count - 1]
        chosen = np.flatnonzero(held if part == "eval" else ~held)
        begins, lengths = starts[:-1][chosen], np.diff(starts)[chosen]
    elif tokens.whole:
        raise rule_error(
            "A share held out is at least one conversation",
            f"{share} of {tokens.documents} in {tokens.where}",
            "hold out more, or name another file with held_out",
        )
    else:
        lengths = np.diff(starts)
        ends = np.ceil(lengths * share).astype(np.int64)
        begins = starts[1:] - ends if part == "eval" else starts[:-1]
        lengths = ends if part == "eval" else lengths - ends
    if not lengths.sum():
        raise rule_error(f"Some data is left for {part}", f"held_out = {share} of {tokens.where}", "change the share")
    return Documents(tokens, begins, np.concatenate([[0], np.cumsum(lengths)]), f"{part} with {share} held out")


def _scattered(count: int) -> npt.NDArray[np.uint64]:
    """A hash of each document's number, where there is none of its content (splitmix64)."""
    z = (np.arange(count, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
