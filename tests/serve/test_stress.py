"""Many requests of all kinds that come, go and are taken back at random: right answers, and nothing left behind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.serve.engines import GREEDY, engine_of, model_of, prompts_of, wanted

from capibara.serve import QueueFull, Request, SamplingParams


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_requests_that_come_and_go(count: int, programs: Path) -> None:
    engine = engine_of(model_of("attention"), programs, pages=11, max_queue=16)
    draw = np.random.default_rng(5)
    prompts = prompts_of(*draw.integers(1, 20, 24).tolist(), seed=5)
    asked: dict[str, tuple[tuple[int, ...], int]] = {}
    tokens: dict[str, list[int]] = {}
    ends: dict[str, str] = {}
    refused = number = 0
    while number < count or engine.has_work():
        for _ in range(int(draw.integers(0, 4))):
            if number < count:
                id, prompt, new = str(number), prompts[draw.integers(len(prompts))], int(draw.integers(1, 17))
                kinds = [GREEDY, GREEDY, {"seed": 3, "top_k": 5}, {"logprobs": 2, **GREEDY}]
                kind = kinds[int(draw.integers(len(kinds)))]
                try:
                    engine.add(Request(id, prompt, SamplingParams(max_tokens=new, **kind)))  # type: ignore[arg-type]
                except QueueFull:
                    refused += 1
                    break
                number += 1
                if kind.get("temperature") == 0:
                    asked[id] = (prompt, new)
                tokens[id] = []
        if draw.random() < 0.1 and tokens:
            engine.cancel(list(tokens)[-int(draw.integers(1, 5)) :][0])
        for output in engine.step():
            assert output.id not in ends, "an output after the last"
            tokens[output.id] += output.tokens
            if output.finish_reason is not None:
                ends[output.id] = output.finish_reason
        engine.check()
    assert len(ends) == count
    assert refused > 0
    assert {"length", "cancelled"} <= set(ends.values()) <= {"length", "cancelled", "stop"}
    assert engine.stats().preemptions > 0
    assert engine.stats().pages_used == 0
    assert engine.stats().running == engine.stats().waiting == 0
    for id, (prompt, new) in asked.items():
        right = wanted("attention", prompt, 16)[:new]
        assert tokens[id] == right if ends[id] == "length" else tokens[id] == right[: len(tokens[id])], id
