"""The router for Hopper, in Pallas (Mosaic GPU): one token a thread, its best experts kept sorted in registers.

A thread reads its token's own row, 16 bytes at a time, and inserts each expert's logit into the token's list by
comparing down it: threads never wait for each other, shared memory is not used, and the arrays are read and written as
they lie, so that the routing is one kernel and nothing around it.
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
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.layers.router.rules import refuses_sizes, rows_of
from capibara.kernels.pallas.hopper import LANE, LOG2E, load, named, refuses_chip, store_to_memory

THREADS = 128  # of a warpgroup, a token each
VECTOR_BYTES = 16  # of a load
UNROLLED_STEPS = 256  # comparisons written out one after another, at most; past it a loop goes over the experts

# Nothing is shared between threads, so the barriers that Pallas would put around stores are not needed.
COMPILER_PARAMS = plgpu.CompilerParams(unsafe_no_auto_barriers=True, lowering_semantics=LANE)
LOWEST = -float("inf")
LOWEST_BITS = np.int32(np.iinfo(np.int32).min)
TINY = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True)
class RowsConfig:
    """How many experts of its token a thread reads at a time, into registers."""

    experts: int

    def __post_init__(self) -> None:
        if self.experts not in (8, 16, 32):
            raise rule_error("experts is 8, 16 or 32", self, "use experts=16")


def candidates(call: Call) -> Sequence[RowsConfig]:
    experts = call.need("logits").shape[-1]
    return [RowsConfig(size) for size in (16, 32, 8) if size < 2 * experts or size == 8]


def refuses(call: Call) -> str | None:
    chip = refuses_chip(call.target.device_kind)
    if chip is not None:
        return chip
    for name in call.op.operands:
        x = call[name]
        if x is not None and np.dtype(x.dtype).name not in ("bfloat16", "float16", "float32"):
            return f"it takes bfloat16, float16 and float32; {name} is {x.dtype.name}"
    if rows_of(call.need("logits")) == 0:
        return "there are no tokens"
    if call.need("logits").shape[-1] == 1:
        return "there is one expert alone, and nothing to choose"
    return refuses_sizes(call)


def _rows(vector: int) -> Any:
    """[128, n] with a row a thread, in vectors of so many numbers."""
    return plgpu.Layout.TCGEN05_TMEM_NATIVE(vector)


def _program(
    logits_hbm: Any, *refs: Any, biased: bool, config: RowsConfig, top_k: int, gate: str, normalize: bool,
    scale: float,
) -> None:  # fmt: skip
    *bias_hbm, weights_hbm, indices_hbm = refs
    tokens, experts = logits_hbm.shape
    # The last program starts early: it finds some tokens' experts again, and no token is padded.
    at = pl.ds(jnp.minimum(lax.axis_index("program") * THREADS, tokens - THREADS), THREADS)
    vector = math.gcd(experts, VECTOR_BYTES // logits_hbm.dtype.itemsize)
    layout = _rows(1).reduce(1)

    def full(value: float, dtype: Any = jnp.float32) -> Any:
        return plgpu.layout_cast(jnp.full((THREADS,), value, dtype), layout)

    lowest, zeros = full(LOWEST), full(0, jnp.int32)

    def several(first: Any, count: int) -> list[Any]:
        """The tokens' logits of some experts, one array an expert.

        One column of a thread's registers is the maximum of it and of the least integer, which the compiler knows.
        JAX 0.12 finds no layout for a single column, so the one before it is read with it.
        """
        if count == 1:
            return several(first - 1, 2)[1:]
        across = _rows(vector)
        values = load(logits_hbm.at[at, pl.ds(first, count)], across, optimized=False).astype(jnp.float32)
        bits = lax.bitcast_convert_type(values, jnp.int32)
        column = plgpu.broadcasted_iota(jnp.int32, (THREADS, count), 1, layout=across)
        return [
            lax.bitcast_convert_type(jnp.where(column == number, bits, LOWEST_BITS).max(axis=1), jnp.float32)
            for number in range(count)
        ]

    def over_experts(step: Callable[[Any, Any, Any], Any], carry: Any, work: int) -> Any:
        """`step(expert, its logits, carry)` for all experts, written out where that is not too long."""
        size = config.experts
        written = -(-top_k // size) * size  # so far the lists are not full
        if experts * work <= UNROLLED_STEPS:
            written = experts
        loops = max(experts - written, 0) // size

        def part(first: Any, count: int, carry: Any) -> Any:
            for number, logit in enumerate(several(first, count)):
                carry = step(first + number, logit, carry)
            return carry

        def turn(number: Any, carry: Any) -> Any:
            return part(written + number * size, size, carry)

        for first in range(0, min(written, experts), size):
            carry = part(first, min(size, experts - first), carry)
        if loops:
            carry = lax.fori_loop(0, loops, turn, carry)
        first = written + loops * size
        return part(first, experts - first, carry) if first < experts else carry

    def power(x: Any) -> Any:
        return jnp.exp2(x * LOG2E)

    def softmax_sum(highest: Any) -> Any:
        return over_experts(lambda e, logit, total: total + power(logit - highest), full(0.0), 1)

    def sigmoid(x: Any) -> Any:
        return 1.0 / (1.0 + power(-x))

    highest = total = None
    if biased and gate == "softmax":
        highest = over_experts(lambda e, logit, most: jnp.maximum(most, logit), lowest, 1)
        total = softmax_sum(highest)

    def scored(expert: Any, value: Any) -> tuple[Any, ...]:
        """What the expert is chosen by; with a bias also its logit, from which its weight is made."""
        if not biased:
            return (value,)
        if gate == "sigmoid":
            score = sigmoid(value)
        else:
            score = value if total is None else power(value - highest) / total
        return score + bias_hbm[0][expert], value

    def insert(expert: Any, logit: Any, carry: Any) -> Any:
        """One more expert into the list, best first; it grows up to top_k, so that no expert comes twice."""
        spoilt, lists = carry
        length = len(lists)
        score, *rest = scored(expert, logit)
        spoilt = jnp.where(score != score, score, spoilt)
        score = jnp.where(score != score, lowest, score)
        new = (score, zeros + expert, *rest)
        # Strictly: of equal scores the lower expert, which came before, stays ahead. From where the new one goes in,
        # every entry moves down by one place, its equals too.
        better = [score > slot[0] for slot in lists[:length]]
        merged = []
        for place in range(min(length + 1, top_k)):
            falling = _either(better[place - 1], lists[place - 1], new) if place else new
            merged.append(_either(better[place], falling, lists[place]) if place < length else falling)
        return spoilt, tuple(merged)

    spoilt, lists = over_experts(insert, (full(0.0), ()), top_k)

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
    store_to_memory(weights_hbm.at[at], _beside([weight * factor + spoilt for weight in weights]))
    store_to_memory(indices_hbm.at[at], _beside([slot[1] for slot in lists]))


def _beside(columns: list[Any]) -> Any:
    """[128, n] of n columns [128], a row a thread."""
    shape, layout = (THREADS, len(columns)), _rows(math.gcd(len(columns), 4))
    place = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)

    def spread(column: Any) -> Any:
        return plgpu.layout_cast(lax.broadcast_in_dim(column, shape, (0,)), layout)

    rows = spread(columns[0])
    for number, column in enumerate(columns[1:], 1):
        rows = jnp.where(place == number, spread(column), rows)
    return rows


def _either(condition: Any, yes: tuple[Any, ...], no: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(jnp.where(condition, y, n) for y, n in zip(yes, no, strict=True))


def route_forward(
    logits: jax.Array, bias: jax.Array | None = None, *, config: RowsConfig, top_k: int, gate: str,
    normalize: bool, scale: float,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """One kernel over programs of 128 tokens; see the module's text."""
    *lead, experts = logits.shape
    rows = rows_of(logits)
    padded = max(rows, THREADS)
    operands = [jnp.pad(logits.reshape(rows, experts), ((0, padded - rows), (0, 0)))]
    if bias is not None:
        operands.append(bias.astype(jnp.float32))
    outs = plgpu.kernel(
        named("route", _program, biased=bias is not None, config=config, top_k=top_k, gate=gate, normalize=normalize,
            scale=float(scale),
        ),
        out_type=[out_struct((padded, top_k), dtype, logits) for dtype in (jnp.float32, jnp.int32)],
        grid=(math.ceil(padded / THREADS),),
        grid_names=("program",),
        compiler_params=COMPILER_PARAMS,
    )(*operands)  # fmt: skip
    weights, indices = (x[:rows].reshape(*lead, top_k) for x in outs)
    return weights, indices


IMPLEMENTATION = Implementation(
    "hopper",
    route_forward,
    platforms=("gpu",),
    refuses=refuses,
    # On an H200's own clock 4 of 32 for 65536 tokens take 4.3 us, xla's passes 29, softmax and top_k 97; 8 of 128 for
    # 16384 take 8.1, 64 and 64; 2 of 8 for 65536 take 1.7, 9 and 46. A call costs the host 45 us, whatever it runs.
    kernel=True,
    config_type=RowsConfig,
    candidates=candidates,
)
