"""The bodies that clients send, typed: what does not fit is refused with the path of the field.

A field that is not here is refused by its name: a request whose `top_k` was spelled otherwise would be answered as if
it had none. What OpenAI's interface has and this server has not is here with the values that change nothing.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "EmbeddingRequest",
    "FunctionTool",
    "Message",
    "NamedTool",
    "ResponseFormat",
    "StreamOptions",
]


class _Strict(msgspec.Struct, forbid_unknown_fields=True):
    """Of these fields and no others."""


class StreamOptions(_Strict, kw_only=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    """Usage so far with every event, as vLLM has it: a benchmark counts tokens by it."""


class JsonSchemaFormat(_Strict, kw_only=True):
    name: str = ""
    description: str | None = None
    schema: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    strict: bool | None = None


class ResponseFormat(_Strict, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class Function(_Strict, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(_Strict, kw_only=True):
    type: Literal["function"]
    function: Function


class NamedFunction(_Strict, kw_only=True):
    name: str


class NamedTool(_Strict, kw_only=True):
    type: Literal["function"]
    function: NamedFunction


class CalledFunction(_Strict, kw_only=True):
    name: str
    arguments: str


class ToolCall(_Strict, kw_only=True):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None


class Message(_Strict, kw_only=True):
    """A turn."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # What clients send back with an answer that they were given; no template here reads it.
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: Any = None


class _Sampled(_Strict, kw_only=True):
    """What both kinds of completion take."""

    model: str
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    # Beyond OpenAI's, by the names that other servers have for them.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    regex: str | None = None
    grammar: str | None = None
    response_format: ResponseFormat | None = None


class ChatRequest(_Sampled, kw_only=True):
    messages: list[Message]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Of no consequence here.
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionRequest(_Sampled, kw_only=True):
    prompt: str | list[Any] = ""
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class EmbeddingRequest(_Strict, kw_only=True):
    model: str
    input: str | list[Any]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
