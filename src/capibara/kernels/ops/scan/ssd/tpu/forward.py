"""State space duality for the TPU, in Pallas (Mosaic): a head's chunks of 128 steps in order, its state in VMEM.

The grid is (batch, heads, chunks), the last in order. A chunk is four products of 128 rows; the state [N, P] waits in
float32 in VMEM from one chunk to the next. What a step has one number of, such as the running sums of log_decay, XLA
prepares as a line of 128 lanes, eight lines a register; the kernel turns them once where its rows need them.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from capibara.kernels.core.context import current_interpret
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.scan.ssd.decays import running_sums
from capibara.kernels.ops.scan.ssd.rules import Sizes, sizes_of
from capibara.kernels.pallas import vmem
from capibara.kernels.pallas.scratch import vmem_bytes

CHUNK = 128
LINES = 8  # a register's sublanes, of which six are used, in this order
# Running sums of the whole numbers in log_decay and of the rest, both added, dt, dt · decay to the chunk's end, and
# that decay alone.
WHOLES, PARTS, SUMS, STEPS, TO_END, AFTER, USED = 0, 1, 2, 3, 4, 5, 6


def refuses_operands(call: Call) -> str | None:
    n = sizes_of(call)
    if 0 in (n.batch, n.time):
        return "x is empty"
    kinds = {np.dtype(call.need(name).dtype).name for name in ("x", "B", "C")}
    if len(kinds) > 1 or not kinds <= {"bfloat16", "float32"}:
        return f"x, B and C are all bfloat16 or all float32, not {', '.join(sorted(kinds))}"
    if any(x is not None and np.dtype(x.dtype).name not in ("bfloat16", "float32") for x in call.args):
        return "a TPU's vector units take bfloat16 and float32"
    if call.params["chunk"] not in (None, CHUNK):
        return f"its chunks are {CHUNK} steps, not {call.params['chunk']}"
    return None


def heads_first(v: jax.Array, chunks: int) -> jax.Array:
    """[batch, time, heads, ...] as [batch, heads, time, ...], whole chunks; zeros past the end."""
    moved = jnp.moveaxis(v, 2, 1)
    return jnp.pad(moved, ((0, 0), (0, 0), (0, chunks * CHUNK - v.shape[1]), *((0, 0),) * (v.ndim - 3)))


def lines_of(log_decay: jax.Array, dt: jax.Array | None, chunks: int) -> jax.Array:
    """[batch, heads, chunks, lines, steps] in float32."""

    def by_chunk(v: jax.Array) -> jax.Array:
        return heads_first(v.astype(jnp.float32), chunks).reshape(v.shape[0], v.shape[2], chunks, CHUNK)

    wholes, parts = running_sums(by_chunk(log_decay), -1)
    steps = jnp.ones_like(parts) if dt is None else by_chunk(dt)
    after = jnp.exp((wholes[..., -1:] - wholes) + (parts[..., -1:] - parts))
    lines = jnp.stack([wholes, parts, wholes + parts, steps, after * steps, after], -2)
    return jnp.pad(lines, ((0, 0), (0, 0), (0, 0), (0, LINES - USED), (0, 0)))


def product(left: Any, right: Any, over: tuple[int, int]) -> Any:
    """Summed in float32 over these axes; float32 operands are multiplied exactly, not by faster passes."""
    exact = left.dtype == jnp.float32
    axes = (((over[0],), (over[1],)), ((), ()))
    precision = lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT
    return lax.dot_general(left, right, axes, precision=precision, preferred_element_type=jnp.float32)


class Lines:
    """A chunk's numbers a step, as lanes and as rows."""

    def __init__(self, ref: Any) -> None:
        self._lines = ref[...]
        self._columns = self._lines.T  # [steps, lines]

    def along(self, line: int) -> Any:
        return self._lines[line : line + 1]

    def down(self, line: int) -> Any:
        return self._columns[:, line : line + 1]

    @property
    def decay(self) -> Any:
        """[1, 1]: of the whole chunk."""
        return jnp.exp(self.along(SUMS)[:, CHUNK - 1 :])


def refuses(call: Call) -> str | None:
    why = refuses_operands(call)
    if why is not None:
        return why
    n = sizes_of(call)
    specs = _specs(n)
    present = ["x", "B", "C", "lines", "y", *(name for name in ("D", "initial_state") if call[name] is not None)]
    present += ["final"] if call.params["return_final_state"] else []
    # All as in float32, which x is widened to; the state before and after a chunk; some squares of scores.
    blocks = [(specs[name], jnp.float32) for name in present]
    temporaries = [_state_scratch(n)] * 2 + [pltpu.VMEM((CHUNK, CHUNK), jnp.float32)] * 6
    needed = vmem_bytes(blocks, [_state_scratch(n), *temporaries])
    return None if needed <= vmem.limit(call) else f"a state of {n.states} x {n.width} does not fit the core's VMEM"


def _specs(n: Sizes) -> dict[str, pl.BlockSpec]:
    """The blocks of a grid (batch, heads, chunks), by the name of their array."""
    each = n.heads // n.groups
    of_head = pl.BlockSpec((None, None, CHUNK, n.width), lambda b, h, k: (b, h, k, 0))
    of_group = pl.BlockSpec((None, None, CHUNK, n.states), lambda b, h, k: (b, lax.div(h, each), k, 0))
    of_state = pl.BlockSpec((None, None, n.states, n.width), lambda b, h, k: (b, h, 0, 0))
    return {
        "x": of_head,
        "y": of_head,
        "B": of_group,
        "C": of_group,
        "lines": pl.BlockSpec((None, None, None, LINES, CHUNK), lambda b, h, k: (b, h, k, 0, 0)),
        "D": pl.BlockSpec((None, LINES, CHUNK), lambda b, h, k: (h, 0, 0)),
        "initial_state": of_state,
        "final": of_state,
    }


def _state_scratch(n: Sizes) -> Any:
    return pltpu.VMEM((n.states, n.width), jnp.float32)


def _body(*args: Any, names: tuple[str, ...], has_steps: bool) -> None:
    refs = dict(zip(names, args, strict=True))
    number, state = pl.program_id(2), refs["state"]

    @pl.when(number == 0)
    def _() -> None:
        state[...] = refs["initial_state"][...] if "initial_state" in refs else jnp.zeros_like(state)

    x, b, c = refs["x"][...], refs["B"][...], refs["C"][...]
    lines = Lines(refs["lines"])
    along, down = lines.along, lines.down
    row, column = (lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
    between = (down(WHOLES) - along(WHOLES)) + (down(PARTS) - along(PARTS))
    weights = jnp.exp(jnp.where(row >= column, between, -jnp.inf))
    if has_steps:
        weights = weights * along(STEPS)
    weights = (product(c, b, (1, 1)) * weights).astype(x.dtype)
    before = state[...]
    y = product(weights, x, (1, 0)) + jnp.exp(down(SUMS)) * product(c, before.astype(x.dtype), (1, 0))
    wide = x.astype(jnp.float32)
    if "D" in refs:
        y = y + refs["D"][0:1, 0:1] * wide
    refs["y"][...] = y.astype(x.dtype)
    after = lines.decay * before + product(b, (wide * down(TO_END)).astype(x.dtype), (0, 0))
    state[...] = after
    if "final" in refs:

        @pl.when(number == pl.num_programs(2) - 1)
        def _() -> None:
            refs["final"][...] = after


def ssd_forward(
    x: jax.Array, log_decay: jax.Array, B: jax.Array, C: jax.Array, dt: jax.Array | None = None,
    D: jax.Array | None = None, initial_state: jax.Array | None = None, *, return_final_state: bool,
    chunk: int | None = None,
) -> Any:  # fmt: skip
    """The forward pass as one Pallas call; see the module's text."""
    assert chunk in (None, CHUNK)  # `refuses` has seen to it
    batch, time, heads, width = x.shape
    groups, states = B.shape[2:]
    n = Sizes(batch, time, heads, width, groups, states)
    chunks = math.ceil(time / CHUNK)
    length = chunks * CHUNK
    operands = {
        "x": heads_first(x, chunks),
        "B": heads_first(B, chunks),
        "C": heads_first(C, chunks),
        "lines": lines_of(log_decay, dt, chunks),
    }
    if D is not None:
        operands["D"] = jnp.broadcast_to(D.astype(jnp.float32)[:, None, None], (heads, LINES, CHUNK))
    if initial_state is not None:
        operands["initial_state"] = initial_state.astype(jnp.float32)
    outs = {"y": out_struct((batch, heads, length, width), x.dtype, x)}
    if return_final_state:
        outs["final"] = out_struct((batch, heads, states, width), jnp.float32, x)
    specs = _specs(n)
    flops = 2 * batch * heads * length * (CHUNK * (states + width) + 2 * states * width)
    y, *last = pl.pallas_call(
        functools.partial(_body, names=(*operands, *outs, "state"), has_steps=dt is not None),
        out_shape=list(outs.values()),
        grid=(batch, heads, chunks),
        in_specs=[specs[name] for name in operands],
        out_specs=[specs[name] for name in outs],
        scratch_shapes=[_state_scratch(n)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=flops,
            transcendentals=batch * heads * length * CHUNK,
            bytes_accessed=sum(v.size * v.dtype.itemsize for v in operands.values()) + x.size * x.dtype.itemsize,
        ),
        interpret=current_interpret().pallas_argument(),
        name="capibara_ssd",
    )(*operands.values())
    y = jnp.moveaxis(y[:, :, :time], 1, 2)
    return (y, last[0]) if return_final_state else y


IMPLEMENTATION = Implementation(
    "pallas_tpu",
    ssd_forward,
    platforms=("tpu",),
    refuses=refuses,
    kernel=True,
    hints=("chunk",),
)
