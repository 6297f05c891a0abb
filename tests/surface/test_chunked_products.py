"""A bound on the contraction's block changes the program and not the result."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from capibara.kernels import explain, gemm, interpret, target
from capibara.kernels.core.spec import unit_roundoff
from capibara.kernels.ops.linalg.gemm.tpu.forward import TileConfig
from capibara.surface.chunked_products import gemm_chunked, gemm_tiled

RNG = np.random.default_rng(0)
A = jnp.asarray(RNG.normal(size=(24, 300)), jnp.float32)
B = jnp.asarray(RNG.normal(size=(300, 16)), jnp.float32)
# The Pallas kernel's accumulator rounds once a block as well: four times sqrt(K) units, and the output's.
FLOAT32 = 4 * unit_roundoff(jnp.float32) * (1 + 300**0.5)


def error(got: Any, a: Any = A, b: Any = B) -> float:
    want = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    assert got.shape == want.shape
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want))


def loops(fn: Any, *args: Any) -> list[int]:
    """Lengths of the scans in the program."""
    text = str(jax.make_jaxpr(fn)(*args))
    return [int(line.split("length=")[1]) for line in text.splitlines() if "length=" in line]


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize(("chunk", "whole"), [(64, [4]), (100, [3]), (1, [300]), (299, [1]), (300, []), (5000, [])])
def test_blocks_are_a_loop_that_adds_up_in_float32(chunk: int, whole: list[int]) -> None:
    assert loops(lambda a, b: gemm_chunked(a, b, chunk), A, B) == whole
    assert error(gemm_chunked(A, B, chunk)) < FLOAT32


def test_sums_of_narrow_blocks_stay_in_float32() -> None:
    """4096 ones in bfloat16 by 16: partial sums kept in bfloat16 would stop growing at 256 x 16."""
    ones = jnp.ones((2, 8192), jnp.bfloat16)
    assert float(gemm_chunked(ones, ones.T, 16)[0, 0]) == 8192


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((2, 3, 8, 40), (2, 3, 40, 5)),
        ((2, 8, 40), (40, 5)),
        ((8, 40), (3, 40, 5)),
        ((2, 1, 8, 40), (3, 40, 5)),
    ],
)
def test_batches(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    x, y = (jnp.asarray(RNG.normal(size=s), jnp.float32) for s in (a, b))
    assert error(gemm_chunked(x, y, 16), x, y) < FLOAT32


def test_everything_gemm_takes() -> None:
    bias, residual = jnp.ones(16), jnp.ones((24, 16))
    options: dict[str, Any] = {"bias": bias, "residual": residual, "activation": "gelu", "transpose_a": True}
    got = gemm_chunked(A.T, B, 64, **options)
    want = gemm(A.T, B, **options, precision="highest")
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)  # values up to ~60, sums of 300 products
    assert gemm_chunked(A, B.T, 64, transpose_b=True, out_dtype=jnp.bfloat16).dtype == jnp.bfloat16


@pytest.mark.quick
def test_gradients_vmap_and_shard_map() -> None:
    def loss(product: Any) -> Any:
        return lambda a, b: jnp.sum(jnp.sin(product(a, b)))

    cut = lambda a, b: gemm_chunked(a, b, 64)  # noqa: E731
    for got, want in zip(jax.grad(loss(cut), (0, 1))(A, B), jax.grad(loss(jnp.matmul), (0, 1))(A, B), strict=True):
        # sin's argument is ~17 and carries FLOAT32 of it; its slope is at most 1.
        np.testing.assert_allclose(got, want, atol=20 * FLOAT32 * 17)
    stacked = jnp.stack([A, 2 * A])
    assert error(jax.vmap(cut, (0, None))(stacked, B), stacked, B) < FLOAT32
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("data",))
    split = jax.shard_map(cut, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    assert error(jax.jit(split)(A, B)) < FLOAT32


@pytest.mark.quick
@pytest.mark.parametrize(("chunk", "block"), [(128, 128), (256, 256), (1024, 1024), (300, 256), (7, 128)])
def test_on_a_tpu_it_is_the_kernels_block(chunk: int, block: int) -> None:
    x = jax.ShapeDtypeStruct((2048, 2048), "bfloat16")
    with target("tpu", "TPU v4"):
        (selection,) = explain(lambda a, b: gemm_chunked(a, b, chunk), x, x).selections
    assert selection.implementation == "pallas_tpu"
    assert selection.config.block_k == block


def test_a_block_that_no_tile_fits_is_cut() -> None:
    x = jax.ShapeDtypeStruct((128, 1 << 20), "float32")
    with target("tpu", "TPU v4"):
        (selection,) = explain(lambda a, b: gemm_chunked(a, b, 1 << 19, transpose_b=True), x, x).selections
    # 128 x block_k floats of each operand, twice, in 15 MiB with the output's tiles.
    assert 2048 <= selection.config.block_k <= 15 * 2**20 // (4 * 128 * 4)


def test_on_a_tpu_another_implementation_is_still_a_loop() -> None:
    x = jax.ShapeDtypeStruct((256, 512), "bfloat16")
    with target("tpu", "TPU v4"):
        fn = lambda a, b: gemm_chunked(a, b, 128, implementation="xla", transpose_b=True)  # noqa: E731
        assert loops(fn, x, x) == [4]


@pytest.mark.usefixtures("nothing_said_yet")
def test_rounding_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    x = jax.ShapeDtypeStruct((256, 256), "bfloat16")
    with caplog.at_level(logging.WARNING, "capibara.kernels"), target("tpu"):
        for _ in range(2):
            explain(lambda a, b: gemm_chunked(a, b, 200), x, x)
            explain(lambda a, b: gemm_chunked(a, b, 128), x, x)
    assert [r.getMessage() for r in caplog.records] == [
        "chunk_size=200 is block_k=128 for the TPU kernel: a multiple of 128 (said once)"
    ]


def test_the_kernel_itself_is_right_with_that_block() -> None:
    with interpret():
        assert error(gemm_chunked(A, B, 200, implementation="pallas_tpu", precision="highest")) < FLOAT32


@pytest.mark.quick
def test_square_tiles() -> None:
    x = jax.ShapeDtypeStruct((512, 512), "float32")
    with target("tpu", "TPU v4"):
        for block in (128, 256):
            (selection,) = explain(lambda a, b, s=block: gemm_tiled(a, b, s), x, x).selections
            assert selection.config == TileConfig(block, block, block)
            assert "bf16[512,512] bf16[512,512]" in selection.call.signature
    # Elsewhere the block is the loop's.
    assert loops(lambda a, b: gemm_tiled(a, b, 128), A, B) == [2]
    exact, rounded = gemm_tiled(A, B, use_bfloat16=False), gemm_tiled(A, B)
    assert exact.dtype == rounded.dtype == jnp.float32
    assert error(exact) < FLOAT32
    # Two roundings to bfloat16 (unit 2**-9) of random inputs; none would be far below.
    assert 2**-12 < error(rounded) < 2 * 2**-9


@pytest.mark.parametrize("chunk", [0, -1, True, 1.5, "128"])
def test_a_chunk_is_a_positive_number(chunk: Any) -> None:
    with pytest.raises(ValueError, match=r"chunk_size is the most.*Fix: use 1024"):
        gemm_chunked(A, B, chunk)


@pytest.mark.parametrize("block", [0, 100, -128, None, 192.0])
def test_a_tile_is_a_multiple_of_128(block: Any) -> None:
    with pytest.raises(ValueError, match="block_size is a positive multiple of 128"):
        gemm_tiled(A, B, block)


def test_a_tile_that_does_not_fit_says_so() -> None:
    x = jax.ShapeDtypeStruct((8192, 8192), "bfloat16")
    with target("tpu", "TPU v4"), pytest.raises(ValueError, match="use a smaller block_size"):
        explain(lambda a, b: gemm_tiled(a, b, 4096), x, x)


@pytest.mark.quick
def test_mistakes_are_gemms_own() -> None:
    with pytest.raises(ValueError, match="contracted axes"):
        gemm_chunked(A, A, 64)
    with pytest.raises(ValueError, match="Unknown implementation of gemm 'nope'"):
        gemm_chunked(A, B, 64, implementation="nope")
    with pytest.raises(ValueError, match=r"pallas_tpu.*cannot take this call"):
        gemm_chunked(A, B, 64, implementation="pallas_tpu")
    with pytest.raises(ValueError, match=r"Unknown precision 'bf16'.*'bfloat16'"):
        gemm_chunked(A, B, 64, precision="bf16")
    with pytest.raises(ValueError, match="gemm takes"):
        gemm_chunked(A.astype(jnp.int32), B, 64)
