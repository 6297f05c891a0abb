"""Where each value of a program lies on a mesh, from its arguments, its markers and its donated outputs.

A sharding is one dimension for each mesh axis, -1 where the axis does not split the value: (0, 2) on axes (data, model)
is PartitionSpec("data", None, "model"). Walks along the program and back fill in what nobody said, as the compiler's
own pass does; what was said stays. Values that meet with different layouts are settled when the steps are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from capibara.mesh.layout import Layout
from capibara.program.choice import Choice, Sharding, choose, split_dims
from capibara.program.graph import Node, Program

__all__ = ["Placement", "place"]

# Along, back, along, back, along: a constant that only a backward pass reaches is then known to its other readers.
_ROUNDS = 2


class Placement:
    """Axes of a mesh, and the sharding of every value on it."""

    def __init__(self, program: Program, layout: Layout) -> None:
        used = [(name, size) for name, size in layout.mesh.axes.items() if size > 1]
        self.axes = tuple(name for name, _ in used)
        self.sizes = tuple(size for _, size in used)
        self.index = {name: i for i, name in enumerate(self.axes)}
        self.whole: Sharding = (-1,) * len(used)
        self.of: list[Sharding] = [self.whole] * len(program.values)
        self.fixed: set[int] = set(program.local)
        self.notes: list[str] = []
        self.stage = self.index.get("pipeline", -1) if layout.stages > 1 else -1
        """The axis whose chips hold different layers; -1 without a pipeline."""
        self.outputs: dict[int, int] = {}
        """Position of an output -> the donated argument whose memory it takes over."""
        self._program = program
        self._touching = program.touching
        many = 1 + max((numbers[-1] for numbers in self._touching if numbers), default=-1)
        # Whether any of a node's values changed since the node was last visited, going along and going back. A visit
        # that finds them as the last one left them changes nothing, and most of a program settles in the first walk.
        self.due_along, self.due_back = bytearray(many), bytearray(many)
        self._choices: dict[Any, Any] = program.memo.setdefault(("choices", self.sizes), {})

    def put(self, value: int, sharding: Sharding) -> None:
        """Lay a value out, and have the nodes that touch it visited again."""
        self.of[value] = sharding
        for number in self._touching[value]:
            self.due_along[number] = self.due_back[number] = 1

    def entries(self, shape: Sequence[int], entries: Sequence[Any], what: str) -> Sharding:
        """The sharding of one PartitionSpec's entries; an axis that does not divide is left out, and said."""
        sharding = list(self.whole)
        for dim, entry in enumerate(entries):
            ways = 1
            for name in entry if isinstance(entry, tuple) else () if entry is None else (entry,):
                axis = self.index.get(name)
                if axis is None or sharding[axis] >= 0:
                    continue
                if shape[dim] % (ways * self.sizes[axis]):
                    self.notes.append(f"{what}: {shape[dim]} does not divide over {name}, so it stays whole there")
                    continue
                ways *= self.sizes[axis]
                sharding[axis] = dim
        return tuple(sharding)

    def local(self, shape: tuple[int, ...], sharding: Sharding) -> tuple[int, ...]:
        """One chip's part of a shape."""
        if sharding == self.whole:
            return shape
        part = list(shape)
        for axis, dim in enumerate(sharding):
            if dim >= 0:
                part[dim] = -(-part[dim] // self.sizes[axis])
        return tuple(part)

    def ways(self, dims: Sequence[int]) -> int:
        """Over how many chips the axes with a dimension split."""
        total = 1
        for axis, dim in enumerate(dims):
            if dim >= 0:
                total *= self.sizes[axis]
        return total

    def choose(self, node: Node, inputs: tuple[Sharding, ...], outputs: tuple[Sharding, ...]) -> Choice:
        """How the node computes, its operands and results lying so."""
        key = (node.kind, inputs, outputs)
        found = self._choices.get(key)
        if found is None:
            values = self._program.values
            batch = tuple(values[value].from_batch for value in node.inputs)
            weights = tuple(values[value].bytes for value in node.inputs)
            split = choose(node.factors, inputs, outputs, batch, weights, self.sizes)
            factors = node.factors
            found = self._choices[key] = Choice(
                split,
                tuple(split_dims(side, split) for side in factors.operands),
                tuple(split_dims(side, split) for side in factors.results),
                tuple(axis for axis, factor in enumerate(split) if factor >= 0 and factor in factors.reduced),
                self.ways(split),
            )
        return found


def place(program: Program, layout: Layout) -> Placement:
    """Shardings of all values of a program under a layout."""
    placement = Placement(program, layout)
    for number, argument in enumerate(program.arguments):
        placement.put(argument.value, placement.entries(argument.shape, tuple(layout.specs[number]), argument.path))
        placement.fixed.add(argument.value)
    # The compiler's partitioner leaves a constant whole; a chip that needs a part of it reads that part.
    placement.fixed.update(program.constants)
    _donated(program, placement)
    _mark(program.nodes, placement, layout, program)
    for _ in range(_ROUNDS):
        _along(program.nodes, placement)
        _back(program.nodes, placement)
    _along(program.nodes, placement)
    return placement


def _donated(program: Program, placement: Placement) -> None:
    """An output that takes over an argument's memory lies where the argument does."""
    free = [(n, a) for n, a in enumerate(program.arguments) if a.donated]
    for position, output in enumerate(program.outputs):
        value = program.values[output]
        for one in free:
            if one[1].shape == value.shape and one[1].dtype == value.dtype:
                free.remove(one)
                placement.outputs[position] = one[0]
                if output not in placement.fixed:
                    placement.put(output, placement.of[one[1].value])
                    placement.fixed.add(output)
                break


def _mark(nodes: Sequence[Node], placement: Placement, layout: Layout, program: Program) -> None:
    for node in nodes:
        if node.body is not None:
            _mark(node.body.nodes, placement, layout, program)
        elif node.marker is not None and node.marker[0] == "manual":
            _border(node, placement, program)
        elif node.marker is not None and node.marker[0] != "exchange":
            kind, entries = node.marker
            if kind == "names":
                entries = tuple(None if name is None else layout.rules.get(name) for name in entries)
            (result,) = node.outputs
            open_dims = "?" in entries
            plain = tuple(None if entry == "?" else entry for entry in entries)
            sharding = placement.entries(program.values[result].shape, plain, node.name)
            # Nothing of what was asked exists on this mesh: to force a whole copy on every chip is not it.
            if sharding == placement.whole and any(name is not None for name in node.marker[1]):
                continue
            if result not in placement.fixed:
                placement.put(result, sharding)
                if not open_dims:
                    placement.fixed.add(result)


def _border(node: Node, placement: Placement, program: Program) -> None:
    """Outside of a shard_map its operands and results lie as it says."""
    _, entries, mesh = node.marker
    mine = dict(zip(placement.axes, placement.sizes, strict=True))
    if any(mine.get(name, 1) != size for name, size in mesh):
        placement.notes.append(f"{node.name}: a shard_map for the mesh {dict(mesh)} is counted as it was written")
    (value,) = node.inputs if node.primitive == "manual_in" else node.outputs
    sharding = placement.entries(program.values[value].shape, entries, node.name)
    if node.primitive == "manual_out":
        placement.put(value, sharding)
        placement.fixed.add(value)
    elif value not in placement.fixed:
        placement.put(value, sharding)


def _fill(placement: Placement, value: int, wanted: Sharding, shape: tuple[int, ...]) -> None:
    """Take over the axes that the value does not use yet."""
    mine = placement.of[value]
    if mine == wanted or value in placement.fixed or wanted == placement.whole:
        return
    made = list(mine)
    for axis, dim in enumerate(wanted):
        if dim >= 0 and made[axis] < 0:
            ways = placement.sizes[axis]
            for other, taken in enumerate(made):
                if taken == dim:
                    ways *= placement.sizes[other]
            if shape[dim] % ways == 0:
                made[axis] = dim
    wider = tuple(made)
    if wider != mine:
        placement.put(value, wider)


def _toward(placement: Placement, node: Node, back: bool) -> None:
    due = placement.due_back if back else placement.due_along
    if not due[node.number]:
        return
    due[node.number] = 0
    of, whole = placement.of, placement.whole
    ins = tuple([of[v] for v in node.inputs])
    outs = tuple([of[v] for v in node.outputs])
    for sharding in (*ins, *outs):
        if sharding != whole:
            break
    else:
        return
    choice = placement.choose(node, ins, outs)
    wishes = zip(node.inputs, ins, choice.operands) if back else zip(node.outputs, outs, choice.results)  # noqa: B905
    for value, have, wanted in wishes:
        if wanted != have and wanted != whole:
            _fill(placement, value, wanted, placement._program.values[value].shape)
    if node.factors.granted and node.primitive == "gather" and not back:
        _like_indices(placement, node, ins[-1])


def _like_indices(placement: Placement, node: Node, ids: Sharding) -> None:
    """Rows that were looked up lie as their indices do, on axes that the table leaves: even where the table keeps the
    axis while it is read, its rows are partial sums and go where they belong."""
    (result,) = node.outputs
    index, found = node.factors.operands[-1], node.factors.results[0]
    wanted = tuple(
        found.index(index[dim]) if dim >= 0 and index[dim] >= 0 and index[dim] in found else -1 for dim in ids
    )
    _fill(placement, result, wanted, placement._program.values[result].shape)


def _shifted(placement: Placement, sharding: Sharding, by: int) -> Sharding:
    """Of a slice (-1) or a stack (+1) along the leading dimension."""
    return tuple(dim + by if dim >= 0 and dim + by >= 0 else -1 for dim in sharding)


def _along(nodes: Sequence[Node], placement: Placement) -> None:
    of, values = placement.of, placement._program.values
    for node in nodes:
        body = node.body
        if body is None:
            _toward(placement, node, back=False)
            continue
        for start, inner, _, after in body.carried:
            _fill(placement, inner, of[after], values[inner].shape)
            _fill(placement, inner, of[start], values[inner].shape)
        for outer, inner in body.sliced:
            _fill(placement, inner, _shifted(placement, of[outer], -1), values[inner].shape)
        for _ in range(2):  # once more where the end of a trip taught its beginning something
            _along(body.nodes, placement)
            before = [of[inner] for _, inner, _, _ in body.carried]
            for _, inner, end, after in body.carried:
                _fill(placement, inner, of[end], values[inner].shape)
                _fill(placement, after, of[inner], values[after].shape)
            if before == [of[inner] for _, inner, _, _ in body.carried]:
                break
        staged = placement.stage >= 0 and any(of[outer][placement.stage] == 0 for outer, _ in body.sliced)
        for inner, outer in body.stacked:
            wanted = _shifted(placement, of[inner], 1)
            if staged:
                wanted = tuple(0 if axis == placement.stage else dim for axis, dim in enumerate(wanted))
            _fill(placement, outer, wanted, values[outer].shape)


def _back(nodes: Sequence[Node], placement: Placement) -> None:
    of, values = placement.of, placement._program.values
    for node in reversed(nodes):
        body = node.body
        if body is None:
            _toward(placement, node, back=True)
            continue
        for _, inner, end, after in body.carried:
            _fill(placement, inner, of[after], values[inner].shape)
            _fill(placement, end, of[inner], values[end].shape)
        for inner, outer in body.stacked:
            _fill(placement, inner, _shifted(placement, of[outer], -1), values[inner].shape)
        _back(body.nodes, placement)
        for start, inner, _, after in body.carried:
            _fill(placement, after, of[inner], values[after].shape)
            _fill(placement, start, of[inner], values[start].shape)
        for outer, inner in body.sliced:
            _fill(placement, outer, _shifted(placement, of[inner], 1), values[outer].shape)
