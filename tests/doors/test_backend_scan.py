"""capibara.jax.tpu_v4.backend: the scans' object."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.jax.tpu_v4 import kernels
from capibara.jax.tpu_v4.backend import TpuV4ScanOps
from capibara.kernels.ops import scan

RNG = np.random.default_rng(0)
ops = TpuV4ScanOps()


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


@pytest.mark.quick
def test_the_documented_call() -> None:
    def affine(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jax.nn.sigmoid(x) * h + x
        return h, 2 * h

    def general(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jnp.tanh(h + x)
        return h, h

    init, xs = normal(4), normal(12, 4)
    for f, path in ((affine, "diagonal"), (general, "sequential")):
        want = jax.lax.scan(f, init, xs)
        got = ops.parallel_scan(f=f, init=init, xs=xs, num_segments=3, use_checkpointing=True)
        # Twelve steps, a few roundings each, of numbers of order one.
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=1e-5), got, want)
        plan = ops.explain(f, init, xs, 3, False, reverse=True)
        assert (plan.path, plan.use_checkpointing) == (path, False)
        assert plan.segments == (3 if path == "diagonal" else 1)
    with pytest.raises(ValueError, match="Unknown path"):
        ops.parallel_scan(affine, init, xs, path="none")
    with pytest.raises(TypeError, match="no_such"):
        ops.parallel_scan(affine, init, xs, no_such=1)


def test_the_other_methods_are_the_rooms_functions() -> None:
    x, dt, B, C = normal(2, 8, 4), jax.nn.softplus(normal(2, 8, 4)), normal(2, 8, 3), normal(2, 8, 3)
    A, D = -jnp.exp(normal(4, 3)), normal(4)
    heads, groups = x.reshape(2, 8, 2, 2), B[:, :, None]
    for got, want in (
        (ops.linear_recurrence(dt, x, x[:, 0], reverse=True), scan.linear_recurrence(dt, x, x[:, 0], reverse=True)),
        (ops.selective_scan(x, dt, A, B, C, D, z=x), scan.selective_scan(x, dt, A, B, C, D, z=x)),
        (
            ops.state_space_dual(heads, dt[..., :2], A[:2, 0], groups, C[:, :, None], D[:2]),
            scan.state_space_dual(heads, dt[..., :2], A[:2, 0], groups, C[:, :, None], D[:2]),
        ),
        (ops.lif_neurons(x, decay=0.5, reset="zero"), scan.lif_neurons(x, decay=0.5, reset="zero")),
    ):
        np.testing.assert_array_equal(got, want)
    assert kernels.scan is scan
