"""Rotary angles: cosines and sines of positions.

They are made on the host in float64 and kept as float32, so a position of 100,000 is as exact as position 1 even in a
bfloat16 model.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from capibara.errors import rule_error
from capibara.kernels.core.spec import describe
from capibara.kernels.ops.attention.rope.scaling import frequencies

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
    return _tables(0, int(length), int(rotary_dim), float(base), hashable(scaling))


def hashable(scaling: Any) -> Scaling:
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


def check_known_positions(name: str, positions: Any, tables: RopeTables | None) -> None:
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


def rope_angles(
    positions: jax.Array, rotary_dim: int, *, base: float = BASE, scaling: Mapping[str, Any] | None = None
) -> RopeTables:
    """Cosines and sines that `rope` turns by at these positions [...]: float32 [..., rotary_dim / 2]."""
    cos, sin = angles(rotary_dim, 0, positions.shape[-1], positions, base, hashable(scaling), None)
    return RopeTables(cos, sin)


def angles(
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
