"""The router for Hopper, in Pallas (Mosaic GPU): one token a thread, its best experts kept sorted in registers.

Each expert's logit is inserted into the token's list by comparing down it, so threads never wait for each other and
shared memory is not used. Threads of a warp hold neighbouring tokens, so the logits are best read expert by expert: XLA
transposes them on the way in (into the product that makes them, where there is one), and the results on the way out.
Or each thread walks along its token's own row and relies on the first-level cache, which spares the transposes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.errors import rule_error
from capibara.kernels.hopper import LOG2E, load, refuses_chip
from capibara.kernels.layers.router.pallas_tpu import refuses_sizes
from capibara.kernels.layers.router.rules import rows_of, top_k_of
from capibara.kernels.op import Call, Implementation
from capibara.kernels.transforms import out_struct

THREADS = 128  # of a warpgroup
UNROLLED_STEPS = 128  # comparisons written out one after another, at most; past it a loop goes over the experts
UNROLLED_EXPERTS = 8  # of that loop, at a time, at most: their loads are on the way together

# Nothing is shared between threads, so the barriers that Pallas would put around stores are not needed.
COMPILER_PARAMS = plgpu.CompilerParams(unsafe_no_auto_barriers=True)
LOWEST = -float("inf")
TINY = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True)
class ThreadsConfig:
    """Tokens of a program, 128 for each one that a thread takes; and whether XLA transposes the arrays for it."""

    tokens: int
    transposed: bool = True

    def __post_init__(self) -> None:
        if self.tokens not in (THREADS, 2 * THREADS, 4 * THREADS):
            raise rule_error("tokens is 128, 256 or 512", self, "use tokens=128")
        if not self.transposed and self.tokens != THREADS:
            raise rule_error("A thread walks along one token's row, so tokens is 128", self, "use transposed=True")


def candidates(call: Call) -> Sequence[ThreadsConfig]:
    # A list of k numbers and experts for each token: more than one token a thread only where that stays small.
    few = top_k_of(call) <= 4
    more = [ThreadsConfig(4 * THREADS)] if few else []
    return [ThreadsConfig(THREADS), ThreadsConfig(2 * THREADS), *more, ThreadsConfig(THREADS, transposed=False)]


def refuses(call: Call) -> str | None:
    chip = refuses_chip(call.target.device_kind)
    if chip is not None:
        return chip
    for name in call.op.operands:
        given = call[name]
        if given is not None and np.dtype(given.dtype).name not in ("bfloat16", "float16", "float32"):
            return f"it takes bfloat16, float16 and float32; {name} is {given.dtype.name}"
    if rows_of(call.need("logits")) == 0:
        return "there are no tokens"
    return refuses_sizes(call)


def _program(
    logits_hbm: Any, *refs: Any, biased: bool, config: ThreadsConfig, top_k: int, gate: str, normalize: bool,
    scale: float,
) -> None:  # fmt: skip
    *given, weights_hbm, indices_hbm = refs
    experts = logits_hbm.shape[0 if config.transposed else 1]
    at = pl.ds(lax.axis_index("program") * config.tokens, config.tokens)
    layout = plgpu.Layout.WG_STRIDED((config.tokens,), vec_size=config.tokens // THREADS)

    def full(value: float, dtype: Any = jnp.float32) -> Any:
        return plgpu.layout_cast(jnp.full((config.tokens,), value, dtype), layout)

    lowest, zeros = full(LOWEST), full(0, jnp.int32)

    def line(ref: Any, number: Any) -> Any:
        """The tokens' numbers for one expert, or one place of the results."""
        return ref.at[number, at] if config.transposed else ref.at[at, number]

    def logit(expert: Any) -> Any:
        return load(line(logits_hbm, expert), layout, optimized=False).astype(jnp.float32)

    def over_experts(step: Callable[[Any, Any], Any], carry: Any, first: int, work: int) -> Any:
        """`step(expert, carry)` for the experts from `first` on, written out where that is not too long."""
        if (experts - first) * work <= UNROLLED_STEPS:
            for expert in range(first, experts):
                carry = step(expert, carry)
            return carry
        each = min(UNROLLED_EXPERTS, UNROLLED_STEPS // 2 // work)
        whole = (experts - first) // each

        def several(turn: Any, carry: Any) -> Any:
            for number in range(each):
                carry = step(first + turn * each + number, carry)
            return carry

        carry = lax.fori_loop(0, whole, several, carry)
        for expert in range(first + whole * each, experts):
            carry = step(expert, carry)
        return carry

    def power(x: Any) -> Any:
        return jnp.exp2(x * LOG2E)

    def softmax_sum(highest: Any) -> Any:
        return over_experts(lambda e, total: total + power(logit(e) - highest), full(0.0), 0, 1)

    def sigmoid(x: Any) -> Any:
        return 1.0 / (1.0 + power(-x))

    highest = total = None
    if biased and gate == "softmax":
        highest = over_experts(lambda e, most: jnp.maximum(most, logit(e)), lowest, 0, 1)
        total = softmax_sum(highest)

    def scored(expert: Any) -> tuple[Any, ...]:
        """What the expert is chosen by; with a bias also its logit, from which its weight is made."""
        value = logit(expert)
        if not biased:
            return (value,)
        if gate == "sigmoid":
            score = sigmoid(value)
        else:
            score = value if total is None else power(value - highest) / total
        return score + given[0][expert], value

    def insert(expert: Any, carry: Any, length: int) -> Any:
        """One more expert into a list of `length`, best first; what falls out of it is kept up to top_k."""
        spoilt, lists = carry
        score, *rest = scored(expert)
        spoilt = jnp.where(score != score, score, spoilt)
        score = jnp.where(score != score, lowest, score)
        new = (score, zeros + expert, *rest)
        # Strictly: of equal scores the lower expert, which came before, stays ahead. From where the new one goes in,
        # every entry moves down by one place, its equals too.
        better = [score > slot[0] for slot in lists[:length]]
        made = []
        for place in range(min(length + 1, top_k)):
            falling = _either(better[place - 1], lists[place - 1], new) if place else new
            made.append(_either(better[place], falling, lists[place]) if place < length else falling)
        return spoilt, tuple(made)

    carry = (full(0.0), ())
    for expert in range(top_k):  # the lists fill with whatever there is, so no expert comes twice
        carry = insert(expert, carry, expert)
    spoilt, lists = over_experts(lambda e, c: insert(e, c, top_k), carry, top_k, top_k)

    chosen = [slot[-1] if biased else slot[0] for slot in lists]
    if gate == "sigmoid":
        weights = [sigmoid(x) for x in chosen]
        divisor = None
        if normalize:
            divisor = jnp.maximum(functools.reduce(jnp.add, weights), TINY)
    elif normalize:
        top = functools.reduce(jnp.maximum, chosen)
        weights = [power(x - top) for x in chosen]
        divisor = functools.reduce(jnp.add, weights)
    else:
        if highest is None:
            highest = chosen[0]
            total = softmax_sum(highest)
        weights, divisor = [power(x - highest) for x in chosen], total
    factor = scale if divisor is None else scale / divisor
    for place, (weight, slot) in enumerate(zip(weights, lists, strict=True)):
        line(weights_hbm, place)[...] = weight * factor + spoilt
        line(indices_hbm, place)[...] = slot[1]


def _either(condition: Any, yes: tuple[Any, ...], no: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(jnp.where(condition, y, n) for y, n in zip(yes, no, strict=True))


def mosaic_gpu(
    logits: jax.Array, bias: jax.Array | None = None, *, config: ThreadsConfig, top_k: int, gate: str,
    normalize: bool, scale: float,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """One kernel over programs of `config.tokens` tokens; see the module's text."""
    *lead, experts = logits.shape
    rows = rows_of(logits)
    programs = math.ceil(rows / config.tokens)
    padded = programs * config.tokens
    turned = jnp.transpose if config.transposed else jnp.asarray
    operands = [turned(jnp.pad(logits.reshape(rows, experts), ((0, padded - rows), (0, 0))))]
    if bias is not None:
        operands.append(bias.astype(jnp.float32))
    shape = (top_k, padded) if config.transposed else (padded, top_k)
    made = plgpu.kernel(
        functools.partial(
            _program, biased=bias is not None, config=config, top_k=top_k, gate=gate, normalize=normalize,
            scale=float(scale),
        ),
        out_type=[out_struct(shape, jnp.float32, logits), out_struct(shape, jnp.int32, logits)],
        grid=(programs,),
        grid_names=("program",),
        compiler_params=COMPILER_PARAMS,
    )(*operands)  # fmt: skip
    weights, indices = (turned(x)[:rows].reshape(*lead, top_k) for x in made)
    return weights, indices


IMPLEMENTATION = Implementation(
    "mosaic_gpu",
    mosaic_gpu,
    platforms=("gpu",),
    refuses=refuses,
    # Below the reference, so only by name: on an H200 it is level with xla's passes at 8 and 32 experts, and where they
    # are too many the reference's sort is the fastest (8 of 128).
    rank=lambda call: -3,
    kernel=True,
    config_type=ThreadsConfig,
    default_config=lambda call: candidates(call)[0],
    candidates=candidates,
)
