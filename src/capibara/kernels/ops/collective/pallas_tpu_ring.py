"""What the TPU ring kernels share: who the neighbours are, the barrier at the start, tiles, and the sizes taken.

The devices of the axes form a ring in the order of their index. All kernels here end on a device only after data of
every other device of the ring has come through it. So no device can begin a second kernel while another of the ring is
still before the barrier of the first, and one barrier semaphore serves all rings of the same devices. A ring over other
mesh axes has neighbours of which that does not hold, and a semaphore of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from capibara.errors import rule_error
from capibara.kernels.core import context
from capibara.kernels.core.spec import Call, Operand

LANES = 128
# A semaphore for each step and direction.
MOST_DEVICES = 512
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
        flat, found = self.place(offset), dict[str, Any]()
        for name, size in zip(reversed(self.names), reversed(self.sizes), strict=True):
            found[name] = lax.rem(flat, jnp.int32(size))
            flat = lax.div(flat, jnp.int32(size))
        return found

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
    return max(size for size in _multiples(unit, max(unit, min(length, most))) if length % size == 0)


def _multiples(unit: int, most: int) -> Iterator[int]:
    return iter(range(unit, most + 1, unit))


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
