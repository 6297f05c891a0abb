"""Rotary position embedding: pairs of a head's numbers turned by an angle that grows with the position.

Angles are made on the host in float64 and kept as float32 cosines and sines, so a position of 100,000 is as exact as
position 1 even in a bfloat16 model. The rotation itself is done in float32 and rounded once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from capibara.errors import rule_error, unknown_name
from capibara.kernels.op import describe

STYLES = ("half", "interleaved")
LAYOUTS = ("bhtd", "bthd")
# Each kind of scaling, with the numbers it needs and their usual values (None: no usual value).
SCALINGS: Mapping[str, Mapping[str, float | None]] = {
    "linear": {"factor": None},
    "ntk": {"factor": None},
    "yarn": {
        "factor": None,
        "original_length": None,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": math.nan,  # not a number: 0.1 ln(factor) + 1
    },
    "llama3": {"factor": None, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_length": None},
}


class RopeTables(NamedTuple):
    """Cosines and sines, float32 [length, head_dim / 2]; row p is position p."""

    cos: Any
    sin: Any


def frequencies(dim: int, base: float = 10000.0, scaling: Mapping[str, Any] | None = None) -> tuple[np.ndarray, float]:
    """The angle a pair turns by at each position, float64 [dim / 2], and what the rotated vector is multiplied by."""
    if dim < 2 or dim % 2:
        raise rule_error("rope turns pairs, so head_dim is even and 2 or more", dim, "check the head_dim")
    if not base > 1:
        raise rule_error("The base of rope is above 1", base, "pass base=10000.0")
    plain = base ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if scaling is None:
        return plain, 1.0
    kind, given = _scaling(scaling)
    factor = given["factor"]
    if kind == "linear":
        return plain / factor, 1.0
    if kind == "ntk":
        # The base is stretched so that the slowest pair turns `factor` times slower and the fastest as before.
        stretched = base * factor ** (dim / max(dim - 2, 1))
        return stretched ** (-np.arange(0, dim, 2, dtype=np.float64) / dim), 1.0
    if kind == "llama3":
        return _by_wavelength(plain, given), 1.0
    return _yarn(plain, dim, base, given)


def _scaling(scaling: Mapping[str, Any]) -> tuple[str, dict[str, float]]:
    """The kind and its numbers, defaults filled in; other libraries' spellings of the keys are understood."""
    spelled = {"rope_type": "type", "original_max_position_embeddings": "original_length"}
    asked = {spelled.get(name, name): value for name, value in scaling.items()}
    kind = asked.pop("type", None)
    if kind not in SCALINGS:
        raise unknown_name("rope scaling type", kind, SCALINGS)
    known = SCALINGS[kind]
    for name in asked:
        if name not in known:
            raise unknown_name(f"key of {kind} rope scaling", name, ("type", *known))
    merged = {**known, **asked}
    for name, value in merged.items():
        if value is None:
            raise rule_error(f"{kind} rope scaling needs {name!r}", dict(scaling), f"add {name!r}: a number")
    if not merged["factor"] >= 1:
        raise rule_error("A rope scaling factor is 1 or more", merged["factor"], "pass how many times longer")
    return kind, {name: float(value) for name, value in merged.items()}


def _by_wavelength(plain: np.ndarray, given: Mapping[str, float]) -> np.ndarray:
    """Llama 3: slow pairs are slowed by the factor, fast ones left, and those between are blended."""
    low, high = given["low_freq_factor"], given["high_freq_factor"]
    turns = given["original_length"] * plain / (2 * np.pi)  # in the original context
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return plain * (kept + (1 - kept) / given["factor"])


def _yarn(plain: np.ndarray, dim: int, base: float, given: Mapping[str, float]) -> tuple[np.ndarray, float]:
    """YaRN: blended by the number of turns in the original context, over whole pair numbers, and a temperature."""
    length, factor = given["original_length"], given["factor"]

    def pair(turns: float) -> float:
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    first = max(math.floor(pair(given["beta_fast"])), 0)
    last = min(math.ceil(pair(given["beta_slow"])), dim - 1)
    slowed = np.clip((np.arange(dim // 2) - first) / max(last - first, 0.001), 0, 1)
    temperature = given["attention_factor"]
    if math.isnan(temperature):
        temperature = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return plain * (1 - slowed) + plain / factor * slowed, temperature


def rope_tables(
    length: int, dim: int, *, base: float = 10000.0, scaling: Mapping[str, Any] | None = None
) -> RopeTables:
    """Cosines and sines of positions 0 to length - 1, made once on the host for each set of arguments and kept.

    >>> rope_tables(16, 64).cos.shape
    (16, 32)
    """
    if length < 1:
        raise rule_error("The tables hold 1 position or more", length, "pass the longest context's length")
    return _tables(int(length), int(dim), float(base), _hashable(scaling))


def _hashable(scaling: Mapping[str, Any] | None) -> tuple[tuple[str, Any], ...] | None:
    return None if scaling is None else tuple(sorted(scaling.items()))


@functools.lru_cache(maxsize=16)
def _tables(length: int, dim: int, base: float, scaling: tuple[tuple[str, Any], ...] | None) -> RopeTables:
    turn, temperature = frequencies(dim, base, None if scaling is None else dict(scaling))
    angles = np.arange(length, dtype=np.float64)[:, None] * turn
    # numpy, so that nothing cached belongs to a trace or a device.
    cos, sin = (np.asarray(f(angles) * temperature, np.float32) for f in (np.cos, np.sin))
    for table in (cos, sin):
        table.flags.writeable = False
    return RopeTables(cos, sin)


def rope(
    x: Float[Array, "B H T D"],
    positions: Int[Array, T] | Int[Array, "B T"] | None = None,
    *,
    base: float = 10000.0,
    style: str = "half",
    scaling: Mapping[str, Any] | None = None,
    layout: str = "bhtd",
    tables: RopeTables | None = None,
) -> Float[Array, "B H T D"]:
    """Rotate queries or keys by their positions.

    Args:
      x: [batch, heads, length, head_dim] with layout "bhtd", [batch, length, heads, head_dim] with "bthd".
      positions: [length] or [batch, length]; 0, 1, 2, … by default.
      base: the slowest pair turns once in about 2π · base positions.
      style: "half" pairs number i with i + head_dim / 2 (Llama, NeoX), "interleaved" 2i with 2i + 1 (GPT-J, and the
        original Llama weights).
      scaling: for contexts longer than the model was trained on: {"type": "linear" | "ntk" | "yarn" | "llama3",
        "factor": ..., ...}; yarn and llama3 also need "original_length".
      tables: from `rope_tables`, as long as the largest position; with them base and scaling are already in. Without
        tables and with traced positions, angles are computed in the trace from positions split in two, exactly
        enough for positions to 2^24.

    >>> rope(jnp.ones((1, 2, 10, 64))).shape
    (1, 2, 10, 64)
    """
    if style not in STYLES:
        raise unknown_name("style of rope", style, STYLES)
    if layout not in LAYOUTS:
        raise unknown_name("layout of rope", layout, LAYOUTS)
    if x.ndim != 4 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise rule_error(f"rope takes four axes, {layout}, of floats", describe(x), "add axes with x[None]")
    length = x.shape[2 if layout == "bhtd" else 1]
    if positions is not None:
        positions = jnp.asarray(positions)
        if positions.shape not in ((length,), (x.shape[0], length)):
            raise rule_error(
                f"positions is [length] or [batch, length], here [{length}] or [{x.shape[0]}, {length}]",
                describe(positions),
                "check its shape",
            )
    cos, sin = _angles(x.shape[-1], length, positions, base, scaling, tables)
    # [T, D/2] or [B, T, D/2], to broadcast over the heads.
    axis = -3 if layout == "bhtd" else -2
    cos, sin = jnp.expand_dims(cos, axis), jnp.expand_dims(sin, axis)
    return _rotated(x, cos, sin, style)


def _angles(
    dim: int, length: int, positions: Any, base: float, scaling: Mapping[str, Any] | None, tables: RopeTables | None
) -> tuple[jax.Array, jax.Array]:
    if tables is not None:
        cos, sin = (jnp.asarray(table) for table in tables)
        if cos.shape[1] != dim // 2 or cos.shape[0] < (length if positions is None else 1):
            raise rule_error(
                f"The tables are [positions, head_dim / 2], here [{length} or more, {dim // 2}]",
                describe(cos),
                "make them with rope_tables(length, head_dim)",
            )
        return (cos[:length], sin[:length]) if positions is None else (cos[positions], sin[positions])
    if positions is None:
        cos, sin = rope_tables(length, dim, base=base, scaling=scaling)
        return jnp.asarray(cos), jnp.asarray(sin)
    turn, temperature = frequencies(dim, base, scaling)
    return _traced_angles(positions, turn, temperature)


def _traced_angles(positions: jax.Array, turn: np.ndarray, temperature: float) -> tuple[jax.Array, jax.Array]:
    """cos and sin of position · turn without a long table and without float32's error in a large angle.

    The position is cut into three digits of 8 bits. For each digit the 256 angles are made on the host in float64,
    and the three rotations are put together by the addition theorems, in float32.
    """
    digits = np.arange(256, dtype=np.float64)[:, None]
    cos, sin = None, None
    for shift in (0, 8, 16):
        digit = jnp.right_shift(positions, shift) & 255
        angle = digits * (turn * float(1 << shift))
        part_cos = jnp.asarray(np.cos(angle), jnp.float32)[digit]
        part_sin = jnp.asarray(np.sin(angle), jnp.float32)[digit]
        if cos is None or sin is None:
            cos, sin = part_cos, part_sin
        else:
            cos, sin = cos * part_cos - sin * part_sin, sin * part_cos + cos * part_sin
    assert cos is not None
    assert sin is not None
    return cos * temperature, sin * temperature


def _rotated(x: jax.Array, cos: jax.Array, sin: jax.Array, style: str) -> jax.Array:
    wide = jnp.promote_types(jnp.float32, x.dtype)
    x_wide = x.astype(wide)
    if style == "half":
        first, second = jnp.split(x_wide, 2, axis=-1)
        turned = (first * cos - second * sin, second * cos + first * sin)
        return jnp.concatenate(turned, axis=-1).astype(x.dtype)
    pairs = x_wide.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    first, second = pairs[..., 0], pairs[..., 1]
    stacked = jnp.stack((first * cos - second * sin, second * cos + first * sin), axis=-1)
    return stacked.reshape(x.shape).astype(x.dtype)
