"""capibara.jax.lax.associative_scan: jax's own outside a context, jax's results by dispatch inside."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import capibara.jax.lax as lax
from capibara.dropin.lax_scan import why_not
from capibara.kernels.core.dispatch import recording
from capibara.mesh.context import tpu_v4_optimization_context

RNG = np.random.default_rng(0)
A, B = (jnp.asarray(RNG.uniform(-0.9, 0.9, size=(2, 7, 3)), jnp.float32) for _ in range(2))


def recurrence(u: Any, v: Any) -> Any:
    return u[0] * v[0], v[0] * u[1] + v[1]


@jax.jit
def other_way(u: Any, v: Any) -> Any:
    return {"b": v["b"] + u["b"] * v["decay"], "decay": v["decay"] * u["decay"]}


@pytest.mark.quick
@pytest.mark.parametrize("reverse", [False, True])
def test_a_linear_recurrence_goes_through_dispatch(reverse: bool) -> None:
    for fn, elems, axis in ((recurrence, (A, B), 1), (other_way, {"b": B, "decay": A}, 2 if reverse else -1)):
        ours, jaxs = (
            lambda elems, f=f, fn=fn, axis=axis: f(fn, elems, reverse=reverse, axis=axis)
            for f in (lax.associative_scan, jax.lax.associative_scan)
        )
        want = jax.jit(jaxs)(elems)
        with tpu_v4_optimization_context(), recording() as inside:
            got = jax.jit(ours)(elems)
        with recording() as outside:
            same = jax.jit(ours)(elems)
        assert [one.call.op.name for one in inside] == ["linear_recurrence"]
        assert not outside
        jax.tree.map(np.testing.assert_array_equal, same, want)
        # Sums of at most 7 terms below one, a rounding or two each.
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=2 * 7 * 2**-24), got, want)


OTHERS = {
    "one array": (jnp.add, A, "1 arrays"),
    "a maximum": (lambda u, v: (u[0] * v[0], jnp.maximum(u[1], v[1])), (A, B), "has max"),
    "another sum": (lambda u, v: (u[0] * v[0], u[0] * v[1] + u[1]), (A, B), "is not that of a linear recurrence"),
    "doubled": (lambda u, v: (u[0] * v[0], v[0] * u[1] + v[1] + v[1]), (A, B), "is not that of a linear recurrence"),
    "a constant": (lambda u, v: (u[0] * v[0], 2 * v[0] * u[1] + v[1]), (A, B), "has a constant"),
    "whole numbers": (recurrence, (A.astype(jnp.int32), B.astype(jnp.int32)), "int32"),
    "one step": (recurrence, (A[:, :1], B[:, :1]), "less than two steps"),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.usefixtures("nothing_said_yet")
def test_anything_else_is_jaxs_own(name: str, caplog: pytest.LogCaptureFixture) -> None:
    fn, elems, said = OTHERS[name]
    assert said in str(why_not(fn, elems, axis=1))
    with caplog.at_level(logging.WARNING, "capibara.kernels"), tpu_v4_optimization_context(), recording() as inside:
        got = jax.make_jaxpr(lambda elems: lax.associative_scan(fn, elems, axis=1))(elems)
    assert not inside
    assert said in caplog.text
    # The very program of jax.
    assert str(got) == str(jax.make_jaxpr(lambda elems: jax.lax.associative_scan(fn, elems, axis=1))(elems))


def test_mistakes_are_jaxs_own() -> None:
    with tpu_v4_optimization_context():
        for arguments in ((recurrence,), (recurrence, (A, B), False, 7), (lambda u, v: u[0], (A, B))):
            told = []
            for scan in (jax.lax.associative_scan, lax.associative_scan):
                with pytest.raises((TypeError, ValueError, IndexError)) as error:
                    scan(*arguments)
                told.append((type(error.value), str(error.value)))
            assert told[0] == told[1]
