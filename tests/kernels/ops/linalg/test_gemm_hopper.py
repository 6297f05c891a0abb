"""The Hopper kernel of gemm: its numbers by emulation, at rows that 8 divides and others; lowering, what it refuses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.pallas import hopper_emulator as emulator

from capibara.kernels import explain, gemm, target
from capibara.kernels.core.dispatch import recording
from capibara.kernels.lab.check import check_output, expected
from capibara.kernels.ops.linalg.gemm.api import GEMM
from capibara.kernels.ops.linalg.gemm.hopper import IMPLEMENTATION, forward
from capibara.kernels.ops.linalg.gemm.hopper.forward import HopperConfig, gemm_hopper
from capibara.kernels.pallas.hopper import SMEM_BYTES, smem_bytes

SIDE_BY_SIDE = HopperConfig(64, 128, 64, 2, "n", "m", 4)
ONE_BELOW_ANOTHER = HopperConfig(64, 64, 64, 3, "m", "n", 8)
CONFIGS = [SIDE_BY_SIDE, ONE_BELOW_ANOTHER, HopperConfig(128, 128, 64, 3), HopperConfig(256, 64, 64, 2, "n")]
CONFIGS += [HopperConfig(64, 192, 64, 2)]
ROWS = [1, 7, 8, 17, 131, 270, 327]
EPILOGUES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias-gelu": {"bias": True, "activation": "gelu"},
    "residual": {"residual": True},
    "all": {"bias": True, "activation": "silu", "residual": True},
}


@contextlib.contextmanager
def emulated(programs: int) -> Iterator[None]:
    """Inside, the kernel runs on the CPU, few enough programs of it that each has several tiles."""
    with emulator.emulated(forward), pytest.MonkeyPatch.context() as patched:
        patched.setattr(forward, "multiprocessors", lambda kind: programs)
        yield


def _normal(seed: int, *shape: int, dtype: Any = "bfloat16") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32)).astype(dtype)


def _operands(
    m: int, k: int, n: int, batch: int | None = None, bias: bool = False, residual: bool = False,
    dtype: str = "bfloat16", **params: Any,
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """The arrays of a call and its parameters."""
    lead = () if batch is None else (batch,)
    arrays = (
        _normal(0, *lead, *((k, m) if params.get("transpose_a") else (m, k)), dtype=dtype),
        _normal(1, *lead, *((n, k) if params.get("transpose_b") else (k, n)), dtype=dtype),
        _normal(2, n, dtype=dtype) if bias else None,
        _normal(3, *lead, m, n, dtype=params.get("out_dtype") or dtype) if residual else None,
    )
    return arrays, params


def _is_right(config: HopperConfig, programs: int, *sizes: int, **more: Any) -> None:
    arrays, params = _operands(*sizes, **more)
    with emulated(programs):
        made = jax.block_until_ready(gemm_hopper(*arrays, config=config, **params))
    result = check_output(made, expected(GEMM, arrays, params))
    assert result.ok, result.why


def _refusal(*sizes: int, **more: Any) -> str | None:
    arrays, params = _operands(*sizes, **more)
    with target("gpu", "NVIDIA H200"):
        return IMPLEMENTATION.refusal(GEMM.call(*arrays, **params))


@pytest.mark.quick
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("m", ROWS)
def test_any_number_of_rows(m: int, epilogue: str) -> None:
    """Tiles and the last of them cut short, along M and N; a ring that comes round inside of a tile."""
    _is_right(CONFIGS[ROWS.index(m) % 2], 2, m, 192, 320, **EPILOGUES[epilogue])


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("m", [131, 136])
@pytest.mark.parametrize("out_dtype", [None, "float32"])
def test_tiles_and_outputs(config: HopperConfig, m: int, out_dtype: str | None) -> None:
    _is_right(config, 3, m, 192, 320, bias=True, residual=True, activation="gelu", out_dtype=out_dtype)


@pytest.mark.quick
@pytest.mark.parametrize("out_dtype", [None, "float32"])
@pytest.mark.parametrize("m", [1, 131, 136])
def test_rows_of_one_batch_element_stay_out_of_the_next(m: int, out_dtype: str | None) -> None:
    _is_right(ONE_BELOW_ANOTHER, 2, m, 128, 192, batch=3, residual=True, transpose_b=True, out_dtype=out_dtype)


@pytest.mark.parametrize("transpose_b", [False, True])
def test_a_left_operand_that_is_transposed(transpose_b: bool) -> None:
    _is_right(SIDE_BY_SIDE, 2, 192, 136, 320, transpose_a=True, transpose_b=transpose_b, residual=True)


@pytest.mark.quick
@pytest.mark.parametrize("out_dtype", [None, "float32"])
def test_a_tile_waits_for_the_last_piece_of_the_one_before(out_dtype: str | None) -> None:
    """Of three pieces the last leaves from the slot that the next tile's first is written to."""
    _is_right(HopperConfig(64, 192, 64, 2), 1, 392, 128, 384, out_dtype=out_dtype)


@given(
    st.integers(1, 400),
    st.integers(2, 5),
    st.integers(2, 6),
    st.sampled_from(CONFIGS),
    st.sampled_from(list(EPILOGUES)),
    st.sampled_from([None, 1, 2]),
    st.booleans(),
    st.sampled_from(["bfloat16", "float16"]),
    st.sampled_from([None, "float32"]),
)
@settings(max_examples=15, deadline=None)
def test_drawn_calls(
    m: int, k: int, n: int, config: HopperConfig, epilogue: str, batch: int | None, transpose_b: bool, dtype: str,
    out_dtype: str | None,
) -> None:  # fmt: skip
    more = dict(EPILOGUES[epilogue], batch=batch, transpose_b=transpose_b, dtype=dtype, out_dtype=out_dtype)
    assert _refusal(m, 64 * k, 64 * n, **more) is None
    _is_right(config, 2, m, 64 * k, 64 * n, **more)


def test_gradients_of_any_number_of_rows() -> None:
    """a's has as many rows, and b's contracts over them, which wgmma does by eights: XLA multiplies there."""
    (a, b, bias, _), _ = _operands(131, 192, 320, bias=True)

    def loss(a: Any, b: Any, bias: Any, implementation: str) -> Any:
        made = gemm(a, b, bias=bias, activation="gelu", implementation=implementation)
        return (made.astype(jnp.float32) ** 2).sum()

    with emulated(2), target("gpu", "NVIDIA H200"), recording() as ran:
        found = jax.block_until_ready(jax.grad(loss, (0, 1, 2))(a, b, bias, "hopper"))
    assert [(s.call["a"].shape, s.implementation) for s in ran if s.call["residual"] is None][-2:] == [
        ((131, 320), "hopper"),
        ((131, 192), "xla"),
    ]
    wanted = jax.grad(loss, (0, 1, 2))(*(x.astype(jnp.float32) for x in (a, b, bias)), "reference")
    for one, exact in zip(found, wanted, strict=True):
        # z, its gradient, the output and its cotangent are each rounded to bfloat16.
        error = np.abs(np.asarray(one, np.float64) - np.asarray(exact, np.float64)).max()
        assert error <= 4 * 2.0**-8 * np.abs(np.asarray(exact)).max()


@pytest.mark.quick
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("out_dtype", [None, "float32"])
@pytest.mark.parametrize(("m", "batch"), [(1, None), (270, None), (327, 3), (328, 3)])
def test_lowers_for_cuda(m: int, batch: int | None, config: HopperConfig, out_dtype: str | None) -> None:
    arrays, params = _operands(
        m, 192, 320, batch=batch, bias=True, residual=True, activation="gelu", out_dtype=out_dtype
    )

    def product(*arrays: Any) -> Any:
        return gemm_hopper(*arrays, config=config, **params)

    with target("gpu", "NVIDIA H200"):
        made = jax.export.export(jax.jit(product), platforms=["cuda"])(*arrays)
    assert "mosaic_gpu" in made.mlir_module()


@pytest.mark.quick
@pytest.mark.parametrize("m", [*ROWS, 16, 1000])
def test_it_takes_any_number_of_rows(m: int) -> None:
    assert _refusal(m, 128, 192) is None
    assert _refusal(m, 128, 192, batch=2, transpose_b=True, bias=True, activation="gelu") is None


@pytest.mark.quick
@pytest.mark.parametrize(
    ("sizes", "more", "said"),
    [
        ((270, 100, 128), {}, "rows of a are 200 bytes long, and TMA wants a multiple of 16"),
        ((270, 96, 128), {}, "a is 270 x 96; Mosaic tiles it by 1 x 64 and"),
        ((272, 96, 128), {}, "a is 272 x 96; Mosaic tiles it by 8 x 64 and"),
        ((270, 128, 96), {}, "b is 128 x 96; Mosaic tiles it by 8 x 64 and"),
        ((270, 64, 128), {}, "a is 270 x 64; Mosaic tiles it by 1 x 64 and needs two"),
        ((270, 128, 64), {"out_dtype": "float32"}, "b is 128 x 64; Mosaic tiles it by 8 x 64 and needs two"),
        ((270, 128, 72), {"transpose_b": True}, "the output is 270 x 72; Mosaic tiles it by 1 x 64 and"),
        # Of a transposed operand M is the axis that lies together, and K the one of rows.
        ((327, 128, 128), {"transpose_a": True}, "rows of a are 654 bytes long"),
        ((8, 128, 128), {"transpose_a": True}, "a is 128 x 8; Mosaic tiles it by 8 x 64 and"),
        ((128, 327, 128), {"transpose_a": True}, "a is 327 x 128; Mosaic tiles it by 8 x 64 and"),
        ((128, 8, 128), {"transpose_a": True}, "a is 8 x 128; Mosaic tiles it by 8 x 64 and needs two"),
    ],
)
def test_refuses(sizes: tuple[int, int, int], more: dict[str, Any], said: str) -> None:
    assert said in (_refusal(*sizes, **more) or "nothing")


@pytest.mark.quick
@pytest.mark.parametrize("config", [HopperConfig(128, 128, 128, 2), HopperConfig(256, 64, 64, 2, "m")], ids=str)
def test_tiles_that_are_copied_as_whole_ones_alone(config: HopperConfig) -> None:
    with target("gpu", "NVIDIA H200"), pytest.raises(ValueError, match="no multiple of 8, or 8, tile_k is 64"):
        gemm_hopper(_normal(0, 270, 128), _normal(1, 128, 128), config=config)


@pytest.mark.quick
@pytest.mark.parametrize("m", [1, 270, 3001, 4096])
@pytest.mark.parametrize("out_dtype", [None, "float32"])
def test_every_tile_offered_is_taken_and_fits(m: int, out_dtype: str | None) -> None:
    shape = jax.ShapeDtypeStruct
    with target("gpu", "NVIDIA H200"):
        call = GEMM.call(shape((m, 4096), "bfloat16"), shape((4096, 4096), "bfloat16"), out_dtype=out_dtype)
        assert {config.split for config in IMPLEMENTATION.candidates(call)} == {"m", "n"}
        for config in (IMPLEMENTATION.default_config(call), *IMPLEMENTATION.candidates(call)):
            by_rows = forward.copies_rows(m)
            assert not by_rows or (config.tile_k == 64 and config.program_tile[0] <= forward.MOST_COPIED)
            allocated = forward.scratch(config, jnp.bfloat16, jnp.dtype(out_dtype or "bfloat16"), by_rows=by_rows)
            assert smem_bytes(allocated) <= SMEM_BYTES


@pytest.mark.quick
@pytest.mark.parametrize(
    ("m", "k", "activation", "runs"),
    [
        (4096, 4096, "gelu", "hopper"),
        (4095, 4096, "gelu", "hopper"),
        (4095, 4096, None, "xla"),
        (513, 4096, "silu", "hopper"),
        (400, 768, "silu", "hopper"),
        (400, 1600, "silu", "hopper"),
        (400, 4096, "silu", "xla"),
        (504, 1024, None, "hopper"),  # 128 tiles for 132 programs
        (340, 1024, None, "xla"),
        # Few rows, which have a kernel of their own.
        (1, 768, None, "hopper_turned"),
        (96, 768, "gelu", "hopper_turned"),
        (200, 2048, None, "hopper_turned"),
        (16, 4096, None, "xla"),
        (128, 4096, None, "hopper_turned"),
        (200, 8192, None, "xla"),
        (1, 8192, None, "hopper_turned"),
        (1, 8256, None, "xla"),
    ],
)
def test_which_rows_go_by_which_kernel(m: int, k: int, activation: str | None, runs: str) -> None:
    x, w = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((m, k), (k, 4096)))
    with target("gpu", "NVIDIA H200"):
        assert explain("gemm", x, w, activation=activation).implementation == runs


@pytest.mark.quick
def test_few_rows_that_the_kernel_for_them_does_not_take() -> None:
    x, w, residual = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((80, 1024), (1024, 4096), (80, 4096)))
    wide = jax.ShapeDtypeStruct((1024, 9216), "bfloat16")
    with target("gpu", "NVIDIA H200"):
        assert explain("gemm", x, w, activation="gelu").implementation == "hopper_turned"
        assert explain("gemm", x, w, activation="gelu", residual=residual).implementation == "hopper"
        assert explain("gemm", x, wide, activation="gelu").implementation == "hopper"


@pytest.mark.quick
@pytest.mark.parametrize(("m", "runs"), [(128, "hopper_turned"), (199, "xla"), (200, "hopper"), (330, "hopper")])
def test_more_tiles_of_few_rows_than_programs(m: int, runs: str) -> None:
    x, w = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((m, 1600), (1600, 6400)))
    with target("gpu", "NVIDIA H200"):
        assert explain("gemm", x, w, activation="gelu").implementation == runs
        assert explain("gemm", x, w).implementation == ("hopper_turned" if m == 128 else "xla")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("sizes", "tile"),
    [
        ((3000, 4096, 2048), (128, 192, "m")),  # 132 of them, one for each program; of 256 x 128 some had two
        ((1504, 4096, 2048), (64, 192, "m")),
        ((1001, 4096, 2048), (64, 128, "m")),
        ((4104, 2880, 5120), (64, 256, "m")),
        ((8192, 8192, 8192), (128, 128, "m")),  # so many that any are shared out
    ],
)
def test_tiles_that_programs_share_out_evenly(sizes: tuple[int, int, int], tile: tuple[int, int, str]) -> None:
    """As dispatch takes them: a tuned case that is near lends no tiles."""
    m, k, n = sizes
    a, b, bias = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((m, k), (k, n), (n,)))
    with target("gpu", "NVIDIA H200"):
        (selection,) = explain("gemm", a, b, bias=bias, activation="gelu").selections
    assert selection.implementation == "hopper"
    assert (selection.config.tile_m, selection.config.tile_n, selection.config.split) == tile


@pytest.mark.quick
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_numbers_of_64_bits_go_by_xla(platform: str) -> None:
    with jax.enable_x64(True), target(platform, "NVIDIA H200" if platform == "gpu" else "cpu"):
        for dtype in ("float64", "bfloat16"):
            x, w = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((128, 64), (64, 128)))
            assert explain("gemm", x, w).implementation == "xla"
