"""The grouped products in plain JAX: tile after tile of rows, each with its group's weight, or by lax.ragged_dot.

XLA has a grouped product of its own on a TPU. On a CPU and a GPU it multiplies every row with every group's weight
instead, so there a loop over tiles takes its place. The loop ends with the last tile that has rows, so that uneven
groups cost no more than even ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.errors import rule_error
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import vary_like
from capibara.kernels.ops.layers.grouped.reference import gated, wide_type
from capibara.kernels.ops.layers.grouped.rules import sizes
from capibara.kernels.ops.layers.grouped.tiles import group_ends, group_spans, row_tiles

BLOCKS = (8, 16, 32, 64, 128, 256, 512)


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """Rows of a tile; None for lax.ragged_dot.

    Where XLA has no program for lax.ragged_dot it multiplies a row with the other groups' weights too, by zeros: NaN in
    a weight, which the loop keeps to its group, then spoils all rows. NaN in rows stays in them either way.
    """

    block: int | None

    def __post_init__(self) -> None:
        if self.block is not None and (not isinstance(self.block, int) or self.block < 1):
            raise rule_error("block is None or a whole number above 0", repr(self.block), "use 128, or None")


def default_config(call: Call) -> LoopConfig:
    """lax.ragged_dot where XLA has a program for it; else tiles half as long as an even group, within bounds.

    Measured on a CPU: the last tile of a group wastes what it lacks, and a tile half of a group was the fastest.
    """
    if call.target.platform == "tpu":
        return LoopConfig(None)
    n = sizes(call)
    half = n.rows / n.groups / 2
    return LoopConfig(next((b for b in BLOCKS if b >= half), BLOCKS[-1]))


def candidates(call: Call) -> Sequence[LoopConfig]:
    """The default first, lax.ragged_dot among the others."""
    made = [default_config(call), *(LoopConfig(b) for b in BLOCKS if 32 <= b <= sizes(call).rows), LoopConfig(None)]
    return list(dict.fromkeys(made))


def xla(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, config: LoopConfig, transpose_rhs: bool,
    out_dtype: str | None,
) -> jax.Array:  # fmt: skip
    out = jnp.dtype(out_dtype) if out_dtype else jnp.result_type(lhs, rhs)
    if config.block is None:
        return _by_ragged_dot(lhs, rhs, group_sizes, transpose_rhs, out)
    (made,) = _by_tiles(lhs, (rhs,), group_sizes, config.block, transpose_rhs, lambda z: (z.astype(out),))
    return made


def xla_gated(
    lhs: jax.Array, gate: jax.Array, up: jax.Array, group_sizes: jax.Array, *, config: LoopConfig, activation: str,
    return_products: bool,
) -> Any:  # fmt: skip
    out = jnp.result_type(lhs, gate, up)

    def finish(*products: jax.Array) -> tuple[jax.Array, ...]:
        y = gated(activation, *products).astype(out)
        return (y, *(p.astype(out) for p in products)) if return_products else (y,)

    if config.block is None:
        wide = wide_type(lhs, gate, up)
        made = finish(*(_by_ragged_dot(lhs, weight, group_sizes, False, wide) for weight in (gate, up)))
    else:
        made = _by_tiles(lhs, (gate, up), group_sizes, config.block, False, finish)
    return made if return_products else made[0]


def xla_weights(
    lhs: jax.Array, d_out: jax.Array, group_sizes: jax.Array, *, config: LoopConfig, transpose: bool,
    out_dtype: str | None,
) -> jax.Array:  # fmt: skip
    out = jnp.dtype(out_dtype) if out_dtype else jnp.result_type(lhs, d_out)
    left, right = (d_out, lhs) if transpose else (lhs, d_out)
    if config.block is None:
        return _by_ragged_contraction(left, right, group_sizes, out)
    rows, block = lhs.shape[0], config.block
    starts, ends = group_spans(group_sizes, rows)
    left, right = (_with_room(x, block) for x in (left, right))
    empty = vary_like(jnp.zeros((left.shape[1], right.shape[1]), wide_type(lhs, d_out)), lhs)

    def one(group: tuple[jax.Array, jax.Array]) -> jax.Array:
        start, end = group

        def step(turn: Any, total: jax.Array) -> jax.Array:
            at = start + turn * block
            mine = (at + jnp.arange(block) < end)[:, None]
            # Both sides: a zero does not silence the other's NaN.
            a, b = (jnp.where(mine, lax.dynamic_slice_in_dim(x, at, block), 0) for x in (left, right))
            return total + _dot(a, b, 0, 0, total.dtype)

        return lax.fori_loop(0, -(-(end - start) // block), step, empty).astype(out)

    return lax.map(one, (starts, ends))


def _by_tiles(
    lhs: jax.Array, weights: tuple[jax.Array, ...], group_sizes: jax.Array, block: int, flipped: bool,
    finish: Callable[..., tuple[jax.Array, ...]],
) -> tuple[jax.Array, ...]:  # fmt: skip
    """`finish(lhs @ weight, ...)` of each tile. A tile writes zeros past its group's end, which the next overwrites."""
    rows = lhs.shape[0]
    wide = wide_type(lhs, *weights)
    tiles = row_tiles(group_sizes, rows, block)
    padded = _with_room(lhs, block)
    columns = weights[0].shape[1 if flipped else 2]
    shapes = jax.eval_shape(finish, *(jax.ShapeDtypeStruct((block, columns), wide) for _ in weights))
    empty = tuple(vary_like(jnp.zeros((rows + block, columns), x.dtype), lhs) for x in shapes)

    def step(turn: Any, results: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        group, start, end = tiles.group_of_tile[turn], tiles.bounds[turn], tiles.bounds[turn + 1]
        own = lax.dynamic_slice_in_dim(padded, start, block)
        picked = (lax.dynamic_index_in_dim(weight, group, keepdims=False) for weight in weights)
        made = finish(*(_dot(own, weight, 1, 1 if flipped else 0, wide) for weight in picked))
        mine = (start + jnp.arange(block) < end)[:, None]
        return tuple(
            lax.dynamic_update_slice_in_dim(result, jnp.where(mine, x, 0), start, 0)
            for result, x in zip(results, made, strict=True)
        )

    return tuple(x[:rows] for x in lax.fori_loop(0, tiles.tile_count[0], step, empty))


def _with_room(x: jax.Array, block: int) -> jax.Array:
    """A block of rows more: a slice that would run past the end is otherwise moved back by JAX."""
    return jnp.pad(x, ((0, block), (0, 0)))


def _dot(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int, dtype: Any) -> jax.Array:
    return lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((), ())), preferred_element_type=dtype)


def _by_ragged_dot(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, flipped: bool, out: Any) -> jax.Array:
    """XLA's own. What it leaves in rows past the last group is its affair: they are made zeros here."""
    numbers = lax.RaggedDotDimensionNumbers((((1,), (2 if flipped else 1,)), ((), ())), [0], [0])
    ends = group_ends(group_sizes, lhs.shape[0])
    counted = jnp.diff(ends, prepend=0)
    made = lax.ragged_dot_general(lhs, rhs, counted, numbers, preferred_element_type=out)
    return jnp.where((jnp.arange(lhs.shape[0]) < ends[-1])[:, None], made, 0)


def _by_ragged_contraction(left: jax.Array, right: jax.Array, group_sizes: jax.Array, out: Any) -> jax.Array:
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    ends = group_ends(group_sizes, left.shape[0])
    # Rows past the last group are outside every group, and are cleared in case XLA counts them to the last.
    live = (jnp.arange(left.shape[0]) < ends[-1])[:, None]
    left, right = (jnp.where(live, x, 0) for x in (left, right))
    return lax.ragged_dot_general(left, right, jnp.diff(ends, prepend=0), numbers, preferred_element_type=out)


def _implementation(fn: Callable[..., Any]) -> Implementation:
    # JAX could not run the loop backwards, and of lax.ragged_dot it would keep more than the op's gradient does.
    return Implementation(
        "xla",
        fn,
        own_gradient=True,
        config_type=LoopConfig,
        default_config=default_config,
        candidates=candidates,
    )


IMPLEMENTATION = _implementation(xla)
GATED_IMPLEMENTATION = _implementation(xla_gated)
WEIGHTS_IMPLEMENTATION = _implementation(xla_weights)
