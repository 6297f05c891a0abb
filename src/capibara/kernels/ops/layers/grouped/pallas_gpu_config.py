"""The tiles of the grouped products on Hopper: their sizes, what is worth timing, and which calls the kernels take."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from capibara.errors import rule_error
from capibara.kernels.core.spec import Call
from capibara.kernels.ops.layers.grouped.rules import Sizes, floats, out_dtype_of, sizes
from capibara.kernels.pallas.hopper import SMEM_BYTES, SWIZZLE, refuses_chip

STEP = 64  # of the contraction: one swizzle atom of 16-bit numbers
PIECE_ROWS = 64  # results leave through shared memory in pieces of 64 rows by one swizzle atom
BARRIER_BYTES = 1024  # a generous count of the ring's barriers


@dataclasses.dataclass(frozen=True)
class GroupedHopperConfig:
    """One warpgroup's tile, the depth of the ring, and the order in which tiles are visited.

    The two multiplying warpgroups sit side by side along `split` ("m" or "n"), so a program's tile is twice as large
    there. Tiles are visited column by column in bands of `band` tiles of rows. `pieces` of each warpgroup's results
    can be on their way out at a time. The gated product gives half of `tile_n` to the gate and half to up.
    """

    tile_m: int
    tile_n: int
    stages: int = 4
    split: str = "m"
    band: int = 4
    pieces: int = 2

    def __post_init__(self) -> None:
        if self.tile_m not in (64, 128, 192, 256):
            raise rule_error("tile_m is 64, 128, 192 or 256", self.tile_m, "use 64")
        if self.tile_n not in (64, 128, 192, 256):
            raise rule_error("tile_n is 64, 128, 192 or 256", self.tile_n, "use 256")
        if self.tile_m * self.tile_n > 128 * 192:
            # 192 of the 232 registers that a thread has.
            raise rule_error(
                "A warpgroup holds at most 128 x 192 sums", f"{self.tile_m} x {self.tile_n}", "use a smaller tile"
            )
        if self.split not in ("m", "n"):
            raise rule_error("split is 'm' or 'n'", self.split, "use 'm'")
        if max(self.program_tile) > 256:
            raise rule_error("A program's tile is at most 256 long (TMA)", self.program_tile, "use a smaller tile")
        if self.stages < 2:
            raise rule_error("stages is two or more", self.stages, "use 4")
        if self.band < 1 or self.pieces < 1:
            raise rule_error("band and pieces are one or more", (self.band, self.pieces), "use 4 and 2")

    @property
    def program_tile(self) -> tuple[int, int]:
        return self.tile_m * (1 + (self.split == "m")), self.tile_n * (1 + (self.split == "n"))

    def smem_bytes(self) -> int:
        """Shared memory of the ring and of the two warpgroups' pieces: 64 rows of one swizzle atom each."""
        m, n = self.program_tile
        return 2 * self.stages * (m + n) * STEP + 2 * self.pieces * PIECE_ROWS * SWIZZLE + BARRIER_BYTES


def piece_columns(dtype: Any) -> int:
    """How many results of a row fill one swizzle atom."""
    return SWIZZLE // jnp.dtype(dtype).itemsize


def _deepest(tile_m: int, tile_n: int, split: str, band: int, pieces: int = 2) -> GroupedHopperConfig:
    """With as many stages as fit, six at most: more would only fetch further ahead than a tile is long."""
    for stages in (6, 5, 4, 3):
        config = GroupedHopperConfig(tile_m, tile_n, stages, split, band, pieces)
        if config.smem_bytes() <= SMEM_BYTES:
            return config
    return GroupedHopperConfig(tile_m, tile_n, 2, split, band, pieces)


def _made(choices: Iterable[tuple[Any, ...]]) -> list[GroupedHopperConfig]:
    return list(dict.fromkeys(_deepest(*choice) for choice in choices))


def row_candidates(call: Call) -> Sequence[GroupedHopperConfig]:
    """For the products whose rows are grouped: the tallest tile that an average group fills comes first."""
    rows, _, _, groups = sizes(call)
    tall = [
        (64, 256, "m", 4), (64, 256, "m", 8), (64, 256, "m", 16), (64, 256, "m", 2), (128, 128, "n", 4),
        (128, 128, "n", 8), (128, 128, "m", 2), (128, 128, "m", 4), (64, 256, "m", 4, 4),
    ]  # fmt: skip
    short = [(64, 128, "n", 2), (64, 64, "n", 2), (64, 128, "m", 2), (64, 128, "n", 1)]
    return _made([*tall, short[0]] if rows >= 96 * groups else [*short, *tall[:3]])


def gated_candidates(call: Call) -> Sequence[GroupedHopperConfig]:
    """Those of the plain product that leave both weights 64 columns a warpgroup."""
    return [config for config in row_candidates(call) if config.tile_n % (2 * PIECE_ROWS) == 0]


def weight_candidates(call: Call) -> Sequence[GroupedHopperConfig]:
    """For the product whose contraction is grouped. It writes much for what it multiplies: more pieces on their way."""
    return _made(
        [
            (128, 128, "m", 8), (128, 128, "m", 8, 4), (64, 256, "m", 8), (64, 256, "m", 8, 4), (128, 128, "n", 8),
            (128, 128, "n", 8, 4), (128, 128, "m", 4), (128, 128, "m", 16), (64, 128, "m", 8, 4),
        ]
    )  # fmt: skip


def default_row_config(call: Call) -> GroupedHopperConfig:
    return row_candidates(call)[0]


def default_gated_config(call: Call) -> GroupedHopperConfig:
    return gated_candidates(call)[0]


def default_weight_config(call: Call) -> GroupedHopperConfig:
    return weight_candidates(call)[0]


def refuses(call: Call) -> str | None:
    """Why the kernels do not take this call: the chip, the types, or a length that Mosaic cannot tile."""
    chip = refuses_chip(call.target.device_kind)
    if chip is not None:
        return chip
    operands = floats(call)
    names = {np.dtype(x.dtype).name for x in operands}
    if len(names) > 1 or not names <= {"bfloat16", "float16"}:
        return (
            f"its tensor-core form takes operands of one type, bfloat16 or float16, not {' and '.join(sorted(names))}"
        )
    out = out_dtype_of(call)
    if out not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"it writes bfloat16, float16 or float32, not {out}"
    if any(0 in x.shape for x in operands):
        return "an operand is empty"
    n = sizes(call)
    for axis, length in (("K", n.inner), ("N", n.columns)):
        # Mosaic cuts arrays into pieces one swizzle atom wide and pads none; an array of a single piece loses that
        # axis from its TMA descriptor, and what lies past its edge is no longer dropped.
        if length % STEP or length < 2 * STEP:
            return f"{axis} is {length}; Mosaic cuts it into pieces of {STEP} and needs two or more"
    if _rows(call, n) >= 2**31:
        return "it counts rows and tiles in 32 bits"
    return None


def _rows(call: Call, n: Sizes) -> int:
    """The rows, or the tiles where those are more, that a kernel counts."""
    smallest = math.ceil(n.inner / STEP) * math.ceil(n.columns / STEP)
    return max(n.rows * math.ceil(n.columns / STEP), n.groups * smallest)
