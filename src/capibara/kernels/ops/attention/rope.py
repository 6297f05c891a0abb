"""Rotary position embedding: pairs of a head's numbers turned by an angle that grows with the position.

Angles are made on the host in float64 and kept as float32 cosines and sines, so a position of 100,000 is as exact as
position 1 even in a bfloat16 model. The rotation itself is done in float32 and rounded once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Integer

from capibara.errors import rule_error, unknown_name
from capibara.kernels.core import context
from capibara.kernels.core.spec import describe
from capibara.kernels.ops.attention.rope_scaling import frequencies, scaling_numbers

STYLES = ("half", "interleaved")
LAYOUTS = ("bhtd", "bthd")
BASE = 10000.0
# Angles made in the trace know positions below this, either side of 0.
FARTHEST = 1 << 24

Scaling = tuple[tuple[str, Any], ...] | None


class RopeTables(NamedTuple):
    """Cosines and sines, float32 [length, rotary_dim / 2]; row p is position p."""

    cos: Any
    sin: Any


def rope_tables(
    length: int, rotary_dim: int, *, base: float = BASE, scaling: Mapping[str, Any] | None = None
) -> RopeTables:
    """Cosines and sines of positions 0 to length - 1, made once on the host for each set of arguments and kept.

    >>> rope_tables(16, 64).cos.shape
    (16, 32)
    """
    if length < 1:
        raise rule_error("The tables hold 1 position or more", length, "pass the longest context's length")
    return _tables(0, int(length), int(rotary_dim), float(base), _hashable(scaling))


def _hashable(scaling: Any) -> Scaling:
    return None if scaling is None else tuple(sorted(dict(scaling).items()))


@functools.lru_cache(maxsize=16)
def _tables(start: int, length: int, dim: int, base: float, scaling: Scaling) -> RopeTables:
    """Row i is position start + i."""
    turn, temperature = frequencies(dim, base, None if scaling is None else dict(scaling))
    angles = np.arange(start, start + length, dtype=np.float64)[:, None] * turn
    # numpy, so that nothing cached belongs to a trace or a device.
    cos, sin = (np.asarray(f(angles) * temperature, np.float32) for f in (np.cos, np.sin))
    for table in (cos, sin):
        table.flags.writeable = False
    return RopeTables(cos, sin)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tables", "query_positions", "key_positions"],
    meta_fields=["base", "style", "scaling", "rotary_dim"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Rope:
    """How `attention(..., rope=...)` turns queries and keys: `rope`'s arguments, with positions for both.

    A pytree: tables and positions are its arrays, so it may be an argument of a jitted function.

    Args:
      base, style, scaling, rotary_dim, tables: as in `rope`.
      query_positions: [queries] or [batch, queries]; by default attention's query_offset, query_offset + 1, …
      key_positions: [keys] or [batch, keys]; by default 0, 1, 2, …

    >>> Rope(base=500_000.0).style
    'half'
    """

    base: float = BASE
    style: str = "half"
    scaling: Any = None
    rotary_dim: int | None = None
    tables: RopeTables | None = None
    query_positions: Any = None
    key_positions: Any = None

    def __post_init__(self) -> None:
        # JAX builds these too, with anything in place of the arrays: only what is static is looked at.
        _check_static(self.style, self.base, self.scaling, self.tables)
        object.__setattr__(self, "scaling", _hashable(self.scaling))
        for name in ("query_positions", "key_positions"):
            if isinstance(getattr(self, name), list):  # to JAX a list is a tree of numbers, not an array
                object.__setattr__(self, name, np.asarray(getattr(self, name)))


def rope(
    x: Float[Array, "B T H D"],
    positions: Integer[Array, " _"] | Integer[Array, "B _"] | None = None,
    *,
    base: float = BASE,
    style: str = "half",
    scaling: Mapping[str, Any] | None = None,
    layout: str = "bthd",
    tables: RopeTables | None = None,
    rotary_dim: int | None = None,
) -> Float[Array, "B T H D"]:
    """Rotate queries or keys by their positions.

    Args:
      x: [batch, length, heads, head_dim], or with layout="bhtd" [batch, heads, length, head_dim].
      positions: [length] or [batch, length]; 0, 1, 2, … by default.
      base: the slowest pair turns once in about 2π · base positions.
      style: "half" pairs number i with i + rotary_dim / 2 (Llama, NeoX), "interleaved" 2i with 2i + 1 (GPT-J, and the
        original Llama weights).
      scaling: for contexts longer than the model was trained on: {"type": "linear" | "ntk" | "yarn" | "llama3",
        "factor": ..., ...}; yarn and llama3 also need "original_length".
      tables: from `rope_tables`, longer than the largest position; they stand in for base and scaling. A position
        that is known on the host (numpy, a list) and is not in them is an error, one on a device gives NaN. Without
        tables and with positions, angles are put together from those of the position's digits, exactly enough
        for positions below 2^24, and NaN beyond.
      rotary_dim: turn the first so many numbers of each head and leave the others; all of them by default.

    >>> rope(jnp.ones((1, 10, 2, 64))).shape
    (1, 10, 2, 64)
    """
    _check_static(style, base, scaling, tables)
    _check_known_positions("positions", positions, tables)
    return _rotated(x, positions, 0, base, style, _hashable(scaling), layout, tables, rotary_dim)


def rotate_both(query: jax.Array, key: jax.Array, given: Rope, layout: str, query_offset: int) -> tuple[Any, Any]:
    """The queries and the keys of attention, turned. Outside of jit this is one program; inside, it is inlined."""
    if not isinstance(given, Rope):
        raise rule_error(
            "attention's rope is a Rope", f"a {type(given).__name__}", "pass rope=Rope(...), tables as Rope(tables=...)"
        )
    for name in ("query_positions", "key_positions"):
        _check_known_positions(name, getattr(given, name), given.tables)
    return _rotate_both(query, key, given, layout=layout, query_offset=query_offset)


@functools.partial(jax.jit, static_argnames=("layout", "query_offset"), inline=True)
def _rotate_both(query: jax.Array, key: jax.Array, given: Rope, *, layout: str, query_offset: int) -> tuple[Any, Any]:
    common = (given.base, given.style, given.scaling, layout, given.tables, given.rotary_dim)
    return (
        _rotated(query, given.query_positions, query_offset, *common),
        _rotated(key, given.key_positions, 0, *common),
    )


def _check_static(style: str, base: float, scaling: Any, tables: Any) -> None:
    if style not in STYLES:
        raise unknown_name("style of rope", style, STYLES)
    if scaling is not None:
        scaling_numbers(dict(scaling))
    if tables is not None and (base != BASE or scaling is not None):
        raise rule_error(
            "Angles come from tables or from base and scaling",
            f"tables with base={base}, scaling={scaling}",
            "pass base and scaling to rope_tables alone",
        )


def _check_known_positions(name: str, positions: Any, tables: RopeTables | None) -> None:
    """Refuse positions that have no angle, where their values are known without waiting for a device."""
    if not isinstance(positions, np.ndarray | list) or np.size(positions) == 0:
        return
    low, high = int(np.min(positions)), int(np.max(positions))
    if tables is None:
        if max(-low, high) >= FARTHEST:
            raise rule_error(f"Positions are below {FARTHEST}", f"{name} from {low} to {high}", "pass longer tables")
    elif low < 0 or high >= tables[0].shape[0]:
        raise rule_error(
            f"The tables hold positions 0 to {tables[0].shape[0] - 1}",
            f"{name} from {low} to {high}",
            f"make them with rope_tables({high + 1}, ...)" if low >= 0 else "shift the positions to start at 0",
        )


def _rotated(
    x: jax.Array, positions: Any, start: int, base: float, style: str, scaling: Scaling, layout: str,
    tables: RopeTables | None, rotary_dim: int | None,
) -> jax.Array:  # fmt: skip
    if layout not in LAYOUTS:
        raise unknown_name("layout of rope", layout, LAYOUTS)
    if x.ndim != 4 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise rule_error(f"rope takes four axes, {layout}, of floats", describe(x), "add axes with x[None]")
    length, depth = x.shape[layout.index("t")], x.shape[-1]
    dim = depth if rotary_dim is None else rotary_dim
    if dim > depth:
        raise rule_error("rotary_dim is at most head_dim", f"{dim} of {depth}", "check both")
    if positions is not None:
        positions = jnp.asarray(positions)
        if positions.shape not in ((length,), (x.shape[0], length)) or not jnp.issubdtype(positions.dtype, jnp.integer):
            raise rule_error(
                f"positions is [length] or [batch, length], here [{length}] or [{x.shape[0]}, {length}], of integers",
                describe(positions),
                "check its shape and type",
            )
    cos, sin = _angles(dim, start, length, positions, base, scaling, tables)
    # [T, dim/2] or [B, T, dim/2] to four axes, with 1 for the heads: broadcast once and not in each product, they are
    # kept once for the gradient.
    heads = layout.index("h")
    cos, sin = (jnp.expand_dims(x if x.ndim == 3 else x[None], heads) for x in (cos, sin))
    return rotated_by(x, cos, sin, style)


def rotated_by(x: jax.Array, cos: jax.Array, sin: jax.Array, style: str = "half") -> jax.Array:
    """x [..., head_dim] turned by angles [..., rotary_dim / 2], whose other axes are x's or 1: the first rotary_dim
    numbers of each head."""
    dim = 2 * cos.shape[-1]
    if style == "half" and context.current_target().platform == "gpu":
        return _turned_in_halves(x, cos, sin)
    turned = _turned(x[..., :dim], cos, sin, style)
    return turned if dim == x.shape[-1] else jnp.concatenate((turned, x[..., dim:]), axis=-1)


def rope_angles(
    positions: jax.Array, rotary_dim: int, *, base: float = BASE, scaling: Mapping[str, Any] | None = None
) -> RopeTables:
    """Cosines and sines that `rope` turns by at these positions [...]: float32 [..., rotary_dim / 2]."""
    cos, sin = _angles(rotary_dim, 0, positions.shape[-1], positions, base, _hashable(scaling), None)
    return RopeTables(cos, sin)


def _angles(
    dim: int, start: int, length: int, positions: Any, base: float, scaling: Scaling, tables: RopeTables | None
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the positions, or of start to start + length - 1."""
    if tables is None and positions is None:
        cos, sin = _tables(start, length, dim, float(base), scaling)
        return jnp.asarray(cos), jnp.asarray(sin)
    turn, temperature = frequencies(dim, base, None if scaling is None else dict(scaling))
    if tables is None:
        return _traced_angles(positions, turn, temperature)
    cos, sin = (jnp.asarray(table) for table in tables)
    least = max(start + length if positions is None else 1, 1)
    for table in (cos, sin):
        if table.ndim != 2 or table.shape[1] != dim // 2 or table.dtype not in (jnp.float32, jnp.float64):
            raise rule_error(
                f"The tables are float32 [positions, rotary_dim / 2], here [{least} or more, {dim // 2}]",
                describe(table),
                f"make them with rope_tables(length, {dim})",
            )
    if positions is not None:
        # Beside the tables is no angle: NaN shows it, where the nearest row would hide it.
        found = (t.at[positions].get(mode="fill", fill_value=np.nan, wrap_negative_indices=False) for t in (cos, sin))
        return next(found), next(found)
    if start < 0 or min(cos.shape[0], sin.shape[0]) < least:
        raise rule_error(
            f"The tables hold every position, here {start} to {start + length - 1}",
            f"tables of positions 0 to {cos.shape[0] - 1}",
            f"make them with rope_tables({least}, {dim})" if start >= 0 else "leave the tables out, or pass positions",
        )
    return cos[start : start + length], sin[start : start + length]


def _traced_angles(positions: jax.Array, turn: np.ndarray, temperature: float) -> tuple[jax.Array, jax.Array]:
    """cos and sin of position · turn without a long table and without float32's error in a large angle.

    The position is cut into three digits of 8 bits. For each digit the 256 angles are made on the host in float64,
    and the three rotations are put together by the addition theorems, in float32.
    """
    digits = np.arange(256, dtype=np.float64)[:, None]
    positions = positions.astype(jnp.int32)
    cos, sin = None, None
    for shift in (0, 8, 16):
        digit = jnp.right_shift(jnp.abs(positions), shift) & 255
        angle = digits * (turn * float(1 << shift))
        part_cos = jnp.asarray(np.cos(angle), jnp.float32)[digit]
        part_sin = jnp.asarray(np.sin(angle), jnp.float32)[digit]
        if cos is None or sin is None:
            cos, sin = part_cos, part_sin
        else:
            cos, sin = cos * part_cos - sin * part_sin, sin * part_cos + cos * part_sin
    assert cos is not None
    assert sin is not None
    known = (positions > -FARTHEST) & (positions < FARTHEST)
    factor = jnp.where(known, jnp.float32(temperature), jnp.nan)[..., None]
    return cos * factor, sin * factor * jnp.where(positions < 0, -1.0, 1.0).astype(jnp.float32)[..., None]


def _turned_in_halves(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Style "half" for XLA's GPU compiler, which fuses a join: there a thread makes both numbers of a pair from one
    reading of them. `_turned` reads each pair twice, and took 1.3 times as long on an H200."""
    wide, half = jnp.promote_types(jnp.float32, x.dtype), cos.shape[-1]
    # lax.split, whose transpose is a join as well: the gradient is a program of the same kind.
    rest = x.shape[-1] - 2 * half
    left, right, *others = lax.split(x, (half, half, rest) if rest else (half, half), axis=-1)
    a, b = left.astype(wide), right.astype(wide)
    turned = ((a * cos - b * sin).astype(x.dtype), (b * cos + a * sin).astype(x.dtype))
    return jnp.concatenate((*turned, *others), axis=-1)


def _turned(x: jax.Array, cos: jax.Array, sin: jax.Array, style: str) -> jax.Array:
    """Each pair (a, b) becomes (a cos - b sin, b cos + a sin).

    Written as pair · cos + swapped pair · sin, so that nothing is joined from parts, which not every version of XLA's
    CPU compiler fuses: all of it is elementwise but for a reversal.
    """
    wide = jnp.promote_types(jnp.float32, x.dtype)
    half = x.shape[-1] // 2
    shape, axis = ((2, half), -2) if style == "half" else ((half, 2), -1)
    pairs = x.astype(wide).reshape(*x.shape[:-1], *shape)
    sign = np.expand_dims(np.array([-1.0, 1.0], np.float32), -1 if axis == -2 else 0)
    turned = pairs * jnp.expand_dims(cos, axis) + jnp.flip(pairs, axis) * sign * jnp.expand_dims(sin, axis)
    return turned.reshape(x.shape).astype(x.dtype)
