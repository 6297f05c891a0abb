"""Kernels that start before the one before them is done: who does, and who says so. Their order is tested with each."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from capibara.kernels import target
from capibara.kernels.ops.attention.paged_write.api import paged_write
from capibara.kernels.ops.layers.few_rows.api import few_rows
from capibara.kernels.pallas import overlap

pytestmark = pytest.mark.quick


def _kernels() -> str:
    """What is traced of a product and of a write, kernels included."""
    bf16, int32 = jnp.bfloat16, jnp.int32

    def shaped(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    pool, angles, place = shaped(bf16, 4, 16, 8, 128), shaped(jnp.float32, 8, 64), shaped(int32, 8)

    def both(x: Any, weight: Any, heads: Any, pool: Any, angles: Any, place: Any) -> Any:
        y = few_rows(x, weight, implementation="hopper")
        return y, paged_write(heads, pool, pool, angles, angles, place, place, implementation="hopper")

    with target("gpu", "NVIDIA H200"):
        given = shaped(bf16, 8, 256), shaped(bf16, 256, 256), shaped(bf16, 8, 32, 128), pool, angles, place
        return str(jax.make_jaxpr(both)(*given))


@pytest.mark.skipif(not overlap.can_overlap(), reason="kernels can start early with JAX 0.11 and later")
def test_kernels_start_early_inside_and_nowhere_else() -> None:
    with overlap.overlapping():
        inside = _kernels()
    assert inside.count("griddepcontrol_wait") == inside.count("griddepcontrol_launch_dependents") == 2
    assert "griddepcontrol" not in _kernels()


def test_without_it_nothing_changes() -> None:
    """JAX before 0.11 has no such launches: `overlapping` is then of no effect."""
    assert not overlap.overlaps()
    with overlap.overlapping():
        assert overlap.overlaps() == overlap.can_overlap() == (jax.__version_info__ >= (0, 11))
        assert ("griddepcontrol" in _kernels()) == overlap.can_overlap()
    assert not overlap.overlaps()
