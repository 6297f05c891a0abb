"""What the engine is asked and what it answers: plain frozen records that another process can be sent."""

from __future__ import annotations

import operator
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from capibara.errors import CapibaraError, rule_error

__all__ = [
    "MAX_LOGPROBS",
    "FinishReason",
    "QueueFull",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "TokenLogprobs",
    "Usage",
]

FinishReason = Literal["stop", "length", "cancelled", "error"]

MAX_LOGPROBS = 20
"""Of how many likeliest tokens a request may ask the log-probabilities: one compiled step serves every request."""


_LARGEST = 2**31 - 1
"""Of whole numbers that the device is told of."""


class QueueFull(CapibaraError, RuntimeError):
    """The engine's queue of waiting requests is full: try again later. Nothing was added."""


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are drawn and when it ends.

    The order is the field's usual one: penalties, grammar, temperature, then top_k, top_p and min_p, each on what the
    one before it left.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_k: int = 0
    """Draw from so many likeliest tokens; 0 from all."""
    top_p: float = 1.0
    """Draw from the fewest tokens that have this share together."""
    min_p: float = 0.0
    """Draw from tokens at least this likely, as a share of the likeliest."""
    repetition_penalty: float = 1.0
    """Logits of tokens in prompt or output are divided by it where positive, else multiplied."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens that are in the output."""
    frequency_penalty: float = 0.0
    """Taken off the logits of a token for each time that it is in the output."""
    seed: int | None = None
    """With a seed a request's draws are the same whatever it is batched with; without one the engine picks a seed."""
    logprobs: int | None = None
    """Log-probabilities of the drawn token and so many likeliest ones, by the model's own odds (before penalties,
    grammar and temperature)."""
    stop: tuple[str, ...] = ()
    """Strings that end the output; they are not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output; they are not part of its text."""
    spelled_token_ids: tuple[int, ...] = ()
    """Special tokens that the text spells out, where it would leave them out: those that mark a tool call."""
    include_stop: bool = False
    """Keep the stop string in the text."""
    ignore_eos: bool = False
    """Go on after the tokenizer's end-of-text tokens."""
    json_schema: str | dict[str, Any] | None = None
    """The output is JSON of this schema; {} is any JSON object."""
    regex: str | None = None
    """The output matches this regular expression."""
    grammar: str | None = None
    """The output is of this grammar, in the Lark form that llguidance reads."""
    adapter: str | None = None
    """The LoRA adapter that answers, by its name in the engine's config."""

    def __post_init__(self) -> None:
        self._check_kinds()
        for name, low, high in (
            ("max_tokens", 1, None),
            ("temperature", 0, 1_000_000),
            ("top_k", 0, _LARGEST),
            ("top_p", 0, 1),
            ("min_p", 0, 1),
            ("presence_penalty", -2, 2),
            ("frequency_penalty", -2, 2),
            ("logprobs", 0, MAX_LOGPROBS),
        ):
            value = getattr(self, name)
            if value is None:
                continue
            if not (low <= value and (high is None or value <= high)):
                between = f"{low} or more" if high is None else f"from {low} to {high}"
                nearest = low if high is None or value < low else high
                raise rule_error(f"{name} is {between}", value, f"use {name}={nearest}")
        if not 0.000001 <= self.repetition_penalty <= 1_000_000:  # the device's 32 bits would make it 0 or infinite
            raise rule_error(
                "repetition_penalty is above 0, a millionth to a million", self.repetition_penalty, "use 1 for none"
            )
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise rule_error("seed is a 64-bit number", self.seed, "use a smaller one")
        for name in ("stop_token_ids", "spelled_token_ids"):
            if wrong := [token for token in getattr(self, name) if not 0 <= token <= _LARGEST]:
                raise rule_error(f"{name} are token ids, from 0 to {_LARGEST}", wrong[0], "use the model's tokenizer")
        if any(not text for text in self.stop):
            raise rule_error("A stop string has a character or more", "an empty one", "leave it out")
        asked = [name for name in ("json_schema", "regex", "grammar") if getattr(self, name) is not None]
        if len(asked) > 1:
            raise rule_error(
                "Output is held to one of json_schema, regex and grammar", " and ".join(asked), f"keep {asked[0]}"
            )

    def _check_kinds(self) -> None:
        """Each field as what it is said to be, or refused: one that is not would be the whole engine's trouble."""
        for name in ("max_tokens", "top_k", "logprobs", "seed"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _whole_number(name, value))
        for name in (
            "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
        ):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, bool | str) or not hasattr(value, "__float__"):
                raise rule_error(f"{name} is a number", repr(value), f"leave {name} out")
            object.__setattr__(self, name, float(value))
        stop: Any = self.stop
        object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else tuple(stop))  # one, and not its letters
        if wrong := [text for text in self.stop if not isinstance(text, str)]:
            raise rule_error("stop is a text, or several", repr(wrong[0]), "use stop_token_ids for tokens")
        for name in ("stop_token_ids", "spelled_token_ids"):
            object.__setattr__(self, name, tuple(_whole_number(name, token) for token in getattr(self, name)))
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise rule_error(f"{name} is text", repr(getattr(self, name)), f"leave {name} out")

    @property
    def constrained(self) -> bool:
        """Whether a grammar says which tokens may come next."""
        return self.json_schema is not None or self.regex is not None or self.grammar is not None

    @property
    def penalised(self) -> bool:
        """Whether tokens that came before change the odds."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def _whole_number(name: str, value: Any) -> int:
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise rule_error(f"{name} is a whole number", repr(value), "round it, or leave it out")


@dataclass(frozen=True)
class Request:
    """A prompt to go on from. Its `id` is the caller's, and unlike that of any request that is still running."""

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    arrival: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        # Most are plain numbers already, thousands of them: to look is ten times as fast as to convert.
        prompt = tuple(self.prompt)
        if not set(map(type, prompt)) <= {int}:
            prompt = tuple(_whole_number("A token of a prompt", token) for token in prompt)
        object.__setattr__(self, "prompt", prompt)
        if not self.prompt:
            raise rule_error("A prompt has a token or more", "an empty one", "start with the tokenizer's bos token")


@dataclass(frozen=True)
class TokenLogprobs:
    """Of one token of the output: its log-probability, and the likeliest ones there as (token, log-probability)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


# Of the next two one is made a sequence and step: set field by field, as frozen dataclasses do it themselves, they
# would be a third of all that the host does.


@dataclass(frozen=True, init=False)
class Usage:
    """Tokens of a request so far."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Of the prompt, those whose keys and values were there already."""

    def __init__(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> None:
        vars(self).update(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, cached_tokens=cached_tokens)


@dataclass(frozen=True, init=False)
class RequestOutput:
    """What a step has brought one request. The last one has a `finish_reason`; after it nothing comes."""

    id: str
    tokens: tuple[int, ...]
    """New ones of the output; an end-of-text token or a stop token is the last of them."""
    text: str
    """New text. It is complete characters, and none of it may still turn out to be part of a stop string."""
    usage: Usage
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One a new token, where the request asked."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it; None for end of text."""
    error: str | None = None
    """What went wrong, where finish_reason is "error"."""
    rejected: bool = False
    """Whether it went wrong by the request's own doing: a grammar that cannot be read, or that grows too large."""
    waited_s: float | None = None
    """From its arrival until it first ran; None where it did not."""

    def __init__(
        self,
        id: str,
        tokens: tuple[int, ...],
        text: str,
        usage: Usage,
        logprobs: tuple[TokenLogprobs, ...] | None = None,
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
        error: str | None = None,
        rejected: bool = False,
        waited_s: float | None = None,
    ) -> None:
        vars(self).update(
            id=id, tokens=tokens, text=text, usage=usage, logprobs=logprobs, finish_reason=finish_reason,
            stop_reason=stop_reason, error=error, rejected=rejected, waited_s=waited_s,
        )  # fmt: skip
