"""The optimizers of a planned step: AdamW and SGD by their formulas, and AdamW by optax where it is installed."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.models import ModularModelConfig, decoder
from capibara.models.preset import OptimizerSettings
from capibara.parallel.optimizers import (
    OPTIMIZERS,
    _muon_dimensions,
    make_optimizer,
    optimizer_named,
    planned_optimizer,
)

# A few float32 operations on numbers of about 1: each rounds by 2**-24, and eight steps of them add up.
_TOLERANCE = 64 * 2.0**-24


def _given() -> tuple[Any, list[Any]]:
    drawn = np.random.default_rng(0)

    def normal(shape: tuple[int, ...]) -> jax.Array:
        return jnp.asarray(drawn.standard_normal(shape), "float32")

    params = {"w": normal((4, 3)), "b": jnp.ones(3)}
    return params, [jax.tree.map(lambda p: normal(p.shape), params) for _ in range(8)]


def _run(name: Any, mixed: bool = True) -> tuple[Any, Any]:
    params, gradients = _given()
    init, update = optimizer_named(name, mixed)
    state, step = jax.jit(init)(params), jax.jit(update)
    for one in gradients:
        params, state = step(params, state, one)
    return params, state


@pytest.mark.quick
def test_adamw_is_the_formula() -> None:
    params, gradients = _given()
    found, state = _run("adamw")
    assert int(state["count"]) == len(gradients)
    for name, start in params.items():
        p = np.asarray(start, np.float64)
        m = v = np.zeros_like(p)
        for step, one in enumerate(gradients, 1):
            g = np.asarray(one[name], np.float64)
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
            way = m / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.95**step)) + 1e-8)
            p = p - 3e-4 * (way + 0.1 * p)
        np.testing.assert_allclose(state["mean"][name], m, rtol=0, atol=_TOLERANCE)
        np.testing.assert_allclose(state["square"][name], v, rtol=_TOLERANCE, atol=_TOLERANCE)
        np.testing.assert_allclose(found[name], p, rtol=_TOLERANCE, atol=_TOLERANCE)


def test_sgd_is_the_formula() -> None:
    params, gradients = _given()
    found, state = _run("sgd")
    assert state == ()
    for name, start in params.items():
        total = sum(np.asarray(one[name], np.float64) for one in gradients)
        np.testing.assert_allclose(found[name], np.asarray(start) - 3e-4 * total, rtol=0, atol=_TOLERANCE)


def test_adamw_is_optax_s() -> None:
    optax = pytest.importorskip("optax")
    same, _ = _run(optax.adamw(3e-4, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1))
    mine, _ = _run("adamw")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE), mine, same)


def test_one_parameter_is_done_before_the_next_ones_moments_are_read() -> None:
    """What lies with the host can then be fetched for one parameter after another."""
    init, update = optimizer_named("adamw", True)
    params = {"a": jnp.ones((4, 2)), "b": jnp.ones((3, 5))}
    jaxpr = jax.make_jaxpr(update)(params, init(params), params).jaxpr
    touched = {
        shape: [
            index
            for index, eqn in enumerate(jaxpr.eqns)
            if any(getattr(atom.aval, "shape", None) == shape for atom in (*eqn.invars, *eqn.outvars))
        ]
        for shape in ((4, 2), (3, 5))
    }
    assert max(touched[4, 2]) < min(touched[3, 5])


@pytest.mark.quick
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "sgd"])
def test_decay_is_a_share_of_the_weights_times_the_rate(name: str) -> None:
    """Of any optimizer, so that optimizer.weight_decay = 0.1 means the same when its name is changed."""
    params = {"layers": {"up": jnp.ones((2, 128, 128))}}
    still = jax.tree.map(jnp.zeros_like, params)

    def change(weight_decay: float) -> Any:
        optimizer = make_optimizer(name, 1e-2, weight_decay=weight_decay)
        return optimizer.update(still, optimizer.init(params), params)[0]["layers"]["up"]

    np.testing.assert_allclose(jax.jit(lambda: change(0.1) - change(0.0))(), -1e-3, rtol=1e-5)


@pytest.mark.quick
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_biases_norms_and_a_state_spaces_decays_do_not_decay(name: str) -> None:
    model = ModularModelConfig(
        hidden=16,
        layers=2,
        vocab=32,
        pattern="attention+ssm",
        blocks={"attention": {"heads": 2, "bias": True, "qk_norm": True}, "ssm": {"form": "selective", "state": 4}},
    )
    params = decoder.param_shapes(model)
    ones = jax.tree.map(lambda p: jnp.ones(p.shape, p.dtype), params)

    @jax.jit
    def changes() -> Any:
        optimizer = make_optimizer(name, 1.0, weight_decay=0.1)
        return optimizer.update(jax.tree.map(jnp.zeros_like, ones), optimizer.init(ones), ones)[0]

    layer = {
        slot: {key: p for key, p in block.items() if key != "norm_"} for slot, block in changes()["layers"][0].items()
    }
    decayed = {slot: {key for key, p in block.items() if np.any(np.asarray(p))} for slot, block in layer.items()}
    assert decayed == {
        "attention": {"query", "key", "value", "out"},
        "ssm": {"gate", "in", "conv", "out", "mix", "step"},
    }
    turned = {jax.tree_util.keystr(path[-1:], simple=True) for path, p in _paths(_muon_dimensions(ones))}
    assert turned == {"query", "key", "value", "out", "gate", "in", "mix", "step"}


def _paths(dimensions: Any) -> list[Any]:
    return jax.tree_util.tree_leaves_with_path(dimensions, is_leaf=lambda node: hasattr(node, "output_axis"))


@pytest.mark.quick
@pytest.mark.parametrize("key", ["b1", "b2", "eps"])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_each_number_changes_what_happens_or_is_refused(name: str, key: str) -> None:
    takes = {"adamw": ("b1", "b2", "eps"), "muon": ("b1", "b2", "eps"), "lion": ("b1", "b2"), "sgd": ("b1",)}
    value = {"b1": 0.999, "b2": 0.6, "eps": 0.3}[key]
    if key not in takes.get(name, ()):
        with pytest.raises(ValueError, match=rf"'{name}' takes .*Got {key} = {value}.*leave {key} out"):
            make_optimizer(name, 0.1, **{key: value})
        with pytest.raises(ValueError, match=f"'{name}' takes"):
            OptimizerSettings(name=name, **{key: value})
        return
    params = {"embed": jnp.ones((4, 4)), "layers": {"w": jnp.ones((2, 4, 4))}}
    slopes = [
        jax.tree.map(lambda p, n=n: jnp.sin(n + jnp.arange(float(p.size))).reshape(p.shape), params) for n in (0, 3)
    ]

    @functools.partial(jax.jit, static_argnums=0)
    def changes(numbers: tuple[tuple[str, float], ...]) -> Any:
        optimizer = make_optimizer(name, 0.1, **dict(numbers))
        state = optimizer.init(params)
        for slope in slopes:
            made, state = optimizer.update(slope, state, params)
        return made

    usual, other = changes(()), changes(((key, value),))
    assert float(jnp.abs(usual["embed"] - other["embed"]).max()) > 1e-3
    if key == "eps":  # of both parts
        assert float(jnp.abs(usual["layers"]["w"] - other["layers"]["w"]).max()) > 1e-3


@pytest.mark.quick
def test_gradient_descent_keeps_a_momentum_where_it_has_one_and_a_plan_counts_it() -> None:
    def kept(optimizer: Any) -> int:
        init, _ = optimizer_named(optimizer, True)
        return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(init, {"w": jnp.ones((8, 8))})))

    assert kept(make_optimizer("sgd", 0.1, b1=0.0)) == kept(planned_optimizer("sgd", 0.0)) == 0
    assert kept(make_optimizer("sgd", 0.1)) == kept(planned_optimizer("sgd")) == 64
    assert planned_optimizer("adamw") == "adamw"
