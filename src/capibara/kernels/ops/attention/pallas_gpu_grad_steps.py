"""What the bodies of the Hopper backward kernel share: which steps of queries a program visits, and its arithmetic."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.errors import rule_error
from capibara.kernels.ops.attention.pallas_gpu_config import HEADS_TOGETHER, check_order
from capibara.kernels.pallas.hopper import HIDDEN_STEPS, LOG2E, hidden_zero

FETCH_REGISTERS, COMPUTE_REGISTERS = 24, 240
LAYOUT = plgpu.Layout.WGMMA


@dataclasses.dataclass(frozen=True)
class HopperGradConfig:
    """Queries a step, how many steps are fetched ahead, the order in which programs start, and in how many launches.

    The axis that `order` names last changes first: with the tile last, neighbouring programs have different keys of
    one head. Each of `parts` launches takes its share of the key heads, so that only that share's float32 sums of dq
    exist at a time.
    """

    block_q: int = 64
    stages: int = 2
    order: str = HEADS_TOGETHER
    parts: int = 1

    def __post_init__(self) -> None:
        if self.block_q not in (64, 128):
            raise rule_error("block_q is 64 or 128", self.block_q, "use 64")
        if self.stages < 2:
            raise rule_error("stages is two or more", self.stages, "use 2")
        if self.parts < 1:
            raise rule_error("parts is one or more", self.parts, "use 1")
        check_order(self.order)


@dataclasses.dataclass(frozen=True)
class Steps:
    """The static side of one call: a program has `tile` keys, and visits steps of `block_q` queries.

    Query i sees keys i + offset - left to i + offset + right; None is no limit.
    """

    config: HopperGradConfig
    tile: int
    keys: int
    length: int
    group: int
    offset: int
    left: int | None
    right: int | None
    scale: float
    softcap: float | None
    physical: str
    dropout_rate: float = 0.0
    first_head: int = 0
    """The first key head of this launch."""

    def at(self, batch: Any, head: Any, rows: Any) -> tuple[Any, ...]:
        """Where rows of one head lie in an operand."""
        return (batch, head, rows) if self.physical == "bhtd" else (batch, rows, head)

    @property
    def upscale(self) -> float:
        """What makes up for the probabilities that dropout drops."""
        return 1 / (1 - self.dropout_rate)

    @property
    def block_q(self) -> int:
        return self.config.block_q

    def zeros(self, head_dim: int, done: Any, count: int) -> list[Any]:
        """What is added to the places of operands that stay: see `hidden_zero`, one a product.

        Where position masks, the program has a loop with a mask and one without, and so twice as much is made before
        them. On an H200 that made the causal backward 1.04 to 1.08 times as fast at head_dim 128 and 1.16 times at
        256; without a mask it cost 7 %, at 64 2 %. Programs with too many visits for it (a million queries of 64 heads
        that share their keys) go without.
        """
        spilled = head_dim > 64 and (self.left is not None or self.right is not None)
        if not spilled or self.group * self.count > HIDDEN_STEPS:
            return [0] * count
        return [hidden_zero(done, stage) for stage in range(count)]

    @property
    def count(self) -> int:
        return math.ceil(self.length / self.block_q)

    def first_key(self, program: Any) -> Any:
        """Programs with the most queries go first: with no right edge but a left one, those are the last keys."""
        if self.right is None and self.left is not None:
            program = math.ceil(self.keys / self.tile) - 1 - program
        return program * self.tile

    def live(self, first_key: Any) -> tuple[Any, Any]:
        """The steps that see any of the program's keys. Bounds are values: newer Mosaic refuses literals."""
        zero = first_key * 0
        begin, end = zero, zero + self.count
        if self.right is not None:
            begin = lax.clamp(zero, first_key - self.offset - self.right, zero + self.length) // self.block_q
        if self.left is not None:
            last = lax.clamp(zero, first_key + self.tile - self.offset + self.left, zero + self.length)
            end = lax.div(last + self.block_q - 1, self.block_q)
        return begin, lax.max(begin, end)

    def whole(self, first_key: Any, rows: int, begin: Any, end: Any) -> tuple[Any, Any]:
        """The steps among begin to end whose queries all see all of `rows` keys: they need no mask."""
        zero = first_key * 0
        most = zero + self.count * self.block_q
        full_begin, full_end = begin, end
        if self.right is not None:
            edge = lax.clamp(zero, first_key + rows - 1 - self.offset - self.right, most)
            full_begin = lax.clamp(begin, lax.div(edge + self.block_q - 1, self.block_q), end)
        if self.left is not None:
            edge = lax.clamp(zero, first_key - self.offset + self.left + 1, most)
            full_end = lax.clamp(full_begin, lax.div(edge, self.block_q), end)
        if self.keys % self.tile:  # keys past the end are masked in every step
            full_end = jnp.where(first_key + rows > self.keys, full_begin, full_end)
        return full_begin, full_end

    def visit(self, begin: Any, whole: tuple[Any, Any], end: Any, body: Callable[[Any, bool], None]) -> None:
        """body(step, masked) for every step, in order."""

        def loop(first: Any, last: Any, masked: bool) -> None:
            @pl.loop(first, last)
            def _(step: Any) -> None:
                body(step, masked)

        if self.right is not None:
            loop(begin, whole[0], True)
        loop(*whole, False)
        if self.left is not None or self.keys % self.tile:
            loop(whole[1], end, True)

    def first_row(self, step: Any, first_key: Any) -> Any:
        """Where a step's queries start. When every program sees every query each starts elsewhere, so that their
        sums into dq do not meet in the same rows."""
        if self.left is None and self.right is None:
            step = lax.rem(step + lax.div(first_key, self.block_q), self.count)
        return step * self.block_q

    def visible(self, first_key: Any, first_row: Any, shape: tuple[int, int]) -> Any:
        """Which pairs of a tile, keys by queries, see each other."""
        key = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=LAYOUT) + first_key
        row = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=LAYOUT) + (first_row + self.offset)
        seen = key < self.keys
        if self.right is not None:
            seen = seen & (key <= row + self.right)
        if self.left is not None:
            seen = seen & (key >= row - self.left)
        return seen

    def probabilities(self, s: Any, logs: Any) -> tuple[Any, Any]:
        """From products of keys and queries: the probabilities, and the soft cap's slope where there is one."""
        slope, unit = None, self.scale * LOG2E
        if self.softcap is not None:
            # tanh from an exponential, which the hardware has.
            s = 1.0 - 2.0 / (1.0 + jnp.exp2(s * (2 * self.scale * LOG2E / self.softcap)))
            slope, unit = 1.0 - s * s, self.softcap * LOG2E
        return jnp.exp2(s * unit - lax.broadcast_in_dim(logs, s.shape, [1])), slope
