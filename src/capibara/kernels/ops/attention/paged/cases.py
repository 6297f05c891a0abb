"""The batches paged attention is built for, and batches meant to break it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from capibara.kernels.core.spec import Case

REAL = frozenset({"bench", "tpu", "gpu", "tune"})
HOSTILE = frozenset({"test", "tpu", "gpu"})
LOWERED = frozenset({"tpu", "gpu"})  # compiled for the accelerators, and run by this op's own tests
SHARD = frozenset({"shard", "tpu", "gpu"})
REAL_OF_GPUS = frozenset({"bench", "gpu", "tune"})
LOWERED_FOR_GPUS = frozenset({"gpu"})
_DTYPES = {3: "int32", 4: "int32", 5: "int32"}
# What unused entries of a page table hold in the hostile cases.
GARBAGE = (-1, 2**31 - 1, -(2**31), 7)


def _case(
    name: str, contexts: Sequence[int], heads: int, depth: int, page_size: int, tags: frozenset[str], *,
    kv: int | None = None, counts: Sequence[int] | None = None, padding: int = 0, dtype: str = "bfloat16",
    spare_columns: int = 0, spare_pages: int = 0, side_by_side: bool = False, **params: Any,
) -> Case:  # fmt: skip
    """`contexts` are the lengths; `counts` the tokens of each sequence here, after them `padding` tokens of none;
    `side_by_side` gives the pools one axis for heads and head_dim.

    Hostile cases fill what is not in use with NaN, and the page table's unused entries with nonsense.
    """
    hostile = not tags & {"bench", "shard"}
    lengths = np.asarray(contexts, np.int32)
    used = -(-lengths // page_size)
    columns = int(used.max(initial=1)) + spare_columns
    pages = int(used.sum()) + spare_pages
    tokens = len(contexts) if counts is None else sum(counts) + padding

    def table(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Each used page of each sequence is a page of its own, in no order."""
        order = iter(generator.permutation(pages))
        made = np.resize(np.asarray(GARBAGE if hostile else (0,), np.int64), shape)
        for row, n in enumerate(used):
            made[row, :n] = [next(order) for _ in range(n)]
        return made

    def spoil(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        """NaN in every place of the pools that holds no key."""
        live = np.zeros((pages, page_size), bool)
        for row, length in zip(np.asarray(arrays[3]), lengths.tolist(), strict=True):
            for key in range(length):
                live[row[key // page_size], key % page_size] = True
        pools = tuple(jnp.where(live.reshape(*live.shape, *[1] * (x.ndim - 2)), x, jnp.nan) for x in arrays[1:3])
        return (arrays[0], *pools, *arrays[3:])

    pool = (pages, page_size, (kv or heads) * depth) if side_by_side else (pages, page_size, kv or heads, depth)
    shapes = (
        (tokens, heads, depth), pool, pool, (len(contexts), columns), (len(contexts),),
        None if counts is None else (len(contexts) + 1,),
    )  # fmt: skip
    draw: dict[int, Any] = {
        3: table,
        4: lambda generator, shape: lengths,
        5: lambda generator, shape: np.cumsum([0, *(counts or ())]),
    }
    return Case(name, shapes, dtype, params, tags, _DTYPES, draw, spoil if hostile else None)


CASES = (
    _case("decode-64x8k", [8192] * 64, 32, 128, 64, REAL, kv=8),
    _case("decode-16x32k", [32768] * 16, 32, 128, 64, REAL, kv=8),
    _case("long-1x128k", [131072], 32, 128, 64, REAL, kv=8),
    _case("mixed-512+32", [4096] * 33, 32, 128, 64, REAL, kv=8, counts=[512, *[1] * 32]),
    _case("decode-256x2k-small-pages", [2048] * 256, 32, 128, 16, REAL, kv=8),
    _case("decode-ragged", [8192, *range(128, 8192, 128)], 32, 128, 64, REAL, kv=8),
    _case("window-64x8k", [8192] * 64, 16, 128, 64, REAL, kv=8, window=1024),
    _case("narrow-64x4k", [4096] * 64, 32, 64, 64, REAL, kv=8, side_by_side=True),
    _case("narrow-64x4k-large-pages", [4096] * 64, 32, 64, 128, frozenset({"tpu"}), kv=8),
    _case("wide-24x3k", [3251] * 24, 16, 256, 64, REAL_OF_GPUS, kv=8),
    _case("wide-5x1k", [1416] * 5, 128, 192, 64, REAL_OF_GPUS, kv=128),
    _case("panels-32x2k", [2048] * 32, 32, 80, 64, REAL_OF_GPUS, kv=32, side_by_side=True),
    # Hostile: one key, lengths around a page's, empty sequences, padding, odd head sizes, each feature.
    _case("one", [1], 1, 32, 1, HOSTILE, dtype="float32"),
    _case(
        "lengths", [1, 8, 9, 0, 31, 64], 8, 32, 8, HOSTILE, kv=8, spare_columns=2, spare_pages=3, return_lse=True,
        dtype="float32",
    ),
    _case("prime-page", [5, 23, 11], 4, 48, 7, LOWERED, kv=2, spare_columns=1, dtype="float32"),
    _case("grouped", [40, 3, 17], 16, 64, 16, LOWERED, kv=8, spare_pages=1),
    _case("one-key-head", [20, 33], 8, 128, 16, LOWERED, kv=1, return_lse=True),
    _case(
        "ragged", [37, 9, 0, 12, 50], 8, 64, 8, HOSTILE, kv=4, counts=[5, 1, 0, 12, 7], padding=3, spare_pages=2,
        spare_columns=1, return_lse=True, dtype="float32",
    ),
    _case("ragged-window", [70, 21, 18], 16, 32, 8, LOWERED, kv=8, counts=[10, 1, 18], window=13),
    _case("window-decode", [70, 5, 33], 4, 256, 8, LOWERED, kv=2, window=9, dtype="float32"),
    _case("capped", [30, 12], 8, 64, 8, LOWERED, kv=8, softcap=1.5, scale=0.5),
    _case("split", [130, 1, 64], 8, 64, 8, LOWERED, kv=8, key_splits=3, return_lse=True, dtype="float32"),
    _case(
        "side-by-side", [37, 9, 0, 12], 8, 96, 8, LOWERED, kv=4, counts=[5, 1, 0, 12], padding=3, spare_pages=2,
        side_by_side=True, window=7, return_lse=True, dtype="float32",
    ),
    _case("keys-minor", [150, 1], 4, 64, 128, LOWERED, kv=2, return_lse=True, softcap=2.0),
    # Head sizes that a kernel takes in several panels, or in blocks of their own.
    _case("heads-80", [40, 3, 17], 8, 80, 16, LOWERED_FOR_GPUS, kv=4, spare_pages=1, key_splits=2),
    _case("heads-96", [70, 5, 133], 8, 96, 64, LOWERED_FOR_GPUS, kv=8, window=40, return_lse=True),
    _case("heads-112", [30, 12], 8, 112, 16, LOWERED_FOR_GPUS, kv=1, softcap=1.5),
    _case(
        "heads-160", [37, 9, 0, 12], 16, 160, 8, LOWERED_FOR_GPUS, kv=8, counts=[5, 1, 0, 12], padding=3,
        return_lse=True,
    ),
    _case("heads-192", [150, 1], 4, 192, 16, LOWERED_FOR_GPUS, kv=4, key_splits=2),
    _case(
        "heads-256", [70, 21, 18], 8, 256, 16, LOWERED_FOR_GPUS, kv=2, counts=[10, 1, 18], window=13, key_splits=2
    ),
    _case("half", [30, 12], 8, 64, 16, LOWERED, kv=4, dtype="float16"),
    # Divides over 32 devices, as 8 x 4 or 4 x 8: the sequences and the heads are split.
    _case("shardable", [3, 16, 9, 24, 1, 8, 17, 20], 16, 32, 8, SHARD, kv=8, dtype="float32"),
)  # fmt: skip
