"""Dimensions that can only be split together.

Every operation ties dimensions of its arrays: the rows of a product to its operand's rows, the summed dimension of one
operand to that of the other, a stacked weight's leading axis to its loop. Following the ties through a whole program
leaves a few groups: batch, sequence, width, heads, layers. A layout puts mesh axes on groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from capibara.program.graph import Node, Program

__all__ = ["Group", "Groups", "find_groups", "ties_of"]


@dataclass(frozen=True)
class Group:
    """Dimensions of arguments that are split together."""

    id: int
    size: int
    """The smallest of the arguments' dimensions."""
    parts: int
    """The smallest length that the program makes of it inside (a head count, a microbatch): a mesh axis divides it."""
    members: tuple[tuple[int, int], ...]
    """(flat argument, dimension)."""
    roles: frozenset[str]
    """Of the arguments that hold it."""
    stacked: bool = False
    """A loop takes slices along it: layers, or parts of a batch."""
    contracted: frozenset[int] = frozenset()
    """Weights, as flat arguments, whose dimension of this group a product sums over: split, it costs an exchange."""
    free: frozenset[int] = frozenset()
    """Weights, as flat arguments, whose dimension of this group comes out of a product."""
    looked_up: bool = False
    """Rows are taken along it by index: a vocabulary."""
    names: tuple[str, ...] = ()
    """Logical names that the program's own constraints give it."""

    @property
    def batch(self) -> bool:
        return "batch" in self.roles


@dataclass(frozen=True)
class Groups:
    """All groups, and the group of each dimension of each flat argument."""

    all: tuple[Group, ...]
    of: tuple[tuple[int, ...], ...]

    def __iter__(self) -> Iterator[Group]:
        return iter(self.all)

    def __len__(self) -> int:
        return len(self.all)

    def __getitem__(self, number: int) -> Group:
        return self.all[number]


class _Ties:
    """Sets of dimensions, merged one pair at a time."""

    def __init__(self, program: Program) -> None:
        self.start: list[int] = []
        total = 0
        for value in program.values:
            self.start.append(total)
            total += len(value.shape)
        self.parent = list(range(total))
        self.values = program.values

    def find(self, value: int, dim: int) -> int:
        place = self.start[value] + dim
        while self.parent[place] != place:
            self.parent[place] = self.parent[self.parent[place]]
            place = self.parent[place]
        return place

    def tie(self, one: tuple[int, int], other: tuple[int, int]) -> None:
        # A dimension of one is what broadcasting leaves; it says nothing.
        if self.values[one[0]].shape[one[1]] != 1 and self.values[other[0]].shape[other[1]] != 1:
            a, b = self.find(*one), self.find(*other)
            self.parent[max(a, b)] = min(a, b)

    def tie_values(self, one: int, other: int, shift: int = 0) -> None:
        """All dimensions of `other` to those of `one`, which has `shift` more in front."""
        for dim in range(len(self.values[other].shape)):
            self.tie((one, dim + shift), (other, dim))


def ties_of(program: Program) -> _Ties:
    """Which dimensions of the program's values are split together."""
    ties = _Ties(program)
    _tie(program.nodes, ties)
    return ties


def find_groups(program: Program) -> Groups:
    """The groups of a program's arguments, numbered in the order of the arguments."""
    ties = ties_of(program)
    weights = _weights(program)
    facts: dict[int, dict[str, set[int | str]]] = {}
    _facts(program.nodes, ties, weights, facts)

    inside: dict[int, int] = {}
    for value in program.values:
        for dim, length in enumerate(value.shape):
            root = ties.find(value.id, dim)
            inside[root] = min(length, inside.get(root, length))

    roots: dict[int, int] = {}
    members: list[list[tuple[int, int]]] = []
    of = []
    for number, argument in enumerate(program.arguments):
        row = []
        for dim in range(len(argument.shape)):
            root = ties.find(argument.value, dim)
            if root not in roots:
                roots[root] = len(members)
                members.append([])
            members[roots[root]].append((number, dim))
            row.append(roots[root])
        of.append(tuple(row))
    made = []
    for root, number in roots.items():
        known = facts.get(root, {})
        held = tuple(members[number])
        made.append(
            Group(
                number,
                min(program.arguments[a].shape[d] for a, d in held),
                inside[root],
                held,
                frozenset(program.arguments[a].role for a, _ in held),
                bool(known.get("stacked")),
                frozenset(x for x in known.get("contracted", ()) if isinstance(x, int)),
                frozenset(x for x in known.get("free", ()) if isinstance(x, int)),
                bool(known.get("looked_up")),
                tuple(sorted(x for x in known.get("names", ()) if isinstance(x, str))),
            )
        )
    return Groups(tuple(made), tuple(of))


def _tie(nodes: Iterable[Node], ties: _Ties) -> None:
    for node in nodes:
        body = node.body
        if body is not None:
            for start, inner, end, after in body.carried:
                for other in (inner, end, after):
                    ties.tie_values(start, other)
            leading = [(outer, 0) for outer, _ in body.sliced] + [(outer, 0) for _, outer in body.stacked]
            for pair in leading[1:]:
                ties.tie(leading[0], pair)
            for outer, inner in body.sliced:
                ties.tie_values(outer, inner, shift=1)
            for inner, outer in body.stacked:
                ties.tie_values(outer, inner, shift=1)
            _tie(body.nodes, ties)
            continue
        first: dict[int, tuple[int, int]] = {}
        sides = (*node.factors.operands, *node.factors.results)
        for value, side in zip((*node.inputs, *node.outputs), sides, strict=True):
            for dim, factor in enumerate(side):
                if factor < 0 or ties.values[value].shape[dim] == 1:
                    continue
                if factor in first:
                    ties.tie(first[factor], (value, dim))
                else:
                    first[factor] = (value, dim)


def _weights(program: Program) -> dict[int, int]:
    """Value -> the flat argument that it is a form of (converted, sliced, turned): a weight's own copies."""
    found = {a.value: n for n, a in enumerate(program.arguments) if a.role != "batch"}

    def walk(nodes: Iterable[Node]) -> None:
        for node in nodes:
            if node.body is not None:
                for outer, inner in node.body.sliced:
                    if outer in found:
                        found[inner] = found[outer]
                walk(node.body.nodes)
            elif len(node.inputs) == 1 and len(node.outputs) == 1 and node.inputs[0] in found:
                found[node.outputs[0]] = found[node.inputs[0]]

    walk(program.nodes)
    return found


def _facts(
    nodes: Iterable[Node], ties: _Ties, weights: dict[int, int], facts: dict[int, dict[str, set[int | str]]]
) -> None:
    def add(value: int, dim: int, fact: str, what: int | str) -> None:
        facts.setdefault(ties.find(value, dim), {}).setdefault(fact, set()).add(what)

    for node in nodes:
        if node.body is not None:
            for outer in (*(outer for outer, _ in node.body.sliced), *(outer for _, outer in node.body.stacked)):
                add(outer, 0, "stacked", 1)
            _facts(node.body.nodes, ties, weights, facts)
        elif node.marker is not None and node.marker[0] == "names":
            for dim, name in enumerate(node.marker[1]):
                if name is not None:
                    add(node.outputs[0], dim, "names", name)
        elif node.primitive == "gather":
            for dim, factor in enumerate(node.factors.operands[0]):
                if factor in node.factors.reduced:
                    add(node.inputs[0], dim, "looked_up", 1)
        elif node.matrix and not node.backward and len(node.inputs) == 2:
            for value, side in zip(node.inputs, node.factors.operands, strict=True):
                if value in weights:
                    for dim, factor in enumerate(side):
                        if factor >= 0:
                            kind = "contracted" if factor in node.factors.reduced else "free"
                            add(value, dim, kind, weights[value])
