"""What a call of nearest_code must be, what it costs, and how exact its result is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from capibara.errors import rule_error
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import FLOATS, Call, Cost, Excerpt, describe, nbytes, unit_roundoff

# Indices travel through float32 registers in the kernels, which holds whole numbers up to here.
MOST_CODES = 1 << 24
EXCERPT_ROWS = 2048


class Sizes(NamedTuple):
    rows: int
    codes: int
    width: int


def sizes(x: Any, codebook: Any) -> Sizes:
    """Of arrays, or of their shapes."""
    return Sizes(math.prod(x.shape[:-1]), *codebook.shape)


def sizes_of(call: Call) -> Sizes:
    return sizes(call.need("x"), call.need("codebook"))


def check(call: Call) -> None:
    """Refuse a call that has no meaning, saying the rule, what arrived and the fix."""
    x, codebook = call["x"], call["codebook"]
    if x is None or len(x.shape) == 0 or x.shape[-1] == 0:
        raise rule_error("x is rows of one number or more, [..., D]", describe(x), "give x a last axis")
    if codebook is None or len(codebook.shape) != 2 or codebook.shape[0] == 0:
        raise rule_error(
            "The codebook is K codes, one or more, of D numbers: [K, D]", describe(codebook), "pass an array [K, D]"
        )
    for name, given in (("x", x), ("codebook", codebook)):
        if np.dtype(given.dtype).name not in FLOATS:
            raise rule_error(
                f"nearest_code takes {', '.join(FLOATS)}",
                f"{name} of {describe(given)}",
                f"convert {name} with .astype(jnp.float32)",
            )
    if codebook.shape[1] != x.shape[-1]:
        raise rule_error(
            "A code has as many numbers as a row of x",
            f"{codebook.shape[1]} and {x.shape[-1]} ({describe(codebook)}, {describe(x)})",
            "check the last axes of x and of the codebook",
        )
    if codebook.shape[0] > MOST_CODES:
        raise rule_error(f"A codebook has at most {MOST_CODES} codes", codebook.shape[0], "use residual or product VQ")


def cost(call: Call) -> Cost:
    """Two operations a row, code and number; x, the codebook and the outputs touched once."""
    x, codebook = call.need("x"), call.need("codebook")
    rows, codes, width = sizes_of(call)
    moved = nbytes(x) + nbytes(codebook) + 4 * rows
    if call.params["return_distances"]:
        moved += 4 * rows
    if call.params["return_stats"]:
        moved += 4 * codes * (width + 1)
    dtype = np.dtype(jnp.result_type(x, codebook)).name
    return Cost(matrix_flops=2.0 * max(rows, 1) * codes * width, bytes=float(moved), dtype=dtype)


def tolerance(call: Call) -> float:
    """The relative error of distances and sums, and the share of indices that may differ.

    A distance is a sum of D squares in float32: its error grows with the square root of D, four of them for an unlucky
    draw, and eight roundings. A code's sum has as many terms as it has rows, N at most. For the sizes that are checked
    whole no index may differ: one of them is a larger share than this.
    """
    x = call.need("x")
    rows, _, width = sizes_of(call)
    wide = unit_roundoff(jnp.result_type(jnp.float32, x, call.need("codebook")))
    terms = width**0.5 + (rows**0.5 if call.params["return_stats"] else 0.0)
    return wide * (8 + 4 * terms)


def first_rows(op: Op, arrays: Sequence[Any]) -> Excerpt | None:
    """The first rows of a large call for indices, which do not depend on the others, and have no gradient to cut."""
    x, codebook = arrays
    width = x.shape[-1]

    def outputs(made: Sequence[Any]) -> list[Any]:
        return [each.reshape(-1)[:EXCERPT_ROWS] for each in made]

    def gradients(made: Sequence[Any]) -> list[Any]:
        return [dx.reshape(-1, width)[:EXCERPT_ROWS] if number == 0 else dx for number, dx in enumerate(made)]

    rows = x.reshape(-1, width)[:EXCERPT_ROWS]
    return Excerpt((rows, codebook), outputs, gradients, f"the first {EXCERPT_ROWS} rows")
