"""Rows of T tokens: the i-th row of an epoch as it lies, before any shuffling.

A row is inputs and targets (the next token of each), `mask` (where the loss counts), `positions` (from 0 in each
document, or in what of it the row begins with) and `segment_ids` (documents of the row from 1 up; 0 is padding).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from capibara.errors import rule_error, say_once
from capibara.train.data.split import Documents

__all__ = ["Row", "Rows", "StreamRows", "WholeRows", "first_fit"]

_log = logging.getLogger(__name__)

Row = dict[str, npt.NDArray[Any]]

FIT_WINDOW = 1024
"""Documents among which those that fill a row together are looked for."""


class Rows(ABC):
    """Rows by number."""

    def __init__(self, documents: Documents, length: int, vocab_size: int, pad_id: int) -> None:
        self.documents, self.length = documents, length
        self._vocab_size, self._pad_id = vocab_size, pad_id

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, number: int) -> Row: ...

    def empty(self) -> Row:
        """A row of padding, with which the last batch of an evaluation is filled."""
        row = {
            "inputs": np.full(self.length, self._pad_id, np.int32),
            "targets": np.full(self.length, self._pad_id, np.int32),
            "positions": np.zeros(self.length, np.int32),
            "mask": np.zeros(self.length, np.bool_),
        }
        return row if self.keys_without_segments else {**row, "segment_ids": np.zeros(self.length, np.int32)}

    keys_without_segments = False
    truncated = 0
    """Documents that are cut to fit into a row."""

    def _read(
        self, first: int, last: int, low: int, high: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[Any] | None]:
        """Ids of a stretch of the stream, and their loss mask where there is one."""
        tokens = self.documents.tokens
        ids = self.documents.read(tokens.ids, first, last, low, high)
        if not tokens.checked and (int(ids.max()) >= self._vocab_size or int(ids.min()) < 0):
            worst = int(ids.max()) if int(ids.max()) >= self._vocab_size else int(ids.min())
            raise rule_error(
                f"Ids are 0 to {self._vocab_size - 1}, the vocabulary's last",
                f"{worst} in {tokens.where}, document {first}" + (f" to {last - 1}" if last > first + 1 else ""),
                "use the tokenizer that the tokens come from",
            )
        loss = None if tokens.mask is None else self.documents.read(tokens.mask, first, last, low, high)
        return ids.astype(np.int32), loss


class StreamRows(Rows):
    """Full rows: windows over all documents end to end, T apart and T + 1 long.

    So every token but the first of all is a target once in an epoch. With `segments` attention and loss keep to a
    document: the first token of one is no target of the last of another.
    """

    def __init__(self, documents: Documents, length: int, vocab_size: int, pad_id: int, segments: bool) -> None:
        super().__init__(documents, length, vocab_size, pad_id)
        self.keys_without_segments = not segments
        if documents.total < 2:
            raise rule_error(
                "A row has an input and a target", f"{documents.total} tokens in {documents.tokens.where}", "add text"
            )

    def __len__(self) -> int:
        return -(-(self.documents.total - 1) // self.length)

    def __getitem__(self, number: int) -> Row:
        low = number * self.length
        high = min(low + self.length + 1, self.documents.total)
        offsets = self.documents.offsets
        first = int(np.searchsorted(offsets, low, "right")) - 1
        last = int(np.searchsorted(offsets, high, "left"))
        ids, loss = self._read(first, last, low, high)
        count = high - low - 1
        row = self.empty()
        row["inputs"][:count], row["targets"][:count] = ids[:-1], ids[1:]
        mask = np.ones(count, np.bool_) if loss is None else loss[1:].astype(np.bool_)
        if self.keys_without_segments:
            row["positions"][:count] = np.arange(count)
        else:
            edges = np.clip(offsets[first : last + 1], low, high) - low
            lengths = np.diff(edges)
            segments = np.repeat(np.cumsum(lengths > 0), lengths)  # documents without a token here have no number
            row["segment_ids"][:count] = segments[:-1]
            row["positions"][:count] = (np.arange(count + 1) - np.repeat(edges[:-1], lengths))[:-1]
            mask &= segments[1:] == segments[:-1]
        row["mask"][:count] = mask
        return row


class WholeRows(Rows):
    """Rows of whole documents, several where they fit (`packed`), else one; the rest is padding.

    A document longer than a row is cut, and counted in `truncated`.
    """

    def __init__(self, documents: Documents, length: int, vocab_size: int, pad_id: int, packed: bool) -> None:
        super().__init__(documents, length, vocab_size, pad_id)
        pairs = documents.lengths() - 1  # an input and a target each
        usable = np.flatnonzero(pairs > 0)
        if not len(usable):
            raise rule_error(
                "A document has an input and a target", f"none such in {documents.tokens.where}", "name other data"
            )
        self.truncated = int(np.sum(pairs > length))
        self.truncated_tokens = int(np.sum(np.maximum(pairs - length, 0)))
        if self.truncated:
            say_once(
                _log,
                (documents.tokens.fingerprint, documents.which, length),
                "%s: %d of %d documents are longer than a row of %d tokens and are cut; %d tokens are left out.",
                documents.tokens.where,
                self.truncated,
                len(documents),
                length,
                self.truncated_tokens,
            )
        if packed:
            order, self._firsts = first_fit(np.minimum(pairs[usable], length), length, FIT_WINDOW)
            self._order = usable[order]
        else:
            self._order, self._firsts = usable, np.arange(len(usable) + 1)

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def __getitem__(self, number: int) -> Row:
        row = self.empty()
        place = 0
        chosen = self._order[self._firsts[number] : self._firsts[number + 1]]
        for segment, document in enumerate(chosen, 1):
            low = int(self.documents.offsets[document])
            high = min(int(self.documents.offsets[document + 1]), low + self.length + 1)
            ids, loss = self._read(int(document), int(document) + 1, low, high)
            here = slice(place, place + len(ids) - 1)
            row["inputs"][here], row["targets"][here] = ids[:-1], ids[1:]
            row["segment_ids"][here] = segment
            row["positions"][here] = np.arange(len(ids) - 1)
            row["mask"][here] = True if loss is None else loss[1:]
            place = here.stop
        return row


def first_fit(
    lengths: npt.NDArray[np.int64] | Sequence[int], capacity: int, window: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Which documents share a row: each goes to the first row of its window of documents that has room for it.

    Returns the documents in order of their rows, and where in it each row begins, with the end after them.

    >>> order, firsts = first_fit([5, 4, 3, 2], capacity=8, window=4)
    >>> order.tolist(), firsts.tolist()
    ([0, 2, 1, 3], [0, 2, 4])
    """
    lengths = np.asarray(lengths)
    count = len(lengths)
    if not count:
        return np.zeros(0, np.int64), np.zeros(1, np.int64)
    # Windows know nothing of each other: the first documents of all are placed at once, then the second, ...
    windows = -(-count // window)
    padded = np.zeros(windows * window, np.int64)
    padded[:count] = lengths
    table = padded.reshape(windows, window)
    each = np.arange(windows)
    room = np.full((windows, window), capacity, np.int32)
    used = np.zeros(windows, np.int64)
    rows = np.empty((windows, window), np.int64)
    for place in range(min(window, count)):
        # Rows that are not begun yet have room for anything, and stand after those that are.
        row = (room[:, : int(used.max()) + 1] >= table[:, place, None]).argmax(axis=1)
        room[each, row] -= table[:, place]
        used = np.maximum(used, row + 1)
        rows[:, place] = row
    firsts = np.concatenate([[0], np.cumsum(used)])
    row_of = (rows + firsts[:-1, None]).reshape(-1)[:count]
    order = np.argsort(row_of, kind="stable")
    return order, np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=int(row_of.max()) + 1))])
