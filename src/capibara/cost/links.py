"""Seconds of an exchange among chips: mesh axes laid on the physical grid, rings, lines, switches and slices.

`grid_order` says which dimensions of the grid a mesh axis takes, which is where `MeshConfig.build` puts it. Along one
that wraps, data goes both ways round: two links. Along a line the chip at the end has one. A dimension shared by two
mesh axes gives its inner part a line of neighbours and its outer part the same wires with others on them; a ring cut in
two is folded (`grid_order`), so that its halves meet at both ends.
Bandwidths, latencies and shares of the peak are the chip's row's; nothing here was run on a TPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from capibara.errors import rule_error, unknown_name
from capibara.hardware.facts import Chip
from capibara.hardware.topology import Slice
from capibara.mesh.device_order import slice_box
from capibara.mesh.grid_order import grid_parts
from capibara.mesh.mesh import MeshConfig

__all__ = ["KINDS", "Exchange", "Segment", "Wiring", "exchange", "ring_seconds", "wire"]

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")
GPUS_A_HOST = 8
_DCN_LATENCY = 50e-6
_PCIE_BANDWIDTH = 50e9


@dataclass(frozen=True)
class Segment:
    """The part of one grid dimension that one mesh axis runs along."""

    size: int
    wraps: bool
    stride: int = 1
    """From a place to the next, in chips: so many groups share each wire (of a folded ring half as many)."""
    switched: bool = False
    """Every chip reaches every other at its full rate (NVLink through switches, or a data centre's network)."""

    @property
    def ways(self) -> int:
        """Links of the chip that is worst off."""
        return 1 if self.switched or not self.wraps or self.size < 3 else 2

    @property
    def folded(self) -> bool:
        """The two halves of a ring, side by side: pairs meet over the links at both ends, half of them at each."""
        return self.wraps and self.size == 2 and self.stride > 1

    @property
    def sharing(self) -> float:
        """Groups on the busiest link, when every place sends to the next."""
        return self.stride / 2 if self.folded else self.stride

    @property
    def hops(self) -> int:
        """To the chip that is farthest away."""
        if self.switched:
            return 1
        if self.folded:  # two chips that face each other are an odd number of hops apart
            return self.stride - 1 + self.stride % 2
        return self.stride * (self.size // 2 if self.wraps else self.size - 1)


@dataclass(frozen=True)
class Wiring:
    """Where each mesh axis lies on the hardware."""

    chip: Chip
    segments: tuple[tuple[str, tuple[Segment, ...]], ...]
    """Axis -> its parts within one slice or one host."""
    across: tuple[tuple[str, int], ...]
    """Axis -> its factor over several slices or hosts, by the data centre's network."""
    link: str
    link_bandwidth: float
    hop_seconds: float

    def inner(self, axes: Sequence[str]) -> tuple[Segment, ...]:
        return tuple(s for name, parts in self.segments if name in axes for s in parts if s.size > 1)

    def outer(self, axes: Sequence[str]) -> int:
        return math.prod(size for name, size in self.across if name in axes)


@dataclass(frozen=True)
class Exchange:
    """What one collective takes."""

    seconds: float
    """At the links' full bandwidth."""
    latency: float
    sent: float
    """Bytes that one chip sends."""
    link: str


def _on_grid(mesh: MeshConfig, shape: Sequence[int], where: Slice) -> tuple[tuple[str, tuple[Segment, ...]], ...]:
    grid, wrap = slice_box(where)
    return tuple(
        (
            name,
            tuple(
                # A cut part goes round only where it reaches from one end of the dimension to the other.
                Segment(part.size, wrap[part.dim] and part.size * part.stride == grid[part.dim], part.stride)
                for part in parts
            ),
        )
        for name, parts in zip(mesh.axis_names, grid_parts(shape, grid, wrap), strict=True)
    )


@functools.lru_cache(maxsize=512)
def wire(mesh: MeshConfig, where: Slice | Chip, num_slices: int = 1, hop_seconds: float = 1e-6) -> Wiring:
    """The mesh on a slice of TPUs (`num_slices` of them), or on GPUs of one kind, eight a host.

    Over several slices or hosts the mesh's first axes run across them.
    """
    chip = where.chip if isinstance(where, Slice) else where
    if num_slices < 1:
        raise rule_error("num_slices is a whole number from 1 up", repr(num_slices), "use 1")
    tpu = chip.platform == "tpu"
    if isinstance(where, Slice) and tpu:
        here, across = where.devices, num_slices
    elif num_slices > 1:
        raise rule_error("Only TPUs come in slices", f"num_slices={num_slices} of {chip.name}", "leave it out")
    else:
        wanted = where.chips if isinstance(where, Slice) else mesh.size
        here = min(wanted, GPUS_A_HOST)
        across = -(-wanted // here)
    if mesh.size != here * across:
        raise rule_error(
            f"A mesh on {where.name if isinstance(where, Slice) else chip.name} has {here} devices"
            + (f" in each of {across}" if across > 1 else ""),
            f"a mesh of {'x'.join(map(str, mesh.shape))} = {mesh.size}",
            "change a size of the mesh, or choose another slice",
        )
    shape, outer = _across(mesh, across)
    if isinstance(where, Slice) and tpu:
        segments = _on_grid(mesh, shape, where)
    else:
        segments = tuple(
            (name, (Segment(size, False, switched=True),) if size > 1 else ())
            for name, size in zip(mesh.axis_names, shape, strict=True)
        )
    link, bandwidth = _link(chip)
    return Wiring(chip, segments, outer, link, bandwidth, hop_seconds)


def _across(mesh: MeshConfig, count: int) -> tuple[tuple[int, ...], tuple[tuple[str, int], ...]]:
    shape, outer = list(mesh.shape), []
    for axis, name in enumerate(mesh.axis_names):
        factor = math.gcd(shape[axis], count)
        if factor > 1:
            shape[axis] //= factor
            count //= factor
            outer.append((name, factor))
    return tuple(shape), tuple(outer)


def _link(chip: Chip) -> tuple[str, float]:
    if chip.platform == "tpu":
        return "ICI", chip.ici_link_bandwidth or 45e9
    if chip.platform == "gpu" and chip.ici_link_bandwidth:
        return "NVLink", chip.ici_link_bandwidth
    return "PCIe", _PCIE_BANDWIDTH


def ring_seconds(chip: Chip, sent: float) -> float:
    """The least that sending so many bytes takes, round a ring of neighbours: on a TPU both ways at once.

    >>> from capibara.hardware import chip
    >>> ring_seconds(chip("v4"), 90e9)
    1.0
    """
    _, bandwidth = _link(chip)
    return sent / bandwidth / (2 if chip.platform == "tpu" else 1)


def exchange(wiring: Wiring, kind: str, axes: Sequence[str], size: float) -> Exchange:
    """One collective along mesh axes. `size` is one chip's operand in bytes; of an all_gather, its result."""
    if kind not in KINDS:
        raise unknown_name("collective", kind, KINDS)
    known = [name for name, _ in wiring.segments]
    for axis in axes:
        if axis not in known:
            raise unknown_name("mesh axis", axis, known)
    inner, outer = wiring.inner(axes), wiring.outer(axes)
    inside = math.prod(segment.size for segment in inner)
    if inside * outer == 1:
        return Exchange(0.0, 0.0, 0.0, wiring.link)
    seconds, sent, latency = _within(wiring, kind, inner, size)
    if outer == 1:
        return Exchange(seconds, latency, sent, wiring.link)
    # Between slices only the part goes that the chips of one slice have not already shared out among them.
    part = size / inside if kind in ("all_reduce", "reduce_scatter", "all_gather") else size
    far_bytes = _sent(kind, outer, part)
    far = far_bytes / wiring.chip.network_bandwidth
    # The part inside moves what the part outside left or brings: the whole of it, for either order.
    return Exchange(seconds + far, latency + _DCN_LATENCY * _rounds(kind), sent + far_bytes, "DCN")


def _rounds(kind: str) -> int:
    return 2 if kind == "all_reduce" else 1


def _sent(kind: str, count: int, size: float) -> float:
    """Bytes that one of `count` chips sends at the least."""
    if kind == "permute":
        return size
    return _rounds(kind) * size * (count - 1) / count


def _within(wiring: Wiring, kind: str, segments: tuple[Segment, ...], size: float) -> tuple[float, float, float]:
    """(seconds, bytes sent by one chip, latency) inside one slice or one host."""
    count = math.prod(segment.size for segment in segments)
    if count == 1:
        return 0.0, 0.0, 0.0
    bandwidth = wiring.link_bandwidth
    sent = _sent(kind, count, size)
    latency = _rounds(kind) * wiring.hop_seconds * sum(segment.hops for segment in segments)
    if all(segment.switched for segment in segments):
        return sent / bandwidth, sent, latency
    rates = [segment.ways / segment.sharing * bandwidth for segment in segments]
    if kind == "permute":
        # To a neighbour: one link, and nobody else on it unless a dimension is shared.
        return size * max(segment.sharing for segment in segments) / bandwidth, sent, latency
    if kind == "all_to_all":
        # Half of the chips send half of what they hold across the middle of each dimension.
        cut = max(segment.size * size / 4 / rate for segment, rate in zip(segments, rates, strict=True))
        return max(cut, sent / sum(rates)), sent, latency
    # Each dimension's links carry their share at the same time, so the rates add up.
    return sent / sum(rates), sent, latency
