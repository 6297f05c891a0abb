"""The shapes norm is built for: the layers of real models, and shapes meant to break it."""

from __future__ import annotations

from typing import Any

import jax

from capibara.kernels.core.spec import Case
from capibara.kernels.ops.layers.norm.reference import reference

REAL = frozenset({"bench", "tpu", "gpu", "tune"})
HOSTILE = frozenset({"test", "tpu"})
LOWERED = frozenset({"tpu", "gpu"})  # compiled for the accelerators, and run by this family's own tests


def _case(
    name: str, lead: tuple[int, ...], columns: int, tags: frozenset[str], *, kind: str = "layer", scale: bool = True,
    bias: bool | None = None, residual: bool = False, dtype: str = "bfloat16", vectors: str | None = None,
    **params: Any,
) -> Case:  # fmt: skip
    """`vectors` is the type of scale and bias, x's own by default. Layer norm has a bias unless it is told not to."""
    bias = kind == "layer" and scale if bias is None else bias
    shapes = (
        (*lead, columns), (columns,) if scale else None, (columns,) if bias else None,
        (*lead, columns) if residual else None,
    )  # fmt: skip
    if kind != "layer":
        params["kind"] = kind
    return Case(name, shapes, dtype, params, tags, {1: vectors or dtype, 2: vectors or dtype})


CASES = (
    _case("layer-4k", (16384,), 4096, REAL),
    _case("rms-4k", (16384,), 4096, REAL, kind="rms"),
    _case("layer-4k-residual", (16384,), 4096, REAL, residual=True, return_residual=True),
    _case("rms-4k-residual", (16384,), 4096, REAL, kind="rms", residual=True, return_residual=True),
    _case("layer-1k", (32768,), 1024, REAL),
    _case("rms-1k", (32768,), 1024, REAL, kind="rms"),
    _case("layer-32k", (2048,), 32768, REAL),
    _case("rms-8k", (4, 2048), 8192, REAL, kind="rms"),
    # Hostile: one, odd, prime, no rows, every operand and every output.
    _case("one", (1,), 1, HOSTILE, dtype="float32"),
    # A row of one number is ±1 by RMS norm, and has no gradient to speak of unless eps is large.
    _case("one-rms", (1,), 1, HOSTILE, kind="rms", eps=0.5),
    _case("odd", (3,), 5, HOSTILE, dtype="float32"),
    _case("past-a-lane", (7,), 129, HOSTILE, kind="rms", residual=True, return_residual=True),
    _case("prime", (37,), 257, HOSTILE, kind="rms", vectors="float32", residual=True, offset=1.0, return_stats=True),
    _case("prime-rows", (131,), 37, HOSTILE, dtype="float32", return_stats=True),
    _case("one-axis", (), 96, HOSTILE, bias=False),
    _case("no-rows", (0,), 64, HOSTILE),
    _case("plain", (2, 3, 5), 48, HOSTILE, scale=False, residual=True, dtype="float32"),
    _case("bias-alone", (9,), 40, LOWERED, scale=False, bias=True),
    _case("passed-on", (9,), 384, LOWERED, kind="rms", return_residual=True),
    _case("half", (17,), 256, LOWERED, dtype="float16", residual=True, return_residual=True),
    _case(
        "hopper-edges", (37,), 768, LOWERED, vectors="float32", residual=True, return_residual=True, return_stats=True
    ),
    _case("hopper-rms", (37,), 1152, LOWERED, kind="rms", offset=1.0, dtype="float32"),
    # No multiple of 128: gpt-oss's rows with all that a block asks for, and the same of every other operand.
    _case("rms-2880", (37,), 2880, LOWERED, kind="rms", residual=True, return_residual=True, return_stats=True),
    _case("layer-2880", (37,), 2880, LOWERED, vectors="float32", return_stats=True),
    _case("layer-320", (37,), 320, LOWERED, dtype="float32"),
    _case("shardable", (16, 8), 256, LOWERED | {"shard"}, residual=True, return_residual=True, vectors="float32"),
)


GRAD_TESTED = ("odd", "prime", "plain")


def grad_case(case: Case) -> Case:
    """The backward pass of a forward case: what was normalised, its statistics, and the cotangents."""
    x, scale, bias, _ = case.shapes
    assert x is not None
    returned = ("return_residual", "return_stats")
    params: dict[str, Any] = {name: value for name, value in case.params.items() if name not in returned}
    layer = params.get("kind", "layer") == "layer"
    d_sum = x if case.params.get("return_residual") else None
    if "shard" in case.tags:
        # A scale and bias for each element of the first axis, as vmap makes them: their gradients are then split with
        # the rows, as inside shard_map they must be, and summed over the other axis.
        scale = bias = (x[0], x[-1])
    shapes = (x, scale, bias, x[:-1] if layer else None, x[:-1], x, d_sum)
    dtypes = {**case.dtypes, 3: "float32", 4: "float32"}
    forward = jax.jit(lambda *xs: reference(*xs, **params, return_stats=True))

    def complete(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        _, *stats = forward(*arrays[:3])
        return (*arrays[:3], *(stats if layer else (None, *stats)), *arrays[5:])

    # The forward op's cases are tested and benchmarked with their gradients, which run these programs; a few are
    # also tested on their own.
    tags = case.tags - {"bench"}
    if case.name not in GRAD_TESTED:
        tags -= {"test"}
    return Case(case.name, shapes, case.dtype, params, tags, dtypes, case.draw, complete)


GRAD_CASES = tuple(map(grad_case, CASES))
