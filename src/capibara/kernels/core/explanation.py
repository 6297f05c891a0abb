"""What would run and why, for an op or any function that calls ops, without running it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from capibara.errors import rule_error
from capibara.kernels.core.dispatch import Selection, recording
from capibara.kernels.core.op import lookup


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Every decision dispatch took while a function was traced, in order."""

    selections: tuple[Selection, ...]

    @property
    def implementation(self) -> str:
        """The implementation, when the function calls one op once."""
        if len(self.selections) != 1:
            raise rule_error(
                "`.implementation` is for a function that calls one op once",
                f"{len(self.selections)} calls",
                "read `.selections`",
            )
        return self.selections[0].implementation

    def __str__(self) -> str:
        return "\n".join(map(str, self.selections)) or "no capibara op is called"

    def as_dict(self) -> dict[str, Any]:
        return {"selections": [s.as_dict() for s in self.selections]}


def explain(fn: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Explanation:
    """What would run and why, for an op, its name, or any function that calls ops. Nothing is computed.

    Arguments are arrays or `jax.ShapeDtypeStruct`s; what is not an array is passed as it is.

    >>> x = jax.ShapeDtypeStruct((512, 512), "float32")
    >>> explain("gemm", x, x).implementation
    'xla'
    """
    if isinstance(fn, str):
        op = lookup(fn)
        fn = op.functions[fn][0] if fn in op.functions else op.public or op
    leaves, tree = jax.tree.flatten((args, kwargs))
    is_array = [hasattr(x, "shape") and hasattr(x, "dtype") for x in leaves]
    shapes = [_struct(x) for x, a in zip(leaves, is_array, strict=True) if a]

    def traced(*arrays: Any) -> Any:
        given = iter(arrays)
        full = [next(given) if a else x for x, a in zip(leaves, is_array, strict=True)]
        inner_args, inner_kwargs = jax.tree.unflatten(tree, full)
        return fn(*inner_args, **inner_kwargs)

    with recording() as found:
        jax.eval_shape(traced, *shapes)
    return Explanation(tuple(found))


def _struct(x: Any) -> jax.ShapeDtypeStruct:
    """The array's shape, and its place on a mesh if it has one: on TPU it decides what can be split."""
    sharding = getattr(x, "sharding", None)
    placed = isinstance(sharding, jax.sharding.NamedSharding) and not isinstance(x, jax.core.Tracer)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding if placed else None)
