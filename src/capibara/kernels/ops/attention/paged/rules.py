"""What a call of paged attention must look like, what it costs, and how exact a right result is."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import jax.numpy as jnp
import numpy as np

from capibara.errors import rule_error
from capibara.kernels.core.context import matmul_precision
from capibara.kernels.core.spec import FLOATS, Call, Cost, describe, nbytes, unit_roundoff


class Sizes(NamedTuple):
    tokens: int
    heads: int
    depth: int
    pages: int
    page_size: int
    kv_heads: int
    sequences: int
    max_pages: int

    @property
    def capacity(self) -> int:
        """Keys that one sequence can have at most."""
        return self.max_pages * self.page_size

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


def sizes(call: Call) -> Sizes:
    return sizes_of(*(call.need(name) for name in ("query", "key_pages", "page_table")))


def sizes_of(query: Any, key_pages: Any, page_table: Any) -> Sizes:
    """The sizes of a call; a pool of three axes has its heads side by side in the last."""
    tokens, heads, depth = query.shape
    pages, page_size, kv_heads = key_pages.shape[:3]
    if len(key_pages.shape) == 3:
        kv_heads //= max(depth, 1)
    return Sizes(tokens, heads, depth, pages, page_size, kv_heads, *page_table.shape)


def check(call: Call) -> None:
    """Raise on what no implementation could compute."""
    _check_axes(call)
    n = sizes(call)
    query, keys, values = (call.need(name) for name in ("query", "key_pages", "value_pages"))
    own = (n.kv_heads, n.depth) if len(keys.shape) == 4 else (n.kv_heads * n.depth,)
    if keys.shape != values.shape or keys.shape[2:] != own:
        raise rule_error(
            "Key pages and value pages have one shape, and the query's head_dim",
            f"{describe(query)}, {describe(keys)} and {describe(values)}",
            "write keys and values to pools of the same shape",
        )
    if n.kv_heads < 1 or n.heads % n.kv_heads:
        raise rule_error(
            "The query's heads are a multiple of the cache's heads",
            f"{n.heads} and {n.kv_heads}",
            "repeat neither: pass key_pages and value_pages with the model's own key heads",
        )
    if not query.dtype == keys.dtype == values.dtype or np.dtype(query.dtype).name not in FLOATS:
        raise rule_error(
            "Query, key pages and value pages have one floating-point type",
            f"{query.dtype}, {keys.dtype} and {values.dtype}",
            "convert the query with .astype(key_pages.dtype)",
        )
    if n.page_size < 1 or n.depth < 1:
        raise rule_error("A page holds 1 key or more, of 1 number or more", describe(keys), "check the pool's shape")
    _check_rows(call, n)
    _check_params(call)


def _check_axes(call: Call) -> None:
    axes = {
        "query": "tokens, heads, head_dim",
        "key_pages": "pages, page_size, kv_heads, head_dim",
        "value_pages": "pages, page_size, kv_heads, head_dim",
        "page_table": "sequences, max_pages",
        "context_lengths": "sequences",
        "query_starts": "sequences + 1",
    }
    for name, named in axes.items():
        x = call[name]
        if x is None:
            if name == "query_starts":
                continue
            raise rule_error("paged_attention needs all of its arrays but query_starts", f"no {name}", f"pass {name}")
        pool = name in ("key_pages", "value_pages")
        if len(x.shape) != named.count(",") + 1 and not (pool and len(x.shape) == 3):
            also = " or [pages, page_size, kv_heads * head_dim]" if pool else ""
            raise rule_error(f"{name} is [{named}]{also}", describe(x), "check its shape")
        if name in ("page_table", "context_lengths", "query_starts") and x.dtype != jnp.int32:
            raise rule_error(f"{name} is int32", describe(x), "convert it with .astype(jnp.int32)")


def _check_rows(call: Call, n: Sizes) -> None:
    lengths, starts = call.need("context_lengths"), call["query_starts"]
    if lengths.shape != (n.sequences,):
        raise rule_error(
            f"There is one context length a row of the page table, here {n.sequences}",
            describe(lengths),
            "pass context_lengths of shape [sequences]",
        )
    if starts is None and n.tokens != n.sequences:
        raise rule_error(
            "Without query_starts there is one token a sequence",
            f"{n.tokens} tokens and {n.sequences} sequences",
            "pass query_starts=[0, ends of each sequence's tokens...]",
        )
    if starts is not None and starts.shape != (n.sequences + 1,):
        raise rule_error(
            f"query_starts has one number more than there are sequences, here {n.sequences + 1}",
            describe(starts),
            "pass the cumulative sum of the token counts, with a 0 in front",
        )


def _check_params(call: Call) -> None:
    for name in ("window", "key_splits"):
        value = call.params[name]
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise rule_error(f"{name} is a whole number, 1 or more, or None", repr(value), f"pass {name}=None or 1 up")
    for name in ("scale", "softcap"):
        value = call.params[name]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and (not number or not math.isfinite(cast(float, value))):
            raise rule_error(f"{name} is a finite number or None", repr(value), f"pass {name} as a Python float")
    cap = call.params["softcap"]
    if cap is not None and cast(float, cap) <= 0:
        raise rule_error("softcap is above zero", cap, "pass softcap=None for no cap")


def scale_of(scale: float | None, depth: int) -> float:
    return depth**-0.5 if scale is None else float(scale)


def cost(call: Call) -> Cost:
    """Two products of head_dim for each pair; the pools and the query read once, the output written once.

    How long each context is, is data: every sequence is counted at the length that its row of the table can hold.
    """
    n = sizes(call)
    window = cast("int | None", call.params["window"])
    seen = n.capacity if window is None else min(window, n.capacity)
    query = call.need("query")
    moved = sum(map(nbytes, call.args)) + nbytes(query)
    if call.params["return_lse"]:
        moved += 4 * n.tokens * n.heads
    flops = 4.0 * max(n.tokens * n.heads * seen * n.depth, 1)
    return Cost(matrix_flops=flops, bytes=float(moved), dtype=np.dtype(query.dtype).name)


def tolerance(call: Call) -> float:
    """The relative error in norm that a right result stays under.

    In units of the operands' roundoff: one for the output, one for the probabilities rounded to the type that the
    second product takes, one for joining and scaling. Sums in float32 add the square root of their lengths in its own
    units, four for an unlucky draw. A float32 product on an accelerator may be computed from inputs rounded to the
    matrix unit's type (TF32 on a GPU, bfloat16 on a TPU): two products, two inputs each.
    """
    n = sizes(call)
    dtype = call.need("query").dtype
    unit = unit_roundoff(dtype)
    summed = unit_roundoff(jnp.promote_types(jnp.float32, dtype)) * (n.depth**0.5 + max(n.capacity, 1) ** 0.5)
    rounded = 0.0
    if dtype == jnp.float32 and matmul_precision() not in ("highest", "float32"):
        rounded = {"gpu": 2.0**-11, "tpu": 2.0**-8}.get(call.target.platform, 0.0)
    return 3 * unit + 4 * summed + 4 * rounded
