"""What the TPU kernels of the recurrence share: blocks of time and channels, and the scan of eight rows at once.

A register holds eight steps of 128 channels. Three rounds of rolling it against itself by one, two and four steps turn
its decays into products and its terms into states (Hillis and Steele's scan), so that all eight rows work at once; the
state that came before is then added in one more step. Only that last step waits for the registers before.

Products of large decays overflow where no state does, and what is not finite is hidden by a row that does not hang on
it. So a block is looked over when it is done (`Watch`), and one with such numbers in it is computed again row by row.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from capibara.errors import rule_error
from capibara.kernels.core.spec import Call
from capibara.kernels.ops.scan.recurrence.planes import Number, choose, filled, split
from capibara.kernels.ops.scan.recurrence.rules import sizes_of
from capibara.kernels.pallas import vmem

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


def candidates_for(call: Call, moved: int) -> Sequence[BlockConfig]:
    """Blocks that fit VMEM, the best guess first; `moved` bytes a number go through it."""
    _, steps, channels = sizes_of(call)
    chunk = chunk_of([x for x in call.args if x is not None and len(x.shape) == 3])
    whole = padded_steps(steps, chunk) // chunk * chunk
    widths = {channels} if channels < LANES else {min(w, channels // LANES * LANES) for w in (1024, 512, 256, 128)}
    made = []
    for width in sorted(widths, reverse=True):
        lanes = math.ceil(width / LANES) * LANES
        for target in (512, 256, 128, 64, 16):
            block = min(target // chunk * chunk, whole)
            # Two of every block are kept; states and rows at the edges are small beside them.
            if 2 * block * lanes * moved + 64 * lanes * ROWS <= vmem.limit(call):
                made.append(BlockConfig(block, width, chunk))
    # A mebibyte hides what a step of the grid costs, and more only delays the first.
    enough = [c for c in made if c.steps * c.channels * moved >= 1 << 20]
    order = sorted(enough, key=lambda c: c.steps * c.channels)
    return list(dict.fromkeys([*order, *made]))


def refuses(call: Call) -> str | None:
    for name, given in zip(call.op.operands, call.args, strict=True):
        if given is not None and np.dtype(given.dtype).name not in ("bfloat16", "float32", "complex64"):
            return f"a TPU's vector units take bfloat16 and float32 (complex64 as two); {name} is {given.dtype.name}"
    if 0 in sizes_of(call):
        return "there are no steps, or nothing that takes them"
    return None


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

    def found(self, column: Any, channels: int) -> jax.Array:
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
