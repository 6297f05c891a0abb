"""The int8 codec: its bound on any numbers, what is exact, what is not finite, and what is refused."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from capibara.kernels import explain, interpret, target, trust
from capibara.kernels.ops.collective.compressed import decode_int8, encode_int8
from capibara.kernels.ops.collective.compressed.rules import ROUNDING
from capibara.kernels.ops.collective.compressed.tpu.codec import TileConfig

BLOCK = 16
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True)
ARRAYS = hnp.arrays(np.float32, (3, 37), elements=FLOAT32)  # 37: the last block is short


def _round_trip(x: np.ndarray, key: jax.Array | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    codes, scales = encode_int8(x, block_size=BLOCK, key=key)
    return np.asarray(codes), np.asarray(scales), np.asarray(decode_int8(codes, scales, block_size=BLOCK), np.float64)


@settings(max_examples=60, deadline=None)
@given(x=ARRAYS, unbiased=st.booleans())
def test_the_error_is_within_the_documented_bound(x: np.ndarray, unbiased: bool) -> None:
    codes, scales, back = _round_trip(x, jax.random.key(5) if unbiased else None)
    wide = np.pad(x.astype(np.float64), ((0, 0), (0, 11))).reshape(3, 3, BLOCK)
    steps = np.maximum(np.abs(wide).max(-1) / 127, 2.0**-126)
    # A scale is one product by a constant that is itself rounded: two roundings.
    np.testing.assert_allclose(scales, steps, rtol=2 * 2.0**-24)
    step = np.repeat(steps, BLOCK, -1)[:, :37]
    # Decoding the largest float32 may round to infinity, whose difference is no error of the code.
    difference = np.abs(np.minimum(back, np.finfo(np.float32).max).clip(-np.finfo(np.float32).max) - x)
    # Subnormal numbers, below the smallest step, count as zeros.
    subnormal = np.where(np.abs(x) < 2.0**-126, 2.0**-126, 0.0)
    bound = step * ((1.0 if unbiased else 0.5) + ROUNDING) + subnormal
    assert (difference <= bound).all(), (difference / step).max()
    assert (codes[x == 0] == 0).all()
    assert (back[x == 0] == 0).all()


@pytest.mark.quick
def test_what_is_not_finite_stays_in_its_place_and_is_counted() -> None:
    x = np.linspace(-1, 1, 2 * BLOCK, dtype=np.float32)
    clean = _round_trip(x, None)[2]
    x[[3, 7, 20]] = np.nan, np.inf, -np.inf
    made = encode_int8(x, block_size=BLOCK)
    back = np.asarray(decode_int8(*made, block_size=BLOCK))
    assert int(made.non_finite) == 3
    assert np.flatnonzero(np.isnan(back)).tolist() == [3, 7, 20]
    # Its neighbours are what they are without it: no largest value was taken out of these blocks.
    others = np.isfinite(x)
    np.testing.assert_array_equal(back[others], clean[others].astype(np.float32))


def test_unbiased_rounding_is_right_on_average_and_nearest_is_not() -> None:
    # One value of 127 fixes the step at 1; the others are 0.3 of a step.
    x = jnp.full((4096, 16), 0.3).at[:, 0].set(127.0)
    drawn = encode_int8(x, block_size=16, key=jax.random.key(0)).codes[:, 1:]
    # 61440 draws of variance 0.21: the mean's deviation is 0.00185; five of them.
    assert abs(float(drawn.mean()) - 0.3) < 5 * (0.21 / drawn.size) ** 0.5
    assert not encode_int8(x, block_size=16).codes[:, 1:].any()
    other = encode_int8(x, block_size=16, key=jax.random.key(1)).codes[:, 1:]
    assert 0.3 < float((drawn != other).mean()) < 0.54  # two independent draws differ with 2 · 0.3 · 0.7 = 0.42


def test_the_block_decides_who_shares_a_scale() -> None:
    x = jnp.array([1000.0, 0.0, 1.0, 0.5])
    assert encode_int8(x, block_size=4).codes.tolist() == [127, 0, 0, 0]
    assert encode_int8(x, block_size=2).codes.tolist() == [127, 0, 127, 64]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_types_are_kept_by_asking(dtype: str) -> None:
    x = jnp.arange(-8.0, 9.0).astype(dtype)
    back = decode_int8(*encode_int8(x), out_dtype=dtype)
    assert back.dtype == x.dtype
    # Half a step of 8/127, and a rounding of a number up to 8 to the type.
    limit = 8 / 127 * (0.5 + ROUNDING) + 8 * float(jnp.finfo(dtype).eps) / 2
    assert float(jnp.abs(back.astype("float32") - x.astype("float32")).max()) <= limit


@pytest.mark.quick(cases="all")
@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize(("shape", "block"), [((2, 150 * 256), 256), ((36, 130 * 128), 128)], ids=["line", "rows"])
def test_the_tpu_kernel_gives_the_same_codes(unbiased: bool, shape: tuple[int, ...], block: int) -> None:
    """Both shapes end inside of a tile, the matrix in both directions."""
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    x[0, 17], x[1, 500] = np.nan, -np.inf
    key = jax.random.key(3) if unbiased else None
    plain = encode_int8(x, block_size=block, key=key)
    with interpret("hlo"):
        kernel = encode_int8(x, block_size=block, key=key, implementation="pallas_tpu")
        back = decode_int8(*plain, block_size=block, implementation="pallas_tpu")
    np.testing.assert_array_equal(plain.codes, kernel.codes)
    np.testing.assert_array_equal(plain.scales, kernel.scales)
    np.testing.assert_array_equal(back, decode_int8(*plain, block_size=block))
    assert explain(encode_int8, x).implementation == "xla"  # a CPU's choice


@pytest.mark.parametrize("shape", [(16777216,), (32, 524288), (4, 32, 131072)])
@pytest.mark.parametrize("what", ["encode", "decode"])
def test_nothing_is_moved_around_the_tpu_kernel(what: str, shape: tuple[int, ...]) -> None:
    """What a TPU keeps in another order is copied before a kernel sees it: for 64 MiB the compiler took 40 s."""
    fn: Any = {"encode": encode_int8, "decode": decode_int8}[what]
    if what == "encode":
        shapes = [jax.ShapeDtypeStruct(shape, jnp.float32)]
    else:
        scales = jax.ShapeDtypeStruct((*shape[:-1], shape[-1] // 256), jnp.float32)
        shapes = [jax.ShapeDtypeStruct(shape, jnp.int8), scales]
    with target("tpu", "TPU v4"):
        made = jax.export.export(jax.jit(lambda *x: fn(*x, implementation="pallas_tpu")), platforms=["tpu"])(*shapes)
    for line in made.mlir_module().splitlines():
        if re.search(r"stablehlo\.(pad|slice|transpose|concatenate)", line):
            pytest.fail(f"moves numbers: {line}")
        if found := re.search(r"stablehlo\.reshape.*\(tensor<(.*?)x[a-z]+\d+>\) -> tensor<(.*?)x[a-z]+\d+>", line):
            assert _order(found[1]) == _order(found[2]), line


@pytest.mark.parametrize(
    ("shape", "block", "against"),
    [
        ((4096,), 256, None),
        ((1, 1, 4096), 128, None),
        ((8, 512), 256, None),
        ((2, 32, 512), 256, None),
        ((4, 512), 256, "copied into another order"),  # four rows are half a register
        ((2, 16, 512), 256, "copied into another order"),  # 16 rows are half a tile of codes, under a leading axis
        ((4096,), 512, "blocks of up to 256"),
    ],
)
def test_a_tpu_takes_the_kernel_where_it_reads_numbers_as_they_lie(
    shape: tuple[int, ...], block: int, against: str | None
) -> None:
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    codes = jax.ShapeDtypeStruct(shape, jnp.int8)
    scales = jax.ShapeDtypeStruct((*shape[:-1], shape[-1] // block), jnp.float32)
    with target("tpu", "TPU v4"), trust("predicted"):
        for told in (explain(encode_int8, x, block_size=block), explain(decode_int8, codes, scales, block_size=block)):
            assert told.implementation == ("pallas_tpu" if against is None else "xla")
            assert (against or "because it is predicted") in str(told)


def _order(text: str) -> tuple[int, ...]:
    """How a TPU keeps an array of these sizes: a line in the order of its numbers, a matrix in tiles of 8 to 32 rows.

    One row, and rows of 128, are a line; leading axes are one with the rows when those fill their tiles.
    """
    *lead, width = (int(size) for size in text.split("x"))
    rows = math.prod(lead)
    if rows == 1 or width == 128:
        return (rows * width,)
    assert len(lead) == 1 or lead[-1] % 32 == 0
    return rows, width


def test_bad_input_says_what_to_do() -> None:
    x = jnp.ones(8)
    with pytest.raises(ValueError, match="block_size is a positive whole number"):
        encode_int8(x, block_size=0)
    with pytest.raises(ValueError, match="encode_int8 takes bfloat16"):
        encode_int8(jnp.arange(8))
    with pytest.raises(ValueError, match="cuts the last axis"):
        encode_int8(jnp.float32(1.0))
    with pytest.raises(ValueError, match="key is one JAX key"):
        encode_int8(x, key=3)
    with pytest.raises(ValueError, match="key is one JAX key"):
        encode_int8(x, key=jax.random.split(jax.random.key(0)))
    codes, scales = encode_int8(x, block_size=4)
    with pytest.raises(ValueError, match="blocks of 8 have float scales of shape"):
        decode_int8(codes, scales, block_size=8)
    with pytest.raises(ValueError, match="takes int8 codes"):
        decode_int8(x, scales, block_size=4)
    with pytest.raises(ValueError, match="out_dtype is one of"):
        decode_int8(codes, scales, block_size=4, out_dtype="int32")
    with pytest.raises(ValueError, match="whole registers"), interpret("hlo"):
        encode_int8(x, block_size=4, implementation="pallas_tpu")
    with pytest.raises(ValueError, match="rows is a positive multiple of 128"):
        TileConfig(12)
    with pytest.raises(ValueError, match="fill a register of 128 scales"), interpret("hlo"):
        encode_int8(jnp.ones((8, 256)), implementation="pallas_tpu", config=TileConfig(384))
