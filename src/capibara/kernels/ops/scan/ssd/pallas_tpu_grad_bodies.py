"""The two TPU kernel bodies of the gradient of state space duality: the states that chunks start from, and the rest.

Both take (batch, part of a group's heads, chunks, heads) in this order, so that what the heads of a part share, B and
C and their gradients, stays in VMEM for all of them; the states [P, N] of the part's heads wait in float32 in VMEM from
chunk to chunk.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from capibara.kernels.ops.scan.ssd.pallas_tpu_lines import (
    AFTER,
    CHUNK,
    LINES,
    PARTS,
    STEPS,
    SUMS,
    TO_END,
    WHOLES,
    Lines,
    product,
)

# The lines of the result: of pairs around a step, of x·dy, through the chunk, onward from the chunk's start, outward to
# its end without dt, and the gradient of dt.
PAIRS, SKIPS, THROUGH, ONWARD, OUTWARD, D_STEPS = 0, 1, 2, 3, 4, 5


def states_body(*given: Any, names: tuple[str, ...]) -> None:
    """Writes the state before each chunk, chunks in order."""
    refs = dict(zip(names, given, strict=True))
    state = refs["state"].at[pl.program_id(3)]

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        state[...] = refs["initial"][...] if "initial" in refs else jnp.zeros_like(state)

    x, lines, before = refs["x"][...], Lines(refs["lines"]), state[...]
    refs["starts"][...] = before.astype(x.dtype)
    weighted = (x.astype(jnp.float32) * lines.down(TO_END)).astype(x.dtype)
    state[...] = lines.decay * before + product(weighted, refs["B"][...], (0, 0))


def gradient_body(*given: Any, names: tuple[str, ...], has_steps: bool) -> None:
    """The gradients of one chunk and head, the last chunk first; `flow` is the gradient of the state after it."""
    refs = dict(zip(names, given, strict=True))
    turn, head = pl.program_id(2), pl.program_id(3)
    flow, scores, d_scores = refs["flow"].at[head], refs["scores"], refs["d_scores"]
    x, d_out, b, c = (refs[name][...] for name in ("x", "d_out", "B", "C"))

    @pl.when(turn == 0)
    def _() -> None:
        flow[...] = refs["d_final"][...] if "d_final" in refs else jnp.zeros_like(flow)

    @pl.when(head == 0)
    def _() -> None:
        scores[...] = product(b, c, (1, 1))
        for name in ("d_scores", "dB_sum", "dC_sum"):
            refs[name][...] = jnp.zeros_like(refs[name])

    lines = Lines(refs["lines"])
    wide_x, wide_d_out = x.astype(jnp.float32), d_out.astype(jnp.float32)
    row, column = (lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))

    # Pairs, rows j of x by columns i of y: what passes from x_j to y_i, and the gradient of C_i·B_j.
    between = (lines.along(WHOLES) - lines.down(WHOLES)) + (lines.along(PARTS) - lines.down(PARTS))
    decays = jnp.exp(jnp.where(column >= row, between, -jnp.inf))
    weights = decays * scores[...]
    meet = product(x, d_out, (1, 1))
    d_pair = decays * meet
    if has_steps:
        d_pair = d_pair * lines.down(STEPS)
    d_scores[...] += d_pair
    # Of each pair to every step after j up to i: over i by a product, over j by the sum.
    later = jnp.where(row >= column, 1.0, 0.0).astype(x.dtype)
    passing = product((d_pair * scores[...]).astype(x.dtype), later, (1, 0))
    pairs = jnp.where(row < column, passing, 0.0).sum(0, keepdims=True)
    skips = jnp.where(row == column, meet, 0.0).sum(0, keepdims=True)

    # Through the state after the chunk.
    after = flow[...]
    narrow_after = after.astype(x.dtype)
    leaving = product(b, narrow_after, (1, 1)) * lines.down(AFTER)
    reached = leaving + product(weights.astype(x.dtype), d_out, (1, 0))
    refs["dB_sum"][...] += product((wide_x * lines.down(TO_END)).astype(x.dtype), narrow_after, (1, 0))
    dx = reached * lines.down(STEPS) if has_steps else reached
    if "D" in refs:
        dx = dx + refs["D"][0:1, 0:1] * wide_d_out
    refs["dx"][...] = dx.astype(x.dtype)

    # Through the state before it.
    start = refs["starts"][...]
    faded = (wide_d_out * jnp.exp(lines.down(SUMS))).astype(x.dtype)
    entering = product(faded, start, (1, 0))
    refs["dC_sum"][...] += entering
    through = lines.decay * (start.astype(jnp.float32) * after).sum(axis=(0, 1), keepdims=True)
    flow[...] = lines.decay * after + product(faded, c, (0, 0))

    def summed(at: int, tile: Any) -> Any:
        """[lines, steps] with the sum of each row in line `at`: a product, which needs no turning of columns."""
        line = lax.broadcasted_iota(jnp.int32, (LINES, tile.shape[1]), 0)
        return product(jnp.where(line == at, 1.0, 0.0).astype(x.dtype), tile.astype(x.dtype), (1, 1))

    made = summed(ONWARD, c.astype(jnp.float32) * entering)
    made = made + summed(OUTWARD, wide_x * leaving) + summed(D_STEPS, wide_x * reached)
    line = lax.broadcasted_iota(jnp.int32, (LINES, CHUNK), 0)
    for at, value in ((PAIRS, pairs), (SKIPS, skips), (THROUGH, through)):
        made = jnp.where(line == at, value, made)
    refs["sums"][...] = made

    @pl.when(head == pl.num_programs(3) - 1)
    def _() -> None:
        narrow = d_scores[...].astype(x.dtype)
        dtype = refs["dB"].dtype
        refs["dB"][...] = (refs["dB_sum"][...] + product(narrow, c, (1, 0))).astype(dtype)
        refs["dC"][...] = (refs["dC_sum"][...] + product(narrow, b, (0, 0))).astype(dtype)

    if "d_initial" in refs:

        @pl.when(turn == pl.num_programs(2) - 1)
        def _() -> None:
            refs["d_initial"][...] = flow[...]
