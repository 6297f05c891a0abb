"""The engine: greedy tokens are the plain forward pass's, however requests are batched, cut, shared or sent away."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.serve.engines import GREEDY, answers, engine_of, model_of, prompts_of, run, tokens_of, wanted

from capibara.models import ModularCapibaraModel
from capibara.models.weights.generation_config import GenerationDefaults
from capibara.serve import EngineConfig, QueueFull, Request, SamplingParams
from capibara.serve.engine import StepTime


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", ["window", "moe", "hybrid", "attention"])
@pytest.mark.quick
def test_greedy_tokens_are_the_plain_models(name: str, programs: Path) -> None:
    prompts = prompts_of(5, 16, 30, 1, 12)
    engine = engine_of(model_of(name), programs)
    assert answers(engine, prompts, every=2) == [wanted(name, prompt) for prompt in prompts]


CHANGES: dict[str, dict[str, Any]] = {
    "not asynchronous": {"asynchronous": False},
    "several steps in one program": {"decode_steps": 3},
    "prompts in small chunks": {"prefill_chunk": 3},
    "nothing shared": {"prefix_sharing": False},
    "one shape for all": {"batch_invariant": True},
    "drafts": {"speculative_tokens": 3},
    "no keys kept": {"keep_keys": False},
    "attention by name": {"attention": "reference"},
}


@pytest.mark.parametrize("change", CHANGES)
def test_how_it_runs_does_not_change_the_tokens(change: str, programs: Path) -> None:
    prompts = prompts_of(5, 16, 30, 1, 12)
    engine = engine_of(model_of("attention"), programs, **CHANGES[change])
    assert answers(engine, prompts) == [wanted("attention", prompt) for prompt in prompts]
    # Again, from pages that are there already.
    assert answers(engine, prompts) == [wanted("attention", prompt) for prompt in prompts]
    # Whole pages, and all but the last token where that is the whole prompt; a few pages had to go meanwhile.
    shared = engine.stats().prefix_hits
    assert shared == 0 if change in ("nothing shared", "no keys kept") else 4 + 15 + 28 <= shared <= 4 + 15 + 28 + 11


def test_who_is_done_inside_of_a_program_of_several_steps_computes_no_more(programs: Path) -> None:
    """Nothing more is read of it, nor written: its keys are those of its tokens, but for the last, which is drawn."""
    engine = engine_of(model_of("attention"), programs, decode_steps=8, prefix_sharing=False)
    prompts = prompts_of(5, 6)
    asked = [Request(str(n), prompts[n], SamplingParams(max_tokens=n_new, **GREEDY)) for n, n_new in enumerate((3, 9))]
    outputs = tokens_of(run(engine, asked))
    assert outputs == {"0": wanted("attention", prompts[0])[:3], "1": wanted("attention", prompts[1], 9)}
    keys = np.asarray(engine.runner.state.cache[0]["attention"]["key"])
    assert np.any(keys, axis=-1).sum() == (5 + 3 - 1) + (6 + 9 - 1)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_conversation_goes_on_after_an_answer_that_ended_inside_of_a_program(
    asynchronous: bool, programs: Path
) -> None:
    """The last token fills a page, and its keys were never computed: the page is not one that others may use."""
    engine = engine_of(model_of("attention"), programs, decode_steps=8, asynchronous=asynchronous)
    (start,) = prompts_of(6, seed=10)
    first = answers(engine, [start], 10)[0]
    (more,) = prompts_of(3, seed=99)
    turn = (*start, *first, *more)
    assert answers(engine, [turn]) == [wanted("attention", turn)]
    assert engine.stats().prefix_hits == 12


@pytest.mark.parametrize("name", ["hybrid", "attention"])
def test_what_is_sent_away_comes_back_with_the_same_tokens(name: str, programs: Path) -> None:
    prompts = prompts_of(9, 10, 11, 12)
    engine = engine_of(model_of(name), programs, pages=11)
    assert answers(engine, prompts, 20) == [wanted(name, prompt, 20) for prompt in prompts]
    assert engine.stats().preemptions > 0


def test_a_shared_beginning_is_counted_and_told(programs: Path) -> None:
    engine = engine_of(model_of("attention"), programs)
    (start,) = prompts_of(12)
    asked = SamplingParams(max_tokens=2, **GREEDY)
    run(engine, [Request("a", (*start, 7), asked)])
    outputs = run(engine, [Request("b", (*start, 9, 9), asked)])
    assert outputs["b"][-1].usage.cached_tokens == 12
    assert (engine.stats().prefix_queries, engine.stats().prefix_hits) == (27, 12)


def test_models_with_a_state_share_nothing(programs: Path) -> None:
    engine = engine_of(model_of("hybrid"), programs)
    prompts = prompts_of(12)
    assert answers(engine, prompts) == answers(engine, prompts)
    assert engine.stats().prefix_hits == 0


def test_outputs_end_once_and_say_why(programs: Path) -> None:
    engine = engine_of(model_of("attention"), programs)
    (prompt,) = prompts_of(6)
    tokens = wanted("attention", prompt)
    requests = [
        Request("length", prompt, SamplingParams(max_tokens=3, **GREEDY)),
        Request("token", prompt, SamplingParams(max_tokens=8, stop_token_ids=(tokens[2],), **GREEDY)),
        Request("context", prompt * 10, SamplingParams(max_tokens=50, **GREEDY)),
    ]
    outputs = run(engine, requests)
    ends = {id: (each[-1].finish_reason, each[-1].stop_reason, each[-1].usage) for id, each in outputs.items()}
    assert ends["length"][:2] == ("length", None)
    assert ends["token"][:2] == ("stop", tokens[2])
    first = tokens.index(tokens[2])
    assert tokens_of(outputs)["token"] == tokens[: first + 1]
    assert ends["context"][0] == "length"
    assert ends["context"][2].completion_tokens == 4  # of a context of 64
    assert engine.stats().finished == {"length": 2, "stop": 1}
    assert engine.stats().generation_tokens == 3 + first + 1 + 4


def test_how_long_a_request_waited_is_told_with_its_output(programs: Path) -> None:
    """From its arrival, wherever that was, until it first ran: who is sent away and comes back has not waited anew."""
    engine = engine_of(model_of("attention"), programs, pages=11)
    asked = SamplingParams(max_tokens=20, **GREEDY)
    requests = [
        Request(str(n), prompt, asked, arrival=time.monotonic() - 100 * n)
        for n, prompt in enumerate(prompts_of(9, 10, 11, 12))
    ]
    engine.add(Request("never", (1, 2), asked))
    engine.cancel("never")
    started = time.monotonic()
    assert [output.waited_s for output in engine.step()] == [None]
    outputs = run(engine, requests)
    assert engine.stats().preemptions > 0
    for number, request in enumerate(requests):
        waits = {output.waited_s for output in outputs[request.id]}
        assert len(waits) == 1
        assert 100 * number <= (waits.pop() or 0) <= 100 * number + time.monotonic() - started + 1


def test_steps_that_nothing_is_waited_for_are_not_timed(programs: Path) -> None:
    """Two pieces of a prompt, of which nothing is drawn, and a third that ends when all are done: no times of steps."""
    engine = engine_of(model_of("attention"), programs, prefill_chunk=4)
    answers(engine, prompts_of(12), 4)  # so that nothing is compiled
    told: list[StepTime] = []
    engine.on_step = told.append
    answers(engine, prompts_of(12, seed=1), 4)
    assert [step.plan.tokens for step in told] == [1, 1, 1]


def test_a_step_of_likeliest_tokens_is_one_program(programs: Path) -> None:
    """Starting one takes the host as long as it may take a device to run one; drawn tokens replace the likeliest."""
    engine = engine_of(model_of("attention"), programs, max_sequences=2, decode_steps=1)
    prompts = prompts_of(5, 7)
    alone = answers(engine, prompts)
    assert alone == [wanted("attention", prompt) for prompt in prompts]
    assert {key[0] for key in engine.runner._executables} == {"forward"}
    hot = SamplingParams(max_tokens=8, temperature=5.0, seed=1, ignore_eos=True)
    cold = SamplingParams(max_tokens=8, **GREEDY)
    tokens = tokens_of(run(engine, [Request("cold", prompts[0], cold), Request("hot", prompts[1], hot)]))
    assert {key[0] for key in engine.runner._executables} == {"forward", "draw"}
    assert tokens["cold"] == alone[0]
    assert tokens["hot"] != alone[1]


def test_programs_of_forms_that_nobody_asks_for_are_made_when_somebody_does(programs: Path) -> None:
    engine = engine_of(model_of("attention"), programs, cache_folder=None, max_sequences=1, decode_steps=2)
    few = engine.warm_up(forms=("greedy",))
    prompts = prompts_of(5)
    assert answers(engine, prompts) == [wanted("attention", prompts[0])]
    assert engine.compilations == few.programs
    answers(engine, prompts, temperature=1.0, seed=1)
    assert engine.compilations > few.programs
    assert engine.warm_up().programs > 0
    with pytest.raises(ValueError, match="form of drawing"):
        engine.warm_up(forms=("best",))  # type: ignore[arg-type]


def test_end_of_text_ends_a_request_unless_it_is_ignored(programs: Path) -> None:
    engine = engine_of(model_of("attention"), programs)
    (prompt,) = prompts_of(6)
    tokens = wanted("attention", prompt)
    engine.eos_ids = frozenset([tokens[1]])
    asked = {"max_tokens": 6, "temperature": 0}
    outputs = run(
        engine,
        [Request("a", prompt, SamplingParams(**asked)), Request("b", prompt, SamplingParams(ignore_eos=True, **asked))],
    )
    assert (outputs["a"][-1].finish_reason, outputs["a"][-1].stop_reason) == ("stop", None)
    assert tokens_of(outputs)["b"] == tokens[:6]


def test_every_end_of_text_of_the_models_makers_ends_a_request(programs: Path) -> None:
    whole = model_of("attention")
    (prompt,) = prompts_of(6)
    tokens = wanted("attention", prompt)
    model = ModularCapibaraModel(whole.config, params=whole.params, precision="float32")
    model.generation = GenerationDefaults(eos_ids=(250, tokens[1]))
    engine = engine_of(model, programs)
    assert engine.eos_ids == {250, tokens[1], engine.tokenizer.eos_id}
    output = run(engine, [Request("a", prompt, SamplingParams(max_tokens=6, temperature=0))])["a"][-1]
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert output.usage.completion_tokens == tokens.index(tokens[1]) + 1


def test_stop_strings_are_cut_out_and_text_comes_as_it_is_certain(programs: Path) -> None:
    engine = engine_of(model_of("attention"), programs)
    (prompt,) = prompts_of(6)
    tokens = wanted("attention", prompt)
    whole = engine.tokenizer.decode(tokens)
    outputs = run(engine, [Request("plain", prompt, SamplingParams(max_tokens=8, **GREEDY))])
    assert "".join(output.text for output in outputs["plain"]) == whole
    readable = [n for n, character in enumerate(whole) if character != "\ufffd" and whole.index(character) == n and n]
    if not readable:
        pytest.skip("the model says nothing but broken characters")
    stop = whole[readable[0]]
    outputs = run(engine, [Request("cut", prompt, SamplingParams(max_tokens=8, stop=(stop,), **GREEDY))])
    assert "".join(output.text for output in outputs["cut"]) == whole[: readable[0]]
    assert (outputs["cut"][-1].finish_reason, outputs["cut"][-1].stop_reason) == ("stop", stop)


@pytest.mark.parametrize("when", [0, 1, 3])
def test_a_cancelled_request_leaves_nothing_behind(when: int, programs: Path) -> None:
    engine = engine_of(model_of("attention"), programs)
    prompts = prompts_of(6, 7)
    asked = SamplingParams(max_tokens=8, **GREEDY)
    engine.add(Request("gone", prompts[0], asked))
    engine.add(Request("stays", prompts[1], asked))
    outputs = [output for _ in range(when) for output in engine.step()]
    assert engine.cancel("gone")
    assert not engine.cancel("gone")
    while engine.has_work():
        outputs += engine.step()
        engine.check()
    ends = [output for output in outputs if output.id == "gone" and output.finish_reason]
    assert [end.finish_reason for end in ends] == ["cancelled"]
    assert [t for output in outputs if output.id == "stays" for t in output.tokens] == wanted("attention", prompts[1])
    assert engine.stats().pages_used == 0
    engine.add(Request("gone", prompts[0], asked))  # the name is free again
    engine.cancel("gone")


def test_what_is_wrong_with_a_request_is_said_at_once(programs: Path) -> None:
    engine = engine_of(model_of("attention"), programs, max_queue=1)
    engine.limits.max_sequences = 0
    with pytest.raises(ValueError, match="Token ids are from 0 to 258"):
        engine.add(Request("a", (259,)))
    with pytest.raises(ValueError, match="Unknown adapter 'x'"):
        engine.add(Request("a", (1,), SamplingParams(adapter="x")))
    with pytest.raises(ValueError, match="leaves room for a token"):
        engine.add(Request("a", (1,) * 64))
    engine.add(Request("a", (1,)))
    with pytest.raises(ValueError, match="unlike that of any that is running"):
        engine.add(Request("a", (1,)))
    with pytest.raises(QueueFull):
        engine.add(Request("b", (1,)))
    engine.close()
    assert [output.finish_reason for output in engine.step()] == ["cancelled"]


def test_a_cpu_keeps_keys_in_32_bits_and_they_are_the_same_numbers(programs: Path) -> None:
    """In 16 bits XLA would turn the whole cache into 32 and back, in every layer of every step."""
    whole = model_of("attention")
    model = ModularCapibaraModel(whole.config, params=whole.params, precision="bfloat16")
    engine = engine_of(model, programs)
    answers(engine, prompts_of(5), 1)
    keys = engine.runner.state.cache[0]["attention"]["key"]
    assert keys.dtype == np.float32
    assert np.any(keys)
    assert np.array_equal(keys, keys.astype("bfloat16").astype(np.float32)), "as they were computed"
    asked = engine_of(model, programs, cache_dtype="bfloat16")
    assert asked.runner.state.cache[0]["attention"]["key"].dtype == "bfloat16"


def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"max_sequences": 1, "max_batch_tokens": 4, "decode_steps": 2}
    told: list[tuple[int, int, str]] = []
    first = engine_of(model_of("attention"), tmp_path, **changes)
    report = first.warm_up(lambda *args: told.append(args))
    assert report.programs == report.compiled == len(told) == first.stats().compilations
    assert told[-1][:2] == (report.programs, report.programs)
    second = engine_of(model_of("attention"), tmp_path, **changes)
    report = second.warm_up()
    assert (report.compiled, report.from_disk) == (0, report.programs)
    prompts = prompts_of(6)
    assert answers(second, prompts) == [wanted("attention", prompts[0])]
    asked = {"temperature": 1.0, "logprobs": 2, "presence_penalty": 1.0, "seed": 1}
    assert answers(second, prompts, **asked) == answers(first, prompts, **asked)
    assert second.stats().compilations == 0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"max_sequences": 0}, "max_sequences of an engine is 1 or more"),
        ({"max_batch_tokens": 2}, "max_batch_tokens has room for a token"),
        ({"cache_dtype": "float8"}, "Unknown cache_dtype 'float8'"),
        ({"memory_share": 1.5}, "memory_share is above 0"),
    ],
)
def test_a_config_that_cannot_be_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        EngineConfig(**changes)


def test_hidden_states_of_padding_are_no_token(programs: Path) -> None:
    """A lone request in a step that is mostly padding, beside the same one in a full step."""
    engine = engine_of(model_of("attention"), programs)
    prompts = prompts_of(3, 9, 9, 8)
    assert answers(engine, prompts[:1]) == answers(engine, prompts)[:1]
    assert np.isfinite(
        np.concatenate(
            [
                np.ravel(leaf)
                for layer in engine.runner.state.cache
                for block in layer.values()
                for leaf in block.values()
            ]
        )
    ).all()
