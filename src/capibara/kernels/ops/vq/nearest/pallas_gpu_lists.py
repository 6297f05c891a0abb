"""How the rows' lists lie in memory between the search and what reads them: [words, rows] int32.

A list is `kept` codes, the best first, and how many of them may be the nearest: a word each, or a byte each where there
are so few codes that words would be much beside a table of rows by codes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax

MOST_PACKED = 128  # codes whose indices are bytes
BYTES = 4  # of a word
BYTE = 256


def words_of(kept: int, codes: int) -> int:
    """Of a row's list; codes are as many as the search has."""
    return kept + 1 if codes > MOST_PACKED else -(-(kept + 1) // BYTES)


def packed(entries: Sequence[Any], codes: int) -> list[Any]:
    """The words of lists whose entries are vectors of int32."""
    if codes > MOST_PACKED:
        return list(entries)
    words = []
    for first in range(0, len(entries), BYTES):
        word, *others = entries[first : first + BYTES]
        for place, entry in enumerate(others, 1):
            word = word + entry * BYTE**place
        words.append(word)
    return words


def entry_of(found: Any, row: Any, kept: int) -> Callable[[Any], Any]:
    """The entries of a row's list, by their place; the `kept`-th is how many may be the nearest."""
    if found.shape[0] == kept + 1:
        return lambda place: found[place, row]

    def entry(place: Any) -> Any:
        word, byte = divmod(place, BYTES) if isinstance(place, int) else (lax.div(place, BYTES), lax.rem(place, BYTES))
        return lax.shift_right_logical(found[word, row], np.int32(8) * byte) & (BYTE - 1)

    return entry
