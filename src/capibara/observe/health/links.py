"""Exchanges along every axis of a mesh, their sums compared, and the time of each link between neighbours.

A link is two neighbours: on a TPU, chips beside each other in the slice's grid; elsewhere, devices beside each other
on a ring along a mesh axis. First all links of an axis carry data at once, which takes as long as the slowest of them
does. Where the chip's row has a bandwidth and they reach enough of it, none is slow and none is timed alone, so that a
pod of thousands takes two programs an axis; otherwise each is timed alone, and held against the others and the row.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capibara.hardware.chips import chip_for
from capibara.hardware.devices import slice_attached
from capibara.hardware.facts import MiB
from capibara.hardware.topology import Slice
from capibara.observe.health.report import Finding, NoAnswer, device_name, within
from capibara.processes import gather

__all__ = [
    "Link",
    "Measure",
    "Reduce",
    "all_reduce",
    "check_links",
    "check_sums",
    "links_of",
    "permute_seconds",
    "whole_mesh",
]

Measure = Callable[[Sequence[tuple[Any, Any]], int], float]
"""Pairs (from, to) that send at once, bytes each -> seconds."""
Reduce = Callable[[Mesh, str, np.ndarray], Any]
"""A mesh, one of its axes, a number for each device -> their sums along the axis, sharded over the mesh."""

# A link at half of its speed shows as about a half of the others; half of what a good one reaches of its row is 0.35 to
# 0.45 (`Efficiency.links`).
_OF_THE_OTHERS = 0.6
_OF_THE_TABLE = 0.5
_CONFIRMATIONS = 6
_PAUSE_S = 0.05
_TIMINGS = 5
_BYTES = {"cpu": MiB}
_BYTES_OF_A_CHIP = 64 * MiB


@dataclass(frozen=True)
class Link:
    """Two neighbours along a mesh axis."""

    axis: str
    first: Any
    second: Any
    table: float | None
    """Bytes a second one way by the chip's row; None where it has none, and between hosts of GPUs."""
    bandwidth: float | None = None
    """As measured, of the slower way; None where it was only measured together with the others of its axis."""

    @property
    def name(self) -> str:
        return f"link {self.first.id}-{self.second.id} of axis {self.axis!r}"

    def as_dict(self) -> dict[str, Any]:
        ends = [self.first.id, self.second.id]
        return {"axis": self.axis, "devices": ends, "bytes_per_second": self.bandwidth, "table": self.table}


def whole_mesh(devices: Sequence[Any]) -> Mesh:
    """A mesh of all devices: the chips' grid on a TPU slice, a single axis elsewhere."""
    where = slice_attached() if devices[0].platform == "tpu" else None
    if where is None or len(devices) != where.devices:
        return Mesh(np.asarray(devices, dtype=object), ("devices",))
    ordered = sorted(devices, key=lambda device: (*device.coords, getattr(device, "core_on_chip", 0)))
    grid = np.asarray(ordered, dtype=object).reshape(*where.grid, -1)
    names = ("x", "y", "z")[: len(where.grid)]
    return Mesh(grid[..., 0], names) if grid.shape[-1] == 1 else Mesh(grid, (*names, "core"))


def links_of(mesh: Mesh, where: Slice | None = None) -> list[Link]:
    """The links along each axis of a mesh; `where` is the TPU slice that it lies on, the attached one by default."""
    if where is None and mesh.devices.flat[0].platform == "tpu":
        where = slice_attached()
    found = []
    for axis, name in enumerate(mesh.axis_names):
        lines = np.moveaxis(mesh.devices, axis, -1).reshape(-1, mesh.devices.shape[axis])
        for line in lines:
            ring = [*itertools.pairwise(line)]
            if len(line) > 2:
                ring.append((line[-1], line[0]))
            found += [Link(str(name), a, b, _table(a, b)) for a, b in ring if _beside(a, b, where)]
    return found


def _beside(a: Any, b: Any, where: Slice | None) -> bool:
    """Whether two chips have a link: off TPUs every two have one, or none, or a switch."""
    if a.platform != "tpu" or getattr(a, "coords", None) is None:
        return True
    if getattr(a, "slice_index", 0) != getattr(b, "slice_index", 0):
        return False
    apart = {dim: abs(x - y) for dim, (x, y) in enumerate(zip(a.coords, b.coords, strict=True)) if x != y}
    if len(apart) != 1:
        return False
    [(dim, distance)] = apart.items()
    wraps = where is not None and dim < len(where.grid) and where.wrap[dim]
    return distance == 1 or (wraps and where is not None and distance == where.grid[dim] - 1)


def _table(a: Any, b: Any) -> float | None:
    if a.platform == "cpu" or (a.platform != "tpu" and a.process_index != b.process_index):
        return None
    chip = chip_for(a.device_kind)
    return None if chip is None else chip.ici_link_bandwidth


def permute_seconds(pairs: Sequence[tuple[Any, Any]], size: int) -> float:
    """The shortest of a few runs in which each pair's first sends its second so many bytes; 0 for a process that has
    none of the devices."""
    devices = list(dict.fromkeys(device for pair in pairs for device in pair))
    mine = jax.process_index()
    if not any(device.process_index == mine for device in devices):
        return 0.0
    mesh = Mesh(np.asarray(devices, dtype=object), ("ends",))
    split = NamedSharding(mesh, PartitionSpec("ends"))
    order = [(devices.index(a), devices.index(b)) for a, b in pairs]
    words = max(size // 4, 1)
    block = np.ones((1, words), np.float32)
    payload = jax.make_array_from_callback((len(devices), words), split, lambda _: block)
    spec = PartitionSpec("ends")
    send = jax.jit(
        jax.shard_map(lambda x: jax.lax.ppermute(x, "ends", order), mesh=mesh, in_specs=spec, out_specs=spec)
    )
    jax.block_until_ready(send(payload))
    times = []
    for _ in range(_TIMINGS):
        began = time.perf_counter()
        jax.block_until_ready(send(payload))
        times.append(time.perf_counter() - began)
    return min(times)


def all_reduce(mesh: Mesh, axis: str, numbers: np.ndarray) -> Any:
    """Sums along the axis."""
    spec = PartitionSpec(*mesh.axis_names)
    placed = jax.make_array_from_callback(numbers.shape, NamedSharding(mesh, spec), lambda index: numbers[index])
    return jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, axis) + 0 * x,  # each keeps its copy: a device that got another sum shows
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
        )
    )(placed)


def check_sums(mesh: Mesh, reduce: Reduce = all_reduce, deadline_s: float = 120.0) -> list[Finding]:
    """An all-reduce of whole numbers along each axis: who has another sum than the right one."""
    numbers = 1 + np.arange(mesh.devices.size, dtype=np.float32).reshape(mesh.devices.shape)
    found = []
    for axis, name in enumerate(map(str, mesh.axis_names)):
        if mesh.devices.shape[axis] == 1:
            continue
        right = np.broadcast_to(numbers.sum(axis, keepdims=True), numbers.shape)

        def wrong(name: str = name, right: np.ndarray = right) -> list[tuple[Any, float, float]]:
            shards = reduce(mesh, name, numbers).addressable_shards
            told = [(one.device, float(np.ravel(one.data)[0]), float(np.ravel(right[one.index])[0])) for one in shards]
            return [one for one in told if one[1] != one[2]]

        try:
            for device, got, sum_ in within(deadline_s, wrong):
                found.append(
                    Finding(
                        "collective",
                        f"device {device.id}",
                        f"{device_name(device)} has a wrong sum after an all-reduce along axis {name!r}: {got:g} and "
                        f"not {sum_:g}",
                        "leave this chip out, and have its host replaced",
                        evidence={"axis": name, "got": got, "right": sum_},
                    )
                )
        except NoAnswer as silent:
            found.append(_stuck(f"axis {name!r}", f"an all-reduce along axis {name!r} gave {silent}"))
            break  # what comes after it would wait behind it
    return found


def _stuck(subject: str, what: str) -> Finding:
    fix = "look for a process or chip that hangs: capibara doctor on each host; then restart it"
    return Finding("link", subject, what, fix)


@dataclass
class _Timer:
    """Measures with every process, so that all of them see the same seconds and go the same way."""

    measure: Measure
    size: int
    deadline_s: float
    now: str = ""

    def bandwidth(self, pairs: Sequence[tuple[Any, Any]]) -> float:
        seconds = within(self.deadline_s, lambda: self.measure(pairs, self.size))
        return self.size / max(max(gather("health links", seconds, self.deadline_s)), 1e-12)

    def link(self, link: Link) -> Link:
        self.now = link.name
        told = self.bandwidth([(link.first, link.second), (link.second, link.first)])
        return replace(link, bandwidth=max(told, link.bandwidth or 0.0))

    def axis(self, name: str, links: Sequence[Link]) -> float:
        self.now = f"axis {name!r}"
        there = self.bandwidth([(link.first, link.second) for link in links])
        return min(there, self.bandwidth([(link.second, link.first) for link in links]))


def check_links(
    mesh: Mesh, measure: Measure = permute_seconds, deadline_s: float = 120.0, size: int | None = None
) -> tuple[list[Finding], list[Link], dict[str, float]]:
    """Slow links by name; every link as measured; and the bandwidth of each axis with all of its links at work.

    Args:
      mesh: of all devices that are to be tried. Every process that has some of them calls this.
      measure: what times pairs.
      deadline_s: seconds that one measurement gets.
      size: bytes that go over a link at once; a MiB on a CPU, 64 elsewhere.
    """
    platform = mesh.devices.flat[0].platform
    timer = _Timer(measure, size or _BYTES.get(platform, _BYTES_OF_A_CHIP), deadline_s)
    axes: dict[str, float] = {}
    measured: list[Link] = []
    links = links_of(mesh)
    try:
        for name in dict.fromkeys(link.axis for link in links):
            along = [link for link in links if link.axis == name]
            axes[name] = timer.axis(name, along)
            # Above this share of the row nobody is below it of the others either, which reach the row at most.
            enough = all(link.table is not None and axes[name] >= _OF_THE_OTHERS * link.table for link in along)
            measured += along if enough else [timer.link(link) for link in along]
        # A machine that does something else now and then makes any link slow once.
        for again in range(_CONFIRMATIONS):
            slow = {id(link) for link, *_ in _slow(measured)}
            if not slow:
                break
            time.sleep(_PAUSE_S * again)
            measured = [timer.link(link) if id(link) in slow else link for link in measured]
    except NoAnswer as silent:
        return [_stuck(timer.now, f"{timer.now} gave {silent}: data sent over it did not arrive")], measured, axes
    return [_slow_link(*one) for one in _slow(measured)], measured, axes


def _slow(links: Sequence[Link]) -> Iterator[tuple[Link, float, str]]:
    """Links that are slow, what they are held against, and in words what that is."""
    kinds: dict[tuple[float | None, bool], list[Link]] = {}
    for link in links:
        # Without a row to hold them against, what stays inside of a host is another kind than what leaves it.
        leaves = link.table is None and link.first.process_index != link.second.process_index
        kinds.setdefault((link.table, leaves), []).append(link)
    for (table, _), alike in kinds.items():
        timed = [link.bandwidth for link in alike if link.bandwidth is not None]
        if not timed:
            continue
        median = statistics.median(timed)
        for link in alike:
            if link.bandwidth is None:
                continue
            if table is not None and link.bandwidth <= _OF_THE_TABLE * table:
                yield link, table, "the chip's published"
            elif link.bandwidth <= _OF_THE_OTHERS * median:
                yield link, median, "the median of the others'"


def _slow_link(link: Link, against: float, what: str) -> Finding:
    got = link.bandwidth or 0.0
    return Finding(
        "link",
        link.name,
        f"{link.name}, between {device_name(link.first)} and {device_name(link.second)}, is slow: "
        f"{got / 1e9:.3g} GB/s, {got / against:.0%} of {what} {against / 1e9:.3g} GB/s",
        "ask for another slice, or lay the busiest mesh axis elsewhere; report the link to whoever runs the machines",
        evidence={"axis": link.axis, "devices": [link.first.id, link.second.id], "bytes_per_second": got},
    )
