"""How an engine runs: its cache, its batches, its programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capibara.errors import rule_error, unknown_name

if TYPE_CHECKING:
    import jax

__all__ = ["EngineConfig", "check_target"]

CACHE_DTYPES = ("float32", "bfloat16", "int8")
WEIGHT_DTYPES = ("int8",)


def check_target(milliseconds: float | None) -> None:
    """Refuse a latency that is no time."""
    number = isinstance(milliseconds, int | float) and not isinstance(milliseconds, bool)
    if milliseconds is not None and not (number and milliseconds > 0):
        raise rule_error("target_latency_ms is a number above 0", repr(milliseconds), "use None for no target")


@dataclass(frozen=True)
class EngineConfig:
    """What an `Engine` is made with; every default is for one accelerator with room to spare."""

    max_sequences: int = 256
    """Requests that run at a time."""
    max_batch_tokens: int = 2048
    """Tokens of one step, prompts' and new ones together."""
    prefill_chunk: int | None = None
    """Prompt tokens of one step at most; what `max_batch_tokens` leaves when None."""
    max_length: int | None = None
    """Prompt and output of a request together; the model's context when None."""
    max_queue: int = 1024
    """Requests that wait; one more is refused with `QueueFull`."""
    page_size: int = 64
    """Tokens of a page of the cache."""
    pages: int | None = None
    """Of the cache; as many as `memory_share` leaves room for when None."""
    memory_share: float = 0.85
    """Of the device's memory, weights and cache together."""
    cache_dtype: str | None = None
    """float32, bfloat16 or int8 (with a scale a token and head); the model's type of computation when None, and float32
    on a CPU, which has no smaller ones: keys and values of bfloat16 are the same numbers in it."""
    prefix_sharing: bool = True
    """Full pages of a prompt whose tokens were seen before are used again."""
    decode_steps: int = 8
    """Steps that one program takes when nothing waits and no running request needs the host between them."""
    overlap: bool | None = None
    """Launch the kernels of such a program one by one, each before the one before it is done (Hopper): where the host
    is fast enough when None, by a rule; True and False say so. It changes no token."""
    asynchronous: bool = True
    """Send the next step before the last one's tokens are here; a request's end is then seen a step late."""
    speculative_tokens: int = 0
    """Tokens drafted by n-gram look-up in what a request has so far, and verified in one step; 0 drafts none."""
    speculative_ngram: int = 3
    """The longest run of last tokens that a draft is looked up by."""
    weights: str | None = None
    """int8: each weight of a product as 8-bit numbers with a scale an output channel; as they are when None."""
    adapters: Mapping[str, Any] = field(default_factory=dict)
    """LoRA adapters that a request may name: `LoraAdapter`s, or folders: of LoRA runs, or as PEFT saves them."""
    keep_keys: bool = True
    """Keep keys and values from token to token; False computes every token before it anew, to compare with."""
    attention: str | None = None
    """The implementation of `paged_attention`, by name; the fastest that takes the call when None."""
    mesh: jax.sharding.Mesh | None = None
    """Devices to spread weights and cache over, by the model's own logical axes."""
    batch_invariant: bool = False
    """The same bits whatever a request is batched with: every step in one shape, that of a full one, and attention in
    one part. A lone token then costs a full step; models that keep a state are refused."""
    seed: int = 0
    """Of requests that bring none."""
    cache_folder: Path | str | None = None
    """Where compiled programs are kept, so that a second start compiles nothing; nowhere when None."""

    def __post_init__(self) -> None:
        for name in (
            "max_sequences", "max_batch_tokens", "prefill_chunk", "max_length", "max_queue", "page_size", "pages",
            "decode_steps", "speculative_ngram",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise rule_error(f"{name} of an engine is 1 or more", value, f"leave {name} out")
        if self.speculative_tokens < 0:
            raise rule_error("speculative_tokens is 0 or more", self.speculative_tokens, "use 0 for none")
        if not 0 < self.memory_share <= 1:
            raise rule_error("memory_share is above 0 and at most 1", self.memory_share, "use 0.85")
        if self.max_batch_tokens < self.max_sequences * (1 + self.speculative_tokens):
            raise rule_error(
                "max_batch_tokens has room for a token, and its drafted ones, of every running sequence",
                f"max_batch_tokens = {self.max_batch_tokens}, max_sequences = {self.max_sequences}, "
                f"speculative_tokens = {self.speculative_tokens}",
                f"use max_batch_tokens = {self.max_sequences * (1 + self.speculative_tokens)} or more",
            )
        if self.cache_dtype is not None and self.cache_dtype not in CACHE_DTYPES:
            raise unknown_name("cache_dtype", self.cache_dtype, CACHE_DTYPES)
        if self.weights is not None and self.weights not in WEIGHT_DTYPES:
            raise unknown_name("weights", self.weights, WEIGHT_DTYPES)
