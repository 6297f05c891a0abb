"""The names of jax that are changed on purpose: inside an optimisation context they go through dispatch.

Outside of one they call jax's own function and do nothing else. A target takes jax's function first and then
the call's own arguments; it gives back the result, by calling jax's function when no kernel takes the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from capibara.jax._targets import load
from capibara.parallel import context

__all__ = ["CHANGED", "dispatching"]

CHANGED: dict[str, str] = {
    "numpy.matmul": "capibara.kernels.linalg.numpy_api:matmul",
    "numpy.dot": "capibara.kernels.linalg.numpy_api:dot",
    "numpy.einsum": "capibara.kernels.linalg.numpy_api:einsum",
    "numpy.fft.fft": "capibara.kernels.fft.numpy_api:fft",
    "numpy.fft.ifft": "capibara.kernels.fft.numpy_api:ifft",
    "numpy.fft.fft2": "capibara.kernels.fft.numpy_api:fft2",
    "numpy.fft.ifft2": "capibara.kernels.fft.numpy_api:ifft2",
    "numpy.fft.fftn": "capibara.kernels.fft.numpy_api:fftn",
    "numpy.fft.ifftn": "capibara.kernels.fft.numpy_api:ifftn",
    "numpy.fft.rfft": "capibara.kernels.fft.numpy_api:rfft",
    "numpy.fft.irfft": "capibara.kernels.fft.numpy_api:irfft",
    "numpy.fft.rfft2": "capibara.kernels.fft.numpy_api:rfft2",
    "numpy.fft.irfft2": "capibara.kernels.fft.numpy_api:irfft2",
    "nn.dot_product_attention": "capibara.kernels.attention.nn_api:dot_product_attention",
    "lax.associative_scan": "capibara.kernels.scan.parallel.lax_api:associative_scan",
    "nn.standardize": "capibara.kernels.layers.norm.nn_api:standardize",
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
