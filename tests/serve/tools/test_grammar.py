"""Grammars of tool calls, held against llguidance itself: calls of the tools are taken, anything else is not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from capibara.serve.tools.formats import PARSERS, MistralParser, parser_of
from capibara.serve.tools.grammar import call_grammar

llguidance = pytest.importorskip("llguidance")

ADD = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
POINT = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/pair"}},
    "required": ["at"],
    "additionalProperties": False,
    "$defs": {"pair": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}},
}
TOOLS: list[tuple[str, dict[str, Any]]] = [("add", ADD), ("point", POINT)]


def _taken(grammar: str, text: str) -> bool:
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, grammar)
    assert not matcher.get_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def _call(form: str, *calls: tuple[str, dict[str, Any]]) -> str:
    word = "parameters" if form == "llama3" else "arguments"
    objects = [json.dumps({"name": name, word: arguments}) for name, arguments in calls]
    if form == "hermes":
        return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
    return "; ".join(objects) if form == "llama3" else f"[TOOL_CALLS][{', '.join(objects)}]"


@pytest.mark.quick
@pytest.mark.parametrize("form", PARSERS)
def test_calls_of_the_tools_and_nothing_else(form: str) -> None:
    parser = parser_of(form)
    one = call_grammar(parser, TOOLS, {}, several=False)
    assert _taken(one, _call(form, ("add", {"a": 3})))
    assert _taken(one, _call(form, ("point", {"at": [1, 2]}))), "a reference inside of a tool's schema"
    assert not _taken(one, _call(form, ("add", {"a": "3"})))
    assert not _taken(one, _call(form, ("add", {})))
    assert not _taken(one, _call(form, ("subtract", {"a": 3})))
    assert not _taken(one, "I would rather not.")
    two = _call(form, ("add", {"a": 3}), ("add", {"a": 4}))
    assert not _taken(one, two)
    several = call_grammar(parser, TOOLS, {}, several=True)
    assert _taken(several, two)
    # What is taken is what the parser reads.
    pieces = [*(reader := parser(["add"])).put(two), *reader.end()]
    assert [getattr(piece, "name", None) for piece in pieces if getattr(piece, "name", None)] == ["add", "add"]


@pytest.mark.parametrize("template", ["", "... [ARGS] ..."])
@pytest.mark.parametrize("form", PARSERS)
def test_white_space_inside_of_a_call_comes_to_an_end(form: str, template: str) -> None:
    """A model that may write any number of spaces and line ends may write nothing else."""
    call = _call(form, ("add", {"a": 3}))
    if form == "mistral" and template:
        call = '[TOOL_CALLS]add[ARGS]{"a": 3}'
    grammar = call_grammar(parser_of(form), TOOLS, {}, several=False, template=template)
    assert _taken(grammar, call)
    assert _taken(grammar, call.replace(": ", ":").replace(", ", ","))
    for space in ("  ", "\n"):
        assert not _taken(grammar, call.replace('"a": ', f'"a":{space}'))
    own = [("add", {**ADD, "x-guidance": {"whitespace_flexible": True}})]
    free = call_grammar(parser_of(form), own, {}, several=False, template=template)
    assert _taken(free, call.replace('"a": ', '"a" :\n'))


def test_the_newer_form_of_mistral() -> None:
    grammar = call_grammar(MistralParser, TOOLS, {}, several=True, template="... [ARGS] ...")
    assert _taken(grammar, '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 2}')
    assert not _taken(grammar, '[TOOL_CALLS]sub[ARGS]{"a": 1}')


def test_a_marker_that_is_a_token_is_named_by_its_id() -> None:
    assert "<[5]>" in call_grammar(MistralParser, TOOLS, {"[TOOL_CALLS]": 5}, several=False)
    assert '"[TOOL_CALLS]"' in call_grammar(MistralParser, TOOLS, {}, several=False)
