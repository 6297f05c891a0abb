"""What a parser of tool calls gives out, and the part that all formats share: one JSON object that is a call."""

from __future__ import annotations

import contextlib
import json
import secrets
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from capibara.serve.tools.json_scan import ObjectScanner, ValueText

__all__ = ["CallDelta", "CallReader", "Piece", "ToolParser", "hexadecimal_id", "nine_characters", "partial_end"]


@dataclass(frozen=True)
class CallDelta:
    """A piece of a tool call. The first of each has its id and name; `arguments` are to be joined."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


Piece = str | CallDelta
"""Text of the answer, or a piece of a call."""


def hexadecimal_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def nine_characters() -> str:
    """What Mistral's templates take as the id of a call: letters and digits, nine of them."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class ToolParser:
    """Text in, text and calls out. However the text is cut, the joined pieces are the same.

    A character is given out as soon as no later one can change what it is part of. What never becomes a call is text,
    and none of it is lost.
    """

    markers: tuple[str, ...] = ()
    """Spellings that begin a call; they may be special tokens, which decoding leaves out unless it is told."""
    new_id: Callable[[], str] = staticmethod(hexadecimal_id)

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.names = frozenset(names)
        self.calls = 0
        """Calls that have begun."""
        self.whole = 0
        """Calls that are complete."""

    def put(self, text: str) -> list[Piece]:
        """What is certain now."""
        pieces: list[Piece] = []
        for character in text:
            pieces += self._take(character)
        return joined(pieces)

    def end(self) -> list[Piece]:
        """The rest, when no more text comes."""
        return joined(self._end())

    def _take(self, character: str) -> Iterable[Piece]:
        raise NotImplementedError

    def _end(self) -> Iterable[Piece]:
        raise NotImplementedError

    def _begin_call(self, *, known_only: bool) -> CallReader:
        return CallReader(self.calls, self.new_id, self.names if known_only else None)

    def _count(self, reader: CallReader) -> None:
        if reader.begun:
            self.calls = reader.index + 1
        if reader.done:
            self.whole = reader.index + 1


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbours that are of a kind as one: text beside text, arguments of a call beside its own."""
    out: list[Piece] = []
    for piece in pieces:
        last = out[-1] if out else None
        if isinstance(piece, str):
            if not piece:
                continue
            if isinstance(last, str):
                out[-1] = last + piece
                continue
        elif isinstance(last, CallDelta) and last.index == piece.index and piece.id is None:
            out[-1] = CallDelta(last.index, last.id, last.name, last.arguments + piece.arguments)
            continue
        out.append(piece)
    return out


def partial_end(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of `marker`."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-n:])), 0)


class CallReader:
    """One call as a JSON object, {"name": ..., "arguments": {...}}, in either order; "parameters" is the same.

    Args:
      index: of the call in its answer.
      new_id: makes its id.
      known: names that a call may have; any where None. An object of another name is no call.
    """

    def __init__(self, index: int, new_id: Callable[[], str], known: frozenset[str] | None = None) -> None:
        self.index = index
        self.begun = False
        """Whether its name has been given out: from here on it is a call."""
        self.raw = ""
        """All its text until it has begun, which is given back where it is no call."""
        self._new_id = new_id
        self._known = known
        self._scanner = ObjectScanner()
        self._name = ""
        self._argument_key: str | None = None  # the first of the two words that came; another one is not read
        self._quoted = False  # whether the arguments are JSON inside of a string, as some models write them
        self._waiting = ""  # arguments that came before the name, or are a string until its end

    @property
    def done(self) -> bool:
        return self.begun and self._scanner.state == "done"

    @property
    def failed(self) -> bool:
        """Whether this is no call: `raw` is text. Or, once it has begun, that its object breaks off."""
        return self._scanner.state == "bad" or (self._scanner.state == "done" and not self.begun)

    def take(self, character: str) -> list[CallDelta]:
        """The next character of the object."""
        if not self.begun:
            self.raw += character
        deltas: list[CallDelta] = []
        for event in self._scanner.take(character):
            if event.key == "name" and not self.begun:
                self._name += event.text
                if event.ends:
                    deltas += self._begin()
            elif event.key in ("arguments", "parameters"):
                deltas += self._argue(event)
        if self.done and self._argument_key is None:
            self._argument_key = "arguments"
            deltas.append(CallDelta(self.index, arguments="{}"))
        return deltas

    def _begin(self) -> list[CallDelta]:
        try:
            name = json.loads(self._name)
        except ValueError:
            name = None
        if not isinstance(name, str) or not name or (self._known is not None and name not in self._known):
            self._scanner.state = "bad"
            return []
        self.begun = True
        return [CallDelta(self.index, self._new_id(), name), *self._waited()]

    def _argue(self, event: ValueText) -> list[CallDelta]:
        if self._argument_key is None:
            self._argument_key, self._quoted = event.key, event.text == '"'
        if event.key != self._argument_key:
            return []
        self._waiting += event.text
        return self._waited() if self.begun and (event.ends or not self._quoted) else []

    def _waited(self) -> list[CallDelta]:
        text, self._waiting = self._waiting, ""
        if self._quoted:
            with contextlib.suppress(ValueError):
                text = json.loads(text)
        return [CallDelta(self.index, arguments=text)] if text else []
