"""Recomputation added to a traced function: same values and gradients, less kept."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.parallel import remat
from capibara.parallel.remat import POLICIES, checkpoint_scans, outermost_scans


@jax.custom_vjp
def _tripled(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


# A gradient that is not the function's own: it shows whether the rewriting keeps it.
_tripled.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (3 * g * jnp.cos(x),))


def _loss(weights: jax.Array, x: jax.Array) -> jax.Array:
    @jax.jit
    def layers(weights: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.scan(lambda x, w: (_tripled(x @ w) + x, x.sum()), x, weights)

    y, sums = layers(weights, x)
    return jnp.sum(jax.nn.gelu(y) ** 2) + sums.sum()


def _kept(loss: object, *args: jax.Array) -> int:
    """Bytes that the forward pass hands to the backward pass."""
    residuals = jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(loss, *a)[1], *args))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in residuals)


@pytest.mark.quick
@pytest.mark.parametrize("policy", POLICIES)
def test_values_and_gradients_are_the_functions_own(policy: str) -> None:
    weights, x = 0.1 * jnp.arange(24.0).reshape(6, 2, 2), jnp.ones((4, 2))
    plain = jax.jit(jax.value_and_grad(_loss, (0, 1)))(weights, x)
    slim = jax.jit(jax.value_and_grad(checkpoint_scans(_loss, policy), (0, 1)))(weights, x)
    # The same operations in another order of evaluation: a few roundings of float32 apart.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), plain, slim)


@pytest.mark.quick
def test_each_policy_keeps_less() -> None:
    weights, x = jnp.ones((6, 8, 8)), jnp.ones((128, 8))
    none, dots, full = (_kept(checkpoint_scans(_loss, policy), weights, x) for policy in POLICIES)
    assert none > dots > full
    # Full keeps the carry of each layer; dots its one product as well.
    assert dots - full == 6 * x.nbytes


@pytest.mark.quick
@pytest.mark.parametrize("policy", ["dots", "full"])
def test_layers_that_are_written_out_are_computed_again_behind_a_barrier(policy: str) -> None:
    # Without one the compiler finds the same operations twice, does them once, and keeps what it was to forget.
    def barriers(unroll: int | bool) -> bool:
        def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
            return jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, weights, unroll=unroll)[0].sum()

        step = jax.jit(jax.grad(checkpoint_scans(loss, policy)))
        return "optimization_barrier" in step.lower(jnp.ones((6, 8, 8)), jnp.ones((4, 8))).as_text()

    assert barriers(unroll=True)
    assert barriers(unroll=2)
    assert not barriers(unroll=1)


def test_scans_inside_of_custom_gradients_are_their_authors() -> None:
    @jax.custom_vjp
    def inner(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=3)[0]

    inner.defvjp(lambda x: (inner(x), x), lambda x, g: (g,))
    assert outermost_scans(inner, jnp.ones(3)) == 0
    assert outermost_scans(_loss, jnp.ones((3, 2, 2)), jnp.ones((4, 2))) == 1
    assert float(jax.grad(lambda x: checkpoint_scans(inner, "full")(x).sum())(jnp.ones(3)).sum()) == 3.0


def test_an_unknown_policy_names_the_choices() -> None:
    with pytest.raises(ValueError, match="'dots'"):
        checkpoint_scans(_loss, "some")


@pytest.mark.parametrize("policy", [*remat.POLICIES, remat.OFFLOAD])
def test_what_is_traced_is_told_what_is_kept(policy: str) -> None:
    told = []

    def fn(x: jax.Array) -> jax.Array:
        told.append((remat.keeps_products(), remat.keeps_everything()))
        return x

    remat.checkpoint_scans(fn, policy)(jnp.ones(2))
    assert told == [(policy == "dots", policy == "none")]
    assert (remat.keeps_products(), remat.keeps_everything()) == (False, True), "of what is traced afterwards"
