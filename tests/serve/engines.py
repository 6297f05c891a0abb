"""Small models, engines of them, and what they ought to answer."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from capibara.models import ModularCapibaraModel
from capibara.models.config import ModularModelConfig
from capibara.serve import Engine, EngineConfig, Request, RequestOutput, SamplingParams

DENSE: dict[str, Any] = {"attention": {"heads": 4, "kv_heads": 2}, "mlp": {"ffn": 48}}
MODELS: dict[str, dict[str, Any]] = {
    "attention": {"blocks": DENSE},
    "window": {"blocks": {**DENSE, "attention": {"heads": 4, "window": 5, "qk_norm": True, "bias": True}}},
    "moe": {
        "blocks": {"attention": {"heads": 2}, "moe": {"experts": 4, "top_k": 2, "ffn": 32}},
        "pattern": "attention+moe",
    },
    "hybrid": {
        "blocks": {
            **DENSE,
            "ssm": {"state": 8, "head_dim": 16},
            "mamba": {"kind": "ssm", "form": "selective", "state": 4},
        },
        "pattern": "ssm+mlp : attention+mlp : mamba",
        "layers": 3,
    },
}
CONFIG: dict[str, Any] = {
    "max_sequences": 4, "max_batch_tokens": 32, "page_size": 4, "pages": 24, "max_length": 64, "decode_steps": 1,
}  # fmt: skip
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@functools.lru_cache(maxsize=8)
def model_of(name: str) -> ModularCapibaraModel:
    config = ModularModelConfig(**{"hidden": 32, "layers": 2, "vocab": 259, "max_length": 64, **MODELS[name]})
    return ModularCapibaraModel(config, precision="float32")


def engine_of(model: ModularCapibaraModel, programs: Path, **changes: Any) -> Engine:
    return Engine(model, config=EngineConfig(**{**CONFIG, "cache_folder": programs, **changes}))


def prompts_of(*lengths: int, seed: int = 0) -> list[tuple[int, ...]]:
    draw = np.random.default_rng(seed)
    return [tuple(draw.integers(0, 256, length).tolist()) for length in lengths]


def run(engine: Engine, requests: Sequence[Request], *, every: int = 0) -> dict[str, list[RequestOutput]]:
    """What each request is given until all is done; with `every`, a request comes only every so many steps."""
    outputs: dict[str, list[RequestOutput]] = {request.id: [] for request in requests}
    coming = list(requests)
    for number in range(2000):
        while coming and (not every or number % every == 0):
            engine.add(coming.pop(0))
            if every:
                break
        if not coming and not engine.has_work():
            return outputs
        for output in engine.step():
            assert not outputs[output.id] or outputs[output.id][-1].finish_reason is None
            outputs[output.id].append(output)
        engine.check()
    raise AssertionError("it did not come to an end")


def tokens_of(outputs: dict[str, list[RequestOutput]]) -> dict[str, list[int]]:
    return {id: [token for output in each for token in output.tokens] for id, each in outputs.items()}


def answers(
    engine: Engine, prompts: Sequence[Sequence[int]], new: int = 8, *, every: int = 0, **sampling: Any
) -> list[list[int]]:
    """The tokens that the engine gives to each prompt, greedily unless `sampling` says otherwise."""
    asked = SamplingParams(**{"max_tokens": new, **GREEDY, **sampling})
    requests = [Request(str(number), tuple(prompt), asked) for number, prompt in enumerate(prompts)]
    tokens = tokens_of(run(engine, requests, every=every))
    assert engine.stats().pages_used == 0
    return [tokens[str(number)] for number in range(len(prompts))]


def plain(model: ModularCapibaraModel, prompt: Sequence[int], new: int = 8) -> list[int]:
    """By the plain model: every token from a whole forward pass over all before it, padded to one length."""
    tokens = list(prompt)
    for _ in range(new):
        ids = np.zeros((1, 64), np.int32)
        ids[0, : len(tokens)] = tokens
        tokens.append(int(np.argmax(np.asarray(model(ids))[0, len(tokens) - 1])))
    return tokens[len(prompt) :]


@functools.lru_cache(maxsize=64)
def wanted(name: str, prompt: tuple[int, ...], new: int = 8) -> list[int]:
    """`plain` of one of `MODELS`."""
    return plain(model_of(name), prompt, new)
