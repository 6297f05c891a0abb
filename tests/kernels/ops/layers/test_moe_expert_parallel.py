"""Experts over a mesh axis equal the layer on one device: values, gradients and metrics, on 8 virtual devices."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from capibara.kernels import expert_parallel_moe, init_moe, moe_layer

WIDTH, HIDDEN, EXPERTS = 16, 24, 16


def _mesh(**axes: int) -> jax.sharding.Mesh:
    size = int(np.prod(list(axes.values())))
    types = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types, devices=jax.devices("cpu")[:size])


def _normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape), jnp.float32)


PARAMS = jax.jit(init_moe, static_argnums=(1, 2, 3))(jax.random.key(0), WIDTH, HIDDEN, EXPERTS)
OPTIONS: dict[str, Any] = {"top_k": 2, "jitter": 0.1, "key": jax.random.key(3)}


def _close(got: Any, wanted: Any) -> None:
    """Float32 sums of tens of products, added in another order."""
    for mine, right in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, right, atol=5e-6 * max(float(jnp.abs(right).max()), 1e-30))


@pytest.mark.parametrize(
    ("axes", "token_axes", "skewed"), [({"expert": 8}, (), False), ({"data": 2, "expert": 4}, ("data",), True)]
)
def test_equals_one_device(axes: dict[str, int], token_axes: tuple[str, ...], skewed: bool) -> None:
    """Skewed: a bias sends every token to experts of one device, so its buffers are full and the others' empty."""
    x, flow = _normal(4, 16, WIDTH), _normal(4, 16, WIDTH, seed=1)
    params = PARAMS | ({"bias": jnp.zeros(EXPERTS).at[:2].set(100.0)} if skewed else {})
    where: dict[str, Any] = {"mesh": _mesh(**axes), "token_axis_names": token_axes}

    def slopes(layer: Any, **where: Any) -> Any:
        def loss(params: Any, x: Any) -> Any:
            y, metrics = layer(params, x, **where, **OPTIONS)
            return (y * flow).sum() + metrics.load_balancing_loss + metrics.z_loss, (y, metrics)

        return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(params, x)

    got = slopes(expert_parallel_moe, **where)
    _close(got, slopes(moe_layer))
    if skewed:
        assert got[1][1].counts[:2].tolist() == [64, 64]


def test_an_axis_that_is_not_named_holds_copies() -> None:
    x = _normal(16, WIDTH)
    mesh = _mesh(data=2, expert=2)
    got = jax.jit(lambda x: expert_parallel_moe(PARAMS, x, mesh=mesh, activation="relu", **OPTIONS)[0])(x)
    _close(got, jax.jit(lambda x: moe_layer(PARAMS, x, activation="relu", **OPTIONS)[0])(x))


@pytest.mark.quick
def test_sharded_arrays_stay_where_they_are() -> None:
    mesh = _mesh(expert=8)
    split = NamedSharding(mesh, P("expert"))
    params = {n: jax.device_put(v, NamedSharding(mesh, P()) if n == "router" else split) for n, v in PARAMS.items()}
    x = jax.device_put(_normal(64, WIDTH), split)
    made = jax.jit(lambda params, x: expert_parallel_moe(params, x, mesh=mesh, top_k=2)[0]).lower(params, x).compile()
    assert made(params, x).sharding.is_equivalent_to(split, 2)
    text = made.as_text()
    assert "all-to-all" in text
    assert "all-gather" not in text, "neither tokens nor experts are gathered"


def test_a_pair_capacity_drops_the_last_tokens_of_a_pair() -> None:
    mesh = _mesh(expert=4)
    # Every token to experts 0 and 1, both of device 0: of 16 choices from each device, room for 2 · 8 · 2 / 4 = 8.
    params = PARAMS | {"bias": jnp.zeros(EXPERTS).at[:2].set(100.0)}
    x = _normal(32, WIDTH)
    whole, _ = jax.jit(lambda x: moe_layer(params, x, top_k=2))(x)
    limited = jax.jit(lambda x: expert_parallel_moe(params, x, mesh=mesh, top_k=2, pair_capacity_factor=2.0))
    y, metrics = limited(x)
    assert int(metrics.dropped) == 32
    first = np.arange(32) % 8 < 4
    np.testing.assert_allclose(y[first], whole[first], atol=5e-6 * float(jnp.abs(whole).max()))
    np.testing.assert_array_equal(y[~first], 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"axis_name": "experts"}, "Unknown axis of the mesh"),
        ({"token_axis_names": ("rows",)}, "Unknown axis of the mesh"),
        ({"token_axis_names": ("expert",)}, "split over each axis once"),
        ({"x": _normal(30, WIDTH)}, "tokens are split evenly over the 8 devices"),
        (
            {
                "params": jax.eval_shape(
                    functools.partial(init_moe, width=WIDTH, hidden=HIDDEN, num_experts=12), jax.random.key(0)
                )
            },
            "experts are split evenly over the 8 devices",
        ),
        ({"pair_capacity_factor": 0.0}, "capacity factor is a finite number above 0"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], words: str) -> None:
    given = {"params": PARAMS, "x": _normal(32, WIDTH), "mesh": _mesh(expert=8), "top_k": 2, **change}
    params, x = given.pop("params"), given.pop("x")
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(lambda params, x: expert_parallel_moe(params, x, **given), params, x)
