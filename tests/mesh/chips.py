"""Stand-ins for TPU chips: what jax and capibara read of a device to put it in order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FakeChip:
    id: int
    coords: tuple[int, ...]
    slice_index: int = 0
    core_on_chip: int = 0
    device_kind: str = "TPU v4"
    platform: str = "tpu"
    process_index: int = 0


def chips(grid: tuple[int, ...], *, slices: int = 1, kind: str = "TPU v4", cores: int = 1) -> list[FakeChip]:
    """The chips of a grid, x fastest, slice after slice."""
    places = [
        (one, (x, y, z), core)
        for one in range(slices)
        for z in range(grid[2])
        for y in range(grid[1])
        for x in range(grid[0])
        for core in range(cores)
    ]
    return [FakeChip(id, coords, one, core, kind) for id, (one, coords, core) in enumerate(places)]
