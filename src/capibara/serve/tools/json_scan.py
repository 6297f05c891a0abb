"""One JSON object, a character at a time: its keys, and the text of each value while it comes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

__all__ = ["ObjectScanner", "ValueScanner", "ValueText"]

_SPACE = " \t\r\n"


@dataclass(frozen=True)
class ValueText:
    """Text of the value of a key, as it stands; `ends` with its last character."""

    key: str
    text: str
    ends: bool


class ValueScanner:
    """Where a JSON value ends: at the bracket that closes it, the quote, or before what follows a bare word."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._string = False
        self._escaped = False
        self._kind: Literal["", "container", "string", "word"] = ""

    def take(self, character: str) -> Literal["inside", "last", "beyond", "bad"]:
        """What a character is: inside of the value, its last, the first beyond it; or that this is no JSON."""
        if self._string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._string = False
                return "last" if self._kind == "string" else "inside"
            return "inside"
        if not self._kind:
            return self._first(character)
        if self._kind == "word":
            return "beyond" if character in ",}]" or character in _SPACE else "inside"
        if character == '"':
            self._string = True
        elif character in "{[":
            self._open.append(character)
        elif character in "}]":
            if self._open.pop() != {"}": "{", "]": "["}[character]:
                return "bad"
            return "inside" if self._open else "last"
        return "inside"

    def _first(self, character: str) -> Literal["inside", "bad"]:
        if character in "{[":
            self._kind = "container"
            self._open.append(character)
        elif character == '"':
            self._kind, self._string = "string", True
        elif character in ",}]:" or character in _SPACE:
            return "bad"
        else:
            self._kind = "word"
        return "inside"


class ObjectScanner:
    """`take` each character from the opening brace on, while `state` is "open"; then it is "done" or "bad"."""

    def __init__(self) -> None:
        self.state: Literal["open", "done", "bad"] = "open"
        self._expects: Literal["brace", "key or end", "key", "in key", "colon", "value", "in value", "comma"] = "brace"
        self._key = ""
        self._string = ValueScanner()  # of the key
        self._value = ValueScanner()

    def take(self, character: str) -> list[ValueText]:
        match self._expects:
            case "in key":
                self._key += character
                if self._string.take(character) == "last":
                    self._expects = "colon"
                    try:
                        self._key = json.loads(self._key)
                    except ValueError:
                        self.state = "bad"
            case "in value":
                return self._in_value(character)
            case _ if character in _SPACE:
                pass
            case "brace" if character == "{":
                self._expects = "key or end"
            case "key or end" | "comma" if character == "}":
                self.state = "done"
            case "key or end" | "key" if character == '"':
                self._key, self._expects = '"', "in key"
                self._string = ValueScanner()
                self._string.take('"')
            case "colon" if character == ":":
                self._expects = "value"
            case "comma" if character == ",":
                self._expects = "key"
            case "value":
                self._value = ValueScanner()
                self._expects = "in value"
                return self._in_value(character)
            case _:
                self.state = "bad"
        return []

    def _in_value(self, character: str) -> list[ValueText]:
        match self._value.take(character):
            case "inside":
                return [ValueText(self._key, character, False)]
            case "last":
                self._expects = "comma"
                return [ValueText(self._key, character, True)]
            case "beyond":
                self._expects = "comma"
                return [ValueText(self._key, "", True), *self.take(character)]
            case _:
                self.state = "bad"
                return []
