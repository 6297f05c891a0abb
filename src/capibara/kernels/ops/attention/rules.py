"""What a call of attention must be, what it costs, and how exact its result is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import jax.numpy as jnp
import numpy as np

from capibara.errors import rule_error
from capibara.kernels.core.context import matmul_precision
from capibara.kernels.core.spec import FLOATS, Call, Cost, describe, nbytes, unit_roundoff
from capibara.kernels.ops.attention.masking import Window, live_pairs


class Sizes(NamedTuple):
    """The dimensions of a call: batch, query heads, key heads, queries, keys, head_dim."""

    batch: int
    heads: int
    kv_heads: int
    rows: int
    columns: int
    depth: int

    @property
    def groups(self) -> int:
        """Query heads for each key head."""
        return self.heads // self.kv_heads


def sizes(call: Call) -> Sizes:
    batch, heads, rows, depth = call.need("q").shape
    kv_heads, columns = call.need("k").shape[1:3]
    return Sizes(batch, heads, kv_heads, rows, columns, depth)


def window_of(call: Call) -> Window:
    return cast(Window, call.params["window"])


def scale_of(call: Call) -> float:
    """The scale with its default filled in: 1 / sqrt(head_dim)."""
    scale = call.params["scale"]
    return sizes(call).depth ** -0.5 if scale is None else float(cast(float, scale))


def check(call: Call) -> None:
    """Refuse a call that has no meaning, saying the rule, what arrived and the fix."""
    arrived = call.signature
    q, k, v = call["q"], call["k"], call["v"]
    if q is None or k is None or v is None:
        raise rule_error("attention takes queries, keys and values", arrived, "pass all three")
    for name, x in (("query", q), ("key", k), ("value", v)):
        if len(x.shape) != 4:
            raise rule_error(
                "attention's arrays have four axes, [batch, heads, length, head_dim]",
                f"a {name} of {describe(x)}",
                "add the missing axes with x[None], or fold the extra ones into the batch",
            )
        if np.dtype(x.dtype).name not in FLOATS:
            raise rule_error(
                f"attention takes {', '.join(FLOATS)}", f"a {name} of {describe(x)}", "convert it with .astype(...)"
            )
    if not q.dtype == k.dtype == v.dtype:
        raise rule_error(
            "The query, the key and the value have one type",
            f"{q.dtype.name}, {k.dtype.name} and {v.dtype.name}",
            "convert them with .astype(query.dtype)",
        )
    if k.shape != v.shape:
        raise rule_error("The key and the value have one shape", f"{describe(k)} and {describe(v)}", "check them")
    if q.shape[0] != k.shape[0]:
        raise rule_error("The query and the key have one batch size", f"{q.shape[0]} and {k.shape[0]}", "broadcast one")
    if q.shape[3] != k.shape[3] or q.shape[3] == 0:
        raise rule_error(
            "The query and the key have one head_dim, of 1 or more",
            f"{q.shape[3]} and {k.shape[3]}",
            "check the projections; layout='bthd' is for [batch, length, heads, head_dim]",
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise rule_error(
            "The query's heads are a multiple of the key's",
            f"{q.shape[1]} and {k.shape[1]}",
            "check the projections; layout='bthd' is for [batch, length, heads, head_dim]",
        )
    _check_params(call)
    _check_masks(call)


def _check_params(call: Call) -> None:
    p = call.params
    if not _is_int(p["q_offset"]):
        raise rule_error(
            "query_offset is a whole number known before tracing", repr(p["q_offset"]), "pass a Python int"
        )
    window = p["window"]
    if window is not None:
        good = isinstance(window, tuple) and len(window) == 2
        good = good and all(side is None or (_is_int(side) and side >= 0) for side in cast(tuple[Any, Any], window))
        if not good:
            raise rule_error(
                "A window is (left, right): how many keys before and after its own a query sees, each 0 or more "
                "or None for all of them",
                repr(window),
                "pass window=(1023, 0), or window=1024 for the same",
            )
    scale, softcap, rate = p["scale"], p["softcap"], p["dropout_rate"]
    if scale is not None and not (_is_number(scale) and math.isfinite(cast(float, scale))):
        raise rule_error("The scale is a finite number", repr(scale), "pass a float, or None for 1/sqrt(head_dim)")
    if softcap is not None and not (_is_number(softcap) and 0 < cast(float, softcap) < math.inf):
        raise rule_error("The soft cap is above 0", repr(softcap), "pass a positive float, or None for no cap")
    if not (_is_number(rate) and 0 <= cast(float, rate) < 1):
        raise rule_error("The dropout rate is in [0, 1)", repr(rate), "pass the fraction to drop, e.g. 0.1")
    seed = call["dropout_seed"]
    if cast(float, rate) > 0 and seed is None:
        raise rule_error(
            "Dropout draws from a key", f"dropout_rate={rate} and no key", "pass dropout_key=jax.random.key(...)"
        )
    if seed is not None and (seed.shape != (2,) or seed.dtype != jnp.uint32):
        raise rule_error("The dropout seed is two words, u32[2]", describe(seed), "pass dropout_key to attention()")


def _check_masks(call: Call) -> None:
    batch, heads, _, rows, columns, _ = sizes(call)
    bias, mask = call["bias"], call["mask"]
    for name, x in (("bias", bias), ("mask", mask)):
        if x is None:
            continue
        wanted = ((1, batch), (1, heads), (1, rows), (columns,))
        if len(x.shape) != 4 or any(n not in choices for n, choices in zip(x.shape, wanted, strict=True)):
            raise rule_error(
                f"The {name} is [batch or 1, heads or 1, queries or 1, keys], here "
                f"[{batch}|1, {heads}|1, {rows}|1, {columns}]",
                describe(x),
                f"add axes of 1 with {name}[:, None], or broadcast the keys' axis",
            )
    if bias is not None and np.dtype(bias.dtype).name not in FLOATS:
        raise rule_error("The bias is added to the scores, so it is a float array", describe(bias), "pass mask=...")
    if mask is not None and mask.dtype != jnp.bool_:
        raise rule_error(
            "The mask is boolean, True where a query may see a key",
            describe(mask),
            "compare it (mask != 0), or pass an additive one as bias=...",
        )
    q_segments, kv_segments = call["q_segments"], call["kv_segments"]
    if (q_segments is None) != (kv_segments is None):
        raise rule_error(
            "Segment ids are given for the queries and for the keys",
            "one of the two",
            "pass segment_ids, and key_segment_ids where the keys' length differs",
        )
    for name, x, length in (("segment_ids", q_segments, rows), ("key_segment_ids", kv_segments, columns)):
        if x is None:
            continue
        if x.shape != (batch, length):
            raise rule_error(f"{name} is [batch, length], here [{batch}, {length}]", describe(x), "check its shape")
        if x.dtype != jnp.int32:
            raise rule_error(f"{name} is int32", describe(x), "convert it with .astype(jnp.int32)")
    _check_block_mask(call, batch, heads, rows, columns)


def _check_block_mask(call: Call, batch: int, heads: int, rows: int, columns: int) -> None:
    block_mask, size = call["block_mask"], call.params["block_size"]
    if (block_mask is None) != (size is None):
        raise rule_error(
            "A block mask and its block size come together",
            "a block size alone" if block_mask is None else "a block mask alone",
            "pass block_mask=..., block_size=(queries, keys)",
        )
    if block_mask is None:
        return
    good = isinstance(size, tuple) and len(size) == 2 and all(_is_int(n) and n > 0 for n in size)
    if not good:
        raise rule_error("A block size is (queries, keys), both 1 or more", repr(size), "pass block_size=(128, 128)")
    bq, bk = cast(tuple[int, int], size)
    grid = (-(-rows // bq), -(-columns // bk))
    shape = block_mask.shape
    if len(shape) != 4 or shape[0] not in (1, batch) or shape[1] not in (1, heads) or shape[2:] != grid:
        raise rule_error(
            f"The block mask has one entry a block of {bq} queries and {bk} keys, here "
            f"[{batch}|1, {heads}|1, {grid[0]}, {grid[1]}]",
            describe(block_mask),
            "make it with block_mask_from(...), or check block_size",
        )
    if block_mask.dtype != jnp.bool_:
        raise rule_error("The block mask is boolean", describe(block_mask), "compare it (block_mask != 0)")


def _is_int(x: Any) -> bool:
    return isinstance(x, int | np.integer) and not isinstance(x, bool)


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float | np.integer | np.floating) and not isinstance(x, bool)


def tuned_alike(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int, bool]:
    """What a tuned case must share with a call to speak for it: the head size, how many heads share a key head, and
    whether lengths are whole pieces of 8, since kernels copy other ones in another manner."""
    (_, heads, rows, head_dim), (_, kv_heads, columns, _) = shapes["q"], shapes["k"]
    return head_dim, heads // max(kv_heads, 1), rows % 8 == 0 and columns % 8 == 0


def check_grad(call: Call) -> None:
    """The forward's rules, and shapes of what came out of it."""
    check(call)
    batch, heads, _, rows, _, depth = sizes(call)
    for name, shape in (("out", (batch, heads, rows, depth)), ("d_out", (batch, heads, rows, depth))):
        x = call[name]
        if x is None or x.shape != shape:
            raise rule_error(f"{name} has the query's shape {shape}", describe(x), "pass the forward's own output")
    for name in ("lse", "d_lse"):
        x = call[name]
        if name == "d_lse" and x is None:
            continue
        if x is None or x.shape != (batch, heads, rows):
            raise rule_error(
                f"{name} is one number a query, {(batch, heads, rows)}", describe(x), "call with return_lse=True"
            )


def pairs(call: Call) -> int:
    """Pairs of query and key that causality and the window leave, over the batch and the heads.

    What a mask, segments or a block mask rule out is data, which shapes do not know: it is counted as live.
    """
    batch, heads, _, rows, columns, _ = sizes(call)
    p = call.params
    live = live_pairs(rows, columns, bool(p["causal"]), cast(int, p["q_offset"]), window_of(call))
    return batch * heads * live


def cost(call: Call) -> Cost:
    """Two products of head_dim for each live pair; operands read once, the output (and lse) written once."""
    q = call.need("q")
    moved = sum(map(nbytes, call.args)) + nbytes(q)
    if call.params["return_lse"]:
        moved += 4 * math.prod(q.shape[:3])
    flops = 4.0 * max(pairs(call), 1) * q.shape[3]
    return Cost(matrix_flops=flops, bytes=float(moved), dtype=np.dtype(q.dtype).name)


def cost_grad(call: Call) -> Cost:
    """Five products for each live pair, to the forward's two; one gradient written for each float operand."""
    q = call.need("q")
    written = sum(nbytes(call[name]) for name in ("q", "k", "v", "bias"))
    moved = sum(map(nbytes, call.args)) + written
    flops = 10.0 * max(pairs(call), 1) * q.shape[3]
    return Cost(matrix_flops=flops, bytes=float(moved), dtype=np.dtype(q.dtype).name)


def tolerance(call: Call) -> float:
    """The relative error in norm that a right result stays under.

    In units of the operands' roundoff u: one for rounding the output; one for rounding the probabilities to the
    type that the second product takes; one for a scale folded into the queries, whose rounding moves each score,
    of order one, by u. Sums in float32 add the square root of their lengths (head_dim, and the keys) in its own
    units, four of them for an unlucky draw. A float32 product on an accelerator may be computed from inputs
    rounded to the matrix unit's type (TF32 on a GPU, bfloat16 on a TPU): two products, two inputs each.
    """
    _, _, _, _, columns, depth = sizes(call)
    dtype = call.need("q").dtype
    unit = unit_roundoff(dtype)
    summed = unit_roundoff(jnp.promote_types(jnp.float32, dtype)) * (depth**0.5 + max(columns, 1) ** 0.5)
    rounded = 0.0
    if dtype == jnp.float32 and matmul_precision() not in ("highest", "float32"):
        rounded = {"gpu": 2.0**-11, "tpu": 2.0**-8}.get(call.target.platform, 0.0)
    return 3 * unit + 4 * summed + 4 * rounded


def tolerance_grad(call: Call) -> float:
    """The forward's, four times: probabilities, their gradients, the saved output and the result are each rounded,
    and the difference of two sums of head_dim products cancels in part."""
    return 4 * tolerance(call)
