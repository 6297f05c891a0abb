"""Whether the page table, the lengths and the starts of a call say something possible: what debug=True checks.

Shapes cannot tell. A kernel never reads outside the pool whatever these arrays hold, so a wrong one gives a wrong
result silently; checking costs a trip to the host, so it is asked for.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from capibara.errors import rule_error


def checked(
    page_table: Any, context_lengths: Any, query_starts: Any, *, tokens: int, pages: int, page_size: int,
    window: int | None,
) -> Any:  # fmt: skip
    """`context_lengths`, once the three arrays are found possible; an error otherwise.

    Arrays that are being traced are checked by a callback when the program runs. Its result is what the program goes
    on with, so nothing is computed from arrays that did not pass.
    """
    given = [x for x in (page_table, context_lengths, query_starts) if x is not None]

    def look(*arrays: Any) -> Any:
        table, lengths, *starts = (np.asarray(x) for x in arrays)
        verify(table, lengths, starts[0] if starts else None, tokens, pages, page_size, window)
        return lengths

    if not any(isinstance(x, jax.core.Tracer) for x in given):
        look(*given)
        return context_lengths
    shape = jax.ShapeDtypeStruct(context_lengths.shape, context_lengths.dtype)
    return jax.pure_callback(look, shape, *given, vmap_method="sequential")


def verify(
    table: np.ndarray, lengths: np.ndarray, starts: np.ndarray | None, tokens: int, pages: int, page_size: int,
    window: int | None,
) -> None:  # fmt: skip
    """Raise a ValueError that names the first thing that cannot be."""
    sequences, max_pages = table.shape
    counts: np.ndarray = np.ones(sequences, np.int64)
    if starts is not None:
        counts = np.diff(starts.astype(np.int64))
        if starts[0] < 0 or starts[-1] > tokens or (counts < 0).any():
            raise rule_error(
                f"query_starts does not fall, and stays within the {tokens} tokens",
                starts.tolist(),
                "pass the cumulative sum of the token counts, with a 0 in front",
            )
    longest = max_pages * page_size
    for row, (length, count) in enumerate(zip(lengths.tolist(), counts.tolist(), strict=True)):
        if not 0 <= length <= longest:
            raise rule_error(
                f"A context has 0 to max_pages * page_size = {longest} keys",
                f"{length} for sequence {row}",
                "give the page table more columns, or end the sequence",
            )
        if 0 < length < count:
            raise rule_error(
                "context_lengths counts the keys in the cache, this call's tokens included",
                f"{length} for sequence {row}, which has {count} tokens here",
                "write the tokens' keys first and add them to the length",
            )
        first = 0 if window is None else max(length - count - window + 1, 0) // page_size
        used = table[row, first : -(-length // page_size)] if count else table[row, :0]
        outside = used[(used < 0) | (used >= pages)]
        if outside.size:
            raise rule_error(
                f"A page in use is one of the pool's {pages}",
                f"page {int(outside[0])} for sequence {row}",
                "allocate a page before its keys are written",
            )
