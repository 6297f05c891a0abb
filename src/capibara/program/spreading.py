"""`spread`: what one chip of a mesh does when a traced program runs there under a layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from capibara.mesh.layout import Layout
from capibara.program.chip import Buffer, ChipProgram, Collective, Loop, Step
from capibara.program.choice import Choice, Sharding
from capibara.program.graph import Body, Node, Program
from capibara.program.layout_check import check_layout
from capibara.program.ledger import Ledger

__all__ = ["spread"]

# Worth a word.
# A thousandth of a chip's memory: tables of rotary positions are smaller, and nobody would split them.
_LARGE_CONSTANTS = 32 << 20
_CONSTRAINTS = frozenset({"logical_axes", "sharding_constraint"})
# They compute nothing: their result is their operand.
_SAME = frozenset({"logical_axes", "sharding_constraint", "stop_gradient", "optimization_barrier", "name", "pvary"})


def spread(program: Program, layout: Layout) -> ChipProgram:
    """One chip's steps, buffers and exchanges, deterministically.

    Where two layouts meet, the operand that is the smaller or no activation moves. Partial sums become a
    reduce_scatter where the result is split along that axis, else an all_reduce. A gathered copy is used by all later
    readers of the same loop body.
    """
    check_layout(program, layout)
    return _Writer(program, layout).written()


class _Writer(Ledger):
    loose = False
    """Whether the compiler may lay activations out otherwise."""

    def __init__(self, program: Program, layout: Layout) -> None:
        super().__init__(program, layout)
        # Steps that exchange nothing, by how their node's arrays lie: the next layout on such a mesh has most of them.
        self._plain: dict[Any, Step] = program.memo.setdefault(("steps", self.at.sizes), {})

    def written(self) -> ChipProgram:
        program = self.program
        hosted = frozenset(self.layout.host)
        for number, argument in enumerate(program.arguments):
            self.own(argument.value, argument=number, host=number in hosted)
        for value in program.constants:
            self.own(value)
        for number in sorted(hosted):
            self.fetch(program.arguments[number].value)
        self._nodes(program.nodes)
        outputs = []
        for position, value in enumerate(program.outputs):
            source = self.at.outputs.get(position)
            wanted = self.at.of[value] if source is None else self.at.of[program.arguments[source].value]
            out = self.moved(value, wanted, "an output takes over its argument's memory")
            if source in hosted:
                out = self.store(out)
            outputs.append(out)
        for out in outputs:
            self.buffers[out] = _as_output(self.buffers[out])
        donated = tuple(number for number, argument in enumerate(program.arguments) if argument.donated)
        constants = self._constants(outputs)
        return ChipProgram(
            tuple(self.steps), self.buffers, tuple(argument.value for argument in program.arguments), tuple(outputs),
            donated, tuple(self.notes), constants, self.loose,
        )  # fmt: skip

    def _constants(self, outputs: Sequence[int]) -> tuple[int, ...]:
        """Those that something reads. They are part of the program, and so whole on every chip."""
        read = {*outputs, *_read(self.steps)}
        kept = tuple(value for value in self.program.constants if value in read)
        size = sum(self.buffers[value].bytes for value in kept)
        if size >= _LARGE_CONSTANTS:
            self.notes[
                f"the function closes over {size / 2**20:.3g} MiB of arrays, which every chip holds whole: as "
                "arguments they could be split"
            ] = None
        return kept

    def _nodes(self, nodes: Sequence[Node]) -> None:
        following: dict[int, Node] = {}
        for node in nodes:
            for value in node.inputs:
                following[value] = node
        for node in nodes:
            if node.body is not None:
                self._loop(node, node.body)
            elif node.marker is not None and node.marker[0] in ("manual", "exchange"):
                self._manual(node)
            elif node.primitive in _SAME and len(node.inputs) == 1:
                self._same(node, following)
            else:
                self._step(node, following)

    def _same(self, node: Node, following: dict[int, Node]) -> None:
        (value,), (result,) = node.inputs, node.outputs
        if value in self.pending and self._can_wait(result, following) and self.at.of[value] == self.at.of[result]:
            self.pending[result], self.held[result] = self.pending.pop(value), self.held[value]
            return
        why = f"{node.name}: the program asks for this layout"
        self.held[result] = self.moved(value, self.at.of[result], why, node)
        if self.at.of[result] != self.at.of[value] and self.held[result] == self.held[value]:
            # Only a part of the operand is kept: a copy of that part.
            source = self.held[value]
            self.own(result)
            self.steps.append(
                Step("slice", node.name, (source,), (result,), bytes=2 * self.buffers[result].bytes,
                     backward=node.backward, recompute=node.recompute)
            )  # fmt: skip

    def _manual(self, node: Node) -> None:
        """The border of a shard_map, or an exchange that its body writes."""
        if node.marker[0] == "exchange":
            _, kind, named = node.marker
            reads = tuple(self.held[value] for value in node.inputs)
            writes = tuple(self.own(value) for value in node.outputs)
            size = sum(self.buffers[number].bytes for number in (writes if kind == "all_gather" else reads))
            sent = Collective(
                kind, tuple(a for a in named if a in self.at.index), size, f"the program's own, {node.name}"
            )
            if sent.axes:
                self.steps.append(
                    Step(
                        kind,
                        node.name,
                        reads,
                        writes,
                        collective=sent,
                        backward=node.backward,
                        recompute=node.recompute,
                    )
                )
            else:  # along axes of one chip there is nothing to send
                self.held.update(zip(node.outputs, reads, strict=False))
            return
        (source,), (result,) = node.inputs, node.outputs
        if node.primitive == "manual_out":
            self.held[result] = self.held[source]
            return
        outer = self.program.values[source]
        wanted = self.at.entries(outer.shape, node.marker[1], node.name)
        buffer = self.moved(source, wanted, f"the shard_map {node.name} takes it so", node)
        self.held[result] = buffer
        if self.buffers[buffer].shape != self.program.values[result].shape:
            self.own(result)  # a part of what the chip has
            self.steps.append(
                Step("slice", node.name, (buffer,), (result,), bytes=2 * self.buffers[result].bytes)
            )  # fmt: skip

    def _can_wait(self, value: int, following: dict[int, Node]) -> bool:
        """Its one reader is linear, so that partial sums may be added up first and exchanged once."""
        reader = following.get(value)
        return reader is not None and self.uses.get(value) == 1 and reader.body is None and reader.factors.linear

    def _step(self, node: Node, following: dict[int, Node]) -> None:
        of = self.at.of
        waiting = self._waiting(node) if self.pending else ()
        if waiting:
            inputs = tuple([self.pending[v][0] for v in node.inputs])
            wanted = tuple(tuple(-1 if a in waiting else d for a, d in enumerate(of[v])) for v in node.outputs)
        else:
            inputs, wanted = tuple([of[v] for v in node.inputs]), tuple([of[v] for v in node.outputs])
        if node.primitive == "gather":
            self._lookup(node)
        ready = not waiting and all(self.held[v] == v and v not in self.pending for v in node.inputs)
        key = (node.number, inputs, wanted)
        if ready and (known := self._plain.get(key)) is not None:
            for value in node.outputs:
                self.own(value)
            self.steps.append(known)
            return
        choice = self.at.choose(node, inputs, wanted)
        if waiting:
            reads = [self.held[value] for value in node.inputs]
        else:
            given = zip(node.inputs, inputs, choice.operands, node.factors.operands, strict=True)
            reads = [self._operand(node, *one) for one in given]
        partial = tuple(sorted({*waiting, *choice.summed}))
        writes, unsettled = [], []
        for value, natural in zip(node.outputs, choice.results, strict=True):
            if partial and (not choice.summed or _sums(node)) and self._can_wait(value, following):
                number = self.fresh(value, natural, "part of ")
                self.held[value], self.pending[value] = number, (natural, partial)
            elif partial or (natural != of[value] and _loses(natural, of[value])):
                number = self.fresh(value, natural, "part of " if partial else "")
                self.own(value)
                unsettled.append((value, number, natural))
            else:
                number = self.own(value)
            writes.append(number)
        sizes = self._sizes(node, choice.split) if node.mnk else ()
        size = self._bytes(node, inputs, choice)
        step = Step(
            node.primitive, node.name, tuple(reads), tuple(writes), node.flops / choice.ways, node.matrix,
            node.dtype, sizes, size, node.op, None, node.backward, node.recompute,
            node.vector_flops / choice.ways, self._call(node, reads),
        )  # fmt: skip
        self.steps.append(step)
        if ready and step.reads == node.inputs and step.writes == node.outputs and not unsettled:
            self._plain[key] = step
        for value, number, natural in unsettled:
            why = f"{'partial sums' if partial else 'the result'} of {node.title}"
            self.exchange(value, number, natural, of[value], partial, why, node, into=value)

    def _call(self, node: Node, reads: list[int]) -> Any:
        """The call of an op's kernel on this chip's part of its operands."""
        if node.call is None or len(reads) != sum(x is not None for x in node.call.args):
            return node.call
        shapes = iter([self.buffers[read].shape for read in reads])
        args = [None if x is None else jax.ShapeDtypeStruct(next(shapes), x.dtype) for x in node.call.args]
        return dataclasses.replace(node.call, args=tuple(args))

    def _lookup(self, node: Node) -> None:
        """Note where it is the compiler that decides how activations lie, which need not be as they are counted here.

        It was seen to leave what it found in a split table whole on every chip, and with it the batch of every layer:
        a decoder for four chips was refused at 32.9 GiB that takes 10.1 with one constraint after the lookup. What is
        picked out of activations (a label's logit) lies as they do.
        """
        if self.program.values[node.inputs[0]].from_batch:
            return
        split = (self.at.of[value] for value in node.inputs[:2])
        of_table, of_ids = node.factors.operands[:2]
        both = [
            name
            for name, table, ids in zip(self.at.axes, *split, strict=True)
            if table >= 0 and ids >= 0 and of_table[table] != of_ids[ids]
        ]
        if both and not _asks_for_layouts(self.program.nodes):
            self.loose = True
            self.notes[
                f"{node.title}: the table and the indices are both split over {' and '.join(both)}, and nothing in the "
                "program says how its activations lie: the compiler may hold the whole batch on every chip; "
                "capibara.mesh.with_sharding_constraint(x, ('batch', None, None)) after the lookup keeps it split"
            ] = None

    def _operand(self, node: Node, value: int, have: Sharding, want: Sharding, side: tuple[int, ...]) -> int:
        if have == want and value not in self.pending:
            return self.held[value]
        stuck = [self.at.axes[a] for a, h in enumerate(have) if h >= 0 and want[a] < 0 and side[h] < 0]
        if stuck:
            where = node.title.removesuffix(" (backward)")
            self.notes[f"{where}: an operand cannot stay split over {', '.join(stuck)} and is gathered"] = None
        return self.moved(value, want, f"an operand of {node.title}", node)

    def _bytes(self, node: Node, inputs: tuple[Sharding, ...], choice: Choice) -> float | None:
        """Bytes moved, where they are not those of the buffers: a part of an operand, or a count of the node's own."""
        if node.bytes is not None:
            return node.bytes / choice.ways
        if node.moved is None and inputs == choice.operands:
            return None
        sides = (*choice.operands, *choice.results)
        sizes = [self._local_bytes(v, s) for v, s in zip((*node.inputs, *node.outputs), sides, strict=True)]
        return sum(t * n for t, n in zip(node.moved, sizes, strict=True)) if node.moved is not None else sum(sizes)

    def _waiting(self, node: Node) -> tuple[int, ...]:
        """The axes over which every operand is a partial sum that may wait longer; () when they are settled first."""
        if not node.factors.linear or not node.inputs:
            return ()
        found = [self.pending.get(value) for value in node.inputs]
        first = found[0]
        if first is None or any(one != first for one in found):
            return ()
        return first[1]

    def _local_bytes(self, value: int, sharding: Sharding) -> float:
        made = self.program.values[value]
        return made.bytes / self.at.ways(sharding)

    def _sizes(self, node: Node, split: tuple[int, ...]) -> tuple[int, ...]:
        made = []
        for side in node.mnk:
            length = 1
            for factor in side:
                length *= node.factors.sizes[factor]
            for axis, factor in enumerate(split):
                if factor in side:
                    length = -(-length // self.at.sizes[axis])
            made.append(length)
        return tuple(made)

    def _loop(self, node: Node, body: Body) -> None:
        at, of = self.at, self.at.of
        why = f"the loop {node.name} carries it so"
        starts = [self.moved(start, of[inner], why, node) for start, inner, _, _ in body.carried]
        rows, trips = [], body.trips
        for outer, inner in body.sliced:
            wanted = tuple(dim + 1 if dim >= 0 else -1 for dim in of[inner])
            if at.stage >= 0 and of[outer][at.stage] == 0:
                wanted = tuple(0 if axis == at.stage else dim for axis, dim in enumerate(wanted))
                trips = -(-body.trips // at.sizes[at.stage])
            have = of[outer]
            if any(h == 0 and w != 0 for h, w in zip(have, wanted, strict=True)):
                self.notes[
                    f"{node.name}: {self.program.values[outer].name} is split along the loop, so it is gathered"
                ] = None
            rows.append(self.moved(outer, wanted, f"the loop {node.name} takes slices of it", node))
        for value in node.inputs:
            if value in self.pending:
                self.settle(value, node)
        for _, inner, _, _ in body.carried:
            self.own(inner)
        for _, inner in body.sliced:
            self.own(inner)
        outside, copies = self.steps, self.copies
        # Copies made outside are not seen inside: what a trip gathers, it gathers each time.
        self.steps, self.copies = [], {}
        self._nodes(body.nodes)
        ends = [self.moved(end, of[inner], why, node) for _, inner, end, _ in body.carried]
        stacked = []
        for inner, outer in body.stacked:
            wanted = tuple(dim - 1 if dim > 0 else -1 for dim in of[outer])
            stacked.append(self.moved(inner, wanted, f"the loop {node.name} stacks it", node))
        steps, self.steps, self.copies = self.steps, outside, copies
        carried: list[tuple[int, int]] = []
        later = []
        for (_, inner, _, after), start, end in zip(body.carried, starts, ends, strict=True):
            if of[after] == of[inner]:
                number = self.own(after)
            else:
                number = self.fresh(after, of[inner], "")
                later.append((after, number, of[inner]))
            carried += [(start, self.held[inner]), (number, end)]
        made = [self.own(outer) for _, outer in body.stacked]
        kept = tuple(self.held[value] for value in node.inputs if value in self.held)
        reads = tuple(dict.fromkeys((*starts, *rows, *kept)))
        writes = (*(pair[0] for pair in carried[1::2]), *made)
        self.steps.append(
            Loop(
                trips,
                tuple(steps),
                reads,
                writes,
                tuple(carried),
                tuple((row, self.held[inner]) for row, (_, inner) in zip(rows, body.sliced, strict=True)),
                tuple(zip(stacked, made, strict=True)),
                node.title,
                node.backward,
            )
        )
        for after, number, have in later:
            self.own(after)
            self.exchange(after, number, have, of[after], (), why, node, into=after)
        if trips != body.trips:
            self._send(node, body)

    def _send(self, node: Node, body: Body) -> None:
        """A stage of a pipeline hands what it carries, where that is an activation, to the next."""
        for _, _inner, _, after in body.carried:
            if self.program.values[after].from_batch:
                buffer = self.held[after]
                number = self.fresh(after, self.at.of[after], "permute of ")
                names = (self.at.axes[self.at.stage],)
                why = f"stages of the pipeline along {node.name}"
                sent = Collective("permute", names, self.buffers[buffer].bytes, why)
                self.steps.append(
                    Step("permute", node.name, (buffer,), (number,), collective=sent, backward=node.backward)
                )  # fmt: skip
                self.held[after] = number


def _asks_for_layouts(nodes: Sequence[Node]) -> bool:
    return any(
        node.primitive in _CONSTRAINTS or (node.body is not None and _asks_for_layouts(node.body.nodes))
        for node in nodes
    )


def _sums(node: Node) -> bool:
    """Whether what a split leaves is a partial sum, and not a partial maximum or the like."""
    name = node.primitive
    if name.startswith(("reduce", "arg")):
        return name == "reduce_sum"
    return not name.startswith("scatter") or name in ("scatter-add", "scatter_add", "scatter-sub", "scatter_sub")


def _read(steps: Sequence[Step | Loop]) -> Iterator[int]:
    for step in steps:
        yield from step.reads
        if isinstance(step, Loop):
            yield from _read(step.body)


def _loses(have: Sharding, want: Sharding) -> bool:
    """An axis splits it otherwise than is wanted; one that does not split it yet leaves a part to be taken."""
    return any(h >= 0 and h != w for h, w in zip(have, want, strict=True))


def _as_output(buffer: Buffer) -> Buffer:
    return Buffer(
        buffer.id, buffer.bytes, buffer.shape, buffer.dtype, buffer.name, buffer.argument, True, buffer.host
    )  # fmt: skip
