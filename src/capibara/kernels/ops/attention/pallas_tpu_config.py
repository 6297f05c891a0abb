"""Which tiles the TPU attention kernels may choose from: what fits a core's memories, and which calls they refuse."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from capibara.kernels.core.context import matmul_precision
from capibara.kernels.core.spec import Call
from capibara.kernels.ops.attention.pallas_tpu_common import (
    LANES,
    PARTIAL,
    WHOLE,
    FlashConfig,
    block_kinds,
    most_live,
    round_up,
    rules_of,
)  # fmt: skip
from capibara.kernels.pallas import vmem

# The tables live in a core's scalar memory (1 MiB on v4), beside the compiler's own.
TABLE_BYTES = 256 * 1024
# Fixed cost of one grid step (DMA issue, semaphores): only to order candidates before any measurement.
STEP_SECONDS = 0.35e-6
AnyConfig = TypeVar("AnyConfig", bound=FlashConfig)


def tile_bytes(rows: int, columns: int, dtype: Any) -> int:
    """Bytes of a VMEM buffer: rows to a whole packed tile, columns to whole lanes."""
    size = np.dtype(dtype).itemsize
    return round_up(rows, 8 * (4 // size)) * round_up(columns) * size


def head_bytes(config: FlashConfig, depth: int, length: int, dtype: Any) -> int:
    """Bytes of a block of one head, as the config has it lie."""
    return tile_bytes(depth, length, dtype) if config.length_minor else tile_bytes(length, depth, dtype)


def in_both_orders(call: Call, made: Callable[[bool], list[AnyConfig]]) -> list[AnyConfig]:
    """`made(length_minor)` for the orders that the call's heads may be read in, the one XLA lays them out in first."""
    q, k = call.need("q"), call.need("k")
    depth, packed = q.shape[3], 32 // np.dtype(q.dtype).itemsize
    # A head_dim that fills the lanes lies along them; one that is no whole number of packed rows is never turned.
    if depth % LANES == 0 or depth % packed:
        return made(False)
    lengths = (q.shape[2], k.shape[2])
    turned = sum(tile_bytes(depth, n, q.dtype) for n in lengths) < sum(tile_bytes(n, depth, q.dtype) for n in lengths)
    return [*made(turned), *made(not turned)]


def table_bytes(call: Call, config: FlashConfig) -> int:
    """Scalar memory of the longer of the two tables: by query block and by key block."""
    q, mask = call.need("q"), call["block_mask"]
    rows, columns = -(-q.shape[2] // config.block_q), -(-call.need("k").shape[2] // config.block_k)
    if rows * columns > 2**22:  # more blocks than are worth looking at, or than a table of them would hold
        return 4 * rows * columns
    kinds = block_kinds(rules_of(q, call.need("k"), call.params), config.block_q, config.block_k)
    batch = max(1 if mask is None else mask.shape[0], 1 if call["q_segments"] is None else q.shape[0])
    tables = batch * (1 if mask is None else mask.shape[1])
    if call["bias"] is not None and "d_out" in call.op.operands:
        return 4 * tables * rows * columns  # the gradient of the bias walks every block
    return 4 * tables * max(rows * most_live(kinds), columns * most_live(kinds.T))


def divides_mask_blocks(call: Call, config: FlashConfig) -> bool:
    """Whether every block of the grid lies inside one block of the caller's block mask (True without one)."""
    if call["block_mask"] is None:
        return True
    size: Any = call.params["block_size"]
    rows, columns = call.need("q").shape[2], call.need("k").shape[2]
    # A mask block that holds the whole operand is divided by any block.
    inside_rows = size[0] >= rows or size[0] % config.block_q == 0
    return inside_rows and (size[1] >= columns or size[1] % config.block_k == 0)


def refuses(call: Call) -> str | None:
    """What neither the forward nor the backward kernels take."""
    q, k, v = (call.need(name) for name in "qkv")
    if not q.dtype == k.dtype == v.dtype:
        return f"its operands have one type; these are {q.dtype}, {k.dtype} and {v.dtype}"
    if np.dtype(q.dtype).name not in ("bfloat16", "float32"):
        return f"the v4 matrix units take bfloat16 and float32, not {q.dtype}"
    if 0 in q.shape or 0 in k.shape:
        return "an operand is empty"
    if not 8 <= q.shape[3] <= 256:
        return f"it takes a head_dim from 8 to 256, not {q.shape[3]}"
    if v.shape[3] != q.shape[3]:
        return f"queries and values have one head_dim; these are {q.shape[3]} and {v.shape[3]}"
    asked = matmul_precision()
    if q.dtype == jnp.float32 and asked in ("high", "tensorfloat32", "bfloat16_3x"):
        return f"Mosaic has no {asked!r} precision between one pass and the full six"
    for name in ("bias", "mask"):
        extra = call[name]
        if extra is not None and extra.shape[3] != k.shape[2]:
            return f"its {name} names every key; this one has {extra.shape[3]} for {k.shape[2]} keys"
    bias = call["bias"]
    if bias is not None and np.dtype(bias.dtype).name not in ("bfloat16", "float32"):
        return f"its bias is bfloat16 or float32, not {bias.dtype}"
    if call.params["dropout_rate"] and call["dropout_seed"] is None:
        return "dropout needs a seed"
    size: Any = call.params["block_size"]
    if call["block_mask"] is not None:
        short = [s for s, n in zip(size, (q.shape[2], k.shape[2]), strict=True) if s % LANES and s < n]
        if short:
            return f"blocks of its block mask are multiples of {LANES}; these are {size[0]} by {size[1]}"
    return None


def candidates(call: Call, like: AnyConfig, vmem_bytes: Callable[[Call, FlashConfig], int]) -> list[AnyConfig]:
    """Every distinct block that fits VMEM and the caller's block mask, best predicted first; the rest as in `like`."""
    q, k = call.need("q"), call.need("k")
    limit = vmem.limit(call)
    tried: set[AnyConfig] = set()
    distinct: list[AnyConfig] = []
    for bq, bk in itertools.product((128, 256, 512, 1024, 2048), repeat=2):
        for cq, ck in itertools.product((128, 256, 512), (128, 256, 512, 1024)):
            if cq * ck > 512 * 512:
                continue
            made = dataclasses.replace(like, block_q=bq, block_k=bk, chunk_q=min(bq, cq), chunk_k=min(bk, ck))
            fitted = made.fit(q.shape[2], k.shape[2])
            if fitted in tried:  # most are, for short lengths: a refusal asks at every call
                continue
            tried.add(fitted)
            fits = vmem_bytes(call, fitted) <= limit and table_bytes(call, fitted) <= TABLE_BYTES
            if fits and divides_mask_blocks(call, fitted):
                distinct.append(fitted)
    return sorted(distinct, key=functools.partial(_predicted_seconds, call))


def _predicted_seconds(call: Call, config: FlashConfig) -> float:
    """An ordering, not a measurement: matrix work of the live blocks, the vector work around it, a fee a step."""
    rules = rules_of(call.need("q"), call.need("k"), call.params)
    kinds = block_kinds(rules, config.block_q, config.block_k)
    whole, partial = int((kinds == WHOLE).sum()), int((kinds == PARTIAL).sum())
    pairs = config.block_q * config.block_k
    depth = round_up(rules.depth)
    # Cycles of one core: 65,536 multiply-adds each; seven vector operations a register of scores, two at a time.
    matrix, vector = 2 * pairs * depth / 65536, 7 * pairs / 1024 / 2
    # A strip's output is read, shrunk and written once a chunk; short strips leave the matrix units waiting.
    strips = (config.block_q // config.chunk_q) * (config.block_k // config.chunk_k)
    vector += 3 * strips * depth * config.chunk_q / 1024 + 100 * strips * 256 / config.chunk_q
    spilled = max(config.chunk_q * config.chunk_k / 1024 - 128, 0) * strips
    vector += depth * config.block_k / 1024 * 4  # the values' transpose
    step = max(matrix, vector) + 0.3 * min(matrix, vector) + spilled
    batch = call.need("q").shape[0] * rules.heads
    return batch * ((whole + 1.2 * partial) * step / 1.05e9 + (whole + partial) * STEP_SECONDS)
