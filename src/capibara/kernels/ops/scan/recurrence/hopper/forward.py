"""The recurrence for Hopper, in Pallas (Mosaic GPU): tiles of time stream through shared memory, each number once.

A program is one warpgroup on `width` channels of one batch element; a thread of it owns a channel, or two, and keeps
its state in a register. It walks over time in tiles of `steps` rows. Tiles of a and b arrive by the copy engine,
several ahead, so that enough is on its way to keep the memory busy; h leaves by it as well, from two buffers in turn.
Where time does not divide into tiles the short one lies at its end, and is computed by code of its own, so that no row
is ever masked.

Where batch and channels give fewer programs than the chip has multiprocessors, time is cut into segments: a first
kernel reads a and b and gives each segment's product of decays and its state from a start at zero, XLA links those, and
the kernel proper computes all segments side by side. Where the segments do not meet (products of decays overflowed; see
`xla`), the kernel runs once more over all of time in one piece, into the same memory. It is launched in any case and
looks for itself whether there is something to do: a branch of XLA's would wait for the host, and copy the result.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.errors import rule_error
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct, vary_like
from capibara.kernels.ops.scan.recurrence import xla
from capibara.kernels.ops.scan.recurrence.planes import Number, filled, join, split, store
from capibara.kernels.ops.scan.recurrence.reference import shifted, start_of, state_type
from capibara.kernels.ops.scan.recurrence.rules import sizes_of
from capibara.kernels.pallas.hopper import LANE, SMEM_BYTES, load, multiprocessors, refuses_chip, smem_bytes

THREADS = 128  # of a warpgroup
GROUP = 8  # rows of real numbers that are read into registers together, ahead of the chain that uses them
OUT_STAGES = 2
SHORTEST_SEGMENT = 128  # steps: a shorter one has little to hide its start behind
LINK = 8  # steps of XLA's segments of the states between segments, which are a small recurrence

# Shared memory is written by threads or by the copy engine, never both, and the walk synchronises what passes between
# them: the barriers that Pallas would put around every store are not needed.
COMPILER_PARAMS = plgpu.CompilerParams(unsafe_no_auto_barriers=True, lowering_semantics=LANE)


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """Rows and channels of a tile, tiles on their way, and how many segments of time are computed side by side."""

    steps: int
    stages: int
    width: int = THREADS
    segments: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= 256 or self.stages < 1 or self.segments < 1 or self.width not in (128, 256):
            raise rule_error(
                "steps is 1 to 256, stages and segments are 1 or more, and width is 128 or 256",
                self,
                "use steps=32, stages=4, width=128, segments=1",
            )

    @property
    def layout(self) -> Any:
        return plgpu.Layout.WG_STRIDED((self.width,), vec_size=self.width // THREADS)


def ring_candidates(call: Call, sources: Sequence[Any], targets: Sequence[Any]) -> Sequence[TileConfig]:
    """Configs that fit, the best guess first; `sources` come and `targets` go through shared memory."""
    fetched = sum(x.dtype.itemsize for x in sources)
    batch, steps, channels = sizes_of(call)
    cores = multiprocessors(call.target.device_kind)
    programs = batch * (channels // THREADS)
    segments = 1
    # Segments cost a second reading of the operands, so only where more than half of the chip would idle.
    while programs * segments * 2 <= cores and steps % (2 * segments) == 0 and steps // segments > SHORTEST_SEGMENT:
        segments *= 2
    # Bytes on the way that keep the memory busy, by how many programs share a multiprocessor.
    shared = max(1, min(4, programs * segments // cores))
    configs = []
    # A tile costs its barriers some hundred cycles, so narrow numbers want more rows of it.
    enough = 32 if fetched <= 6 else 16
    for many, ahead in ((1, 96), (2, 96), (1, 128), (2, 128), (0.5, 64), (2, 64), (4, 128), (1, 48)):
        rows = min(int(many * enough), steps, 256)
        for width in (128, 256):
            if channels % width:
                continue
            stages = max(2, min(16, ahead * 1024 // (shared * rows * width * fetched)))
            configs.append(TileConfig(rows, stages, width, segments))
    if segments > 1:
        configs.append(dataclasses.replace(configs[0], segments=1))

    def fits(config: TileConfig) -> bool:
        scratch = ring_scratch(sources, targets, config, config.steps)
        return smem_bytes(scratch) <= SMEM_BYTES

    return list(dict.fromkeys(sorted(filter(fits, configs), key=lambda c: c.width)))


def ring_scratch(sources: Any, targets: Any, config: TileConfig, steps: int) -> dict[str, Any]:
    """What a program allocates: a ring of tiles of every source, two tiles of every target, a barrier a stage."""

    def ring(tiles: int, arrays: Any) -> Any:
        return jax.tree.map(lambda x: plgpu.SMEM((tiles, steps, config.width), x.dtype), arrays)

    return {
        "arrived": plgpu.Barrier(num_arrivals=len(jax.tree.leaves(sources)), num_barriers=config.stages),
        "buffers": ring(config.stages, sources),
        "outs": ring(OUT_STAGES, targets),
    }


def refuses(call: Call) -> str | None:
    chip = refuses_chip(call.target.device_kind)
    if chip is not None:
        return chip
    for name, x in zip(call.op.operands, call.args, strict=True):
        if x is not None and np.dtype(x.dtype).name not in ("bfloat16", "float16", "float32", "complex64"):
            return f"it takes bfloat16, float16, float32 and complex64; {name} is {x.dtype.name}"
    if 0 in sizes_of(call):
        return "there are no steps, or nothing that takes them"
    channels = sizes_of(call).channels
    if channels % THREADS:
        return f"128 threads take a channel each, so it takes a multiple of 128; not {channels} channels"
    return None


def check_config(config: TileConfig, length: int, channels: int) -> None:
    """A config that was asked for must fit the call."""
    if length % config.segments or channels % config.width:
        raise rule_error(
            "segments divides the steps, and width the channels",
            f"{config} for {length} steps and {channels} channels",
            "use segments=1, width=128",
        )


@dataclasses.dataclass(frozen=True)
class Walk:
    """The tiles of `length` steps, forwards or backwards in time.

    The last tile in time may be short. With `edge` the last tile that the walk reaches is told apart too. Inside of a
    tile `group` rows are taken at a time.
    """

    length: int
    steps: int
    backwards: bool
    edge: bool
    group: int = GROUP

    @property
    def turns(self) -> int:
        return -(-self.length // self.steps)

    @property
    def short(self) -> bool:
        return self.length % self.steps != 0

    @property
    def alike(self) -> range:
        """The turns whose tiles are whole and not told apart: a loop takes them."""
        first = 1 if self.short and self.backwards else 0
        apart = self.edge or (self.short and not self.backwards)
        return range(first, max(first, self.turns - 1 if apart else self.turns))

    def start(self, turn: Any) -> Any:
        return (self.turns - 1 - turn if self.backwards else turn) * self.steps

    def rows(self, turn: int) -> int:
        """How many, for a turn outside of the loop."""
        return min(self.steps, self.length - self.start(turn))

    def each_row(self, rows: int, body: Callable[..., Any], carry: Any, first: int = 0) -> Any:
        """`body(rows, carry)` on `rows` of a tile from its row `first`, in the walk's order and `group` at a time.

        They are loops: unrolled, a tile takes long to compile and runs no faster.
        """
        groups, left = divmod(rows, self.group)

        def row(number: Any) -> Any:
            return first + (rows - 1 - number if self.backwards else number)

        if groups:

            def group(number: Any, carry: Any) -> Any:
                return body([row(number * self.group + i) for i in range(self.group)], carry)

            carry = lax.fori_loop(0, groups, group, carry)
        if left:
            carry = lax.fori_loop(groups * self.group, rows, lambda number, carry: body([row(number)], carry), carry)
        return carry


def walk_tiles(
    walk: Walk, config: TileConfig, arrived: Any, fetch: Callable[..., None], tile: Callable[..., Any], carry: Any
) -> Any:
    """Take every tile in turn, with those after it on their way.

    `fetch(turn, rows, at_edge)` starts the copies of a tile into its slot. `tile(turn, slot, rows, at_edge, carry)`
    reads it, and starts the copy of its results after `commit_smem`, so that when it returns its slot has been read.
    """

    def apart(turn: int) -> tuple[int, bool]:
        return walk.rows(turn), walk.edge and turn == walk.turns - 1

    def take(turn: Any, rows: int, at_edge: bool, carry: Any) -> Any:
        slot = slot_of(turn, config.stages)
        plgpu.barrier_wait(arrived.at[slot])
        return tile(turn, slot, rows, at_edge, carry)

    def refill(turn: Any) -> None:
        following = turn + config.stages
        if isinstance(turn, int):
            if following < walk.turns:
                fetch(following, *apart(following))
            return
        pl.when(following < walk.alike.stop)(functools.partial(fetch, following, walk.steps, False))
        if walk.alike.stop < walk.turns:
            last = walk.turns - 1
            pl.when(following == last)(functools.partial(fetch, last, *apart(last)))

    def step(turn: Any, carry: Any) -> Any:
        carry = take(turn, walk.steps, False, carry)
        refill(turn)
        return carry

    for turn in range(min(config.stages, walk.turns)):
        fetch(turn, *apart(turn))
    for turn in range(walk.alike.start):
        carry = take(turn, *apart(turn), carry)
        refill(turn)
    if walk.alike:
        carry = lax.fori_loop(walk.alike.start, walk.alike.stop, step, carry)
    for turn in range(walk.alike.stop, walk.turns):
        carry = take(turn, *apart(turn), carry)
        refill(turn)
    return carry


def slot_of(turn: Any, slots: int) -> Any:
    return lax.rem(jnp.int32(turn), jnp.int32(slots))


def fetch_rows(
    sources: Any, buffers: Any, arrived: Any, slot: Any, batch: Any, first: Any, rows: int, columns: Any, into: int = 0
) -> None:
    """Start the copies of some rows of every source, each into its own ring from the slot's row `into`."""

    def copy(source: Any, buffer: Any) -> None:
        there = source.at[batch, pl.ds(first, rows), columns]
        plgpu.copy_gmem_to_smem(there, part(buffer, slot, into, rows), arrived.at[slot])

    jax.tree.map(copy, sources, buffers)


def store_rows(buffers: Any, targets: Any, slot: Any, batch: Any, first: Any, rows: int, columns: Any) -> None:
    """Start the copies of a tile's results to where they belong."""

    def copy(buffer: Any, target: Any) -> None:
        plgpu.copy_smem_to_gmem(part(buffer, slot, 0, rows), target.at[batch, pl.ds(first, rows), columns])

    plgpu.commit_smem()
    jax.tree.map(copy, buffers, targets)


def part(buffer: Any, slot: Any, first: int, rows: int) -> Any:
    """Some rows of a slot; the whole slot without a slice, as the copy engine likes it best."""
    return buffer.at[slot] if rows == buffer.shape[1] else buffer.at[slot, pl.ds(first, rows)]


def read_rows(buffers: Number, slot: Any, rows: Sequence[Any], layout: Any) -> list[Number]:
    """Numbers of some rows in float32."""

    def read(buffer: Any, row: Any) -> Any:
        return load(buffer.at[slot, row], layout, optimized=False).astype(jnp.float32)

    return [jax.tree.map(lambda buffer, row=row: read(buffer, row), buffers) for row in rows]


def state_at(refs: Number, batch: Any, columns: Any, config: TileConfig) -> Number:
    """A channel's state from device memory."""
    # Inside of a checked shard_map what is read varies over the mesh by its type, and what a kernel computes does not:
    # a product with 1 is computed, and a loop may carry it.
    return jax.tree.map(lambda ref: load(ref.at[batch, columns], config.layout, optimized=False) * np.float32(1), refs)


def constant(value: float, like: Number, config: TileConfig) -> Number:
    def full(number: float) -> Any:
        return plgpu.layout_cast(jnp.full((config.width,), number, jnp.float32), config.layout)

    return jax.tree.map(full, filled(like, value))


def own_columns(config: TileConfig) -> Any:
    column = lax.axis_index("column")
    return pl.ds(pl.multiple_of(column * config.width, config.width), config.width)


def candidates(call: Call) -> Sequence[TileConfig]:
    a, b = call.need("a"), call.need("b")
    return ring_candidates(call, (a, b), (b,))


def _program(*refs: Any, tree: Any, config: TileConfig, walk: Walk) -> None:
    (a_hbm, b_hbm, initial_hbm), (h_hbm, final_hbm) = jax.tree.unflatten(tree, refs)
    sources = (a_hbm, b_hbm)
    stores = len(jax.tree.leaves(h_hbm))
    scratch = ring_scratch(sources, h_hbm, config, walk.steps)

    def _scoped(buffers: Any, outs: Any, arrived: Any) -> None:
        batch, columns = lax.axis_index("batch"), own_columns(config)

        def fetch(turn: Any, rows: int, at_edge: bool) -> None:
            slot = slot_of(turn, config.stages)
            fetch_rows(sources, buffers, arrived, slot, batch, walk.start(turn), rows, columns)

        def tile(turn: Any, slot: Any, rows: int, at_edge: bool, state: Number) -> Number:
            out_slot = slot_of(turn, OUT_STAGES)
            # What these buffers held has left.
            plgpu.wait_smem_to_gmem(stores * (OUT_STAGES - 1), wait_read_only=True)

            def advance(group: Sequence[Any], state: Number) -> Number:
                decays, terms = (read_rows(buffer, slot, group, config.layout) for buffer in buffers)
                for row, decay, term in zip(group, decays, terms, strict=True):
                    state = decay * state + term
                    store(outs, (out_slot, row), state)
                return state

            state = walk.each_row(rows, advance, state)
            store_rows(outs, h_hbm, out_slot, batch, walk.start(turn), rows, columns)
            return state

        if initial_hbm is None:
            state = constant(0.0, b_hbm, config)
        else:
            state = state_at(initial_hbm, batch, columns, config)
        state = walk_tiles(walk, config, arrived, fetch, tile, state)
        if final_hbm is not None:
            store(final_hbm, (batch, columns), state)
        plgpu.wait_smem_to_gmem(0)

    pl.run_scoped(_scoped, **scratch)


def _ends_program(*refs: Any, tree: Any, config: TileConfig, walk: Walk, multiply_last: bool) -> None:
    sources, (product_hbm, end_hbm) = jax.tree.unflatten(tree, refs)
    scratch = ring_scratch(sources, None, config, walk.steps)

    def _scoped(buffers: Any, outs: Any, arrived: Any) -> None:
        batch, columns = lax.axis_index("batch"), own_columns(config)

        def fetch(turn: Any, rows: int, at_edge: bool) -> None:
            slot = slot_of(turn, config.stages)
            fetch_rows(sources, buffers, arrived, slot, batch, walk.start(turn), rows, columns)

        def tile(turn: Any, slot: Any, rows: int, at_edge: bool, carry: Any) -> Any:
            def advance(group: Sequence[Any], carry: Any) -> Any:
                product, state = carry
                decays, terms = (read_rows(buffer, slot, group, config.layout) for buffer in buffers)
                for decay, term in zip(decays, terms, strict=True):
                    product = product * decay
                    state = decay * (state + term) if multiply_last else decay * state + term
                return product, state

            carry = walk.each_row(rows, advance, carry)
            plgpu.commit_smem()  # every thread has read the slot before the copy engine may write it
            return carry

        start = (constant(1.0, end_hbm, config), constant(0.0, end_hbm, config))
        product, state = walk_tiles(walk, config, arrived, fetch, tile, start)
        store(product_hbm, (batch, columns), product)
        store(end_hbm, (batch, columns), state)

    pl.run_scoped(_scoped, **scratch)


def launch(
    program: Callable[..., None], operands: Any, results: Any, config: TileConfig, *, backwards: bool,
    edge: bool = False, unless: jax.Array | None = None, **choices: Any,
) -> Any:  # fmt: skip
    """Run a program for each batch and each `width` channels of trees of arrays; what it writes is a tree of arrays.

    `results` are the shapes of what is written. With `unless` they are arrays that the program writes into, and where
    that is true it does nothing: they stay as they are.
    """
    (like, *_) = jax.tree.leaves(operands)
    batch, length, channels = like.shape
    group = GROUP // len(jax.tree.leaves(operands[0]))  # as many registers for complex numbers
    walk = Walk(length, min(config.steps, length), backwards=backwards, edge=edge, group=group)
    tree = jax.tree.structure((operands, results))
    body = functools.partial(program, tree=tree, config=config, walk=walk, **choices)
    grid: dict[str, Any] = {"grid": (batch, channels // config.width), "grid_names": ("batch", "column")}
    inputs = jax.tree.leaves(operands)
    if unless is None:
        kernel = plgpu.kernel(body, out_type=jax.tree.leaves(results), compiler_params=COMPILER_PARAMS, **grid)
        written: Sequence[Any] = [vary_like(x, like) for x in kernel(*inputs)]
    else:

        def guarded(unless_hbm: Any, *refs: Any) -> None:
            @pl.when(unless_hbm[0] == 0)
            def _() -> None:
                body(*refs)

        # pl.kernel, since plgpu.kernel takes no array to write into.
        kernel = pl.kernel(
            guarded, out_type=(), mesh=plgpu.Mesh(**grid), compiler_params=COMPILER_PARAMS,
            name="recurrence_in_one_piece",
        )  # fmt: skip
        flag = unless.astype(jnp.int32).reshape(1)

        def into(refs: tuple[Any, ...]) -> None:
            kernel(flag, *inputs, *refs)

        written = pl.run_state(into)(tuple(jax.tree.leaves(results)))
    return jax.tree.unflatten(jax.tree.structure(results), written)


def state_struct(like: Number) -> Number:
    """One step of every channel, in float32."""
    return jax.tree.map(lambda x: out_struct((x.shape[0], x.shape[2]), jnp.float32, x), like)


def whole_struct(like: Number) -> Number:
    return jax.tree.map(lambda x: out_struct(x.shape, x.dtype, x), like)


def segment_starts(
    a: jax.Array, b: jax.Array, start: jax.Array, config: TileConfig, *, reverse: bool, multiply_last: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The state before each segment [batch · segments, channels], after each, and after the last [batch, channels].

    a and b have the segments in the batch already. With `multiply_last` a step is a · (state + b).
    """
    rows, _, channels = b.shape
    operands = (split(a), split(b))
    state = state_struct(operands[1])
    ends = launch(_ends_program, operands, (state, state), config, backwards=reverse, multiply_last=multiply_last)
    products, states = (join(x).reshape(-1, config.segments, channels) for x in ends)
    linked, final, _ = xla.segments(products, states, start, LINK, reverse)
    return shifted(linked, start, reverse).reshape(rows, channels), linked.reshape(rows, channels), final


def segments_met(starts: jax.Array, linked: jax.Array, computed: jax.Array, segments: int, length: int) -> jax.Array:
    """Whether the kernel proper came to the states that the segments were linked by, all [batch · segments, channels].

    The largest state is looked for at the segments' ends alone: where it lies inside of one, and its rounding is seen
    at the end, the time of one more pass is lost and nothing else.
    """
    starts, linked, computed = (x.reshape(-1, segments, x.shape[-1]) for x in (starts, linked, computed))
    return xla.segments_meet(linked, computed, jnp.maximum(jnp.abs(starts), jnp.abs(computed)), length)


def in_segments(x: jax.Array, config: TileConfig) -> jax.Array:
    batch, length, channels = x.shape
    return x.reshape(batch * config.segments, length // config.segments, channels)


def recurrence_forward(
    a: jax.Array, b: jax.Array, initial: jax.Array | None = None, *, config: TileConfig, reverse: bool,
    return_final: bool,
) -> Any:  # fmt: skip
    """The forward pass as one kernel over (batch, channels), or two where time is cut; see the module's text."""
    check_config(config, *b.shape[1:])
    wide = state_type(b)
    if config.segments == 1:
        operands = (split(a), split(b), split(None if initial is None else initial.astype(wide)))
        results = (whole_struct(operands[1]), state_struct(operands[1]) if return_final else None)
        h, final = launch(_program, operands, results, config, backwards=reverse)
        return (join(h), join(final)) if return_final else join(h)
    decays, terms = in_segments(a, config), in_segments(b, config)
    starts, linked, final = segment_starts(decays, terms, start_of(initial, b, wide), config, reverse=reverse)
    operands = (split(decays), split(terms), split(starts))
    results = (whole_struct(operands[1]), state_struct(operands[1]))
    h, ends = (join(x) for x in launch(_program, operands, results, config, backwards=reverse))
    met = segments_met(starts, linked, ends, config.segments, b.shape[1])
    h, one_piece = h.reshape(b.shape), dataclasses.replace(config, segments=1)
    if jax.typeof(h).manual_axis_type.varying:  # no kernel writes into what varies over the mesh of a checked shard_map
        again = functools.partial(recurrence_forward, config=one_piece, reverse=reverse, return_final=return_final)
        return lax.cond(met, lambda: (h, final) if return_final else h, lambda: again(a, b, initial))
    whole = (split(a), split(b), split(None if initial is None else initial.astype(wide)))
    written = (split(h), split(final) if return_final else None)
    h, final = (join(x) for x in launch(_program, whole, written, one_piece, backwards=reverse, unless=met))
    return (h, final) if return_final else h


IMPLEMENTATION = Implementation(
    "hopper",
    recurrence_forward,
    platforms=("gpu",),
    refuses=refuses,
    kernel=True,
    config_type=TileConfig,
    candidates=candidates,
)
