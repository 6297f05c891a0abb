"""Steps grouped into passes, as XLA fuses them: what is inside a pass never reaches memory.

A compiler merges chains of elementwise work, broadcasts and the reductions at their end into one loop over the data.
So bytes are moved, and buffers exist, only between passes: this decides both time and memory. The rules are XLA's in
outline: a producer joins its consumers when all of them are in one pass, or when it is cheap enough to be computed
again in each; a matrix product on a TPU takes the elementwise work on its result along and its operands' conversions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from capibara.cost.kinds import CHEAP, DEAR, FREE, IN_PLACE, MATRIX, REDUCES, SLICES, VIEW
from capibara.program.chip import Buffer, ChipProgram, Loop, Step
from capibara.program.labels import shown

__all__ = ["LoopPass", "Pass", "fuse", "is_kernel"]

_KNOWN = VIEW | FREE | CHEAP | DEAR | SLICES | REDUCES | MATRIX | IN_PLACE
_CONSTANT = frozenset(("iota", "broadcast_in_dim"))
_ELEMENTWISE = CHEAP | DEAR | FREE
_PROLOGUE = FREE | CHEAP
_FUSIBLE = _ELEMENTWISE | SLICES
_TAKES_PRODUCERS = _FUSIBLE | REDUCES


@dataclass(slots=True)
class Pass:
    """One trip through the data: the steps inside, the buffers that enter and leave."""

    name: str
    steps: list[Step]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    bytes: float
    kind: str
    """ "matrix", "collective", "op" (a kernel with its own cost) or "vector"."""


@dataclass(slots=True)
class LoopPass:
    """A loop whose body was fused."""

    loop: Loop
    body: list[Pass | LoopPass]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    same: Mapping[int, int] = field(default_factory=dict)
    """Buffer of the body -> the buffer that it is a view of."""

    @property
    def name(self) -> str:
        return self.loop.name or f"loop of {self.loop.trips}"


_EIGHT_BITS = ("int8", "uint8", "float8_e4m3fn", "float8_e5m2")


def is_kernel(step: Step) -> bool:
    """Whether a step is one kernel of an op. The steps of an op in plain JAX are the compiler's, to merge as others."""
    return step.op is not None and step.primitive not in _KNOWN


def fuse(program: ChipProgram, platform: str = "tpu") -> tuple[list[Pass | LoopPass], dict[int, int]]:
    """The program's passes in order, and which buffers are only views of another.

    `platform` decides what a matrix product takes along: on a TPU elementwise work on both sides, on a GPU only the
    conversion of its result, and the widening of operands of 8 bits.
    """
    given = frozenset((*program.arguments, *program.constants))
    donated = frozenset(program.arguments[index] for index in program.donated)
    return _fuse_level(program.steps, program.buffers, frozenset(program.outputs), platform == "tpu", donated, given)


def _views(
    level: Sequence[Step | Loop], buffers: Mapping[int, Buffer], leaving: frozenset[int], given: frozenset[int]
) -> dict[int, int]:
    """A view of what the program was given is a copy where it leaves: an output has memory of its own."""
    same: dict[int, int] = {}
    for step in level:
        if isinstance(step, Loop) or step.collective is not None or not step.reads:
            continue
        if step.primitive in VIEW or (step.primitive == "broadcast_in_dim" and len(step.reads) == 1):
            for read, written in zip(step.reads, step.writes, strict=False):
                source = same.get(read, read)
                if buffers[read].bytes == buffers[written].bytes and not (written in leaving and source in given):
                    same[written] = source
    return same


def _fuse_level(
    level: Sequence[Step | Loop],
    buffers: Mapping[int, Buffer],
    leaving: frozenset[int],
    tpu: bool,
    mine: frozenset[int],
    given: frozenset[int] = frozenset(),
) -> tuple[list[Pass | LoopPass], dict[int, int]]:
    """`mine` was not made here and may be overwritten all the same: donated arguments, what a loop carries."""
    same = _views(level, buffers, leaving, given)
    mine = mine.union(*(node.writes for node in level))
    # A view that leaves the level keeps its source alive: the source leaves.
    leaving = leaving | {same[one] for one in leaving if one in same}
    nodes = [
        node
        for node in level
        if isinstance(node, Loop) or not (node.writes and all(written in same for written in node.writes))
    ]
    reads = [tuple(dict.fromkeys(same.get(b, b) for b in node.reads)) for node in nodes]
    users: dict[int, list[int]] = {}
    for index, read in enumerate(reads):
        for buffer in read:
            users.setdefault(buffer, []).append(index)
    groups = _grouped(nodes, reads, users, buffers, leaving, tpu)

    members: dict[int, list[int]] = {}
    for index, joined in enumerate(groups):
        for root in joined:
            members.setdefault(root, []).append(index)
    made: list[Pass | LoopPass] = []
    for root, inside in sorted(members.items()):
        node = nodes[root]
        if isinstance(node, Loop):
            body_leaving = frozenset(body for _, body in node.carried) | frozenset(body for body, _ in node.stacked)
            carries = frozenset(body for _, body in node.carried[0::2])
            body, body_same = _fuse_level(node.body, buffers, body_leaving, tpu, carries)
            made.append(LoopPass(node, body, reads[root], tuple(node.writes), body_same))
        else:
            made.append(_pass(root, inside, nodes, reads, users, groups, buffers, leaving, mine))
    return made, same


def _grouped(
    nodes: Sequence[Step | Loop],
    reads: Sequence[tuple[int, ...]],
    users: Mapping[int, Sequence[int]],
    buffers: Mapping[int, Buffer],
    leaving: frozenset[int],
    tpu: bool,
) -> list[tuple[int, ...]]:
    """For each node the passes that it is computed in, each named by the index of its last step."""
    groups: list[tuple[int, ...]] = [()] * len(nodes)
    has_matrix: set[int] = set()
    entering = _entering(nodes, reads, buffers)
    for index in range(len(nodes) - 1, -1, -1):
        node = nodes[index]
        groups[index] = (index,)
        if isinstance(node, Loop) or node.collective is not None or is_kernel(node):
            continue
        kind = "select_n" if _is_selection(node, entering[index], buffers) else node.primitive
        matrix = kind in MATRIX
        if matrix:
            has_matrix.add(index)
        elif kind not in _FUSIBLE or _picks(node, buffers):
            continue
        consumers = [user for written in node.writes for user in users.get(written, ())]
        if not consumers:
            continue
        escapes = any(written in leaving for written in node.writes)
        joined = tuple(sorted({group for user in consumers for group in groups[user]}))
        if matrix:
            if len(joined) == 1 and not escapes and _is_epilogue(node, consumers, joined[0], nodes, buffers, tpu):
                if joined[0] in has_matrix:
                    continue
                has_matrix.discard(index)
                has_matrix.add(joined[0])
                groups[index] = joined
            continue
        # XLA's own products on a GPU read weights of 8 bits as such, and widen them on the way.
        widens = kind == "convert_element_type" and all(buffers[read].dtype in _EIGHT_BITS for read in node.reads)
        if not all(_takes(nodes[user], kind, tpu or widens) for user in consumers):
            continue
        if not tpu and kind == "convert_element_type" and _is_result_of_product(reads[index], nodes, users, index):
            continue
        if len(joined) == 1:
            if not escapes or (kind in _ELEMENTWISE and _as_large(nodes[joined[0]], node, buffers)):
                groups[index] = joined
        elif (
            not escapes
            and _is_worth_repeating(kind, node, entering[index], buffers)
            # Products that share an operand read it: it is written once for them.
            and (kind in _CONSTANT or not any(_is_product(nodes[user]) for user in consumers))
        ):
            groups[index] = joined
    return groups


def _is_product(node: Step | Loop) -> bool:
    return isinstance(node, Step) and node.primitive in MATRIX


def _takes(consumer: Step | Loop, producer: str, tpu: bool) -> bool:
    if isinstance(consumer, Loop) or consumer.collective is not None or is_kernel(consumer):
        return False
    if consumer.primitive in MATRIX:
        return tpu and producer in _PROLOGUE
    if consumer.primitive in SLICES:
        return producer in FREE
    if consumer.primitive in IN_PLACE:
        return producer in _ELEMENTWISE
    return consumer.primitive in _TAKES_PRODUCERS


def _is_epilogue(
    product: Step,
    consumers: Sequence[int],
    root: int,
    nodes: Sequence[Step | Loop],
    buffers: Mapping[int, Buffer],
    tpu: bool,
) -> bool:
    last = nodes[root]
    if isinstance(last, Loop) or last.primitive not in _ELEMENTWISE:
        return False
    if not tpu:
        return len(consumers) == 1 and consumers[0] == root and last.primitive == "convert_element_type"
    first = nodes[consumers[0]]
    return isinstance(first, Step) and first.primitive in _ELEMENTWISE and _as_large(last, product, buffers)


def _is_result_of_product(
    read: tuple[int, ...], nodes: Sequence[Step | Loop], users: Mapping[int, Sequence[int]], index: int
) -> bool:
    """Whether a conversion is a product's own output type: a GPU's product writes it, and it joins nothing else."""
    if len(read) != 1 or users.get(read[0]) != [index]:
        return False
    for node in nodes[max(0, index - 8) : index]:
        if read[0] in node.writes:
            return isinstance(node, Step) and node.primitive in MATRIX
    return False


def _numbers(step: Step | Loop, buffers: Mapping[int, Buffer]) -> int:
    count = 1
    for size in buffers[step.writes[0]].shape if step.writes else ():
        count *= size
    return count


def _as_large(one: Step | Loop, other: Step, buffers: Mapping[int, Buffer]) -> bool:
    return _numbers(one, buffers) == _numbers(other, buffers)


def _entering(
    nodes: Sequence[Step | Loop], reads: Sequence[tuple[int, ...]], buffers: Mapping[int, Buffer]
) -> list[float]:
    """Bytes that computing each node once more would read: what is broadcast or counted is read at its source."""
    source: dict[int, float] = {}
    found = []
    for node, read in zip(nodes, reads, strict=True):
        total = sum(source.get(buffer, buffers[buffer].bytes) for buffer in read)
        found.append(total)
        if isinstance(node, Step) and len(node.writes) == 1:
            (written,) = node.writes
            # Small inputs through any cheap step are small again: a causal mask is two counters compared.
            if node.primitive in FREE or (node.primitive in CHEAP and total < buffers[written].bytes / 8):
                source[written] = total
    return found


def _picks(step: Step, buffers: Mapping[int, Buffer]) -> bool:
    """Whether a step takes a few numbers out of a large buffer, which it then need not keep alive for its consumer."""
    return step.primitive == "gather" and 8 * buffers[step.writes[0]].bytes < buffers[step.reads[0]].bytes


def _is_selection(step: Step, entering: float, buffers: Mapping[int, Buffer]) -> bool:
    """Whether a scatter puts a few numbers into zeros: the gradient of picking one of a row.

    The compiler writes that as a comparison with the row's index, and merges it like one.
    """
    return step.primitive.startswith("scatter") and entering <= buffers[step.writes[0]].bytes / 64


def _is_worth_repeating(kind: str, step: Step, entering: float, buffers: Mapping[int, Buffer]) -> bool:
    if kind in FREE:
        return True
    # Computing it in each consumer reads its operands each time instead of its result.
    return kind in CHEAP and entering <= 1.05 * buffers[step.writes[0]].bytes


def _pass(
    root: int,
    inside: list[int],
    nodes: Sequence[Step | Loop],
    reads: Sequence[tuple[int, ...]],
    users: Mapping[int, Sequence[int]],
    groups: Sequence[tuple[int, ...]],
    buffers: Mapping[int, Buffer],
    leaving: frozenset[int],
    mine: frozenset[int],
) -> Pass:
    here = set(inside)
    steps: list[Step] = []
    made: set[int] = set()
    entering: dict[int, float] = {}
    writes: list[int] = []
    moved = 0.0
    for index in inside:
        step = nodes[index]
        assert isinstance(step, Step)
        steps.append(step)
        counted = step.bytes is None
        in_its_place = step.primitive in IN_PLACE
        most = math.inf
        if in_its_place:
            # Only the slice that changes is read and written, not the whole operand.
            most = 2 * max(sorted(buffers[b].bytes for b in step.reads)[:-1], default=0.0)
            if reads[index] and reads[index][0] not in mine:
                # What may not be overwritten is copied first.
                moved += 2 * buffers[reads[index][0]].bytes
        elif step.primitive in SLICES:
            most = sum(buffers[b].bytes for b in step.writes)
        for buffer in reads[index]:
            if buffer not in made:
                amount = min(buffers[buffer].bytes, most) if counted else 0.0
                if amount >= entering.get(buffer, 0.0):
                    entering[buffer] = amount
        made.update(step.writes)
        if step.bytes is not None:
            moved += step.bytes
        elif in_its_place:
            moved += most / 2
        if groups[index] != (root,):
            continue
        for buffer in step.writes:
            if buffer in leaving or index == root or any(user not in here for user in users.get(buffer, ())):
                writes.append(buffer)
                if counted and not in_its_place:
                    moved += buffers[buffer].bytes
    last = nodes[root]
    assert isinstance(last, Step)
    kind = "vector"
    if last.collective is not None:
        kind = "collective"
    elif is_kernel(last):
        kind = "op"
    elif any(step.matrix for step in steps):
        kind = "matrix"
    named = next((step for step in steps if step.matrix), last)
    name = named.name or named.op or shown(named.primitive)
    return Pass(name, steps, tuple(entering), tuple(writes), moved + sum(entering.values()), kind)
