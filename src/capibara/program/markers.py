"""Constraints by logical names, kept in the trace: one trace then serves every layout.

`recording_axes()` makes `capibara.mesh.with_sharding_constraint` bind an identity that carries the names. On a
real run there is nothing of it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from capibara.mesh import rules

__all__ = ["logical_axes_p", "mark", "recording_axes"]

logical_axes_p = Primitive("logical_axes")
logical_axes_p.def_impl(lambda x, *, names: x)
logical_axes_p.def_abstract_eval(lambda x, *, names: x)
mlir.register_lowering(logical_axes_p, lambda ctx, x, *, names: [x])
# The cotangent of a value lies where the value does, as with jax's own constraint.
ad.deflinear2(logical_axes_p, lambda ct, _, *, names: [logical_axes_p.bind(ct, names=names)])


def _batched(operands: Sequence[Any], dims: Sequence[Any], *, names: tuple[str | None, ...]) -> tuple[Any, Any]:
    (x,), (dim,) = operands, dims
    return logical_axes_p.bind(x, names=(*names[:dim], None, *names[dim:])), dim


batching.primitive_batchers[logical_axes_p] = _batched

# Part of jit's cache key, so that a function which jit has traced before is traced again with its markers.
_recording_context = jax.make_user_context(0)
_recordings = itertools.count(1)


def mark(leaf: Any, names: Sequence[str | None]) -> Any:
    """`leaf`, with a logical name (or None) for each dimension; those after the last name are whole."""
    filled = (*names, *(None,) * (jax.numpy.ndim(leaf) - len(names)))
    return logical_axes_p.bind(leaf, names=filled)


@contextlib.contextmanager
def recording_axes() -> Iterator[None]:
    """Inside, constraints by logical names are kept in the traced program and need no mesh."""
    token = rules.RECORDER.set(mark)
    try:
        with _recording_context(next(_recordings)):
            yield
    finally:
        rules.RECORDER.reset(token)
