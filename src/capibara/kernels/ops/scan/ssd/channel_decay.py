"""Linear attention whose state fades by each key channel at its own rate: the op, step by step and in chunks.

A chunk's scores are sums over channels of q·k·exp(difference of running sums), which no single product makes: both
factors exp(sum) and exp(-sum) would leave the range of numbers. Each sub-chunk of queries is therefore measured from
the sum at its own start: before it every exponent is negative on both sides, and within it the few pairs are computed
one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from capibara.errors import rule_error
from capibara.kernels.core.op import Op, register
from capibara.kernels.core.spec import Call, Case, Cost, Implementation, Partition, describe, nbytes, unit_roundoff
from capibara.kernels.core.varying import vary_like
from capibara.kernels.ops.scan.selective.reference import wide_type
from capibara.kernels.ops.scan.selective.rules import check_floats
from capibara.kernels.ops.scan.ssd.cases import draw_log_decays
from capibara.kernels.ops.scan.ssd.decays import running_sums
from capibara.kernels.ops.scan.ssd.xla import products

CHUNK, SUB_CHUNK = 64, 16


def _first_state(q: jax.Array, v: jax.Array, initial_state: jax.Array | None) -> jax.Array:
    if initial_state is not None:
        return initial_state.astype(wide_type(v))
    batch, _, heads, keys = q.shape
    return vary_like(jnp.zeros((batch, heads, keys, v.shape[-1]), wide_type(v)), v)


def reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    initial_state: jax.Array | None = None,
    *,
    return_final_state: bool = False,
) -> Any:
    """h = exp(log_decay)·h + k·vᵀ, y = qᵀ·h for each head, one step of time after another; y has v's type.

    log_decay [batch, time, heads, Dk] fades each row of the state, [batch, heads, Dk, Dv] in float32, by itself.
    """
    wide = wide_type(v)

    def step(h: Any, now: Any) -> tuple[Any, Any]:
        q_t, k_t, v_t, fades = now
        h = jnp.exp(fades)[..., None] * h + k_t[..., :, None] * v_t[..., None, :]
        return h, (q_t[..., :, None] * h).sum(-2)

    moved = tuple(jnp.moveaxis(x.astype(wide), 1, 0) for x in (q, k, v, log_decay))
    last, y = lax.scan(step, _first_state(q, v, initial_state), moved)
    out = jnp.moveaxis(y, 0, 1).astype(v.dtype)
    return (out, last) if return_final_state else out


def _chunk(state: jax.Array, given: tuple[Any, ...], work: Any, sub: int) -> tuple[jax.Array, jax.Array]:
    """(the state after, y) of one chunk: operands [batch, steps, heads, ...]."""
    q, k, v, fades = given
    wide = state.dtype
    batch, steps, heads, keys = q.shape
    parts = steps // sub
    wholes, left = running_sums(fades, 1)
    in_parts = (batch, parts, sub, heads, keys)
    queries = q.astype(wide).reshape(in_parts)

    def starts(sums: jax.Array) -> jax.Array:
        """The sums before each sub-chunk."""
        shifted = jnp.pad(sums[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0)))
        return shifted.reshape(in_parts)[:, :, :1]

    def within(sums: jax.Array) -> jax.Array:
        return sums.reshape(in_parts)

    def exponents(difference: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """A difference of running sums, taken of the whole numbers, where it is exact, and of what is left."""
        return difference(wholes) + difference(left)

    sums = wholes + left
    before = jnp.arange(steps)[None, :] < sub * jnp.arange(parts)[:, None]  # [parts, steps]
    since = jnp.where(before[None, :, :, None, None], exponents(lambda s: starts(s) - s[:, None]), -jnp.inf)
    past = (k.astype(wide)[:, None] * jnp.exp(since)).astype(work)
    scaled = (queries * jnp.exp(exponents(lambda s: within(s) - starts(s)))).astype(work)
    scores = products("bsihd,bsjhd->bhsij", scaled, past, wide=wide)
    y = products("bhsij,bjhv->bsihv", scores.astype(work), v, wide=wide)

    causal = jnp.tril(jnp.ones((sub, sub), bool))[:, :, None, None]
    between = exponents(lambda s: within(s)[:, :, :, None] - within(s)[:, :, None])
    pairs = jnp.exp(jnp.where(causal, between, -jnp.inf))
    own_keys = k.astype(wide).reshape(in_parts)
    own = (queries[:, :, :, None] * own_keys[:, :, None] * pairs).sum(-1)  # [b, s, i, j, h]
    values = v.reshape(batch, parts, sub, heads, v.shape[-1])
    y = y + products("bsijh,bsjhv->bsihv", own.astype(work), values, wide=wide)

    y = y.reshape(batch, steps, heads, v.shape[-1])
    y = y + products("bihd,bhdv->bihv", (q.astype(wide) * jnp.exp(sums)).astype(work), state.astype(work), wide=wide)
    to_end = (k.astype(wide) * jnp.exp(exponents(lambda s: s[:, -1:] - s))).astype(work)
    added = products("bjhd,bjhv->bhdv", to_end, v, wide=wide)
    return jnp.exp(sums[:, -1])[..., None] * state + added, y


def xla(
    q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, initial_state: jax.Array | None = None, *,
    return_final_state: bool,
) -> Any:  # fmt: skip
    """One chunk after another; each chunk's inside is computed again where it is differentiated."""
    wide, work = wide_type(v), jnp.result_type(q, k, v)
    batch, time = v.shape[:2]
    first = _first_state(q, v, initial_state)
    if time == 0:
        return (v, first) if return_final_state else v
    sub = min(SUB_CHUNK, time)
    steps = min(CHUNK, math.ceil(time / sub) * sub)
    chunks = math.ceil(time / steps)

    def cut(x: jax.Array, dtype: Any) -> jax.Array:
        padded = jnp.pad(x.astype(dtype), ((0, 0), (0, chunks * steps - time), (0, 0), (0, 0)))
        return jnp.moveaxis(padded.reshape(batch, chunks, steps, *x.shape[2:]), 1, 0)

    given = (cut(q, work), cut(k, work), cut(v, work), cut(log_decay, wide))
    last, y = lax.scan(jax.checkpoint(lambda state, now: _chunk(state, now, work, sub)), first, given)
    out = jnp.moveaxis(y, 0, 1).reshape(batch, chunks * steps, *v.shape[2:])[:, :time].astype(v.dtype)
    return (out, last) if return_final_state else out


def check(call: Call) -> None:
    """Refuse a call that has no meaning, saying the rule, what arrived and the fix."""
    check_floats("Gated linear attention", dict(zip(call.op.operands, call.args, strict=True)))
    q, v = call["q"], call["v"]
    if q is None or v is None or len(q.shape) != 4 or len(v.shape) != 4 or q.shape[:3] != v.shape[:3]:
        raise rule_error(
            "q is [batch, time, heads, Dk] and v [batch, time, heads, Dv]",
            f"{describe(q)} and {describe(v)}",
            "give them these axes",
        )
    batch, _, heads, keys = q.shape
    for name, shape in (("k", q.shape), ("log_decay", q.shape), ("initial_state", (batch, heads, keys, v.shape[3]))):
        found = call[name]
        if (found is not None or name != "initial_state") and (found is None or found.shape != shape):
            raise rule_error(f"{name} is {shape}, by q and v", describe(found), "check its axes")


def cost(call: Call) -> Cost:
    """Each operand read once and y written once; the products of chunks of 64 and of their sub-chunks."""
    q, v = call.need("q"), call.need("v")
    keys, values = q.shape[3], v.shape[3]
    each = 2 * CHUNK * (keys + values) + 2 * SUB_CHUNK * values + 4 * keys * values
    moved = sum(map(nbytes, (*call.args, v)))
    flops = float(max(math.prod(q.shape[:2]), 1) * q.shape[2] * each)
    return Cost(matrix_flops=flops, bytes=float(moved), dtype=np.dtype(v.dtype).name)


def tolerance(call: Call) -> float:
    """Five roundings: of the result, and of what the matrix units are given: queries and keys with their decays,
    scores, states. In float32: the sums over time and channels, which grow with the square root of their lengths."""
    q, v = call.need("q"), call.need("v")
    narrow = unit_roundoff(jnp.result_type(q.dtype, call.need("k").dtype, v.dtype))
    growth = 16 + 4 * v.shape[1] ** 0.5 + 4 * q.shape[3] ** 0.5
    return 5 * max(narrow, unit_roundoff(v.dtype)) + unit_roundoff(wide_type(v)) * growth


def mesh_rule(call: Call) -> str:
    """Batch and heads may be split; time, keys and values are whole on every device."""
    first = ", b h d v" if call["initial_state"] is not None else ""
    last = ", b h d v" if call.params["return_final_state"] else ""
    return f"b t h d, b t h d, b t h v, b t h d{first} -> b t h v{last}"


def _case(
    name: str, batch: int, time: int, heads: int, keys: int, values: int, *tags: str, dtype: str = "float32",
    initial: bool = False, **params: Any,
) -> Case:  # fmt: skip
    rows = (batch, time, heads, keys)
    state = (batch, heads, keys, values) if initial else None
    shapes = (rows, rows, (*rows[:3], values), rows, state)
    return Case(name, shapes, dtype, params, frozenset(tags), {3: "float32", 4: "float32"}, {3: draw_log_decays})


ALL: dict[str, Any] = {"initial": True, "return_final_state": True}
CASES = (
    _case("gla", 8, 4096, 16, 128, 128, "bench", dtype="bfloat16"),
    _case("one", 1, 1, 1, 1, 1, "test"),
    _case("no-time", 2, 0, 2, 3, 4, "test", **ALL),
    _case("chunks", 2, 75, 2, 5, 3, "test", **ALL),
    _case("narrow", 1, 37, 2, 16, 8, "test", dtype="bfloat16"),
)

GATED_LINEAR_ATTENTION = Op(
    "gated_linear_attention",
    family="scan",
    reference=reference,
    operands=("q", "k", "v", "log_decay", "initial_state"),
    params={"return_final_state": False},
    untuned=("return_final_state",),
    check=check,
    cost=cost,
    tolerance=tolerance,
    partition=Partition(mesh_rule, replicated=lambda call: ("t", "d", "v")),
    cases=CASES,
)
GATED_LINEAR_ATTENTION.implement(
    Implementation("xla", xla, needs_local_types=True), Implementation("reference", reference, needs_local_types=True)
)
register(GATED_LINEAR_ATTENTION)
