"""The `openai` client, as it is, against a server whose engine says what it is told to."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.serve.stand_in import CARD, StandIn, served

openai = pytest.importorskip("openai")

WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
TWO_CALLS = (
    'Let me look.\n<tool_call>{"name": "get_weather", "arguments": {"city": "Vienna"}}</tool_call>\n'
    '<tool_call>{"name": "get_weather", "arguments": {"city": "Graz"}}</tool_call>'
)


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[Any, StandIn]]:
    with (
        served() as (server, engine),
        openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client, engine


@pytest.fixture
def client(running: tuple[Any, StandIn]) -> Any:
    return running[0]


def _say(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"say[{text}]yas"}]


@pytest.mark.quick
def test_a_conversation_is_answered(client: Any) -> None:
    answer = client.chat.completions.create(model="stand-in", messages=_say("Grüß Gott"))
    (choice,) = answer.choices
    assert choice.message.content == "Grüß Gott"
    assert choice.finish_reason == "stop"
    assert answer.usage.completion_tokens == len("Grüß Gott".encode())
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.quick
def test_events_join_to_the_whole_answer(client: Any) -> None:
    events = list(
        client.chat.completions.create(
            model="stand-in", messages=_say("Grüß Gott, 世界"), stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert text == "Grüß Gott, 世界"
    assert events[0].choices[0].delta.role == "assistant"
    assert [event.choices[0].finish_reason for event in events if event.choices][-1] == "stop"
    assert all(event.usage is None for event in events[:-1])
    assert events[-1].choices == []
    assert events[-1].usage.completion_tokens == len(text.encode())
    assert len({event.id for event in events}) == 1


def test_without_asking_there_is_no_usage_in_events(client: Any) -> None:
    events = list(client.chat.completions.create(model="stand-in", messages=_say("a"), stream=True))
    assert all(event.usage is None and event.choices for event in events)


def test_usage_so_far_comes_with_every_event_where_that_is_asked(client: Any) -> None:
    events = list(
        client.chat.completions.create(
            model="stand-in", messages=_say("abcdef"), stream=True, stream_options={"continuous_usage_stats": True}
        )
    )
    counts = [event.usage.completion_tokens for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 6


@pytest.mark.quick
def test_tool_calls_come_in_pieces_that_join(client: Any) -> None:
    whole = client.chat.completions.create(model="stand-in", messages=_say(TWO_CALLS), tools=[WEATHER]).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content == "Let me look."
    assert [call.function.name for call in whole.message.tool_calls] == ["get_weather"] * 2

    calls: dict[int, dict[str, str]] = {}
    text = ""
    for event in client.chat.completions.create(
        model="stand-in", messages=_say(TWO_CALLS), tools=[WEATHER], stream=True
    ):
        delta = event.choices[0].delta
        text += delta.content or ""
        for piece in delta.tool_calls or ():
            call = calls.setdefault(piece.index, {"id": piece.id, "name": piece.function.name, "arguments": ""})
            assert piece.id in (None, call["id"])
            call["arguments"] += piece.function.arguments
        finish = event.choices[0].finish_reason
    assert (text, finish) == ("Let me look.", "tool_calls")
    assert [json.loads(call["arguments"]) for _, call in sorted(calls.items())] == [
        {"city": "Vienna"},
        {"city": "Graz"},
    ]
    assert len({call["id"] for call in calls.values()}) == 2
    assert [call["arguments"] for call in calls.values()] == [
        call.function.arguments for call in whole.message.tool_calls
    ]


def test_the_clients_own_reader_of_streams_takes_them(client: Any) -> None:
    """It accumulates deltas and is strict about their order."""
    with client.chat.completions.stream(model="stand-in", messages=_say(TWO_CALLS), tools=[WEATHER]) as stream:
        final = stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Vienna", "Graz"]


def test_a_call_that_the_limit_cuts_in_two_is_not_said_to_be_one(client: Any) -> None:
    ends = {}
    for most in (TWO_CALLS.index("Vienna") + 3, TWO_CALLS.index("</tool_call>") + 3, len(TWO_CALLS) - 14):
        answer = client.chat.completions.create(
            model="stand-in", messages=_say(TWO_CALLS), tools=[WEATHER], max_tokens=most
        ).choices[0]
        ends[len(answer.message.tool_calls), answer.message.tool_calls[-1].function.arguments] = answer.finish_reason
    first, second = '{"city": "Vienna"}', '{"city": "Graz"}'
    assert list(ends.values()) == ["length", "tool_calls", "length"], ends
    assert [text for _, text in ends][1] == first
    assert second.startswith([text for _, text in ends][2])


def test_one_call_at_a_time_where_that_is_asked(running: tuple[Any, StandIn]) -> None:
    client, engine = running
    answer = client.chat.completions.create(
        model="stand-in", messages=_say(TWO_CALLS + "x" * 500), tools=[WEATHER], parallel_tool_calls=False
    )
    assert len(answer.choices[0].message.tool_calls) == 1
    assert answer.choices[0].finish_reason == "tool_calls"
    deadline = time.monotonic() + 60
    while not engine.cancelled:
        assert time.monotonic() < deadline, "the engine went on after the one call that was asked for"
        time.sleep(0.01)


def test_calls_are_text_where_no_tools_were_given(client: Any) -> None:
    answer = client.chat.completions.create(model="stand-in", messages=_say(TWO_CALLS))
    assert answer.choices[0].message.content == TWO_CALLS
    ignored = client.chat.completions.create(
        model="stand-in", messages=_say(TWO_CALLS), tools=[WEATHER], tool_choice="none"
    )
    assert ignored.choices[0].message.content == TWO_CALLS


def test_a_call_that_must_come_is_a_grammar_to_the_engine(running: tuple[Any, StandIn]) -> None:
    client, engine = running
    choice = {"type": "function", "function": {"name": "get_weather"}}
    client.chat.completions.create(model="stand-in", messages=_say("x"), tools=[WEATHER], tool_choice=choice)
    grammar = engine.seen[-1].sampling.grammar
    assert grammar is not None
    assert '"const": "get_weather"' in grammar
    assert ")*" not in grammar
    client.chat.completions.create(model="stand-in", messages=_say("x"), tools=[WEATHER], tool_choice="required")
    assert ")*" in (engine.seen[-1].sampling.grammar or "")


def test_a_tools_answer_goes_back_to_the_model(running: tuple[Any, StandIn]) -> None:
    client, engine = running
    called = client.chat.completions.create(model="stand-in", messages=_say(TWO_CALLS), tools=[WEATHER])
    message = called.choices[0].message
    history = [
        *_say("?"),
        message,
        *({"role": "tool", "tool_call_id": c.id, "content": "7 °C"} for c in message.tool_calls),
    ]
    client.chat.completions.create(model="stand-in", messages=history, tools=[WEATHER])
    from capibara.models.tokenizer import ByteTokenizer

    prompt = ByteTokenizer().decode(engine.seen[-1].prompt)
    assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Graz"}}</tool_call>' in prompt
    assert "tool\n7 °C" in prompt


def test_several_answers_have_seeds_of_their_own(running: tuple[Any, StandIn]) -> None:
    client, engine = running
    answer = client.chat.completions.create(model="stand-in", messages=_say("a"), n=3, seed=7, temperature=0.3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [request.sampling.seed for request in engine.seen[-3:]] == [7, 8, 9]
    assert engine.seen[-1].sampling.temperature == 0.3
    assert answer.usage.prompt_tokens == len(engine.seen[-1].prompt), "the prompt counts once"


def test_log_probabilities(client: Any) -> None:
    answer = client.chat.completions.create(model="stand-in", messages=_say("aé"), logprobs=True, top_logprobs=2)
    first, *rest = answer.choices[0].logprobs.content
    assert (first.token, first.logprob, first.bytes) == ("a", -0.5, [97])
    assert [top.logprob for top in first.top_logprobs] == [-1.0, -2.0]
    assert [one.bytes for one in rest] == [[0xC3], [0xA9]], "halves of a character, as bytes"


def test_prompts_of_every_kind(running: tuple[Any, StandIn]) -> None:
    client, engine = running
    texts = client.completions.create(model="stand-in", prompt=["say[ab]yas", "say[c]yas"], n=2)
    assert [choice.text for choice in texts.choices] == ["ab", "ab", "c", "c"]
    assert texts.usage.prompt_tokens == len("say[ab]yas") + len("say[c]yas")
    ids = client.completions.create(model="stand-in", prompt=[72, 105], max_tokens=1)
    assert (ids.choices[0].text, ids.choices[0].finish_reason) == ("H", "length")
    lists = client.completions.create(model="stand-in", prompt=[[72], [105]])
    assert [choice.text for choice in lists.choices] == ["H", "i"]
    echoed = client.completions.create(model="stand-in", prompt="say[ab]yas", echo=True)
    assert echoed.choices[0].text == "say[ab]yasab"
    events = client.completions.create(model="stand-in", prompt="say[abc]yas", echo=True, stream=True)
    assert "".join(event.choices[0].text for event in events) == "say[abc]yasabc"
    assert engine.seen[-1].sampling.max_tokens == 16


def test_log_probabilities_of_a_completion(client: Any) -> None:
    choice = client.completions.create(model="stand-in", prompt="say[ab]yas", logprobs=1).choices[0]
    assert choice.logprobs.tokens == ["a", "b"]
    assert choice.logprobs.text_offset == [0, 1]
    assert choice.logprobs.token_logprobs == [-0.5, -0.5]
    assert len(choice.logprobs.top_logprobs) == 2


def test_every_sampling_field_reaches_the_engine(running: tuple[Any, StandIn]) -> None:
    client, engine = running
    extra = {
        "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "stop_token_ids": [3], "ignore_eos": True,
        "include_stop_str_in_output": True,
    }  # fmt: skip
    client.chat.completions.create(
        model="pirate", messages=_say("a"), max_completion_tokens=9, top_p=0.5, presence_penalty=0.4,
        frequency_penalty=0.3, stop=["x", "y"], extra_body=extra, response_format={"type": "json_object"},
    )  # fmt: skip
    sampling = engine.seen[-1].sampling
    assert (sampling.max_tokens, sampling.top_p, sampling.top_k, sampling.min_p) == (9, 0.5, 5, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.4, 0.3, 1.2)
    assert (sampling.stop, sampling.stop_token_ids) == (("x", "y"), (3,))
    assert sampling.ignore_eos
    assert sampling.include_stop
    assert sampling.json_schema == {}
    assert sampling.adapter == "pirate"
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    client.chat.completions.create(
        model="stand-in", messages=_say("a"), stop="x", extra_body={},
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    )  # fmt: skip
    assert engine.seen[-1].sampling.json_schema == schema
    assert engine.seen[-1].sampling.adapter is None
    for form in ({"regex": "a+"}, {"grammar": 'start: "a"'}):
        client.chat.completions.create(model="stand-in", messages=_say("a"), extra_body=form)
        (name,) = form
        assert getattr(engine.seen[-1].sampling, name) == form[name]


def test_an_answer_may_fill_the_context_that_is_left(running: tuple[Any, StandIn]) -> None:
    client, engine = running
    client.chat.completions.create(model="stand-in", messages=_say("a"))
    assert engine.seen[-1].sampling.max_tokens == CARD.max_length - len(engine.seen[-1].prompt)


def test_models_are_listed_with_their_context(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["stand-in", "pirate"]
    assert client.models.retrieve("stand-in").max_model_len == CARD.max_length
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_a_model_without_embeddings_says_so(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="stand-in", input="x")
    assert caught.value.code == "model_has_no_embeddings"


def test_what_the_engine_refuses_is_a_bad_request(client: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nonsense"}}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="llguidance"):
            client.chat.completions.create(model="stand-in", messages=_say("a"), response_format=form, stream=stream)


async def _asked(address: str) -> str:
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(model="stand-in", messages=_say("abc"), stream=True)
        return "".join([event.choices[0].delta.content or "" async for event in stream])


def test_the_asynchronous_client(running: tuple[Any, StandIn]) -> None:
    import asyncio

    assert asyncio.run(_asked(str(running[0].base_url).removesuffix("/v1/"))) == "abc"
