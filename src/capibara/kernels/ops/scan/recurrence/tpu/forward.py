"""The recurrence for the TPU, in Pallas (Mosaic): blocks of time stream through VMEM, each number once.

The grid is (batch, blocks of channels, blocks of time). Time is its last axis and runs in order, the state of each
channel waiting in VMEM for the next block; the others are parallel, so both cores of a v4 chip have half of them.

A register holds eight steps of 128 channels. Three rounds of rolling it against itself by one, two and four steps turn
its decays into products and its terms into states (Hillis and Steele's scan), so that all eight rows work at once; the
state that came before is then added in one more step. Only that last step waits for the registers before.

Products of large decays overflow where no state does, and what is not finite is hidden by a row that does not hang on
it. So a block is looked over when it is done (`Watch`), and one with such numbers in it is computed again row by row.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from capibara.errors import rule_error
from capibara.kernels.core.context import current_interpret
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.scan.recurrence.planes import Number, choose, filled, join, split, store
from capibara.kernels.ops.scan.recurrence.rules import sizes_of
from capibara.kernels.pallas import vmem
from capibara.kernels.pallas.scratch import vmem_bytes

LANES = 128
ROWS = 8  # steps in a register of float32
# Eight such decays are 2^112, or 2^116 where both planes of a complex number are as large, so all products are finite,
# and one that underflows to nothing has lost, when the others have multiplied it, less than a state's rounding.
LARGEST_DECAY = 2.0**14


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """Steps and channels of a block, and how many of its steps are taken at a time: a whole number of registers."""

    steps: int
    channels: int
    chunk: int

    def __post_init__(self) -> None:
        if self.chunk < 1 or self.chunk % ROWS or self.steps < 1 or self.steps % self.chunk or self.channels < 1:
            raise rule_error(
                f"steps is a positive multiple of chunk, and chunk of {ROWS}", self, "use steps=256, chunk=16"
            )


def chunk_of(operands: Sequence[Any]) -> int:
    """Sixteen steps fill a packed register of bfloat16, eight one of float32."""
    return 2 * ROWS if any(x.dtype.itemsize < 4 for x in operands) else ROWS


def padded_steps(steps: int, chunk: int) -> int:
    """Steps that the kernel is given: at least one chunk."""
    return max(steps, chunk)


def candidates_for(call: Call, moving: Sequence[Any]) -> Sequence[BlockConfig]:
    """Blocks that fit VMEM, the best guess first; the arrays `moving` go through it."""
    moved = sum(x.dtype.itemsize for x in moving)
    _, steps, channels = sizes_of(call)
    chunk = chunk_of([x for x in call.args if x is not None and len(x.shape) == 3])
    whole = padded_steps(steps, chunk) // chunk * chunk
    widths = {channels} if channels < LANES else {min(w, channels // LANES * LANES) for w in (1024, 512, 256, 128)}
    configs = []
    for width in sorted(widths, reverse=True):
        for target in (512, 256, 128, 64, 16):
            block = min(target // chunk * chunk, whole)
            config = BlockConfig(block, width, chunk)
            rows, edge, state = block_specs(config, lambda turn: turn)
            # The arrays, the rows beside a block of one, and the states at both ends of time.
            blocks = [*((rows, x.dtype) for x in moving), (edge, moving[0].dtype), *((state, moving[0].dtype),) * 2]
            if vmem_bytes(blocks, carry_scratch(config, moving[0])) <= vmem.limit(call):
                configs.append(config)
    # A mebibyte hides what a step of the grid costs, and more only delays the first.
    enough = [c for c in configs if c.steps * c.channels * moved >= 1 << 20]
    order = sorted(enough, key=lambda c: c.steps * c.channels)
    return list(dict.fromkeys([*order, *configs]))


def refuses(call: Call) -> str | None:
    for name, x in zip(call.op.operands, call.args, strict=True):
        if x is not None and np.dtype(x.dtype).name not in ("bfloat16", "float32", "complex64"):
            return f"a TPU's vector units take bfloat16 and float32 (complex64 as two); {name} is {x.dtype.name}"
    if 0 in sizes_of(call):
        return "there are no steps, or nothing that takes them"
    return None


def block_specs(
    config: BlockConfig, block: Callable[[Any], Any], beside: Callable[[Any], Any] = lambda turn: turn
) -> tuple[Any, Any, Any]:
    """The blocks of a grid (batch, channels, time): of an array, of a chunk of it `beside` that block, of a state."""

    def over_time(rows: int, at: Callable[[Any], Any]) -> Any:
        return pl.BlockSpec((1, rows, config.channels), lambda row, column, turn: (row, at(turn), column))

    # An axis of one keeps the last two of a block [1, channels] whole.
    state = pl.BlockSpec((1, 1, config.channels), lambda row, column, turn: (row, 0, column))
    return over_time(config.steps, block), over_time(config.chunk, beside), state


def carry_scratch(config: BlockConfig, like: Number) -> Number:
    """What waits in VMEM from one block of time to the next: a state of the block's channels."""
    return jax.tree.map(lambda _: pltpu.VMEM((1, config.channels), jnp.float32), like)


def scan_rows(decay: Number, added: Number, reverse: bool) -> tuple[Number, Number]:
    """For [8, channels]: the products of decays up to each row, and the states from a start at zero."""
    row = row_numbers(decay)
    for distance in (1, 2, 4):
        inside = row < ROWS - distance if reverse else row >= distance
        added = added + decay * choose(inside, roll(added, distance, reverse), filled(added, 0.0))
        decay = decay * choose(inside, roll(decay, distance, reverse), filled(decay, 1.0))
    return decay, added


class Watch(NamedTuple):
    """What a block's rows had in them, [8, channels]: the largest decays, and zero where all states were finite."""

    decay: jax.Array
    state: jax.Array

    @classmethod
    def start(cls, like: Any) -> Watch:
        nothing = jnp.zeros((ROWS, like.shape[-1]), jnp.float32)
        return cls(nothing, nothing)

    def see(self, decay: Number, states: Number) -> Watch:
        largest, poison = self
        for plane in jax.tree.leaves(decay):
            largest = jnp.maximum(largest, jnp.abs(plane))
        for plane in jax.tree.leaves(states):
            poison = poison + plane * 0.0  # not a number from the first state on that is not finite
        return Watch(largest, poison)

    def any(self, column: Any, channels: int) -> jax.Array:
        """Whether any of the block's own channels had one; a block may reach past the last of them."""
        lane = column * self.decay.shape[1] + lax.broadcasted_iota(jnp.int32, self.decay.shape, 1)
        odd = jnp.logical_not((self.decay <= LARGEST_DECAY) & (self.state == 0))
        return jnp.max(jnp.where(odd & (lane < channels), 1.0, 0.0)) > 0


def row_at(x: Number, row: int) -> Number:
    """One row of a chunk, [1, channels]."""
    return jax.tree.map(lambda plane: plane[row : row + 1], x)


def put_row(x: Number, row: int, value: Number) -> Number:
    """A chunk with one row replaced."""
    return choose(row_numbers(x) == row, value, x)


def row_numbers(x: Number) -> jax.Array:
    (like, *_) = jax.tree.leaves(x)
    return lax.broadcasted_iota(jnp.int32, like.shape, 0)


def roll(x: Number, distance: int, reverse: bool) -> Number:
    """Eight rows, each moved to where time is `distance` steps further."""
    shift = ROWS - distance if reverse else distance  # a roll goes towards later rows
    return jax.tree.map(lambda plane: pltpu.roll(plane, shift, 0), x)


def rows_of(x: Number, piece: int) -> Number:
    """A register of a chunk."""
    return jax.tree.map(lambda plane: plane[piece * ROWS : (piece + 1) * ROWS], x)


def last_row(x: Number, reverse: bool) -> Number:
    """The row that time reaches last, [1, channels]."""
    return jax.tree.map(lambda plane: plane[:1] if reverse else plane[-1:], x)


def stacked(pieces: Sequence[Number]) -> Number:
    if len(pieces) == 1:
        return pieces[0]
    return jax.tree.map(lambda *planes: jnp.concatenate(planes, 0), *pieces)


def read(refs: Number, rows: Any) -> Number:
    """Rows of a block in float32."""
    return jax.tree.map(lambda ref: ref[0, rows].astype(jnp.float32), refs)


def state_operand(x: jax.Array | None) -> Number:
    """[batch, channels] in float32 as [batch, 1, channels], which keeps a block's last two axes whole."""
    if x is None:
        return None
    return jax.tree.map(lambda plane: plane.astype(jnp.float32)[:, None], split(x))


def specs(kinds: Sequence[Any], values: Sequence[Number]) -> list[Any]:
    """A kind of block for each plane of the values that are present."""
    return [kind for kind, x in zip(kinds, values, strict=True) for _ in jax.tree.leaves(x)]


def ordered(count: int, reverse: bool) -> Any:
    return range(count - 1, -1, -1) if reverse else range(count)


def candidates(call: Call) -> Sequence[BlockConfig]:
    a, b = call.need("a"), call.need("b")
    return candidates_for(call, (a, b, b))


def _body(*refs: Any, tree: Any, config: BlockConfig, steps: int, channels: int, reverse: bool) -> None:
    (a_ref, b_ref, initial_ref), (h_ref, final_ref), state_ref = jax.tree.unflatten(tree, refs)
    turn, turns = pl.program_id(2), pl.num_programs(2)
    block = turns - 1 - turn if reverse else turn

    @pl.when(turn == 0)
    def _start() -> None:
        if initial_ref is None:
            store(state_ref, ..., jax.tree.map(jnp.zeros_like, state_ref))
        else:
            store(state_ref, ..., jax.tree.map(lambda ref: ref[0], initial_ref))

    chunks = config.steps // config.chunk
    ragged = steps % config.steps != 0

    def chunk_operands(number: jax.Array) -> tuple[Any, Number, Number]:
        at = chunks - 1 - number if reverse else number
        rows = pl.ds(pl.multiple_of(at * config.chunk, config.chunk), config.chunk)
        decay, added = read(a_ref, rows), read(b_ref, rows)
        if ragged:
            # Past the end of time is nobody's memory: steps that change nothing stand for it.
            inside = block * config.steps + at * config.chunk + row_numbers(decay) < steps
            decay, added = choose(inside, decay, filled(decay, 1.0)), choose(inside, added, filled(added, 0.0))
        return rows, decay, added

    def chunk(number: jax.Array, carry: tuple[Number, Watch]) -> tuple[Number, Watch]:
        state, watch = carry
        rows, decay, added = chunk_operands(number)
        pieces = config.chunk // ROWS
        tiles: list[Any] = [None] * pieces
        for piece in ordered(pieces, reverse):
            decays = rows_of(decay, piece)
            product, from_zero = scan_rows(decays, rows_of(added, piece), reverse)
            tiles[piece] = from_zero + product * state
            watch = watch.see(decays, tiles[piece])
            state = last_row(tiles[piece], reverse)
        store(h_ref, (0, rows), stacked(tiles))
        return state, watch

    def row_by_row(number: jax.Array, state: Number) -> Number:
        rows, decay, added = chunk_operands(number)
        states = added
        for row in ordered(config.chunk, reverse):
            state = row_at(decay, row) * state + row_at(added, row)
            states = put_row(states, row, state)
        store(h_ref, (0, rows), states)
        return state

    start = jax.tree.map(lambda ref: ref[...], state_ref)
    state, watch = lax.fori_loop(0, chunks, chunk, (start, Watch.start(jax.tree.leaves(start)[0])))
    again = watch.any(pl.program_id(1), channels)

    @pl.when(again)
    def _again() -> None:
        store(state_ref, ..., lax.fori_loop(0, chunks, row_by_row, jax.tree.map(lambda ref: ref[...], state_ref)))

    @pl.when(jnp.logical_not(again))
    def _keep() -> None:
        store(state_ref, ..., state)

    if final_ref is not None:

        @pl.when(turn == turns - 1)
        def _finish() -> None:
            store(final_ref, 0, jax.tree.map(lambda ref: ref[...], state_ref))


def recurrence_forward(
    a: jax.Array, b: jax.Array, initial: jax.Array | None = None, *, config: BlockConfig, reverse: bool,
    return_final: bool,
) -> Any:  # fmt: skip
    """The forward pass as one kernel over (batch, channels, time); see the module's text."""
    batch, length, channels = b.shape
    steps = padded_steps(length, config.chunk)
    if steps != length:
        padding = ((0, 0), (0, steps - length), (0, 0))
        a, b = jnp.pad(a, padding, constant_values=1), jnp.pad(b, padding)
    turns = math.ceil(steps / config.steps)

    moving, _, still = block_specs(config, lambda turn: turns - 1 - turn if reverse else turn)
    operands = (split(a), split(b), state_operand(initial))
    h = jax.tree.map(lambda plane: out_struct(plane.shape, plane.dtype, plane), operands[1])
    final = jax.tree.map(lambda plane: out_struct((batch, 1, channels), jnp.float32, plane), operands[1])
    results = (h, final if return_final else None)
    state = carry_scratch(config, h)
    planes = pl.pallas_call(
        functools.partial(
            _body, tree=jax.tree.structure((operands, results, state)), config=config, steps=steps, channels=channels,
            reverse=reverse,
        ),
        out_shape=jax.tree.leaves(results),
        grid=(batch, math.ceil(channels / config.channels), turns),
        in_specs=specs((moving, moving, still), operands),
        out_specs=specs((moving, still), results),
        scratch_shapes=jax.tree.leaves(state),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * b.size,
            bytes_accessed=a.size * a.dtype.itemsize + 2 * b.size * b.dtype.itemsize,
            transcendentals=0,
        ),
        interpret=current_interpret().pallas_argument(),
        name="capibara_linear_recurrence",
    )(*jax.tree.leaves(operands))  # fmt: skip
    h, final = jax.tree.unflatten(jax.tree.structure(results), planes)
    h = join(h)[:, :length]
    return (h, join(final).reshape(batch, channels)) if return_final else h


IMPLEMENTATION = Implementation(
    "pallas_tpu",
    recurrence_forward,
    platforms=("tpu",),
    refuses=refuses,
    kernel=True,
    config_type=BlockConfig,
    candidates=candidates,
)
