"""Tool calls that must come: a grammar under which an answer is calls of the given tools and nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from capibara.serve.grammar import JSON_SPACING
from capibara.serve.tools.calls import ToolParser
from capibara.serve.tools.formats import HermesParser, Llama3Parser, MistralParser

__all__ = ["call_grammar"]


def call_grammar(
    parser: type[ToolParser],
    tools: Sequence[tuple[str, Mapping[str, Any]]],
    special_tokens: Mapping[str, int],
    *,
    several: bool,
    template: str = "",
) -> str:
    """In Lark's form, as llguidance reads it.

    Args:
      parser: the format.
      tools: (name, JSON schema of the arguments) of each that may be called.
      special_tokens: spelling -> id: a marker that is a token of its own is named by its id.
      several: whether more than one call may come.
      template: the model's chat template, which shows which of a family's forms it was trained on.
    """

    def mark(text: str) -> str:
        return f"<[{special_tokens[text]}]>" if text in special_tokens else json.dumps(text)

    def one(word: str) -> str:
        return "obj: " + " | ".join(f"obj_{n}" for n in range(len(tools))) + "\n" + "\n".join(
            f"obj_{n}: %json {json.dumps(_call_schema(name, schema, word))}" for n, (name, schema) in enumerate(tools)
        )  # fmt: skip

    if parser is HermesParser:
        repeated = ' ("\\n" call)*' if several else ""
        opening, closing = mark(HermesParser.opening), mark(HermesParser.closing)
        return f'start: call{repeated}\ncall: {opening} "\\n" obj "\\n" {closing}\n{one("arguments")}\n'
    if parser is Llama3Parser:
        repeated = ' ("; " obj)*' if several else ""
        return f"start: obj{repeated}\n{one('parameters')}\n"
    assert parser is MistralParser, parser
    opening = mark(MistralParser.opening)
    if "[ARGS]" in template or "[ARGS]" in special_tokens:
        forms = " | ".join(f"named_{n}" for n in range(len(tools)))
        rules = "\n".join(
            f"named_{n}: {json.dumps(name)} {mark('[ARGS]')} value_{n}\nvalue_{n}: %json {json.dumps(_spaced(schema))}"
            for n, (name, schema) in enumerate(tools)
        )
        return f"start: call{'+' if several else ''}\ncall: {opening} ({forms})\n{rules}\n"
    repeated = ' (", " obj)*' if several else ""
    return f'start: {opening} "[" obj{repeated} "]"\n{one("arguments")}\n'


def _call_schema(name: str, schema: Mapping[str, Any], word: str) -> dict[str, Any]:
    call: dict[str, Any] = {
        "type": "object",
        "properties": {"name": {"const": name}, word: {"type": "object", **schema}},
        "required": ["name", word],
        "additionalProperties": False,
    }
    # References in a tool's schema are from its own root, and so is what it says of white space.
    inner = call["properties"][word]
    if "x-guidance" in inner:
        call["x-guidance"] = inner.pop("x-guidance")
    for definitions in ("$defs", "definitions"):
        if definitions in inner:
            call[definitions] = inner.pop(definitions)
    return _spaced(call)


def _spaced(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with our spacing, where it has none of its own."""
    return {"x-guidance": JSON_SPACING, **schema}
