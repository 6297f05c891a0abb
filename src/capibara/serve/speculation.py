"""Drafts by n-gram look-up: what followed the last tokens when they came before is guessed to follow again.

Nothing is lost by a wrong guess but its share of a step: a draft is checked by the model itself, and a request's tokens
are the same with and without (`sampling` says why). Text that repeats itself, code and answers that quote their prompt
gain most.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["NgramDrafts"]


class NgramDrafts:
    """The runs of up to `longest` tokens of one sequence, and where each came last.

    >>> drafts = NgramDrafts(longest=2)
    >>> drafts.guess([1, 2, 3, 4, 1, 2], 3)
    (3, 4, 1)
    >>> drafts.guess([1, 2, 3, 4, 1, 2, 9], 3)
    ()
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._after: dict[tuple[int, ...], int] = {}  # a run -> the position after its last occurrence
        self._indexed = 1

    def guess(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """Up to `most` tokens that may come next; of several earlier places the last with the longest run counts.

        `tokens` are those of the calls before, and perhaps more.
        """
        # A run is entered with the token after it, so that the last tokens are not found to be their own past.
        for end in range(self._indexed, len(tokens)):
            for size in range(1, min(self._longest, end) + 1):
                self._after[tuple(tokens[end - size : end])] = end
        self._indexed = max(self._indexed, len(tokens))
        for size in range(min(self._longest, len(tokens)), 0, -1):
            at = self._after.get(tuple(tokens[len(tokens) - size :]))
            if at is not None:
                return tuple(tokens[at : at + most])
        return ()
