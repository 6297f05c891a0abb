"""What a model reads of a conversation: its own template, or the default one, and tools in both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.serve.http.wire import ask, post
from tests.serve.stand_in import CARD, served

from capibara.models.chat import DEFAULT_TEMPLATE, render, template_variables
from capibara.models.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from capibara.serve.http.errors import ApiError
from capibara.serve.http.prompts import DEFAULT_TOOL_TEMPLATE, Prompts
from capibara.serve.http.schema import ChatRequest, CompletionRequest
from capibara.serve.tools.formats import HermesParser, Llama3Parser, MistralParser

TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "does", "parameters": {"type": "object"}, "strict": True},
}


def _prompts(own: str | None = None, tokenizer: Tokenizer | None = None, **options: Any) -> Prompts:
    return Prompts(tokenizer or ByteTokenizer(own), CARD, **options)


def _chat(*messages: dict[str, Any], **fields: Any) -> ChatRequest:
    return msgspec.convert({"model": "m", "messages": list(messages), **fields}, ChatRequest)


def _text(prompts: Prompts, body: ChatRequest) -> str:
    return prompts.tokenizer.decode(prompts.chat(body), special=True)


USER = {"role": "user", "content": "Hi"}


@pytest.mark.quick
def test_without_tools_the_default_is_what_training_has() -> None:
    turns = [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "Hi."}, USER]
    variables = {"bos_token": "<b>", "end_of_turn": "<e>"}
    ours = render(DEFAULT_TOOL_TEMPLATE, turns, True, **variables)
    assert ours == render(DEFAULT_TEMPLATE, turns, True, **variables)


def test_parts_of_a_turn_are_joined_and_a_refusal_that_comes_back_is_one() -> None:
    parts = [{"type": "text", "text": "Hi"}, {"type": "input_text", "text": "there"}]
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert _text(_prompts(), _chat({"role": "user", "content": parts}, refused, USER)) == _text(
        _prompts(), _chat({"role": "user", "content": "Hi\nthere"}, {"role": "assistant", "content": "No."}, USER)
    )
    for wrong in ({"type": "refusal", "text": "No."}, {"type": "text"}, {"text": "Hi"}, {"type": ["text"], "text": ""}):
        with pytest.raises(ApiError, match="A part of a turn is text"):
            _text(_prompts(), _chat({"role": "user", "content": [wrong]}))


def test_the_default_shows_tools_and_calls() -> None:
    called = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, 2]}'}}
    body = _chat(
        {"role": "developer", "content": "Be brief."}, USER, {"role": "assistant", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c", "content": "3"}, tools=[TOOL],
    )  # fmt: skip
    text = _text(_prompts(), body)
    assert text.count("Be brief.") == 1, "a developer's turn is the system's"
    assert '"name": "f"' in text.split("Hi")[0], "tools come before the conversation"
    assert "strict" not in text
    assert '<tool_call>{"name": "f", "arguments": {"a": [1, 2]}}</tool_call>' in text
    assert text.endswith("<|im_start|>assistant\n")
    without = _text(_prompts(), _chat(USER, tools=[TOOL], tool_choice="none"))
    assert '"name": "f"' not in without


def test_parts_of_a_turn_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "one\ntwo" in _text(_prompts(), _chat({"role": "user", "content": parts}))


def test_a_models_own_template_and_what_it_reads(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    engine = tokenizers.Tokenizer(tokenizers.models.BPE({chr(code): code - 32 for code in range(32, 127)}, []))
    engine.decoder = tokenizers.decoders.Fuse()
    engine.add_special_tokens(["<s>", "[TOOL_CALLS]"])
    engine.save(str(tmp_path / "tokenizer.json"))
    template = (
        "{{ bos_token }}{% if tools %}{{ tools | tojson }}[TOOL_CALLS]{% endif %}{{ messages[-1].content }}{{ mood }}"
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "chat_template": template}))
    prompts = _prompts(tokenizer=load_tokenizer(tmp_path))
    assert prompts.tool_parser is MistralParser
    body = _chat(USER, chat_template_kwargs={"mood": "!"})
    ids = prompts.chat(body)
    assert ids[0] == prompts.tokenizer.bos_id
    assert prompts.tokenizer.decode(ids, special=True) == "<s>Hi!"
    assert '"description": "does"' in _text(prompts, _chat(USER, tools=[TOOL]))
    assert prompts.token_text(prompts.tokenizer.special_tokens["<s>"]) == ("<s>", list(b"<s>"))
    assert prompts.token_text(10_000) == ("", None), "a row of the model's table that is no token"


def test_a_template_and_a_parser_may_be_given() -> None:
    given = _prompts("{{ tools }}<tool_call>", template="{{ messages[0].content }}", tool_parser="llama3")
    assert given.tool_parser is Llama3Parser
    assert _text(given, _chat(USER)) == "Hi"
    with pytest.raises(ApiError, match="takes no tools"):
        given.chat(_chat(USER, tools=[TOOL]))
    assert _prompts("{{ tools }}<tool_call>").tool_parser is HermesParser


def test_an_answer_ends_where_its_template_ends_a_turn() -> None:
    turns = "{{% for m in messages %}}{{{{ m.role + m.content + '{}' }}}}{{% endfor %}}"
    assert _prompts().turn_ends == (), "the end of text, which ends it anyway"
    assert _prompts(turns.format("<|pad|>")).turn_ends == (258,)
    assert _prompts(turns.format(".")).turn_ends == ()
    assert _prompts("{{ raise_exception('no') }}").turn_ends == ()
    with served(chat_template=turns.format("<|pad|>")) as (server, engine):
        for fields, stops in (
            ({}, (258,)),
            ({"stop_token_ids": [7]}, (7, 258)),
            ({"ignore_eos": True, "stop_token_ids": [7]}, (7,)),
        ):
            assert post(server.address, ask("x", **fields))[0] == 200
            assert engine.seen[-1].sampling.stop_token_ids == stops


def test_which_names_a_template_reads() -> None:
    assert template_variables("{% set a = 1 %}{{ a }}{{ tools }}{% for m in messages %}{{ m }}{% endfor %}") == {
        "tools",
        "messages",
    }


def test_a_prompt_of_text_begins_as_documents_did() -> None:
    card = msgspec.structs.replace(CARD, prompt_bos=True)
    prompts = Prompts(ByteTokenizer(), card)
    assert prompts.completion(CompletionRequest(model="m", prompt="a")) == [[256, 97]]
    assert prompts.completion(CompletionRequest(model="m", prompt="")) == [[256]]
    assert prompts.completion(CompletionRequest(model="m", prompt="<|eos|>"))[0][1:] == list(b"<|eos|>")
    assert prompts.completion(CompletionRequest(model="m", prompt=[[1], [2, 3]])) == [[1], [2, 3]]
