"""Tool calls: the same however the text is cut, the same as a parse of the whole, and nothing of the text lost."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from capibara.serve.tools.calls import CallDelta, Piece, ToolParser, joined
from capibara.serve.tools.formats import PARSERS, HermesParser, Llama3Parser, MistralParser, parser_for, parser_of

NAMES = ("get_weather", "add", "é")


def _parse(parser: ToolParser, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Text and calls (name, arguments), as a client joins them."""
    text, calls = "", []
    out: list[Piece] = []
    for piece in pieces:
        out += parser.put(piece)
    for piece in [*out, *parser.end()]:
        if isinstance(piece, str):
            text += piece
        elif piece.id is not None:
            assert piece.index == len(calls)
            assert piece.name
            calls.append((piece.name, piece.arguments))
        else:
            assert piece.index == len(calls) - 1, "a piece of a call that is over"
            name, arguments = calls[-1]
            calls[-1] = (name, arguments + piece.arguments)
    return text, calls


def _cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
_ARGUMENTS = st.dictionaries(st.text(max_size=4), _JSON, max_size=3)
_CALLS = st.lists(st.tuples(st.sampled_from(NAMES), _ARGUMENTS), min_size=1, max_size=3)
_PLACES = st.lists(st.integers(0, 10_000), max_size=12)
_LAYOUT = st.sampled_from([None, 1, 2])


def _object(name: str, arguments: object, word: str, indent: int | None) -> str:
    return json.dumps({"name": name, word: arguments}, indent=indent, ensure_ascii=False)


def _written(form: str, calls: list[tuple[str, dict]], indent: int | None) -> str:
    if form == "hermes":
        return "\n".join(f"<tool_call>\n{_object(*call, 'arguments', indent)}\n</tool_call>" for call in calls)
    if form == "llama3":
        return "; ".join(_object(*call, "parameters", indent) for call in calls)
    if indent == 1:
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)
    if indent == 2:
        return "".join(f"[TOOL_CALLS]{name}{json.dumps(arguments)}" for name, arguments in calls)
    return "[TOOL_CALLS][" + ", ".join(_object(*call, "arguments", indent) for call in calls) + "]"


@settings(max_examples=60)
@pytest.mark.parametrize("form", PARSERS)
@given(calls=_CALLS, indent=_LAYOUT, places=_PLACES)
def test_calls_are_read_however_the_text_is_cut(form: str, calls: list, indent: int | None, places: list[int]) -> None:
    said = "" if form == "llama3" else "Let me see."
    text = said + ("\n" if said else "") + _written(form, calls, indent)
    shown, found = _parse(parser_of(form)(NAMES), _cut(text, places))
    assert shown == said
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


@pytest.mark.quick
@pytest.mark.parametrize("form", PARSERS)
@given(
    text=st.lists(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", '{"name": "add"', '"arguments"',
             '"parameters"', '"name"', ": ", ", ", "{", "}", "[", "]", '"', "\\", ";", "\n", " ", "add", "<", "1"]
        )
        | st.text(max_size=3),
        max_size=16,
    ).map("".join),
    places=_PLACES,
)  # fmt: skip
@example(text='<tool_call>{"arguments": {"a": "}"}, "name": "add"}</tool_call> end', places=[3, 14, 30])
@example(text='<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', places=[40])
def test_any_text_is_read_the_same_however_it_is_cut(form: str, text: str, places: list[int]) -> None:
    whole = _parse(parser_of(form)(NAMES), [text])
    assert _parse(parser_of(form)(NAMES), _cut(text, places)) == whole
    assert _parse(parser_of(form)(NAMES), list(text)) == whole
    if not whole[1]:
        assert whole[0] == text


@given(calls=_CALLS)
def test_hermes_is_what_a_regular_expression_finds(calls: list) -> None:
    text = "Yes.\n" + _written("hermes", calls, None)
    objects = [json.loads(one) for one in re.findall(r"<tool_call>\n(.*)\n</tool_call>", text)]
    _, found = _parse(HermesParser(), [text])
    assert [{"name": name, "arguments": json.loads(arguments)} for name, arguments in found] == objects


@pytest.mark.quick
def test_names_and_arguments_come_as_soon_as_they_are_certain() -> None:
    parser = HermesParser()
    assert parser.put('ok <tool_call>{"name": "add') == ["ok"]
    (start,) = parser.put('"')
    assert isinstance(start, CallDelta)
    assert (start.index, start.name, start.arguments) == (0, "add", "")
    assert start.id
    assert parser.put(', "arguments": {"a": [1') == [CallDelta(0, arguments='{"a": [1')]
    assert parser.put("]}}") == [CallDelta(0, arguments="]}")]
    assert parser.whole == 1


def test_a_call_without_arguments_has_empty_ones() -> None:
    assert _parse(HermesParser(), ['<tool_call>{"name": "now"}</tool_call>']) == ("", [("now", "{}")])


def test_a_call_that_is_cut_off_keeps_what_came() -> None:
    assert _parse(HermesParser(), ['<tool_call>{"name": "f", "arguments": {"a"']) == ("", [("f", '{"a"')])
    assert _parse(HermesParser(), ['<tool_call>{"na']) == ('<tool_call>{"na', [])


def test_llama_takes_a_json_answer_for_an_answer() -> None:
    answer = '{"name": "Ada", "born": 1815}'
    assert _parse(Llama3Parser(NAMES), [answer]) == (answer, [])
    assert _parse(Llama3Parser(NAMES), ['<|python_tag|>{"name": "Ada", "parameters": {}}']) == ("", [("Ada", "{}")])


def test_ids_are_unlike_each_other_and_what_templates_take() -> None:
    two = "[TOOL_CALLS]" + json.dumps([{"name": "f", "arguments": {}}] * 2)
    ids = [piece.id for piece in MistralParser().put(two) if isinstance(piece, CallDelta) and piece.id]
    assert len(set(ids)) == 2
    assert all(re.fullmatch("[A-Za-z0-9]{9}", id) for id in ids)


def test_a_template_says_which_format_its_model_writes() -> None:
    assert parser_for("... <tool_call> ...") is HermesParser
    assert parser_for("... [AVAILABLE_TOOLS] [TOOL_CALLS] ...") is MistralParser
    assert parser_for("<|start_header_id|>") is Llama3Parser
    with pytest.raises(ValueError, match=r"Unknown tool parser 'herms'. Did you mean 'hermes'"):
        parser_of("herms")


def test_neighbours_of_a_kind_are_one_piece() -> None:
    assert joined(["a", "", "b", CallDelta(0, "x", "f"), CallDelta(0, arguments="{}"), "c"]) == [
        "ab",
        CallDelta(0, "x", "f", "{}"),
        "c",
    ]
