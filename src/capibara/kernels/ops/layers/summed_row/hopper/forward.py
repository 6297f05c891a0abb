"""summed_row for Hopper, in Pallas (Mosaic GPU): few_rows, whose one row every program adds up for itself.

A kernel that only adds up a product's parts waits for the memory's answer and does little else, and the next product's
weights are not on their way yet. Here they are: the fetching warpgroup begins with them at once, while the other reads
all parts, tens of kilobytes from the second-level cache, and makes the row of them. Of one row that takes no longer
than the first pieces of the weight do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.trusting import trusted
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.layers.few_rows.hopper.forward import (
    ATOM,
    COMPILER_PARAMS,
    THREADS,
    Summed,
    WeightStreamConfig,
    check_cut,
    stream,
    stream_configs,
)
from capibara.kernels.ops.layers.few_rows.hopper.forward import parts_that_fill as fewest_parts
from capibara.kernels.ops.layers.few_rows.rules import is_quantized
from capibara.kernels.ops.layers.summed_row.rules import sizes
from capibara.kernels.pallas.hopper import multiprocessors, named, refuses_chip
from capibara.kernels.pallas.overlap import overlaps

MOST_COLUMNS = 8192  # 64 numbers a thread, of each part
MOST_PARTS = 8
WIDE_ROW, WIDE_ROW_OF_INT8 = 2048, 4096  # the widest that were seen to be faster
DEEP = 4  # stages of a ring that keeps the memory busy, where there is one: the row takes a part of shared memory


def candidates(call: Call) -> Sequence[WeightStreamConfig]:
    n, gated = sizes(call), call.params["gate"] is not None
    out_parts: Any = call.params["out_parts"]
    cores, dtype = multiprocessors(call.target.device_kind), call.need("weight").dtype
    configs = stream_configs(n, dtype, cores, gated=gated, out_parts=out_parts, summed=n.inner)
    configs = [config for config in configs if config.splits == (out_parts or 1)]
    return [config for config in configs if config.stages >= DEEP] or configs


def parts_that_fill(call: Call) -> int | None:
    """Of the product: twice as many as leave few multiprocessors idle, where they divide the inputs.

    Two programs share a multiprocessor, and one adds up while the other's weight comes: 0.4 us of 46 in a layer.
    """
    n, cores = sizes(call), multiprocessors(call.target.device_kind)
    fewest = fewest_parts(n, call.need("weight").dtype, cores)
    if fewest is None:
        return None
    return 2 * fewest if not n.inner % (2 * fewest * 2 * ATOM) else fewest


def refuses(call: Call) -> str | None:
    n, dtype = sizes(call), np.dtype(call.need("residual").dtype).name
    chip = refuses_chip(call.target.device_kind)
    if chip is not None:
        return chip
    if dtype not in ("bfloat16", "float16"):
        return f"its tensor-core form takes bfloat16 or float16, not {dtype}"
    if n.rows != 1:
        return f"it takes one row, not {n.rows}: every program adds up all of them"
    if call.need("parts").shape[0] > MOST_PARTS:
        return f"it takes up to {MOST_PARTS} parts, not {call.need('parts').shape[0]}"
    if n.outputs % ATOM or n.outputs < 2 * ATOM or n.inner % THREADS or n.inner > MOST_COLUMNS:
        return (
            f"the weight is {n.outputs} outputs by {n.inner}; it takes a multiple of {ATOM} from {2 * ATOM} by a "
            f"multiple of {THREADS} up to {MOST_COLUMNS}"
        )
    return None if candidates(call) else "no piece of the weight beside the row fits shared memory"


def summed_row_hopper(
    parts: jax.Array, residual: jax.Array, scale: jax.Array, weight: jax.Array, weight_scale: jax.Array | None = None,
    *, config: WeightStreamConfig, gate: str | None, eps: float, out_parts: int | None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """One kernel over (outputs, parts of the inner axis)."""
    check_cut(config, weight, weight_scale, gate, out_parts or 1)
    inner, outputs = weight.shape[1], weight.shape[0] // (1 if gate is None else 2)
    dtype = residual.dtype if out_parts is None else jnp.float32
    kernel = plgpu.kernel(
        named("summed_row", _program, config=config, gate=gate, eps=eps, early=overlaps()),
        out_type=[
            out_struct((config.splits, 1, outputs), dtype, residual),
            out_struct((inner // ATOM, ATOM), residual.dtype, residual),
        ],
        grid=(outputs // config.outputs, config.splits),
        grid_names=("tile", "split"),
        num_threads=config.sharers + 1,
        thread_name="warpgroup",
        compiler_params=COMPILER_PARAMS,
    )
    # As the tiles that a row is cut into: the same bytes.
    cut = (x.reshape(-1, ATOM) for x in (residual, scale))
    operands = parts.reshape(parts.shape[0], -1, ATOM), *cut, weight
    made, total = kernel(*operands) if weight_scale is None else kernel(*operands, weight_scale)
    return total.reshape(residual.shape), made[0] if out_parts is None else made


def _program(
    parts_hbm: Any, residual_hbm: Any, scale_hbm: Any, weight_hbm: Any, *others: Any, config: WeightStreamConfig,
    gate: str | None, eps: float, early: bool,
) -> None:  # fmt: skip
    *weight_scale, out_hbm, total_hbm = others
    summed = Summed(parts_hbm, residual_hbm, scale_hbm, total_hbm, eps)
    stream(None, weight_hbm, weight_scale, out_hbm, config=config, gate=gate, early=early, summed=summed)


def ahead_of(call: Call) -> tuple[str, ...]:
    """On an H200 a layer of a 1.1B model at one row took 45.9 to 46.1 us with it and 48.9 to 49.3 with few_rows and a
    kernel that joins its parts, of 8-bit weights 39.4 to 40.0 and 44.3. Of an 8B model 125.3 and 123.8, of 8 bits 89.1
    and 91.2: a wide row takes the room of the 16-bit weight's ring, and there it does not go ahead. Wider rows of 8-bit
    weights were not timed."""
    wide = sizes(call).inner > (WIDE_ROW_OF_INT8 if is_quantized(call) else WIDE_ROW)
    return () if wide and trusted() != "predicted" else ("xla",)


IMPLEMENTATION = Implementation(
    "hopper",
    summed_row_hopper,
    platforms=("gpu",),
    refuses=refuses,
    ahead_of=ahead_of,
    kernel=True,
    config_type=WeightStreamConfig,
    candidates=candidates,
)
