"""The shapes route is built for: routers of real models, and shapes meant to break it."""

from __future__ import annotations

from typing import Any

import numpy as np

from capibara.kernels.core.spec import Case

REAL = frozenset({"bench", "tpu", "gpu", "tune"})
HOSTILE = frozenset({"test", "tpu", "gpu"})


def _ties(generator: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """Few distinct logits, so that most choices tie."""
    return generator.integers(0, 3, shape)


def _holes(generator: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """Most experts are masked out, in some rows fewer than top_k are left; never all."""
    logits = generator.standard_normal(shape)
    logits[..., 1:][generator.random((*shape[:-1], shape[-1] - 1)) < 0.8] = -np.inf
    return logits


def _case(
    name: str, lead: tuple[int, ...], experts: int, top_k: int, tags: frozenset[str], *, bias: bool = False,
    dtype: str = "float32", draw: Any = None, **params: Any,
) -> Case:  # fmt: skip
    shapes = ((*lead, experts), (experts,) if bias else None)
    drawn = {} if draw is None else {0: draw}
    return Case(name, shapes, dtype, {"top_k": top_k, **params}, tags, {1: "float32"}, drawn)


CASES = (
    _case("4-of-32", (65536,), 32, 4, REAL),
    _case("2-of-8", (16384,), 8, 2, REAL, gate="softmax_topk"),
    _case("8-of-64", (16384,), 64, 8, REAL, normalize=False, dtype="bfloat16"),
    _case("8-of-256-bias", (16384,), 256, 8, REAL, gate="sigmoid", bias=True, scale=2.5),
    # Hostile: one, odd, prime, no tokens, all experts, ties, masked experts, every gate.
    # One expert's normalised weight is 1 and has no gradient to speak of.
    _case("one", (1,), 1, 1, HOSTILE, gate="sigmoid", normalize=False),
    _case("all-of-five", (3,), 5, 5, HOSTILE, normalize=False),
    _case("one-axis", (), 12, 3, HOSTILE, gate="softmax_topk"),
    _case("no-tokens", (0,), 8, 2, HOSTILE),
    _case("ties", (131,), 37, 7, HOSTILE, draw=_ties, dtype="bfloat16"),
    _case("holes", (129,), 16, 6, HOSTILE, draw=_holes, gate="softmax", normalize=False),
    _case("holes-sigmoid", (70,), 16, 6, HOSTILE, draw=_holes, gate="sigmoid"),
    _case("bias-softmax", (2, 67), 24, 3, HOSTILE, bias=True, normalize=False, scale=3.0),
    _case("bias-sigmoid", (57,), 40, 16, HOSTILE, bias=True, gate="sigmoid"),
    _case("bias-topk", (300,), 8, 2, HOSTILE, bias=True, gate="softmax_topk", dtype="bfloat16"),
    _case("sigmoid-raw", (40,), 9, 4, HOSTILE, gate="sigmoid", normalize=False, scale=0.5, dtype="float16"),
    _case("shardable", (16, 8), 16, 4, frozenset({"tpu", "gpu", "shard"})),
    _case("shardable-bias", (16, 8), 8, 2, frozenset({"tpu", "gpu", "shard"}), bias=True, gate="sigmoid"),
)
