"""Peak memory of one chip: which buffers are alive while each pass runs.

Assumptions, each of which a compiler's scheduler follows where it can: passes run in the order of the trace, but one
whose result is larger than what it frees waits for its first consumer; a result takes over memory that its own pass is
the last to read, where the sizes agree and the work is elementwise; a loop's carry stays in place, its stacked outputs
are whole from the start, its sliced inputs are read where they lie.

On a TPU a layer's weight gradients that are reduced over chips come last in its loop, a product that is reduced and
scattered is made a part at a time, a pass of several large operands writes beside all of them, and the last two
dimensions of a buffer are padded to tiles: arguments have jax's row-major layout, a temporary the order that pads
least, and rows while they are looked up their own. Of tables (`cost.tables`) the walk is done twice, for what a
compiler mostly keeps of them and for the most that it has been seen to keep.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from capibara.cost.fusion import LoopPass, Pass
from capibara.cost.kinds import COMPARED
from capibara.cost.order import only_told, put_off, reduced_gradients
from capibara.cost.padding import padded_bytes, padded_rows
from capibara.cost.tables import Tables, tables
from capibara.program.chip import Buffer, ChipProgram

__all__ = ["Peak", "peak_memory"]

_PARTS_AT_ONCE = 4
_LONGEST_RING = 32
# An operand is one of the large ones of its pass when it is this much of the largest.
_LARGE = 4


@dataclass(slots=True)
class Peak:
    """The most that is alive beside the arguments, and what it is."""

    arguments: float
    temporaries: float
    at: str
    live: tuple[tuple[str, float], ...]
    timeline: tuple[tuple[str, float], ...]
    stashed: float = 0.0
    """What loops keep for later ones: the activations that a backward pass reads."""
    unchecked: tuple[str, ...] = ()
    """Primitives with a part in `unsure` because no program with much of them was compared with a compiler."""
    unsure: float = 0.0
    """In a program with tables: what there is beside `temporaries` when the compiler keeps as many of them at once as
    it has been seen to, and what else it has been seen to keep beside them. And once more what `unchecked` primitives
    read and write of what is live at the peak."""


@dataclass(slots=True)
class _Level:
    """The peak of one level, over what was alive when it began."""

    bytes: float = 0.0
    at: str = ""
    live: dict[int, float] = field(default_factory=dict)
    timeline: list[tuple[str, float]] = field(default_factory=list)
    stashed: float = 0.0


class _Walker:
    def __init__(self, program: ChipProgram, platform: str, known: Tables, many: bool = False) -> None:
        self.tpu = platform == "tpu"
        self.tables = known.all
        self.source = {} if many else known.source
        self.many = many
        """Whether as many tables are alive at once as a compiler has been seen to keep, and not as it mostly keeps."""
        self.buffers = program.buffers
        self.size = {id: padded_bytes(buffer, platform) for id, buffer in program.buffers.items()}

    def level(
        self,
        passes: Sequence[Pass | LoopPass],
        held: frozenset[int],
        free: Mapping[int, float],
        leaving: frozenset[int],
        body: bool = False,
    ) -> _Level:
        """One level's peak. `held` lives elsewhere, `free` overrides the size of what is written in place."""
        last: set[int] = set()
        if self.tpu and body:
            last = reduced_gradients(passes, leaving)
        elif self.many:
            last = only_told(passes, self.size, leaving - free.keys())
        found = self._ordered(put_off(passes, self.size, held, last), held, free, leaving)
        if last and not self.many and not self.tables.isdisjoint(found.live):
            # Beside tables there is less room for what waits: gradients that have no part in them are made where they
            # can be. (Of the training steps compiled for v4 with plain attention, those that recompute everything.)
            waiting = _with_part_in(self.tables, passes, last)
            at_once = self._ordered(put_off(passes, self.size, held, waiting), held, free, leaving)
            found = min(found, at_once, key=lambda one: one.bytes)
        return found

    def _ordered(
        self,
        passes: Sequence[Pass | LoopPass],
        held: frozenset[int],
        free: Mapping[int, float],
        leaving: frozenset[int],
    ) -> _Level:
        size = self.size
        last_read: dict[int, int] = {}
        for index, one in enumerate(passes):
            for buffer in one.reads:
                last_read[buffer] = index
        if self.many:
            self._keep_siblings(passes, last_read)
        free = {**self._computed_again(passes, last_read, held, leaving), **free}
        dying: dict[int, list[int]] = {}
        for buffer, index in last_read.items():
            if buffer not in held and buffer not in leaving:
                dying.setdefault(index, []).append(buffer)
        if self.tpu:
            free = {**_windowed(passes, size, leaving), **free}
        found = _Level()
        live: dict[int, float] = {}
        total = 0.0
        for index, one in enumerate(passes):
            ends = [b for b in dying.get(index, ()) if b in live]
            before = total
            inside = _Level()
            if isinstance(one, LoopPass):
                total += self._enter_loop(one, live, ends, held, leaving, free)
                inside = self._body(one)
                found.stashed += inside.stashed + (0.0 if one.loop.backward else self._stacked(one))
            else:
                reused = self._reused(one, ends)
                for buffer in one.writes:
                    if buffer in live or buffer in held:
                        continue
                    live[buffer] = free.get(buffer, size[buffer])
                    total += live[buffer]
                # The result lies where an operand was, so the two are never both alive.
                total -= reused
                now = total + self._looked_up(one)
                if now > found.bytes:
                    found.bytes, found.at, found.live = now, one.name, dict(live)
                for buffer in ends:
                    total -= live.pop(buffer)
                total += reused
                found.timeline.append((one.name, now))
                # What nobody reads and does not leave was never needed.
                for buffer in one.writes:
                    if buffer in live and buffer not in last_read and buffer not in leaving:
                        total -= live.pop(buffer)
                continue
            now = total + inside.bytes
            if now > found.bytes:
                found.bytes, found.at = now, f"{one.name}: {inside.at}" if inside.at else one.name
                found.live = {**live, **inside.live}
            found.timeline.append((one.name, before))
            found.timeline.append((f"{one.name}: {inside.at}", now))
            for buffer in ends:
                if buffer in live:
                    total -= live.pop(buffer)
            for buffer in one.writes:
                if buffer in live and buffer not in last_read and buffer not in leaving:
                    total -= live.pop(buffer)
        return found

    def _computed_again(
        self,
        passes: Sequence[Pass | LoopPass],
        last_read: dict[int, int],
        held: frozenset[int],
        leaving: frozenset[int],
    ) -> dict[int, float]:
        """Tables that take nothing, being another one that is there as long as they are read; its end is put off."""
        again = {}
        for one in reversed(passes):
            for made in one.writes if isinstance(one, Pass) else ():
                of = self.source.get(made)
                if of is not None and made not in leaving and of not in held and made in last_read:
                    last_read[of] = max(last_read[of], last_read[made])
                    again[made] = 0.0
        return again

    def _keep_siblings(self, passes: Sequence[Pass | LoopPass], last_read: dict[int, int]) -> None:
        """A table that is made of another is there as long as that one: one pass makes all that is made of a table."""
        for one in passes:
            if isinstance(one, LoopPass) or one.kind != "vector":
                continue
            until = max((last_read[read] for read in one.reads if read in self.tables), default=-1)
            for written in one.writes:
                if written in self.tables and written in last_read:
                    last_read[written] = max(last_read[written], until)

    def _looked_up(self, one: Pass) -> float:
        """What a TPU's pass has beside its operands and results while it looks rows up, or adds to rows.

        It does so with a row as the minor dimension, padded to a tile's lanes, whatever lies minor before and after:
        a bias for each of 12 heads and each of 4096 x 4096 distances is 8 GiB then, and 0.75 when it is put in order.
        """
        most = 0.0
        for step in one.steps if self.tpu else ():
            moved = None
            if step.primitive == "gather":
                moved = step.writes[0]
            elif step.primitive.startswith("scatter") and len(step.reads) > 2:
                moved = step.reads[2]
            if moved is not None:
                most = max(most, padded_rows(self.buffers[moved], self.buffers[step.reads[1]]))
        return most

    def _reused(self, one: Pass, ends: Iterable[int]) -> float:
        """Bytes of results that take over memory of operands which die here."""
        exchange = one.steps[0].collective
        if exchange is not None and exchange.kind != "all_reduce":
            return 0.0
        if one.kind == "op" or not one.writes:
            return 0.0
        if self.tpu and exchange is None and not self._in_place(one):
            return 0.0
        blocked = _until_the_end(one)
        sizes = sorted((self.size[b] for b in one.writes), reverse=True)
        given = sorted((self.size[b] for b in ends if b not in blocked), reverse=True)
        reused = 0.0
        for want in sizes:
            match = next((have for have in given if have == want), None)
            if match is not None:
                given.remove(match)
                reused += match
        return reused

    def _in_place(self, one: Pass) -> bool:
        """Whether a TPU's pass writes where it reads: not where several large operands meet in it.

        (Seen in every training step whose buffers were read: silu of one product times another, and the gradient of a
        softmax, have their result beside all that they read.)
        """
        if self.many and not self.tables.isdisjoint(one.writes):
            return False
        largest = max((self.size[b] for b in one.reads), default=0.0)
        return sum(_LARGE * self.size[b] >= largest for b in one.reads) <= 1

    def _enter_loop(
        self,
        one: LoopPass,
        live: dict[int, float],
        ends: list[int],
        held: frozenset[int],
        leaving: frozenset[int],
        free: Mapping[int, float],
    ) -> float:
        """Make the loop's results; a carry whose start dies here keeps its memory. Returns what was added."""
        added = 0.0
        handed = {result: start for start, result in _carries(one)}
        for buffer in one.writes:
            if buffer in live:
                continue
            start = handed.get(buffer)
            if start is not None and start in ends and start in live:
                ends.remove(start)
                live[buffer] = live.pop(start)
                continue
            live[buffer] = free.get(buffer, self.size[buffer])
            added += live[buffer]
        return added

    def _stacked(self, one: LoopPass) -> float:
        return sum(self.size[outer] for _, outer in one.loop.stacked)

    def _body(self, one: LoopPass) -> _Level:
        loop = one.loop
        carries = _carries_inside(one)
        stacked = {body for body, _ in loop.stacked}
        # Read where they lie: constants, slices of inputs, the carry.
        inner = {start for start, _ in carries} | {body for _, body in loop.sliced} | set(loop.reads)
        inner |= {view for view, source in one.same.items() if source in inner}
        last_read: dict[int, int] = {}
        written: dict[int, int] = {}
        for index, each in enumerate(one.body):
            for buffer in each.reads:
                last_read[buffer] = index
            for buffer in each.writes:
                written.setdefault(buffer, index)
        free: dict[int, float] = {}
        for body in stacked:
            body = one.same.get(body, body)
            # Written straight into its place, unless the body reads it again.
            if body in written and last_read.get(body, -1) <= written[body]:
                free[body] = 0.0
        for start, end in carries:
            end = one.same.get(end, end)
            if end in written and _may_overwrite(one.body, written[end], start, last_read.get(start, -1)):
                free[end] = 0.0
        leaving = frozenset(one.same.get(end, end) for _, end in carries)
        return self.level(one.body, frozenset(inner), free, leaving, body=True)


def _with_part_in(tables: frozenset[int], passes: Sequence[Pass | LoopPass], chosen: set[int]) -> set[int]:
    """Of the chosen passes those that read a table, and those that follow them."""
    after = set(tables)
    found = set()
    for index, one in enumerate(passes):
        if index in chosen and not after.isdisjoint(one.reads):
            found.add(index)
            after.update(one.writes)
    return found


def _windowed(
    passes: Sequence[Pass | LoopPass], size: Mapping[int, float], leaving: frozenset[int]
) -> dict[int, float]:
    """Partial sums of products that only a reduce_scatter reads, with what they take on a TPU.

    The compiler makes such a product a chip's part at a time and sends each on while the next is made: one part is
    made and one is on its way, in each of a ring's two directions. Of the steps compiled for v4 those over 2 to 32
    chips are made so; over 64 the product is made whole and reduced by one exchange.
    """
    readers: dict[int, list[Pass | LoopPass]] = {}
    for one in passes:
        for buffer in one.reads:
            readers.setdefault(buffer, []).append(one)
    found = {}
    for one in passes:
        if isinstance(one, LoopPass) or one.kind != "matrix":
            continue
        for buffer in one.writes:
            after = readers.get(buffer, [])
            if buffer in leaving or len(after) != 1 or isinstance(after[0], LoopPass):
                continue
            exchange = after[0].steps[0].collective
            if exchange is None or exchange.kind != "reduce_scatter":
                continue
            part = sum(size[written] for written in after[0].writes)
            if size[buffer] <= _LONGEST_RING * part:
                found[buffer] = min(size[buffer], _PARTS_AT_ONCE * part)
    return found


def _until_the_end(one: Pass | LoopPass) -> set[int]:
    """What a pass reads until it ends. A product's operands are; what its epilogue alone reads may be overwritten."""
    if isinstance(one, LoopPass) or one.kind == "op":
        return set(one.reads)
    return {read for step in one.steps if step.matrix for read in step.reads}


def _may_overwrite(body: Sequence[Pass | LoopPass], index: int, start: int, last: int) -> bool:
    """Whether the pass at `index` may write where `start` lies, which is read for the last time at `last`."""
    return last < index or (last == index and start not in _until_the_end(body[index]))


def _carries(one: LoopPass) -> list[tuple[int, int]]:
    """For each carry, the outer buffer that it starts from and the one that it ends in."""
    carried = one.loop.carried
    return [(start, result) for (start, _), (result, _) in zip(carried[0::2], carried[1::2], strict=True)]


def _carries_inside(one: LoopPass) -> list[tuple[int, int]]:
    """For each carry, the body's buffer at the start of a trip and at its end."""
    carried = one.loop.carried
    return [(start, end) for (_, start), (_, end) in zip(carried[0::2], carried[1::2], strict=True)]


def _taken_over(
    program: ChipProgram, passes: Sequence[Pass | LoopPass], last_read: Mapping[int, int], written: Mapping[int, int]
) -> dict[int, float]:
    """Outputs that lie in a donated argument's memory, with what they cost beside it: nothing, or one copy.

    What an all_gather made is copied there at the end of the program: the compiler does not gather in place.
    """
    buffers = program.buffers
    open_arguments = [buffers[program.arguments[index]] for index in sorted(program.donated)]
    free: dict[int, float] = {}
    for output in program.outputs:
        made = buffers[output]
        match = next((a for a in open_arguments if a.shape == made.shape and a.dtype == made.dtype), None)
        if match is None:
            continue
        open_arguments.remove(match)
        # Where the old value is read after the new one is there, the new one waits elsewhere.
        place = written.get(output, len(passes))
        gathered = place < len(passes) and _gathers(passes[place])
        if match.host or (last_read.get(match.id, -1) <= place and not gathered):
            free[output] = 0.0
    return free


def _gathers(one: Pass | LoopPass) -> bool:
    made = None if isinstance(one, LoopPass) else one.steps[0].collective
    return made is not None and made.kind == "all_gather"


def peak_memory(
    program: ChipProgram, passes: Sequence[Pass | LoopPass], same: Mapping[int, int], platform: str = "tpu"
) -> Peak:
    """The memory of one chip when the program runs. `passes` and `same` come from `fusion.fuse`."""
    known = tables(program, passes, same) if platform == "tpu" else Tables(frozenset(), {})
    walker = _Walker(program, platform, known)
    arguments = frozenset(program.arguments)
    # A program's constants lie in the chip's memory as long as it runs.
    constants = frozenset(program.constants)
    kept = sum(walker.size[id] for id in constants)
    lasting = arguments | constants
    held = lasting | {view for view, source in same.items() if source in lasting}
    last_read: dict[int, int] = {}
    written: dict[int, int] = {}
    for index, one in enumerate(passes):
        for buffer in one.reads:
            last_read[buffer] = index
        for buffer in one.writes:
            written.setdefault(buffer, index)
    given = sum(walker.size[id] for id in arguments)
    free = {same.get(id, id): cost for id, cost in _taken_over(program, passes, last_read, written).items()}
    leaving = frozenset(same.get(id, id) for id in program.outputs)
    found = walker.level(passes, held, free, leaving)
    most = found.bytes
    if known.all:
        most = max(most, _Walker(program, platform, known, many=True).level(passes, held, free, leaving).bytes)
    unchecked = _unchecked(program, found.live) if walker.tpu else {}
    more = most - found.bytes + sum(found.live[id] for id in unchecked)
    names = [(_shown(program.buffers[id], f"buffer {id}"), size) for id, size in found.live.items() if size]
    names += [(_shown(program.buffers[id], f"argument {id}"), walker.size[id]) for id in lasting]
    largest = tuple(sorted(names, key=lambda pair: (-pair[1], pair[0])))
    timeline = tuple((name, size + kept) for name, size in found.timeline or ([("start", 0.0)] if kept else []))
    strange = tuple(sorted(set(unchecked.values())))
    return Peak(given, found.bytes + kept, found.at, largest, timeline, found.stashed, strange, more)


def _unchecked(program: ChipProgram, live: Mapping[int, float]) -> dict[int, str]:
    """Buffers live at the peak that a primitive reads or writes of which no compiled program had much -> it."""
    found: dict[int, str] = {}
    for step, _ in program.walk():
        if step.collective is None and step.op is None and step.primitive not in COMPARED:
            for id in (*step.reads, *step.writes):
                if live.get(id):
                    found.setdefault(id, step.primitive)
    return found


def _shown(buffer: Buffer, otherwise: str) -> str:
    """A buffer's name with what one chip has of it."""
    return f"{buffer.name or otherwise} {buffer.dtype}[{','.join(map(str, buffer.shape))}]"
