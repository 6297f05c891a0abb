"""Block sizes of the Hopper attention kernel: what fits the chip, and what is taken where nothing was tuned."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from capibara.errors import rule_error
from capibara.kernels.core.spec import Call
from capibara.kernels.pallas.hopper import SMEM_BYTES, multiprocessors, refuses_chip

REDUCTION_BYTES = 1024  # a row's maximum and sum stay inside a warp, so that little of it is used
MOST_REGISTERS = 224  # of a thread's 232 for tiles
VERY_LONG = 32768  # queries, from which on memory counts for more than the last few percent of speed
HEAD_DIMS = (64, 128, 256)  # what the tiles come in; others are padded with zeros
AXES = ("batch", "head", "tile")  # of a launch
# Orders in which programs start, the slowest axis first. On an H200 heads that start together were best, or within 2 %
# of it, at every shape with head_dim up to 128 (by up to 9 %), and one head after another at 256 (by 3 to 25 %).
HEADS_TOGETHER, TILES_TOGETHER = "batch tile head", "head tile batch"


def check_order(order: str) -> None:
    if sorted(order.split()) != list(AXES):
        raise rule_error(
            f"order names {', '.join(AXES)} once each, the slowest first", repr(order), f"use {HEADS_TOGETHER!r}"
        )


@dataclasses.dataclass(frozen=True)
class HopperConfig:
    """Rows of queries a warpgroup, keys a block, and how many blocks are fetched ahead.

    With `programs` that many programs go over the tiles of queries, one after another, so that a tile's first keys are
    fetched while the one before it ends; with 0 each tile is a program of its own. `order` is that in which tiles
    start: the axis named last changes first.
    """

    block_q: int = 64
    block_k: int = 128
    stages: int = 2
    take_turns: bool = True
    programs: int = 0
    order: str = HEADS_TOGETHER

    def __post_init__(self) -> None:
        if self.block_q not in (64, 128):
            raise rule_error("block_q is 64 or 128", self.block_q, "use 64")
        if self.block_k % 64 or not 64 <= self.block_k <= 256:
            raise rule_error("block_k is a multiple of 64 up to 256", self.block_k, "use 128")
        if self.stages < 2:
            raise rule_error("stages is two or more", self.stages, "use 2")
        if self.programs < 0:
            raise rule_error("programs is 0 or more", self.programs, "use 0, a program for each tile")
        check_order(self.order)

    @property
    def tile(self) -> int:
        """Rows of queries a program: two warpgroups' worth."""
        return 2 * self.block_q

    def smem_bytes(self, head_dim: int, pair_bytes: int = 0) -> int:
        """Shared memory of a program; `pair_bytes` is what mask and bias hold for each pair of query and key.

        Tiles of queries (the output leaves from them, or from one of its own where the next queries are fetched
        meanwhile), keys and values in half precision; one number a row, in a whole unit of 1024 bytes; room for
        reductions; barriers of eight bytes.
        """
        blocks = (2 if self.programs else 1) * self.tile + 2 * self.stages * self.block_k
        tiles = 2 * blocks * padded_head_dim(head_dim) + self.tile * self.block_k * pair_bytes
        return tiles + round_up(4 * self.tile, 1024) + REDUCTION_BYTES + 8 * (4 * self.stages + 4)

    def registers(self, head_dim: int) -> int:
        """A thread's share of the scores, the probabilities in half precision, and the output."""
        return self.block_q * (padded_head_dim(head_dim) + self.block_k + self.block_k // 2) // 128


def best_order(head_dim: int) -> str:
    return TILES_TOGETHER if padded_head_dim(head_dim) == 256 else HEADS_TOGETHER


def padded_head_dim(head_dim: int) -> int:
    return next(size for size in HEAD_DIMS if head_dim <= size)


def round_up(n: int, to: int) -> int:
    return -(-n // to) * to


def bias_bytes(bias: Any) -> int:
    """Bytes a pair of a bias that is streamed tile by tile: float64 is narrowed, one row needs no tile."""
    return 0 if bias is None or bias.shape[2] == 1 else min(np.dtype(bias.dtype).itemsize, 4)


def pair_bytes(head_dim: int, bias: Any, masked_by_tile: bool) -> int:
    """Bytes that mask and bias hold for each pair. Where both do not fit, the mask is folded into the bias."""
    both = bias_bytes(bias) + masked_by_tile
    return min(both, 4) if folds_mask(head_dim, bias, masked_by_tile) else both


def folds_mask(head_dim: int, bias: Any, masked_by_tile: bool) -> bool:
    """Whether the widest heads leave no room for a mask beside a bias in float32."""
    return masked_by_tile and bias_bytes(bias) == 4 and padded_head_dim(head_dim) == 256


def aligned(block_size: tuple[int, int], config: HopperConfig) -> bool:
    """Whether every tile of the kernel lies inside one block of the caller's block mask."""
    return block_size[0] % config.tile == 0 and block_size[1] % config.block_k == 0


def _fits(call: Call, config: HopperConfig) -> bool:
    q, mask = call.need("q"), call["mask"]
    by_tile = mask is not None and mask.shape[2] > 1
    size = call.params["block_size"]
    if size is not None and not aligned(cast(tuple[int, int], size), config):
        by_tile = True
    used = config.smem_bytes(q.shape[-1], pair_bytes(q.shape[-1], call["bias"], by_tile))
    return used <= SMEM_BYTES and config.registers(q.shape[-1]) <= MOST_REGISTERS


def candidates(call: Call) -> Sequence[HopperConfig]:
    """Block sizes whose tiles fit shared memory, and whose scores and outputs fit the registers."""
    keys = call.need("k").shape[2]
    made = [
        HopperConfig(block_q, block_k, stages, turns, order=best_order(call.need("q").shape[-1]))
        for block_q, block_k in ((64, 128), (64, 64), (64, 192), (64, 256), (128, 64), (128, 128))
        for stages in (2, 3, 4)
        for turns in (True, False)
        if block_k <= max(round_up(keys, 64), 64)
    ]
    if _plain(call):
        made += [
            dataclasses.replace(c, programs=multiprocessors(call.target.device_kind)) for c in made if c.take_turns
        ]
    made = [c for c in made if _fits(call, c)]
    size = call.params["block_size"]
    # A block mask costs nothing where it is made of whole tiles; otherwise it becomes a mask of pairs.
    whole = [c for c in made if size is None or aligned(cast(tuple[int, int], size), c)]
    return whole or made


def _plain(call: Call) -> bool:
    """Whether position alone decides who sees whom, and nothing is added to the scores or drawn for them."""
    absent = ("bias", "mask", "q_segments", "block_mask")
    return not call.params["dropout_rate"] and all(call[name] is None for name in absent)


def default_config(call: Call) -> HopperConfig:
    """By head size; fewer keys a block where the call leaves less room."""
    head_dim = padded_head_dim(call.need("q").shape[-1])
    # What is added to each score, or drawn for it, wants registers too.
    preferred = {64: 256 if _plain(call) else 128, 128: 128, 256: 64}[head_dim]
    # Tiles one after another in one program gained 9 to 24 % on an H200 where a tile is soon done, at head_dim 64, and
    # 2 to 16 % where all tiles take as long, without causality. With it, at head_dim 128, they cost 3 to 19 % at four
    # of five shapes: the longest no longer start first.
    in_turn = _plain(call) and (head_dim == 64 or (head_dim == 128 and not call.params["causal"]))
    fitting = [c for c in candidates(call) if c.block_q == 64 and c.stages == 2 and c.take_turns]
    fitting = [c for c in fitting if bool(c.programs) == in_turn] or fitting
    return max((c for c in fitting if c.block_k <= preferred), key=lambda c: c.block_k, default=fitting[0])


def pads_copies(call: Call) -> bool:
    """Whether q, k, v and the output are copied with zeros beside them before and after the kernel."""
    q, k = call.need("q"), call.need("k")
    return q.shape[-1] not in HEAD_DIMS or q.shape[2] % 8 != 0 or k.shape[2] % 8 != 0


BELOW_CUDNN, ABOVE_CUDNN = 25.0, 35.0  # whose rank is 30


def rank(call: Call) -> float:
    """Where no tuned case is near. On an H200 it was ahead of cuDNN by 5 to 11 % wherever position limits what is seen,
    and without a limit by 7 % at 1k, and at 4k in an earlier run; at 8k without a limit it was behind by 2 %. Where it
    pads copies it was behind by 22 to 50 % at five shapes of six (head sizes 80, 96, 192; lengths 577, 1500)."""
    if pads_copies(call):
        return BELOW_CUDNN
    if not call.params["causal"] and call.params["window"] is None:
        return ABOVE_CUDNN if call.need("k").shape[2] <= 4096 else BELOW_CUDNN
    return ABOVE_CUDNN


def rank_grad(call: Call) -> float:
    """On an H200 it was ahead of cuDNN at head_dim 64 (12 to 15 %), and at 128 up to 4k (2 to 12 %); it was behind from
    8k on, by 1 to 11 %, at 256, and by 8 to 15 % with the forward pass where it pads copies. Very long calls go in two
    parts, which take half of the memory that cuDNN wants beside the gradients. With a window no comparison was made:
    programs skip what lies outside."""
    q = call.need("q")
    if call.params["window"] is not None:
        return ABOVE_CUDNN
    if pads_copies(call) or q.shape[-1] == 256:
        return BELOW_CUDNN
    if q.shape[-1] == 64:
        return ABOVE_CUDNN
    return ABOVE_CUDNN if q.shape[2] <= 4096 or q.shape[2] >= VERY_LONG else BELOW_CUDNN


def refuses(call: Call) -> str | None:
    q, k, v = call.need("q"), call.need("k"), call.need("v")
    chip = refuses_chip(call.target.device_kind)
    if chip is not None:
        return chip
    if np.dtype(q.dtype).name not in ("bfloat16", "float16") or not q.dtype == k.dtype == v.dtype:
        return f"its tensor-core form takes bfloat16 or float16 alike for q, k and v, not {q.dtype} and {k.dtype}"
    if q.shape[-1] > HEAD_DIMS[-1]:
        return f"head_dim is {HEAD_DIMS[-1]} at the most here, not {q.shape[-1]}"
    if math.prod(q.shape) == 0 or math.prod(k.shape) == 0:
        return "an operand is empty"
    return None
