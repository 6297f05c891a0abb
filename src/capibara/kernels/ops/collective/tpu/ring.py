"""Ring all-gather, reduce-scatter and all-reduce as TPU kernels: remote copies from one chip's HBM to the next.

The devices of the axes form a ring in the order of their index. All kernels here end on a device only after data of
every other device of the ring has come through it. So no device can begin a second kernel while another of the ring is
still before the barrier of the first, and one barrier semaphore serves all rings of the same devices. A ring over other
mesh axes has neighbours of which that does not hold, and a semaphore of its own.

There are two rounds: parts that are passed on, and sums that are passed on. Parts go straight to their place in the
next device's memory. No place is written twice, so nothing waits.

Sums arrive in one of two slots in each direction. A device adds what is its own, in place, and sends the slot on. The
sender may fill a slot again only when what was in it has left, and waits for a word of that: without it a fast device
would overwrite a slow neighbour's sums.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from capibara.errors import rule_error
from capibara.kernels.core import context
from capibara.kernels.core.spec import Call, Implementation, Operand, describe
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.collective.axes import vary_over
from capibara.kernels.ops.collective.reference import sum_type
from capibara.kernels.ops.collective.tpu import stream

LANES = 128
# A semaphore for each step and direction.
MOST_DEVICES = 512
SLOTS = 2  # for sums that arrive, in each direction
Axes = tuple[str, ...]
ANY = pl.BlockSpec(memory_space=pl.ANY)


@dataclasses.dataclass(frozen=True)
class RingConfig:
    """How the data travels and how it is added: directions, and the tile of one addition in VMEM."""

    directions: int = 2
    block_rows: int = 256
    block_columns: int = 1024

    def __post_init__(self) -> None:
        if self.directions not in (1, 2) or self.block_rows < 1 or self.block_columns < LANES:
            raise rule_error(
                f"A ring has 1 or 2 directions, and tiles of at least one row and {LANES} columns",
                self,
                "use RingConfig()",
            )


CANDIDATES = (RingConfig(2), RingConfig(2, 512, 512), RingConfig(1))


@dataclasses.dataclass(frozen=True)
class Way:
    """One direction: a part of the rows that travels by itself, `step` 1 to the right or -1 to the left."""

    number: int
    step: int
    start: int
    rows: int


def ways_of(rows: int, directions: int) -> list[Way]:
    if directions == 1:
        return [Way(0, 1, 0, rows)]
    half = rows // 2
    return [Way(0, 1, 0, half), Way(1, -1, half, half)]


class Ring:
    """The devices of some mesh axes, seen from inside a kernel."""

    def __init__(self, names: tuple[str, ...], sizes: tuple[int, ...]) -> None:
        self.names, self.sizes = names, sizes
        self.devices = int(np.prod(sizes))
        index = jnp.int32(0)
        for name, size in zip(names, sizes, strict=True):
            index = index * size + lax.axis_index(name)
        self.index = index

    def place(self, offset: Any) -> Any:
        """The index that is `offset` places further."""
        return lax.rem(self.index + offset + self.devices, jnp.int32(self.devices))

    def device_id(self, offset: int) -> Any:
        """Where that device is on each axis; on axes that are not named it is where this one is."""
        flat, coordinates = self.place(offset), dict[str, Any]()
        for name, size in zip(reversed(self.names), reversed(self.sizes), strict=True):
            coordinates[name] = lax.rem(flat, jnp.int32(size))
            flat = lax.div(flat, jnp.int32(size))
        return coordinates

    def meet_neighbours(self) -> None:
        """Wait until both neighbours are in this kernel too, so that their buffers may be written."""
        barrier = pltpu.get_barrier_semaphore()
        for offset in (-1, 1):
            pl.semaphore_signal(barrier, 1, device_id=self.device_id(offset))
        pl.semaphore_wait(barrier, 2)


def sizes_of(names: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(lax.axis_size(name) for name in names)


def barrier_number(names: tuple[str, ...], mesh_axes: tuple[str, ...]) -> int:
    """Which barrier semaphore rings over these axes of a mesh use: one for each set of axes."""
    return sum(1 << mesh_axes.index(name) for name in names)


def parameters(names: tuple[str, ...]) -> Any:
    return pltpu.CompilerParams(collective_id=barrier_number(names, jax.sharding.get_abstract_mesh().axis_names))


def interpret() -> Any:
    return context.current_interpret().pallas_argument()


def sublanes(dtype: Any) -> int:
    """Rows of a tile: 8 of 32 bits, more of narrower types."""
    return 8 * max(1, 4 // np.dtype(dtype).itemsize)


def block(length: int, unit: int, most: int) -> int:
    """The largest divisor of `length` that is a multiple of `unit` and at most `most`; `unit` divides `length`."""
    return max(size for size in range(unit, max(unit, min(length, most)) + 1, unit) if length % size == 0)


def refuses(call: Call, rows: int, columns: int) -> str | None:
    """Why the kernels do not take parts of this size, for a call over so many devices."""
    devices = call.params["devices"]
    assert isinstance(devices, int)
    x = call.need("x")
    if context.current_interpret().mode == "hlo":
        return "it sends from device to device, which interpret('machine') emulates and interpret('hlo') does not"
    if not 2 <= devices <= MOST_DEVICES:
        return f"it is for 2 to {MOST_DEVICES} devices; this call is over {devices}"
    if not jnp.issubdtype(x.dtype, jnp.floating) or np.dtype(x.dtype).itemsize not in (2, 4):
        return f"it takes floats of 16 and 32 bits; got {np.dtype(x.dtype).name}"
    unit = 2 * sublanes(x.dtype)
    if columns == 0 or columns % LANES or rows == 0 or rows % unit:
        return (
            f"it moves two halves of whole tiles: parts of a multiple of {unit} rows and {LANES} columns; "
            f"got {rows} x {columns}"
        )
    return None


def matrix(x: Operand | jax.Array, axis: int) -> tuple[int, int]:
    """(rows, columns) of x with `axis` first and the last of the other axes as columns."""
    assert x is not None
    shape = [x.shape[axis], *(n for i, n in enumerate(x.shape) if i != axis)]
    if len(shape) == 1:
        return shape[0], 1
    return int(np.prod(shape[:-1])), shape[-1]


def parts_scratch(ways: Sequence[Way], devices: int) -> list[Any]:
    """Semaphores for `pass_parts`: a step's copy could overtake the one before it, so each step has its own."""
    steps = (len(ways), devices - 1)
    return [pltpu.SemaphoreType.DMA(steps), pltpu.SemaphoreType.DMA(steps)]


def pass_parts(
    ring: Ring,
    ways: Sequence[Way],
    x_ref: Any,
    gathered_ref: Any,
    scratch: Sequence[Any],
    work: Callable[[Way, Any, Any], None],
) -> None:
    """Every device's x [rows, columns] into its place of gathered [devices, rows, columns], but for this one's own.

    `work(way, place, rows)` is called for the rows of each device that travel that way, this one's first, as soon as
    they are here and on their way to the next device.
    """
    sent, arrived = scratch

    def rows_of(way: Way, step: Any) -> Any:
        return gathered_ref.at[ring.place(-way.step * step), pl.ds(way.start, way.rows)]

    def copy(way: Way, step: Any, source: Any) -> Any:
        return pltpu.make_async_remote_copy(
            source,
            rows_of(way, step),
            sent.at[way.number, step],
            arrived.at[way.number, step],
            device_id=ring.device_id(way.step),
        )

    own = {way: x_ref.at[pl.ds(way.start, way.rows)] for way in ways}
    for way in ways:
        copy(way, 0, own[way]).start()
    for way in ways:
        work(way, ring.index, own[way])

    def pass_on(step: Any, carry: None) -> None:
        for way in ways:
            here = rows_of(way, step)
            copy(way, step - 1, here).wait_recv()  # all copies are of one size, whichever place they fill

            @pl.when(step < ring.devices - 1)
            def _(way: Way = way, here: Any = here) -> None:
                copy(way, step, here).start()

        for way in ways:
            work(way, ring.place(-way.step * step), rows_of(way, step))

    lax.fori_loop(1, ring.devices, pass_on, None)

    def all_gone(step: Any, carry: None) -> None:
        for way in ways:
            copy(way, step, own[way]).wait_send()

    lax.fori_loop(0, ring.devices - 1, all_gone, None)


def sums_scratch(ways: Sequence[Way]) -> list[Any]:
    """Semaphores for `pass_sums`."""
    turns = (len(ways), SLOTS)
    return [
        pltpu.SemaphoreType.DMA(turns),
        pltpu.SemaphoreType.DMA(turns),
        pltpu.SemaphoreType.REGULAR((len(ways),)),
    ]


def pass_sums(
    ring: Ring,
    ways: Sequence[Way],
    slot_ref: Any,
    scratch: Sequence[Any],
    first: Callable[[Way, Any], Any],
    add: Callable[[Way, Any, Any, Any], None],
    out_ref: Any,
) -> None:
    """This device's part of the sum over all devices into out [rows, columns].

    `first(way, place)` gives what this device has for that place, where it lies in HBM. `add(way, place, sums, target)`
    adds what it has for the place to the sums that arrived; the target may be the sums. While one way's sums are added
    the other's are under way.
    """
    sent, arrived, free = scratch

    def place(way: Way, step: Any) -> Any:
        return ring.place(-way.step * (step + 1))

    def slot(way: Way, step: Any) -> Any:
        """Where the sums of this step arrived: they were sent in the step before."""
        return slot_ref.at[way.number, lax.rem(step + 1, jnp.int32(SLOTS))]

    def send(way: Way, step: Any, source: Any) -> Any:
        turn = lax.rem(step, jnp.int32(SLOTS))
        return pltpu.make_async_remote_copy(
            source,
            slot_ref.at[way.number, turn],
            sent.at[way.number, turn],
            arrived.at[way.number, turn],
            device_id=ring.device_id(way.step),
        )

    start = jnp.int32(0)
    for way in ways:
        send(way, start, first(way, place(way, start))).start()

    def pass_on(step: Any, carry: None) -> None:
        for way in ways:
            here = slot(way, step)
            send(way, step - 1, here).wait_recv()
            add(way, place(way, step), here, here)
            send(way, step - 1, here).wait_send()

            @pl.when(step >= SLOTS)
            def _(way: Way = way) -> None:
                # Said before it is waited for, so that devices that wait for each other all go on.
                say_free(ring, way, free)
                wait_free(way, free)

            send(way, step, here).start()

    lax.fori_loop(jnp.int32(1), jnp.int32(ring.devices - 1), pass_on, None)
    last = jnp.int32(ring.devices - 1)
    for way in ways:
        send(way, last - 1, slot(way, last)).wait_recv()
        add(way, place(way, last), slot(way, last), out_ref.at[pl.ds(way.start, way.rows)])
        send(way, last - 1, slot(way, last)).wait_send()


def say_free(ring: Ring, way: Way, free: Any) -> None:
    """To the sender: what was in the slot that you fill next has left."""
    pl.semaphore_signal(free.at[way.number], 1, device_id=ring.device_id(-way.step))


def wait_free(way: Way, free: Any) -> None:
    pl.semaphore_wait(free.at[way.number], 1)


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
    over: dict[str, Any] = {"axis_name": axis_name, "devices": devices, "axis": 0, "config": config}
    return all_gather(reduce_scatter(x, op=op, **over), tiled=True, **over)


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
        pass_parts(ring, ways, x_ref, out_ref, semaphores, lambda way, place, rows: None)
        own.wait()

    return pl.pallas_call(
        kernel,
        out_shape=out_struct((devices, *x.shape), x.dtype, x),
        in_specs=[ANY],
        out_specs=ANY,
        scratch_shapes=[pltpu.SemaphoreType.DMA, *parts_scratch(ways, devices)],
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
    semaphores = sums_scratch(ways)

    def kernel(x_ref: Any, out_ref: Any, slot_ref: Any, *scratch: Any) -> None:
        ring = Ring(names, sizes)
        ring.meet_neighbours()
        tiles = scratch[len(semaphores) :]

        def mine(way: Way, place: Any) -> Any:
            return x_ref.at[place, pl.ds(way.start, way.rows)]

        def add(way: Way, place: Any, sums: Any, target: Any) -> None:
            _add(sums, mine(way, place), target, tile, tiles)

        pass_sums(ring, ways, slot_ref, scratch[: len(semaphores)], mine, add, out_ref)

    slots = (len(ways), SLOTS, ways[0].rows, columns)
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


def implementation(
    fn: Callable[..., Any], refuses: Callable[[Call], str | None], candidates: Sequence[Any]
) -> Implementation:
    """A kernel of the family, behind the op's other implementations until it is measured on a TPU.

    Its config is of the candidates' type, and by default as that type has it.
    """
    config = type(candidates[0])
    return Implementation(
        "pallas_tpu",
        fn,
        platforms=("tpu",),
        refuses=refuses,
        kernel=True,
        config_type=config,
        default_config=lambda call: config(),
        candidates=lambda call: candidates,
    )


ALL_REDUCE = implementation(all_reduce, _sum_refuses, CANDIDATES)
REDUCE_SCATTER = implementation(reduce_scatter, _sum_refuses, CANDIDATES)
ALL_GATHER = implementation(all_gather, _gather_refuses, CANDIDATES)
