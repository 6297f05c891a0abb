"""Drawing tokens on the device: every parameter is an array with a number a row, so that one program serves all.

A row's draw hangs on its logits, its request's seed and the number of the token in its sequence, and on nothing else:
neither on the rows beside it, nor on how many tokens a step drew. That is also what makes speculation exact: a guessed
token is right where it is the one that the row draws anyway, so that a request gives the same tokens with and without
guesses, at every temperature. (Seen as chances: the guess g is taken with the chance p(g), and what comes in its place
has the chances p without g, which is rejection sampling for a guess that is certain of itself.)
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from capibara.serve.request import MAX_LOGPROBS

__all__ = ["FORMS", "Counts", "Form", "Rows", "draw", "logprobs"]

Form = Literal["greedy", "drawn", "filtered", "full", "penalised"]
FORMS: tuple[Form, ...] = ("greedy", "drawn", "filtered", "full", "penalised")
"""What a program can do, each all of the one before it: the likeliest token; a temperature; top_k, top_p and min_p;
grammars and log-probabilities; penalties. A batch runs the least that its requests ask for, and a row's token is the
same in each."""


class Rows(NamedTuple):
    """What each row asks for; [rows] each."""

    number: jax.Array
    """Of the token to be drawn, in its sequence."""
    seed_high: jax.Array
    seed_low: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    slot: jax.Array
    """Of the row's sequence; past the last where nothing is drawn."""


class Counts(NamedTuple):
    """Of the tokens that a sequence has, for penalties; [slots, vocab] each."""

    output: jax.Array
    """How often each is in the output."""
    prompt: jax.Array
    """Whether each is in the prompt."""


def draw(
    logits: jax.Array, rows: Rows, form: Form, *, counts: Counts | None = None, allowed: jax.Array | None = None
) -> jax.Array:
    """A token of each row of [rows, vocab].

    Args:
      counts: what penalties are reckoned from.
      allowed: which tokens a grammar allows, a bit each: uint32 [rows, vocab / 32].
    """
    if counts is not None:
        logits = _penalised(logits, rows, counts)
    if allowed is not None:
        logits = jnp.where(_bits(allowed, logits.shape[-1]), logits, -jnp.inf)
    likeliest = jnp.argmax(logits, axis=-1)
    if form == "greedy":
        return likeliest
    # Of less than a millionth the quotients of several tokens may all be infinite, and the likeliest one is lost.
    warm = jnp.where(rows.temperature > 0, jnp.maximum(rows.temperature, 1e-6), 1)
    logits = logits / warm[:, None]
    if form != "drawn":
        logits = _filtered(logits, rows)
    # The largest of logits with Gumbel noise is a draw by their odds.
    return jnp.where(rows.temperature > 0, jnp.argmax(logits + _noise(rows, logits.shape[-1]), axis=-1), likeliest)


def logprobs(logits: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The log-probability of each row's token, and those of its likeliest: ([rows], tokens, log-probabilities)."""
    chance = jax.nn.log_softmax(logits, axis=-1)
    own = jnp.take_along_axis(chance, token[:, None], axis=-1)[:, 0]
    top, tokens = jax.lax.top_k(chance, min(MAX_LOGPROBS, logits.shape[-1]))
    return own, tokens, top


def _noise(rows: Rows, vocab: int) -> jax.Array:
    def of_row(high: jax.Array, low: jax.Array, number: jax.Array) -> jax.Array:
        data = jax.lax.bitcast_convert_type(jnp.stack([high, low]), jnp.uint32)
        key = jax.random.fold_in(jax.random.wrap_key_data(data, impl="threefry2x32"), number)
        return jax.random.gumbel(key, (vocab,), jnp.float32)

    return jax.vmap(of_row)(rows.seed_high, rows.seed_low, rows.number)


def _penalised(logits: jax.Array, rows: Rows, counts: Counts) -> jax.Array:
    output = counts.output.at[rows.slot].get(mode="fill", fill_value=0).astype(jnp.float32)
    prompt = counts.prompt.at[rows.slot].get(mode="fill", fill_value=False)
    seen = prompt | (output > 0)
    repetition = rows.repetition_penalty[:, None]
    logits = jnp.where(seen, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits = logits - rows.frequency_penalty[:, None] * output
    return logits - rows.presence_penalty[:, None] * (output > 0)


def _bits(allowed: jax.Array, vocab: int) -> jax.Array:
    bits = (allowed[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(allowed.shape[0], -1)[:, :vocab] != 0


def _filtered(logits: jax.Array, rows: Rows) -> jax.Array:
    """Minus infinity for what top_k, top_p and min_p leave out.

    Each keeps the logits from some value up. The value is found bit by bit, 32 passes over the logits for each: sorting
    them all takes longer, and does more than is asked.
    """
    vocab = logits.shape[-1]
    order = _ordered(logits)
    top_k = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocab), vocab)
    lowest = _highest_where(lambda at: (order >= at[:, None]).sum(-1) >= top_k, logits.shape[0])
    kept = jnp.where(order >= lowest[:, None], logits, -jnp.inf)
    share = jax.nn.softmax(kept, axis=-1)
    top_p = jnp.maximum(rows.top_p, 1e-30)  # the likeliest always stays
    of_share = _highest_where(lambda at: jnp.where(order >= at[:, None], share, 0).sum(-1) >= top_p, logits.shape[0])
    lowest = jnp.where(rows.top_p < 1, jnp.maximum(lowest, of_share), lowest)
    least = logits.max(-1) + jnp.log(rows.min_p)  # minus infinity where min_p is 0
    return jnp.where((order >= lowest[:, None]) & (logits >= least[:, None]), logits, -jnp.inf)


def _ordered(x: jax.Array) -> jax.Array:
    """Whole numbers in the order of these float32: negative ones have all bits turned, the others their sign's."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32) + 0.0, jnp.uint32)  # minus zero becomes zero
    return bits ^ jnp.where(bits >> 31 != 0, jnp.uint32(0xFFFFFFFF), jnp.uint32(0x80000000))


def _highest_where(holds: object, rows: int) -> jax.Array:
    """The highest number of 32 bits for which `holds`, which holds up to some number and not above; a row each."""

    def step(number: int, at: jax.Array) -> jax.Array:
        higher = at | (jnp.uint32(1 << 31) >> jnp.uint32(number))
        return jnp.where(holds(higher), higher, at)  # type: ignore[operator]

    return jax.lax.fori_loop(0, 32, step, jnp.zeros(rows, jnp.uint32))
