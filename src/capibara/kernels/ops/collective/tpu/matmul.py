"""Products overlapped with a ring, each as one TPU kernel: parts or sums travel while tiles are multiplied.

`all_gather_matmul` sends rows of x on before it multiplies them. `matmul_reduce_scatter` multiplies the rows that one
way's sums are for while the other way's sums travel; so it has two directions always.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from capibara.errors import rule_error
from capibara.kernels.core.spec import Call
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.collective.axes import vary_over
from capibara.kernels.ops.collective.tpu import stream
from capibara.kernels.ops.collective.tpu.ring import (
    ANY,
    LANES,
    SLOTS,
    Axes,
    Ring,
    Way,
    block,
    implementation,
    interpret,
    parameters,
    parts_scratch,
    pass_parts,
    pass_sums,
    refuses,
    sizes_of,
    sublanes,
    sums_scratch,
    ways_of,
)


@dataclasses.dataclass(frozen=True)
class RingMatmulConfig:
    """The tile of the product, and how much of the contraction is multiplied at a time."""

    block_rows: int = 256
    block_columns: int = 512
    block_k: int = 1024

    def __post_init__(self) -> None:
        if self.block_rows < 8 or min(self.block_columns, self.block_k) < LANES:
            raise rule_error(f"Tiles have 8 rows and {LANES} columns at the least", self, "use RingMatmulConfig()")


CANDIDATES = (RingMatmulConfig(), RingMatmulConfig(128, 1024, 512), RingMatmulConfig(128, 256, 2048))


class Product:
    """target = (sums +) rows @ w, tile by tile through VMEM, added in float32."""

    def __init__(self, shape: tuple[int, int, int], dtype: Any, config: RingMatmulConfig, with_sums: bool) -> None:
        rows, k, columns = shape
        self.tile = (block(rows, sublanes(dtype), config.block_rows), block(columns, LANES, config.block_columns))
        self.depth = block(k, LANES, config.block_k)
        self.tiles = (rows // self.tile[0], columns // self.tile[1])
        self.depths = k // self.depth
        self.dtype, self.with_sums = dtype, with_sums

    def scratch(self) -> list[Any]:
        read = [((self.tile[0], self.depth), self.dtype), ((self.depth, self.tile[1]), self.dtype)]
        if self.with_sums:
            read.append((self.tile, self.dtype))
        return [
            pltpu.VMEM(self.tile, jnp.float32),
            *stream.write_scratch(self.tile, self.dtype),
            *stream.read_scratch(read),
        ]

    def run(self, rows: Any, w: Any, target: Any, scratch: Sequence[Any], sums: Any = None) -> None:
        acc, *rest = scratch
        down, across = self.tiles
        depths = jnp.int32(self.depths)
        writer = stream.Writer(rest[:2], lambda number: stream.tile_of(target, number, self.tile, across))

        def at(step: Any) -> tuple[Any, Any, Any]:
            """(number of the tile of the result, its column of tiles, place in the contraction)."""
            number = lax.div(step, depths)
            return number, lax.rem(number, jnp.int32(across)), lax.rem(step, depths)

        def rows_at(step: Any) -> Any:
            number, _, k = at(step)
            place = lax.div(number, jnp.int32(across)) * self.depths + k
            return stream.tile_of(rows, place, (self.tile[0], self.depth), self.depths)

        def w_at(step: Any) -> Any:
            _, column, k = at(step)
            return stream.tile_of(w, k * across + column, (self.depth, self.tile[1]), across)

        def sums_at(step: Any) -> Any:
            return stream.tile_of(sums, at(step)[0], self.tile, across)

        def work(step: Any, tiles: list[Any]) -> None:
            number, _, k = at(step)
            product = jnp.dot(tiles[0][...], tiles[1][...], preferred_element_type=jnp.float32)

            @pl.when(k == 0)
            def begin() -> None:
                acc[...] = product if sums is None else product + tiles[2][...].astype(jnp.float32)

            @pl.when(k > 0)
            def go_on() -> None:
                acc[...] += product

            @pl.when(k == self.depths - 1)
            def end() -> None:
                writer.put(number, acc[...].astype(self.dtype))

        sources: list[Callable[[Any], Any]] = [rows_at, w_at]
        if self.with_sums:
            sources.append(sums_at)
        stream.read(down * across * self.depths, sources, rest[2:], work)
        writer.finish(down * across)


def all_gather_matmul(x: Any, w: Any, *, axis_name: Axes, devices: int, config: RingMatmulConfig) -> Any:
    """`reference.all_gather_matmul` by a kernel."""
    x, w = vary_over(x, axis_name), vary_over(w, axis_name)
    *batch, rows, k = x.shape
    out = gather_product(x.reshape(math.prod(batch) * rows, k), w, axis_name, config)
    # [devices, batch, rows, ...]: every device's rows of one batch after the other.
    out = jnp.moveaxis(out.reshape(devices, *batch, rows, w.shape[1]), 0, len(batch))
    return out.reshape(*batch, devices * rows, w.shape[1])


def matmul_reduce_scatter(x: Any, w: Any, *, axis_name: Axes, devices: int, config: RingMatmulConfig) -> Any:
    """`reference.matmul_reduce_scatter` by a kernel."""
    x, w = vary_over(x, axis_name), vary_over(w, axis_name)
    *batch, rows, k = x.shape
    parts = jnp.moveaxis(x.reshape(*batch, devices, rows // devices, k), len(batch), 0)
    out = scatter_product(parts.reshape(devices, math.prod(batch) * rows // devices, k), w, axis_name, config)
    return out.reshape(*batch, rows // devices, w.shape[1])


def gather_product(x: Any, w: Any, names: Axes, config: RingMatmulConfig) -> Any:
    """[rows, k] of every device, times this one's w, as [devices, rows, columns]."""
    sizes = sizes_of(names)
    devices = math.prod(sizes)
    ways = ways_of(x.shape[0], 2)
    product = Product((ways[0].rows, *w.shape), x.dtype, config, with_sums=False)
    semaphores = parts_scratch(ways, devices)

    def kernel(x_ref: Any, w_ref: Any, out_ref: Any, gathered_ref: Any, *scratch: Any) -> None:
        ring = Ring(names, sizes)
        ring.meet_neighbours()

        def work(way: Way, place: Any, rows: Any) -> None:
            target = out_ref.at[place, pl.ds(way.start, way.rows)]
            product.run(rows, w_ref, target, scratch[len(semaphores) :])

        pass_parts(ring, ways, x_ref, gathered_ref, scratch[: len(semaphores)], work)

    out, _ = pl.pallas_call(
        kernel,
        out_shape=(
            out_struct((devices, x.shape[0], w.shape[1]), x.dtype, x),
            out_struct((devices, *x.shape), x.dtype, x),
        ),
        in_specs=[ANY, ANY],
        out_specs=(ANY, ANY),
        scratch_shapes=[*semaphores, *product.scratch()],
        compiler_params=parameters(names),
        interpret=interpret(),
        name="ring_all_gather_matmul",
    )(x, w)
    return out


def scatter_product(x: Any, w: Any, names: Axes, config: RingMatmulConfig) -> Any:
    """[devices, rows, k] of every device, times its w, added up, as this device's [rows, columns]."""
    sizes = sizes_of(names)
    _, rows, _ = x.shape
    columns = w.shape[1]
    ways = ways_of(rows, 2)
    plain = Product((ways[0].rows, *w.shape), x.dtype, config, with_sums=False)
    summing = Product((ways[0].rows, *w.shape), x.dtype, config, with_sums=True)
    semaphores = sums_scratch(ways)

    def kernel(x_ref: Any, w_ref: Any, out_ref: Any, slot_ref: Any, first_ref: Any, *scratch: Any) -> None:
        ring = Ring(names, sizes)
        ring.meet_neighbours()
        # The first product has no sums to read: it uses the tiles for rows and weights, and their semaphores.
        tiles = scratch[len(semaphores) :]
        without_sums = [*tiles[:5], tiles[6]]

        def mine(way: Way, place: Any) -> Any:
            return x_ref.at[place, pl.ds(way.start, way.rows)]

        def first(way: Way, place: Any) -> Any:
            target = first_ref.at[way.number]
            plain.run(mine(way, place), w_ref, target, without_sums)
            return target

        def add(way: Way, place: Any, sums: Any, target: Any) -> None:
            summing.run(mine(way, place), w_ref, target, tiles, sums)

        pass_sums(ring, ways, slot_ref, scratch[: len(semaphores)], first, add, out_ref)

    half = (ways[0].rows, columns)
    out, _, _ = pl.pallas_call(
        kernel,
        out_shape=(
            out_struct((rows, columns), x.dtype, x),
            out_struct((len(ways), SLOTS, *half), x.dtype, x),
            out_struct((len(ways), *half), x.dtype, x),
        ),
        in_specs=[ANY, ANY],
        out_specs=(ANY, ANY, ANY),
        scratch_shapes=[*semaphores, *summing.scratch()],
        compiler_params=parameters(names),
        interpret=interpret(),
        name="ring_matmul_reduce_scatter",
    )(x, w)
    return out


def _refuses(call: Call, rows: int) -> str | None:
    """`rows` are those that travel together, batches included."""
    x, w = call.need("x"), call.need("w")
    if x.dtype != w.dtype:
        return f"it takes operands of one type; got {x.dtype.name} and {w.dtype.name}"
    if w.shape[1] == 0 or w.shape[1] % LANES:
        return f"it makes whole tiles: a multiple of {LANES} columns; got {w.shape[1]}"
    return refuses(call, rows, x.shape[-1])


def _gather_refuses(call: Call) -> str | None:
    return _refuses(call, math.prod(call.need("x").shape[:-1]))


def _scatter_refuses(call: Call) -> str | None:
    devices = call.params["devices"]
    assert isinstance(devices, int)
    return _refuses(call, math.prod(call.need("x").shape[:-1]) // devices)


ALL_GATHER_MATMUL = implementation(all_gather_matmul, _gather_refuses, CANDIDATES)
MATMUL_REDUCE_SCATTER = implementation(matmul_reduce_scatter, _scatter_refuses, CANDIDATES)
