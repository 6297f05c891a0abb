"""The scheduler against a device that is played: every token comes once, in order, whatever is batched or sent off."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.serve.kv_cache import PagePool
from capibara.serve.request import QueueFull, Request, SamplingParams
from capibara.serve.scheduler import Limits, Scheduler, Sequence, StepPlan


def scheduler_of(
    pages: int = 32, page_size: int = 4, sequences: int = 4, tokens: int = 16, chunk: int = 16, queue: int = 100
) -> Scheduler:
    limits = Limits(sequences, tokens, tokens, chunk)
    return Scheduler(PagePool(pages, page_size), limits, max_length=64, max_queue=queue)


def request(id: str, prompt: int | list[int], new: int = 4) -> Request:
    tokens = [(sum(id.encode()) * 31 + n * 17) % 50 for n in range(prompt)] if isinstance(prompt, int) else prompt
    return Request(id, tuple(tokens), SamplingParams(max_tokens=new))


class Played:
    """Holds, a page and an offset, which tokens were written there; draws a token from all that a sequence sees."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.written: dict[tuple[int, int], tuple[int, ...]] = {}  # place -> all tokens up to this one
        self.last: dict[int, int] = {}  # slot -> token

    def run(self, plan: StepPlan) -> list[list[int]]:
        size = self.scheduler.pool.page_size
        for source, target in plan.copies:
            for at in range(size):
                if (source, at) in self.written:
                    self.written[target, at] = self.written[source, at]
        drawn = []
        for chunk in plan.chunks:
            sequence, tokens = chunk.sequence, []
            known = sequence.tokens[chunk.start : chunk.start + 1]
            position, token = chunk.start, known[0] if known else self.last[sequence.slot]
            for number in range(chunk.count + plan.steps - 1):
                if number and number < chunk.count:
                    token = sequence.tokens[position]
                pages = sequence.pages.pages
                if position >= sequence.last_token_number - 1:  # its last token is drawn, and nothing comes after it
                    tokens.append(-1)
                    continue
                page, at = pages[position // size], position % size
                before = self.written[pages[(position - 1) // size], (position - 1) % size] if position else ()
                assert len(before) == position, "a token before this one was not written"
                self.written[page, at] = (*before, token)
                position += 1
                if number >= chunk.count - 1 and chunk.samples:
                    token = next_token(self.written[page, at])
                    tokens.append(token)
            if chunk.samples:
                self.last[sequence.slot] = token
            drawn.append(tokens)
        return drawn


def next_token(tokens: tuple[int, ...]) -> int:
    return (sum(tokens) * 7 + len(tokens)) % 50


def wanted(request: Request, max_length: int = 64) -> list[int]:
    tokens = list(request.prompt)
    while len(tokens) < min(len(request.prompt) + request.sampling.max_tokens, max_length):
        tokens.append(next_token(tuple(tokens)))
    return tokens


def play(
    scheduler: Scheduler,
    arrivals: list[tuple[int, Request]],
    *,
    ahead: int = 1,
    steps: int = 1,
    device: Played | None = None,
) -> list[Sequence]:
    """Run until all is done; requests come before the step of their number."""
    device = device or Played(scheduler)
    sent: deque[tuple[StepPlan, list[list[int]]]] = deque()
    sequences: list[Sequence] = []
    arrivals = sorted(arrivals, key=lambda arrival: arrival[0])
    for number in range(2000):
        while arrivals and arrivals[0][0] <= number:
            sequences.append(scheduler.add(arrivals.pop(0)[1]))
        plan = scheduler.plan(steps=steps)
        if plan is not None:
            assert plan.tokens <= scheduler.limits.max_batch_tokens
            slots = [chunk.sequence.slot for chunk in plan.chunks]
            assert len(set(slots)) == len(slots) <= scheduler.limits.max_sequences
            assert all(0 <= slot < scheduler.slots for slot in slots)
            sent.append((plan, device.run(plan)))
        scheduler.pool.check(sequence.pages for sequence in scheduler.sequences())
        while len(sent) > (ahead if plan is not None else 0):
            done, drawn = sent.popleft()
            for chunk, tokens in zip(done.chunks, drawn, strict=True):
                if not chunk.samples:
                    continue
                sequence = chunk.sequence
                tokens = tokens[: max(0, sequence.last_token_number - len(sequence.tokens))]
                scheduler.take(sequence, tokens, drawn=chunk.drawn)
                if not sequence.finished and len(sequence.tokens) >= sequence.last_token_number:
                    scheduler.remove(sequence)
        if not arrivals and not sent and not scheduler.running and not scheduler.waiting:
            assert scheduler.pool.used == 0
            return sequences
    raise AssertionError("it did not come to an end")


@pytest.mark.quick
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("steps", [1, 4])
def test_each_sequence_gets_its_own_tokens(ahead: int, steps: int) -> None:
    requests = [request(str(n), 3 + 5 * n, 9) for n in range(6)]
    sequences = play(scheduler_of(), [(n // 2, r) for n, r in enumerate(requests)], ahead=ahead, steps=steps)
    assert [s.tokens for s in sequences] == [wanted(r) for r in requests]


@pytest.mark.quick
def test_what_came_last_is_sent_away_when_pages_run_out_and_comes_back() -> None:
    scheduler = scheduler_of(pages=7, sequences=3)
    requests = [request("a", 6, 18), request("b", 6, 18), request("c", 6, 6)]
    sequences = play(scheduler, [(0, r) for r in requests])
    assert scheduler.preemptions > 0
    assert [s.tokens for s in sequences] == [wanted(r) for r in requests]
    assert sequences[0].admissions == 1


def test_pieces_of_prompts_go_beside_tokens_and_never_past_the_budget() -> None:
    scheduler = scheduler_of(pages=64, tokens=8, chunk=5)
    scheduler.add(request("short", 2, 8))
    plan = scheduler.plan()
    assert plan is not None
    scheduler.take(plan.chunks[0].sequence, [1], drawn=1)
    scheduler.add(request("long", 20, 2))
    scheduler.add(request("other", 20, 2))
    plan = scheduler.plan()
    assert plan is not None
    # A token of the first, a chunk of the second, and what is left for the third.
    assert [(chunk.sequence.request.id, chunk.count) for chunk in plan.chunks] == [
        ("short", 1),
        ("long", 5),
        ("other", 2),
    ]
    assert not plan.chunks[1].samples
    assert not plan.decodes_only


def test_a_prompt_that_is_wholly_known_computes_its_last_token_on_a_copy() -> None:
    scheduler = scheduler_of()
    device = Played(scheduler)
    prompt = list(range(8))
    sequences = play(scheduler, [(0, request("a", prompt, 2))], device=device)
    sequences += play(scheduler, [(0, request("b", prompt, 2))], device=device)
    assert sequences[1].cached_tokens == 7
    assert sequences[0].tokens == sequences[1].tokens == wanted(request("a", prompt, 2))


def test_two_alike_in_one_step_share_what_it_writes() -> None:
    prompt = list(range(8))
    # The last page, written in this step, cannot be copied before it: the second computes it again.
    both = play(scheduler_of(), [(0, request("a", prompt, 2)), (0, request("b", prompt, 2))])
    assert both[1].cached_tokens == 4
    assert both[0].tokens == both[1].tokens == wanted(request("a", prompt, 2))


def test_several_steps_at_a_time_only_where_nothing_waits() -> None:
    scheduler = scheduler_of()
    scheduler.add(request("a", 3, 9))
    first = scheduler.plan(steps=4)
    assert first is not None
    assert first.steps == 1  # a prompt
    assert scheduler.plan(steps=4).steps == 4  # type: ignore[union-attr]
    sequence = scheduler.add(request("b", 3, 9))
    assert scheduler.plan(steps=4).steps == 1  # type: ignore[union-attr]
    sequence.needs_host = True
    assert scheduler.plan(steps=4).steps == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_next_turn_of_a_conversation_shares_only_what_was_computed(ahead: int) -> None:
    """Whatever the length of an answer, and wherever in a program of several steps it ends."""
    for new in range(1, 13):
        scheduler = scheduler_of()
        device = Played(scheduler)
        (first,) = play(scheduler, [(0, request("a", 5, new))], ahead=ahead, steps=4, device=device)
        turn = request("b", [*first.tokens, 1, 2], 3)
        (second,) = play(scheduler, [(0, turn)], ahead=ahead, steps=4, device=device)
        assert second.tokens == wanted(turn)
        assert second.cached_tokens == (len(first.tokens) - 1) // 4 * 4


def test_what_needs_the_host_waits_for_its_token() -> None:
    scheduler = scheduler_of()
    sequence = scheduler.add(request("a", 3, 9))
    sequence.needs_host = True
    assert scheduler.plan() is not None
    assert scheduler.plan() is None
    scheduler.take(sequence, [1], drawn=1)
    assert scheduler.plan() is not None


def test_limits_may_be_lowered_while_it_runs() -> None:
    scheduler = scheduler_of()
    scheduler.limits.max_sequences = 1
    scheduler.add(request("a", 3, 9))
    scheduler.add(request("b", 3, 9))
    plan = scheduler.plan()
    assert plan is not None
    assert len(plan.chunks) == 1
    scheduler.limits.max_sequences, scheduler.limits.prefill_tokens = 2, 2
    plan = scheduler.plan()
    assert plan is not None
    assert [chunk.count for chunk in plan.chunks] == [1, 2]


@pytest.mark.quick
def test_what_cannot_be_served_is_refused_at_once() -> None:
    scheduler = scheduler_of(pages=4, queue=1, sequences=2)
    with pytest.raises(ValueError, match="fits the cache, which holds 16 tokens"):
        scheduler.add(request("a", 10, 10))
    with pytest.raises(ValueError, match="leaves room for a token in the context of 64"):
        scheduler.add(request("a", 64, 10))
    for id in "abc":  # two find a place at the next step, and one waits
        scheduler.add(request(id, 3))
    with pytest.raises(QueueFull, match="3 requests are waiting"):
        scheduler.add(request("d", 3))
    scheduler.plan()
    assert (len(scheduler.running), len(scheduler.waiting)) == (2, 1)
    with pytest.raises(QueueFull, match="1 requests are waiting"):
        scheduler.add(request("d", 3))


@settings(max_examples=60)
@given(st.data())
def test_all_come_through_whatever_the_sizes(data: st.DataObject) -> None:
    page_size = data.draw(st.integers(1, 5))
    requests = [
        request(str(n), data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=20)), data.draw(st.integers(1, 12)))
        for n in range(data.draw(st.integers(1, 6)))
    ]
    least = max(-(-(len(r.prompt) + r.sampling.max_tokens) // page_size) for r in requests)
    scheduler = scheduler_of(
        pages=least + data.draw(st.integers(0, 6)),
        page_size=page_size,
        sequences=data.draw(st.integers(1, 4)),
        tokens=data.draw(st.integers(4, 12)),
        chunk=data.draw(st.integers(1, 12)),
    )
    arrivals = [(data.draw(st.integers(0, 10)), r) for r in requests]
    sequences = play(scheduler, arrivals, ahead=data.draw(st.integers(0, 2)), steps=data.draw(st.sampled_from([1, 3])))
    tokens = {s.request.id: s.tokens for s in sequences}
    assert tokens == {r.id: wanted(r) for r in requests}


def test_who_waits_is_not_looked_at_again_and_again() -> None:
    """Of 2,000 that wait, none is looked up in the cache while no page is free, and each is cancelled in one go."""
    looked_up: list[int] = []

    class Counted(PagePool):
        def look_up(self, before: Any, tokens: tuple[int, ...]) -> tuple[int, int] | None:
            looked_up.append(len(tokens))
            return super().look_up(before, tokens)

    pool = Counted(8, 4)
    scheduler = Scheduler(pool, Limits(4, 64, 64, 64), max_length=64, max_queue=3000)
    for number in range(2000):
        scheduler.add(request(str(number), 20, 12))
    plan = scheduler.plan()
    assert plan is not None
    assert len(scheduler.running) == 1
    met = 0
    for _ in range(9):
        (sequence,) = scheduler.running
        scheduler.take(sequence, [1], drawn=1)
        pool_full = pool.available < 2
        before = len(looked_up)
        scheduler.plan()
        if pool_full:  # but for the page that the running one may have filled
            assert len(looked_up) - before <= 1
            met += 1
    assert met > 2
    waiting = list(scheduler.waiting)
    scheduler.remove(waiting[1500])
    assert list(scheduler.waiting) == waiting[:1500] + waiting[1501:]
    assert len(scheduler.waiting) == 1998
