"""Rows whose search left several codes: their distances in float32, and the nearest."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.vq.nearest.pallas_gpu_compare import TOGETHER, Row, twice_if_small, usable
from capibara.kernels.ops.vq.nearest.pallas_gpu_lists import entry_of
from capibara.kernels.ops.vq.nearest.pallas_gpu_resident import stream_of
from capibara.kernels.ops.vq.nearest.pallas_gpu_slices import SHORTEST, by_slices

ROWS = 8  # of a program: few, so that those with several codes are spread over the chip


def resolve(
    x: jax.Array, codebook: jax.Array, found: jax.Array, half: jax.Array, kept: int, *, streams: bool = False
) -> jax.Array:
    """Indices [N] from the lists that `search` found [words, N or more]: the nearest of those that may be it.

    With `streams`, what `search_resident` found: two codes of a stream stand for all of it. A row whose list of `kept`
    is full is compared with all codes whose `half` norm [K or more] says that they can be used. N is a multiple of
    ROWS.
    """
    # One program compares a row with so few fast enough.
    sliced = [by_slices(x, codebook, found, half, kept)] if codebook.shape[0] > SHORTEST else []
    (made,) = plgpu.kernel(
        functools.partial(_program, kept=kept, streams=streams),
        out_type=[out_struct((x.shape[0],), jnp.int32, x)],
        grid=(x.shape[0] // ROWS,),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(x, codebook, found, half, *sliced)
    return made


def _program(x_hbm: Any, codes_hbm: Any, found_hbm: Any, half_hbm: Any, *refs: Any, kept: int, streams: bool) -> None:
    *sliced, out_hbm = refs
    first = lax.axis_index("program") * ROWS
    entries = [entry_of(found_hbm, first + number, kept) for number in range(ROWS)]
    # All of them are asked for before the first is looked at: one wait for memory, not one a row.
    counts = [entry(kept) for entry in entries]
    best = [entry(0) for entry in entries]
    for number in range(ROWS):
        out_hbm[first + number] = best[number]

    def one(number: Any, carry: None) -> None:
        row = first + number
        slices = [lambda at: sliced[0][at, row], sliced[0].shape[0]] if sliced else None
        look_again(
            x_hbm, codes_hbm, out_hbm, row, entry_of(found_hbm, row, kept), kept, half_hbm, streams=streams,
            slices=slices,
        )  # fmt: skip
        return carry

    most = functools.reduce(jnp.maximum, counts)

    @pl.when(most > 1)
    def _some_are_not_certain() -> None:
        lax.fori_loop(0, ROWS, one, None)


def look_again(
    x_hbm: Any, codes_hbm: Any, out_hbm: Any, row: Any, found: Callable[[Any], Any], kept: int, half: Any, *,
    streams: bool = False, slices: Any = None,
) -> None:  # fmt: skip
    """Write the nearest code of a row, if its list `found(place)`, whose length is the `kept`-th, has more than one.

    slices is (the best code of each, how many), where all codes were compared before.
    """
    codes = codes_hbm.shape[0]
    count = found(kept)

    @pl.when((count > 1) & (count < kept))
    def _few() -> None:
        out_hbm[row] = _of_a_few(Row(x_hbm, codes_hbm, row), found, kept, codes, streams)

    def one_of_a_slice(at: Any) -> tuple[Any, Any]:
        code = slices[0](at)
        return jnp.maximum(code, 0), code >= 0

    @pl.when(count == kept)
    def _all() -> None:
        values = Row(x_hbm, codes_hbm, row)
        if slices is None:
            index = values.nearest(lambda at: usable(half, at), codes)
        else:
            index = values.nearest(one_of_a_slice, slices[1])
        out_hbm[row] = jnp.where(values.is_finite(), index, np.int32(-1))


def _of_a_few(row: Row, found: Any, kept: int, codes: int, streams: bool) -> Any:
    listed, count = [found(place) for place in range(kept - 1)], found(kept)

    def nearer(best: Any, others: list[Any], by: Any) -> Any:
        least, index = best
        for there, other in zip(row.distances(others, by), others, strict=True):
            better = (there < least) | ((there == least) & (other < index))
            least, index = jnp.where(better, there, least), jnp.where(better, other, index)
        return least, index

    def search(by: Any) -> Any:
        best = nearer((np.float32(np.inf), np.int32(codes)), listed[: min(2, kept - 1)], by)
        best = lax.fori_loop(2, count, lambda place, best: nearer(best, [found(place)], by), best)
        for place in range(1, kept - 1) if streams else ():
            start, apart, length = stream_of(listed[place], codes)
            alike = [stream_of(other, codes)[0] == start for other in listed[:place]]
            # Where the list has another of its stream, all of it. Past the last code there is none: the first again.
            repeated = (place < count) & functools.reduce(operator.or_, alike)

            def look(turn: Any, best: Any, start: Any = start, apart: int = apart) -> Any:
                several = [start + (turn * TOGETHER + number) * apart for number in range(TOGETHER)]
                return nearer(best, [jnp.where(code < codes, code, start) for code in several], by)

            best = lax.fori_loop(0, jnp.where(repeated, length // TOGETHER, 0), look, best)
        return best

    return twice_if_small(search)
