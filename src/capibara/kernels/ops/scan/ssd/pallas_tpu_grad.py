"""The gradient of state space duality for the TPU, in Pallas (Mosaic): two calls, forward and then back through time.

The first writes the state that each chunk of 128 steps starts from, in x's type; the second goes from the last chunk to
the first with the gradients of the states in VMEM. What the heads of a group share is summed over them in float32
before it is written. States are [P, N] here: N is the lanes of a register, where P is often half of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from capibara.kernels.core.context import current_interpret
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct, vary_alike
from capibara.kernels.ops.scan.ssd import pallas_tpu_grad_bodies as bodies
from capibara.kernels.ops.scan.ssd.pallas_tpu_lines import (
    CHUNK,
    LINES,
    STEPS,
    heads_first,
    lines_of,
    refuses_operands,
)
from capibara.kernels.ops.scan.ssd.rules import Sizes, sizes_of
from capibara.kernels.ops.scan.ssd.spans import over_spans
from capibara.kernels.pallas import vmem

f32 = jnp.float32


def parts_of_a_group(n: Sizes) -> int:
    """In how many parts a group's heads go: two where the batch and the groups leave one of a chip's cores idle.

    >>> parts_of_a_group(Sizes(1, 4096, 32, 64, 1, 128)), parts_of_a_group(Sizes(8, 4096, 32, 64, 1, 128))
    (2, 1)
    """
    return 2 if n.batch * n.groups == 1 and n.heads % 2 == 0 else 1


def vmem_bytes(n: Sizes) -> int:
    """Of the second kernel, the larger: two of each block and what is kept, all as in float32, and squares."""
    width, states = (math.ceil(size / 128) * 128 for size in (n.width, n.states))
    blocks = CHUNK * (3 * width + 4 * states) + 3 * width * states + 3 * LINES * CHUNK
    rows = math.ceil(n.width / 8) * 8  # of a register
    kept = n.heads // n.groups // parts_of_a_group(n) * rows * states + 2 * CHUNK * (CHUNK + states)
    return 4 * (2 * blocks + kept + 10 * CHUNK * CHUNK + 4 * CHUNK * (width + states))


def refuses(call: Call) -> str | None:
    why = refuses_operands(call)
    if why is not None:
        return why
    n = sizes_of(call)
    if vmem_bytes(n) <= vmem.limit(call):
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

    def of_head(self, *rows: int) -> Any:
        return self._spec((None, None, *rows), lambda b, p, h, k: (b, h, k, 0))

    def of_chunk(self, *block: int) -> Any:
        return self._spec((None, None, None, *block), lambda b, p, h, k: (b, h, k, 0, 0))

    def of_group(self) -> Any:
        each = self.parts // self.n.groups
        return self._spec((None, None, CHUNK, self.n.states), lambda b, p, h, k: (b, lax.div(p, each), k, 0))

    def of_part(self) -> Any:
        return self._spec((None, None, CHUNK, self.n.states), lambda b, p, h, k: (b, p, k, 0))

    def of_skip(self) -> Any:
        return self._spec((None, LINES, CHUNK), lambda b, p, h, k: (h, 0, 0))

    def of_state(self, turn: int) -> Any:
        """Moved in one turn alone: before and after it the block stays on the head where that turn begins or ends."""
        resting = 0 if turn else self.heads - 1

        def place(b: Any, p: Any, k: Any, h: Any) -> tuple[Any, ...]:
            return b, p * self.heads + jnp.where(k == turn, h, resting), 0, 0

        return pl.BlockSpec((None, None, self.n.width, self.n.states), place)

    def call(
        self, body: Any, name: str, operands: dict[str, tuple[Any, Any]], outs: dict[str, tuple[Any, Any]],
        scratch: Mapping[str, tuple[int, ...]], products: int,
    ) -> list[Any]:  # fmt: skip
        """The Pallas call; `products` is how many numbers are multiplied in one step of its grid."""
        steps = math.prod(self.grid)
        arrays = vary_alike(tuple(v for v, _ in operands.values()))
        moved = [*arrays, *(struct for struct, _ in outs.values())]
        return pl.pallas_call(
            functools.partial(body, names=(*operands, *outs, *scratch)),
            out_shape=[struct for struct, _ in outs.values()],
            grid=self.grid,
            in_specs=[spec for _, spec in operands.values()],
            out_specs=[spec for _, spec in outs.values()],
            scratch_shapes=[pltpu.VMEM(shape, f32) for shape in scratch.values()],
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
    operands = {
        "x": (x, layout.of_head(CHUNK, n.width)),
        "B": (B, layout.of_group()),
        "lines": (lines, layout.of_chunk(LINES, CHUNK)),
    }
    if initial is not None:
        operands["initial"] = (initial.astype(f32).mT, layout.of_state(0))
    shape = (n.batch, n.heads, layout.chunks, n.width, n.states)
    outs = {"starts": (out_struct(shape, x.dtype, x), layout.of_chunk(n.width, n.states))}
    scratch = {"state": (layout.heads, n.width, n.states)}
    return layout.call(
        bodies.states_body, "capibara_ssd_states", operands, outs, scratch, CHUNK * n.width * n.states
    )[0]  # fmt: skip


def pallas_tpu_grad(
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
    rows = layout.of_head(CHUNK, n.width)
    operands = {
        "x": (turned_x, rows),
        "d_out": (heads_first(d_out.astype(x.dtype), layout.chunks), rows),
        "B": (turned_b, layout.of_group()),
        "C": (heads_first(C, layout.chunks), layout.of_group()),
        "lines": (lines, layout.of_chunk(LINES, CHUNK)),
        "starts": (_starts(n, turned_x, lines, turned_b, initial_state), layout.of_chunk(n.width, n.states)),
    }
    if D is not None:
        operands["D"] = (jnp.broadcast_to(D.astype(f32)[:, None, None], (n.heads, LINES, CHUNK)), layout.of_skip())
    if d_final is not None:
        operands["d_final"] = (d_final.astype(f32).mT, layout.of_state(0))
    # Sums that are added once more stay in float32.
    shared = out_struct((n.batch, layout.parts, length, n.states), x.dtype if layout.parts == n.groups else f32, x)
    outs = {
        "dx": (out_struct((n.batch, n.heads, length, n.width), x.dtype, x), rows),
        "dB": (shared, layout.of_part()),
        "dC": (shared, layout.of_part()),
        "sums": (out_struct((n.batch, n.heads, layout.chunks, LINES, CHUNK), f32, x), layout.of_chunk(LINES, CHUNK)),
    }
    if initial_state is not None:
        state = out_struct((n.batch, n.heads, n.width, n.states), f32, x)
        outs["d_initial"] = (state, layout.of_state(layout.chunks - 1))
    square = (CHUNK, CHUNK)
    scratch = {
        "flow": (layout.heads, n.width, n.states), "scores": square, "d_scores": square,
        "dB_sum": (CHUNK, n.states), "dC_sum": (CHUNK, n.states),
    }  # fmt: skip
    body = functools.partial(bodies.gradient_body, has_steps=dt is not None)
    products = CHUNK * (CHUNK * (2 * n.width + CHUNK) + 4 * n.width * n.states)
    made = layout.call(body, "capibara_ssd_grad", operands, outs, scratch, products)
    found = dict(zip(outs, made, strict=True))

    def by_time(v: jax.Array, like: jax.Array) -> jax.Array:
        """[batch, heads, whole chunks, ...] as an operand is."""
        return jnp.moveaxis(v[:, :, : n.time], 1, 2).astype(like.dtype)

    def of_groups(v: jax.Array, like: jax.Array) -> jax.Array:
        if layout.parts > n.groups:
            v = v.reshape(n.batch, n.groups, -1, length, n.states).sum(2)
        return by_time(v, like)

    def line(which: int) -> jax.Array:
        return found["sums"][..., which, :]

    def steps(v: jax.Array, like: jax.Array) -> jax.Array:
        return by_time(v.reshape(n.batch, n.heads, length), like)

    outward = line(bodies.OUTWARD) * lines[..., STEPS, :]
    d_log_decay = over_spans(line(bodies.PAIRS), line(bodies.ONWARD), outward, line(bodies.THROUGH)[..., 0])
    return (
        by_time(found["dx"], x),
        steps(d_log_decay, log_decay),
        of_groups(found["dB"], B),
        of_groups(found["dC"], C),
        None if dt is None else steps(line(bodies.D_STEPS), dt),
        None if D is None else line(bodies.SKIPS).sum((0, 2, 3)).astype(D.dtype),
        None if initial_state is None else found["d_initial"].mT.astype(initial_state.dtype),
    )


IMPLEMENTATION = Implementation(
    "pallas_tpu",
    pallas_tpu_grad,
    platforms=("tpu",),
    refuses=refuses,
    rank=lambda call: 20,  # predicted: as compiled for v4 it moves a seventh of the bytes of XLA's form
    kernel=True,
    hints=("chunk",),
)
