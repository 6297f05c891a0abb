"""What jnp.fft's functions call inside an optimisation context: jnp's own function first, then its arguments.

A transform of a float32 or complex64 array is decided by dispatch. Where that is the vendor's transform, and for any
other array and any mistake, it is jnp's own call, untouched, so that every result has the type that jnp gives, every
error is the one jnp raises, and forward-mode derivatives and linear_transpose are there as outside. Where it is
another implementation, as on a TPU, there is reverse mode alone: for forward mode (jvp, jacfwd, hessian, linearize,
linear_transpose) call jax.numpy.fft, or capibara.kernels.fft with implementation="reference".

jnp's own call of a sharded array is split by XLA, which gathers a sharded batch; capibara.kernels.fft gathers
nothing.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np

from capibara.kernels.core import context, tables, trusting
from capibara.kernels.core.dispatch import Selection, note, select
from capibara.kernels.ops.fft import numpy_forms
from capibara.kernels.ops.fft.api import FFT, IRFFT, RFFT
from capibara.kernels.ops.fft.rules import MOST_AXES, NORMS

REAL, COMPLEX = ("float32",), ("float32", "complex64")
TAKEN = {
    "fft": COMPLEX, "ifft": COMPLEX, "fft2": COMPLEX, "ifft2": COMPLEX, "fftn": COMPLEX, "ifftn": COMPLEX,
    "rfft": REAL, "irfft": COMPLEX, "rfft2": REAL, "irfft2": COMPLEX,
}  # fmt: skip
# Elsewhere a vendor's transform of a real signal along two axes is one call, where ours would be two.
ON_TPU = ("rfft2", "irfft2")


def _call(name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    given = _taken(name, original, args, kwargs)
    if given is None or (name in ON_TPU and context.current_target().platform != "tpu"):
        return original(*args, **kwargs)
    if name not in ON_TPU:
        chosen = _decided(name, *given)
        if all(one.implementation == "xla" for one in chosen):
            for one in chosen:
                note(one)
            return original(*args, **kwargs)
    return getattr(numpy_forms, name)(*given)


def _decided(name: str, x: Any, size: Any, axes: Any, norm: str | None) -> tuple[Selection, ...]:
    """What dispatch takes for the transforms of a call that it was seen to take."""
    several = name.endswith(("2", "n"))
    at = _axes(x.ndim, size, axes if several else (axes,))
    assert at is not None
    lengths = [x.shape[axis] for axis in at]
    if size is not None:
        lengths = [int(n) for n in (size if several else (size,))]
    elif name == "irfft":
        lengths = [2 * (lengths[0] - 1)]
    transformed = {axis % x.ndim for axis in at}
    rest = tuple(n for axis, n in enumerate(x.shape) if axis not in transformed)
    target = context.explicit_target()
    if target is None:
        concrete = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
        target = context.target_of(next(iter(x.devices()))) if concrete else context.current_target()
    known = tables.generation(), trusting.trusted()
    return _selections(name, rest, tuple(lengths), norm or "backward", target, known)


@functools.lru_cache(maxsize=1024)
def _selections(
    name: str, rest: tuple[int, ...], lengths: tuple[int, ...], norm: str, target: context.Target, known: Hashable
) -> tuple[Selection, ...]:
    """One for each call of an op, as `numpy_forms` calls them."""
    if name == "rfft":
        return (select(RFFT.call(_plane(*rest, *lengths), target=target, norm=norm)),)
    if name == "irfft":
        half = _plane(*rest, lengths[0] // 2 + 1)
        return (select(IRFFT.call(half, half, target=target, norm=norm, n=lengths[0])),)
    made = []
    while lengths:
        now, lengths = lengths[-MOST_AXES:], lengths[:-MOST_AXES]
        plane = _plane(*rest, *lengths, *now)
        how = {"inverse": name.startswith("i"), "norm": norm, "axes": len(now)}
        made.append(select(FFT.call(plane, plane, target=target, **how)))
        rest = (*now, *rest)
    return tuple(made)


def _plane(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.dtype("float32"))


def _taken(name: str, original: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, ...] | None:
    """The call's arguments in order; None for one that is jnp's own."""
    try:
        bound = inspect.signature(original).bind(*args, **kwargs)
    except TypeError:
        return None
    bound.apply_defaults()
    x, size, axes, norm = bound.arguments.values()
    if not isinstance(x, jax.Array | np.ndarray) or np.dtype(x.dtype).name not in TAKEN[name] or x.size == 0:
        return None
    if not all(isinstance(length, int) for length in x.shape):  # a symbolic size, while exporting
        return None
    if norm is not None and norm not in NORMS:
        return None
    several = name.endswith(("2", "n"))
    chosen = _axes(x.ndim, size, axes if several else (axes,))
    if chosen is None or (several and size is not None and not _whole(size, len(chosen))):
        return None
    if not several and size is not None and not _whole((size,), 1):
        return None
    if name.startswith("irfft") and size is None and x.shape[chosen[-1]] < 2:
        return None
    return x, size, axes, norm


def _axes(ndim: int, size: Any, axes: Any) -> tuple[int, ...] | None:
    """The axes that are transformed, each in range and named once."""
    if axes is None:
        if size is not None and not isinstance(size, Sequence):
            return None
        count = ndim if size is None else len(size)
        axes = range(ndim - count, ndim)
    try:
        found = tuple(operator.index(axis) for axis in axes)
    except TypeError:
        return None
    inside = all(-ndim <= axis < ndim for axis in found)
    return found if found and inside and len({axis % ndim for axis in found}) == len(found) else None


def _whole(size: Any, count: int) -> bool:
    """Whether `size` is `count` lengths of one or more."""
    return isinstance(size, Sequence) and len(size) == count and all(isinstance(n, int) and n > 0 for n in size)


fft, ifft, fft2, ifft2, fftn, ifftn, rfft, irfft, rfft2, irfft2 = (functools.partial(_call, name) for name in TAKEN)
