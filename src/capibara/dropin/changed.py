"""The names of jax that are changed on purpose: inside an optimisation context they go through dispatch.

Outside of one they call jax's own function and do nothing else. A target takes jax's function first and then
the call's own arguments; it gives back the result, by calling jax's function when no kernel takes the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from capibara.dropin.targets import load
from capibara.mesh import context

__all__ = ["CHANGED", "dispatching"]

CHANGED: dict[str, str] = {
    "numpy.matmul": "capibara.dropin.numpy_products:matmul",
    "numpy.dot": "capibara.dropin.numpy_products:dot",
    "numpy.einsum": "capibara.dropin.numpy_products:einsum",
    "numpy.fft.fft": "capibara.dropin.numpy_fft:fft",
    "numpy.fft.ifft": "capibara.dropin.numpy_fft:ifft",
    "numpy.fft.fft2": "capibara.dropin.numpy_fft:fft2",
    "numpy.fft.ifft2": "capibara.dropin.numpy_fft:ifft2",
    "numpy.fft.fftn": "capibara.dropin.numpy_fft:fftn",
    "numpy.fft.ifftn": "capibara.dropin.numpy_fft:ifftn",
    "numpy.fft.rfft": "capibara.dropin.numpy_fft:rfft",
    "numpy.fft.irfft": "capibara.dropin.numpy_fft:irfft",
    "numpy.fft.rfft2": "capibara.dropin.numpy_fft:rfft2",
    "numpy.fft.irfft2": "capibara.dropin.numpy_fft:irfft2",
    "nn.dot_product_attention": "capibara.dropin.nn_attention:dot_product_attention",
    "lax.associative_scan": "capibara.dropin.lax_scan:associative_scan",
    "nn.standardize": "capibara.dropin.nn_norm:standardize",
}
"""Path below jax -> what it calls inside a context. Adding a row changes the name everywhere."""

# What jax puts on a jitted function beside the call; it stays jax's own.
_JIT_METHODS = ("lower", "trace", "eval_shape", "clear_cache")


def dispatching(path: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """jax's function at `path`, with dispatch inside an optimisation context."""
    target = CHANGED[path]

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not context.active():
            return original(*args, **kwargs)
        return context.call(load(target), original, *args, **kwargs)

    # A pickle names this function by where it is, not by where the original is.
    call.__module__, _, call.__qualname__ = f"capibara.jax.{path}".rpartition(".")
    for name in _JIT_METHODS:
        if hasattr(original, name):
            setattr(call, name, getattr(original, name))
    return call
