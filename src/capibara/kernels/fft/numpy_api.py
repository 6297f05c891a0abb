"""What jnp.fft's functions call inside an optimisation context: jnp's own function first, then its arguments.

A transform of a float32 or complex64 array goes through dispatch. Any other, and any mistake, is jnp's own call,
untouched, so that every result has the type that jnp gives and every error is the one jnp raises.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from capibara.kernels.context import current_target
from capibara.kernels.fft import numpy_forms
from capibara.kernels.fft.rules import NORMS

REAL, COMPLEX = ("float32",), ("float32", "complex64")
TAKEN = {
    "fft": COMPLEX, "ifft": COMPLEX, "fft2": COMPLEX, "ifft2": COMPLEX, "fftn": COMPLEX, "ifftn": COMPLEX,
    "rfft": REAL, "irfft": COMPLEX, "rfft2": REAL, "irfft2": COMPLEX,
}  # fmt: skip
# Elsewhere a vendor's transform of a real signal along two axes is one call, where ours would be two.
ON_TPU = ("rfft2", "irfft2")


def _call(name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    given = _taken(name, original, args, kwargs)
    if given is None or (name in ON_TPU and current_target().platform != "tpu"):
        return original(*args, **kwargs)
    return getattr(numpy_forms, name)(*given)


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
