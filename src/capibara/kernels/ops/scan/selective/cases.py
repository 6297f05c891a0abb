"""The shapes the selective scan is built for, and shapes meant to break it."""

from __future__ import annotations

from typing import Any

import numpy as np

from capibara.kernels.core.spec import Case

REAL = frozenset({"bench", "gpu", "tpu"})
LOWERED = frozenset({"gpu", "tpu"})
TEST = frozenset({"test", "tpu"})
SHARD = frozenset({"shard"})  # divides over 8 and 32 devices


def draw_steps(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Step sizes as a trained model has them: positive, from thousandths to a few tenths."""
    return np.exp(generator.random(shape, np.float32) * 5.0 - 6.5)


def draw_decays(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """A: -1, -2, ... along a channel's states, as models start it, and a little about that."""
    counted = 1 + np.arange(shape[-1], dtype=np.float32) if shape else 1.0
    return -counted * np.exp(0.1 * generator.standard_normal(shape, np.float32))


def make_case(
    name: str, batch: int, time: int, channels: int, states: int, tags: frozenset[str], *, dtype: str = "bfloat16",
    D: bool = True, z: bool = False, bias: bool = False, initial: bool = False, narrow_dt: bool = True, **params: Any,
) -> Case:  # fmt: skip
    """x, dt, B, C and z of one type; A, D, dt_bias and the state in float32."""
    wide, state = (batch, time, channels), (batch, time, states)
    shapes = (
        wide, wide, (channels, states), state, state, (channels,) if D else None, wide if z else None,
        (channels,) if bias else None, (batch, channels, states) if initial else None,
    )  # fmt: skip
    dtypes = {1: dtype if narrow_dt else "float32", 2: "float32", 5: "float32", 7: "float32", 8: "float32"}
    draw = {2: draw_decays} | ({} if params.get("dt_softplus") else {1: draw_steps})
    return Case(name, shapes, dtype, params, tags, dtypes, draw)


ALL: dict[str, Any] = {"z": True, "bias": True, "initial": True, "dt_softplus": True, "return_final_state": True}

CASES = (
    make_case("mamba", 8, 4096, 2048, 16, REAL, z=True),
    make_case("mamba-f32", 8, 4096, 2048, 16, REAL, dtype="float32", z=True),
    make_case("mamba-wide-state", 2, 4096, 2048, 64, LOWERED),
    # Hostile: one of everything, no time, odd times, one channel, a hundred, every operand and every output.
    make_case("one", 1, 1, 1, 1, TEST, dtype="float32"),
    make_case("no-time", 2, 0, 5, 4, TEST, dtype="float32", initial=True, return_final_state=True),
    make_case("odd", 3, 7, 5, 3, TEST, dtype="float32", D=False, z=True),
    make_case("one-channel", 2, 37, 1, 4, TEST, **ALL),
    make_case("hundred", 1, 131, 100, 4, TEST, dtype="float32", **ALL),
    make_case("narrow", 2, 33, 100, 16, TEST, narrow_dt=False),
    make_case("hopper-edges", 2, 67, 256, 16, LOWERED, **ALL),
    make_case("shardable", 8, 6, 64, 4, SHARD, dtype="float32"),
)


def grad_case(case: Case) -> Case:
    """The backward pass of a forward case: its operands, and the cotangents of what it returns."""
    x, initial = case.shapes[0], case.shapes[2]
    assert x is not None
    assert initial is not None
    params = dict(case.params)
    d_final = (x[0], *initial) if params.pop("return_final_state", False) else None
    # The forward op's cases are tested and benchmarked with their gradients, which run these programs. What a device
    # makes of its shards is no part of the result: some gradients are sums over the devices.
    tags = case.tags - {"bench", "test", "shard"}
    return Case(
        case.name, (*case.shapes, x, d_final), case.dtype, params, tags, {**case.dtypes, 10: "float32"}, case.draw
    )


GRAD_CASES = tuple(map(grad_case, CASES))
