"""With `batch_invariant` a request's log-probabilities are the same bits in every batch, in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.serve.engines import GREEDY, engine_of, model_of, prompts_of, run

from capibara.models import ModularCapibaraModel
from capibara.serve import Engine, Request, SamplingParams

# Sizes that no tile divides, so that rows at the end of a product are met too.
SIZES: dict[str, Any] = {"max_sequences": 5, "max_batch_tokens": 27, "pages": 64}
PROMPTS = prompts_of(5, 16, 9, 30, 1, 22)


def _in_bfloat16(name: str) -> ModularCapibaraModel:
    whole = model_of(name)
    return ModularCapibaraModel(whole.config, params=whole.params, precision="bfloat16")


def _bits(
    engine: Engine, prompts: list[tuple[int, ...]], *, every: int = 0, beside: tuple[Request, ...] = (), **asked: Any
) -> list[Any]:
    """Each prompt's tokens with their log-probabilities and those of the 20 likeliest, as floats that are compared
    without any tolerance."""
    sampling = SamplingParams(**{"max_tokens": 6, "logprobs": 20, **GREEDY, **asked})
    requests = [Request(str(number), prompt, sampling) for number, prompt in enumerate(prompts)]
    outputs = run(engine, [*beside, *requests], every=every)
    return [[t for output in outputs[request.id] for t in output.logprobs or ()] for request in requests]


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "window": ("window", {}),
    "experts": ("moe", {}),
    "8-bit cache and weights": ("attention", {"cache_dtype": "int8", "weights": "int8"}),
    "guesses": ("attention", {"speculative_tokens": 2, "max_sequences": 4}),
    "attention": ("attention", {}),
}


@pytest.mark.spread(2)
@pytest.mark.quick
@pytest.mark.parametrize("case", CASES)
def test_alone_and_among_others_the_bits_are_the_same(case: str, programs: Path) -> None:
    name, changes = CASES[case]
    engine = engine_of(_in_bfloat16(name), programs, **{**SIZES, **changes}, batch_invariant=True)
    together = _bits(engine, PROMPTS)
    assert all(len(each) == 6 for each in together)
    assert [_bits(engine, [prompt])[0] for prompt in PROMPTS] == together
    assert _bits(engine, PROMPTS, every=3) == together
    assert _bits(engine, PROMPTS[::-1])[::-1] == together
    assert engine.stats().prefix_hits > 0  # of those before: keys from another batch are the same bits, too
    assert sum(key[0] == "forward" for key in engine.runner._executables) == 1


def test_prompts_cut_otherwise_or_computed_again_have_the_same_bits(programs: Path) -> None:
    model = _in_bfloat16("attention")
    together = _bits(engine_of(model, programs, **SIZES, batch_invariant=True, prefix_sharing=False), PROMPTS)
    cut = engine_of(model, programs, **SIZES, batch_invariant=True, prefill_chunk=3)
    assert _bits(cut, PROMPTS) == together
    few = engine_of(model, programs, **{**SIZES, "pages": 12}, batch_invariant=True)
    assert _bits(few, PROMPTS) == together
    assert few.stats().preemptions > 0


def test_without_it_the_batch_shows_in_the_bits(programs: Path) -> None:
    """What the tests above would see: lone tokens have shapes of their own, and their sums another order."""
    engine = engine_of(_in_bfloat16("attention"), programs, **{**SIZES, "max_sequences": 2})
    assert [_bits(engine, [prompt])[0] for prompt in PROMPTS[:2]] != _bits(engine, PROMPTS[:2])


def test_what_neighbours_ask_for_does_not_choose_the_program(programs: Path) -> None:
    """A neighbour with a penalty needs another form of drawing; a request's odds are still of the same program."""
    engine = engine_of(_in_bfloat16("attention"), programs, **SIZES, batch_invariant=True)
    asked = {"temperature": 0.9, "top_p": 0.7, "top_k": 40, "seed": 3}
    alone = _bits(engine, PROMPTS[1:2], **asked)
    penalised = SamplingParams(max_tokens=6, presence_penalty=1.0, ignore_eos=True)
    assert _bits(engine, PROMPTS[1:2], beside=(Request("beside", PROMPTS[0], penalised),), **asked) == alone
    _bits(engine, PROMPTS[:1], logprobs=None)
    drawing = {key[2] for key in engine.runner._executables if key[0] == "draw"}
    assert drawing == {"penalised"}  # what draws nothing but the likeliest is the forward program
    warmed = {key[2] for key in engine.runner._all_programs() if key[0] == "draw"}
    assert warmed == drawing


def test_what_cannot_be_invariant_is_refused(programs: Path) -> None:
    with pytest.raises(ValueError, match="batch_invariant is for models of attention"):
        engine_of(model_of("hybrid"), programs, batch_invariant=True)
    with pytest.raises(ValueError, match="Windows are batch-invariant with attention by xla or reference"):
        engine_of(model_of("window"), programs, batch_invariant=True, attention="hopper")


def test_windows_are_walked_from_the_start_of_the_sequence(programs: Path) -> None:
    assert engine_of(model_of("window"), programs, batch_invariant=True).runner.programs.attention == "xla"
    assert engine_of(model_of("window"), programs).runner.programs.attention is None
    assert engine_of(model_of("attention"), programs, batch_invariant=True).runner.programs.attention is None
