"""An output's text as its tokens come: whole characters, and never the beginning of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from capibara.models.tokenizer import Tokenizer

__all__ = ["OutputText"]


class OutputText:
    """Tokens in, text out; it ends at the first stop string.

    >>> from capibara.models.tokenizer import ByteTokenizer
    >>> text = OutputText(ByteTokenizer(), stop=("end",))
    >>> [text.put(byte) for byte in b"an enemy's end, truly"[:15]], text.found
    (['a', 'n', ' ', '', '', 'en', 'em', 'y', "'", 's', ' ', '', '', '', ''], 'end')
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        spelled: Sequence[int] = (),
    ) -> None:
        self._stream = None if tokenizer is None else tokenizer.stream()
        special = () if tokenizer is None or not spelled else tokenizer.special_tokens.items()
        self._spelled = {id: text for text, id in special if id in spelled}
        self._stop = tuple(stop)
        self._include = include_stop
        self._held = ""  # what may be the beginning of a stop string
        self.found: str | None = None
        """The stop string that the text has come to."""

    def put(self, token: int) -> str:
        """The text that is certain now."""
        if self._stream is None or self.found is not None:
            return ""
        spelled = self._spelled.get(token)
        fresh = self._stream.put(token) if spelled is None else self._stream.end() + spelled
        return self._certain(fresh) if self._stop else fresh

    def end(self) -> str:
        """What was held back, when no more comes."""
        if self._stream is None or self.found is not None:
            return ""
        fresh = self._stream.end()
        fresh = self._certain(fresh) if self._stop else fresh
        # Empty where that came to a stop string.
        rest, self._held = self._held, ""
        return fresh + rest

    def _certain(self, fresh: str) -> str:
        """Of a text with stop strings, what is part of none."""
        text = self._held + fresh
        found = min(((text.find(stop), stop) for stop in self._stop if stop in text), default=None)
        if found is not None:
            at, self.found = found
            self._held = ""
            return text[: at + (len(self.found) if self._include else 0)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """How many last characters of the text are the beginning of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
