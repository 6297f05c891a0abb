"""The backward pass of norm for Hopper, in Pallas (Mosaic GPU): one pass over x and the cotangent.

As the forward kernel, with a ring that fetches a row of each. A program adds what its rows give to dscale and dbias in
registers, all the way from its first row to its last, and writes those sums once; XLA adds the programs' sums up.
Columns that two pieces have get the same sums from both, and are written twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.layers.norm.hopper.forward import (
    COMPILER_PARAMS,
    FEWEST_COLUMNS,
    REGISTER_COLUMNS,
    THREADS,
    Cut,
    RingConfig,
    cut_row,
    programs_of_a_group,
    refuses_shape,
    ring,
    ring_candidates,
    ring_scratch,
    vector_pieces,
)
from capibara.kernels.ops.layers.norm.rules import sizes, sizes_of
from capibara.kernels.pallas.hopper import load, named

REGISTERS = 255  # of a thread
SUM_REGISTERS = 128  # of those, for the sums of dscale and dbias
OTHER_REGISTERS = 24  # addresses, counters, a row's statistics; predicted, not read from a compiled kernel


def candidates(call: Call) -> Sequence[RingConfig]:
    columns = sizes_of(call).columns
    # Each program writes its sums once, so few of them, with long rings.
    first = 6 if columns <= 1024 else 4 if columns <= 2048 else 2 if columns <= 8192 else 1
    return ring_candidates(call, ("x", "d_out", "d_sum"), (first, first + 1, 2 * first, max(1, first // 2), 1))


def refuses(call: Call) -> str | None:
    reason = refuses_shape(call)
    if reason is not None:
        return reason
    sums = [name for name in ("scale", "bias") if call[name] is not None]
    columns = sizes_of(call).columns
    most = SUM_REGISTERS * THREADS // max(len(sums), 1)
    if sums and columns > most:
        return f"it keeps the sums for {' and '.join(sums)} in registers, of up to {most} columns; not {columns}"
    return None


def waiting(call: Call) -> float:
    """How much longer a row takes for want of registers; 1 where there are enough. Predicted.

    A row is looked at twice, once for the two sums along it and once for dx. A look keeps the memory busy when a piece
    of each operand can be on its way in registers, beside what stays in them: the sums over rows, a scale that is kept,
    and, in the first look, the sums along the row. With fewer it waits for the rest. Inferred from what was measured on
    an H200, not seen in a compiled kernel: layer norm has twice RMS norm's sums and partial sums, which costs it 2 % at
    4096 columns, where registers are left over, and 26 % at 8192, where they are not.
    """
    x = call.need("x")
    cut = cut_row(x.shape[-1], x.dtype.itemsize)
    assert cut is not None  # refuses has seen to it
    each = cut.pieces * cut.depth * cut.width / THREADS
    piece = each / cut.pieces
    sums = each * sum(call[name] is not None for name in ("scale", "bias"))
    scale = call["scale"]
    kept = each * scale.dtype.itemsize / 4 if scale is not None and cut.columns <= REGISTER_COLUMNS else 0.0
    free = REGISTERS - OTHER_REGISTERS - sums - kept
    along = piece * (2 if call.params["kind"] == "layer" else 1)
    first = 2 * piece / max(free - along, 1.0)
    second = (2 if call["d_sum"] is None else 3) * piece / max(free, 1.0)
    return (max(first, 1.0) + max(second, 1.0)) / 2


def _program(
    *refs: Any, cut: Cut, config: RingConfig, rows: int, stride: int, kind: str, offset: float, has_scale: bool,
    has_sum: bool, sums: tuple[bool, bool],
) -> None:  # fmt: skip
    x_hbm, *rest = refs
    scale_hbm = rest.pop(0) if has_scale else None
    mean_hbm = rest.pop(0) if kind == "layer" else None
    rstd_hbm, flow_hbm = rest.pop(0), rest.pop(0)
    sources = [x_hbm, flow_hbm, *([rest.pop(0)] if has_sum else [])]
    dx_hbm, *sum_hbm = rest
    pieces = range(cut.pieces)
    scratch = ring_scratch(sources, cut, config.stages)

    def _scoped(buffers: Any, arrived: Any) -> None:
        group, program = lax.axis_index("group"), lax.axis_index("program")
        first = group * rows + program
        count = lax.div(rows - program + (stride - 1), stride)
        wait, release = ring(sources, buffers, arrived, first, stride, count)

        scale = None if scale_hbm is None else vector_pieces(scale_hbm, group, cut)

        def row_of(turn: Any) -> Any:
            return first + turn * stride

        def statistics(turn: Any) -> tuple[Any, ...]:
            row = row_of(turn)
            return (rstd_hbm[row],) if mean_hbm is None else (rstd_hbm[row], mean_hbm[row])

        def nothing() -> Any:
            return plgpu.layout_cast(jnp.zeros((cut.depth, cut.width), jnp.float32), cut.layout)

        def step(turn: Any, carry: Any) -> Any:
            (rstd, *mean), added = carry
            # The next row's numbers are on their way while this one is computed.
            following = statistics(lax.min(turn + 1, count - 1))
            slot = wait(turn)

            def value(source: int, number: int) -> Any:
                return load(buffers[source].at[slot, cut.at(number)], cut.layout).astype(jnp.float32)

            def normal(number: int) -> Any:
                read = value(0, number)
                return (read - mean[0]) * rstd if mean else read * rstd

            def weighted(flow: Any, number: int) -> Any:
                return flow if scale is None else flow * (scale(number) + offset)

            # One piece after another, so that few numbers are alive where the threads meet for the sums.
            along = across = nothing()
            for number in pieces:
                term = cut.once(number, weighted(value(1, number), number))
                along, across = along + term * normal(number), across + term
            along = jnp.sum(along) * (1 / cut.columns)
            across = jnp.sum(across) * (1 / cut.columns) if mean else None

            totals = []
            for number in pieces:
                flow, unit = value(1, number), normal(number)
                dx = weighted(flow, number) - unit * along
                if across is not None:
                    dx = dx - across
                dx = dx * rstd
                if has_sum:
                    dx = dx + value(2, number)
                dx_hbm.at[row_of(turn), cut.at(number)][...] = dx.astype(dx_hbm.dtype)
                before = added[number]
                summands = [term for term, wanted in zip((flow * unit, flow), sums, strict=True) if wanted]
                totals.append(tuple(b + s for b, s in zip(before, summands, strict=True)))
            release(turn)
            return following, tuple(totals)

        start = tuple(tuple(nothing() for _ in sum_hbm) for _ in pieces)
        _, added = lax.fori_loop(0, count, step, (statistics(jnp.int32(0)), start))
        for number in pieces:
            for ref, total in zip(sum_hbm, added[number], strict=True):
                ref.at[group, program, cut.at(number)][...] = total

    pl.run_scoped(_scoped, **scratch)


def norm_backward(
    x: jax.Array, scale: jax.Array | None, bias: jax.Array | None, mean: jax.Array | None, rstd: jax.Array,
    d_out: jax.Array, d_sum: jax.Array | None = None, *, config: RingConfig, kind: str, eps: float, offset: float,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """(dx, dscale, dbias) as one kernel over (groups, programs) and a sum over programs; see the module's text."""
    n = sizes(x, scale, bias)
    cut = cut_row(n.columns, x.dtype.itemsize)
    assert cut is not None  # refuses has seen to it
    shape = (n.groups * n.rows, cut.lines, cut.width)
    operands = [x.reshape(shape)]
    if scale is not None:
        operands.append(scale.reshape(n.groups, cut.lines, cut.width))
    operands += [v.astype(jnp.float32).reshape(-1) for v in (mean, rstd) if v is not None]
    operands += [v.reshape(shape) for v in (d_out, d_sum) if v is not None]
    sums = (scale is not None, bias is not None)
    stride = programs_of_a_group(config, n.groups, n.rows)
    partial_sums = out_struct((n.groups, stride, cut.lines, cut.width), jnp.float32, x)
    dx, *rest = plgpu.kernel(
        named("norm_backward", _program, cut=cut, config=config, rows=n.rows, stride=stride, kind=kind, offset=offset,
            has_scale=scale is not None, has_sum=d_sum is not None, sums=sums,
        ),
        out_type=[out_struct(shape, x.dtype, x)] + [partial_sums] * sum(sums),
        grid=(n.groups, stride),
        grid_names=("group", "program"),
        compiler_params=COMPILER_PARAMS,
    )(*operands)  # fmt: skip
    dscale, dbias = (
        None if like is None else rest.pop(0).sum(1).reshape(like.shape).astype(like.dtype) for like in (scale, bias)
    )
    return dx.reshape(x.shape), dscale, dbias


def _ahead_of(call: Call) -> tuple[str, ...]:
    """What its model of times does not know. On an H200, alone, 1.4 to 4.2 times xla's speed from 768 to 8192 columns
    and about 2,000 rows on, 0.95 to 2.0 of a few hundred rows, and 0.8 at 128 columns; at 16384 both passes 0.95."""
    return ("xla",) if FEWEST_COLUMNS <= sizes_of(call).columns <= 8192 else ()


GRAD_IMPLEMENTATION = Implementation(
    "hopper",
    norm_backward,
    platforms=("gpu",),
    refuses=refuses,
    ahead_of=_ahead_of,
    kernel=True,
    config_type=RingConfig,
    candidates=candidates,
)
