"""Drafts change how many steps an answer takes, and no token of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.serve.engines import answers, engine_of, model_of, prompts_of, wanted

from capibara.serve.speculation import NgramDrafts


@pytest.mark.quick
def test_what_followed_the_longest_run_last_is_guessed() -> None:
    drafts = NgramDrafts(longest=3)
    tokens = [5, 1, 2, 7, 1, 2, 8, 9, 3, 1, 2]
    assert drafts.guess(tokens, 2) == (8, 9)  # the later of the two places
    assert drafts.guess([*tokens, 7], 3) == (1, 2, 8)  # three tokens say more than one
    assert drafts.guess([*tokens, 7, 4], 3) == ()  # 4 is new


def test_a_long_sequence_is_looked_through_once() -> None:
    drafts = NgramDrafts(longest=2)
    tokens = list(range(50)) * 2
    for length in range(51, 96):
        assert drafts.guess(tokens[:length], 4) == tuple(tokens[length : length + 4])
    assert drafts.guess(tokens, 2) == (0, 1)
    assert len(drafts._after) <= 2 * len(tokens)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "seed": 3}], ids=["greedy", "drawn"])
def test_drafts_change_no_token_and_save_steps(sampling: dict[str, float], programs: Path) -> None:
    model = model_of("attention")
    (base,) = prompts_of(6)
    # The model's own continuation twice: what it says next was said before.
    prompt = (*base, *wanted("attention", base, 12), *base)
    prompts = [prompt, *prompts_of(5, 11)]
    without = engine_of(model, programs)
    expected = answers(without, prompts, 20, **sampling)
    engine = engine_of(model, programs, speculative_tokens=3)
    assert answers(engine, prompts, 20, **sampling) == expected
    stats = engine.stats()
    assert stats.drafted > 0
    if not sampling:
        before, steps = without.stats().steps, stats.steps
        answers(without, [prompt], 20)
        answers(engine, [prompt], 20)
        assert engine.stats().accepted > 0
        assert engine.stats().steps - steps < without.stats().steps - before


def test_penalised_requests_are_not_drafted_for(programs: Path) -> None:
    model = model_of("attention")
    prompts = [(7, 8, 9) * 4]
    expected = answers(engine_of(model, programs), prompts, presence_penalty=1.5)
    engine = engine_of(model, programs, speculative_tokens=3)
    assert answers(engine, prompts, presence_penalty=1.5) == expected
    assert engine.stats().drafted == 0


def test_a_model_that_keeps_a_state_takes_no_drafts(programs: Path) -> None:
    with pytest.raises(ValueError, match="whose past can be taken back"):
        engine_of(model_of("hybrid"), programs, speculative_tokens=2)
