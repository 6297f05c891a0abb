"""Output held to a schema, a regular expression or a grammar, from a model that would write noise."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from tests.serve.engines import engine_of, model_of, prompts_of, run, tokens_of, wanted

from capibara.models.tokenizer import ByteTokenizer
from capibara.serve import QueueFull, Request, SamplingParams, grammar

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["capybara", "otter"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "legs"],
    "additionalProperties": False,
}


def answer(programs: Path, **changes: Any) -> tuple[str, str | None]:
    engine = engine_of(model_of("attention"), programs)
    (prompt,) = prompts_of(6)
    asked = SamplingParams(max_tokens=48, temperature=1.0, seed=1, **changes)
    outputs = run(engine, [Request("a", prompt, asked)])["a"]
    assert engine.stats().pages_used == 0
    return "".join(output.text for output in outputs), outputs[-1].finish_reason


@pytest.mark.quick
def test_json_of_a_schema(programs: Path) -> None:
    text, reason = answer(programs, json_schema=SCHEMA)
    said = json.loads(text)
    assert reason == "stop"
    assert set(said) == {"name", "legs"}
    assert said["name"] in ("capybara", "otter")
    assert 0 <= said["legs"] <= 9
    assert answer(programs, json_schema=json.dumps(SCHEMA)) == (text, reason)


def test_json_has_a_space_or_none_where_there_may_be_some() -> None:
    grammars = grammar.Grammars(ByteTokenizer())
    asked = SamplingParams(json_schema=SCHEMA)
    taken = {'{"name":"otter","legs":4}': True, '{"name": "otter", "legs": 4}': True, '{"name":  "otter"': False}
    for text, right in {**taken, '{\n"name"': False}.items():
        begun = grammars.start(asked)
        walk = begun.result(30) if isinstance(begun, Future) else begun
        assert all(walk.take(byte) for byte in text.encode()) is right, text
    grammars.close()


def test_a_regular_expression_and_a_grammar(programs: Path) -> None:
    text, reason = answer(programs, regex=r"[a-f]{3}-[0-9]{2}")
    assert re.fullmatch(r"[a-f]{3}-[0-9]{2}", text)
    assert reason == "stop"
    text, reason = answer(programs, grammar='start: "yes" | "no" ("," "no")~1..3')
    assert text in ("yes", "no,no", "no,no,no", "no,no,no,no")
    assert reason == "stop"


def test_the_likeliest_token_that_is_allowed_is_drawn_and_others_are_left_alone(programs: Path) -> None:
    engine = engine_of(model_of("attention"), programs)
    prompts = prompts_of(6, 9)
    held = SamplingParams(max_tokens=8, temperature=0, regex="[0-9]+")
    free = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    tokens = tokens_of(run(engine, [Request("held", prompts[0], held), Request("free", prompts[1], free)]))
    assert tokens["free"] == wanted("attention", prompts[1])
    *digits, last = tokens["held"]
    assert all(48 <= token < 58 for token in digits)
    assert 48 <= last < 58 or last == engine.tokenizer.eos_id


@pytest.mark.parametrize(
    ("changes", "text"),
    [({"json_schema": "{"}, "A JSON schema is JSON"), ({"json_schema": "[]"}, "A JSON schema is an object")],
)
def test_what_is_no_schema_is_said_at_once(changes: dict[str, Any], text: str, programs: Path) -> None:
    engine = engine_of(model_of("attention"), programs)
    with pytest.raises(ValueError, match=text):
        engine.add(Request("a", (1, 2), SamplingParams(**changes)))
    assert not engine.has_work()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"json_schema": {"type": "nonsense"}}, "A JSON schema is one that llguidance takes"),
        ({"regex": "("}, "A regular expression is one that llguidance takes"),
        ({"grammar": "start: nowhere"}, "A grammar is one that llguidance takes"),
    ],
)
def test_what_is_no_grammar_ends_its_request_before_it_runs(changes: dict[str, Any], text: str, programs: Path) -> None:
    engine = engine_of(model_of("attention"), programs)
    (output,) = run(engine, [Request("a", (1, 2), SamplingParams(**changes))])["a"]
    assert (output.finish_reason, output.rejected, output.tokens) == ("error", True, ())
    assert text in str(output.error)
    assert engine.stats().steps == 0


class _SlowReading:
    """`Grammars._begin`, which waits until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.begun: list[str] = []
        begin = grammar.Grammars._begin

        def slow(grammars: grammar.Grammars, library: Any, text: str, kind: str) -> Any:
            self.begun.append(text)
            assert self.go.wait(30)
            return begin(grammars, library, text, kind)

        monkeypatch.setattr(grammar.Grammars, "_begin", slow)


def test_others_are_served_while_a_grammar_is_read(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = _SlowReading(monkeypatch)
    engine = engine_of(model_of("attention"), programs)
    prompts = prompts_of(6, 9)
    engine.add(Request("held", prompts[0], SamplingParams(max_tokens=8, temperature=0, regex="[0-9]+")))
    engine.add(Request("free", prompts[1], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)))
    assert (engine.stats().compiling, engine.stats().waiting) == (1, 2)
    outputs = []
    while not any(output.finish_reason for output in outputs):
        outputs += engine.step()
    assert {output.id for output in outputs} == {"free"}
    assert [token for output in outputs for token in output.tokens] == wanted("attention", prompts[1])
    assert engine.compiling("held")
    assert engine.has_work()
    reading.go.set()
    held = []
    while engine.has_work():
        held += engine.step()
    assert not engine.compiling("held")
    assert re.fullmatch("[0-9]+", "".join(output.text for output in held))


def test_a_request_is_cancelled_while_its_grammar_is_read(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = _SlowReading(monkeypatch)
    engine = engine_of(model_of("attention"), programs)
    asked = SamplingParams(max_tokens=4, regex="[0-9]+")
    engine.add(Request("a", (1, 2), asked))
    with pytest.raises(ValueError, match="unlike that of any that is running"):
        engine.add(Request("a", (1, 2), asked))
    assert engine.cancel("a")
    assert [(output.id, output.finish_reason) for output in engine.step()] == [("a", "cancelled")]
    assert not engine.has_work()
    reading.go.set()
    outputs = run(engine, [Request("a", (1, 2), asked)])["a"]  # what was read meanwhile is there for others
    assert outputs[-1].finish_reason in ("stop", "length")
    assert len(set(reading.begun)) == 1


def test_grammars_that_nobody_waits_for_any_more_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that sends large ones and goes away holds up nobody: they were never read."""
    reading = _SlowReading(monkeypatch)
    grammars = grammar.Grammars(ByteTokenizer())
    asked = [grammars.start(SamplingParams(regex=f"{number}+")) for number in range(40)]
    again = grammars.start(SamplingParams(regex="39+"))  # one of them somebody else wants too
    for brought in asked:
        assert isinstance(brought, Future)
        brought.cancel()
    last = grammars.start(SamplingParams(regex="[a-z]"))
    reading.go.set()
    for brought in (again, last):
        assert isinstance(brought, Future)
        assert not brought.result(30).complete
    assert len(reading.begun) <= grammar._READERS + 2
    assert grammars._readers is not None
    grammars._readers.shutdown()  # those begun before their clients went away are read to the end
    assert not grammars._reading
    grammars.close()


def test_requests_whose_grammars_are_read_count_as_waiting(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = _SlowReading(monkeypatch)
    engine = engine_of(model_of("attention"), programs, max_sequences=1, max_queue=2)
    for number in range(3):  # one may run, two may wait
        engine.add(Request(str(number), (1, 2), SamplingParams(max_tokens=2, regex=f"[0-9]+{number}")))
    with pytest.raises(QueueFull):
        engine.add(Request("more", (1, 2), SamplingParams(max_tokens=2, regex="[a-z]+")))
    assert len(reading.begun) <= grammar._READERS  # the others wait for a reader
    reading.go.set()
    engine.close()


def test_a_grammar_that_grows_too_large_ends_its_request_and_says_why(programs: Path) -> None:
    engine = engine_of(model_of("attention"), programs)
    (prompt,) = prompts_of(6)
    # Accepted at first: how large it grows is seen when it is walked.
    asked = SamplingParams(max_tokens=4, grammar='start: "a" start')
    outputs = run(engine, [Request("a", prompt, asked)])["a"]
    assert outputs[-1].finish_reason == "error"
    assert outputs[-1].rejected
    assert outputs[-1].error is not None
    assert "Too many items" in outputs[-1].error
    assert "\n" not in outputs[-1].error.strip()
    assert engine.stats().pages_used == 0


def test_a_grammar_is_read_once_and_each_request_walks_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "_KEPT", 4)
    monkeypatch.setattr(grammar, "_LONGEST", 200)
    read: list[str] = []
    begin = grammar.Grammars._begin

    def counted(self: grammar.Grammars, library: Any, text: str, kind: str) -> Any:
        read.append(text)
        return begin(self, library, text, kind)

    monkeypatch.setattr(grammar.Grammars, "_begin", counted)
    grammars = grammar.Grammars(ByteTokenizer())

    def started(pattern: str) -> grammar.Grammar:
        start = grammars.start(SamplingParams(regex=pattern))
        return start.result(30) if isinstance(start, Future) else start

    first, second = (started("abc") for _ in range(2))
    assert len(read) == 1
    assert [first.take(token) for token in b"ab"] == [True, True]
    assert not second.take(ord("b")), "it is at its beginning, wherever the other one is"
    for pattern in "wxyz":
        started(pattern)
    assert len(read) == 5
    started("z")
    started("abc")  # the longest unused, and gone
    assert len(read) == 6
    assert len(grammars._begun) <= 4
    with pytest.raises(ValueError, match="has 200 characters at the most"):
        grammars.start(SamplingParams(regex="a" * 201))
    grammars.close()
