"""A config that was asked for is the one that runs, also where the op's own rules make the call again."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from capibara.errors import ImplementationRefused
from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Call, Gradient, Implementation, Partition


@dataclasses.dataclass(frozen=True)
class Tile:
    rows: int


DEFAULT, ASKED = Tile(1), Tile(7)


def _elementwise(call: Call) -> str:
    axes = " ".join("abc"[: len(call.need("x").shape)])
    return f"{axes} -> {axes}"


def _op(used: list[Tile], *, refuses_in_gradients: bool = False) -> Op:
    """y = x², by two kernels that note the config they run with; its gradient and rules call ops."""

    def square(x: Any, *, config: Tile, keep: bool) -> Any:
        used.append(config)
        return x * x

    def forward(op: Op, arrays: Any, params: Any, prefer: Any) -> Any:
        return run(op, arrays, params | {"keep": True}, prefer=prefer), arrays

    def backward(residuals: Any, flow: Any, params: Any, prefer: Any) -> Any:
        return (2 * residuals[0] * flow,)

    def batch(op: Op, size: int, batched: Any, arrays: Any, params: Any, prefer: Any) -> Any:
        return run(op, arrays, params, prefer=prefer)

    made = Op(
        "noting_square",
        family="test",
        reference=lambda x, *, keep: x * x,
        operands=("x",),
        params={"keep": False},
        gradient=Gradient(forward, backward),
        batch=batch,
        partition=Partition(_elementwise),
    )
    common: dict[str, Any] = {"kernel": True, "config_type": Tile, "default_config": lambda call: DEFAULT}

    def refuses(call: Call) -> str | None:
        return "it keeps nothing" if refuses_in_gradients and call.params["keep"] else None

    made.implement(Implementation("first", square, refuses=refuses, **common))
    made.implement(Implementation("second", square, **common))
    return made


X = jnp.arange(1.0, 33.0).reshape(8, 4)


def _over_the_mesh() -> jax.Array:
    mesh = jax.make_mesh((8,), ("x",), devices=jax.devices()[:8])
    return jax.device_put(X, NamedSharding(mesh, PartitionSpec("x")))


CALLS: dict[str, Any] = {
    "eager": lambda fn: (fn(X), X * X),
    "jit": lambda fn: (jax.jit(fn)(X), X * X),
    "grad": lambda fn: (jax.grad(lambda x: fn(x).sum())(X), 2 * X),
    "vmap": lambda fn: (jax.vmap(fn)(X), X * X),
    "vmap of grad": lambda fn: (jax.vmap(jax.grad(lambda x: fn(x).sum()))(X), 2 * X),
    "mesh": lambda fn: (jax.jit(fn)(_over_the_mesh()), X * X),
    "grad on a mesh": lambda fn: (jax.jit(jax.grad(lambda x: fn(x).sum()))(_over_the_mesh()), 2 * X),
}


@pytest.mark.quick(cases=4)
@pytest.mark.parametrize("asked", [None, ASKED])
@pytest.mark.parametrize("how", CALLS)
def test_every_forward_pass_runs_with_it(how: str, asked: Tile | None) -> None:
    used: list[Tile] = []
    op = _op(used)
    got, wanted = CALLS[how](lambda x: op(x, config=asked))
    np.testing.assert_array_equal(got, wanted)
    assert set(used) == {asked or DEFAULT}


def test_a_gradient_that_the_config_s_implementation_refuses_is_an_error() -> None:
    op = _op([], refuses_in_gradients=True)
    np.testing.assert_array_equal(op(X, config=ASKED), X * X)
    with pytest.raises(ImplementationRefused, match=r"'first' was asked for by the surrounding call's config.*nothing"):
        jax.grad(lambda x: op(x, config=ASKED).sum())(X)
    # Without a config another implementation takes the forward pass.
    np.testing.assert_array_equal(jax.grad(lambda x: op(x).sum())(X), 2 * X)
