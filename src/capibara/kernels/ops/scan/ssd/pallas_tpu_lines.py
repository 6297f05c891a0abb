"""What the TPU kernels of state space duality share, forward and backward: what they are given beside x, B and C, how
they read and multiply it, and what they refuse.

A chunk is 128 steps, the lanes of a register. What a step has one number of comes as a line of lanes, eight lines a
register; a kernel turns them once where its rows need them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from capibara.kernels.core.spec import Call
from capibara.kernels.ops.scan.ssd.decays import running_sums
from capibara.kernels.ops.scan.ssd.rules import sizes_of

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
