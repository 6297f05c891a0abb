"""Ring all-gather, reduce-scatter and all-reduce as TPU kernels: remote copies from one chip's HBM to the next."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Call, Implementation, describe
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.collective import pallas_tpu_rounds as rounds
from capibara.kernels.ops.collective import pallas_tpu_stream as stream
from capibara.kernels.ops.collective.axes import vary_over
from capibara.kernels.ops.collective.pallas_tpu_ring import (
    ANY,
    CANDIDATES,
    LANES,
    Ring,
    RingConfig,
    Way,
    block,
    interpret,
    matrix,
    parameters,
    refuses,
    sizes_of,
    sublanes,
    ways_of,
)
from capibara.kernels.ops.collective.reference import sum_type

Axes = tuple[str, ...]


def all_gather(x: Any, *, axis_name: Axes, devices: int, axis: int, tiled: bool, config: RingConfig) -> Any:
    """`reference.all_gather` by a kernel."""
    x = vary_over(x, axis_name)
    if not tiled:
        parts = gather_parts(x.reshape(matrix(x, 0)), axis_name, config)
        return jnp.moveaxis(parts.reshape(devices, *x.shape), 0, axis)
    first = jnp.moveaxis(x, axis, 0)
    parts = gather_parts(first.reshape(matrix(first, 0)), axis_name, config)
    return jnp.moveaxis(parts.reshape(devices * first.shape[0], *first.shape[1:]), 0, axis)


def reduce_scatter(x: Any, *, axis_name: Axes, devices: int, op: str, axis: int, config: RingConfig) -> Any:
    """`reference.reduce_scatter` of sums and means by a kernel."""
    first = jnp.moveaxis(vary_over(x, axis_name), axis, 0)
    rows, columns = matrix(first, 0)
    part = scatter_parts(first.reshape(devices, rows // devices, columns), axis_name, config)
    total = jnp.moveaxis(part.reshape(first.shape[0] // devices, *first.shape[1:]), 0, axis)
    return total if op == "sum" else (total.astype(sum_type(x.dtype)) / devices).astype(x.dtype)


def all_reduce(x: Any, *, axis_name: Axes, devices: int, op: str, config: RingConfig) -> Any:
    """`reference.all_reduce` of sums and means: a ring of partial sums, then one of the sums."""
    given: dict[str, Any] = {"axis_name": axis_name, "devices": devices, "axis": 0, "config": config}
    return all_gather(reduce_scatter(x, op=op, **given), tiled=True, **given)


def gather_parts(x: Any, names: Axes, config: RingConfig) -> Any:
    """[rows, columns] of every device as [devices, rows, columns]."""
    sizes = sizes_of(names)
    devices = math.prod(sizes)
    ways = ways_of(x.shape[0], config.directions)

    def kernel(x_ref: Any, out_ref: Any, local: Any, *semaphores: Any) -> None:
        ring = Ring(names, sizes)
        own = pltpu.make_async_copy(x_ref, out_ref.at[ring.index], local)
        own.start()
        ring.meet_neighbours()
        rounds.pass_parts(ring, ways, x_ref, out_ref, semaphores, lambda way, place, rows: None)
        own.wait()

    return pl.pallas_call(
        kernel,
        out_shape=out_struct((devices, *x.shape), x.dtype, x),
        in_specs=[ANY],
        out_specs=ANY,
        scratch_shapes=[pltpu.SemaphoreType.DMA, *rounds.parts_scratch(ways, devices)],
        compiler_params=parameters(names),
        interpret=interpret(),
        name="ring_all_gather",
    )(x)


def scatter_parts(x: Any, names: Axes, config: RingConfig) -> Any:
    """[devices, rows, columns] of every device, added up, as this device's [rows, columns]."""
    sizes = sizes_of(names)
    _, rows, columns = x.shape
    ways = ways_of(rows, config.directions)
    tile = (block(ways[0].rows, sublanes(x.dtype), config.block_rows), block(columns, LANES, config.block_columns))
    semaphores = rounds.sums_scratch(ways)

    def kernel(x_ref: Any, out_ref: Any, slot_ref: Any, *scratch: Any) -> None:
        ring = Ring(names, sizes)
        ring.meet_neighbours()
        tiles = scratch[len(semaphores) :]

        def mine(way: Way, place: Any) -> Any:
            return x_ref.at[place, pl.ds(way.start, way.rows)]

        def add(way: Way, place: Any, sums: Any, target: Any) -> None:
            _add(sums, mine(way, place), target, tile, tiles)

        rounds.pass_sums(ring, ways, slot_ref, scratch[: len(semaphores)], mine, add, out_ref)

    slots = (len(ways), rounds.SLOTS, ways[0].rows, columns)
    total, _ = pl.pallas_call(
        kernel,
        # The slots are a result that nobody reads: so they are in HBM.
        out_shape=(out_struct((rows, columns), x.dtype, x), out_struct(slots, x.dtype, x)),
        in_specs=[ANY],
        out_specs=(ANY, ANY),
        scratch_shapes=[
            *semaphores,
            *stream.read_scratch([(tile, x.dtype)] * 2),
            *stream.write_scratch(tile, x.dtype),
        ],
        compiler_params=parameters(names),
        interpret=interpret(),
        name="ring_reduce_scatter",
    )(x)
    return total


def _add(a: Any, b: Any, out: Any, tile: tuple[int, int], scratch: Sequence[Any]) -> None:
    """out = a + b, tile by tile through VMEM, added in float32; `out` may be `a`."""
    rows, columns = out.shape
    across = columns // tile[1]
    tiles = rows // tile[0] * across
    reading, writing = scratch[:3], scratch[3:]
    writer = stream.Writer(writing, lambda number: stream.tile_of(out, number, tile, across))

    def work(step: Any, both: list[Any]) -> None:
        first, second = (part[...].astype(jnp.float32) for part in both)
        writer.put(step, (first + second).astype(out.dtype))

    sources = [lambda number, ref=ref: stream.tile_of(ref, number, tile, across) for ref in (a, b)]
    stream.read(tiles, sources, reading, work)
    writer.finish(tiles)


def _gather_refuses(call: Call) -> str | None:
    x, axis = call.need("x"), call.params["axis"] if call.params["tiled"] else 0
    assert isinstance(axis, int)
    return refuses(call, *matrix(x, axis)) if x.shape else "it gathers rows; got a number"


def _sum_refuses(call: Call) -> str | None:
    axis, op, devices = call.params.get("axis", 0), call.params["op"], call.params["devices"]
    assert isinstance(axis, int)
    assert isinstance(devices, int)
    x = call.need("x")
    if op not in ("sum", "mean"):
        return f"it adds; this call asks for the {op}"
    if not x.shape or x.shape[axis] % devices:
        return f"it splits axis {axis} over the {devices} devices; got {describe(x)}"
    rows, columns = matrix(x, axis)
    return refuses(call, rows // devices, columns)


def add_to(all_reduce_op: Op, reduce_scatter_op: Op, all_gather_op: Op) -> None:
    """Make the kernels known to the ops."""
    for op, fn, why_not in (
        (all_reduce_op, all_reduce, _sum_refuses),
        (reduce_scatter_op, reduce_scatter, _sum_refuses),
        (all_gather_op, all_gather, _gather_refuses),
    ):
        add_kernel(op, fn, why_not, CANDIDATES)


def add_kernel(
    op: Op, fn: Callable[..., Any], refuses: Callable[[Call], str | None], candidates: Sequence[Any]
) -> None:
    """A kernel of the family, behind the op's other implementations until it is measured on a TPU.

    Its config is of the candidates' type, and by default as that type has it.
    """
    config = type(candidates[0])
    op.implement(
        Implementation(
            "pallas_tpu",
            fn,
            platforms=("tpu",),
            refuses=refuses,
            rank=lambda call: -2.0,
            kernel=True,
            config_type=config,
            default_config=lambda call: config(),
            candidates=lambda call: candidates,
        )
    )
