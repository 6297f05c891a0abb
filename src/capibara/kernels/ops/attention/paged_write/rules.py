"""What a call of paged_write may be, its sizes, its cost, and how far from exact it may come."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from capibara.errors import rule_error
from capibara.kernels.core.spec import FLOATS, Call, Cost, describe, nbytes, unit_roundoff


class Sizes(NamedTuple):
    tokens: int
    heads: int
    """Of the queries."""
    kv_heads: int
    depth: int
    rotary: int
    """Numbers of a head that are turned: its first."""
    pages: int
    page_size: int


def sizes(call: Call) -> Sizes:
    return sizes_of(*(call.need(name) for name in ("projected", "key_pages", "cos")))


def sizes_of(projected: Any, key_pages: Any, cos: Any) -> Sizes:
    """The sizes of a call; a pool of three axes has its heads side by side in the last."""
    tokens, all_heads, depth = projected.shape[-3:]
    pages, page_size, kv_heads = key_pages.shape[:3]
    if len(key_pages.shape) == 3:
        kv_heads //= max(depth, 1)
    return Sizes(tokens, all_heads - 2 * kv_heads, kv_heads, depth, 2 * cos.shape[1], pages, page_size)


def check(call: Call) -> None:
    """Raise on what no implementation could compute."""
    _check_axes(call)
    n = sizes(call)
    projected, keys, values = (call.need(name) for name in ("projected", "key_pages", "value_pages"))
    own = (n.kv_heads, n.depth) if len(keys.shape) == 4 else (n.kv_heads * n.depth,)
    if keys.shape != values.shape or keys.shape[2:] != own or n.kv_heads < 1 or n.page_size < 1 or n.pages < 1:
        raise rule_error(
            "Key pages and value pages have one shape, and heads of the projection's head_dim",
            f"{describe(projected)}, {describe(keys)} and {describe(values)}",
            "check the pools' shapes",
        )
    if n.heads < 1 or n.heads % n.kv_heads:
        raise rule_error(
            "The projection has the queries' heads, a multiple of the pools', then the keys' and the values'",
            f"{projected.shape[1]} heads, and {n.kv_heads} in the pools",
            "pass [tokens, heads + 2 * kv_heads, head_dim]",
        )
    wide = jnp.promote_types(jnp.float32, keys.dtype)
    of_projection = wide if len(projected.shape) == 4 else keys.dtype
    if keys.dtype != values.dtype or projected.dtype != of_projection or np.dtype(keys.dtype).name not in FLOATS:
        raise rule_error(
            "The projection, key pages and value pages have one floating-point type; a projection in parts is float32",
            f"{projected.dtype}, {keys.dtype} and {values.dtype}",
            f"convert the projection with .astype({str(of_projection)!r})",
        )
    cos, sin = call.need("cos"), call.need("sin")
    if cos.shape != sin.shape or cos.shape[0] != n.tokens or n.rotary > n.depth or not cos.dtype == sin.dtype == wide:
        raise rule_error(
            f"cos and sin are {wide} [tokens, rotary_dim / 2], here [{n.tokens}, {n.depth // 2} or less]",
            f"{describe(cos)} and {describe(sin)}",
            "take rows of rope_tables(...) by the tokens' positions",
        )
    for name in ("page", "slot"):
        if call.need(name).shape != (n.tokens,):
            raise rule_error(f"There is one {name} a token, here {n.tokens}", describe(call.need(name)), "check it")
    if not isinstance(call.params["spare_page"], bool):
        raise rule_error("spare_page is True or False", repr(call.params["spare_page"]), "pass one of them")


def _check_axes(call: Call) -> None:
    axes = {
        "projected": "tokens, heads + 2 * kv_heads, head_dim",
        "key_pages": "pages, page_size, kv_heads, head_dim",
        "value_pages": "pages, page_size, kv_heads, head_dim",
        "cos": "tokens, rotary_dim / 2",
        "sin": "tokens, rotary_dim / 2",
        "page": "tokens",
        "slot": "tokens",
    }
    for name, named in axes.items():
        x = call[name]
        if x is None:
            raise rule_error("paged_write needs all of its arrays", f"no {name}", f"pass {name}")
        pool = name in ("key_pages", "value_pages")
        other = 3 if pool else 4 if name == "projected" else None
        if len(x.shape) not in (named.count(",") + 1, other):
            also = " or [pages, page_size, kv_heads * head_dim]" if pool else " or [parts, ...]" if other else ""
            raise rule_error(f"{name} is [{named}]{also}", describe(x), "check its shape")
        if name in ("page", "slot") and x.dtype != jnp.int32:
            raise rule_error(f"{name} is int32", describe(x), "convert it with .astype(jnp.int32)")


def cost(call: Call) -> Cost:
    """Everything but the pools is read once; queries, and a row of either pool a token, are written once.

    Each number that is turned is two products, one with a sign, and a sum.
    """
    n, keys = sizes(call), call.need("key_pages")
    read = sum(nbytes(x) for name, x in zip(call.op.operands, call.args, strict=True) if not name.endswith("_pages"))
    turned = 4.0 * n.tokens * (n.heads + n.kv_heads) * n.rotary
    written = n.tokens * (n.heads + 2 * n.kv_heads) * n.depth * np.dtype(keys.dtype).itemsize
    return Cost(vector_flops=max(turned, 1.0), bytes=float(read + written), dtype=np.dtype(keys.dtype).name)


def tolerance(call: Call) -> float:
    """The relative error that a right result stays under: the rounding of the result, and three in float32."""
    dtype = call.need("key_pages").dtype
    return unit_roundoff(dtype) + 4 * unit_roundoff(jnp.promote_types(jnp.float32, dtype))
