"""Arrays with time anywhere, as the op takes them: [batch, time, channels]."""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.errors import rule_error
from capibara.kernels.core.operands import as_array
from capibara.kernels.core.spec import describe


@dataclasses.dataclass(frozen=True)
class Layout:
    """b's shape, and which of its axes is time. Channels are what lies behind it, or where nothing does, in front."""

    shape: tuple[int, ...]
    axis: int

    @property
    def lead(self) -> tuple[int, ...]:
        return self.shape[: self.axis]

    @property
    def trail(self) -> tuple[int, ...]:
        return self.shape[self.axis + 1 :]

    @property
    def turned(self) -> bool:
        return self.axis > 0 and not self.trail

    @property
    def flat(self) -> tuple[int, int, int]:
        batch, channels = math.prod(self.lead), math.prod(self.trail)
        return (1, self.shape[self.axis], batch) if self.turned else (batch, self.shape[self.axis], channels)

    def flatten(self, x: jax.Array) -> jax.Array:
        return (jnp.moveaxis(x, self.axis, 0) if self.turned else x).reshape(self.flat)

    def flatten_state(self, x: jax.Array | None) -> jax.Array | None:
        return None if x is None else x.reshape(self.flat[0], self.flat[2])

    def restore(self, h: jax.Array) -> jax.Array:
        if self.turned:
            return jnp.moveaxis(h.reshape(self.shape[self.axis], *self.lead), 0, self.axis)
        return h.reshape(self.shape)

    def restore_state(self, final: jax.Array) -> jax.Array:
        return final.reshape(*self.lead, *self.trail)


def read_flag(name: str, given: Any) -> bool:
    """A bool, numpy's own too. A word such as "no" would be true.

    >>> read_flag("reverse", np.False_)
    False
    """
    if isinstance(given, bool | np.bool_):
        return bool(given)
    raise rule_error(f"{name} is True or False", repr(given), "pass a bool")


def read_operands(what: str, a: Any, b: Any, initial_state: Any, axis: Any) -> tuple[jax.Array, jax.Array, Any, Layout]:
    """(a, b, initial_state) of one kind, real or complex, with a of b's shape; and where time is."""
    a, b = as_array(what, "a", a), as_array(what, "b", b)
    initial_state = as_array(what, "initial_state", initial_state, optional=True)
    try:
        place = None if isinstance(axis, bool) else operator.index(axis)
    except TypeError:
        place = None
    if place is None or not -b.ndim <= place < b.ndim:
        raise rule_error(
            f"axis is one of b's {b.ndim} axes", f"axis={axis!r} for {describe(b)}", "pass the axis of time"
        )
    layout = Layout(b.shape, place % b.ndim)
    if not _broadcasts(a.shape, b.shape):
        raise rule_error(
            f"a has b's shape {b.shape}, or one that broadcasts to it", describe(a), "reshape a, or broadcast b first"
        )
    state = (*layout.lead, *layout.trail)
    if initial_state is not None and initial_state.shape != state:
        raise rule_error(
            f"initial_state has b's shape without the axis of time, {state}", describe(initial_state), "broadcast it"
        )
    present = [x for x in (a, b, initial_state) if x is not None]
    if any(jnp.issubdtype(x.dtype, jnp.complexfloating) for x in present):
        a, b, initial_state = map(_as_complex, (a, b, initial_state))
    return jnp.broadcast_to(a, b.shape), b, initial_state, layout


def _as_complex(x: Any) -> Any:
    if x is None or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return x.astype(jnp.promote_types(x.dtype, jnp.complex64))


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    if len(shape) > len(to):
        return False
    return all(n in (1, m) for n, m in zip(reversed(shape), reversed(to), strict=False))
