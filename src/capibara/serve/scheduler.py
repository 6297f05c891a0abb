"""Which tokens of which sequences the next step computes. Plain Python: no arrays, nothing of the device.

A step has a budget of tokens. Running sequences that want one token come first, then pieces of prompts that are under
way, then new prompts, in the order of their arrival; a long prompt takes at most its chunk of a step, so that others
come through beside it. When a sequence needs a page and none is there, the one that came last gives up its pages and is
computed again later, tokens that it had already given included.

Steps may be sent before the last one's tokens are known: `Sequence.in_flight` counts those. What is planned hangs on
how many tokens a sequence has, and not on which they are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from capibara.errors import rule_error
from capibara.serve.kv_cache import PagePool, SequencePages
from capibara.serve.request import QueueFull, Request

__all__ = ["Chunk", "Limits", "Scheduler", "Sequence", "StepPlan"]


class Sequence:
    """A request on its way: its tokens, and how far they are computed."""

    __slots__ = (
        "admissions",
        "cached_tokens",
        "computed",
        "finished",
        "in_flight",
        "last_token_number",
        "needs_host",
        "one_by_one",
        "pages",
        "prompt_length",
        "request",
        "seed",
        "slot",
        "state",
        "tokens",
    )

    def __init__(self, request: Request, pool: PagePool, max_length: int) -> None:
        self.request = request
        self.tokens = list(request.prompt)
        """Of the prompt, and those of the output that are known."""
        self.prompt_length = len(request.prompt)
        self.last_token_number = min(self.prompt_length + request.sampling.max_tokens, max_length)
        """How many tokens it has at most."""
        self.computed = 0
        """Tokens whose keys are in the cache, or will be when what was sent has run."""
        self.in_flight = 0
        """Tokens that are being drawn and are not known here yet."""
        self.pages = SequencePages(pool, request.sampling.adapter)
        self.slot = -1
        """Its place among running sequences; -1 when it is not running."""
        self.admissions = 0
        """How often it was let run: once more after each preemption, with other pages."""
        self.seed = 0
        self.cached_tokens = 0
        self.finished = False
        self.needs_host = False
        """Whether its next token can only be asked for when the last one is known here."""
        self.one_by_one = False
        """Whether its tokens are drawn by a program of their own, and so never several in one."""
        self.state: Any = None
        """The engine's own: text so far, grammar."""

    @property
    def length(self) -> int:
        """Tokens that it has, those being drawn included."""
        return len(self.tokens) + self.in_flight

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length


@dataclass(slots=True, eq=False)  # one is made a sequence and step: frozen, that would take three times as long
class Chunk:
    """Tokens of one sequence in a step; nothing changes one that is made."""

    sequence: Sequence
    start: int
    """Position of the first."""
    count: int
    """Of tokens, drafted ones included."""
    drawn: int
    """Tokens that are drawn after the last and are then in flight: none past its sequence's last one, whose keys are
    not computed, and none after a piece of a prompt that goes on."""
    draft: tuple[int, ...] = ()
    """Guessed tokens that follow the first."""

    @property
    def samples(self) -> bool:
        """Whether a token is drawn after it: it is no piece of a prompt that goes on."""
        return self.drawn > 0


@dataclass(frozen=True)
class StepPlan:
    """What a step does."""

    chunks: list[Chunk]
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Pages to copy before it, as (from, to)."""
    steps: int = 1
    """How many tokens in a row each sequence draws; more than 1 only where every chunk is one token."""
    admitted: list[Sequence] = field(default_factory=list)
    """Those that begin to run with it, also those that ran before and were sent away."""

    @property
    def tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)

    @property
    def decodes_only(self) -> bool:
        return all(chunk.count == 1 and chunk.drawn for chunk in self.chunks)


@dataclass
class Limits:
    """What a step may hold; a controller may change it while the engine runs."""

    max_sequences: int
    max_batch_tokens: int
    prefill_tokens: int
    """Of prompts, in one step."""
    prefill_chunk: int
    """Of one prompt, in one step."""


class Scheduler:
    """The queue and what runs. `plan` decides a step and books it; `take` books what came back."""

    def __init__(
        self,
        pool: PagePool,
        limits: Limits,
        *,
        max_length: int,
        max_queue: int,
        shares: bool = True,
        keeps: bool = True,
        draft: Callable[[Sequence], tuple[int, ...]] | None = None,
    ) -> None:
        self.pool = pool
        self.limits = limits
        self.slots = limits.max_sequences
        self.max_length = max_length
        self.max_queue = max_queue
        self.shares = shares
        """Whether prompts that begin alike share pages."""
        self.keeps = keeps
        """Whether keys stay from token to token."""
        self.draft = draft
        self.waiting: OrderedDict[Sequence, None] = OrderedDict()
        """In their order; whoever is cancelled is found at once, however many wait."""
        self.running: list[Sequence] = []
        """In the order of their arrival."""
        self._free_slots = list(range(self.slots - 1, -1, -1))
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0

    def check(self, request: Request, *, beside: int = 0, taken: bool = False) -> None:
        """Raise where a request cannot be queued: `QueueFull`, or a `ValueError` that says what is wrong with it.

        Args:
          beside: requests that wait elsewhere, to be queued soon.
          taken: it was let in before: there is room for it.
        """
        # Who can run at the next step does not wait: a queue of one is full when one waits for a place.
        places = min(len(self._free_slots), self.limits.max_sequences - len(self.running))
        waiting = len(self.waiting) + beside
        if not taken and waiting >= self.max_queue + max(places, 0):
            raise QueueFull(f"{waiting} requests are waiting, which is as many as may (max_queue)")
        if len(request.prompt) >= self.max_length:
            raise rule_error(
                f"A prompt leaves room for a token in the context of {self.max_length}",
                f"{len(request.prompt)} tokens",
                f"shorten it to {self.max_length - 1} or fewer",
            )
        held = self.pool.pages * self.pool.page_size
        if min(len(request.prompt) + request.sampling.max_tokens, self.max_length) > held:
            raise rule_error(
                f"A request fits the cache, which holds {held} tokens",
                f"a prompt of {len(request.prompt)} and {request.sampling.max_tokens} new tokens",
                "ask for fewer tokens, or give the engine more pages",
            )

    def add(self, request: Request, *, checked: bool = False) -> Sequence:
        """Queue a request; with `checked`, one that `check` let pass before, and for which there is room."""
        if not checked:
            self.check(request)
        sequence = Sequence(request, self.pool, self.max_length)
        self.waiting[sequence] = None
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """It is done, however it ended: its pages and its place are free."""
        if sequence.finished:
            return
        sequence.finished = True
        sequence.pages.release()
        if sequence.slot >= 0:
            self.running.remove(sequence)
            self._free_slots.append(sequence.slot)
            sequence.slot = -1
        else:
            del self.waiting[sequence]

    def plan(self, *, steps: int = 1) -> StepPlan | None:
        """The next step, booked as sent; None where there is nothing to do before tokens come back.

        Args:
          steps: how many tokens in a row may be drawn, where nothing waits and no sequence needs the host in between.
        """
        steps = self._steps(steps)
        chunks, under_way, preempted = self._one_token_each(steps)
        budget = self.limits.max_batch_tokens - sum(chunk.count for chunk in chunks)
        prompts = min(budget, self.limits.prefill_tokens)
        # Pages that this very step writes. Others may read them in it, since every layer writes before it reads; but a
        # copy is made before the step.
        written = {page for chunk in chunks for page in self._book(chunk)}
        copies: list[tuple[int, int]] = []

        def take(sequence: Sequence) -> None:
            nonlocal prompts
            chunks.append(self._piece(sequence, prompts))
            written.update(self._book(chunks[-1]))
            prompts -= chunks[-1].count

        for sequence in under_way:
            if prompts > 0:
                take(sequence)
        # What was just sent away must not come back over what made it go.
        admitted: list[Sequence] = []
        while not preempted and prompts > 0 and self._admit(copies, written):
            admitted.append(self.running[-1])
            take(self.running[-1])
        return StepPlan(chunks, copies, steps, admitted) if chunks else None

    def take(self, sequence: Sequence, tokens: list[int], *, drawn: int, extra: int = 0) -> None:
        """Book what a step brought a sequence: its new tokens, of `drawn` that were in flight.

        Args:
          extra: drafted tokens that were right, whose keys are in the cache too.
        """
        sequence.in_flight -= drawn
        if sequence.finished:
            return
        sequence.tokens += tokens
        if sequence.slot >= 0:
            sequence.computed += extra
            if self.shares:
                sequence.pages.publish(sequence.tokens, sequence.computed)
            if not self.keeps:
                self._set_aside(sequence)
                self.waiting[sequence] = None

    def sequences(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.waiting

    # The parts of a plan.

    def _steps(self, most: int) -> int:
        if most == 1 or self.draft is not None:
            return 1
        if self.waiting and self._free_slots and len(self.running) < self.limits.max_sequences:
            return 1
        alone = all(s.length - s.computed == 1 and not s.needs_host and not s.one_by_one for s in self.running)
        return most if alone else 1

    def _one_token_each(self, steps: int) -> tuple[list[Chunk], list[Sequence], bool]:
        """Chunks of those that want one token; those whose prompt is under way; whether one had to be sent away."""
        chunks: list[Chunk] = []
        under_way: list[Sequence] = []
        preempted = False
        for sequence in list(self.running):
            if sequence.slot < 0:  # sent away by one before it
                continue
            length, last = sequence.length, sequence.last_token_number
            if length - sequence.computed != 1:
                if length - sequence.computed > 1:
                    under_way.append(sequence)
                continue
            if length >= last or (sequence.needs_host and sequence.in_flight):
                continue
            draft = () if self.draft is None else self.draft(sequence)[: last - length - 1]
            if draft and not sequence.pages.grow(length + len(draft)):
                draft = ()
            drawn, room = (1, length) if steps == 1 else (min(steps, last - length), min(length + steps - 1, last))
            while not sequence.pages.grow(room):
                victim = self.running[-1]
                self._preempt(victim)
                preempted = True
                if victim is sequence:
                    break
            else:
                chunks.append(Chunk(sequence, length - 1, 1 + len(draft), drawn, draft))
        # Who came last goes first, also after it was looked at.
        return chunks, [sequence for sequence in under_way if sequence.slot >= 0] if preempted else under_way, preempted

    def _piece(self, sequence: Sequence, budget: int) -> Chunk:
        left = sequence.length - sequence.computed
        count = min(left, budget, self.limits.prefill_chunk)
        return Chunk(sequence, sequence.computed, count, 1 if count == left else 0)

    def _admit(self, copies: list[tuple[int, int]], written: set[int]) -> bool:
        """Let the first that waits run, where there is a place and pages for all of its tokens."""
        if not self.waiting or not self._free_slots or len(self.running) >= self.limits.max_sequences:
            return False
        # It takes a page at least, however much of it is there already: before its tokens are looked up, all of them.
        if self.running and self.pool.available < 1 + len(self.running):
            return False
        sequence = next(iter(self.waiting))
        if sequence.in_flight:  # preempted, and a token of it is still on its way
            return False
        pages, length = sequence.pages, sequence.length
        cached = pages.match(sequence.tokens) if self.shares else 0
        whole = cached == length  # a token at least is computed, for what comes after it
        # A page of each running sequence is left, or the newcomer would send away those who are there.
        if pages.lacking(length) + whole + len(self.running) > self.pool.available and self.running:
            pages.release()
            return False
        if whole and cached:
            cached -= 1
            if self.pool.available and pages.pages[-1] not in written:
                copy = pages.own(len(pages.pages) - 1)
                copies += [copy] if copy is not None else []
            else:  # the last page is computed again
                pages.release()
                cached = pages.match(sequence.tokens[:-1])
        if not pages.grow(length):
            pages.release()
            return False
        del self.waiting[sequence]
        sequence.slot = self._free_slots.pop()
        sequence.admissions += 1
        sequence.computed = cached
        if not sequence.generated:
            sequence.cached_tokens = cached
            self.prefix_queries += length
            self.prefix_hits += cached
        self.running.append(sequence)
        return True

    def _book(self, chunk: Chunk) -> Collection[int]:
        """The chunk is as good as computed; the pages that others may now use."""
        sequence, drawn = chunk.sequence, chunk.drawn
        sequence.computed += chunk.count - len(chunk.draft) + (drawn - 1 if drawn > 1 else 0)
        sequence.in_flight += drawn
        return sequence.pages.publish(sequence.tokens, sequence.computed) if self.shares else ()

    def _preempt(self, sequence: Sequence) -> None:
        """Its pages go to others; it waits first in line, to be computed again."""
        self.preemptions += 1
        self._set_aside(sequence)
        self.waiting[sequence] = None
        self.waiting.move_to_end(sequence, last=False)

    def _set_aside(self, sequence: Sequence) -> None:
        sequence.pages.release()
        self.running.remove(sequence)
        self._free_slots.append(sequence.slot)
        sequence.slot, sequence.computed = -1, 0
