"""What the compiler changes before it schedules: what crosses the edge of a loop, and what is stored narrow.

Out of a loop: conversions of a scanned weight. A loop over layers that converts each layer's float32 weights to
bfloat16 reads the same as one that slices weights converted beforehand, and the TPU compiler chooses the second: the
narrow copy of all layers then lives from the first loop that reads it to the last.
Into a loop: what is counted or broadcast. A causal mask that the trace computed once, before the loop, is two counters
compared, and is computed where it is read; as an array it would be as large as the scores.
Narrow: a float32 result that only matrix products read. At default precision they round it to bfloat16 anyway, so the
TPU compiler stores it so.
(All seen in the training steps compiled for v4, 2026-11-15.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from capibara.cost.kinds import CHEAP, FREE, MATRIX, VIEW
from capibara.program.chip import Buffer, ChipProgram, Loop, Step

__all__ = ["hoist_conversions", "narrow_operands", "sink_constants"]

# A buffer is as good as constant when so little of it comes from memory.
_FROM_MEMORY = 1 / 64


def sink_constants(program: ChipProgram) -> ChipProgram:
    """The program with counters, broadcasts and masks computed inside the loops that read them."""
    return replace(program, steps=_sunk_level(program.steps, program.buffers, frozenset(program.outputs)))


def _sunk_level(
    steps: Sequence[Step | Loop], buffers: dict[int, Buffer], leaving: frozenset[int]
) -> tuple[Step | Loop, ...]:
    makers = _light(steps, buffers)
    made: list[Step | Loop] = []
    for step in steps:
        if isinstance(step, Loop):
            fixed = {outer for outer, _ in step.carried} | {outer for outer, _ in step.sliced}
            wanted = [read for read in step.reads if read in makers and read not in fixed]
            chain = _chain(wanted, makers)
            inside = {written for one in chain for written in one.writes}
            outside = [read for one in chain for read in one.reads if read not in inside]
            reads = tuple(dict.fromkeys([*(r for r in step.reads if r not in wanted), *outside]))
            ends = {end for _, end in step.carried} | {body for body, _ in step.stacked}
            step = replace(step, reads=reads, body=_sunk_level((*chain, *step.body), buffers, frozenset(ends)))
        made.append(step)
    return _without_unread(made, leaving)


def _light(steps: Iterable[Step | Loop], buffers: dict[int, Buffer]) -> dict[int, Step]:
    """Buffer -> the step that makes it, where next to nothing of it comes from memory."""
    makers: dict[int, Step] = {}
    source: dict[int, float] = {}
    for step in steps:
        if isinstance(step, Loop) or step.collective is not None or len(step.writes) != 1:
            continue
        if step.primitive not in FREE and step.primitive not in CHEAP and step.primitive not in VIEW:
            continue
        (written,) = step.writes
        entering = sum(source.get(read, buffers[read].bytes) for read in step.reads)
        if entering <= _FROM_MEMORY * buffers[written].bytes:
            makers[written], source[written] = step, entering
    return makers


def _chain(wanted: Sequence[int], makers: dict[int, Step]) -> list[Step]:
    """The steps that make these buffers, each after those it reads from."""
    found: dict[int, Step] = {}

    def add(buffer: int) -> None:
        step = makers.get(buffer)
        if step is not None and buffer not in found:
            for read in step.reads:
                add(read)
            found[buffer] = step

    for one in wanted:
        add(one)
    return list(found.values())


def _without_unread(steps: Sequence[Step | Loop], leaving: frozenset[int]) -> tuple[Step | Loop, ...]:
    """Drop what only fed a loop that now makes it itself."""
    read = set(leaving)
    kept: list[Step | Loop] = []
    for step in reversed(steps):
        dead = isinstance(step, Step) and (step.primitive in FREE or step.primitive in CHEAP or step.primitive in VIEW)
        if dead and not any(written in read for written in step.writes):
            continue
        read.update(step.reads)
        kept.append(step)
    return tuple(reversed(kept))


def hoist_conversions(program: ChipProgram) -> ChipProgram:
    """The program with conversions of sliced inputs moved in front of their loops; one copy serves all loops."""
    buffers = dict(program.buffers)
    steps = _level(program.steps, buffers)
    return program if len(buffers) == len(program.buffers) else replace(program, steps=steps, buffers=buffers)


def _level(steps: Iterable[Step | Loop], buffers: dict[int, Buffer]) -> tuple[Step | Loop, ...]:
    made: list[Step | Loop] = []
    # (wide stack, narrow dtype) -> the narrow stack that an earlier loop of this level already has
    narrow: dict[tuple[int, str], int] = {}
    for step in steps:
        if isinstance(step, Loop):
            before, loop = _hoisted(replace(step, body=_level(step.body, buffers)), buffers, narrow)
            made += [*before, loop]
        else:
            made.append(step)
    return tuple(made)


def _hoisted(loop: Loop, buffers: dict[int, Buffer], narrow: dict[tuple[int, str], int]) -> tuple[list[Step], Loop]:
    users: dict[int, list[Step | Loop]] = {}
    for step in loop.body:
        for read in step.reads:
            users.setdefault(read, []).append(step)
    kept = {end for _, end in loop.carried} | {body for body, _ in loop.stacked}
    before: list[Step] = []
    gone: set[int] = set()
    sliced: list[tuple[int, int]] = []
    reads = list(loop.reads)
    for outer, body in loop.sliced:
        converts = [one for one in users.get(body, ()) if isinstance(one, Step) and _narrows(one, buffers)]
        if not converts or len(converts) != len(users[body]) or body in kept:
            sliced.append((outer, body))
            continue
        dtypes = {buffers[one.writes[0]].dtype for one in converts}
        if len(dtypes) > 1:
            sliced.append((outer, body))
            continue
        dtype = dtypes.pop()
        stack = narrow.get((outer, dtype))
        if stack is None:
            stack = narrow[outer, dtype] = max(buffers) + 1
            wide, slim = buffers[outer], buffers[converts[0].writes[0]]
            share = slim.bytes / buffers[body].bytes
            name = f"{wide.name} in {dtype}" if wide.name else ""
            buffers[stack] = Buffer(stack, wide.bytes * share, wide.shape, dtype, name)
            flops = converts[0].flops * loop.trips
            before.append(Step("convert_element_type", converts[0].name, (outer,), (stack,), flops, dtype=dtype))
        for one in converts:
            sliced.append((stack, one.writes[0]))
            gone.add(id(one))
        reads.append(stack)
    if not gone:
        return before, loop
    body_left = tuple(one for one in loop.body if id(one) not in gone)
    # A wide stack that nothing in the loop reads any more is not one of its operands.
    used = {outer for outer, _ in sliced} | {outer for outer, _ in loop.carried}
    used |= {read for one in body_left for read in one.reads}
    return before, replace(loop, body=body_left, sliced=tuple(sliced), reads=tuple(r for r in reads if r in used))


def _narrows(step: Step, buffers: dict[int, Buffer]) -> bool:
    if step.primitive != "convert_element_type" or len(step.reads) != 1 or len(step.writes) != 1:
        return False
    return buffers[step.writes[0]].bytes < buffers[step.reads[0]].bytes


def narrow_operands(program: ChipProgram) -> ChipProgram:
    """The program with float32 results that only products read stored as bfloat16."""
    readers: dict[int, list[Step]] = {}
    tied = {*program.arguments, *program.outputs}
    made: set[int] = set()

    def walk(steps: Iterable[Step | Loop]) -> None:
        for step in steps:
            if isinstance(step, Loop):
                tied.update(step.reads, step.writes)
                tied.update(
                    one for pairs in (step.carried, step.sliced, step.stacked) for pair in pairs for one in pair
                )
                walk(step.body)
            else:
                if step.collective is None and step.op is None:
                    made.update(step.writes)
                for read in step.reads:
                    readers.setdefault(read, []).append(step)

    walk(program.steps)
    known: dict[int, bool] = {}

    def only_products(buffer: int) -> bool:
        if buffer not in known:
            uses = readers.get(buffer, [])
            known[buffer] = (
                buffer not in tied
                and bool(uses)
                and all(
                    one.primitive in MATRIX or (one.primitive in VIEW and all(map(only_products, one.writes)))
                    for one in uses
                )
            )
        return known[buffer]

    narrow = {
        id: replace(buffer, bytes=buffer.bytes / 2, dtype="bfloat16")
        for id, buffer in program.buffers.items()
        if buffer.dtype == "float32" and id in made and only_products(id)
    }
    return replace(program, buffers={**program.buffers, **narrow}) if narrow else program
