"""The formats in which model families write tool calls, and which of them a model's template speaks."""

from __future__ import annotations

from collections.abc import Iterable

from capibara.errors import unknown_name
from capibara.serve.tools.calls import CallDelta, CallReader, Piece, ToolParser, nine_characters, partial_end
from capibara.serve.tools.json_scan import ValueScanner

__all__ = ["PARSERS", "HermesParser", "Llama3Parser", "MistralParser", "parser_for", "parser_of"]

_SPACE = " \t\r\n"


class _MarkedParser(ToolParser):
    """Text up to a marker; then whatever the format writes after it, until it says that text goes on.

    Space before a marker belongs to the format, and so is held back until something else follows it.
    """

    opening: str

    def __init__(self, names: Iterable[str] = ()) -> None:
        super().__init__(names)
        self._held = ""  # space, and after it what may be the beginning of the marker
        self._before = ""  # space that stood before the last marker: text, should that begin no call

    def _text(self, character: str) -> list[Piece]:
        self._held += character
        if self._held.endswith(self.opening):
            self._before, self._held = self._held[: -len(self.opening)], ""
            self._opened()
            return []
        keep = partial_end(self._held, self.opening)
        before = self._held[: len(self._held) - keep]
        sure = before.rstrip(_SPACE)
        self._held = self._held[len(sure) :]
        return [sure]

    def _opened(self) -> None:
        raise NotImplementedError

    def _rest(self) -> list[Piece]:
        rest, self._held = self._held, ""
        return [rest if rest.strip(_SPACE) or not self.calls else ""]


class HermesParser(_MarkedParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them: Hermes, Qwen2.5, Qwen3."""

    opening, closing = "<tool_call>", "</tool_call>"
    markers = (opening, closing)

    def __init__(self, names: Iterable[str] = ()) -> None:
        super().__init__(names)
        self._reader: CallReader | None = None
        self._after: str | None = None  # what came after the object, where that was all

    def _opened(self) -> None:
        self._reader = self._begin_call(known_only=False)

    def _take(self, character: str) -> list[Piece]:
        if self._after is not None:
            return self._closing(character)
        if self._reader is None:
            return self._text(character)
        pieces: list[Piece] = list(self._reader.take(character))
        self._count(self._reader)
        if self._reader.done:
            self._after = ""
        elif self._reader.failed:
            pieces += self._given_up(character)
        return pieces

    def _given_up(self, character: str) -> list[Piece]:
        reader, self._reader = self._reader, None
        assert reader is not None
        if reader.begun:  # it cannot be taken back: what breaks it is text
            return self._text(character)
        return [self._before + self.opening + reader.raw]

    def _closing(self, character: str) -> list[Piece]:
        assert self._after is not None
        self._after += character
        word = self._after.lstrip(_SPACE)
        if word == self.closing:
            self._after = self._reader = None
            return []
        if self.closing.startswith(word):
            return []
        # No closing tag: what stands there is text, or the next call.
        text, self._after, self._reader = self._after, None, None
        return [piece for one in text for piece in self._take(one)]

    def _end(self) -> list[Piece]:
        if self._reader is not None and not self._reader.begun:
            return [self._before + self.opening + self._reader.raw]
        if self._after is not None:
            return []  # the beginning of a closing tag
        return [] if self._reader is not None else self._rest()


class MistralParser(_MarkedParser):
    """`[TOOL_CALLS]` and then a list of objects, or (newer ones) a name and its arguments, `name[ARGS]{...}`."""

    opening = "[TOOL_CALLS]"
    markers = (opening, "[ARGS]")
    new_id = staticmethod(nine_characters)

    def __init__(self, names: Iterable[str] = ()) -> None:
        super().__init__(names)
        self._state = "text"  # text, opened, between, object, name, arguments
        self._raw = ""  # since the marker or the last call, while nothing of it has been given out
        self._marked = False  # whether the marker has become a call
        self._reader: CallReader | None = None
        self._value = ValueScanner()

    def _opened(self) -> None:
        self._state, self._raw, self._marked = "opened", "", False

    def _unread(self) -> str:
        """What has come since something was last given out, and was no call."""
        raw = self._raw if self._marked else self._before + self.opening + self._raw
        self._raw, self._marked = "", True
        return raw

    def _take(self, character: str) -> list[Piece]:
        match self._state:
            case "text":
                return self._text(character)
            case "opened":
                return self._first(character)
            case "object":
                return self._object(character)
            case "between":
                return self._between(character)
            case "name":
                return self._named(character)
            case _:
                return self._arguments(character)

    def _first(self, character: str) -> list[Piece]:
        self._raw += character
        if character == "[":
            self._state = "between"
        elif character not in _SPACE:
            self._state, self._raw = "name", self._raw[:-1]
            return self._named(character)
        return []

    def _between(self, character: str) -> list[Piece]:
        """Before an object of the list, or after one."""
        if character == "{":
            self._state = "object"
            self._reader = self._begin_call(known_only=False)
            return self._object(character)
        if character in _SPACE or character == ",":
            self._raw += character
            return []
        if character == "]":
            self._state = "text"
            return [] if self._marked else [self._unread() + character]
        return self._as_text(character)

    def _object(self, character: str) -> list[Piece]:
        assert self._reader is not None
        pieces: list[Piece] = list(self._reader.take(character))
        self._count(self._reader)
        if self._reader.begun:
            self._raw, self._marked = "", True
        if self._reader.done:
            self._state = "between"
        elif self._reader.failed:
            if self._reader.begun:
                return [*pieces, *self._as_text(character)]
            return [*pieces, *self._as_text(self._reader.raw)]
        return pieces

    def _as_text(self, character: str) -> list[Piece]:
        self._state = "text"
        return [self._unread(), *(piece for one in character for piece in self._text(one))]

    def _named(self, character: str) -> list[Piece]:
        self._raw += character
        name = self._raw.lstrip(_SPACE)
        if character == "{":
            name = name[:-1].removesuffix("[ARGS]").split("[CALL_ID]")[0].strip()
            if not name or any(letter in name for letter in '"[]{}<>\n'):
                return self._as_text("")
            self._state, self._raw, self._marked = "arguments", "", True
            self._value = ValueScanner()
            self.calls += 1
            return [CallDelta(self.calls - 1, self.new_id(), name), *self._arguments(character)]
        # A name is short, and of one line.
        return self._as_text("") if character == "\n" or len(name) > 256 else []

    def _arguments(self, character: str) -> list[Piece]:
        part = self._value.take(character)
        if part == "bad":
            return self._as_text(character)
        if part == "last":
            self._state, self.whole = "text", self.calls
        return [CallDelta(self.calls - 1, arguments=character)]

    def _end(self) -> list[Piece]:
        if self._state == "text":
            return self._rest()
        if self._state == "object" and self._reader is not None and not self._reader.begun:
            return [self._unread() + self._reader.raw]
        return [] if self._marked else [self._unread()]


class Llama3Parser(ToolParser):
    """The whole answer is `{"name": ..., "parameters": {...}}`, or several with `;` between them.

    A plain JSON answer looks the same, so that only names of the request's own tools make an object a call; after
    `<|python_tag|>`, which some write first, any name does.
    """

    tag = "<|python_tag|>"
    markers = (tag,)

    def __init__(self, names: Iterable[str] = ()) -> None:
        super().__init__(names)
        self._state = "start"  # start, object, after, text
        self._held = ""  # all since the last call, until it is known whether another follows
        self._word = ""  # the end of it, without space: a beginning of the tag, of an object
        self._tagged = False
        self._reader: CallReader | None = None

    def _take(self, character: str) -> list[Piece]:
        match self._state:
            case "text":
                return [character]
            case "start":
                return self._start(character)
            case "object":
                return self._object(character)
            case _:
                return self._after(character)

    def _start(self, character: str) -> list[Piece]:
        self._word = (self._word + character).lstrip(_SPACE)
        if self._word == "{":
            self._state, self._word = "object", ""
            self._reader = self._begin_call(known_only=not self._tagged)
            return self._object(character)
        self._held += character
        if self._word == self.tag:
            self._tagged, self._word = True, ""
        return [] if self.tag.startswith(self._word) else self._as_text("")

    def _as_text(self, more: str) -> list[Piece]:
        self._state = "text"
        held, self._held = self._held, ""
        return [held + more]

    def _object(self, character: str) -> list[Piece]:
        assert self._reader is not None
        pieces: list[Piece] = list(self._reader.take(character))
        self._count(self._reader)
        if self._reader.begun:
            self._held = ""
        if self._reader.done:
            self._state = "after"
        elif self._reader.failed:
            pieces += self._as_text(character if self._reader.begun else self._reader.raw)
        return pieces

    def _after(self, character: str) -> list[Piece]:
        self._held += character
        if character == ";":
            self._state = "start"
        return [] if character == ";" or character in _SPACE else self._as_text("")

    def _end(self) -> list[Piece]:
        if self._state == "object" and self._reader is not None and not self._reader.begun:
            return [self._held + self._reader.raw]
        return [self._held if self._held.strip(" \t\r\n;") or not self.calls else ""]


PARSERS: dict[str, type[ToolParser]] = {"hermes": HermesParser, "llama3": Llama3Parser, "mistral": MistralParser}


def parser_of(name: str) -> type[ToolParser]:
    """The parser of this name."""
    if name not in PARSERS:
        raise unknown_name("tool parser", name, PARSERS)
    return PARSERS[name]


def parser_for(template: str) -> type[ToolParser]:
    """The parser of the format that a chat template asks its model for; Hermes' where it does not say."""
    if HermesParser.opening in template:
        return HermesParser
    if MistralParser.opening in template:
        return MistralParser
    if Llama3Parser.tag in template or "<|start_header_id|>" in template:
        return Llama3Parser
    return HermesParser
