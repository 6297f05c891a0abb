"""The gradient of state space duality for the TPU, in Pallas (Mosaic): two calls, forward and then back through time.

The first writes the state that each chunk of 128 steps starts from, in x's type; the second goes from the last chunk to
the first with the gradients of the states in VMEM. Both take (batch, part of a group's heads, chunks, heads) in this
order, so that what the heads of a part share, B and C and their gradients, stays in VMEM for all of them, summed over
them in float32 before it is written; the states of the part's heads wait in float32 in VMEM from chunk to chunk. States
are [P, N] here: N is the lanes of a register, where P is often half of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from capibara.kernels.core.context import current_interpret
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct, vary_alike
from capibara.kernels.ops.scan.ssd.rules import Sizes, sizes_of
from capibara.kernels.ops.scan.ssd.spans import over_spans
from capibara.kernels.ops.scan.ssd.tpu.forward import (
    AFTER,
    CHUNK,
    LINES,
    PARTS,
    STEPS,
    SUMS,
    TO_END,
    WHOLES,
    Lines,
    heads_first,
    lines_of,
    product,
    refuses_operands,
)
from capibara.kernels.pallas import vmem
from capibara.kernels.pallas.scratch import vmem_bytes

f32 = jnp.float32
# The lines of the result: of pairs around a step, of x·dy, through the chunk, onward from the chunk's start, outward to
# its end without dt, and the gradient of dt.
PAIRS, SKIPS, THROUGH, ONWARD, OUTWARD, D_STEPS = 0, 1, 2, 3, 4, 5


def _states_body(*args: Any, names: tuple[str, ...]) -> None:
    """Writes the state before each chunk, chunks in order."""
    refs = dict(zip(names, args, strict=True))
    state = refs["state"].at[pl.program_id(3)]

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        state[...] = refs["initial"][...] if "initial" in refs else jnp.zeros_like(state)

    x, lines, before = refs["x"][...], Lines(refs["lines"]), state[...]
    refs["starts"][...] = before.astype(x.dtype)
    weighted = (x.astype(jnp.float32) * lines.down(TO_END)).astype(x.dtype)
    state[...] = lines.decay * before + product(weighted, refs["B"][...], (0, 0))


def _gradient_body(*args: Any, names: tuple[str, ...], has_steps: bool) -> None:
    """The gradients of one chunk and head, the last chunk first; `flow` is the gradient of the state after it."""
    refs = dict(zip(names, args, strict=True))
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

    sums = summed(ONWARD, c.astype(jnp.float32) * entering)
    sums = sums + summed(OUTWARD, wide_x * leaving) + summed(D_STEPS, wide_x * reached)
    line = lax.broadcasted_iota(jnp.int32, (LINES, CHUNK), 0)
    for at, value in ((PAIRS, pairs), (SKIPS, skips), (THROUGH, through)):
        sums = jnp.where(line == at, value, sums)
    refs["sums"][...] = sums

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


def parts_of_a_group(n: Sizes) -> int:
    """In how many parts a group's heads go: two where the batch and the groups leave one of a chip's cores idle.

    >>> parts_of_a_group(Sizes(1, 4096, 32, 64, 1, 128)), parts_of_a_group(Sizes(8, 4096, 32, 64, 1, 128))
    (2, 1)
    """
    return 2 if n.batch * n.groups == 1 and n.heads % 2 == 0 else 1


def refuses(call: Call) -> str | None:
    why = refuses_operands(call)
    if why is not None:
        return why
    n = sizes_of(call)
    layout = _Layout(n, backward=True)
    # Of the second call, the larger; all as in float32, beside squares of scores and tiles of x and of B.
    blocks = [(spec, f32) for name, spec in layout.specs().items() if name != "initial"]
    wide = [pltpu.VMEM((CHUNK, size), f32) for size in (*(CHUNK,) * 10, *(n.width, n.states) * 4)]
    if vmem_bytes(blocks, [*layout.scratch().values(), *wide]) <= vmem.limit(call):
        return None
    return f"the states of {n.heads // n.groups} heads, {n.states} x {n.width} each, do not fit the core's VMEM"


class _Layout:
    """The grid of both calls and where their blocks lie."""

    def __init__(self, n: Sizes, backward: bool) -> None:
        self.n, self.chunks = n, math.ceil(n.time / CHUNK)
        self.parts = n.groups * parts_of_a_group(n)
        self.heads = n.heads // self.parts
        self.grid = (n.batch, self.parts, self.chunks, self.heads)
        self._backward = backward

    def _at(self, k: Any) -> Any:
        return self.chunks - 1 - k if self._backward else k

    def _spec(self, block: tuple[int | None, ...], place: Callable[..., tuple[Any, ...]]) -> Any:
        """`place` of the batch, the part, the head among all, and the chunk."""
        return pl.BlockSpec(block, lambda b, p, k, h: place(b, p, p * self.heads + h, self._at(k)))

    def specs(self) -> dict[str, pl.BlockSpec]:
        """The blocks of both calls, by the name of their array."""
        n, parts_of_group = self.n, self.parts // self.n.groups
        rows = self._spec((None, None, CHUNK, n.width), lambda b, p, h, k: (b, h, k, 0))
        lines = self._spec((None, None, None, LINES, CHUNK), lambda b, p, h, k: (b, h, k, 0, 0))
        of_group = self._spec((None, None, CHUNK, n.states), lambda b, p, h, k: (b, lax.div(p, parts_of_group), k, 0))
        of_part = self._spec((None, None, CHUNK, n.states), lambda b, p, h, k: (b, p, k, 0))
        return {
            **dict.fromkeys(("x", "d_out", "dx"), rows),
            **dict.fromkeys(("lines", "sums"), lines),
            **dict.fromkeys(("B", "C"), of_group),
            **dict.fromkeys(("dB", "dC"), of_part),
            "starts": self._spec((None, None, None, n.width, n.states), lambda b, p, h, k: (b, h, k, 0, 0)),
            "D": self._spec((None, LINES, CHUNK), lambda b, p, h, k: (h, 0, 0)),
            **dict.fromkeys(("initial", "d_final"), self._state_spec(0)),
            "d_initial": self._state_spec(self.chunks - 1),
        }

    def _state_spec(self, turn: int) -> Any:
        """Moved in one turn alone: before and after it the block stays on the head where that turn begins or ends."""
        resting = 0 if turn else self.heads - 1

        def place(b: Any, p: Any, k: Any, h: Any) -> tuple[Any, ...]:
            return b, p * self.heads + jnp.where(k == turn, h, resting), 0, 0

        return pl.BlockSpec((None, None, self.n.width, self.n.states), place)

    def scratch(self) -> dict[str, Any]:
        """The second call's; the first has the states of the part's heads alone."""
        n = self.n
        shapes = {
            "flow": (self.heads, n.width, n.states), "scores": (CHUNK, CHUNK), "d_scores": (CHUNK, CHUNK),
            "dB_sum": (CHUNK, n.states), "dC_sum": (CHUNK, n.states),
        }  # fmt: skip
        return {name: pltpu.VMEM(shape, f32) for name, shape in shapes.items()}

    def call(
        self, body: Any, name: str, operands: dict[str, Any], outs: dict[str, Any], scratch: dict[str, Any],
        products: int,
    ) -> list[Any]:  # fmt: skip
        """The Pallas call; `products` is how many numbers are multiplied in one step of its grid."""
        steps, specs = math.prod(self.grid), self.specs()
        arrays = vary_alike(tuple(operands.values()))
        moved = [*arrays, *outs.values()]
        return pl.pallas_call(
            functools.partial(body, names=(*operands, *outs, *scratch)),
            out_shape=list(outs.values()),
            grid=self.grid,
            in_specs=[specs[name] for name in operands],
            out_specs=[specs[name] for name in outs],
            scratch_shapes=list(scratch.values()),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary")
            ),
            cost_estimate=pl.CostEstimate(
                flops=2 * steps * products,
                transcendentals=steps * CHUNK * (CHUNK if self._backward else 1),
                bytes_accessed=sum(math.prod(v.shape) * v.dtype.itemsize for v in moved),
            ),
            interpret=current_interpret().pallas_argument(),
            name=name,
        )(*arrays)


def _starts(n: Sizes, x: jax.Array, lines: jax.Array, B: jax.Array, initial: jax.Array | None) -> jax.Array:
    """[batch, heads, chunks, P, N]: the state before each chunk, in x's type."""
    layout = _Layout(n, backward=False)
    operands = {"x": x, "B": B, "lines": lines}
    if initial is not None:
        operands["initial"] = initial.astype(f32).mT
    outs = {"starts": out_struct((n.batch, n.heads, layout.chunks, n.width, n.states), x.dtype, x)}
    scratch = {"state": layout.scratch()["flow"]}
    return layout.call(
        _states_body, "capibara_ssd_states", operands, outs, scratch, CHUNK * n.width * n.states
    )[0]  # fmt: skip


def ssd_backward(
    x: jax.Array, log_decay: jax.Array, B: jax.Array, C: jax.Array, dt: jax.Array | None, D: jax.Array | None,
    initial_state: jax.Array | None, d_out: jax.Array, d_final: jax.Array | None = None, *, chunk: int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """The cotangents of the seven operands; None for an absent one. See the module's text."""
    assert chunk in (None, CHUNK)  # `refuses` has seen to it
    n = Sizes(*x.shape, *B.shape[2:])
    layout = _Layout(n, backward=True)
    length = layout.chunks * CHUNK
    lines = lines_of(log_decay, dt, layout.chunks)
    turned_x, turned_b = heads_first(x, layout.chunks), heads_first(B, layout.chunks)
    operands = {
        "x": turned_x,
        "d_out": heads_first(d_out.astype(x.dtype), layout.chunks),
        "B": turned_b,
        "C": heads_first(C, layout.chunks),
        "lines": lines,
        "starts": _starts(n, turned_x, lines, turned_b, initial_state),
    }
    if D is not None:
        operands["D"] = jnp.broadcast_to(D.astype(f32)[:, None, None], (n.heads, LINES, CHUNK))
    if d_final is not None:
        operands["d_final"] = d_final.astype(f32).mT
    # Sums that are added once more stay in float32.
    shared = out_struct((n.batch, layout.parts, length, n.states), x.dtype if layout.parts == n.groups else f32, x)
    outs = {
        "dx": out_struct((n.batch, n.heads, length, n.width), x.dtype, x),
        "dB": shared,
        "dC": shared,
        "sums": out_struct((n.batch, n.heads, layout.chunks, LINES, CHUNK), f32, x),
    }
    if initial_state is not None:
        outs["d_initial"] = out_struct((n.batch, n.heads, n.width, n.states), f32, x)
    body = functools.partial(_gradient_body, has_steps=dt is not None)
    products = CHUNK * (CHUNK * (2 * n.width + CHUNK) + 4 * n.width * n.states)
    results = layout.call(body, "capibara_ssd_grad", operands, outs, layout.scratch(), products)
    grads = dict(zip(outs, results, strict=True))

    def by_time(v: jax.Array, like: jax.Array) -> jax.Array:
        """[batch, heads, whole chunks, ...] as an operand is."""
        return jnp.moveaxis(v[:, :, : n.time], 1, 2).astype(like.dtype)

    def of_groups(v: jax.Array, like: jax.Array) -> jax.Array:
        if layout.parts > n.groups:
            v = v.reshape(n.batch, n.groups, -1, length, n.states).sum(2)
        return by_time(v, like)

    def line(which: int) -> jax.Array:
        return grads["sums"][..., which, :]

    def steps(v: jax.Array, like: jax.Array) -> jax.Array:
        return by_time(v.reshape(n.batch, n.heads, length), like)

    outward = line(OUTWARD) * lines[..., STEPS, :]
    d_log_decay = over_spans(line(PAIRS), line(ONWARD), outward, line(THROUGH)[..., 0])
    return (
        by_time(grads["dx"], x),
        steps(d_log_decay, log_decay),
        of_groups(grads["dB"], B),
        of_groups(grads["dC"], C),
        None if dt is None else steps(line(D_STEPS), dt),
        None if D is None else line(SKIPS).sum((0, 2, 3)).astype(D.dtype),
        None if initial_state is None else grads["d_initial"].mT.astype(initial_state.dtype),
    )


GRAD_IMPLEMENTATION = Implementation(
    "pallas_tpu",
    ssd_backward,
    platforms=("tpu",),
    refuses=refuses,
    kernel=True,
    hints=("chunk",),
)
