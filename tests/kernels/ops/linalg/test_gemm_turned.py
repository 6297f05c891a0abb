"""The Hopper kernel of gemm for few rows: its numbers by emulation, its cuts, lowering, what it refuses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.ops.linalg.test_gemm_hopper import EPILOGUES, _operands
from tests.kernels.pallas import hopper_emulator as emulator

from capibara.kernels import explain, gemm, target
from capibara.kernels.core.dispatch import recording
from capibara.kernels.lab.check import check_output, expected
from capibara.kernels.ops.linalg.gemm.api import GEMM
from capibara.kernels.ops.linalg.gemm.hopper import TURNED_IMPLEMENTATION, forward, turned
from capibara.kernels.ops.linalg.gemm.hopper.turned import TurnedConfig, gemm_turned
from capibara.kernels.pallas.hopper import SMEM_BYTES, smem_bytes


def _is_right(config: TurnedConfig, *sizes: int, **more: Any) -> None:
    arrays, params = _operands(*sizes, **more)
    with emulator.emulated(turned):
        made = jax.block_until_ready(gemm_turned(*arrays, config=config, **params))
    result = check_output(made, expected(GEMM, arrays, params))
    assert result.ok, result.why


def _refusal(*sizes: int, **more: Any) -> str | None:
    arrays, params = _operands(*sizes, **more)
    with target("gpu", "NVIDIA H200"):
        return TURNED_IMPLEMENTATION.refusal(GEMM.call(*arrays, **params))


@pytest.mark.quick(cases=3)
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize(("m", "rows"), [(1, 8), (8, 8), (13, 16), (77, 40), (96, 40), (136, 128)])
def test_rows_in_eights(m: int, rows: int, epilogue: str) -> None:
    """A tile that has more rows than there are, one that starts early, one whose rows are copied one by one; a ring
    that comes round."""
    _is_right(TurnedConfig(rows, 2), m, 320, 192, **EPILOGUES[epilogue])


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("parts", [2, 3, 4, 7])
def test_parts_along_k(parts: int, epilogue: str) -> None:
    """As many steps for each of them, or fewer for the last, or none."""
    _is_right(TurnedConfig(24, 2, parts), 48, 384, 128, **EPILOGUES[epilogue])


@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("out_dtype", [None, "float32"])
@pytest.mark.parametrize("k", [128, 512])
def test_outputs_and_orientations(k: int, out_dtype: str | None, transpose_b: bool) -> None:
    _is_right(TurnedConfig(24, 4), 48, k, 192, transpose_b=transpose_b, out_dtype=out_dtype, bias=True)


@pytest.mark.quick
@pytest.mark.parametrize("n", [96, 160, 288])
def test_columns_that_are_no_whole_programs_go_elsewhere(n: int) -> None:
    """Where b is transposed and the output float32 the other kernel takes multiples of 32."""
    arrays, params = _operands(40, 1024, n, transpose_b=True, out_dtype="float32")
    with target("gpu", "NVIDIA H200"):
        call = GEMM.call(*arrays, **params)
        assert forward.refuses(call) is None
        assert f"the output has {n} columns" in (TURNED_IMPLEMENTATION.refusal(call) or "")
        taken = explain("gemm", *arrays[:2], transpose_b=True, out_dtype="float32").implementation
    assert taken != "hopper_turned"


@given(
    st.integers(1, 200), st.integers(2, 6), st.integers(2, 4), st.sampled_from([8, 24, 64, 128]),
    st.sampled_from([2, 4, 8]), st.sampled_from([1, 2, 3]), st.sampled_from(list(EPILOGUES)), st.booleans(),
    st.sampled_from(["bfloat16", "float16"]), st.sampled_from([None, "float32"]),
)  # fmt: skip
@settings(max_examples=12, deadline=None)
def test_drawn_calls(
    m: int, k: int, n: int, rows: int, stages: int, parts: int, epilogue: str, transpose_b: bool, dtype: str,
    out_dtype: str | None,
) -> None:  # fmt: skip
    more = dict(EPILOGUES[epilogue], transpose_b=transpose_b, dtype=dtype, out_dtype=out_dtype)
    assert _refusal(m, 64 * k, 64 * n, **more) is None
    _is_right(TurnedConfig(rows, stages, parts), m, 64 * k, 64 * n, **more)


@pytest.mark.quick
def test_gradients_of_few_rows() -> None:
    """b's contracts over the rows, and is XLA's; a's are by the same kernel, of b as it lies."""
    (a, b, bias, _), _ = _operands(40, 256, 128, bias=True)

    def loss(a: Any, b: Any, bias: Any, implementation: str) -> Any:
        made = gemm(a, b, bias=bias, activation="silu", implementation=implementation)
        return (made.astype(jnp.float32) ** 2).sum()

    with emulator.emulated(turned), target("gpu", "NVIDIA H200"), recording() as ran:
        found = jax.block_until_ready(jax.grad(loss, (0, 1, 2))(a, b, bias, "hopper_turned"))
    ours = [s.call.params["transpose_b"] for s in ran if s.implementation == "hopper_turned"]
    assert True in ours
    assert False in ours
    wanted = jax.grad(loss, (0, 1, 2))(*(x.astype(jnp.float32) for x in (a, b, bias)), "reference")
    for one, exact in zip(found, wanted, strict=True):
        # z, its gradient, the output and its cotangent are each rounded to bfloat16.
        error = jnp.abs(one.astype(jnp.float32) - exact).max()
        assert error <= 4 * 2.0**-8 * jnp.abs(exact).max()


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize("config", [TurnedConfig(8, 8), TurnedConfig(40, 8), TurnedConfig(128, 4, 3)], ids=str)
@pytest.mark.parametrize("out_dtype", [None, "float32"])
@pytest.mark.parametrize("m", [1, 77, 136])
def test_lowers_for_cuda(m: int, config: TurnedConfig, out_dtype: str | None) -> None:
    arrays, params = _operands(m, 192, 320, bias=True, activation="gelu", out_dtype=out_dtype)

    def product(*arrays: Any) -> Any:
        return gemm_turned(*arrays, config=config, **params)

    with target("gpu", "NVIDIA H200"):
        made = jax.export.export(jax.jit(product), platforms=["cuda"])(*arrays)
    assert "mosaic_gpu" in made.mlir_module()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("sizes", "more", "said"),
    [
        ((128, 96, 192), {"transpose_a": True}, "its rows are a's"),
        ((96, 128, 192), {"batch": 2}, "it takes one product, not a batch"),
        ((96, 100, 192), {}, "rows of a are 200 bytes long"),
        ((96, 128, 96), {}, "b is 128 x 96; Mosaic tiles it by 8 x 64"),
        ((96, 128, 96), {"transpose_b": True, "out_dtype": "float32"}, "the output has 96 columns"),
    ],
)
def test_refuses(sizes: tuple[int, int, int], more: dict[str, Any], said: str) -> None:
    assert said in (_refusal(*sizes, **more) or "nothing")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("config", "said"),
    [
        ((12, 4), "rows is a multiple of 8"),
        ((264, 4), "from 8 to 256"),
        ((64, 1), "stages is two or more"),
        ((64, 4, 0), "parts is one or more"),
    ],
)
def test_configs_that_are_none(config: tuple[int, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TurnedConfig(*config)


@pytest.mark.quick
@pytest.mark.parametrize("m", [1, 13, 86, 200, 1000])
@pytest.mark.parametrize("out_dtype", [None, "float32"])
def test_every_cut_offered_fits(m: int, out_dtype: str | None) -> None:
    shape = jax.ShapeDtypeStruct
    with target("gpu", "NVIDIA H200"):
        call = GEMM.call(shape((m, 4096), "bfloat16"), shape((4096, 1024), "bfloat16"), out_dtype=out_dtype)
        cuts = TURNED_IMPLEMENTATION.candidates(call)
    assert len({(c.rows, c.parts) for c in cuts}) == len(cuts) > 1
    for c in cuts:
        assert c.rows <= 8 * -(-m // 8)
        out = jnp.dtype("float32" if c.parts > 1 else out_dtype or "bfloat16")
        allocated = turned.scratch(c, jnp.dtype("bfloat16"), out, by_rows=forward.copies_rows(m))
        assert smem_bytes(allocated) <= SMEM_BYTES


@pytest.mark.quick
@pytest.mark.parametrize(
    ("sizes", "rows", "parts"),
    [
        # The fewest microseconds of those timed on an H200, or within 2 % of it.
        ((77, 768, 2304), {40}, {1}),
        ((128, 1600, 6400), {128}, {1}),
        ((1, 4096, 1024), {8}, {8}),
        ((200, 4096, 1024), {104}, {3, 4}),
        ((128, 1024, 4096), {64}, {1}),
    ],
)
def test_the_cut_that_programs_are_done_with_soonest(
    sizes: tuple[int, int, int], rows: set[int], parts: set[int]
) -> None:
    m, k, n = sizes
    a, b = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((m, k), (k, n)))
    with target("gpu", "NVIDIA H200"):
        (selection,) = explain("gemm", a, b).selections
    assert selection.implementation == "hopper_turned"
    assert selection.config.rows in rows
    assert selection.config.parts in parts
    assert selection.config.stages == 8
