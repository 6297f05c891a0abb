"""Devices in the order of a mesh: by where their chips are, for those that say where."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from capibara.errors import rule_error
from capibara.hardware.chips import chip_for
from capibara.hardware.topology import Slice, slice_by_grid
from capibara.mesh.grid_order import coordinates, grid_parts

if TYPE_CHECKING:
    import numpy as np

__all__ = ["DeviceGrid", "device_grid", "in_mesh_order", "slice_box"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeviceGrid:
    """The box of chips that some devices of one slice fill.

    Where a chip is several devices, they are the first dimension: nothing is nearer than the other core of a chip.
    """

    shape: tuple[int, ...]
    wrap: tuple[bool, ...]
    devices: Mapping[tuple[int, ...], Any]
    """Place in the box -> device."""

    def places(self) -> dict[int, tuple[int, ...]]:
        """Of each device, by `id()`: jax's devices hash, stand-ins in tests need not."""
        return {id(device): place for place, device in self.devices.items()}


def slice_box(where: Slice) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """The grid of a slice's devices and which dimensions wrap, as `device_grid` finds it on the devices themselves."""
    return (where.chip.devices_per_chip, *where.grid), (False, *where.wrap)


def device_grid(devices: Sequence[Any]) -> DeviceGrid | None:
    """The box that these devices fill; None where they do not say where they are, or leave holes."""
    if not devices or any(getattr(device, "coords", None) is None for device in devices):
        return None
    places = [(getattr(device, "core_on_chip", 0) or 0, *device.coords) for device in devices]
    low = tuple(map(min, zip(*places, strict=True)))
    shape = tuple(max(axis) - least + 1 for axis, least in zip(zip(*places, strict=True), low, strict=True))
    filled = {
        tuple(at - least for at, least in zip(place, low, strict=True)): device
        for place, device in zip(places, devices, strict=True)
    }
    if len(filled) != len(devices) or math.prod(shape) != len(devices):
        return None
    return DeviceGrid(shape, (False, *_wrap(devices[0].device_kind, shape[1:])), filled)


def _wrap(device_kind: str, grid: tuple[int, ...]) -> tuple[bool, ...]:
    found = chip_for(device_kind)
    try:
        whole = None if found is None else slice_by_grid(found, grid)
    except ValueError:  # a part of a slice, whose ends are not linked to each other
        whole = None
    if whole is None:
        return (False,) * len(grid)
    # A slice names its axes by size; devices may have them in another order, and one of length 1 in addition.
    by_size = dict(zip(whole.grid, whole.wrap, strict=True))
    return tuple(by_size.get(size, False) for size in grid)


def in_mesh_order(shape: tuple[int, ...], devices: Sequence[Any]) -> np.ndarray:
    """The devices as an array of the mesh's shape, neighbours on the mesh being neighbours in the hardware.

    Chips of several slices: the first mesh axes run across slices, which only the hosts' network joins. GPUs go by
    their id, which follows hosts; devices that are nowhere (virtual ones) stay as they come.
    """
    import numpy as np

    if devices[0].platform != "tpu":
        ordered = sorted(devices, key=lambda one: one.id) if devices[0].platform == "gpu" else list(devices)
        return _object_array(ordered).reshape(shape)
    slices: dict[Any, list[Any]] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", 0) or 0, []).append(device)
    outer, inner = _across_slices(shape, len(slices))
    boxes = [_on_grid(inner, slices[index]) for index in sorted(slices)]
    if len({box.size for box in boxes}) > 1:
        raise rule_error(
            "A mesh over several slices takes equally many chips of each",
            ", ".join(f"{len(slices[index])} of slice {index}" for index in sorted(slices)),
            "pass devices= with as many of each slice",
        )
    # [a0, a1, ..., b0, b1, ...] -> [a0, b0, a1, b1, ...]: the part across slices is the outer part of each axis.
    stacked = np.stack(boxes).reshape(outer + inner)
    interleaved = np.arange(2 * len(shape)).reshape(2, -1).T.ravel()
    return stacked.transpose(interleaved).reshape(shape)


def _across_slices(shape: tuple[int, ...], slices: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """How much of each mesh axis runs across slices, the first axes taking all they can, and how much inside of one."""
    outer = []
    left = slices
    for size in shape:
        outer.append(math.gcd(size, left))
        left //= outer[-1]
    if left != 1:
        raise rule_error(
            f"A mesh over {slices} slices has axes that divide by {slices} together",
            f"a mesh of {_text(shape)}",
            "choose sizes that do, or pass the devices= of one slice",
        )
    return tuple(outer), tuple(size // part for size, part in zip(shape, outer, strict=True))


def _on_grid(shape: tuple[int, ...], devices: list[Any]) -> np.ndarray:
    found = device_grid(devices)
    if math.prod(shape) != len(devices):
        return _object_array(devices)  # the caller compares the slices and says what is wrong
    if found is None:
        _log.warning(
            "mesh %s keeps the devices as they come: the %d chips do not fill a box of the grid",
            _text(shape),
            len(devices),
        )
        return _object_array(devices).reshape(shape)
    parts = [part for axis in grid_parts(shape, found.shape, found.wrap) for part in axis]
    if any(part.size < found.shape[part.dim] for part in parts):
        # Right, but two mesh axes then have the links of one dimension between them: said, so that nobody has to find
        # out by measuring.
        _log.warning("mesh %s splits a hardware axis of the grid %s", _text(shape), _text(found.shape[1:]))
    places = coordinates(shape, found.shape, found.wrap).reshape(-1, len(found.shape))
    return _object_array([found.devices[tuple(map(int, place))] for place in places]).reshape(shape)


def _object_array(devices: Sequence[Any]) -> np.ndarray:
    import numpy as np

    array = np.empty(len(devices), dtype=object)
    array[:] = devices
    return array


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
