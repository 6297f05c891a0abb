"""The steps of serving paged_write is built for, and steps meant to break it."""

from __future__ import annotations

from typing import Any

import numpy as np

from capibara.kernels.core.spec import Case

REAL = frozenset({"bench", "tune", "gpu"})
HOSTILE = frozenset({"test"})
_DTYPES = {3: "float32", 4: "float32", 5: "int32", 6: "int32"}
# What tokens that are written nowhere have for a page.
NOWHERE = (-1, 2**31 - 1, -(2**31))


def _case(
    name: str, tokens: int, heads: int, kv_heads: int, depth: int, tags: frozenset[str], *, pages: int = 0,
    page_size: int = 64, rotary: int | None = None, nowhere: int = 0, side_by_side: bool = True,
    dtype: str = "bfloat16", parts: int = 0, **params: Any,
) -> Case:  # fmt: skip
    """The last `nowhere` tokens have no page, one of them no slot."""
    pages = pages or tokens + 2
    half = (depth if rotary is None else rotary) // 2
    # One order for both of the operands that say where: no two tokens go to one place.
    places = np.random.default_rng(tokens).permutation(pages * page_size)[:tokens]
    page, slot = places // page_size, places % page_size
    if nowhere:
        page[-nowhere:] = np.resize((*NOWHERE, pages), nowhere)
        page[-nowhere], slot[-nowhere] = 0, page_size
    angles = np.random.default_rng(tokens + 1).uniform(-np.pi, np.pi, (tokens, half))
    pool = (pages, page_size, kv_heads * depth) if side_by_side else (pages, page_size, kv_heads, depth)
    at, turn = (tokens,), (tokens, half)
    projected = (tokens, heads + 2 * kv_heads, depth)
    shapes = ((parts, *projected) if parts else projected, pool, pool, turn, turn, at, at)
    draw: dict[int, Any] = {
        3: lambda generator, shape: np.cos(angles),
        4: lambda generator, shape: np.sin(angles),
        5: lambda generator, shape: page,
        6: lambda generator, shape: slot,
    }
    dtypes = _DTYPES if dtype != "float64" else {**_DTYPES, 3: "float64", 4: "float64"}
    dtypes = {**dtypes, 0: dtypes[3]} if parts else dtypes
    return Case(name, shapes, dtype, params, tags, dtypes, draw)


CASES = (
    *(
        _case(f"llama-1b-{tokens}", tokens, 16, 8, 128, REAL, pages=1024, spare_page=True)
        for tokens in (1, 8, 32, 256, 2048)
    ),
    _case("llama-1b-1-in-parts", 1, 16, 8, 128, REAL, pages=1024, spare_page=True, parts=4),
    *(_case(f"llama-8b-{tokens}", tokens, 32, 8, 128, REAL, pages=1024, spare_page=True) for tokens in (1, 32)),
    *(_case(f"narrow-{tokens}", tokens, 32, 8, 64, REAL, pages=1024, spare_page=True) for tokens in (1, 32)),
    _case("one", 1, 1, 1, 2, HOSTILE, page_size=1, dtype="float32"),
    _case("odd", 5, 3, 1, 34, HOSTILE, page_size=7, rotary=10, nowhere=2, side_by_side=False),
    _case("nothing-is-written", 3, 4, 2, 64, HOSTILE, page_size=8, nowhere=3, dtype="float32"),
    _case("no-tokens", 0, 4, 2, 64, HOSTILE, page_size=8),
    _case("a-token", 1, 4, 4, 128, HOSTILE | {"gpu"}, page_size=8, spare_page=True),
    _case("padded", 7, 8, 4, 64, HOSTILE | {"gpu"}, page_size=8, nowhere=5, dtype="float16"),
    _case("part-of-a-head", 3, 8, 4, 128, HOSTILE | {"gpu"}, page_size=8, rotary=64, nowhere=1, side_by_side=False),
    _case("in-parts", 2, 4, 2, 128, HOSTILE | {"gpu"}, page_size=8, nowhere=1, parts=3),
    _case("one-part", 1, 4, 4, 64, HOSTILE | {"gpu"}, page_size=8, dtype="float16", parts=1),
    _case("parts-of-float32", 3, 3, 1, 34, HOSTILE, page_size=7, rotary=10, dtype="float32", parts=2),
    _case("wide-heads", 2, 2, 1, 256, HOSTILE | {"gpu"}, page_size=16),
    _case("three-numbers-a-thread", 2, 8, 8, 96, HOSTILE | {"gpu"}, page_size=8),
)  # fmt: skip
