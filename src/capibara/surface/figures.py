"""Figures of what ran: the work of a call, the rate of the last kernel, and the memory in use."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.hardware.facts import GiB
from capibara.kernels.core.counting import traced_cost
from capibara.kernels.core.explanation import explain
from capibara.kernels.core.spec import Cost, standard_normal
from capibara.kernels.lab.timing import compare
from capibara.memory.live import used_bytes

SAMPLES = 5
BUDGET_SECONDS = 1.0
_KEY = jax.dtypes.prng_key


def work_of(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Cost:
    """The work of the ops that `fn` calls; where it calls none, by the compiler's count. Nothing is computed."""
    found = explain(fn, *args, **kwargs).selections
    if found:
        return functools.reduce(lambda a, b: a + b, (one.call.op.cost(one.call) for one in found))
    leaves, tree = jax.tree.flatten((args, kwargs))
    where = [i for i, x in enumerate(leaves) if hasattr(x, "shape") and hasattr(x, "dtype")]

    def of_arrays(*arrays: Any) -> Any:
        full = [arrays[where.index(i)] if i in where else x for i, x in enumerate(leaves)]
        inner_args, inner_kwargs = jax.tree.unflatten(tree, full)
        return fn(*inner_args, **inner_kwargs)

    return traced_cost(jax.jit(of_arrays).trace(*(leaves[i] for i in where)), "float32")


def seconds_of(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> float:
    """The median time of the call as it stands, warmed up and waited for."""
    timings = compare(
        {"fn": lambda args, kwargs: fn(*args, **kwargs)}, args, kwargs,
        samples=SAMPLES, budget_seconds=BUDGET_SECONDS, jit=False,
    )  # fmt: skip
    return timings["fn"].seconds


def memory_in_use() -> float:
    """GiB in use on this process's devices, by their allocators; by the live arrays where a device does not say."""
    return sum(used_bytes().values()) / GiB


@dataclasses.dataclass(frozen=True)
class _Shape:
    """What is remembered of an array: enough to draw another like it, and none of its memory."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: Any

    def draw(self, index: int) -> Any:
        if jnp.issubdtype(self.dtype, jax.dtypes.prng_key):
            made: Any = jnp.broadcast_to(jax.random.key(0), self.shape)
        elif jnp.issubdtype(self.dtype, jnp.floating):
            made = standard_normal(self.shape, self.dtype, (0, index))
        elif self.dtype == jnp.bool_:
            made = jnp.ones(self.shape, self.dtype)  # a mask that hides nothing
        else:
            made = jnp.zeros(self.shape, self.dtype)
        return made if self.sharding is None else jax.device_put(made, self.sharding)

    def struct(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype)


@dataclasses.dataclass(frozen=True)
class _Ran:
    fn: Callable[..., Any]
    leaves: tuple[Any, ...]
    tree: Any
    again: Mapping[str, Any]
    keys: tuple[str, ...]
    counted_as: Mapping[str, Any]
    mesh: Any


class LastKernel:
    """Runs kernels and remembers the last one that ran: its shapes, and none of its arrays."""

    def __init__(self) -> None:
        self._ran: _Ran | None = None
        self._rate = math.nan

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()  # a copy has run nothing, and devices are not for pickling

    def run(
        self,
        fn: Callable[..., Any],
        *,
        keys: Sequence[str] = (),
        again: Mapping[str, Any] | None = None,
        counted_as: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """`fn(**kwargs)`, remembered unless it is being traced, when nothing runs.

        Args:
          keys: keyword arguments that get a key of their own when the call is repeated, so as to draw from no object.
          again: what is changed in a repeat.
          counted_as: what is changed, besides, to count the work: a loop's body is traced once and runs often.
        """
        leaves, tree = jax.tree.flatten(kwargs)
        remembered = tuple(map(_remembered, leaves))
        made = fn(**kwargs)
        if not any(isinstance(x, jax.core.Tracer) for x in (*leaves, *jax.tree.leaves(made))):
            mesh = jax.sharding.get_mesh()
            self._ran = _Ran(fn, remembered, tree, again or {}, tuple(keys), counted_as or {}, mesh)
            self._rate = math.nan
        return made

    def tflops(self) -> float:
        """TFLOP/s of the last kernel: its work over the median time of repeats on operands of the same shapes.

        All of its devices together. nan before any kernel ran. Masks of a repeat hide nothing; whole numbers are 0.
        """
        ran = self._ran
        if ran is None or not math.isnan(self._rate):
            return self._rate

        def keywords(leaf: Callable[[int, _Shape], Any]) -> dict[str, Any]:
            leaves = [leaf(i, x) if isinstance(x, _Shape) else x for i, x in enumerate(ran.leaves)]
            keys = {name: jax.random.key(0) for name in ran.keys}
            return {**jax.tree.unflatten(ran.tree, leaves), **ran.again, **keys}

        context = contextlib.nullcontext() if ran.mesh is None or ran.mesh.empty else jax.set_mesh(ran.mesh)
        with context:
            work = work_of(ran.fn, **{**keywords(lambda i, x: x.struct()), **ran.counted_as})
            seconds = seconds_of(ran.fn, **keywords(lambda i, x: x.draw(i)))
        self._rate = work.flops / seconds / 1e12
        return self._rate


def _remembered(x: Any) -> Any:
    if isinstance(x, jax.core.Tracer) or not (hasattr(x, "shape") and hasattr(x, "dtype")):
        return x
    if isinstance(x, np.generic | np.ndarray | jax.Array) and not x.shape and not jnp.issubdtype(x.dtype, _KEY):
        return x.item()  # a setting, such as eps or a count: a repeat has the same
    return _Shape(tuple(x.shape), x.dtype, getattr(x, "sharding", None))
