"""Leaky integrate-and-fire neurons against a loop in numpy, and their gradient against the surrogate's formula."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from capibara.kernels import explain, explain_scan, lif_neurons, spike

RNG = np.random.default_rng(0)
CURRENT = RNG.normal(0.3, 0.5, size=(2, 11, 3)).astype(np.float32)
START = RNG.normal(size=(2, 3)).astype(np.float32)
DECAY = np.asarray([0.9, 0.5, 0.99], np.float32)

FORMULAS = {
    "fast_sigmoid": lambda u, k: 1 / (1 + k * np.abs(u)) ** 2,
    "atan": lambda u, k: 1 / (1 + (np.pi / 2 * k * u) ** 2),
    "triangle": lambda u, k: np.maximum(0, 1 - k * np.abs(u)),
}


def loop(current: Any, decay: Any, threshold: float, reset: str, start: Any) -> Any:
    v, spikes, membrane = start, [], []
    for now in np.moveaxis(current, 1, 0):
        v = decay * v + now
        fired = (v > threshold).astype(np.float32)
        spikes.append(fired)
        membrane.append(v)
        v = {"subtract": v - threshold * fired, "zero": v * (1 - fired), "none": v}[reset]
    return np.stack(spikes, 1), np.stack(membrane, 1), v


@pytest.mark.quick
@pytest.mark.parametrize("reset", ["subtract", "zero", "none"])
def test_spikes_are_the_loops(reset: str) -> None:
    want = loop(CURRENT, DECAY, 0.7, reset, START)
    got = lif_neurons(CURRENT, decay=DECAY, threshold=0.7, reset=reset, initial_state=START, return_state=True)
    np.testing.assert_array_equal(got[0], want[0])
    assert 0 < got[0].mean() < 1
    for one, other in zip(got[1:], want[1:], strict=True):
        np.testing.assert_allclose(one, other, atol=11 * 2**-22)  # a rounding or two a step, of numbers below 4
    # In two pieces, the second from where the first ended; and by the time constant.
    options = {"tau": -1 / np.log(DECAY), "threshold": 0.7, "reset": reset, "return_state": True}
    first = lif_neurons(CURRENT[:, :4], initial_state=START, **options)
    second = lif_neurons(CURRENT[:, 4:], initial_state=first[2], **options)
    np.testing.assert_array_equal(np.concatenate([first[0], second[0]], 1), want[0])
    assert lif_neurons(CURRENT.astype(jnp.bfloat16), decay=0.5, reset=reset).dtype == jnp.bfloat16


@pytest.mark.quick
@pytest.mark.parametrize("surrogate", FORMULAS)
def test_the_gradient_is_the_surrogates(surrogate: str) -> None:
    usual = {"fast_sigmoid": 25.0, "atan": 2.0, "triangle": 1.0}[surrogate]
    above = np.linspace(-1.5, 1.5, 7, dtype=np.float32)
    slopes = jax.vmap(jax.grad(lambda u: spike(u, surrogate, 3.0)))(above)
    np.testing.assert_allclose(slopes, FORMULAS[surrogate](above, 3.0), rtol=1e-6)

    # Through time, with the reset: by hand, from the last step to the first. d is the derivative by v after a step.
    for reset, slope in (("subtract", None), ("zero", 3.0), ("none", 3.0)):
        _, v, _ = loop(CURRENT, DECAY, 0.7, reset, START)
        d, want = np.zeros_like(START), []
        for now in v[:, ::-1].swapaxes(0, 1):
            formula = FORMULAS[surrogate](now - 0.7, slope or usual)
            fired = (now > 0.7).astype(np.float32)
            through = {"subtract": 1 - 0.7 * formula, "zero": 1 - fired - now * formula, "none": 1.0}[reset]
            d = formula + d * through
            want.append(d)
            d = d * DECAY

        def total(current: Any, start: Any, reset: str = reset, slope: float | None = slope) -> Any:
            options = {"surrogate": surrogate, "slope": slope, "reset": reset}
            return lif_neurons(current, decay=DECAY, threshold=0.7, initial_state=start, **options).sum()

        by_current, by_start = jax.jit(jax.grad(total, argnums=(0, 1)))(CURRENT, START)
        # Some ten operations a step on numbers of order ten, and a slope of 25 makes the last bits of v count.
        np.testing.assert_allclose(by_current, np.stack(want[::-1], 1), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(by_start, d, rtol=1e-4, atol=1e-4)


def test_which_path_and_which_keyword() -> None:
    def chosen(**options: Any) -> list[str]:
        told = explain(lambda x: lif_neurons(x, decay=0.9, **options), jnp.zeros((2, 16, 3)))
        return [one.implementation for one in told.selections]

    assert chosen() == chosen(reset="zero") == ["sequential"]
    assert chosen(reset="none") == ["xla"]
    assert chosen(reset="none", implementation="reference") == ["reference"]

    def kept(**options: Any) -> str:
        return str(jax.make_jaxpr(lambda x: lif_neurons(x, decay=0.9, **options))(jnp.zeros((2, 16, 3))))

    assert "length=8" in kept(num_segments=2)
    assert "prevent_cse" in kept()
    assert "prevent_cse" not in kept(use_checkpointing=False)
    # The inspection would come to the same answer by itself: a spike has its own derivative.
    plan = explain_scan(lambda v, x: (v - spike(v + x, "atan", 2.0), v), jnp.zeros(3), jnp.zeros((4, 3)))
    assert plan.primitive == "custom_jvp_call"


def test_mistakes() -> None:
    for options, said in (
        ({}, "as decay, or as tau. Got neither"),
        ({"decay": 0.9, "tau": 2.0}, "Got both"),
        ({"decay": np.ones(5)}, r"decay is one number, or one a neuron \(3\)"),
        ({"decay": 0.9, "reset": "hard"}, "Unknown reset of lif_neurons 'hard'"),
        ({"decay": 0.9, "surrogate": "relu"}, "Unknown surrogate"),
        ({"decay": 0.9, "slope": 0}, "slope is above zero"),
        ({"decay": 0.9, "initial_state": np.ones(3)}, "initial_state is current's shape without time"),
        ({"decay": 0.9, "implementation": "xla"}, "with reset='subtract'"),
        ({"decay": 0.9, "reset": "none", "num_segments": 2}, "for neurons that reset"),
        ({"decay": 0.9 + 1j}, "decay is of real numbers"),
        ({"tau": 2 + 1j}, "tau is of real numbers"),
        ({"decay": 0.9, "initial_state": START + 1j}, "initial_state is of real numbers"),
        ({"tau": -1.0}, "tau is above zero"),
        ({"tau": np.asarray([1.0, 0.0, 2.0])}, "tau is above zero"),
        ({"decay": 0.9, "threshold": "high"}, "threshold of type str"),
        ({"decay": 0.9, "threshold": np.ones((5, 2, 3))}, "threshold is one number"),
        ({"decay": 0.9, "slope": "steep"}, "slope is a number"),
        ({"decay": 0.9, "return_state": "no"}, "return_state is True or False"),
        ({"decay": 0.9, "use_checkpointing": "no"}, "use_checkpointing is True or False"),
    ):
        with pytest.raises(ValueError, match=said):
            lif_neurons(CURRENT, **options)
    with pytest.raises(ValueError, match="time, neurons"):
        lif_neurons(jnp.ones(3), decay=0.9)
    with pytest.raises(ValueError, match="Unknown surrogate of spike 'bogus'"):
        jax.grad(spike)(0.25, "bogus", 1.0)


@pytest.mark.parametrize("reset", ["subtract", "none"])
def test_inside_shard_map(reset: str) -> None:
    """The batch is split, and the initial state is absent or shared; or the decays are split and the batch is not."""
    mesh = jax.make_mesh((2,), ("t",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:2])

    def alone(x: Any, start: Any = None, decay: Any = DECAY) -> Any:
        return lif_neurons(x, decay=decay, reset=reset, initial_state=start, threshold=0.7)

    def over(*specs: Any) -> Any:
        return jax.jit(jax.shard_map(alone, mesh=mesh, in_specs=specs, out_specs=P("t")))

    np.testing.assert_array_equal(over(P("t"))(CURRENT), alone(CURRENT))
    want = alone(CURRENT, np.repeat(START[:1], 2, 0))
    np.testing.assert_array_equal(over(P("t"), P())(CURRENT, START[:1]), want)
    decays = np.asarray([0.5, 0.9], np.float32)
    wants = [alone(CURRENT[:1], START[:1], decay) for decay in decays]
    np.testing.assert_array_equal(over(P(), P(), P("t"))(CURRENT[:1], START[:1], decays), np.concatenate(wants))
