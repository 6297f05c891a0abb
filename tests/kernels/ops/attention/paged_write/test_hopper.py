"""The Hopper kernel of paged_write: its numbers by emulation, what it leaves alone, what it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.compile import lower_for
from capibara.kernels import target, trust
from capibara.kernels.lab.check import check_output, expected
from capibara.kernels.ops.attention.paged_write.api import PAGED_WRITE, has_kernel
from capibara.kernels.ops.attention.paged_write.hopper import IMPLEMENTATION
from capibara.kernels.ops.attention.paged_write.hopper.forward import HeadsConfig, candidates, paged_write_hopper

SMALL = ("a-token", "padded", "in-parts", "one-part", "part-of-a-head", "wide-heads", "three-numbers-a-thread")


def _configs(name: str) -> list[HeadsConfig]:
    case = PAGED_WRITE.case(name)
    return list(candidates(PAGED_WRITE.call(*case.args(), **case.params)))


@pytest.mark.parametrize(("name", "config"), [(name, config) for name in SMALL for config in _configs(name)], ids=str)
def test_emulated(name: str, config: HeadsConfig, emulated_hopper: Callable[..., Any]) -> None:
    case = PAGED_WRITE.case(name)
    arrays = case.arrays()
    found = emulated_hopper(jax.jit(lambda *given: paged_write_hopper(*given, config=config)), *arrays)
    result = check_output(found, expected(PAGED_WRITE, arrays, case.params))
    assert result.ok, result.why
    # Values are copied, and what no token goes to stays: to the bit.
    wanted = PAGED_WRITE.reference(*arrays)
    np.testing.assert_array_equal(np.asarray(found[2], np.float32), np.asarray(wanted[2], np.float32))
    changed = np.any(np.asarray(arrays[1] != wanted[1]), axis=tuple(range(2, arrays[1].ndim)))
    np.testing.assert_array_equal(np.asarray(found[1])[~changed], np.asarray(arrays[1])[~changed])


@pytest.mark.quick
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "float32"}, "bfloat16 or float16, not float32"),
        ({"tokens": 0}, "no tokens"),
        ({"heads": 6, "kv_heads": 3}, "divides 6 and 3"),
        ({"rotary": 32}, "32 of 64 numbers turned"),
        ({"page_size": 1 << 28}, "counted in 32 bits"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], said: str) -> None:
    with target("gpu", "NVIDIA H200"):
        assert re.search(said, str(IMPLEMENTATION.refusal(PAGED_WRITE.call(*_operands(**changes)))))
        call = PAGED_WRITE.call(*_operands())
        assert IMPLEMENTATION.refusal(call) is None
    with target("gpu", "NVIDIA A100-SXM4-80GB"):
        assert "Hopper" in str(IMPLEMENTATION.refusal(PAGED_WRITE.call(*call.args)))


def _operands(
    tokens: int = 2, heads: int = 4, kv_heads: int = 4, depth: int = 64, rotary: int = 64, page_size: int = 16,
    dtype: str = "bfloat16",
) -> list[jax.ShapeDtypeStruct]:  # fmt: skip
    pool = jax.ShapeDtypeStruct((9, page_size, kv_heads * depth), jnp.dtype(dtype))
    angles = jax.ShapeDtypeStruct((tokens, rotary // 2), jnp.float32)
    at = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    projected = jax.ShapeDtypeStruct((tokens, heads + 2 * kv_heads, depth), jnp.dtype(dtype))
    return [projected, pool, pool, angles, angles, at, at]


@pytest.mark.quick
def test_a_program_has_heads_of_one_kind_and_two_pairs_a_thread_where_it_can() -> None:
    with target("gpu", "NVIDIA H200"):
        for name, heads in {"llama-1b-1": 4, "llama-8b-32": 4, "narrow-32": 8, "wide-heads": 1}.items():
            case = PAGED_WRITE.case(name)
            assert candidates(PAGED_WRITE.call(*case.args()))[0] == HeadsConfig(heads)


@pytest.mark.quick
def test_heads_that_do_not_divide_are_an_error() -> None:
    with pytest.raises(ValueError, match="heads divides the heads"):
        paged_write_hopper(*PAGED_WRITE.case("a-token").arrays(), config=HeadsConfig(3))


@pytest.mark.quick
def test_it_is_taken_where_it_was_timed() -> None:
    with target("gpu", "NVIDIA H200"):
        assert has_kernel(*_operands(tokens=256))
        assert not has_kernel(*_operands(tokens=257))
        with trust("predicted"):
            assert has_kernel(*_operands(tokens=257))
            assert not has_kernel(*_operands(dtype="float32"))
    with trust("predicted"):
        assert not has_kernel(*_operands())


@pytest.mark.quick
def test_the_pools_are_written_where_they_lie() -> None:
    """The kernel's results are its operands, in the lowered program: what is written is a few rows."""
    with target("gpu", "NVIDIA H200"):
        step = jax.jit(lambda *given: PAGED_WRITE(*given, implementation="hopper"), donate_argnums=(1, 2))
        lowered = lower_for(step, _operands(), "cuda")
        text = jax.export.export(
            step, platforms=["cuda"], disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
        )(*_operands()).mlir_module()
    assert lowered.ok, lowered.error
    (call,) = re.findall(r"stablehlo.custom_call @mosaic_gpu_v2.*", text)
    assert len(re.findall(r"output_operand_alias<", call)) == 2, call
