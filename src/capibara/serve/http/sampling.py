"""A request's fields as the engine's sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from capibara.errors import parts_of
from capibara.serve.http.errors import ApiError, bad_request
from capibara.serve.http.schema import ChatRequest, CompletionRequest, ResponseFormat
from capibara.serve.request import SamplingParams

__all__ = ["check_choices", "output_limit", "sampling_params"]

MOST_CHOICES = 128
MOST_STOPS = 16


def check_choices(body: ChatRequest | CompletionRequest) -> int:
    """How many answers to a prompt."""
    n = 1 if body.n is None else body.n
    if not 1 <= n <= MOST_CHOICES:
        raise bad_request(f"n is from 1 to {MOST_CHOICES}. Got {n}. Fix: ask for fewer.", "n")
    return n


def output_limit(asked: int | None, param: str, default: int | None, prompt: int, max_length: int) -> int:
    """How many tokens an answer may have, beside a prompt of so many."""
    room = max_length - prompt
    if room < 1:
        raise bad_request(
            f"This model's context is {max_length} tokens, prompt and answer together. Got a prompt of {prompt}. "
            f"Fix: shorten it.",
            "messages" if default is None else "prompt",
            code="context_length_exceeded",
        )
    if asked is None:
        return room if default is None else min(default, room)
    if asked < 1:
        raise bad_request(f"{param} is 1 or more. Got {asked}. Fix: leave {param} out.", param)
    if asked > room:
        raise bad_request(
            f"This model's context is {max_length} tokens, prompt and answer together. Got {prompt + asked}: a "
            f"prompt of {prompt}, and {param} = {asked}. Fix: use {param} = {room} or less.",
            param,
            code="context_length_exceeded",
        )
    return asked


def sampling_params(
    body: ChatRequest | CompletionRequest,
    *,
    choice: int,
    max_tokens: int,
    adapter: str | None,
    defaults: Mapping[str, float],
    **more: Any,
) -> SamplingParams:
    """Of one answer.

    Args:
      defaults: the model's own, for what the body says nothing of.
      more: parameters that do not stand in the body as they are.
    """
    if body.logit_bias:
        raise bad_request(
            "logit_bias is not implemented. Got one. Fix: leave it out; grammar and regex hold an answer to a form.",
            "logit_bias",
            code="unsupported_parameter",
        )
    if isinstance(body.stop, list) and len(body.stop) > MOST_STOPS:
        raise bad_request(f"stop has {MOST_STOPS} strings at the most. Got {len(body.stop)}. Fix: use fewer.", "stop")
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    given = {
        "temperature": body.temperature,
        "top_k": 0 if body.top_k == -1 else body.top_k,  # as vLLM's clients write "all"
        "top_p": body.top_p,
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "ignore_eos": body.ignore_eos,
        "include_stop": body.include_stop_str_in_output,
        "stop_token_ids": None if body.stop_token_ids is None else tuple(body.stop_token_ids),
        "regex": body.regex,
        "grammar": body.grammar,
        "json_schema": _schema(body.response_format),
        # Answers to one prompt are to differ, and each to be drawn anew from its own seed.
        "seed": None if body.seed is None else body.seed + choice,
        **more,
    }
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            stop=stop,
            adapter=adapter,
            **{**defaults, **{name: value for name, value in given.items() if value is not None}},
        )
    except ValueError as error:
        raise _of_field(error) from None


def _of_field(error: ValueError) -> ApiError:
    words = (parts_of(error)["rule"] or "").replace("A stop string", "stop").split()
    field = words[0] if words else ""
    return bad_request(str(error), field if field in ChatRequest.__struct_fields__ else None)


def _schema(form: ResponseFormat | None) -> dict[str, Any] | None:
    if form is not None and form.type != "json_schema" and form.json_schema is not None:
        raise bad_request(
            f"response_format has a json_schema where its type is json_schema. Got one with {form.type!r}. Fix: use "
            f'"type": "json_schema", or leave it out.',
            "response_format.json_schema",
        )
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {}
    if form.json_schema is None or isinstance(form.json_schema.schema, msgspec.UnsetType):
        raise bad_request(
            "response_format of type json_schema has json_schema.schema. Got none. Fix: add it.",
            "response_format.json_schema.schema",
            code="missing_required_parameter",
        )
    return form.json_schema.schema
