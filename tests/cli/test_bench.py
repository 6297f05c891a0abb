"""`capibara bench serve` against a server whose pace is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.cli.test_serve import TINY
from tests.serve.stand_in import CARD, StandIn, served
from typer.testing import CliRunner

from capibara.cli.main import app


def _bench(*words: str) -> Any:
    return CliRunner().invoke(app, ["bench", "serve", *words])


def test_what_clients_saw_is_what_the_server_did() -> None:
    engine = StandIn(step_s=0.004)
    with served(engine) as (server, _):
        target = ("--target-latency-ms", "1000", "--target-first-ms", "0")
        ran = _bench(server.address, "--requests", "12", "--users", "3", *target, "--json")
        assert ran.exit_code == 0, ran.output
        figures = json.loads(ran.stdout)
        assert (figures["requests"], figures["answered"], figures["failed"]) == (12, 12, {})
        assert figures["tokens_counted_by"] == "the server"
        assert figures["context"] == CARD.max_length
        # The first request goes ahead and is not counted.
        counted = engine.seen[1:]
        assert figures["prompt_tokens"]["mean"] == pytest.approx(sum(len(r.prompt) for r in counted) / 12)
        assert figures["output_tokens"]["max"] <= max(r.sampling.max_tokens for r in counted)
        assert figures["inter_token_ms"]["p50"] >= 4, "a step takes that long"
        assert figures["most_at_a_time"] == 3
        assert figures["goodput"]["share"] == 0, "no first token comes in no time"
        assert len({r.prompt[:8] for r in counted}) == 12, "no two prompts begin alike"

        shown = _bench(server.address, "--requests", "5", "--rate", "100", "--seed", "1")
        assert shown.exit_code == 0, shown.output
        assert "between tokens, ms" in shown.output
        assert "tokens/s" in shown.output
        assert "100 requests/s by chance" in shown.output


def test_what_fails_is_counted_and_not_hidden() -> None:
    engine = StandIn(step_s=0.01)
    with served(engine, card=replace(CARD, max_sequences=1, max_queue=1)) as (server, _):
        figures = json.loads(_bench(server.address, "--requests", "10", "--rate", "1000", "--json").stdout)
        assert figures["failed"]["429"] >= 5
        assert figures["answered"] + figures["failed"]["429"] == 10


def test_keys_models_and_timeouts() -> None:
    engine = StandIn(step_s=0.001)
    with served(engine, api_keys=("k",)) as (server, _):
        refused = _bench(server.address, "--requests", "1")
        assert refused.exit_code == 1
        assert "answered 401" in refused.output
        key = ("--api-key", "k", "--requests", "2")
        assert _bench(server.address, *key, "--model", "pirate").exit_code == 0
        assert engine.seen[-1].sampling.adapter == "pirate"
        assert _bench(server.address, *key, "--model", "corsair").exit_code == 2
        assert _bench(server.address, *key, "--context", "64", "--vocab", "10", "--json").exit_code == 0
        assert len(engine.seen[-1].prompt) < 64
        assert max(engine.seen[-1].prompt) < 10
        engine.step_s = 0.3
        late = _bench(server.address, *key, "--timeout-s", "0.1", "--users", "2", "--context", "4000")
        assert late.exit_code == 1
        assert "no end within 0.1 s" in late.output


def test_a_model_is_served_for_the_time_of_it(tmp_path: Path) -> None:
    model = tmp_path / "tiny.toml"
    model.write_text(TINY)
    small = ("--max-sequences", "2", "--max-batch-tokens", "16", "--batch-invariant", "--no-warm-up")
    ran = _bench(str(model), "--requests", "3", "--users", "1", "--context", "64", "--json", "--", *small)
    assert ran.exit_code == 0, ran.output
    figures = json.loads(ran.stdout)
    assert (figures["answered"], figures["context"]) == (3, 64)
    assert _bench("http://127.0.0.1:9", "--", "--no-warm-up").exit_code == 2
    assert _bench(str(model), "--", "--max-sequences", "none").exit_code == 1


def test_bad_input() -> None:
    assert _bench("http://127.0.0.1:9", "--requests", "1").exit_code == 1
    both = _bench("http://127.0.0.1:9", "--rate", "1", "--users", "1")
    assert both.exit_code == 2
    assert "one of the two" in both.output
