"""A traced program as a graph: values, the nodes that make them, and loops; whole shapes, nothing split yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from capibara.program.groups import Groups, find_groups
from capibara.program.labels import shown

if TYPE_CHECKING:
    from capibara.program.factors import Factors

__all__ = ["Argument", "Body", "Node", "Program", "Value"]


@dataclass(slots=True)
class Value:
    """An array of the program."""

    id: int
    shape: tuple[int, ...]
    dtype: str
    itemsize: float
    name: str = ""
    from_batch: bool = False
    """It depends on an argument of the batch: an activation rather than a weight."""

    @property
    def bytes(self) -> float:
        total = self.itemsize
        for size in self.shape:
            total *= size
        return total


@dataclass(frozen=True)
class Argument:
    """One flat argument: a leaf of the arguments' pytree."""

    value: int
    path: str
    shape: tuple[int, ...]
    dtype: str
    role: str
    donated: bool


@dataclass(slots=True)
class Body:
    """What a loop repeats. Values that it only reads from outside are used by their own ids."""

    nodes: list[Node]
    trips: int
    carried: list[tuple[int, int, int, int]]
    """(value before the loop, in the body, at the body's end, after the loop); -1 where nobody reads it after."""
    sliced: list[tuple[int, int]]
    """(outside, in the body): a slice of the leading axis each trip."""
    stacked: list[tuple[int, int]]
    """(in the body, outside)."""
    until: int | None = None
    """What decides on another trip, where that is computed."""


@dataclass(slots=True)
class Node:
    """One operation on whole arrays."""

    primitive: str
    name: str
    inputs: tuple[int, ...]
    """Arrays it reads; literals are not among them."""
    outputs: tuple[int, ...]
    factors: Factors
    """How its operands' and results' dimensions belong together."""
    flops: float = 0.0
    idle: float = 0.0
    """Of the flops, those of which no result comes."""
    matrix: bool = False
    dtype: str = "float32"
    mnk: tuple[tuple[int, ...], ...] = ()
    """Of a matrix product: the factors that make up batch, m, n and k."""
    moved: tuple[float, ...] | None = None
    """How often the bytes of each input and output move, where it is not once each."""
    bytes: float | None = None
    """Bytes moved, where the operation brings its own count."""
    op: str | None = None
    vector_flops: float = 0.0
    """Of the flops of a kernel that multiplies matrices, what is other work."""
    call: Any = None
    """Of an op's kernel: the `Call` that it computes, on whole arrays."""
    backward: bool = False
    recompute: bool = False
    marker: Any = None
    """Of a constraint: ("names", logical names) or ("axes", entries of a PartitionSpec). At the border of a shard_map:
    ("manual", entries, axes and sizes of its mesh). Of an exchange that the program has: ("exchange", kind, axes)."""
    body: Body | None = None
    kind: int = -1
    """Nodes of one kind are split alike when their operands are."""
    number: int = -1
    """Its place among all nodes of the program, those of loops included: see `Program.touching`."""

    @property
    def title(self) -> str:
        """What it is and where: for messages."""
        return f"{shown(self.primitive)} {self.name}".rstrip()


@dataclass(frozen=True)
class Program:
    """A function traced on shapes."""

    nodes: tuple[Node, ...]
    values: tuple[Value, ...]
    arguments: tuple[Argument, ...]
    outputs: tuple[int, ...]
    """Values by id; a constant of the program is one too."""
    constants: tuple[int, ...]
    notes: tuple[str, ...] = ()
    name: str = ""
    local: frozenset[int] = frozenset()
    """Values inside of shard_map: one chip's already."""
    asks_for_mesh: bool = False
    """Whether the function asked which mesh it runs on (`capibara.mesh.traced_for`): for another it is another."""
    places: frozenset[str] | None = frozenset()
    """Logical axes whose rules it went by then; None for all."""
    memo: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    """What `spread` found out for one mesh and can use for the next layout."""

    @property
    def flops(self) -> float:
        """Operations on the matrix units, recomputation included; of a shard_map's body one chip's."""
        return _flops(self.nodes, 1, recomputed=True)

    @property
    def model_flops(self) -> float:
        """Operations on the matrix units without recomputation: what MFU counts."""
        return _flops(self.nodes, 1, recomputed=False)

    @cached_property
    def groups(self) -> Groups:
        """Dimensions that can only be split together: see `capibara.program.groups`."""
        return find_groups(self)

    @cached_property
    def touching(self) -> tuple[tuple[int, ...], ...]:
        """For each value the numbers of the nodes that read or make it; the nodes are numbered here."""
        found: list[list[int]] = [[] for _ in self.values]
        _number(self.nodes, found, 0)
        return tuple(map(tuple, found))

    @cached_property
    def uses(self) -> dict[int, int]:
        """How many nodes, loops and outputs read each value."""
        counts = dict.fromkeys(self.outputs, 1)
        _count(self.nodes, counts)
        return counts


def _flops(nodes: Any, times: int, recomputed: bool) -> float:
    total = 0.0
    for node in nodes:
        if node.body is not None:
            total += _flops(node.body.nodes, times * node.body.trips, recomputed)
        elif node.matrix and (recomputed or not node.recompute):
            total += times * (node.flops if recomputed else node.flops - node.idle)
    return total


def _number(nodes: Any, touching: list[list[int]], first: int) -> int:
    for node in nodes:
        node.number = first
        first += 1
        if node.body is not None:
            first = _number(node.body.nodes, touching, first)
            continue
        for value in {*node.inputs, *node.outputs}:
            touching[value].append(node.number)
    return first


def _count(nodes: Any, counts: dict[int, int]) -> None:
    for node in nodes:
        for value in node.inputs:
            counts[value] = counts.get(value, 0) + 1
        if node.body is not None:
            _count(node.body.nodes, counts)
            for value in (*(end for _, _, end, _ in node.body.carried), *(inner for inner, _ in node.body.stacked)):
                counts[value] = counts.get(value, 0) + 1
