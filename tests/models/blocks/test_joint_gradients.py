"""Queries, keys and values share the products of their gradients on one GPU: the same numbers, and where."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels import target
from capibara.mesh import MeshConfig
from capibara.models.blocks.joint_gradients import products_of_heads
from capibara.models.blocks.spec import LORA_DOWN, LORA_SCALE, LORA_UP, QUANTIZED_SCALE, products
from capibara.parallel import remat
from capibara.program.markers import recording_axes

INPUTS, WIDTH = 32, 8
SHAPES = {"query": (4, WIDTH), "key": (2, WIDTH), "value": (2, WIDTH)}


def _drawn(dtype: Any = jnp.bfloat16) -> tuple[dict[str, jax.Array], jax.Array, list[jax.Array]]:
    """(weights, an input [2, 5, INPUTS], what comes back to each product)."""
    keys = iter(jax.random.split(jax.random.key(0), 8))
    params = {name: jax.random.normal(next(keys), (INPUTS, *shape)) for name, shape in SHAPES.items()}
    x = jax.random.normal(next(keys), (2, 5, INPUTS), dtype)
    return params, x, [jax.random.normal(next(keys), (2, 5, *shape), dtype) for shape in SHAPES.values()]


def _gradients(params: dict[str, Any], x: Any, flows: Any) -> Any:
    outs, pull = jax.vjp(lambda params, x: products(params, SHAPES, x), params, x)
    return outs, *pull(flows)


def _count(params: dict[str, Any], x: Any, flows: Any) -> int:
    """Matrix products of both passes."""
    return str(jax.make_jaxpr(_gradients)(params, x, flows)).count("dot_general[")


APART, TOGETHER = 3 + 6, 3 + 2


@contextlib.contextmanager
def one_gpu() -> Any:
    with target("gpu", "NVIDIA H200"):
        yield


@pytest.mark.quick
def test_the_gradients_are_those_of_the_products_one_by_one() -> None:
    """In float32, where the order of a sum along 64 numbers is all that differs."""
    params, x, flows = _drawn(jnp.float32)
    weights = list(params.values())
    outs, pull = jax.vjp(products_of_heads, x, weights)
    apart, pull_apart = jax.vjp(lambda x, weights: [jnp.tensordot(x, w, 1) for w in weights], x, weights)
    together, one_by_one = (jax.tree.leaves(both) for both in ((outs, pull(flows)), (apart, pull_apart(flows))))
    for made, wanted in zip(together, one_by_one, strict=True):
        assert (made.shape, made.dtype) == (wanted.shape, wanted.dtype)
        np.testing.assert_allclose(made, wanted, rtol=0, atol=64 * 2**-24 * float(jnp.abs(wanted).max()))


def test_on_a_gpu_the_input_gradient_is_rounded_once() -> None:
    """Of three products it is the sum of three numbers of 16 bits, rounded after each addition."""
    params, x, flows = _drawn()
    cpu = _gradients(params, x, flows)
    with one_gpu():
        gpu = _gradients(params, x, flows)
    exact = sum(
        np.einsum("bthd,ihd->bti", np.asarray(flow, np.float64), np.asarray(w.astype(x.dtype), np.float64))
        for flow, w in zip(flows, params.values(), strict=True)
    )
    errors = [np.abs(np.asarray(found[2], np.float64) - exact).max() for found in (gpu, cpu)]
    assert errors[0] <= 2**-8 * np.abs(exact).max()
    assert errors[0] <= errors[1]
    for made, wanted in zip(jax.tree.leaves(gpu[:2]), jax.tree.leaves(cpu[:2]), strict=True):
        np.testing.assert_array_equal(made, wanted)  # the outputs and the weights' gradients


@pytest.mark.quick
def test_where_they_are_shared() -> None:
    given = _drawn()
    assert _count(*given) == APART
    with one_gpu():
        assert _count(*given) == TOGETHER
        assert _count(*_drawn(jnp.float32)) == APART
        with recording_axes():
            assert _count(*given) == APART
        with jax.set_mesh(MeshConfig((2, 4), ("data", "model")).build(jax.devices()[:8])):
            assert _count(*given) == APART
        with jax.set_mesh(MeshConfig((1,), ("data",)).build(jax.devices()[:1])):
            assert _count(*given) == TOGETHER
    with target("tpu", "TPU v4"):
        assert _count(*given) == APART


def test_weights_of_eight_bits_and_steps_that_keep_their_products_have_them_apart() -> None:
    params, x, flows = _drawn()
    with one_gpu():
        scaled = params | {"key" + QUANTIZED_SCALE: jnp.ones(SHAPES["key"])}
        assert _count(scaled, x, flows) > TOGETHER
        kept = remat.checkpoint_scans(lambda params: _gradients(params, x, flows)[0], "dots")
        assert "custom_vjp" not in str(jax.make_jaxpr(kept)(params))
        assert "custom_vjp" in str(jax.make_jaxpr(lambda params: products(params, SHAPES, x))(params))


def test_a_low_rank_change_is_added_to_them() -> None:
    params, x, flows = _drawn()
    params |= {
        "query" + LORA_DOWN: jnp.full((INPUTS, 2), 0.1),
        "query" + LORA_UP: jnp.full((2, *SHAPES["query"]), 0.1),
        "query" + LORA_SCALE: jnp.float32(2.0),
    }
    wanted = _gradients(params, x, flows)
    with one_gpu():
        assert _count(params, x, flows) < APART + 6
        found = _gradients(params, x, flows)
    for name in ("query" + LORA_DOWN, "query" + LORA_UP):
        np.testing.assert_array_equal(found[1][name], wanted[1][name])
    np.testing.assert_array_equal(found[0][0], wanted[0][0])
