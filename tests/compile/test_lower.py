"""Lowering for platforms that are not here."""

from __future__ import annotations

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest

from capibara.compile import lower_for
from capibara.compile.lower import jitted
from capibara.compile.selfcheck import stock_pallas_matmul, xla_matmul
from capibara.errors import UnknownNameError

SQUARE = jax.ShapeDtypeStruct((128, 128), jnp.float32)


def tpu_kernel(body, block=(8, 128)):
    spec = pl.BlockSpec(block, lambda i: (i, 0))
    return pl.pallas_call(body, out_shape=SQUARE, grid=(16,), in_specs=[spec], out_specs=spec)


def add_one(x_ref, o_ref):
    o_ref[...] = x_ref[...] + 1


@pytest.mark.quick
@pytest.mark.parametrize("platform", ["tpu", "cuda", "cpu"])
def test_plain_jax_lowers_everywhere(platform):
    result = lower_for(*xla_matmul(256), platform)
    assert result.ok
    assert result.platform == platform
    assert result.stablehlo_bytes is not None
    assert result.stablehlo_bytes > 0
    assert (result.custom_calls, result.error, result.error_kind) == ((), None, None)
    assert result.seconds > 0


@pytest.mark.quick
def test_a_pallas_tpu_kernel_becomes_a_custom_call():
    result = lower_for(*stock_pallas_matmul(512, 256), "tpu")
    assert result.ok
    assert result.custom_calls == ("tpu_custom_call",)


@pytest.mark.quick
def test_a_mosaic_gpu_kernel_becomes_a_custom_call():
    kernel = plgpu.kernel(add_one, out_type=SQUARE)
    result = lower_for(kernel, (SQUARE,), "cuda")
    assert result.ok, result.error
    assert result.custom_calls == ("mosaic_gpu_v2",)


def test_a_custom_call_without_guarantees_is_let_through():
    # jax.export refuses targets it does not know; the module never leaves this process, so they pass.
    def fn(x):
        return jax.ffi.ffi_call("somebody_elses_kernel", SQUARE)(x)

    result = lower_for(fn, (SQUARE,), "tpu")
    assert result.ok, result.error
    assert result.custom_calls == ("somebody_elses_kernel",)


def misaligned_block(x):
    return tpu_kernel(add_one, block=(7, 100))(x)


def unimplemented_primitive(x):
    return tpu_kernel(lambda x_ref, o_ref: o_ref.__setitem__(..., jnp.sort(x_ref[...])))(x)


def unverifiable_type(x):
    return tpu_kernel(lambda x_ref, o_ref: o_ref.__setitem__(..., jnp.fft.fft(x_ref[...]).real))(x)


def wrong_shapes(x):
    return x @ jnp.ones((3, 5))


def looks_at_a_value(x):
    return 1 if x[0, 0] > 0 else 0


def missing_key(x):
    return {}["key"] + x


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (misaligned_block, "divisible by 8 and 128"),
        (unimplemented_primitive, "Unimplemented primitive"),
        (unverifiable_type, "Invalid type"),
        (wrong_shapes, "dot_general"),
        (looks_at_a_value, "TracerBoolConversionError"),
        (missing_key, "KeyError"),
    ],
)
def test_what_goes_wrong_is_a_result(fn, words):
    result = lower_for(fn, (SQUARE,), "tpu")
    assert not result.ok
    assert result.error_kind == "lowering"
    assert words in result.error
    assert result.stablehlo_bytes is None


def test_an_unknown_platform_names_the_choices():
    with pytest.raises(UnknownNameError, match="'tpu', 'cuda', 'cpu'"):
        lower_for(*xla_matmul(8), "rocm")


def test_what_is_jitted_keeps_its_options():
    donating = jax.jit(lambda x: x + 1, donate_argnums=0)
    assert jitted(donating) is donating
    assert lower_for(donating, (SQUARE,), "tpu").ok


def test_trees_of_arguments():
    fn = functools.partial(lambda tree, scale: tree["a"] * scale, scale=2)
    assert lower_for(fn, ({"a": SQUARE},), "tpu").ok
