"""rope for Hopper, in Pallas (Mosaic GPU): the angles of some positions are read once for several heads.

A program, one warpgroup, has some positions of some heads. A thread has the same numbers of a position in every head,
neighbours from the first half and those they are paired with from the second: so the cosines and sines stay in its
registers, once, and go over the heads. Everything that a program reads is asked for before anything is computed, and
many programs share a multiprocessor. There is no shared memory and nobody to wait for. Where positions or heads are no
multiple of a program's, the last program starts early and turns some of them again, to the same numbers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.errors import rule_error
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct
from capibara.kernels.pallas import hopper
from capibara.kernels.pallas.hopper import LANE, WIDEST_ACCESS, named, refuses_chip

THREADS = 128  # of a warpgroup
VECTORS = (8, 4, 2)  # neighbouring numbers of a thread, the widest access first
HEADS = (4, 8, 2, 16, 3, 5, 6, 7, 1)  # of a program, the best guess first
ENOUGH_HEADS = 4  # to turn by the same angles; fewer only where registers allow no more
# Of a thread, for the angles and for what is asked for. As compiled for an H200 it takes up to twice as many, 232 of
# the 255 that there are: addresses, and float32 for 16 bits.
MOST_REGISTERS = 128
COMPILER_PARAMS = plgpu.CompilerParams(
    lowering_semantics=LANE,
    unsafe_no_auto_barriers=True,  # memory is either read or written
)


@dataclasses.dataclass(frozen=True)
class TurnConfig:
    """How many heads a program turns, and how many neighbouring numbers of a half a thread has."""

    heads: int = 4
    vector: int = 8

    def __post_init__(self) -> None:
        if self.heads < 1 or self.vector not in VECTORS:
            raise rule_error("heads is one or more, and vector is 8, 4 or 2", self, "use heads=4, vector=8")


class Cut(NamedTuple):
    """How a head is cut: two halves that are turned, and a rest that is left."""

    positions: int
    """Of a program: the fewest that its threads share evenly."""
    half: int
    rest: int
    vector: int
    rest_vector: int

    def layout(self, width: int) -> Any:
        vector = self.vector if width == self.half else self.rest_vector
        return plgpu.Layout.WG_STRIDED((self.positions, width), vec_size=vector)

    def registers(self, heads: int, itemsize: int) -> int:
        """Of a thread: cosines and sines, and its numbers of all heads as they were read."""
        turned, left = (self.positions * width // THREADS for width in (self.half, self.rest))
        return 2 * turned + heads * -(-(2 * turned + left) * itemsize // 4)


def cut_of(depth: int, pairs: int, vector: int, itemsize: int) -> Cut | None:
    """None where vectors of that width do not fit into a half, or what is left of a head is not shared evenly."""
    if pairs % vector or depth % vector or vector * itemsize > WIDEST_ACCESS:
        return None
    positions, rest = THREADS * vector // math.gcd(THREADS * vector, pairs), depth - 2 * pairs
    if positions * rest % THREADS:
        return None
    # A vector lies inside of a row and of memory's own steps: it divides where the rest begins, and each row.
    rest_vector = math.gcd(positions * rest // THREADS, rest, 2 * pairs, WIDEST_ACCESS // itemsize) if rest else vector
    return Cut(positions, pairs, rest, vector, rest_vector)


class Sizes(NamedTuple):
    """Of a call. Where every sequence has angles of its own, and sequences lie behind one another, they are as one long
    one: so a step of many sequences, a token each, has positions for a program too."""

    batch: int
    length: int
    heads: int
    depth: int
    pairs: int


def sizes_of(x: Any, cos: Any, layout: str) -> Sizes:
    batch, length, heads, depth = (x.shape[layout.index(axis)] for axis in "bthd")
    if layout == "bthd" and len(cos.shape) == 3:
        batch, length = 1, batch * length
    return Sizes(batch, length, heads, depth, cos.shape[-1])


def candidates(call: Call) -> Sequence[TurnConfig]:
    x = call.need("x")
    n, itemsize = sizes_of(x, call.need("cos"), str(call.params["layout"])), x.dtype.itemsize
    enough, configs = min(n.heads, ENOUGH_HEADS), []
    for vector in VECTORS:
        cut = cut_of(n.depth, n.pairs, vector, itemsize)
        if cut is None or cut.positions > n.length:
            continue
        fitting = [h for h in HEADS if h <= n.heads and cut.registers(h, itemsize) <= MOST_REGISTERS]
        dividing = [h for h in fitting if n.heads % h == 0]
        # Others turn some heads again.
        heads = dividing if max(dividing, default=0) >= enough else sorted(fitting, key=lambda h: -n.heads % h)
        configs += [TurnConfig(h, vector) for h in heads]
    return sorted(configs, key=lambda config: config.heads < enough)


def refuses(call: Call) -> str | None:
    chip = refuses_chip(call.target.device_kind)
    if chip is not None:
        return chip
    x, cos = call.need("x"), call.need("cos")
    if call.params["style"] != "half":
        return "it takes the style half: a thread has neighbouring numbers, which interleaved turns by one another"
    for name, operand, taken in (("x", x, ("bfloat16", "float16", "float32")), ("cos", cos, ("float32",))):
        if np.dtype(operand.dtype).name not in taken:
            return f"it takes {name} of {', '.join(taken)}, not {operand.dtype.name}"
    if call.need("sin").dtype != cos.dtype:
        return f"it takes sin of float32, not {call.need('sin').dtype.name}"
    if 0 in x.shape:
        return "x is empty"
    n = sizes_of(x, cos, str(call.params["layout"]))
    cuts = [cut for v in VECTORS if (cut := cut_of(n.depth, n.pairs, v, x.dtype.itemsize)) is not None]
    if not cuts:
        return f"{THREADS} threads do not share a head of {n.depth} with {2 * n.pairs} turned in pairs of neighbours"
    if min(cut.positions for cut in cuts) > n.length:
        return f"a program has {min(cut.positions for cut in cuts)} positions or more, and here are {n.length}"
    if not candidates(call):
        return f"a thread's numbers and angles of one head of {n.depth} do not fit its registers"
    return None


def rope_hopper(
    x: jax.Array, cos: jax.Array, sin: jax.Array, *, config: TurnConfig, style: str, layout: str
) -> jax.Array:
    """One kernel over all programs; see the module's text."""
    assert style == "half", "refuses has seen to it"
    n = sizes_of(x, cos, layout)
    cut = cut_of(n.depth, n.pairs, config.vector, x.dtype.itemsize)
    if cut is None or cut.positions > n.length or config.heads > n.heads:
        raise rule_error(
            "heads is at most x's, vector divides half of what is turned, and a program's positions are there",
            f"{config} of {n}", "leave it out",
        )  # fmt: skip
    shape = {"b": n.batch, "t": n.length, "h": n.heads, "d": n.depth}
    together = x.reshape([shape[axis] for axis in layout])
    tables = (table.reshape(-1, n.length, n.pairs) for table in (cos, sin))
    programs = n.batch * pl.cdiv(n.length, cut.positions) * pl.cdiv(n.heads, config.heads)
    (made,) = plgpu.kernel(
        named("rope", _program, n=n, cut=cut, heads=config.heads, layout=layout),
        out_type=[out_struct(together.shape, x.dtype, x)],
        grid=(programs,),
        grid_names=("program",),
        compiler_params=COMPILER_PARAMS,
    )(together, *tables)
    return made.reshape(x.shape)


def _program(
    x_hbm: Any, cos_hbm: Any, sin_hbm: Any, made_hbm: Any, *, n: Sizes, cut: Cut, heads: int, layout: str
) -> None:
    # Heads change fastest: programs that run at the same time read the same angles.
    number, groups, blocks = lax.axis_index("program"), pl.cdiv(n.heads, heads), pl.cdiv(n.length, cut.positions)
    group, place = lax.rem(number, groups), lax.div(number, groups)
    block, sequence = lax.rem(place, blocks), lax.div(place, blocks)
    first_head = lax.min(group * heads, n.heads - heads)
    positions = pl.ds(lax.min(block * cut.positions, n.length - cut.positions), cut.positions)

    def part(ref: Any, head: int, start: int, width: int) -> Any:
        at = {"b": sequence, "t": positions, "h": first_head + head, "d": pl.ds(start, width)}
        return ref.at[tuple(at[axis] for axis in layout)]

    parts = [(0, cut.half), (cut.half, cut.half)] + ([(2 * cut.half, cut.rest)] if cut.rest else [])
    asked = [
        [hopper.load_vectors(part(x_hbm, head, *one), cut.layout(one[1])) for one in parts] for head in range(heads)
    ]
    row = sequence if cos_hbm.shape[0] > 1 else 0
    cos, sin = (hopper.load_vectors(ref.at[row, positions], cut.layout(cut.half)) for ref in (cos_hbm, sin_hbm))
    for head, (left, right, *rest) in enumerate(asked):
        a, b = left.astype(jnp.float32), right.astype(jnp.float32)
        turned = [(a * cos - b * sin).astype(left.dtype), (b * cos + a * sin).astype(left.dtype)]
        for one, value in zip(parts, turned + rest, strict=True):
            hopper.store_vectors(part(made_hbm, head, *one), value, cut.layout(one[1]))


# Not timed on a chip: it waits behind XLA's form, and runs by name or where a tuned table has it.
IMPLEMENTATION = Implementation(
    "hopper",
    rope_hopper,
    platforms=("gpu",),
    refuses=refuses,
    kernel=True,
    config_type=TurnConfig,
    candidates=candidates,
)
