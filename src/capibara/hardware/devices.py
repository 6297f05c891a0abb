"""What is attached to this process now."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from capibara.hardware.chips import chip_for
from capibara.hardware.facts import Chip, GiB
from capibara.hardware.hosts import host_memory_bytes
from capibara.hardware.topology import Slice, slice_by_grid

__all__ = ["AttachedDevice", "attached", "default", "slice_attached", "summary"]

# jax says "gpu" for the platform of a CUDA device in some places and "cuda" in others.
_PLATFORMS = {"cuda": "gpu", "rocm": "gpu"}


@dataclass(frozen=True)
class AttachedDevice:
    """One jax device, in plain values."""

    platform: str
    """ "tpu", "gpu" or "cpu"."""
    device_kind: str
    index: int
    """jax's device id, the same on every process."""
    process_index: int
    memory_limit_bytes: int | None
    """What programs may allocate on it; for a CPU, the host's memory, which its devices share."""
    coords: tuple[int, ...] | None
    """Position of the chip in its slice; TPUs only."""
    slice_index: int | None
    virtual: bool
    """True for one of several devices that XLA makes of a single host CPU."""

    @property
    def chip(self) -> Chip | None:
        """Facts about the chip; None for a kind outside the table. Of a CPU: measured at the first read."""
        return chip_for(self.device_kind)


def _describe(device: Any, cpus_of_process: Counter[int]) -> AttachedDevice:
    platform = _PLATFORMS.get(device.platform, device.platform)
    coords = getattr(device, "coords", None)
    if platform == "cpu":
        limit: int | None = host_memory_bytes()
    elif device.process_index != _process_index():
        # Another process's memory cannot be asked about from here.
        limit = None
    else:
        limit = (device.memory_stats() or {}).get("bytes_limit")
    return AttachedDevice(
        platform=platform,
        device_kind=device.device_kind,
        index=device.id,
        process_index=device.process_index,
        memory_limit_bytes=limit,
        coords=None if coords is None else tuple(coords),
        slice_index=getattr(device, "slice_index", None),
        virtual=platform == "cpu" and cpus_of_process[device.process_index] > 1,
    )


def _process_index() -> int:
    import jax

    return jax.process_index()


def attached() -> list[AttachedDevice]:
    """Every device of the default backend, over all processes."""
    import jax

    devices = jax.devices()
    cpus = Counter(device.process_index for device in devices if device.platform == "cpu")
    return [_describe(device, cpus) for device in devices]


def default() -> AttachedDevice:
    """The device that a computation runs on when nothing says otherwise."""
    import jax

    config: Any = jax.config  # its attributes are made at run time, so the stubs do not have them
    chosen = config.jax_default_device
    everything = attached()
    if chosen is None or isinstance(chosen, str):
        # A platform name chooses among backends, and its first local device is what jax takes.
        wanted = jax.local_devices(backend=chosen)[0]
    else:
        wanted = chosen
    same = [one for one in everything if one.index == wanted.id and one.device_kind == wanted.device_kind]
    return same[0] if same else _describe(wanted, Counter())


def slice_attached() -> Slice | None:
    """The TPU slice these devices form, from their coordinates; None off TPU or for a part of a slice.

    With several slices (num_slices > 1) it is the first one.
    """
    return _slice_of(attached())


def _slice_of(devices: list[AttachedDevice]) -> Slice | None:
    tpus = [one for one in devices if one.platform == "tpu" and one.coords is not None]
    if not tpus or tpus[0].chip is None:
        return None
    coords = {one.coords for one in tpus if one.slice_index == tpus[0].slice_index and one.coords is not None}
    grid = tuple(max(axis) - min(axis) + 1 for axis in zip(*coords, strict=True))
    try:
        found = slice_by_grid(tpus[0].chip, grid)
    except ValueError:
        # A slice's grid is a rule; a process that sees some chips of a host has no slice to name.
        return None
    return found if found.chips == len(coords) else None


def summary() -> str:
    """What is attached, in one line."""
    return _summary(attached())


def _summary(devices: list[AttachedDevice]) -> str:
    first = devices[0]
    processes = len({one.process_index for one in devices})
    memory = "" if first.memory_limit_bytes is None else f", {first.memory_limit_bytes / GiB:.1f} GiB"
    if first.platform == "cpu":
        if first.virtual and processes == 1:
            return f"{len(devices)} virtual devices on one host CPU{memory} shared"
        if processes > 1:
            return f"{len(devices)} virtual devices on {processes} CPU processes{memory} a host"
        return f"one host CPU{memory}"
    each = f"{memory} each" if memory and len(devices) > 1 else memory
    if first.platform == "tpu":
        found = first.chip
        chips = len(devices) // (found.devices_per_chip if found else 1)
        where = _slice_of(devices)
        named = "" if where is None else f", slice {where.name} ({'x'.join(map(str, where.grid))})"
        hosts = "one host" if processes == 1 else f"{processes} hosts"
        return f"{chips} {first.device_kind} chip{'s' if chips != 1 else ''} on {hosts}{named}{each}"
    return f"{len(devices)} {first.device_kind} GPU{'s' if len(devices) != 1 else ''}{each}"
