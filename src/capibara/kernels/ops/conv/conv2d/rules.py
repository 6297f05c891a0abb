"""What a call of conv2d must be, what it costs, and how exact its result is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from capibara.errors import rule_error, unknown_name
from capibara.kernels.core.context import matmul_precision
from capibara.kernels.core.spec import FLOATS, Call, Cost, describe, nbytes, unit_roundoff
from capibara.kernels.ops.conv.conv2d.points import TILES, direct_error_bound, winograd_error_bound
from capibara.kernels.ops.conv.conv2d.reference import pads_of

PADDINGS = ("SAME", "VALID")
PRECISIONS = ("default", "high", "highest")


class Sizes(NamedTuple):
    """Images, their rows, columns and channels; the filter's rows, columns and outputs; the output's rows, columns."""

    images: int
    rows: int
    columns: int
    cin: int
    window: tuple[int, int]
    cout: int
    pads: tuple[tuple[int, int], tuple[int, int]]
    out_rows: int
    out_columns: int


def sizes(x: Any, w: Any, *, strides: Any, padding: Any, dilation: Any) -> Sizes:
    """Of arrays, or of their shapes."""
    images, rows, columns, cin = x.shape
    *window, _, cout = w.shape
    pads = pads_of((rows, columns), (window[0], window[1]), strides, padding, dilation)
    out = [
        (size + low + high - (k - 1) * d - 1) // s + 1
        for size, (low, high), k, d, s in zip((rows, columns), pads, window, dilation, strides, strict=True)
    ]
    return Sizes(images, rows, columns, cin, (window[0], window[1]), cout, pads, out[0], out[1])


def sizes_of(call: Call) -> Sizes:
    p = call.params
    return sizes(
        call.need("inputs"), call.need("filters"), strides=p["strides"], padding=p["padding"], dilation=p["dilation"]
    )


def check(call: Call) -> None:
    """Refuse a call that has no meaning, saying the rule, what arrived and the fix."""
    x, w = call.args
    for name, given, axes in (
        ("inputs", x, "images, rows, columns, channels"),
        ("filters", w, "rows, columns, channels of a group, outputs"),
    ):
        if given is None or len(given.shape) != 4:
            raise rule_error(f"conv2d's {name} have four axes: {axes}", describe(given), f"reshape the {name}")
        if np.dtype(given.dtype).name not in FLOATS:
            raise rule_error(f"conv2d takes {', '.join(FLOATS)}", f"{name} of {describe(given)}", "use .astype(...)")
    assert x is not None
    assert w is not None
    if x.dtype != w.dtype:
        raise rule_error("Inputs and filters have one type", call.signature, "convert one with .astype(...)")
    for name in ("strides", "dilation"):
        pair = call.params[name]
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(_is_count(v) for v in pair)):
            raise rule_error(f"{name} is a whole number above 0, or a pair of them", repr(pair), "pass 1 or (1, 1)")
    groups = call.params["groups"]
    if not _is_count(groups) or x.shape[3] % groups or w.shape[3] % groups:
        raise rule_error(
            "groups divides the input channels and the outputs",
            f"groups={groups!r} with {x.shape[3]} channels and {w.shape[3]} outputs", "pass groups=1, or a divisor",
        )  # fmt: skip
    if w.shape[2] * groups != x.shape[3]:
        raise rule_error(
            "The filters' third axis is the channels of a group",
            f"{w.shape[2]} with {x.shape[3]} channels in {groups} group{'s' if groups != 1 else ''}",
            "check the layouts: inputs are NHWC, filters HWIO",
        )
    if 0 in w.shape[:2]:
        raise rule_error("The filters have a row and a column at least", describe(w), "check the filters' layout, HWIO")
    _check_padding(call.params["padding"])
    if call.params["precision"] not in (None, *PRECISIONS):
        raise unknown_name("matrix precision", call.params["precision"], PRECISIONS)
    check_tile(call.params["tile_size"])
    n = sizes_of(call)
    if n.out_rows < 1 or n.out_columns < 1:
        raise rule_error(
            "The padded image is as large as the dilated filter", call.signature, "pad more, or check the layouts"
        )


def check_tile(tile: Any) -> None:
    if tile is not None and not (_is_count(tile) and tile in TILES):
        raise _not_a_tile(tile)


def tile_side(given: Any) -> int | None:
    """The side of the output tile that was asked for: one number, or a pair of rows and columns, which are alike."""
    asked = given.tolist() if isinstance(given, np.ndarray | np.integer) else given
    if isinstance(asked, Sequence) and not isinstance(asked, str):
        if len(asked) != 2 or not all(_is_count(side) and side in TILES for side in asked):
            raise _not_a_tile(given)
        if asked[0] != asked[1]:
            raise rule_error(
                "Winograd's output tiles are square", f"tile_size={given!r}",
                f"pass one side, or a pair of equal ones: {', '.join(f'({side}, {side})' for side in TILES)}",
            )  # fmt: skip
        asked = asked[0]
    check_tile(asked)
    return None if asked is None else int(asked)


def _not_a_tile(given: Any) -> ValueError:
    sides = ", ".join(map(str, TILES))
    return rule_error(
        f"tile_size is the side of one of Winograd's output tiles ({sides}), or a pair of equal sides", repr(given),
        "pass one of these, e.g. 4 or (4, 4), or None to leave the choice to dispatch",
    )  # fmt: skip


def _check_padding(padding: Any) -> None:
    if isinstance(padding, str):
        if padding not in PADDINGS:
            raise unknown_name("padding", padding, PADDINGS)
        return
    pairs = isinstance(padding, tuple) and len(padding) == 2
    if not pairs or not all(
        isinstance(pair, tuple) and len(pair) == 2 and all(_is_count(v, 0) for v in pair) for pair in padding
    ):
        raise rule_error(
            "padding is 'SAME', 'VALID', or zeros before and after the rows and the columns", repr(padding),
            "pass ((top, bottom), (left, right)), none below 0",
        )  # fmt: skip


def _is_count(x: Any, least: int = 1) -> bool:
    return isinstance(x, int | np.integer) and not isinstance(x, bool) and bool(x >= least)


def cost(call: Call) -> Cost:
    """Two operations for each tap, channel and output; each operand read once, the output written once."""
    n = sizes_of(call)
    x, w = call.need("inputs"), call.need("filters")
    out = n.images * n.out_rows * n.out_columns * n.cout
    flops = 2.0 * out * math.prod(n.window) * w.shape[2]
    moved = nbytes(x) + nbytes(w) + out * x.dtype.itemsize
    return Cost(matrix_flops=max(flops, 1.0), bytes=float(moved), dtype=np.dtype(x.dtype).name)


def winograd_refusal(call: Call) -> str | None:
    """Why the call is not one that Winograd's transforms are for; None when it is."""
    n = sizes_of(call)
    if n.window != (3, 3):
        return f"it is for 3x3 filters, and these are {n.window[0]}x{n.window[1]}"
    for name in ("strides", "dilation"):
        if call.params[name] != (1, 1):
            return f"it is for {name} of 1, and they are {call.params[name]}"
    if call.params["groups"] != 1:
        return f"it is for one group of channels, and there are {call.params['groups']}"
    if 0 in (n.images, n.cin, n.cout):
        return "an operand is empty"
    return None


def product_unit(call: Call) -> float:
    """The roundoff the matrix units give float32 operands: TF32 on a GPU, bfloat16 on a TPU, unless told otherwise."""
    asked = call.params["precision"] or matmul_precision()
    if call.need("inputs").dtype != jnp.float32 or asked in ("highest", "float32"):
        return 0.0
    if asked in ("bfloat16", "BF16_BF16_F32"):
        return 2.0**-8
    return {"gpu": 2.0**-11, "tpu": 2.0**-8}.get(call.target.platform, 0.0)


def coarse_products(call: Call) -> bool:
    """Whether the operands of the products have fewer bits than float32."""
    return call.need("inputs").dtype.itemsize < 4 or product_unit(call) > 0


def tolerance(call: Call) -> float:
    """The relative error that a right result stays under, whichever implementation gave it.

    The direct form's bound; where Winograd's largest tile by rule takes the call, its bound, which is larger:
    F(2x2, 3x3) where the products' operands are coarser than float32, else F(6x6, 3x3). A longer window sums more, and
    costs its root.
    """
    n = sizes_of(call)
    dtype = call.need("inputs").dtype
    unit = product_unit(call)
    if winograd_refusal(call) is None:
        return winograd_error_bound(2 if coarse_products(call) else 6, dtype, n.cin, unit)
    taps = math.prod(n.window)
    wide = unit_roundoff(jnp.promote_types(jnp.float32, dtype))
    return direct_error_bound(dtype, n.cin, unit) + 4 * wide * (taps * max(n.cin, 1)) ** 0.5
