"""/v1/chat/completions and /v1/completions: a body in, requests to the engine, an answer out."""

from __future__ import annotations

import secrets
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from capibara.serve.http.answers import Answer, ChatAnswer, ChatChoice, CompletionAnswer, CompletionChoice
from capibara.serve.http.delivery import EventStream, collect, until_taken
from capibara.serve.http.errors import bad_request
from capibara.serve.http.intake import decode, read_body
from capibara.serve.http.prompts import Prompts
from capibara.serve.http.sampling import check_choices, output_limit, sampling_params
from capibara.serve.http.schema import ChatRequest, CompletionRequest, NamedTool, StreamOptions
from capibara.serve.http.state import Serving
from capibara.serve.request import MAX_LOGPROBS, Request, SamplingParams
from capibara.serve.tools.grammar import call_grammar

__all__ = ["chat_completions", "completions"]

_COMPLETION_TOKENS = 16  # OpenAI's default, for prompts; conversations take what the context has left


async def chat_completions(http: HttpRequest) -> Response:
    serving: Serving = http.app.state.serving
    body = await _body(http, serving, ChatRequest)
    adapter = serving.adapter_of(body.model)
    prompts = serving.prompts
    n = check_choices(body)
    _check_logprobs(body.top_logprobs, "top_logprobs")
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs goes with logprobs: true. Got it alone. Fix: add it.", "top_logprobs")
    grammar = _forced_calls(body, prompts)
    ids = await serving.prepare(n, lambda: prompts.chat(body))
    _check_prompt(serving, ids, "messages")
    asked, word = body.max_completion_tokens, "max_completion_tokens"
    if asked is None:
        asked, word = body.max_tokens, "max_tokens"
    elif body.max_tokens not in (None, asked):
        raise bad_request(
            f"max_tokens is the older name of max_completion_tokens. Got {body.max_tokens} and {asked}. Fix: leave "
            f"max_tokens out.",
            "max_tokens",
        )
    limit = output_limit(asked, word, None, len(ids), prompts.card.max_length)
    parsing = bool(body.tools) and body.tool_choice != "none"
    names = [tool.function.name for tool in body.tools or ()]
    one_call = body.parallel_tool_calls is False or isinstance(body.tool_choice, NamedTool)
    more: dict[str, Any] = {"logprobs": (body.top_logprobs or 0) if body.logprobs else None}
    if grammar is not None:
        more["grammar"] = grammar
    if prompts.turn_ends and not body.ignore_eos:
        # The end of a turn is what the end of text is elsewhere, and a model that goes on plays the next one's part.
        more["stop_token_ids"] = (*(body.stop_token_ids or ()), *prompts.turn_ends)
    if parsing:
        special = prompts.tokenizer.special_tokens
        more["spelled_token_ids"] = tuple(special[m] for m in prompts.tool_parser.markers if m in special) or None
    more["defaults"] = prompts.card.sampling_defaults
    samplings = [sampling_params(body, choice=choice, max_tokens=limit, adapter=adapter, **more) for choice in range(n)]
    choices = [
        ChatChoice(prompts.tool_parser(names) if parsing else None, bool(body.logprobs), 1 if one_call else None)
        for _ in range(n)
    ]
    answer = ChatAnswer(body.model, prompts, choices, len(ids))
    return await _answer(http, serving, body, answer, [(ids, sampling) for sampling in samplings])


async def completions(http: HttpRequest) -> Response:
    serving: Serving = http.app.state.serving
    body = await _body(http, serving, CompletionRequest)
    adapter = serving.adapter_of(body.model)
    prompts = serving.prompts
    n = check_choices(body)
    _check_logprobs(body.logprobs, "logprobs")
    if body.suffix:
        raise bad_request(
            "suffix is not implemented: these models go on from a prompt. Got one. Fix: leave it out.",
            "suffix",
            code="unsupported_parameter",
        )
    if body.best_of is not None and body.best_of != n:
        raise bad_request(
            f"best_of is not implemented. Got best_of = {body.best_of} and n = {n}. Fix: leave it out, or ask for n "
            f"answers with logprobs and choose.",
            "best_of",
            code="unsupported_parameter",
        )
    if body.echo and body.logprobs is not None:
        raise bad_request(
            "logprobs are of new tokens alone. Got echo and logprobs, which asks for the prompt's too. Fix: leave one "
            "of them out.",
            "echo",
            code="unsupported_parameter",
        )
    # Before there is work for each: a body has room for millions of them.
    several = isinstance(body.prompt, list) and bool(body.prompt) and type(body.prompt[0]) is not int
    count = n * (len(body.prompt) if several else 1)
    encoded = await serving.prepare(count, lambda: prompts.completion(body))
    asked, choices = [], []
    for number, ids in enumerate(encoded):
        _check_prompt(serving, ids, "prompt" if len(encoded) == 1 else f"prompt[{number}]")
        limit = output_limit(body.max_tokens, "max_tokens", _COMPLETION_TOKENS, len(ids), prompts.card.max_length)
        for choice in range(n):
            sampling = sampling_params(
                body,
                choice=choice,
                max_tokens=limit,
                adapter=adapter,
                defaults=prompts.card.sampling_defaults,
                logprobs=body.logprobs,
            )
            asked.append((ids, sampling))
            choices.append(CompletionChoice(_echo(body, prompts, number, ids), body.logprobs))
    answer = CompletionAnswer(body.model, prompts, choices, [len(ids) for ids in encoded])
    return await _answer(http, serving, body, answer, asked)


async def _body(http: HttpRequest, serving: Serving, kind: Any) -> Any:
    raw = await read_body(http, serving.settings.max_body_bytes, serving.settings.client_timeout_s)
    serving.check_ready()  # after the body was read: whoever still writes would not see the answer
    return decode(raw, kind)


async def _answer(
    http: HttpRequest,
    serving: Serving,
    body: ChatRequest | CompletionRequest,
    answer: Answer,
    asked: list[tuple[list[int], SamplingParams]],
) -> Response:
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options go with stream: true. Got them without. Fix: add it.", "stream_options")
    serving.check_room(len(asked))
    # Not by the request's id, which is the client's to choose.
    own = secrets.token_hex(8)
    requests = [Request(f"{own}-{n}", tuple(ids), sampling) for n, (ids, sampling) in enumerate(asked)]
    group = serving.engine.submit(requests, _form(body))
    http.state.group, http.state.answer = group, answer
    timeout_s = serving.settings.request_timeout_s
    if not body.stream:
        return await collect(group, answer, http.receive, timeout_s)
    # A refusal has a status of its own, as long as none was sent.
    deadline = await until_taken(group, http.receive, timeout_s)
    client_timeout_s = serving.settings.client_timeout_s
    return EventStream(group, answer, body.stream_options or StreamOptions(), timeout_s, deadline, client_timeout_s)


def _form(body: ChatRequest | CompletionRequest) -> str | None:
    """The field that holds an answer to a form, where one does."""
    for field in ("regex", "grammar", "response_format"):
        value = getattr(body, field)
        if value is not None and getattr(value, "type", None) != "text":
            return field
    return "tools" if isinstance(body, ChatRequest) and body.tools else None


def _check_prompt(serving: Serving, ids: list[int], where: str) -> None:
    most = serving.prompts.card.max_prompt
    if len(ids) > most:
        raise bad_request(
            f"A prompt has {most} tokens at the most on this server. Got {len(ids)}. Fix: shorten it.",
            where,
            code="context_length_exceeded",
        )


def _check_logprobs(asked: int | None, param: str) -> None:
    if asked is not None and not 0 <= asked <= MAX_LOGPROBS:
        raise bad_request(f"{param} is from 0 to {MAX_LOGPROBS}. Got {asked}. Fix: ask for fewer.", param)


def _echo(body: CompletionRequest, prompts: Prompts, number: int, ids: list[int]) -> str:
    if not body.echo:
        return ""
    if isinstance(body.prompt, str):
        return body.prompt
    text = body.prompt[number] if isinstance(body.prompt[0], str) else prompts.tokenizer.decode(ids)
    return str(text)


def _forced_calls(body: ChatRequest, prompts: Prompts) -> str | None:
    """The grammar of calls that must come, where the request says so."""
    if body.tool_choice in (None, "none", "auto"):
        return None
    if not body.tools:
        raise bad_request("tool_choice goes with tools. Got none. Fix: add tools.", "tools")
    tools = {tool.function.name: tool.function.parameters or {"type": "object"} for tool in body.tools}
    if isinstance(body.tool_choice, NamedTool):
        name = body.tool_choice.function.name
        if name not in tools:
            raise bad_request(
                f"tool_choice names one of the tools. Got {name!r}. Fix: use one of {', '.join(tools)}.",
                "tool_choice.function.name",
            )
        tools = {name: tools[name]}
    constrained = body.response_format is not None and body.response_format.type != "text"
    if constrained or body.grammar is not None or body.regex is not None:
        raise bad_request(
            "An answer is held to one form. Got a tool_choice that asks for a call, and another form. Fix: leave out "
            "response_format, grammar and regex.",
            "tool_choice",
        )
    assert prompts.tokenizer.chat_template is not None
    return call_grammar(
        prompts.tool_parser,
        list(tools.items()),
        prompts.tokenizer.special_tokens,
        several=body.parallel_tool_calls is not False and body.tool_choice == "required",
        template=prompts.tokenizer.chat_template,
    )
