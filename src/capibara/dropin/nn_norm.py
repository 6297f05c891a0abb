"""What `nn.standardize` calls inside an optimisation context: jax's own function first, then its arguments.

Standardizing the last axis is a layer norm without scale and bias. Anything else is jax's own call, and why is logged
once and told by `why_not`; a mistake is jax's own call too, so that every error is the one jax raises.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.errors import say_once
from capibara.kernels.core.spec import FLOATS
from capibara.kernels.ops.layers.norm.api import layer_norm

logger = logging.getLogger("capibara.kernels")


def standardize(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """jax.nn.standardize by kernel dispatch. Statistics are float32, from two passes over a row."""
    reason = why_not(*args, **kwargs)
    if reason is None:
        given = _bound(args, kwargs)
        return layer_norm(given["x"], eps=float(given["epsilon"]))
    if reason:
        say_once(logger, reason, "nn.standardize is jax's own here: %s", reason)
    return original(*args, **kwargs)


def why_not(*args: Any, **kwargs: Any) -> str | None:
    """Why this call of `nn.standardize` is jax's own also inside a context; None when it is dispatched.

    Empty for a call that jax refuses in its own words.

    >>> why_not(jnp.ones((4, 8)))
    >>> why_not(jnp.ones((4, 8)), axis=0)
    'it standardizes along axis 0 of 2; the norm is of the last'
    """
    try:
        given = _bound(args, kwargs)
    except TypeError:
        return ""
    x, axis = given["x"], given["axis"]
    if not isinstance(x, jax.Array | np.ndarray) or x.ndim == 0:
        return "x is not an array with axes"
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return f"x is {x.dtype}; the norm is of floating point numbers"
    if x.dtype.name not in FLOATS:
        return f"x is {x.dtype}; the norm takes {', '.join(FLOATS)}"
    if axis not in (-1, x.ndim - 1, (-1,), (x.ndim - 1,)):
        return f"it standardizes along axis {axis} of {x.ndim}; the norm is of the last"
    if x.shape[-1] == 0:
        return "the axis is empty; the norm is of one number or more"
    for name in ("mean", "variance", "where"):
        if given[name] is not None:
            return f"{name} is given"
    epsilon = given["epsilon"]
    if isinstance(epsilon, jax.core.Tracer) or np.ndim(epsilon) or not float(epsilon) > 0:
        return "epsilon is not a number above zero that is known now"
    return None


def _bound(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = inspect.signature(jax.nn.standardize).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments
