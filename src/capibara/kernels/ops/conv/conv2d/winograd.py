"""3x3 convolutions by Winograd's transforms, F(m x m, 3x3) for m of 2, 4 and 6.

The transforms are adds and multiplies by constants over slices of the image, unrolled, so that XLA makes one pass of
each; they are in float32. What is between them is one batched matrix product with (m + 2)² positions as its batch:
[tiles, channels] x [channels, outputs] at each. It has 9 m² / (m + 2)² times fewer operations than the direct form
(2.25, 4 and 5.06), and moves (m + 2)² / m² times the image and the result through memory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.errors import rule_error, unknown_name
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.ops.conv.conv2d import rules
from capibara.kernels.ops.conv.conv2d.points import (
    MOST_TIMES_DIRECT,
    POINTS,
    TAPS,
    TILES,
    Matrix,
    direct_error_bound,
    transforms,
    winograd_error_bound,
)

# How float32 operands are multiplied: by jax's precision of the call, or by a sum of products of fewer bits that is
# about as exact as float32 and runs on a GPU's matrix units.
PRODUCTS: dict[str, Any] = {
    "plain": None,
    "tf32x3": lax.DotAlgorithmPreset.TF32_TF32_F32_X3,
    "bf16x6": lax.DotAlgorithmPreset.BF16_BF16_F32_X6,
    "bf16x9": lax.DotAlgorithmPreset.BF16_BF16_F32_X9,
}


@dataclasses.dataclass(frozen=True)
class WinogradConfig:
    """How the products are computed, and how XLA is led to lay out the transforms.

    `passes` of 2 writes out what is transformed along one axis before the other is: each number is read less often,
    and more is written. With 1 the compiler decides.
    """

    product: str = "plain"
    passes: int = 1

    def __post_init__(self) -> None:
        if self.product not in PRODUCTS:
            raise unknown_name("product of Winograd's", self.product, PRODUCTS)
        if self.passes not in (1, 2):
            raise rule_error("The transforms are 1 or 2 passes", self.passes, "pass 1 or 2")


def _weighted(weights: Sequence[Fraction], terms: Sequence[Any]) -> Any:
    """Σ weight · term, leaving out zeros; None where all are."""
    total = None
    for weight, term in zip(weights, terms, strict=True):
        if weight == 0:
            continue
        scaled = term if abs(weight) == 1 else term * float(abs(weight))
        if total is None:
            total = scaled if weight > 0 else -scaled
        else:
            total = total + scaled if weight > 0 else total - scaled
    return total


def transformed(matrix: Matrix, terms: Sequence[Any]) -> list[Any]:
    """matrix @ terms, written out. Rows that mirror each other, as those of points a and -a do, share their halves."""
    made: list[Any] = []
    before: Sequence[Fraction] = ()
    halves: tuple[Any, Any] | None = None
    for row in matrix:
        opposite = None if halves is None else _mirror(before, row)
        if halves is not None and opposite is not None:
            even, odd = halves
            made.append(even - odd if opposite == "odd" else odd - even)
            halves = None
        else:
            even, odd = _weighted(row[::2], terms[::2]), _weighted(row[1::2], terms[1::2])
            both = even is not None and odd is not None
            made.append(even + odd if both else odd if even is None else even)
            halves = (even, odd) if both else None
        before = row
    return made


def gathered(tile: int, terms: Sequence[Any]) -> list[Any]:
    """Aᵀ @ terms, written out: row k is Σ aᵏ over the points, so points a and -a go in by their sum or difference."""
    points = POINTS[tile]
    pairs = [(points[i], terms[i] + terms[i + 1], terms[i] - terms[i + 1]) for i in range(1, len(points), 2)]
    made = []
    for k in range(tile):
        weights = [a**k for a, _, _ in pairs]
        total = _weighted(weights, [pair[1 + k % 2] for pair in pairs])
        if k == 0:  # the point 0
            total = total + terms[0]
        if k == tile - 1:  # the point at infinity
            total = total + terms[-1]
        made.append(total)
    return made


def _mirror(one: Sequence[Fraction], other: Sequence[Fraction]) -> str | None:
    """Which half of `other` has the opposite sign of `one`'s, the other half being equal; None for neither."""
    if all(b == (a if k % 2 == 0 else -a) for k, (a, b) in enumerate(zip(one, other, strict=True))):
        return "odd"
    if all(b == (-a if k % 2 == 0 else a) for k, (a, b) in enumerate(zip(one, other, strict=True))):
        return "even"
    return None


def transformed_filters(filters: jax.Array, tile: int) -> jax.Array:
    """G g Gᵀ as [columns of the positions, rows of the positions, channels, outputs], in float32."""
    wide = jnp.promote_types(jnp.float32, filters.dtype)
    matrix = transforms(tile).filters
    rows = jnp.stack(transformed(matrix, [filters[r].astype(wide) for r in range(TAPS)]))
    return jnp.stack(transformed(matrix, [rows[:, s] for s in range(TAPS)]))


def winograd(
    inputs: jax.Array, filters: jax.Array, *, tile: int, config: WinogradConfig, strides: Any, padding: Any,
    dilation: Any, groups: int, precision: str | None,
) -> jax.Array:  # fmt: skip
    """The convolution; see the module's text."""
    n = rules.sizes(inputs, filters, strides=strides, padding=padding, dilation=dilation)
    span = tile + TAPS - 1
    wide = jnp.promote_types(jnp.float32, inputs.dtype)
    down, across = -(-n.out_rows // tile), -(-n.out_columns // tile)
    (top, _), (left, _) = n.pads
    # What a last tile of fewer outputs reads past the image is zeros, or rows that no output needs.
    bottom = down * tile + TAPS - 1 - n.rows - top
    right = across * tile + TAPS - 1 - n.columns - left
    nothing = jnp.zeros((), inputs.dtype)
    padded = lax.pad(inputs, nothing, ((0, 0, 0), (top, bottom, 0), (left, right, 0), (0, 0, 0)))

    def every(x: Any, axis: int, first: int, count: int) -> Any:
        """One in `tile` of the rows or columns, from `first`."""
        return lax.slice_in_dim(x, first, first + (count - 1) * tile + 1, tile, axis)

    def between(x: Any) -> Any:
        return lax.optimization_barrier(x) if config.passes == 2 else x

    matrix = transforms(tile).inputs
    # Each transform makes a new axis in front: rows of the positions, then columns before them.
    rows = between(jnp.stack(transformed(matrix, [every(padded, 1, i, down).astype(wide) for i in range(span)])))
    both = transformed(matrix, [every(rows, 3, j, across) for j in range(span)])
    seen = jnp.stack([column.astype(inputs.dtype) for column in both])
    products = lax.dot_general(
        seen, transformed_filters(filters, tile).astype(inputs.dtype), (((5,), (2,)), ((0, 1), (0, 1))),
        precision=PRODUCTS[config.product] or precision, preferred_element_type=wide,
    )  # fmt: skip
    # And back: columns first, beside the tiles they belong to, then rows.
    columns = between(jnp.stack(gathered(tile, [products[j] for j in range(span)]), 4))
    made = gathered(tile, [columns[i] for i in range(span)])
    whole = jnp.stack([row.astype(inputs.dtype) for row in made], 2)
    return whole.reshape(n.images, down * tile, across * tile, n.cout)[:, : n.out_rows, : n.out_columns]


def refuses(tile: int, call: Call) -> str | None:
    reason = rules.winograd_refusal(call)
    if reason is not None:
        return reason
    dtype, cin = call.need("inputs").dtype, rules.sizes_of(call).cin
    if not rules.coarse_products(call):
        return None
    if tile == 6:
        fix = f"{dtype.name} ones are to be converted" if dtype.itemsize < 4 else "ask for precision='highest'"
        return f"F(6x6, 3x3) is for products of float32 operands in float32: {fix}"
    unit = rules.product_unit(call)
    bound, direct = winograd_error_bound(tile, dtype, cin, unit), direct_error_bound(dtype, cin, unit)
    if bound > MOST_TIMES_DIRECT * direct and call.params["tile_size"] != tile:
        return (
            f"its error bound is {bound:.1e}, {bound / direct:.1f} times the direct form's {direct:.1e} and over "
            f"{MOST_TIMES_DIRECT:g} times; conv2d(tile_size={tile}) runs it all the same"
        )
    return None


def products(call: Call) -> list[str]:
    """How the products may be computed, the best guess first."""
    exact = call.need("inputs").dtype == jnp.float32 and not rules.coarse_products(call)
    if call.target.platform != "gpu" or not exact:
        return ["plain"]
    return ["tf32x3", "bf16x6", "bf16x9", "plain"]


def candidates(call: Call) -> Sequence[WinogradConfig]:
    # On a CPU, where nothing is gained, there is one form to try and to compile.
    forms = (1,) if call.target.platform == "cpu" else (1, 2)
    return [WinogradConfig(product, passes) for product in products(call) for passes in forms]


def ahead_of(tile: int, call: Call) -> tuple[str, ...]:
    """Behind XLA until it has been timed, but for the caller's own tile, whose refusal is then said."""
    return ("xla",) if call.params["tile_size"] == tile else ()


IMPLEMENTATIONS = tuple(
    Implementation(
        f"xla_winograd{tile}",
        functools.partial(winograd, tile=tile),
        refuses=functools.partial(refuses, tile),
        ahead_of=functools.partial(ahead_of, tile),
        own_gradient=True,  # JAX's derivative would transpose the transforms; the op's is another convolution
        config_type=WinogradConfig,
        default_config=lambda call: WinogradConfig(products(call)[0]),
        candidates=candidates,
    )
    for tile in TILES
)
