"""The shapes the recurrence is built for: state-space and gated layers of real models, and shapes meant to break it."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from capibara.kernels.core.spec import Case
from capibara.kernels.ops.scan.recurrence.reference import reference

REAL = frozenset({"bench", "tpu", "gpu", "tune"})
HOSTILE = frozenset({"test", "tpu"})
LOWERED = frozenset({"tpu", "gpu"})  # compiled for the accelerators, and run by this op's own tests


def draw_decay(generator: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """Numbers of size up to 1, some negative: channels that remember for one step to those that do for a thousand."""
    forget = 10.0 ** (-3 * generator.random(shape[-1:], np.float32))
    sign = np.where(generator.random(shape, np.float32) < 0.1, np.float32(-1), np.float32(1))
    return sign * (1 - forget * generator.random(shape, np.float32))


def draw_complex_decay(generator: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """As `draw_decay`, turned by any angle."""
    angle = 2 * np.pi * generator.random(shape)
    return (draw_decay(generator, shape) * np.exp(1j * angle)).astype(np.complex64)


def draw_complex(generator: np.random.Generator, shape: tuple[int, ...]) -> Any:
    return (generator.standard_normal(shape) + 1j * generator.standard_normal(shape)).astype(np.complex64)


def _case(
    name: str, shape: tuple[int, int, int], tags: frozenset[str], dtype: str = "float32", *, initial: bool = False,
    decay: str | None = None, **params: Any,
) -> Case:  # fmt: skip
    """`decay` is the type of a, b's own by default; an initial state is float32."""
    batch, _, channels = shape
    dtypes: dict[int, str] = {0: decay or dtype}
    draw: dict[int, Any] = {0: draw_decay}
    if dtype.startswith("complex"):
        draw = {0: draw_complex_decay, 1: draw_complex, 2: draw_complex}
    else:
        dtypes[2] = "float32"
    return Case(name, (shape, shape, (batch, channels) if initial else None), dtype, params, tags, dtypes, draw)


CASES = (
    _case("8x4096x2048", (8, 4096, 2048), REAL),
    _case("8x4096x2048-bf16", (8, 4096, 2048), REAL, "bfloat16"),
    _case("2x16384x1024", (2, 16384, 1024), REAL),
    _case("1x65536x256", (1, 65536, 256), REAL),
    _case("32x1024x4096-bf16", (32, 1024, 4096), REAL, "bfloat16"),
    # Hostile: one, odd, prime, no steps, both directions, every operand and every output.
    _case("one", (1, 1, 1), HOSTILE),
    _case("odd", (3, 5, 7), HOSTILE, initial=True, return_final=True),
    _case("prime", (1, 19, 131), HOSTILE, "bfloat16", decay="float32", initial=True, reverse=True, return_final=True),
    _case("no-steps", (2, 0, 5), HOSTILE, initial=True, return_final=True),
    _case("complex", (2, 19, 5), HOSTILE, "complex64", initial=True, return_final=True),
    _case("hopper-tail", (2, 83, 256), LOWERED, "bfloat16", initial=True, reverse=True, return_final=True),
    _case("hopper-split", (1, 1024, 128), LOWERED, decay="bfloat16", initial=True, return_final=True),
    _case("hopper-complex", (2, 40, 128), LOWERED, "complex64"),
    _case("shardable", (8, 8, 64), LOWERED | {"shard"}, initial=True, return_final=True),
)

GRAD_TESTED = ("odd", "prime")
# Shapes whose backward pass is the same program as another's.
GRAD_ALIKE = ("2x16384x1024", "1x65536x256", "32x1024x4096-bf16", "one")


def grad_case(case: Case) -> Case:
    """The backward pass of a forward case: a, what came of it, and the cotangents."""
    a, _, initial = case.shapes
    params: dict[str, Any] = {name: value for name, value in case.params.items() if name == "reverse"}
    assert a is not None
    final = (a[0], a[2]) if case.params.get("return_final") else None
    forward = jax.jit(lambda *xs: reference(*xs, **params))

    def complete(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        decay, b, start, *rest = arrays
        return (decay, forward(decay, b, start), start, *rest)

    # The forward op's cases are tested and benchmarked with their gradients, which run these programs; a few are
    # also tested on their own.
    tags = case.tags - {"bench"}
    if case.name not in GRAD_TESTED:
        tags -= {"test"}
    if case.name in GRAD_ALIKE:
        tags -= {"tpu", "gpu"}
    dtypes, draw = dict(case.dtypes), dict(case.draw)
    if 2 in dtypes:
        dtypes[4] = dtypes[2]
    if 1 in draw:
        draw |= {3: draw[1], 4: draw[2]}
    return Case(case.name, (a, a, initial, a, final), case.dtype, params, tags, dtypes, draw, complete)


GRAD_CASES = tuple(map(grad_case, CASES))
