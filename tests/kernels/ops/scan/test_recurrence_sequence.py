"""sequence_parallel_recurrence: time over the devices of a mesh."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from capibara.kernels import linear_recurrence, sequence_parallel_recurrence
from capibara.kernels.ops.scan.recurrence.cases import draw_decay


def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    devices = jax.devices("cpu")[: int(np.prod(shape))]
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape), devices=devices)


def _operands(batch: int, steps: int, channels: int, dtype: Any = "float32") -> tuple[jax.Array, ...]:
    generator = np.random.default_rng((batch, steps, channels))
    a = draw_decay(generator, (batch, steps, channels))
    b, initial = generator.standard_normal((batch, steps, channels)), generator.standard_normal((batch, channels))
    return jnp.asarray(a, dtype), jnp.asarray(b, dtype), jnp.asarray(initial, "float32")


@pytest.mark.quick
@pytest.mark.parametrize(("devices", "steps", "reverse"), [(8, 16, False), (5, 14, True), (3, 9, False)])
def test_whole_arrays_over_a_mesh(devices: int, steps: int, reverse: bool) -> None:
    """Any number of devices, any number of steps; values and every gradient."""
    operands, mesh = _operands(2, steps, 3), _mesh((devices,), ("time",))
    weights = jnp.asarray(np.random.default_rng(1).standard_normal((2, steps, 3)), "float32")

    def loss(made: Any) -> tuple[Any, Any]:
        h, final = made
        return (h * weights).sum() + (final**2).sum(), made

    def split(*xs: Any) -> Any:
        return loss(sequence_parallel_recurrence(*xs, axis_name="time", mesh=mesh, reverse=reverse, return_state=True))

    def whole(*xs: Any) -> Any:
        return loss(linear_recurrence(*xs, reverse=reverse, return_state=True))

    (_, got), grads = jax.jit(jax.value_and_grad(split, (0, 1, 2), has_aux=True))(*operands)
    (_, wanted), right = jax.value_and_grad(whole, (0, 1, 2), has_aux=True)(*operands)
    # Float32, some tens of roundings in either order.
    for mine, theirs in zip(jax.tree.leaves((got, grads)), jax.tree.leaves((wanted, right)), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5 * float(jnp.abs(theirs).max()))


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma: bool) -> None:
    """The same state before and the same state after on every device, whichever way JAX checks replication."""
    operands, mesh = _operands(2, 12, 4), _mesh((2, 3), ("data", "time"))
    over, at_one_step = P("data", "time"), P("data")

    def split(*xs: Any) -> Any:
        local = jax.shard_map(
            lambda a, b, s: sequence_parallel_recurrence(a, b, s, axis_name="time", return_state=True),
            mesh=mesh, in_specs=(over, over, at_one_step), out_specs=(over, at_one_step), check_vma=check_vma,
        )  # fmt: skip
        h, final = local(*xs)
        return (h**2).sum() + (final**3).sum()

    def whole(*xs: Any) -> Any:
        h, final = linear_recurrence(*xs, return_state=True)
        return (h**2).sum() + (final**3).sum()

    got, wanted = jax.jit(jax.grad(split, (0, 1, 2)))(*operands), jax.grad(whole, (0, 1, 2))(*operands)
    for mine, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5 * float(jnp.abs(theirs).max()))


def test_other_axes_are_split_too() -> None:
    """Time first, channels over a second mesh axis, no initial state, bfloat16 with float32 states between devices."""
    a, b, _ = _operands(8, 2, 4, "bfloat16")
    mesh = _mesh((4, 2), ("time", "model"))
    split = functools.partial(
        sequence_parallel_recurrence, axis_name="time", mesh=mesh, spec=P("time", None, "model"), axis=0
    )
    h = jax.jit(split)(a, b)
    assert h.dtype == jnp.bfloat16
    assert h.sharding.is_equivalent_to(jax.NamedSharding(mesh, P("time", None, "model")), 3)
    wanted = linear_recurrence(a, b, axis=0)
    # The states differ by float32 roundings, which may tip one of bfloat16.
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (h, wanted)), atol=2**-7)


def test_an_implementation_that_is_asked_for() -> None:
    a, b, _ = _operands(1, 4, 3)
    split = functools.partial(sequence_parallel_recurrence, axis_name="time", mesh=_mesh((2,), ("time",)))
    with pytest.raises(ValueError, match="'hopper' was asked for"):
        jax.eval_shape(functools.partial(split, implementation="hopper"), a, b)
    h = jax.jit(functools.partial(split, implementation="reference"))(a, b)
    np.testing.assert_allclose(h, linear_recurrence(a, b), atol=1e-6)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"axis_name": "rows"}, "mesh axis"),
        ({"spec": P("time")}, "'time' at that of time, 1"),
        ({"spec": P(None, "time", None, None)}, "an entry for each"),
        ({"mesh": None, "spec": P(None, "time")}, "spec without mesh"),
        ({"reverse": 1}, "reverse is True or False"),
    ],
)
def test_bad_input_is_named(given: dict[str, Any], words: str) -> None:
    a, b, _ = _operands(1, 4, 3)
    with pytest.raises((ValueError, KeyError), match=words):
        sequence_parallel_recurrence(a, b, **{"axis_name": "time", "mesh": _mesh((2,), ("time",)), **given})


def test_outside_of_shard_map_without_a_mesh() -> None:
    with pytest.raises(ValueError, match=r"inside jax.shard_map over the axis 'time'.*pass mesh="):
        sequence_parallel_recurrence(jnp.ones((1, 4, 1)), jnp.ones((1, 4, 1)), axis_name="time")
