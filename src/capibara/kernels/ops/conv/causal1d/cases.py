"""The shapes causal_conv1d is built for: the layers of state-space models, and shapes meant to break it."""

from __future__ import annotations

from typing import Any

from capibara.kernels.core.spec import Case

REAL = frozenset({"bench", "tpu", "gpu", "tune"})
HOPPER = frozenset({"gpu"})
HOSTILE = frozenset({"test", "tpu"})


def case(
    name: str, x: tuple[int, int, int], width: int, tags: frozenset[str], *, bias: bool = True, state: bool = False,
    dtype: str = "bfloat16", weights: str | None = None, **params: Any,
) -> Case:  # fmt: skip
    """`weights` is the type of the filters and the bias, x's own by default."""
    batch, _, channels = x
    shapes = (x, (width, channels), (channels,) if bias else None, (batch, width - 1, channels) if state else None)
    return Case(name, shapes, dtype, params, tags, {1: weights or dtype, 2: weights or dtype})


CASES = (
    case("mamba", (8, 4096, 2048), 4, REAL, activation="silu"),
    case("plain-f32", (8, 4096, 2048), 4, REAL, bias=False, dtype="float32"),
    # What Hopper's kernels meet besides: channels past whole pieces, few of them, a time of no whole tiles.
    case("edges", (2, 21, 1344), 4, HOPPER, activation="silu", weights="float32"),
    case("plain-256", (1, 37, 256), 3, HOPPER, return_final_state=True),
    # Hostile: odd, past a lane, several blocks, time shorter than the filter, every operand and both outputs.
    case("odd", (3, 7, 5), 4, HOSTILE, dtype="float32", activation="silu", state=True, return_final_state=True),
    case("shorter", (2, 2, 9), 8, HOSTILE, state=True, return_final_state=True, weights="float32"),
    case("several-blocks", (1, 272, 131), 3, HOSTILE, bias=False, activation="silu"),
    case("no-batch", (0, 4, 8), 4, HOSTILE, return_final_state=True),
    case(
        "shardable", (16, 16, 32), 4, frozenset({"shard", "tpu"}), dtype="float32", state=True, activation="silu",
        return_final_state=True,
    ),
)  # fmt: skip

GRAD_TESTED = ("odd", "shorter", "several-blocks")


def grad_case(case: Case) -> Case:
    """The backward pass of a forward case."""
    x, w = case.shapes[:2]
    assert x is not None
    assert w is not None
    params = {name: value for name, value in case.params.items() if name != "return_final_state"}
    d_state = (x[0], w[0] - 1, x[2]) if case.params.get("return_final_state") and "gpu" not in case.tags else None
    # The forward op's cases are tested and timed with their gradients, on meshes too, and those run these programs.
    tags = case.tags - {"bench", "shard"} - (frozenset() if case.name in GRAD_TESTED else {"test"})
    return Case(case.name, (*case.shapes, x, d_state), case.dtype, params, tags, case.dtypes)


GRAD_CASES = tuple(map(grad_case, CASES))
