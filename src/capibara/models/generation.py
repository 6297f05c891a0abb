"""Text from a decoder: a prompt in one pass, then token after token from the cache, all rows in one program."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.errors import rule_error
from capibara.models import decoder

if TYPE_CHECKING:
    from capibara.models.config import ModularModelConfig

__all__ = ["generate", "sample"]

_PROMPT_STEP = 64
"""Prompts are padded to a multiple of this, so that few lengths are compiled."""


def sample(logits: jax.Array, key: jax.Array, temperature: Any, top_k: Any = 0, top_p: Any = 1.0) -> jax.Array:
    """A token of each row of [batch, vocab]: the likeliest at temperature 0, else drawn.

    With `top_k` the so many likeliest alone are drawn from, with `top_p` the fewest that have this share together. All
    three may be traced: one program draws in every way, and does of it what is asked for.
    """
    top_k, top_p = jnp.asarray(top_k, jnp.int32), jnp.asarray(top_p, jnp.float32)

    def least(logits: jax.Array) -> jax.Array:
        """Of the likeliest that are drawn from the least likely, [batch, 1]."""
        ordered = jnp.sort(logits, axis=-1, descending=True)
        last = jnp.where(top_k > 0, jnp.minimum(top_k, logits.shape[-1]), logits.shape[-1]) - 1
        of_k = jax.lax.dynamic_slice_in_dim(ordered, last, 1, axis=-1)
        share = jnp.cumsum(jax.nn.softmax(jnp.where(ordered < of_k, -jnp.inf, ordered), axis=-1), axis=-1)
        # The first that reaches the share is still in.
        count = jnp.sum(share < top_p, axis=-1, keepdims=True)
        of_p = jnp.take_along_axis(ordered, jnp.minimum(count, logits.shape[-1] - 1), axis=-1)
        return jnp.where(top_p < 1, jnp.maximum(of_k, of_p), of_k)

    def drawn(logits: jax.Array) -> jax.Array:
        logits = logits / temperature
        all_of_them = jnp.full((*logits.shape[:-1], 1), -jnp.inf, logits.dtype)
        cut = jax.lax.cond((top_k > 0) | (top_p < 1), least, lambda _: all_of_them, logits)
        return jax.random.categorical(key, jnp.where(logits < cut, -jnp.inf, logits), axis=-1)

    return jax.lax.cond(jnp.asarray(temperature) == 0, lambda x: jnp.argmax(x, axis=-1), drawn, logits)


def _checked(prompts: Sequence[Sequence[int]], max_tokens: int, model: ModularModelConfig) -> int:
    if not prompts or any(len(prompt) == 0 for prompt in prompts):
        raise rule_error("A prompt has a token or more", "an empty one", "start with the tokenizer's bos token")
    for prompt in prompts:
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= model.vocab:
            raise rule_error(
                f"Token ids are from 0 to {model.vocab - 1}", f"{low} to {high}", "use the model's own tokenizer"
            )
    if max_tokens < 1:
        raise rule_error("max_tokens is 1 or more", max_tokens, "use max_tokens=64")
    longest = max(len(prompt) for prompt in prompts)
    if longest + max_tokens > model.max_length:
        raise rule_error(
            f"Prompt and new tokens fit the model's context of {model.max_length}",
            f"{longest} + {max_tokens}",
            f"ask for {max(0, model.max_length - longest)} tokens or fewer, or shorten the prompt",
        )
    return longest


def _check_drawing(temperature: float, top_k: int, top_p: float, seed: int) -> None:
    if not temperature >= 0:
        raise rule_error(
            "temperature is 0 or more", temperature, "use 0 for the likeliest token, 1 for the model's odds"
        )
    if top_k < 0:
        raise rule_error("top_k is 0 or more", top_k, "use 0 to draw from all tokens")
    if not 0 <= top_p <= 1:
        raise rule_error("top_p is from 0 to 1", top_p, "use 1 to draw from all tokens")
    if not -(2**63) <= seed < 2**63:
        raise rule_error("seed is a 64-bit number", seed, "use a smaller one")


@functools.lru_cache(maxsize=32)
def _programs(holder: _Holder, words: int, dtype: Any) -> tuple[Any, Any]:
    model = holder.model

    def next_token(params: Any, x: jax.Array, key: jax.Array, drawing: Any) -> tuple[jax.Array, jax.Array]:
        scores = decoder.logits(model, params, x)
        if words < model.vocab:
            scores = jnp.where(jnp.arange(model.vocab) < words, scores, -jnp.inf)
        token = sample(scores, key, *drawing)
        chance = jax.nn.log_softmax(scores, axis=-1)
        return token, jnp.take_along_axis(chance, token[:, None], axis=-1)[:, 0]

    @functools.partial(jax.jit, donate_argnums=2)
    def first(params: Any, ids: jax.Array, cache: Any, lengths: jax.Array, key: jax.Array, drawing: Any) -> Any:
        x, cache = decoder.decode(model, params, ids, cache, jnp.zeros_like(lengths), lengths, dtype=dtype)
        last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
        return *next_token(params, last, key, drawing), cache

    @functools.partial(jax.jit, donate_argnums=2)
    def following(params: Any, token: jax.Array, cache: Any, start: jax.Array, key: jax.Array, drawing: Any) -> Any:
        x, cache = decoder.decode(model, params, token[:, None], cache, start, jnp.ones_like(start), dtype=dtype)
        return *next_token(params, x[:, 0], key, drawing), cache

    return first, following


class _Holder:
    """A config by its identity: its tables do not hash."""

    def __init__(self, model: ModularModelConfig) -> None:
        self.model = model

    def __hash__(self) -> int:
        return hash(self.model.to_toml())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Holder) and other.model == self.model


def generate(
    model: ModularModelConfig,
    params: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int = 64,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: Sequence[int] = (),
    words: int | None = None,
    dtype: Any = jnp.bfloat16,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(tokens, their log-probabilities), one of each row a step, until all rows are done.

    A row that has given one of the `stop` tokens gives -1 from then on. The programs are compiled once for each padded
    length, however tokens are drawn, and are kept. `words` is how many tokens the tokenizer has: ids beyond it, which
    fill a vocabulary up to a round number, stand for nothing and are not drawn.
    """
    longest = _checked(prompts, max_tokens, model)
    _check_drawing(temperature, top_k, top_p, seed)
    width = min(-(-longest // _PROMPT_STEP) * _PROMPT_STEP, model.max_length)
    ids = np.zeros((len(prompts), width), np.int32)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
    lengths = jnp.array([len(prompt) for prompt in prompts], jnp.int32)
    first, following = _programs(_Holder(model), words or model.vocab, jnp.dtype(dtype))
    drawing = (np.float32(temperature), np.int32(min(top_k, model.vocab)), np.float32(top_p))
    room = -(-(width + max_tokens) // _PROMPT_STEP) * _PROMPT_STEP
    cache = decoder.new_cache(model, len(prompts), room, dtype)
    key = jax.random.key(seed)
    token, chance, cache = first(params, jnp.asarray(ids), cache, lengths, jax.random.fold_in(key, 0), drawing)
    done = np.zeros(len(prompts), bool)
    for number in range(1, max_tokens + 1):
        shown = np.where(done, -1, np.asarray(token))
        yield shown, np.asarray(chance)
        done |= np.isin(shown, list(stop))
        if done.all() or number == max_tokens:
            return
        place = lengths + (number - 1)
        token, chance, cache = following(params, token, cache, place, jax.random.fold_in(key, number), drawing)
