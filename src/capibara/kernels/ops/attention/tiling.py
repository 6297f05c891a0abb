"""One block size for attention: the tile that the implementation which dispatch chose gets from it.

| implementation | what the block size is |
|---|---|
| xla | queries and keys of one chunk, exactly |
| pallas_tpu | queries and keys of one grid step: the nearest tile that fits the core's memory, in multiples of 128 |
| hopper | queries of one program and keys of one block: the nearest tile that fits registers and shared memory |
| cudnn, reference | nothing: they have no tile to choose, which is said once |

A nearest tile that is not the one asked for is said once too.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Hashable, Mapping
from typing import Any

import jax
import numpy as np

from capibara.errors import rule_error, say_once
from capibara.kernels.core import context, tables, trusting
from capibara.kernels.core.dispatch import Selection, select
from capibara.kernels.core.spec import Call, Config
from capibara.kernels.ops.attention import inputs
from capibara.kernels.ops.attention.api import ATTENTION
from capibara.kernels.ops.attention.chunks import ChunkConfig
from capibara.kernels.ops.linalg.placement import target_for
from capibara.lru import LRU

logger = logging.getLogger("capibara.kernels")

# Asking every implementation takes a while, so it is done once for each distinct call.
_CONFIGS: LRU[Hashable, Config] = LRU(4096)
_UNSEEN = object()


def checked_block(block_size: Any) -> int:
    if isinstance(block_size, bool) or not isinstance(block_size, int | np.integer) or block_size < 1:
        raise rule_error(
            "block_size is the side of a tile of queries and keys: a positive whole number, or None",
            repr(block_size),
            "use 128, or leave it out (a pair is for block_mask and mask_fn)",
        )
    return int(block_size)


def config_for(block: int, arrays: tuple[Any, Any, Any], options: Mapping[str, Any]) -> Config:
    """The config that makes `attention(*arrays, **options)` run by tiles of `block`; None where nothing has tiles.

    `options` have no block mask and no mask function: those bring a block size of their own.
    """
    leaves, tree = jax.tree.flatten((arrays, dict(options)))
    shapes = tuple((x.shape, x.dtype) if hasattr(x, "dtype") and hasattr(x, "shape") else x for x in leaves)
    surroundings = (context.current_interpret(), context.matmul_precision(), tables.generation(), trusting.trusted())
    key = (block, tree, shapes, target_for(arrays), surroundings)
    config = _CONFIGS.get(key, _UNSEEN)
    if config is _UNSEEN:
        selection = select(_call(arrays, options), options.get("implementation"))
        config = _CONFIGS[key] = _tile(selection, block)
    return config


def _call(arrays: tuple[Any, Any, Any], options: Mapping[str, Any]) -> Call:
    """The call that attention() makes of these arguments, as shapes."""

    def operands(arrays: Any, given: dict[str, Any]) -> tuple[Any, ...]:
        q, k, v = inputs.heads_first(options["layout"], query=arrays[0], key=arrays[1], value=arrays[2])
        segments = inputs.segments(given.get("segment_ids"), given.get("key_segment_ids"), q.shape[2], k.shape[2])
        bias, mask = (inputs.four_axes(name, given.get(name)) for name in ("bias", "mask"))
        seed = inputs.dropout_seed(options.get("dropout_rate", 0.0), given.get("dropout_key"))
        return q, k, v, bias, mask, *segments, None, seed

    names = ("bias", "mask", "segment_ids", "key_segment_ids", "dropout_key")
    shapes = jax.eval_shape(operands, arrays, {name: options.get(name) for name in names})
    params: dict[str, Any] = {
        name: options[name]
        for name in ("scale", "softcap", "dropout_rate", "return_lse")
        if options.get(name) is not None
    }
    params["causal"] = inputs.causal_flag(options.get("causal"), options.get("is_causal"))
    params["q_offset"] = options.get("query_offset", 0)
    params["window"] = inputs.window_sides(options.get("window"))
    return ATTENTION.call(*shapes, target=target_for(arrays), **params)


def _tile(selection: Selection, block: int) -> Config:
    call, name = selection.call, selection.implementation
    made = call.op.implementations[name]
    if made.config_type is None:
        say_once(logger, name, "block_size means nothing to %s, which has no tile to choose", name)
        return None
    if isinstance(selection.config, ChunkConfig):
        return dataclasses.replace(selection.config, block_q=block, block_k=block)
    rows, columns = call.need("q").shape[2], call.need("k").shape[2]

    def distance(config: Config) -> float:
        sides = _sides(name, config)
        # A tile longer than the operand is the same as one that covers it.
        return sum(abs(math.log(side / min(block, n))) for side, n in zip(sides, (rows, columns), strict=True))

    # The candidates come best first, and min keeps the first of equals.
    nearest = min(made.candidates(call), key=distance)
    sides = _sides(name, nearest)
    if any(side != block and min(side, block) < n for side, n in zip(sides, (rows, columns), strict=True)):
        text = "block_size=%d is a tile of %d queries and %d keys in %s, the nearest it has"
        say_once(logger, (block, sides, name), text, block, *sides, name)
    return nearest


def _sides(implementation: str, config: Config) -> tuple[int, int]:
    """Queries and keys of one tile; a Hopper program has two warpgroups of block_q queries each."""
    return config.block_q * (2 if implementation == "hopper" else 1), config.block_k
