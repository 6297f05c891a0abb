"""The pipeline: called, streamed, awaited; and what each keyword of its makers changes."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tests.serve.engines import CONFIG, GREEDY, model_of, prompts_of, wanted

from capibara.compile.warmup import make_program
from capibara.errors import CapibaraError
from capibara.jax.tpu_v4.inference import TpuInferenceOptimizer, create_inference_pipeline
from capibara.models import ModularCapibaraModel
from capibara.serve import EngineConfig, InferencePipeline, SamplingParams
from capibara.serve.grammar import Grammar


def pipeline_of(programs: Path, batch: int = 4, length: int = 64, **optimizer: Any) -> InferencePipeline:
    config = EngineConfig(**{**CONFIG, "max_batch_tokens": 32, "max_sequences": 4})
    return create_inference_pipeline(
        model=model_of("attention"),
        optimizer=TpuInferenceOptimizer(**optimizer),
        max_batch_size=batch,
        max_sequence_length=length,
        cache_folder=programs,
        config=config,
    )


@pytest.mark.quick
def test_prompts_in_answers_out(programs: Path) -> None:
    prompts = prompts_of(5, 9, 12, 3, 7, 6)
    with pipeline_of(programs) as pipeline:
        expected = [wanted("attention", prompt) for prompt in prompts]
        assert pipeline(prompts, max_tokens=8, **GREEDY) == expected
        assert pipeline(prompts[0], max_tokens=8, **GREEDY) == expected[0]
        text = pipeline("hello", max_tokens=5, **GREEDY)
        assert isinstance(text, str)
        assert "".join(pipeline.stream("hello", max_tokens=5, **GREEDY)) == text
        streamed: list[list[int]] = [[], []]
        for number, tokens in pipeline.stream(prompts[:2], max_tokens=8, **GREEDY):
            streamed[number] += tokens
        assert streamed == expected[:2]
        assert pipeline.latency.possible
    with pytest.raises(ValueError, match="asked while it is open"):
        pipeline(prompts[0])


def test_prompts_may_be_arrays(programs: Path) -> None:
    prompts = prompts_of(5, 5)
    expected = [wanted("attention", prompt) for prompt in prompts]
    with pipeline_of(programs) as pipeline:
        for kind in (np.array, jnp.array):
            assert pipeline(kind(prompts[0]), max_tokens=8, **GREEDY) == expected[0]
            assert pipeline(kind(prompts), max_tokens=8, **GREEDY) == expected
            assert pipeline([kind(prompt) for prompt in prompts], max_tokens=np.int64(8), **GREEDY) == expected


def test_a_stop_string_may_come_alone() -> None:
    assert SamplingParams(stop="ab") == SamplingParams(stop=("ab",)) == SamplingParams(stop=["ab"])  # type: ignore[arg-type]


def test_tasks_and_threads_share_it(programs: Path) -> None:
    prompts = prompts_of(5, 9, 12)
    expected = [wanted("attention", prompt) for prompt in prompts]

    async def both(pipeline: InferencePipeline) -> tuple[list[Any], list[int]]:
        whole = await asyncio.gather(*(pipeline.generate(prompt, max_tokens=8, **GREEDY) for prompt in prompts))
        pieces = [piece async for piece in pipeline.stream_async(prompts[0], max_tokens=8, **GREEDY)]
        return whole, [token for piece in pieces for token in piece]

    with pipeline_of(programs) as pipeline:
        came: list[Any] = [None] * 3

        def ask(number: int) -> None:
            came[number] = pipeline(prompts[number], max_tokens=8, **GREEDY)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        assert asyncio.run(both(pipeline)) == (expected, expected[0])
        for thread in threads:
            thread.join()
        assert came == expected


def test_a_stream_that_is_left_is_cancelled_and_mistakes_are_the_callers(programs: Path) -> None:
    with pipeline_of(programs) as pipeline:
        stream = pipeline.stream(prompts_of(4)[0], max_tokens=40, **GREEDY)
        next(stream)
        stream.close()
        with pytest.raises(ValueError, match="leaves room for a token"):
            pipeline([1] * 64)
        for wrong, rule in (
            ({"temperature": -1}, "temperature is from 0 to"),
            ({"temperature": "warm"}, "temperature is a number"),
            ({"max_tokens": 2.5}, "max_tokens is a whole number"),
            ({"top_k": True}, "top_k is a whole number"),
            ({"seed": 1.5}, "seed is a whole number"),
            ({"stop_token_ids": (1.5,)}, "stop_token_ids is a whole number"),
            ({"stop": (1,)}, "stop is a text"),
            ({"regex": 5}, "regex is text"),
            ({"json_schema": [1]}, "A JSON schema is an object"),
        ):
            with pytest.raises(ValueError, match=rule):
                pipeline([1], **wrong)
        for prompt in (None, 5, [1.5], np.float32(2), np.array([1.5])):
            with pytest.raises(ValueError, match=r"whole number|token ids, and several are a list"):
                pipeline(prompt)
        assert pipeline([1, 2], max_tokens=2, **GREEDY) == wanted("attention", (1, 2), 2)
        for _ in range(200):
            if pipeline.stats.finished.get("cancelled"):
                break
            pipeline([1, 2], max_tokens=2, **GREEDY)
        assert pipeline.stats.finished["cancelled"] == 1


def test_whoever_asks_while_it_closes_is_answered_and_a_failure_is_raised(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = pipeline_of(programs)
    (prompt,) = prompts_of(5)
    monkeypatch.setattr(Grammar, "take", lambda self, token: False)
    with pytest.raises(CapibaraError, match=r"token .* is not of the grammar"):
        pipeline(prompt, max_tokens=4, regex="[a-c]+")

    busy, go = threading.Event(), threading.Event()

    def hold() -> None:
        busy.set()
        go.wait(30)

    pipeline._inbox.put(("call", hold, None))
    assert busy.wait(30)
    closing = threading.Thread(target=pipeline.close)
    closing.start()
    while pipeline._inbox.empty():
        time.sleep(0.001)
    failures: list[BaseException] = []

    def ask() -> None:
        try:
            pipeline(prompt, max_tokens=4)
        except RuntimeError as error:
            failures.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    while pipeline._inbox.qsize() < 2:
        time.sleep(0.001)
    go.set()
    closing.join(30)
    asking.join(30)
    assert not asking.is_alive(), "it waits for an answer that nobody gives"
    assert "closed" in str(failures[0])


def test_the_sizes_bound_what_runs(programs: Path) -> None:
    with pipeline_of(programs, batch=2, length=32) as pipeline:
        assert pipeline.engine.config.max_sequences == 2
        assert pipeline.engine.max_length == 32
        with pytest.raises(ValueError, match="context of 32"):
            pipeline([1] * 40)


def test_without_a_cache_every_token_is_computed_anew(programs: Path) -> None:
    prompts = prompts_of(5, 9)
    computed = {}
    for kept in (True, False):
        with pipeline_of(programs, use_kv_cache=kept) as pipeline:
            shapes = []
            pipeline.engine.on_step = lambda step, shapes=shapes: shapes.append(step.plan.tokens)
            assert pipeline(prompts, max_tokens=4, **GREEDY) == [wanted("attention", p, 4) for p in prompts]
            computed[kept] = sum(shapes)
    assert computed[False] == sum(5 + 9 + 2 * n for n in range(4))
    assert computed[True] < computed[False]


def test_attention_that_holds_all_scores_takes_more_memory() -> None:
    """Of 128 tokens and 2048 keys the scores alone are 4 MiB."""
    model = ModularCapibaraModel(dataclasses.replace(model_of("attention").config, max_length=2048))
    config = EngineConfig(max_sequences=1, max_batch_tokens=128, pages=32)
    taken = {}
    for efficient in (True, False):
        optimizer = TpuInferenceOptimizer(memory_efficient_attention=efficient)
        with create_inference_pipeline(model, optimizer, 1, 2048, config=config) as pipeline:
            runner = pipeline.engine.runner
            program, _ = make_program(runner._all_programs()["forward", runner.shapes.ragged(128, 1)])
            taken[efficient] = program.memory_analysis().temp_size_in_bytes
    assert taken[False] > taken[True] + 2 * 2**20


def test_a_target_is_measured_before_the_first_request(programs: Path) -> None:
    """Real steps, a target that any machine keeps and one that none does."""
    told: list[tuple[int, int, str]] = []
    config = EngineConfig(**{**CONFIG, "max_sequences": 1, "max_batch_tokens": 4, "decode_steps": 2})
    for target, possible in ((60_000.0, True), (1e-6, False)):
        with create_inference_pipeline(
            model_of("attention"),
            TpuInferenceOptimizer(target_latency_ms=target),
            max_batch_size=1,
            cache_folder=programs,
            config=config,
            progress=lambda *args: told.append(args),
        ) as pipeline:
            assert told[-1][0] == told[-1][1] > 0
            made = pipeline.stats.compilations
            prompts = prompts_of(5)
            assert pipeline(prompts, max_tokens=8, **GREEDY) == [wanted("attention", prompts[0])]
            report = pipeline.latency
            assert report.possible is possible
            assert report.best_ms > 0
            assert report.p95_ms is not None
            assert pipeline.stats.compilations == made  # nothing is compiled while requests wait
