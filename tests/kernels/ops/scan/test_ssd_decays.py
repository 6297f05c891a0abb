"""Strong decays and resets in the kernels of state space duality, forward and back, TPU and Hopper, both emulated.

What passes through a strong decay is small, and beside what does not it would be lost in the tolerance of a whole
result. Here nothing else is there: one step gives, one step is asked, and each number is held against its own size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.kernels.pallas import hopper_emulator as emulator

from capibara.kernels import interpret
from capibara.kernels.ops.scan import SSD
from capibara.kernels.ops.scan.ssd.api import SSD_GRAD
from capibara.kernels.ops.scan.ssd.hopper import backward, forward, states
from capibara.kernels.ops.scan.ssd.hopper.backward import GradConfig, ssd_backward
from capibara.kernels.ops.scan.ssd.hopper.forward import ChunksConfig, ssd_forward

HOPPER = (forward, states, backward)

TIME, HEADS, SIZE = 137, 2, 64  # three chunks of 64 and two of 128; columns and states
UNIT = 2.0**-8  # the largest error of rounding to bfloat16
KERNELS = ("pallas_tpu", "hopper")


def _forward(name: str, *arrays: Any) -> Any:
    if name == "pallas_tpu":
        with interpret("hlo"):
            return SSD(*arrays, implementation=name)
    with emulator.emulated(*HOPPER):
        run = jax.jit(lambda *given: ssd_forward(*given, config=ChunksConfig(2), return_final_state=False))
        return jax.block_until_ready(run(*arrays))


def _gradient(name: str, *arrays: Any) -> Any:
    if name == "pallas_tpu":
        with interpret("hlo"):
            return SSD_GRAD(*arrays, implementation=name)
    with emulator.emulated(*HOPPER):
        run = jax.jit(lambda *given: ssd_backward(*given, config=GradConfig(2, 1)))
        return jax.block_until_ready(run(*arrays))


def _positive(*shape: int, seed: int) -> jax.Array:
    """Sums of such numbers cancel nothing, so that their relative errors are those of their terms."""
    return jnp.asarray(np.random.default_rng(seed).uniform(0.5, 1.5, shape), jnp.bfloat16)


def _operands() -> tuple[jax.Array, ...]:
    """x at the first step alone, and log decays that add up to about -8."""
    x = _positive(1, TIME, HEADS, SIZE, seed=0).at[:, 1:].set(0)
    drawn = np.random.default_rng(1).uniform(-0.11, -0.01, (1, TIME, HEADS))
    return x, jnp.asarray(drawn, jnp.float32), _positive(1, TIME, 1, SIZE, seed=2), _positive(1, TIME, 1, SIZE, seed=3)


def _in_float64(fn: Callable[..., Any], *arrays: Any) -> Any:
    wide = [None if x is None else np.asarray(x).astype(np.float64) for x in arrays]
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, fn(*wide))


def _off(found: Any, wanted: np.ndarray) -> float:
    """The largest relative error of any number."""
    return float(np.max(np.abs(np.asarray(found).astype(np.float64) - wanted) / np.abs(wanted)))


@pytest.mark.parametrize("name", KERNELS)
def test_a_small_error_of_strong_decays_is_seen(name: str) -> None:
    x, log_decay, b, c = _operands()
    wanted = _in_float64(SSD.reference, x, log_decay, b, c)
    # Four roundings: of weights or the weighted x, of the state or the scores, of the result, one to spare.
    assert _off(_forward(name, x, log_decay, b, c), wanted) < 4 * UNIT
    assert _off(_forward(name, x, 1.01 * log_decay, b, c), wanted) > 4 * UNIT


@pytest.mark.parametrize("name", KERNELS)
def test_a_small_error_of_strong_decays_is_seen_in_gradients(name: str) -> None:
    """The last step is asked: the gradients of x, B and the decays are what passes to it from the others."""
    x, log_decay, b, c = _operands()
    flow = jnp.zeros_like(x).at[:, -1].set(_positive(1, HEADS, SIZE, seed=4))
    rest = (b, c, None, None, None, flow)
    wanted = _in_float64(SSD_GRAD.reference, x, log_decay, *rest)

    def off(log_decay: Any) -> float:
        dx, d_decay, d_b, d_c, *_ = (None if g is None else np.asarray(g) for g in _gradient(name, x, log_decay, *rest))
        parts = (dx, wanted[0]), (d_decay[:, 1:], wanted[1][:, 1:]), (d_b[:, :1], wanted[2][:, :1])
        return max(_off(found, right) for found, right in (*parts, (d_c[:, -1:], wanted[3][:, -1:])))

    # Six roundings: two of the states on the way, of scores, weights, the flow's and the result's own.
    assert off(log_decay) < 6 * UNIT
    assert off(1.01 * log_decay) > 6 * UNIT


@pytest.mark.parametrize("name", KERNELS)
def test_resets_are_exact_in_gradients(name: str) -> None:
    """Nothing passes a reset: the gradient of its decay is 0, and what is after it is as if it were the start."""
    rng = np.random.default_rng(5)
    resets = slice(10, None, 19)
    x, flow = (jnp.asarray(rng.standard_normal((1, TIME, HEADS, SIZE)), jnp.bfloat16) for _ in range(2))
    b, c = (jnp.asarray(rng.standard_normal((1, TIME, 1, SIZE)), jnp.bfloat16) for _ in range(2))
    log_decay = jnp.full((1, TIME, HEADS), -0.0123, jnp.float32).at[:, resets].set(-104.0)
    state = jnp.asarray(rng.standard_normal((1, HEADS, SIZE, SIZE)), jnp.float32)
    arrays = (x, log_decay, b, c, None, None, state, flow)
    found, wanted = _gradient(name, *arrays), _in_float64(SSD_GRAD.reference, *arrays)
    assert not np.asarray(found[1])[:, resets].any()
    # A whole gradient's norm: six roundings as above, of independent signs.
    for mine, right in zip((found[0], found[1], found[6]), (wanted[0], wanted[1], wanted[6]), strict=True):
        error = np.linalg.norm(np.asarray(mine).astype(np.float64) - right) / np.linalg.norm(right)
        assert error < 6 * UNIT
