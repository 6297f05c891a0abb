"""`predict_serving`: what fits, how many users, for how much; and what cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.serve.prediction.test_step_times import served

from capibara.serve import EngineConfig
from capibara.serve.load.trace import Lengths
from capibara.serve.prediction import ServingPlan, Traffic, predict_serving
from capibara.serve.prediction.served import served_model

CONFIG: dict[str, Any] = {"max_sequences": 4, "max_batch_tokens": 64, "page_size": 16}
TRAFFIC = Traffic([Lengths(40, 16)])
ALONE: dict[str, Any] = {"config": {"max_sequences": 1}, "users": (1,)}
"""Few shapes: tracing is what takes time here."""


def predicted(on: str = "h200", *, config: dict[str, Any] | None = None, **changes: Any) -> ServingPlan:
    asked = {"traffic": TRAFFIC, "users": (1, 2, 4), **changes}
    return predict_serving(served(max_length=128), on, config=EngineConfig(**{**CONFIG, **(config or {})}), **asked)


def test_users_tokens_and_dollars() -> None:
    plan = predicted(target_latency_ms=5)
    assert plan.fits
    assert plan.held is not None
    assert plan.held.users == 4  # as many as run at a time
    assert [row.users for row in plan.rows[:3]] == [1, 2, 4]
    for row in plan.rows:
        assert row.tokens_in_per_second / row.tokens_out_per_second == pytest.approx(40 / 16, rel=0.1)
        for cost, price in zip(row.costs, plan.prices, strict=True):
            # Both together are what the chip costs.
            paid = (
                cost.usd_per_million_in * row.tokens_in_per_second
                + cost.usd_per_million_out * row.tokens_out_per_second
            )
            assert paid / 1e6 * 3600 == pytest.approx(price.usd)
            assert cost.usd_per_million_in < cost.usd_per_million_out
    assert [cost.kind for cost in plan.held.costs] == ["on_demand", "spot"]
    assert sum(share for _, share in plan.anatomy) == pytest.approx(1)
    assert plan.best_range_ms is not None
    assert plan.best_range_ms[0] <= plan.best_ms <= plan.best_range_ms[1]  # type: ignore[operator]
    json.dumps(plan.as_dict())


def test_a_target_below_one_users_step_is_impossible() -> None:
    plan = predicted(target_latency_ms=1e-3, **ALONE)
    assert plan.fits
    assert not plan.possible
    assert plan.held is None
    assert "is impossible on h200" in plan.verdict
    assert f"{plan.best_ms:.2f} ms" in plan.verdict
    slow = predicted(target_latency_ms=5, target_first_ms=1e-3, **ALONE)
    assert "kept for nobody" in slow.verdict


def test_what_does_not_fit_says_why() -> None:
    plan = predicted(memory_limit_gb=0.0005, **ALONE)
    assert (plan.fits, plan.rows, plan.held) == (False, (), None)
    assert "does not fit" in plan.verdict
    assert "room for" in plan.verdict
    pages = predicted(config={"pages": 10**7}, memory_limit_gb=1)
    assert "10000000 pages" in pages.verdict


def test_engines_of_several_chips() -> None:
    apart, together = predicted("h200x4", **ALONE), predicted("h200x4", tensor_parallel=2, **ALONE)
    assert (apart.engines, apart.tensor_parallel) == (4, 1)
    assert (together.engines, together.tensor_parallel) == (2, 2)
    assert together.memory.weights < apart.memory.weights
    assert apart.held is not None
    assert apart.held.users == 4 * apart.held.engine.users
    # What does not fit on one chip goes on two.
    needed = apart.memory.weights + apart.memory.loaded
    limit = (0.8 * needed + apart.memory.working) / 0.85 / 2**30
    split = predicted("h200x2", memory_limit_gb=limit, **ALONE)
    assert split.tensor_parallel == 2


@pytest.mark.quick
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel": 3, "on": "h200x4"}, "divides the 4 chips"),
        ({"config": {"speculative_tokens": 2}}, "hangs on the text"),
        ({"config": {"keep_keys": False}}, "keep_keys=False"),
        ({"traffic": Traffic([Lengths(100, 100)])}, "context of 128 tokens"),
        ({"target_latency_ms": 0.0}, "above 0"),
        ({"form": "full"}, "form of drawing"),
        ({"users": (0, 4)}, "1 or more"),
        ({"memory_limit_gb": 1000.0}, "at most the 141 GiB"),
        ({"region": "nowhere"}, "region with a price"),
    ],
)
def test_bad_input(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        predicted(**changes)


@pytest.mark.quick
def test_models_by_every_name(tmp_path: Path) -> None:
    preset = served_model("llama-1b")
    assert (preset.name, preset.config.layers, preset.precision) == ("llama-1b", 16, "mixed")
    folder = tmp_path / "mine"
    folder.mkdir()
    written = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 512,
        "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(written), encoding="utf-8")
    for named in (folder, folder / "config.json"):
        found = served_model(named)
        assert (found.name, found.config.layers, found.precision) == ("mine", 3, "bfloat16")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text('base = "dev"\n[model]\nlayers = 5\n', encoding="utf-8")
    assert (served_model(run).config.layers, served_model(run).precision) == (5, "float32")
