"""F(4x4, 3x3) with transforms written for Hopper, in Pallas (Mosaic GPU): each number is read and written once.

XLA's transforms pass through memory twice. Here a program is one warpgroup that walks along a row of tiles with a
number of channels to each thread: the tile is in registers, the columns that it shares with the next one stay there,
and what is made of it leaves at once. Nothing is shared between threads. The product in between is XLA's.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.errors import rule_error, unknown_name
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.conv.conv2d import rules, winograd
from capibara.kernels.ops.conv.conv2d.points import TAPS, transforms
from capibara.kernels.pallas.hopper import LANE, load, named, refuses_chip

TILE = 4
SPAN = TILE + TAPS - 1
THREADS = 128  # of a warpgroup
MOST_PADDING = 2  # so that every tile has a part of the image
LARGE = 50_000  # pixels of output from which on it goes first for float32 products
VECTORS = (2, 1)  # channels of a thread: 36 positions of two are about half of its registers
# No thread sees another's numbers, so the barriers that Pallas would put around stores are not needed.
COMPILER_PARAMS = plgpu.CompilerParams(unsafe_no_auto_barriers=True, lowering_semantics=LANE)


@dataclasses.dataclass(frozen=True)
class WalkConfig:
    """How the products are computed (see `WinogradConfig`), and how many tiles a program walks along."""

    product: str = "plain"
    tiles: int = 8

    def __post_init__(self) -> None:
        if self.product not in winograd.PRODUCTS:
            raise unknown_name("product of Winograd's", self.product, winograd.PRODUCTS)
        if self.tiles < 1:
            raise rule_error("A program walks along a tile or more", self, "use tiles=8")


def _vector(channels: int) -> int | None:
    """Channels of a thread; None where a warpgroup does not divide them."""
    return next((v for v in VECTORS if channels % (THREADS * v) == 0), None)


def refuses(call: Call) -> str | None:
    reason = refuses_chip(call.target.device_kind) or winograd.refuses(TILE, call)
    if reason is not None:
        return reason
    n = rules.sizes_of(call)
    dtype = np.dtype(call.need("inputs").dtype).name
    if dtype not in ("float32", "bfloat16", "float16"):
        return f"it takes float32 and 16-bit types, not {dtype}"
    if max(max(pair) for pair in n.pads) > MOST_PADDING:
        return f"it is for up to {MOST_PADDING} zeros on each side, and there are {n.pads}"
    if _vector(n.cin) is None or _vector(n.cout) is None:
        return f"each of 128 threads takes a channel or two: a multiple of 128, not {n.cin} to {n.cout}"
    tiles = n.images * -(-n.out_rows // TILE) * -(-n.out_columns // TILE)
    if SPAN * SPAN * tiles * max(n.cin, n.cout) >= 2**31:
        return "its kernels count to 2**31, and there are more transformed numbers"
    return None


def _walk(tiles: int, along: int) -> tuple[Any, Any]:
    """The first tile of this program's stretch of a row of `along` tiles, and how many it has."""
    begins = lax.axis_index("stretch") * tiles
    return begins, jnp.minimum(jnp.int32(tiles), along - begins)


def _spread(
    x_hbm: Any, v_hbm: Any, *, tiles: int, along: int, width: int, vector: int, down: int, corner: tuple[int, int]
) -> None:
    """Bᵀ d B of a stretch of tiles: x [images, rows, columns, channels] to v [position, tile, channels].

    `corner` is the first row and column that the first tile reads. Outside of the image the nearest number is read and
    multiplied by 0, which spares a padded copy of the images. With few zeros around it that number is one of the same
    tile's, so an infinite one spoils no more than it does by the transforms themselves.
    """
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=vector)
    matrix = transforms(TILE).inputs
    row = lax.axis_index("row")
    image, top = lax.div(row, down), lax.rem(row, down) * TILE + corner[0]
    piece = pl.ds(lax.axis_index("piece") * width, width)
    begins, count = _walk(tiles, along)
    last_row, last_column = x_hbm.shape[1] - 1, x_hbm.shape[2] - 1

    def within(at: Any, last: int) -> tuple[Any, Any]:
        """The nearest index of the image, and 1 where that is the one, else 0."""
        nearest = jnp.clip(at, 0, last)
        return nearest, jnp.where(nearest == at, jnp.float32(1), jnp.float32(0))

    def column(index: Any) -> list[Any]:
        """One column of the tile, transformed along the rows."""
        across, inside = within(index + corner[1], last_column)

        def number(i: int) -> Any:
            above, there = within(top + i, last_row)
            value = load(x_hbm.at[image, above, across, piece], layout).astype(jnp.float32)
            return value * (there * inside)

        return winograd.transformed(matrix, [number(i) for i in range(SPAN)])

    def step(turn: Any, carry: Any) -> Any:
        at = begins + turn
        columns = [*carry, *(column(at * TILE + j) for j in range(TAPS - 1, SPAN))]
        for i in range(SPAN):
            for j, value in enumerate(winograd.transformed(matrix, [c[i] for c in columns])):
                v_hbm.at[j * SPAN + i, row * along + at, piece][...] = value.astype(v_hbm.dtype)
        return columns[TILE:]

    lax.fori_loop(0, count, step, [column(begins * TILE + j) for j in range(TAPS - 1)])


def _collect(m_hbm: Any, y_hbm: Any, *, tiles: int, along: int, width: int, vector: int) -> None:
    """Aᵀ m A of a stretch of tiles: m [position, tile, outputs] to y [rows of tiles, row, column, outputs]."""
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=vector)
    row = lax.axis_index("row")
    piece = pl.ds(lax.axis_index("piece") * width, width)
    begins, count = _walk(tiles, along)

    def step(turn: Any, carry: None) -> None:
        at = begins + turn
        columns = [
            winograd.gathered(
                TILE, [load(m_hbm.at[j * SPAN + i, row * along + at, piece], layout) for i in range(SPAN)]
            )
            for j in range(SPAN)
        ]
        for a in range(TILE):
            for b, value in enumerate(winograd.gathered(TILE, [c[a] for c in columns])):
                y_hbm.at[row * TILE + a, at * TILE + b, piece][...] = value.astype(y_hbm.dtype)
        return carry

    lax.fori_loop(0, count, step, None)


def conv2d_hopper(
    inputs: jax.Array, filters: jax.Array, *, config: WalkConfig, strides: Any, padding: Any, dilation: Any,
    groups: int, precision: str | None,
) -> jax.Array:  # fmt: skip
    """The convolution: a kernel, a batched product, a kernel; see the module's text."""
    n = rules.sizes(inputs, filters, strides=strides, padding=padding, dilation=dilation)
    down, along = -(-n.out_rows // TILE), -(-n.out_columns // TILE)
    (top, _), (left, _) = n.pads
    tiles = min(config.tiles, along)

    def pass_over(body: Any, x: jax.Array, shape: tuple[int, ...], dtype: Any, channels: int) -> Any:
        vector = _vector(channels)
        assert vector is not None  # refuses has seen to it
        width = THREADS * vector
        return plgpu.kernel(
            named("conv2d", body, tiles=tiles, along=along, width=width, vector=vector),
            out_type=out_struct(shape, dtype, inputs),
            grid=(n.images * down, -(-along // tiles), channels // width),
            grid_names=("row", "stretch", "piece"),
            compiler_params=COMPILER_PARAMS,
        )(x)

    count = n.images * down * along
    spread = functools.partial(_spread, down=down, corner=(-top, -left))
    transformed = pass_over(spread, inputs, (SPAN * SPAN, count, n.cin), inputs.dtype, n.cin)
    weights = winograd.transformed_filters(filters, TILE).astype(inputs.dtype)
    products = lax.dot_general(
        transformed, weights.reshape(SPAN * SPAN, n.cin, n.cout), (((2,), (1,)), ((0,), (0,))),
        precision=winograd.PRODUCTS[config.product] or precision, preferred_element_type=jnp.float32,
    )  # fmt: skip
    tiled = pass_over(_collect, products, (n.images * down * TILE, along * TILE, n.cout), inputs.dtype, n.cout)
    whole = tiled.reshape(n.images, down * TILE, along * TILE, n.cout)
    return whole[:, : n.out_rows, : n.out_columns]


def candidates(call: Call) -> Sequence[WalkConfig]:
    along = -(-rules.sizes_of(call).out_columns // TILE)
    stretches = list(dict.fromkeys(min(t, along) for t in (7, 14, 4, 2)))
    return [WalkConfig(product, tiles) for product in winograd.products(call) for tiles in stretches]


def ahead_of(call: Call) -> tuple[str, ...]:
    """First for float32 products that are asked for, where the work is large: on an H200 2.9 times as fast as cuDNN at
    64 images of 56 x 56 and 256 channels. Elsewhere it has not been timed."""
    n = rules.sizes_of(call)
    exact = call.need("inputs").dtype == jnp.float32 and call.params["precision"] == "highest"
    return ("xla",) if exact and n.images * n.out_rows * n.out_columns >= LARGE else ()


IMPLEMENTATION = Implementation(
    "hopper",
    conv2d_hopper,
    platforms=("gpu",),
    refuses=refuses,
    ahead_of=ahead_of,
    kernel=True,
    config_type=WalkConfig,
    candidates=candidates,
)
