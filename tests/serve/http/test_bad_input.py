"""Every mistake is a 4xx in OpenAI's shape that names the field; the server goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.serve.http.wire import CHAT, ask, call, connect, post, raw_request
from tests.serve.stand_in import CARD, served

from capibara.serve.http.errors import STATUSES

COMPLETIONS = "/v1/completions"
DEEP = "[" * 20_000
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served(max_body_bytes=100_000) as (server, _):
        yield server.address


def _check(
    answer: tuple[int, Any, dict[str, str]], status: int, param: str | None = None, code: str | None = None
) -> str:
    got, body, _ = answer
    assert got == status, body
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == STATUSES[status][0]
    assert error["param"] == param, error
    if code is not None:
        assert error["code"] == code
    assert error["message"]
    return str(error["message"])


@pytest.mark.quick
@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"null", "invalid_type"),
        (b"[]", "invalid_type"),
        (json.dumps(ask("x")).encode() + b" x", "invalid_json"),
        (b'{"temperature": NaN}', "invalid_json"),
        (b'{"model": "\xff\xfe"}', "invalid_utf8"),
        ('{"model": "é"}'.encode("utf-16"), "invalid_json"),
        (b'{"model": "\\ud800"}', "invalid_json"),
        (b'{"metadata": ' + b'{"a":' * 15_000, "invalid_json"),
        (b'{"chat_template_kwargs": {"a": ' + b"[" * 90_000, "invalid_json"),
    ],
)
def test_what_is_no_json_object_in_utf8(address: str, body: bytes, code: str | None) -> None:
    _check(post(address, body), 400, code=code)
    assert post(address, ask("still here"))[0] == 200


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"model": None}, "model"),
        ({"messages": "hello"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        (
            {"messages": [{"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}}]},
            "messages[0].function_call",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{"}}]}
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": -3}, "top_k"),
        ({"presence_penalty": 9}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"n": 0}, "n"),
        ({"n": 10_000}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": 10_000}, "max_completion_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 2}, "max_tokens"),
        ({"seed": 2**70}, "seed"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"every_token": True}}, "stream_options.every_token"),
        ({"top_k": 2**40}, "top_k"),
        ({"top_k": 2**70}, "top_k"),
        ({"stop_token_ids": [2**70]}, "stop_token_ids"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tools"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
        ),
        ({"tools": [TOOL], "tool_choice": "required", "regex": "a"}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_object", "json_schema": {"name": "a", "schema": {"type": "array"}}}},
            "response_format.json_schema",
        ),
        ({"regex": "a", "grammar": "b"}, None),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self"),
        ({"chat_template_kwargs": {"template": ""}}, "chat_template_kwargs.template"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": DEEP}}]}
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"temprature": 1}, "temprature"),
    ],
)
def test_a_wrong_field_is_named(address: str, change: dict[str, Any], param: str | None) -> None:
    body = {name: value for name, value in (ask("x") | change).items() if value is not None}
    _check(post(address, body), 400, param)


def test_the_fix_is_the_nearest_value_that_may_be(address: str) -> None:
    for value, nearest in ((9, 2), (-9, -2)):
        text = _check(post(address, ask("x", presence_penalty=value)), 400, "presence_penalty")
        assert text.endswith(f"use presence_penalty={nearest}.")


def test_both_names_of_a_limit_may_say_the_same_and_all_tokens_have_two_names() -> None:
    with served() as (server, engine):
        assert post(server.address, ask("x", max_tokens=3, max_completion_tokens=3, top_k=-1))[0] == 200
        assert (engine.seen[0].sampling.max_tokens, engine.seen[0].sampling.top_k) == (3, 0)


def test_a_schema_that_cannot_be_passed_on_is_refused_alone(address: str) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"maximum": 2**70}}}
    for stream in (False, True):
        _check(post(address, ask("x", response_format=schema, stream=stream)), 400, code="invalid_value")
    assert post(address, ask("still here"))[0] == 200


@pytest.mark.quick
def test_a_field_that_is_not_there_is_shown_the_nearest(address: str) -> None:
    text = _check(post(address, ask("x", temprature=1)), 400, "temprature", "unknown_parameter")
    assert "Did you mean 'temperature'" in text


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [1, 259]}, "prompt[1]"),
        ({"prompt": [[1], [-1]]}, "prompt[1][0]"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 99}, "logprobs"),
        ({"echo": True, "logprobs": 1}, "echo"),
    ],
)
def test_a_wrong_field_of_a_completion_is_named(address: str, change: dict[str, Any], param: str) -> None:
    body = {"model": "stand-in", "prompt": "x", **change}
    _check(post(address, body, COMPLETIONS), 400, param)


def test_a_prompt_that_is_too_long(address: str) -> None:
    text = _check(post(address, ask("x" * CARD.max_length)), 400, "messages", "context_length_exceeded")
    assert str(CARD.max_prompt) in text
    ids = {"model": "stand-in", "prompt": [1] * CARD.max_prompt, "max_tokens": 2}
    _check(post(address, ids, COMPLETIONS), 400, "max_tokens", "context_length_exceeded")


@pytest.mark.quick
def test_a_model_that_is_not_there(address: str) -> None:
    for path in (CHAT, COMPLETIONS, "/v1/embeddings"):
        field = {CHAT: "messages", COMPLETIONS: "prompt"}.get(path, "input")
        value = [{"role": "user", "content": "x"}] if path == CHAT else "x"
        _check(post(address, {"model": "gpt-9", field: value}, path), 404, "model", "model_not_found")


def test_paths_and_methods_that_are_not_there(address: str) -> None:
    _check(call(address, "GET", "/v1/nothing"), 404, code="unknown_url")
    answer = call(address, "GET", CHAT)
    _check(answer, 405, code="method_not_allowed")
    assert answer[2]["allow"] == "POST"


def test_a_body_that_is_too_large_is_not_read(address: str) -> None:
    _check(post(address, b" " * 100_001), 413, code="request_too_large")
    with connect(address) as client:  # one that does not say how long it is
        client.sendall(raw_request(b"", "Transfer-Encoding: chunked"))
        chunk = b"8000\r\n" + b" " * 0x8000 + b"\r\n"
        for _ in range(4):
            client.sendall(chunk)
        assert client.recv(4096).startswith(b"HTTP/1.1 413")
    with connect(address) as client:  # one that says it will be, and sends nothing
        client.sendall(raw_request(b"", "Content-Length: 99999999999"))
        assert client.recv(4096).startswith(b"HTTP/1.1 413")


def test_who_sends_too_large_a_body_is_told_so_and_not_cut_off(address: str) -> None:
    """Most clients write all of a body before they read anything; a connection that is reset tells them nothing."""
    _check(post(address, b" " * (16 << 20)), 413, code="request_too_large")
    openai = pytest.importorskip("openai")
    asking = openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0)
    with pytest.raises(openai.APIStatusError, match="A body has 100,000 bytes") as told:
        asking.chat.completions.create(**ask("x" * (16 << 20)))
    assert told.value.status_code == 413
    with connect(address) as client:  # one that never ends its body
        client.sendall(raw_request(b"", "Content-Length: 99999999999") + b" " * 1000)
        assert b"".join(iter(lambda: client.recv(4096), b"")).startswith(b"HTTP/1.1 413"), "and is hung up on"
    assert post(address, ask("still here"))[0] == 200


def test_a_body_of_another_kind(address: str) -> None:
    _check(post(address, b"a=b", headers={"Content-Type": "application/x-www-form-urlencoded"}), 415)


def test_what_is_not_http(address: str) -> None:
    for data in (b"\x16\x03\x01\x02\x00\x01\x00", b"\r\n\r\nnonsense\r\n\r\n"):
        with connect(address) as client:
            client.sendall(data)
            answer = b"".join(iter(lambda: client.recv(4096), b""))
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400"), answer
        assert json.loads(body)["error"]["code"] == "invalid_http"


def test_a_template_that_reaches_out_of_its_sandbox(address: str) -> None:
    from capibara.models.tokenizer import ByteTokenizer
    from capibara.serve.http.prompts import check_template

    for escape in (
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
    ):
        with pytest.raises(ValueError, match="A chat template works on its messages alone"):
            check_template(ByteTokenizer(escape))
    check_template(ByteTokenizer("{{ raise_exception('a system turn first, please') }}"))


def test_a_template_that_reaches_out_is_refused_when_asked_too() -> None:
    """Where it does so for some messages alone, no look at the start finds it."""
    hidden = "{% if messages | length > 1 %}{{ messages.__class__.__base__ }}{% endif %}{{ messages[0]['content'] }}"
    with served(chat_template=hidden) as (server, _):
        assert post(server.address, ask("a"))[0] == 200
        body = ask("a")
        body["messages"] *= 2
        text = _check(post(server.address, body), 400, "messages", "chat_template")
        assert "SecurityError" in text
        text = _check(post(server.address, ask("a", tools=[TOOL])), 400, "tools", "unsupported_parameter")
        assert "takes no tools" in text


def test_the_guide_lists_every_status() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "serving.md").read_text(encoding="utf-8")
    for status, (kind, meaning) in STATUSES.items():
        assert f"| {status} | `{kind}` | {meaning} |" in guide
