"""Where a program of the Hopper backward kernel is, and the steps of queries it goes through."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.ops.attention.pallas_gpu_grad_operands import COUNTS
from capibara.kernels.ops.attention.pallas_gpu_grad_steps import Steps


@dataclasses.dataclass(frozen=True)
class Visit:
    """One step of queries of one head: the `member`-th of those that share the program's key head."""

    walk: Walk
    member: Any
    step: Any
    number: Any = None
    """How many visits came before, where a table lists them; a range counts by itself."""

    @property
    def done(self) -> Any:
        if self.number is not None:
            return self.number
        return self.member * (self.walk.end - self.walk.begin) + self.step - self.walk.begin

    @property
    def first_row(self) -> Any:
        if self.number is not None:
            return self.step * self.walk.steps.block_q
        return self.walk.steps.first_row(self.step, self.walk.first_key)


class Walk:
    """A program's place in the grid, and its visits: a range of steps for each head, or a table of them all."""

    def __init__(self, steps: Steps, refs: dict[str, Any]) -> None:
        self.steps = steps
        self.batch, self.launch_head, self.warpgroup = (lax.axis_index(n) for n in ("batch", "head", "warpgroup"))
        self.kv_head = self.launch_head + steps.first_head
        self.first_key = steps.first_key(lax.axis_index("tile"))
        self.table: Any = refs.get("table")
        if self.table is None:
            self.begin, self.end = steps.live(self.first_key)
        else:
            self.begin, self.end = self.first_key * 0, self.read(1)

    def shared(self, ref: Any, head: Any) -> tuple[Any, Any]:
        """The batch and head of an operand that may have one of either for all."""
        return self.batch if ref.shape[0] > 1 else 0, head if ref.shape[1] > 1 else 0

    def dq_at(self, member: Any, rows: Any) -> tuple[Any, ...]:
        """Where rows of queries of a head lie in the sums of dq, which hold the launch's heads alone."""
        return self.steps.at(self.batch, self.launch_head * self.steps.group + member, rows)

    def read(self, place: Any) -> Any:
        """An entry of the program's row of the table."""
        tile = lax.div(self.first_key, self.steps.tile)
        return self.table[(*self.shared(self.table, self.kv_head), tile, place)]

    def _listed(self, number: Any, entry: Any) -> Visit:
        count = self.steps.count
        return Visit(self, lax.div(entry, count), lax.rem(entry, count), number)

    def compute(self, my_first_key: Any, rows: int, body: Callable[[Visit, bool], None], masks: bool) -> None:
        """body(visit, masked) for every visit, by a warpgroup with `rows` keys. A table's last ones are masked when
        `masks`: otherwise there are none that see the tile in part."""
        steps = self.steps
        zero = self.first_key * 0
        if self.table is None:
            whole = steps.whole(my_first_key, rows, self.begin, self.end)

            @pl.loop(zero, zero + steps.group)
            def _head(member: Any) -> None:
                steps.visit(self.begin, whole, self.end, lambda step, masked: body(Visit(self, member, step), masked))

            return

        def run(first: Any, last: Any, entry: Any, masked: bool) -> Any:
            def one(i: Any, entry: Any) -> Any:
                number = first + i
                following = self.read(COUNTS + number + 1)  # a visit ahead: its latency is hidden
                body(self._listed(number, entry), masked)
                return following

            # From zero on: inside shard_map a counter may not start from what was read from an operand.
            return lax.fori_loop(zero, last - first, one, entry)

        whole_end = self.read(0)
        entry = run(zero, whole_end, self.read(COUNTS + zero), False)
        if masks:
            run(whole_end, self.end, entry, True)

    def fetch(self, sources: tuple[tuple[Any, ...], ...], more: Callable[..., list[tuple[Any, Any]]]) -> None:
        """Stream every visit's operands, as the stages drain.

        A source is (rows, line, their shared memory, arrived, drained); `more(rows, head, slot)` are further lines and
        their places, which come with the first source.
        """
        steps = self.steps

        def copy(done: Any, head: Any, first_row: Any) -> None:
            rows = pl.ds(first_row, steps.block_q)
            for number, (source, line, smem, line_smem, arrived, drained) in enumerate(sources):
                stages = smem.shape[0]
                slot = lax.rem(done, stages)

                @pl.when(done >= stages)
                def _(drained: Any = drained, slot: Any = slot) -> None:
                    plgpu.barrier_wait(drained.at[slot])

                lines = [(source.at[steps.at(self.batch, head, rows)], smem.at[slot])]
                lines.append((line.at[self.batch, head, rows], line_smem.at[slot]))
                for from_gmem, to_smem in (*lines, *(more(rows, head, slot) if number == 0 else ())):
                    plgpu.copy_gmem_to_smem(from_gmem, to_smem, arrived.at[slot])

        if self.table is not None:

            @pl.loop(self.begin, self.end)
            def _visit(number: Any) -> None:
                visit = self._listed(number, self.read(COUNTS + number))
                copy(number, self.kv_head * steps.group + visit.member, visit.first_row)

            return

        # Once more, rather than from above: these values live in the few registers of this warpgroup.
        begin, end = steps.live(self.first_key)
        zero = self.first_key * 0

        @pl.loop(zero, zero + steps.group)
        def _head(member: Any) -> None:
            head = self.kv_head * steps.group + member

            @pl.loop(begin, end)
            def _step(step: Any) -> None:
                copy(member * (end - begin) + step - begin, head, steps.first_row(step, self.first_key))
