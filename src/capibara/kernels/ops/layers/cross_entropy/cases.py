"""The shapes cross_entropy is built for: the last layers of real models, and shapes meant to break it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from capibara.kernels.core.spec import Case
from capibara.kernels.ops.layers.cross_entropy.reference import reference

REAL = frozenset({"bench", "tpu", "gpu", "tune"})
HOSTILE = frozenset({"test", "tpu"})


def _labels(vocabulary: int) -> Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]:
    """Labels of the vocabulary, and a few that are none."""
    return lambda generator, shape: generator.integers(-1, vocabulary + 1, shape, dtype=np.int32)


def _scaled(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Hidden states that make logits of a size that a model has, whatever the depth."""
    return generator.standard_normal(shape, np.float32) * (3 / max(shape[-1], 1) ** 0.5)


def _case(
    name: str, lead: tuple[int, ...], depth: int, vocabulary: int, tags: frozenset[str], *, dtype: str = "bfloat16",
    **params: Any,
) -> Case:  # fmt: skip
    weights = (vocabulary, depth) if params.get("transpose_weights") else (depth, vocabulary)
    draw = {0: _scaled, 2: _labels(vocabulary)}
    return Case(name, ((*lead, depth), weights, lead), dtype, params, tags, {2: "int32"}, draw)


CASES = (
    _case("llama3-8b", (16384,), 4096, 128256, REAL),
    _case("gemma2-9b", (8192,), 3584, 256000, REAL, transpose_weights=True, soft_cap=30.0),
    _case("gpt2", (8, 1024), 768, 50257, REAL, transpose_weights=True),
    # Hostile: one, odd, prime, no tokens, labels that are no index.
    _case("one", (1,), 1, 1, HOSTILE, dtype="float32"),
    _case("odd", (3,), 5, 7, HOSTILE, dtype="float32", return_sum=True),
    _case("prime", (37,), 61, 257, HOSTILE),
    _case("transposed", (2, 9), 40, 300, HOSTILE, transpose_weights=True, soft_cap=2.0, dtype="float32"),
    _case("no-tokens", (0,), 16, 32, HOSTILE),
    _case("one-token", (), 24, 50, HOSTILE, return_sum=True, dtype="float32"),
    _case("shardable", (16, 8), 64, 512, frozenset({"tpu", "shard"}), return_sum=True),
)

GRAD_TESTED = ("odd", "transposed")


def grad_case(case: Case) -> Case:
    """The backward pass of a forward case: what it returned, and the cotangents."""
    lead = case.shapes[2]
    params: dict[str, Any] = {name: value for name, value in case.params.items() if name != "return_sum"}
    shapes = (*case.shapes, lead, lead, lead, lead if case.params.get("return_sum") else None, None)
    dtypes = {2: "int32", **dict.fromkeys((3, 4, 5, 6), "float32")}
    forward = jax.jit(lambda *xs: reference(*xs, **params)[0])

    def complete(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*arrays[:3], forward(*arrays[:3]), *arrays[4:])

    # Every axis is summed away in one of the two gradients, which inside shard_map is the caller's matter: meshes are
    # tested by way of the forward op.
    tags = case.tags - {"bench", "gpu", "shard"}
    if case.name not in GRAD_TESTED:
        tags -= {"test"}
    return Case(case.name, shapes, case.dtype, params, tags, dtypes, case.draw, complete)


GRAD_CASES = tuple(map(grad_case, CASES))


def and_grad_case(case: Case, tags: frozenset[str] = frozenset({"test", "tpu", "tune"})) -> Case:
    """The loss with its gradient, for a forward case: a weight for each token, some of them 0. Of its tags those that
    are among `tags` stay: meshes are tested as above."""
    lead = case.shapes[2]
    params: dict[str, Any] = {name: value for name, value in case.params.items() if name != "return_sum"}
    if case.params.get("return_sum"):
        params |= {"label_smoothing": 0.1, "z_loss": 1e-2}

    def weights(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return np.maximum(generator.uniform(-0.2, 1, shape), 0)

    dtypes, draw = {2: "int32", 3: "float32"}, {**case.draw, 3: weights}
    tags &= case.tags
    if case.name not in GRAD_TESTED:
        tags -= {"test"}
    return Case(case.name, (*case.shapes, lead), case.dtype, params, tags, dtypes, draw)


# What the kernel for rows of logits meets: a row that shared memory holds, cut evenly and not, and longer ones.
_ON_GPU = frozenset({"gpu"})
_ROWS = (
    _case("row", (300,), 32, 2048, _ON_GPU, return_sum=True),
    _case("row-overlapping", (150,), 16, 32064, _ON_GPU),
    _case("long-row", (140,), 8, 65536, _ON_GPU),
    _case("long-row-overlapping", (3, 50), 8, 75968, _ON_GPU, return_sum=True),
)
AND_GRAD_CASES = (*map(and_grad_case, CASES), *(and_grad_case(case, _ON_GPU) for case in _ROWS))
