"""Norm for Hopper, in Pallas (Mosaic GPU): rows stream through shared memory, each number read and written once.

Several programs of one warpgroup share a multiprocessor, and each takes every so many rows. A program fetches rows by
the copy engine into a ring that runs ahead of it, so that tens of kilobytes are on their way at any time; it reads a
row from shared memory once for each of its sums and once for its result, and stores the result from registers. All
128 threads hold neighbouring pieces of 16 bytes where the width allows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.layers.norm.pallas_gpu_ring import (
    COMPILER_PARAMS,
    Cut,
    RingConfig,
    cut_row,
    programs_of_a_group,
    refuses_shape,
    ring,
    ring_candidates,
    row_bytes,
    vector_pieces,
)
from capibara.kernels.ops.layers.norm.reference import outputs, shrink_of
from capibara.kernels.ops.layers.norm.rules import sizes, sizes_of
from capibara.kernels.pallas.hopper import load


def candidates(call: Call) -> Sequence[RingConfig]:
    columns = sizes_of(call).columns
    # A short row is soon done and its sums wait for each other, so more programs take turns.
    first = 8 if columns <= 4096 else 3 if columns <= 16384 else 1
    fetched = row_bytes(call, ("x", "residual"))
    return ring_candidates(call, fetched, (first, max(1, first - 1), first + 2, 2 * first, 2, 1))


def _rank(call: Call) -> float:
    """On an H200 1.2 to 2 times xla's speed with the statistics of a backward pass, from 1024 to 32768 columns. Without
    them xla fuses all into one kernel, and is ahead by 4 to 7 % for short rows, and for RMS norm by 10 to 17 % up to
    8192 columns, more where rows are few; at 16384 columns it is behind by 7 %."""
    columns = sizes_of(call).columns
    fused = columns <= (8192 if call.params["kind"] == "rms" else 1024)
    return 5 if fused and not call.params["return_stats"] and call["residual"] is None else 20


def _program(
    *refs: Any, cut: Cut, config: RingConfig, rows: int, stride: int, kind: str, eps: float, offset: float,
    has: tuple[bool, bool, bool], summed: bool, stats: int,
) -> None:  # fmt: skip
    x_hbm, *rest = refs
    scale_hbm, bias_hbm, residual_hbm = (rest.pop(0) if given else None for given in has)
    y_hbm = rest.pop(0)
    sum_hbm = rest.pop(0) if summed else None
    stat_hbm = rest[:stats]
    sources = [x_hbm] if residual_hbm is None else [x_hbm, residual_hbm]
    shrink = shrink_of(eps)

    @functools.partial(
        pl.run_scoped,
        buffers=[plgpu.SMEM((config.stages, cut.lines, cut.width), s.dtype) for s in sources],
        arrived=plgpu.Barrier(num_arrivals=len(sources), num_barriers=config.stages),
    )
    def _scoped(buffers: Any, arrived: Any) -> None:
        group, program = lax.axis_index("group"), lax.axis_index("program")
        first = group * rows + program
        count = lax.div(rows - program + (stride - 1), stride)
        wait, release = ring(sources, buffers, arrived, first, stride, count)

        scale, bias = (None if ref is None else vector_pieces(ref, group, cut) for ref in (scale_hbm, bias_hbm))

        def step(turn: Any, carry: None) -> None:
            row = first + turn * stride
            slot = wait(turn)

            def total(number: int) -> Any:
                """x + residual, as it is rounded."""
                value = load(buffers[0].at[slot, cut.at(number)], cut.layout)
                if residual_hbm is None:
                    return value
                other = load(buffers[1].at[slot, cut.at(number)], cut.layout)
                return (value.astype(jnp.float32) + other.astype(jnp.float32)).astype(x_hbm.dtype)

            def values(number: int) -> Any:
                return total(number).astype(jnp.float32)

            def mean_of(term: Any) -> Any:
                added = term(0)
                for number in range(1, cut.pieces):
                    added = added + term(number)
                return jnp.sum(added) * (1 / cut.columns)

            mean = mean_of(values) if kind == "layer" else None

            def centred(number: int) -> Any:
                value = values(number)
                return value if mean is None else value - mean

            def square(number: int) -> Any:
                value = centred(number) * shrink
                return value * value

            rstd = lax.rsqrt(mean_of(square) + eps * shrink**2) * shrink
            for number in range(cut.pieces):
                if sum_hbm is not None:
                    sum_hbm.at[row, cut.at(number)][...] = total(number)
                y = centred(number) * rstd
                if scale is not None:
                    y = y * (scale(number) + offset)
                if bias is not None:
                    y = y + bias(number)
                y_hbm.at[row, cut.at(number)][...] = y.astype(y_hbm.dtype)
            for ref, statistic in zip(stat_hbm, [s for s in (mean, rstd) if s is not None], strict=False):
                ref[row] = statistic
            release(turn)
            return carry

        lax.fori_loop(0, count, step, None)


def mosaic_gpu(
    x: jax.Array, scale: jax.Array | None = None, bias: jax.Array | None = None, residual: jax.Array | None = None,
    *, config: RingConfig, kind: str, eps: float, offset: float, return_residual: bool, return_stats: bool,
) -> Any:  # fmt: skip
    """The forward pass as one kernel over (groups, programs); see the module's text."""
    n = sizes(x, scale, bias)
    cut = cut_row(n.columns, x.dtype.itemsize)
    assert cut is not None  # refuses_shape has seen to it
    shape = (n.groups * n.rows, cut.lines, cut.width)
    operands = [x.reshape(shape)]
    operands += [v.reshape(n.groups, cut.lines, cut.width) for v in (scale, bias) if v is not None]
    if residual is not None:
        operands.append(residual.reshape(shape))
    stats = (2 if kind == "layer" else 1) if return_stats else 0
    stride = programs_of_a_group(config, n.groups, n.rows)
    y, *rest = plgpu.kernel(
        functools.partial(
            _program, cut=cut, config=config, rows=n.rows, stride=stride, kind=kind, eps=eps, offset=offset,
            has=(scale is not None, bias is not None, residual is not None), summed=return_residual, stats=stats,
        ),
        out_type=[out_struct(shape, x.dtype, x)] * (2 if return_residual else 1)
        + [out_struct(shape[:1], jnp.float32, x)] * stats,
        grid=(n.groups, stride),
        grid_names=("group", "program"),
        compiler_params=COMPILER_PARAMS,
    )(*operands)  # fmt: skip
    total = rest.pop(0).reshape(x.shape) if return_residual else None
    numbers = [v.reshape(x.shape[:-1]) for v in rest]
    mean, rstd = numbers if len(numbers) == 2 else (None, *numbers) if numbers else (None, None)
    return outputs(y.reshape(x.shape), total, mean, rstd, kind, return_residual, return_stats)


IMPLEMENTATION = Implementation(
    "hopper",
    mosaic_gpu,
    platforms=("gpu",),
    refuses=refuses_shape,
    rank=_rank,
    kernel=True,
    config_type=RingConfig,
    default_config=lambda call: candidates(call)[0],
    candidates=candidates,
)
