"""What `nn.dot_product_attention` calls inside an optimisation context.

It takes jax's own function first and then its arguments. What the op has goes through it, with jax's results; anything
else is jax's own call, untouched, and why is logged once and told by `why_not`. A mistake is jax's own call too, so
that every error is the one jax raises.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.dropin.decorate import attention_dispatches
from capibara.errors import say_once
from capibara.kernels.core.spec import FLOATS
from capibara.kernels.ops.attention.api import attention
from capibara.kernels.ops.linalg.pairwise import laid_out_by_type

logger = logging.getLogger("capibara.kernels")

# What jax puts in the place of a hidden score, so that its softmax is uniform where everything is hidden.
_HIDDEN = -0.7 * float(np.finfo(np.float32).max)
_KNOWN = frozenset(
    {
        "query", "key", "value", "bias", "mask", "scale", "is_causal", "query_seq_lengths", "key_value_seq_lengths",
        "local_window_size", "implementation", "return_residual",
    }
)  # fmt: skip


class _Mistake(Exception):
    """A call that jax refuses, in its own words."""


class _NotOurs(Exception):
    """A call that jax takes and the op does not; the text says why."""


def dot_product_attention(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """jax.nn.dot_product_attention by kernel dispatch."""
    try:
        asked = _arguments(original, args, kwargs)
    except _Mistake:
        return original(*args, **kwargs)
    except _NotOurs as reason:
        told = str(reason)
        # What was asked for by name is no surprise to anybody.
        level = logging.DEBUG if "was asked for" in told else logging.WARNING
        say_once(logger, told, "nn.dot_product_attention is jax's own here: %s", told, level=level)
        return original(*args, **kwargs)
    return _attended(asked)


def why_not(*args: Any, **kwargs: Any) -> str | None:
    """Why this call of `nn.dot_product_attention` is jax's own also inside a context; None when it is dispatched.

    >>> q = jnp.ones((1, 8, 2, 16))
    >>> why_not(q, q, q, implementation="xla")
    "implementation='xla' was asked for by name"
    """
    try:
        _arguments(jax.nn.dot_product_attention, args, kwargs)
    except _Mistake:
        return "jax refuses it"
    except _NotOurs as reason:
        return str(reason)
    return None


def _arguments(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The call's arguments as the op takes them."""
    try:
        bound = inspect.signature(original).bind(*args, **kwargs)
    except TypeError as error:
        raise _Mistake from error
    bound.apply_defaults()
    given = bound.arguments
    if not attention_dispatches():
        raise _NotOurs("use_efficient_attention=False was asked for")
    if given["implementation"] is not None:
        raise _NotOurs(f"implementation={given['implementation']!r} was asked for by name")
    for name in given.keys() - _KNOWN:
        if given[name] != inspect.signature(original).parameters[name].default:
            raise _NotOurs(f"{name} is new in this jax")
    q, k, v = (_operand(name, given[name]) for name in ("query", "key", "value"))
    if q.ndim != 4 or k.ndim != 4 or not q.dtype == k.dtype == v.dtype or k.shape != v.shape:
        raise _Mistake
    (batch, rows, heads, depth), (columns, kv_heads) = q.shape, k.shape[1:3]
    if k.shape[0] != batch or k.shape[3] != depth or kv_heads == 0 or heads % kv_heads:
        raise _Mistake
    if 0 in (*q.shape, *k.shape):
        raise _NotOurs("an operand is empty")
    full = (batch, heads, rows, columns)
    window = _window(given["local_window_size"])
    if window is not None and rows - window[0] > columns:
        raise _NotOurs("the window leaves the last queries no key, where jax gives the mean of all values")
    scale = given["scale"]
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float | np.number)):
        raise _NotOurs("its scale is an array")
    return {
        "shape": np.shape(given["query"]),
        "q": q,
        "k": k,
        "v": v,
        "bias": _pairs("bias", given["bias"], full),
        "mask": _pairs("mask", given["mask"], full),
        "q_lengths": _lengths(given["query_seq_lengths"], batch),
        "k_lengths": _lengths(given["key_value_seq_lengths"], batch),
        "causal": bool(given["is_causal"]),
        "window": window,
        "scale": None if scale is None else float(scale),
        "residual": bool(given.get("return_residual", False)),
    }


def _operand(name: str, x: Any) -> jax.Array:
    if isinstance(x, np.ndarray):
        x = jnp.asarray(x)
    if not isinstance(x, jax.Array):
        raise _NotOurs(f"its {name} is a {type(x).__name__}")
    if np.dtype(x.dtype).name not in FLOATS:
        raise _NotOurs(f"its {name} is {x.dtype}")
    if laid_out_by_type(x):
        raise _NotOurs("its operands' types say how they lie on a mesh")
    if not all(isinstance(n, int) for n in x.shape):
        raise _NotOurs("a size is symbolic")
    # As jax does: missing axes are 1.
    return x.reshape((1,) * (4 - x.ndim) + x.shape) if x.ndim < 4 else x


def _pairs(name: str, x: Any, full: tuple[int, ...]) -> jax.Array | None:
    """A mask or bias with four axes, of which the last is whole."""
    if x is None:
        return None
    if not isinstance(x, jax.Array | np.ndarray):
        raise _NotOurs(f"its {name} is a {type(x).__name__}")
    x = jnp.asarray(x)
    x = x.reshape((1,) * max(4 - x.ndim, 0) + x.shape)
    if x.ndim != 4 or any(n not in (1, m) for n, m in zip(x.shape, full, strict=True)):
        raise _Mistake
    if name == "mask" and x.dtype != jnp.bool_:
        raise _Mistake
    if name == "bias" and np.dtype(x.dtype).name not in FLOATS:
        raise _NotOurs(f"its bias is {x.dtype}")
    return jnp.broadcast_to(x, (*x.shape[:3], full[3]))


def _lengths(x: Any, batch: int) -> jax.Array | None:
    if x is None:
        return None
    x = jnp.asarray(x)
    if x.shape != (batch,) or x.dtype != jnp.int32:
        raise _Mistake
    return x


def _window(size: Any) -> tuple[int, int] | None:
    if size is None:
        return None
    sides = (size, size) if isinstance(size, int) else size
    if not isinstance(sides, tuple | list) or len(sides) != 2:
        raise _Mistake
    if not all(isinstance(side, int | np.integer) and side >= 0 for side in sides):
        raise _NotOurs(f"a window of {size} is not two whole numbers of 0 or more")
    return int(sides[0]), int(sides[1])


def _attended(asked: dict[str, Any]) -> Any:
    q, k, v, mask = asked["q"], asked["k"], asked["v"], asked["mask"]
    rows, heads = q.shape[1:3]
    if asked["k_lengths"] is not None:
        real = (jnp.arange(k.shape[1]) < asked["k_lengths"][:, None])[:, None, None, :]
        mask = real if mask is None else mask & real
    options = {name: asked[name] for name in ("bias", "causal", "window", "scale")}
    # Only a mask can leave a query with nothing to see.
    with_lse = mask is not None or asked["residual"]
    made = attention(q, k, v, layout="bthd", mask=mask, return_lse=with_lse, **options)
    out = made[0] if with_lse else made
    lse = jax.lax.stop_gradient(made[1]).swapaxes(1, 2) if with_lse else jnp.zeros(())  # [B, T, H], where it is read
    if mask is not None:
        # The op gives zeros to a query that sees nothing, jax the mean of all values.
        mean = jnp.repeat(v.mean(1, keepdims=True), heads // k.shape[2], axis=2)
        out = jnp.where(jnp.isneginf(lse)[..., None], mean, out)
    if asked["q_lengths"] is not None:
        there = (jnp.arange(rows) < asked["q_lengths"][:, None])[:, :, None]
        out = jnp.where(there[..., None], out, 0)
        lse = jnp.where(there, lse, -jnp.inf)
    out = out.reshape(asked["shape"])
    if not asked["residual"]:
        return out
    lse = jnp.where(jnp.isneginf(lse), _HIDDEN, lse).astype(k.dtype)
    return out, lse.reshape(asked["shape"][:-1])
