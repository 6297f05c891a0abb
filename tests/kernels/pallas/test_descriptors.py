"""A Hopper kernel's TMA descriptors are copied word by word, as many bytes as before."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import launch_context
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.compile import lower_for
from capibara.kernels import target
from capibara.kernels.pallas import descriptors, hopper

ROWS, COLUMNS = 64, 64
DESCRIPTOR_BYTES = 128
assert hopper.SMEM_BYTES  # every Hopper kernel imports it, and it has the words installed


def copied(x: jax.Array, parts: int) -> jax.Array:
    """x through shared memory, in windows of `parts` sizes, each with a descriptor for the way in."""

    def body(x_hbm, out_hbm):
        @functools.partial(
            pl.run_scoped, smem=plgpu.SMEM((ROWS, COLUMNS), jnp.float32), arrived=plgpu.Barrier(num_barriers=1)
        )
        def _(smem, arrived):
            for part in range(parts):
                window = pl.ds(0, ROWS >> part)
                plgpu.copy_gmem_to_smem(x_hbm.at[window], smem.at[window], arrived)
                plgpu.barrier_wait(arrived)
                plgpu.copy_smem_to_gmem(smem.at[window], out_hbm.at[window])
                plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))
    return kernel(x)


@pytest.mark.quick(cases="all")
@pytest.mark.parametrize("parts", [1, 3])
def test_words_of_the_same_size(monkeypatch, parts):
    host = []
    as_words = descriptors.as_words

    def noted(pointer, size):
        as_words(pointer, size)
        host.append((size, str(pointer.owner)))

    monkeypatch.setattr(descriptors, "as_words", noted)
    with target("gpu", "NVIDIA H200"):
        result = lower_for(
            functools.partial(copied, parts=parts), [jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32)], "cuda"
        )
    assert result.ok
    ((size, text),) = host
    assert size == parts * DESCRIPTOR_BYTES
    assert re.search(rf"array<{size // 8} x i64>", text)


def test_installed_once():
    before = launch_context.Scratch.finalize_size
    descriptors.install()
    assert launch_context.Scratch.finalize_size is before
    assert not hasattr(before.__wrapped__, "__wrapped__")
