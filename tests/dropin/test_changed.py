"""The changed names: jax's own outside a context, dispatch inside, and never one's trace for the other."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as real
import numpy as np
import pytest

import capibara.jax.numpy as jnp
from capibara.dropin import alias as _alias
from capibara.dropin import changed as _changed
from capibara.dropin.changed import CHANGED
from capibara.mesh.context import tpu_v4_optimization_context

A = np.arange(6, dtype=np.float32).reshape(2, 3)
B = np.arange(12, dtype=np.float32).reshape(3, 4)
CALLS: dict[str, Callable[[Any], jax.Array]] = {
    "matmul": lambda jnp: jnp.matmul(A, B),
    "dot": lambda jnp: jnp.dot(A, B, precision="highest"),
    "einsum": lambda jnp: jnp.einsum("ij,jk->ik", A, B),
}


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls that reached dispatch; each result is 100 more, so that it shows where it came from."""
    calls: list[tuple[Any, ...]] = []
    fake = ModuleType("capibara.dropin.numpy_products")

    def entry(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        calls.append((original, args, kwargs))
        return original(*args, **kwargs) + 100

    for name in CALLS:
        setattr(fake, name, entry)
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    return calls


@pytest.mark.quick
@pytest.mark.parametrize("name", CALLS)
def test_outside_it_is_jax_s(name: str, dispatched: list[Any]) -> None:
    np.testing.assert_array_equal(CALLS[name](jnp), CALLS[name](real))
    assert dispatched == []


@pytest.mark.quick
@pytest.mark.parametrize("name", CALLS)
def test_inside_it_dispatches_with_the_original_first(name: str, dispatched: list[Any]) -> None:
    with tpu_v4_optimization_context():
        got = CALLS[name](jnp)
    np.testing.assert_array_equal(got, CALLS[name](real) + 100)
    ((original, args, kwargs),) = dispatched
    assert original is getattr(real, name)
    assert [arg for arg in args if isinstance(arg, str)] == (["ij,jk->ik"] if name == "einsum" else [])
    assert kwargs == ({"precision": "highest"} if name == "dot" else {})


def test_jax_itself_and_operators_are_not_touched(dispatched: list[Any]) -> None:
    with tpu_v4_optimization_context():
        real.matmul(A, B)
        _ = jnp.asarray(A) @ jnp.asarray(B)
    assert dispatched == []


@pytest.mark.quick
@pytest.mark.parametrize("inside_first", [True, False])
def test_a_trace_is_never_reused_across_the_border(inside_first: bool, dispatched: list[Any]) -> None:
    function = jax.jit(lambda a, b: jnp.matmul(a, b))
    plain = A @ B
    # At one precision: it is part of jit's key too, and must not be what tells the two apart.
    with jax.default_matmul_precision("bfloat16"):
        for round_ in range(4):
            if (round_ % 2 == 0) == inside_first:
                with tpu_v4_optimization_context():
                    np.testing.assert_array_equal(function(A, B), plain + 100)
            else:
                np.testing.assert_array_equal(function(A, B), plain)
    assert len(dispatched) == 1


def test_other_threads_do_not_dispatch(dispatched: list[Any]) -> None:
    results: list[Any] = []
    with tpu_v4_optimization_context():
        thread = threading.Thread(target=lambda: results.append(jnp.matmul(A, B)))
        thread.start()
        thread.join(20)
    np.testing.assert_array_equal(results[0], A @ B)
    assert dispatched == []


def test_under_transformations(dispatched: list[Any]) -> None:
    with tpu_v4_optimization_context():
        gradient = jax.grad(lambda a: jnp.matmul(a, B).sum())(A)
        batched = jax.vmap(jnp.matmul, in_axes=(0, None))(np.stack([A, A]), B)
        jitted = jax.jit(jnp.einsum, static_argnums=0)("ij,jk->ik", A, B)
    np.testing.assert_allclose(gradient, np.broadcast_to(B.sum(1), A.shape))
    np.testing.assert_array_equal(batched, np.stack([A @ B] * 2) + 100)
    np.testing.assert_array_equal(jitted, A @ B + 100)
    assert len(dispatched) == 3


@pytest.mark.parametrize("name", CALLS)
def test_it_looks_like_the_original(name: str) -> None:
    mine, theirs = getattr(jnp, name), getattr(real, name)
    assert mine is getattr(jnp, name)
    assert mine.__name__ == name
    assert mine.__doc__ == theirs.__doc__
    assert inspect.signature(mine) == inspect.signature(theirs)
    assert mine.__module__ == "capibara.jax.numpy"


def test_the_methods_of_a_jitted_function_are_kept() -> None:
    assert "dot" in jnp.matmul.lower(A, B).as_text()
    assert jnp.matmul.eval_shape(A, B).shape == (2, 4)


def test_one_row_changes_one_more_name(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("capibara_test_target")
    fake.tanh = lambda original, x: ("dispatched", original)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setitem(CHANGED, "numpy.tanh", "capibara_test_target:tanh")
    module = _alias.AliasModule("capibara.jax.numpy")
    _alias._fill(module, _alias._State("numpy", real))
    assert module.tanh(0.0) == 0.0
    with tpu_v4_optimization_context():
        assert module.tanh(0.0) == ("dispatched", real.tanh)
    assert _changed.CHANGED is CHANGED
