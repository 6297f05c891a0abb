"""Attention forward for Hopper's tensor cores, in Pallas (Mosaic GPU).

A program computes 128 rows of queries of one head: one warpgroup streams blocks of keys and values by TMA, two
compute 64 rows each with the online softmax, and a barrier makes them take turns on the tensor cores, so that
one's softmax runs under the other's products. Blocks that no query of the program can see are never fetched, and
only blocks that some query sees in part are masked. Causal programs with the most work start first.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.errors import rule_error
from capibara.kernels.op import Call, Implementation
from capibara.kernels.transforms import out_struct

LOG2E = math.log2(math.e)
SMEM_BYTES = 227 * 1024
FETCH_REGISTERS, COMPUTE_REGISTERS = 40, 232
# What a row's maximum starts from: low enough for any score, and finite, so that a row that has seen no key yet
# subtracts it without making a NaN.
LOWEST = -1e30


@dataclasses.dataclass(frozen=True)
class HopperConfig:
    """Rows of queries a warpgroup, keys a block, and how many blocks are fetched ahead."""

    block_q: int = 64
    block_k: int = 128
    stages: int = 2
    take_turns: bool = True

    def __post_init__(self) -> None:
        if self.block_q not in (64, 128):
            raise rule_error("block_q is 64 or 128", self.block_q, "use 64")
        if self.block_k % 64 or not 64 <= self.block_k <= 256:
            raise rule_error("block_k is a multiple of 64 up to 256", self.block_k, "use 128")
        if self.stages < 2:
            raise rule_error("stages is two or more", self.stages, "use 2")

    def smem_bytes(self, head_dim: int) -> int:
        blocks = 2 * self.block_q + 2 * self.stages * self.block_k
        return 2 * blocks * head_dim + 2 * self.block_q * 4 + 1024


def candidates(call: Call) -> Sequence[HopperConfig]:
    """Block sizes whose tiles fit shared memory, and whose scores and outputs fit the registers."""
    head_dim = call.need("q").shape[-1]
    made = [
        HopperConfig(block_q, block_k, stages, turns)
        for block_q, block_k in ((64, 128), (64, 64), (64, 192), (64, 256), (128, 64), (128, 128))
        for stages in (2, 3, 4)
        for turns in (True, False)
    ]
    registers = lambda c: (c.block_q * (head_dim + c.block_k) + c.block_q * c.block_k // 2) // 128  # noqa: E731
    return [c for c in made if c.smem_bytes(head_dim) <= SMEM_BYTES and registers(c) <= 200]


def default_config(call: Call) -> HopperConfig:
    head_dim = call.need("q").shape[-1]
    return HopperConfig(64, 64 if head_dim > 128 else 128, 4 if head_dim <= 64 else 2)


def refuses(call: Call) -> str | None:
    q, k = call.need("q"), call.need("k")
    if not call.target.device_kind.startswith(("NVIDIA H100", "NVIDIA H200", "NVIDIA GH200", "NVIDIA H800")):
        return f"it is written for Hopper (wgmma); this is {call.target.device_kind}"
    if np.dtype(q.dtype).name not in ("bfloat16", "float16") or q.dtype != k.dtype or q.dtype != call.need("v").dtype:
        return f"its tensor-core form takes bfloat16 or float16 alike for q, k and v, not {q.dtype} and {k.dtype}"
    given = [n for n in ("bias", "mask", "q_segments", "block_mask") if call[n] is not None]
    if given:
        return f"it has no form with {', '.join(given)} yet"
    if call.params["dropout_rate"]:
        return "it has no form with dropout yet"
    if q.shape[-1] not in (64, 128, 256):
        return f"head_dim is 64, 128 or 256 here, not {q.shape[-1]}"
    for name, length in (("queries", q.shape[2]), ("keys", k.shape[2])):
        if length % 8 or length < 128:
            return f"it takes 128 {name} or more in multiples of 8, not {length}"
    return None


def mosaic_gpu(
    q: jax.Array, k: jax.Array, v: jax.Array, bias: None = None, mask: None = None, q_segments: None = None,
    kv_segments: None = None, block_mask: None = None, dropout_seed: None = None, *, config: HopperConfig,
    causal: bool = False, q_offset: int = 0, window: tuple[int | None, int | None] | None = None,
    scale: float | None = None, softcap: float | None = None, dropout_rate: float = 0.0,
    block_size: tuple[int, int] | None = None, return_lse: bool = False,
) -> Any:  # fmt: skip
    """One kernel over (heads, query tiles, batch); see the module's text."""
    batch, heads, length, head_dim = q.shape
    tile = 2 * config.block_q
    left, right = window or (None, None)
    if causal:
        right = 0 if right is None else min(right, 0)
    body = functools.partial(
        _program,
        config=config,
        keys=k.shape[2],
        group=heads // k.shape[1],
        offset=q_offset,
        left=left,
        right=right,
        scale=(1 / math.sqrt(head_dim) if scale is None else scale),
        softcap=softcap,
        tiles=math.ceil(length / tile),
    )
    out = out_struct(q.shape, q.dtype, q)
    # One number a row is stored without a TMA descriptor, so nothing drops what lies past the last row: the array is
    # made long enough for whole tiles and cut afterwards.
    lse = out_struct((batch, heads, tile * math.ceil(length / tile)), jnp.float32, q) if return_lse else None
    kernel = plgpu.kernel(
        body,
        out_type=[out, lse] if return_lse else [out],
        grid=(heads, math.ceil(length / tile), batch),
        grid_names=("head", "tile", "batch"),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    made = kernel(q, k, v)
    return (made[0], made[1][:, :, :length]) if return_lse else made[0]


def _swizzled() -> tuple[Any, ...]:
    return plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)


def _program(
    q_hbm: Any, k_hbm: Any, v_hbm: Any, out_hbm: Any, lse_hbm: Any = None, *, config: HopperConfig, keys: int,
    group: int, offset: int, left: int | None, right: int | None, scale: float, softcap: float | None, tiles: int,
) -> None:  # fmt: skip
    block_q, block_k, stages = config.block_q, config.block_k, config.stages
    head_dim, dtype = q_hbm.shape[-1], q_hbm.dtype

    @functools.partial(
        pl.run_scoped,
        q_smem=plgpu.SMEM((2, block_q, head_dim), dtype, transforms=_swizzled()),  # the output leaves from it too
        k_smem=plgpu.SMEM((stages, block_k, head_dim), dtype, transforms=_swizzled()),
        v_smem=plgpu.SMEM((stages, block_k, head_dim), dtype, transforms=_swizzled()),
        lse_smem=plgpu.SMEM((2, block_q), jnp.float32) if lse_hbm is not None else None,
        q_arrived=plgpu.Barrier(num_barriers=2),
        k_arrived=plgpu.Barrier(num_barriers=stages),
        v_arrived=plgpu.Barrier(num_barriers=stages),
        k_drained=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        v_drained=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        turn=plgpu.Barrier(num_arrivals=2),
        collective_axes="warpgroup",
    )
    def _scoped(
        q_smem: Any, k_smem: Any, v_smem: Any, lse_smem: Any, q_arrived: Any, k_arrived: Any, v_arrived: Any,
        k_drained: Any, v_drained: Any, turn: Any,
    ) -> None:  # fmt: skip
        batch, head = lax.axis_index("batch"), lax.axis_index("head")
        tile = lax.axis_index("tile")
        if right is not None:  # later rows see more keys: the longest programs go first
            tile = tiles - 1 - tile
        warpgroup = lax.axis_index("warpgroup")
        first_row = tile * (2 * block_q)
        # Blocks of keys that some row of the program sees. Bounds are values of the kernel even where they are
        # constants: newer Mosaic refuses loops over literals.
        zero = tile * 0
        begin = zero if left is None else lax.max(first_row + offset - left, 0) // block_k
        end_key = zero + keys if right is None else lax.min(first_row + 2 * block_q + offset + right, keys)
        end = lax.max(lax.div(end_key + block_k - 1, block_k), begin)

        @pl.when(warpgroup == 2)
        def _fetch() -> None:
            plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")
            kv_head = lax.div(head, jnp.asarray(group, head.dtype))

            @pl.loop(begin, end)
            def _block(block: Any) -> None:
                slot = lax.rem(block - begin, stages)
                at = (batch, kv_head, pl.ds(block * block_k, block_k))
                for source, smem, arrived, drained in (
                    (k_hbm, k_smem, k_arrived, k_drained),
                    (v_hbm, v_smem, v_arrived, v_drained),
                ):

                    @pl.when(block - begin >= stages)
                    def _(drained: Any = drained) -> None:
                        plgpu.barrier_wait(drained.at[slot])

                    plgpu.copy_gmem_to_smem(source.at[at], smem.at[slot], arrived.at[slot])

        @pl.when(warpgroup < 2)
        def _compute() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            start = first_row + warpgroup * block_q
            rows = pl.ds(start, block_q)
            plgpu.copy_gmem_to_smem(q_hbm.at[batch, head, rows], q_smem.at[warpgroup], q_arrived.at[warpgroup])
            plgpu.barrier_wait(q_arrived.at[warpgroup])

            def hand_over() -> None:
                """Let the other warpgroup at the tensor cores, and wait until it hands them back."""
                if config.take_turns:
                    plgpu.barrier_arrive(turn)
                    plgpu.barrier_wait(turn)

            def block_step(block: Any, carry: Any, masked: bool) -> Any:
                acc, highest, total = carry
                slot = lax.rem(block - begin, stages)

                def scores(ref: Any) -> Any:
                    plgpu.wgmma(ref, q_smem.at[warpgroup], plgpu.transpose_ref(k_smem.at[slot], (1, 0)))
                    hand_over()
                    return ref[...]

                s = pl.run_scoped(scores, plgpu.WGMMAAccumulatorRef((block_q, block_k), jnp.float32))
                plgpu.barrier_arrive(k_drained.at[slot])
                unit = scale * LOG2E
                if softcap is not None:
                    # tanh from an exponential, which the hardware has.
                    s = 1.0 - 2.0 / (1.0 + jnp.exp2(s * (2 * scale * LOG2E / softcap)))
                    unit = softcap * LOG2E
                if masked:
                    s = jnp.where(_visible(start, block), s, -jnp.inf)
                new_highest = jnp.maximum(highest, s.max(axis=1) * unit)
                shrink = jnp.exp2(highest - new_highest)
                p = jnp.exp2(s * unit - lax.broadcast_in_dim(new_highest, s.shape, [0]))
                acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0])
                total = total * shrink + p.sum(axis=1)
                p16 = p.astype(dtype)
                acc, total, new_highest, p16 = lax.optimization_barrier((acc, total, new_highest, p16))
                if config.take_turns:
                    plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(v_arrived.at[slot])
                if config.take_turns:
                    plgpu.barrier_wait(turn)

                def add_values(ref: Any) -> None:
                    plgpu.wgmma(ref, p16, v_smem.at[slot])

                    @pl.when(block + 1 < end)
                    def _() -> None:
                        plgpu.barrier_wait(k_arrived.at[lax.rem(block + 1 - begin, stages)])

                acc = pl.run_state(add_values)(plgpu.WGMMAAccumulatorRef.init(acc))
                plgpu.barrier_arrive(v_drained.at[slot])
                return acc, new_highest, total

            def _visible(start: Any, block: Any) -> Any:
                shape = (block_q, block_k)
                row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA) + (start + offset)
                column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA) + block * block_k
                seen = column < keys
                if right is not None:
                    seen = seen & (column <= row + right)
                if left is not None:
                    seen = seen & (column >= row - left)
                return seen

            # Blocks that every row of this warpgroup sees whole need no mask.
            full_end = zero + keys // block_k
            if right is not None:
                full_end = lax.min(full_end, lax.max(start + offset + right + 1, 0) // block_k)
            full_begin = begin
            if left is not None:
                last_row_edge = lax.max(start + block_q - 1 + offset - left, 0)
                full_begin = lax.div(last_row_edge + block_k - 1, block_k)
            full_begin = lax.clamp(begin, full_begin, end)
            full_end = lax.clamp(full_begin, full_end, end)

            layout = plgpu.Layout.WGMMA
            carry = (
                plgpu.layout_cast(jnp.full((block_q, head_dim), 0, jnp.float32), layout),
                plgpu.layout_cast(jnp.full((block_q,), LOWEST, jnp.float32), layout.reduce(1)),
                plgpu.layout_cast(jnp.full((block_q,), 0, jnp.float32), layout.reduce(1)),
            )

            @pl.when(begin < end)
            def _() -> None:
                plgpu.barrier_wait(k_arrived.at[0])

            pl.when(warpgroup == 1)(hand_over)
            partial_step = functools.partial(block_step, masked=True)
            if left is not None:
                carry = lax.fori_loop(begin, full_begin, partial_step, carry)
            carry = lax.fori_loop(full_begin, full_end, functools.partial(block_step, masked=False), carry)
            if right is not None or keys % block_k:
                carry = lax.fori_loop(full_end, end, partial_step, carry)
            pl.when(warpgroup == 0)(hand_over)

            acc, highest, total = carry
            seen = total > 0
            inverse = jnp.where(seen, 1.0 / jnp.where(seen, total, 1.0), 0.0)
            acc = acc * lax.broadcast_in_dim(inverse, acc.shape, [0])
            q_smem[warpgroup] = acc.astype(dtype)
            if lse_hbm is not None:
                logs = (highest + jnp.log2(jnp.where(seen, total, 1.0))) / LOG2E
                lse_smem[warpgroup] = jnp.where(seen, logs, -jnp.inf)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_smem.at[warpgroup], out_hbm.at[batch, head, rows])
            if lse_hbm is not None:
                plgpu.copy_smem_to_gmem(lse_smem.at[warpgroup], lse_hbm.at[batch, head, rows])
            plgpu.wait_smem_to_gmem(0)


IMPLEMENTATION = Implementation(
    "mosaic_gpu",
    mosaic_gpu,
    platforms=("gpu",),
    refuses=refuses,
    rank=lambda call: 15,
    kernel=True,
    config_type=HopperConfig,
    default_config=default_config,
    candidates=candidates,
)
