"""What clients are sent: answers whole or in events, made of an engine's outputs."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from capibara.serve.http.prompts import Prompts
from capibara.serve.request import RequestOutput, TokenLogprobs, Usage
from capibara.serve.tools.calls import CallDelta, ToolParser

__all__ = ["Answer", "ChatAnswer", "ChatChoice", "CompletionAnswer", "CompletionChoice", "usage_body"]


class Answer(Protocol):
    """One call's answer, of several choices."""

    def put(self, number: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Take what came for a choice; the events that tell of it."""

    def finished(self, number: int) -> bool:
        """Whether a choice has all it is going to have, though the engine may go on."""

    def usage(self) -> dict[str, Any]: ...

    def usage_event(self) -> dict[str, Any]: ...

    def body(self) -> dict[str, Any]:
        """The whole answer, when all of it has come."""


def usage_body(usages: Iterable[Usage], prompts: int) -> dict[str, Any]:
    """Of all choices; choices of one prompt share it, and it counts once."""
    usages = list(usages)
    each = max(len(usages) // max(prompts, 1), 1)
    asked = sum(usage.prompt_tokens for usage in usages[::each])
    cached = sum(usage.cached_tokens for usage in usages[::each])
    written = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": asked,
        "completion_tokens": written,
        "total_tokens": asked + written,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class _Head:
    """The fields that an answer and its events begin with."""

    def __init__(self, prefix: str, kind: str, model: str, prompts: int, choices: int, prompt_tokens: Sequence[int]):
        self.id = f"{prefix}-{secrets.token_hex(12)}"
        self.kind = kind
        self.model = model
        self.created = int(time.time())
        self.prompts = prompts
        self.usages = [Usage(prompt_tokens[n], 0, 0) for n in range(choices)]

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def usage(self) -> dict[str, Any]:
        return usage_body(self.usages, self.prompts)


class ChatChoice:
    """One answer to a conversation, while it comes."""

    def __init__(self, parser: ToolParser | None, logprobs: bool, most_calls: int | None) -> None:
        self.parser = parser
        self.most_calls = most_calls
        self.with_logprobs = logprobs
        self.content = ""
        self.calls: list[dict[str, Any]] = []
        self.logprobs: list[dict[str, Any]] = []
        self.finish: str | None = None
        self.begun = False


class ChatAnswer(_Head):
    """`chat.completion`, and `chat.completion.chunk`."""

    def __init__(self, model: str, prompts: Prompts, choices: Sequence[ChatChoice], prompt_tokens: int) -> None:
        super().__init__("chatcmpl", "chat.completion", model, 1, len(choices), [prompt_tokens] * len(choices))
        self._prompts = prompts
        self._choices = choices

    def finished(self, number: int) -> bool:
        return self._choices[number].finish is not None

    def put(self, number: int, output: RequestOutput) -> list[dict[str, Any]]:
        choice = self._choices[number]
        if choice.finish is not None:
            return []
        self.usages[number] = output.usage
        pieces: list[Any] = []
        if choice.parser is None:
            pieces = [output.text] if output.text else []
        else:
            pieces = choice.parser.put(output.text)
            if output.finish_reason is not None:
                pieces += choice.parser.end()
        pieces = self._within(choice, pieces)
        logprobs = [_token(self._prompts, one) for one in output.logprobs or ()] if choice.with_logprobs else None
        choice.logprobs += logprobs or []
        enough = choice.most_calls is not None and choice.parser and choice.parser.whole >= choice.most_calls
        if output.finish_reason is not None or enough:
            choice.finish = "tool_calls" if choice.calls else output.finish_reason or "stop"
        deltas = [] if choice.begun else [{"role": "assistant", "content": ""}]
        choice.begun = True
        deltas += [_delta(piece) for piece in pieces]
        if not deltas and (choice.finish is not None or logprobs):
            deltas = [{}]
        events = []
        for place, delta in enumerate(deltas):
            last = place == len(deltas) - 1
            event = {
                "index": number,
                "delta": delta,
                "logprobs": {"content": logprobs, "refusal": None} if last and logprobs is not None else None,
                "finish_reason": None,
            }
            events.append(self.head("chat.completion.chunk") | {"choices": [event]})
        if choice.finish is not None:
            end = {"index": number, "delta": {}, "logprobs": None, "finish_reason": choice.finish}
            events.append(self.head("chat.completion.chunk") | {"choices": [end]})
        return events

    def _within(self, choice: ChatChoice, pieces: list[Any]) -> list[Any]:
        """Keep what came, and no more calls than were asked for."""
        kept = []
        for piece in pieces:
            if isinstance(piece, CallDelta):
                if choice.most_calls is not None and piece.index >= choice.most_calls:
                    continue
                if piece.id is not None:
                    function = {"name": piece.name, "arguments": piece.arguments}
                    choice.calls.append({"id": piece.id, "type": "function", "function": function})
                else:
                    choice.calls[piece.index]["function"]["arguments"] += piece.arguments
            else:
                choice.content += piece
            kept.append(piece)
        return kept

    def usage_event(self) -> dict[str, Any]:
        return self.head("chat.completion.chunk") | {"choices": [], "usage": self.usage()}

    def body(self) -> dict[str, Any]:
        choices = []
        for number, choice in enumerate(self._choices):
            message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
            if choice.calls:
                message |= {"content": choice.content or None, "tool_calls": choice.calls}
            logprobs = {"content": choice.logprobs, "refusal": None} if choice.with_logprobs else None
            choices.append({"index": number, "message": message, "logprobs": logprobs, "finish_reason": choice.finish})
        return self.head("chat.completion") | {"choices": choices, "usage": self.usage()}


def _delta(piece: Any) -> dict[str, Any]:
    if isinstance(piece, str):
        return {"content": piece}
    call: dict[str, Any] = {"index": piece.index}
    if piece.id is not None:
        call |= {"id": piece.id, "type": "function"}
    function = {"arguments": piece.arguments}
    if piece.name is not None:
        function = {"name": piece.name, **function}
    return {"tool_calls": [call | {"function": function}]}


def _token(prompts: Prompts, one: TokenLogprobs) -> dict[str, Any]:
    def shown(token: int, logprob: float) -> dict[str, Any]:
        text, raw = prompts.token_text(token)
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": raw}

    return shown(one.token, one.logprob) | {"top_logprobs": [shown(*top) for top in one.top]}


class CompletionChoice:
    """One continuation of a prompt, while it comes."""

    def __init__(self, echo: str, logprobs: int | None) -> None:
        self.echo = echo
        self.text = ""
        self.top = logprobs
        self.tokens: list[str] = []
        self.token_logprobs: list[float] = []
        self.top_logprobs: list[dict[str, float]] = []
        self.text_offset: list[int] = []
        self.offset = len(echo)
        self.finish: str | None = None
        self.begun = False


class CompletionAnswer(_Head):
    """`text_completion`, whole and in events."""

    def __init__(
        self, model: str, prompts: Prompts, choices: Sequence[CompletionChoice], prompt_tokens: Sequence[int]
    ) -> None:
        each = len(choices) // len(prompt_tokens)
        counted = [count for count in prompt_tokens for _ in range(each)]
        super().__init__("cmpl", "text_completion", model, len(prompt_tokens), len(choices), counted)
        self._prompts = prompts
        self._choices = choices

    def finished(self, number: int) -> bool:
        return self._choices[number].finish is not None

    def put(self, number: int, output: RequestOutput) -> list[dict[str, Any]]:
        choice = self._choices[number]
        self.usages[number] = output.usage
        fresh = output.text if choice.begun else choice.echo + output.text
        choice.begun = True
        choice.text += fresh
        choice.finish = output.finish_reason
        begin = len(choice.tokens)
        for one in output.logprobs or ():
            self._add_logprobs(choice, one)
        event = {
            "index": number,
            "text": fresh,
            "logprobs": _logprobs(choice, begin) if choice.top is not None else None,
            "finish_reason": choice.finish,
        }
        if not fresh and choice.finish is None and len(choice.tokens) == begin:
            return []
        return [self.head("text_completion") | {"choices": [event]}]

    def _add_logprobs(self, choice: CompletionChoice, one: TokenLogprobs) -> None:
        text, _ = self._prompts.token_text(one.token)
        choice.tokens.append(text)
        choice.token_logprobs.append(max(one.logprob, -9999.0))
        choice.top_logprobs.append(
            {self._prompts.token_text(token)[0]: max(value, -9999.0) for token, value in one.top}
        )
        choice.text_offset.append(choice.offset)
        choice.offset += len(text)

    def usage_event(self) -> dict[str, Any]:
        return self.head("text_completion") | {"choices": [], "usage": self.usage()}

    def body(self) -> dict[str, Any]:
        choices = [
            {
                "index": number,
                "text": choice.text,
                "logprobs": _logprobs(choice, 0) if choice.top is not None else None,
                "finish_reason": choice.finish,
            }
            for number, choice in enumerate(self._choices)
        ]
        return self.head("text_completion") | {"choices": choices, "usage": self.usage()}


def _logprobs(choice: CompletionChoice, begin: int) -> dict[str, Any]:
    return {
        "tokens": choice.tokens[begin:],
        "token_logprobs": choice.token_logprobs[begin:],
        "top_logprobs": choice.top_logprobs[begin:],
        "text_offset": choice.text_offset[begin:],
    }
