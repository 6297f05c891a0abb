"""The mesh rule of paged attention.

The cache's heads, with the query heads that share each, are split with nothing gathered. In plain decoding the
sequences may be split too, where every device holds the pool; pages, tokens of a ragged batch and head_dim are whole
on every device.
"""

from __future__ import annotations

from capibara.kernels.core.spec import Call, Partition
from capibara.kernels.ops.attention.paged.rules import sizes


def _heads(call: Call) -> tuple[str, str]:
    """The factors of the query's head axis, and of the pool's."""
    n = sizes(call)
    if n.kv_heads == 1 and n.heads > 1:
        return "g", "u"  # one key head for all: its query heads can be split
    return ("h", "h") if n.group == 1 else ("(h g)", "h")


def _side_by_side(call: Call) -> bool:
    """Whether the pools have one axis for heads and head_dim."""
    return len(call.need("key_pages").shape) == 3


def rule(call: Call) -> str:
    heads, kv_heads = _heads(call)
    ragged = call["query_starts"] is not None
    token = "t" if ragged else "b"
    pool = f"p s {kv_heads} d"
    if _side_by_side(call):
        # `d` of the query under another name: one that an axis shows may have no size of its own.
        pool = "p s e" if kv_heads == "u" else f"p s ({kv_heads} e)"
    terms = [f"{token} {heads} d", pool, pool, "b m", "b", *(["n"] if ragged else [])]
    lse = f", {token} {heads}" if call.params["return_lse"] else ""
    return f"{', '.join(terms)} -> {token} {heads} d{lse}"


def whole(call: Call) -> tuple[str, ...]:
    """The factors that no device may hold a part of."""
    always = ("t", "p", "s", "d", "e", "m", "n", "u")
    kept = always if _heads(call)[0] == "g" else (*always, "g")
    return kept if call["query_starts"] is None else (*kept, "b")


def factor_sizes(call: Call) -> dict[str, int]:
    n = sizes(call)
    heads, kv_heads = _heads(call)
    made = {"g": n.group} if heads == "(h g)" else {}
    if _side_by_side(call) and kv_heads == "h":
        made["e"] = n.depth
        if heads == "(h g)":
            made["h"] = n.kv_heads  # no axis is the heads alone
    return made


# Sequences may lie anywhere in the pool, so only the heads have a place that can be told.
PARTITION = Partition(rule, replicated=whole, sizes=factor_sizes, logical={"h": "heads", "g": "heads"})
