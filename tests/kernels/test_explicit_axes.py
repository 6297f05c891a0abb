"""Ops on a mesh whose axes are of type Explicit, which is what `jax.make_mesh` makes: by the XLA forms, as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from capibara.kernels import attention, gated_linear_attention, linear_recurrence, selective_scan, state_space_dual

BATCH, TIME = 4, 6
ROWS = P("data")


def _numbers(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]


def _attended(q: Any, k: Any, v: Any) -> Any:
    return attention(q, k, v, layout="bhtd", causal=True, implementation="xla")


def _faded(a: Any, b: Any) -> Any:
    return linear_recurrence(jax.nn.sigmoid(a), b)


def _selected(x: Any, dt: Any, A: Any, B: Any, C: Any) -> Any:
    return selective_scan(x, jax.nn.softplus(dt), -jnp.exp(A), B, C)


def _dual(x: Any, dt: Any, A: Any, B: Any, C: Any) -> Any:
    return state_space_dual(x, jax.nn.softplus(dt), -jnp.exp(A), B, C)


def _gated(q: Any, k: Any, v: Any, decay: Any) -> Any:
    return gated_linear_attention(q, k, v, -jnp.exp(decay))


CALLS: dict[str, tuple[Callable[..., Any], list[np.ndarray], tuple[P, ...]]] = {
    "attention": (_attended, _numbers(*[(BATCH, TIME, 2, 8)] * 3), (ROWS,) * 3),
    "gated_linear_attention": (_gated, _numbers(*[(BATCH, TIME, 2, 3)] * 4), (ROWS,) * 4),
    "linear_recurrence": (_faded, _numbers(*[(BATCH, TIME, 3)] * 2), (ROWS,) * 2),
    "selective_scan": (
        _selected,
        _numbers(*[(BATCH, TIME, 3)] * 2, (3, 2), *[(BATCH, TIME, 2)] * 2),
        (ROWS, ROWS, P(), ROWS, ROWS),
    ),
    "state_space_dual": (
        _dual,
        _numbers((BATCH, TIME, 2, 4), (BATCH, TIME, 2), (2,), *[(BATCH, TIME, 1, 3)] * 2),
        (ROWS, ROWS, P(), ROWS, ROWS),
    ),
}


@pytest.mark.spread(4)
@pytest.mark.quick(cases=2)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("active", [True, False], ids=["set_mesh", "arrays_alone"])
def test_values_and_gradients_are_those_of_one_device(name: str, active: bool) -> None:
    fn, arrays, specs = CALLS[name]
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices("cpu")[:4])
    assert mesh.axis_types == (jax.sharding.AxisType.Explicit,)
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
    both = _with_gradients(fn, len(arrays))
    if active:
        with jax.set_mesh(mesh):
            made = jax.jit(both)(*placed)
    else:
        made = jax.jit(both)(*placed)
    assert made[0].sharding.is_equivalent_to(NamedSharding(mesh, ROWS), made[0].ndim)
    _assert_close(made, jax.jit(both)(*arrays))


def _assert_close(made: Any, wanted: Any) -> None:
    for got, right in zip(jax.tree.leaves(made), jax.tree.leaves(wanted), strict=True):
        # The same sums in another order: of TIME steps and, for what all rows share, BATCH rows of products of 8 terms.
        bound = BATCH * TIME * 8 * np.finfo(np.float32).eps * np.abs(right).max()
        assert np.abs(np.asarray(got) - np.asarray(right)).max() <= bound


def _mapped(x: Any, dt: Any, A: Any, B: Any, C: Any) -> Any:
    """Over x alone: the mapped axis would be folded into the batch, which the devices share."""
    return jax.vmap(lambda one: _selected(one, dt, A, B, C))(jnp.stack([x, x / 2]))


def _specified(x: Any, dt: Any, A: Any, B: Any, C: Any) -> Any:
    return selective_scan(x, jax.nn.softplus(dt), -jnp.exp(A), B, C, implementation="reference")


@pytest.mark.parametrize("fn", [_mapped, _specified], ids=["vmap", "reference"])
def test_vmap_and_the_reference_are_split_too(fn: Callable[..., Any]) -> None:
    _, arrays, specs = CALLS["selective_scan"]
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices("cpu")[:4])
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
    both = _with_gradients(fn, len(arrays))
    with jax.set_mesh(mesh):
        made = jax.jit(both)(*placed)
    _assert_close(made, jax.jit(both)(*arrays))


def _with_gradients(fn: Callable[..., Any], count: int) -> Callable[..., Any]:
    def both(*arrays: Any) -> tuple[Any, Any]:
        made, pull = jax.vjp(fn, *arrays[:count])
        return made, pull(jnp.cos(made))

    return both
