"""A short causal convolution for the TPU, in Pallas (Mosaic): time streams through VMEM, each number once.

The grid is (batch, blocks of channels, blocks of time), time last and in order: a block leaves its last inputs in a
scratch for the next, so nothing is read twice. Inputs are shifted in float32, whose rows move freely across sublanes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from capibara.errors import rule_error
from capibara.kernels.core.context import current_interpret
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.conv.causal1d.reference import history
from capibara.kernels.pallas import vmem
from capibara.kernels.pallas.scratch import vmem_bytes

CARRIED = 8  # rows that a block hands on: a register of float32, so filters have up to 9 taps


@dataclasses.dataclass(frozen=True)
class TimeConfig:
    """Inputs of a block along time, and channels."""

    time: int
    channels: int

    def __post_init__(self) -> None:
        if self.time < 1 or self.channels < 1:
            raise rule_error("time and channels are above 0", self, "use time=512, channels=512")


def _blocks(config: TimeConfig, width: int, biased: bool) -> dict[str, Any]:
    """What `pallas_call` moves and keeps: inputs, state, taps and bias; the result; what a block hands on."""
    block = pl.BlockSpec((None, config.time, config.channels), lambda b, c, t: (b, t, c))
    in_specs = [
        block,
        pl.BlockSpec((None, CARRIED, config.channels), lambda b, c, t: (b, 0, c)),
        pl.BlockSpec((width, config.channels), lambda b, c, t: (0, c)),
    ]
    if biased:
        in_specs.append(pl.BlockSpec((1, config.channels), lambda b, c, t: (0, c)))
    scratch = [pltpu.VMEM((CARRIED, config.channels), jnp.float32)]
    return {"in_specs": in_specs, "out_specs": block, "scratch_shapes": scratch}


def candidates(call: Call) -> Sequence[TimeConfig]:
    """Blocks that fit VMEM, the largest first."""
    x = call.need("x")
    _, time, channels = x.shape
    rows = 32 // x.dtype.itemsize  # of a packed register
    times = {t for t in (1024, 512, 256, 128) if t <= time} or {time if time <= rows else time // rows * rows}
    widths = {min(c, channels) for c in (512, 256, 128)}
    configs = [TimeConfig(t, c) for t in times for c in widths]

    def fits(config: TimeConfig) -> bool:
        blocks = _blocks(config, call.need("w").shape[0], call["bias"] is not None)
        dtypes = [x.dtype, *(jnp.float32 for _ in blocks["in_specs"][1:]), x.dtype]
        moved = zip([*blocks["in_specs"], blocks["out_specs"]], dtypes, strict=True)
        # Besides, in float32: the inputs with their history, a shifted copy, and the sum.
        values = [pltpu.VMEM((config.time, config.channels), jnp.float32)] * 3
        return vmem_bytes(moved, [*blocks["scratch_shapes"], *values]) <= vmem.limit(call)

    fit = [config for config in configs if fits(config)]
    return sorted(fit, key=lambda c: (-c.time * c.channels, -c.channels))


def refuses(call: Call) -> str | None:
    x, w = call.need("x"), call.need("w")
    for name, operand in zip(call.op.operands, call.args, strict=True):
        if operand is not None and np.dtype(operand.dtype).name not in ("bfloat16", "float32"):
            return f"a TPU's vector units take bfloat16 and float32; {name} is {operand.dtype.name}"
    if 0 in x.shape:
        return "x is empty"
    if w.shape[0] > CARRIED + 1:
        return f"it is for filters up to {CARRIED + 1} taps, and these have {w.shape[0]}"
    return None


def _body(x_ref: Any, state_ref: Any, w_ref: Any, *rest: Any, width: int, biased: bool, activation: str | None) -> None:
    bias_ref = rest[0] if biased else None
    y_ref, carry_ref = rest[-2:]
    time = x_ref.shape[0]

    @pl.when(pl.program_id(2) == 0)
    def _start() -> None:
        carry_ref[...] = state_ref[...]

    values = x_ref[...].astype(jnp.float32)
    seen = jnp.concatenate([carry_ref[...], values], 0)
    acc = None
    for k in range(width):
        first = CARRIED - (width - 1) + k
        term = seen[first : first + time] * w_ref[k : k + 1]
        acc = term if acc is None else acc + term
    assert acc is not None
    if bias_ref is not None:
        acc = acc + bias_ref[...]
    if activation == "silu":
        acc = acc * jax.nn.sigmoid(acc)
    y_ref[...] = acc.astype(y_ref.dtype)
    carry_ref[...] = seen[time:]


def causal_conv1d_tpu(
    x: jax.Array, w: jax.Array, bias: jax.Array | None = None, initial_state: jax.Array | None = None,
    *, config: TimeConfig, activation: str | None, return_final_state: bool,
) -> Any:  # fmt: skip
    """The convolution as one Pallas call; see the module's text."""
    batch, time, channels = x.shape
    width = w.shape[0]
    if initial_state is None:
        state = jnp.zeros((batch, CARRIED, channels), jnp.float32)
    else:
        rounded = initial_state.astype(x.dtype).astype(jnp.float32)
        state = jnp.pad(rounded, ((0, 0), (CARRIED - (width - 1), 0), (0, 0)))
    operands = [x, state, w.astype(jnp.float32)]
    if bias is not None:
        operands.append(bias.astype(jnp.float32)[None])
    y = pl.pallas_call(
        functools.partial(_body, width=width, biased=bias is not None, activation=activation),
        out_shape=out_struct(x.shape, x.dtype, x),
        grid=(batch, math.ceil(channels / config.channels), math.ceil(time / config.time)),
        **_blocks(config, width, bias is not None),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * width * x.size,
            bytes_accessed=2 * x.size * x.dtype.itemsize,
            transcendentals=x.size if activation else 0,
        ),
        interpret=current_interpret().pallas_argument(),
        name="capibara_causal_conv1d",
    )(*operands)
    if not return_final_state:
        return y
    # The last inputs alone, which may reach back into the state.
    kept = x[:, max(time - (width - 1), 0) :]
    return y, history(kept, width, initial_state)[:, kept.shape[1] :]


IMPLEMENTATION = Implementation(
    "pallas_tpu",
    causal_conv1d_tpu,
    platforms=("tpu",),
    refuses=refuses,
    rank=lambda call: 5,  # below XLA until it has been timed on a TPU
    kernel=True,
    config_type=TimeConfig,
    default_config=lambda call: candidates(call)[0],
    candidates=candidates,
)
