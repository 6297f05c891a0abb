"""conv2d: the public function, and the op behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from capibara.errors import rule_error
from capibara.kernels.core.context import current_target
from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op, register
from capibara.kernels.core.operands import as_array
from capibara.kernels.core.spec import Gradient, Implementation
from capibara.kernels.ops.conv.conv2d import gradient, hopper, rules, winograd, xla
from capibara.kernels.ops.conv.conv2d.cases import CASES
from capibara.kernels.ops.conv.conv2d.points import TILES
from capibara.kernels.ops.conv.conv2d.reference import reference

CONV2D: Op = Op(
    "conv2d",
    family="conv",
    reference=reference,
    operands=("inputs", "filters"),
    params={
        "strides": (1, 1), "padding": "SAME", "dilation": (1, 1), "groups": 1, "precision": None, "tile_size": None,
    },
    hints=("tile_size",),
    check=rules.check,
    cost=rules.cost,
    tolerance=rules.tolerance,
    gradient=Gradient(gradient.forward, lambda *args: gradient.backward(CONV2D, *args)),
    batch=gradient.batch,
    partition=gradient.PARTITION,
    cases=CASES,
)  # fmt: skip
CONV2D.implement(
    xla.IMPLEMENTATION,
    *winograd.IMPLEMENTATIONS,
    xla.PATCHES,
    xla.DIRECT,
    hopper.IMPLEMENTATION,
    Implementation("reference", reference),
)


def conv2d(
    inputs: Float[Array, "N H W C"],
    filters: Float[Array, "R S Cg O"],
    *,
    strides: int | Sequence[int] = 1,
    padding: str | Sequence[Sequence[int]] = "SAME",
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    precision: str | None = None,
    tile_size: int | Sequence[int] | None = None,
    implementation: str | None = None,
    config: Any = None,
) -> Float[Array, "N Y X O"]:
    """The convolution of images with filters, summed in float32, by the fastest implementation that takes it.

    Args:
      inputs: images, rows, columns, channels (NHWC).
      filters: rows, columns, channels of a group, outputs (HWIO), of the inputs' type.
      strides, dilation: one number, or one for rows and one for columns.
      padding: "SAME", "VALID", or the zeros around the image, ((top, bottom), (left, right)).
      groups: how many groups the channels, and the outputs, are divided into.
      precision: None, "default", "high" or "highest": how the matrix units multiply float32.
      tile_size: ask for Winograd's form with this output tile: the side, 2, 4 or 6, or the pair of both, which are
        alike. A convolution that it is not made for (other than 3x3, stride 1, no dilation, one group) runs on another
        implementation, which `explain` shows and the log says once.
      implementation: force one by name ("xla", "xla_winograd2", "xla_winograd4", "xla_winograd6", "hopper",
        "xla_patches", "xla_direct", "reference"); a refusal is an error. Asked for by name or tile, "xla_winograd4"
        also takes 16-bit operands, whose error is then about ten times the direct form's: see `winograd_error_bound`.
      config: that implementation's tuning choices; by default from the tuned table or a rule.

    "xla", "xla_patches", "xla_direct" and "reference" have forward-mode derivatives. Winograd's forms, and so a
    tile_size that is taken, and the kernels have the gradient alone: for forward mode there pass
    implementation="reference".

    >>> x = jnp.ones((1, 8, 8, 3)); w = jnp.ones((3, 3, 3, 4))
    >>> y = conv2d(x, w, tile_size=(4, 4))
    >>> y.shape, round(float(y[0, 3, 3, 0]), 3)
    ((1, 8, 8, 4), 27.0)
    """
    arrays = as_array("conv2d", "inputs", inputs), as_array("conv2d", "filters", filters)
    side = rules.tile_side(tile_size)
    given = {
        "strides": _pair(strides), "padding": _padding(padding), "dilation": _pair(dilation), "groups": _number(groups),
        "precision": precision, "tile_size": side,
    }  # fmt: skip
    named = {f"xla_winograd{tile}": tile for tile in TILES} | {"hopper": 4}
    if implementation in named and side is None:
        given["tile_size"] = named[implementation]  # to ask by name is to ask for its tile
    elif implementation is not None and side is not None and named.get(implementation) != side:
        raise rule_error(
            "tile_size asks for a Winograd implementation", f"tile_size={tile_size} and implementation="
            f"{implementation!r}", "leave one of them out",
        )  # fmt: skip
    params = {name: value for name, value in given.items() if not _is(value, CONV2D.params[name])}
    # A tile that is asked for goes before the tuned table; a name is stronger, and makes a refusal an error.
    prefer = None if given["tile_size"] is None else f"xla_winograd{given['tile_size']}"
    if prefer == "xla_winograd4" and current_target().platform == "gpu":
        prefer = "hopper"  # where it refuses, the tile that was asked for leads to the form in XLA
    return run(CONV2D, arrays, params, implementation=implementation, config=config, prefer=prefer)


class Conv2dOptions(TypedDict, total=False):
    """What `winograd_conv2d` hands on to `conv2d`."""

    strides: int | Sequence[int]
    padding: str | Sequence[Sequence[int]]
    dilation: int | Sequence[int]
    groups: int
    precision: str | None
    implementation: str | None
    config: Any


def winograd_conv2d(
    inputs: Float[Array, "N H W C"],
    filters: Float[Array, "R S C O"],
    *,
    tile_size: int | Sequence[int] | None = None,
    **options: Unpack[Conv2dOptions],
) -> Float[Array, "N Y X O"]:
    """`conv2d` with Winograd's form asked for: by default F(4x4, 3x3) in float32 and F(2x2, 3x3) in 16-bit types.

    >>> y = winograd_conv2d(jnp.ones((1, 4, 4, 1)), jnp.ones((3, 3, 1, 1)))
    >>> round(float(y[0, 1, 1, 0]), 3)
    9.0
    """
    if tile_size is None and options.get("implementation") is None:
        # What is left for conv2d's checks to refuse has no type here.
        tile_size = 4 if getattr(inputs, "dtype", jnp.dtype("float32")).itemsize >= 4 else 2
    return conv2d(inputs, filters, tile_size=tile_size, **options)


def _is(value: Any, default: Any) -> bool:
    """Whether it is the default, and of its type: 1.0 and True equal 1, and are for the op's check to refuse."""
    if type(value) is not type(default):
        return False
    if isinstance(value, tuple):
        return len(value) == len(default) and all(map(_is, value, default))
    return bool(value == default)


def _number(given: Any) -> Any:
    """numpy's whole numbers, and its arrays of them, as Python's. Anything else is left for the op's check to name."""
    if isinstance(given, np.ndarray | np.integer) and np.issubdtype(given.dtype, np.integer):
        return given.tolist()
    return given


def _pair(given: Any) -> Any:
    """One number as two; a sequence as a tuple. What is neither is left for the op's check to name."""
    given = _number(given)
    if isinstance(given, Sequence) and not isinstance(given, str):
        return tuple(map(_number, given))
    if isinstance(given, jax.Array | np.ndarray):
        raise rule_error("strides and dilation are Python numbers", str(given), "pass an int or a pair of ints")
    return (given, given)


def _padding(given: Any) -> Any:
    given = _number(given)
    if isinstance(given, Sequence) and not isinstance(given, str):
        pairs = map(_number, given)
        return tuple(tuple(map(_number, pair)) if isinstance(pair, Sequence) else pair for pair in pairs)
    return given.upper() if isinstance(given, str) else given


CONV2D.public = conv2d
register(CONV2D)
