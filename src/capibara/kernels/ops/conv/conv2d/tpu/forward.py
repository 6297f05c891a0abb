"""conv2d of stride 1 for the TPU's matrix units, in Pallas (Mosaic): an implicit matrix product.

A program has a block of rows of one image in VMEM, whole columns and channels, and a block of the outputs. The rows
that the filter reaches past the block, its halo, come in as a second, small block of the same array, so no row is
stored twice. For each column of the filter the block, rows and columns as one axis, is multiplied by that column's
taps without being moved; the float32 product is then shifted sideways into the sum. Shifting products rather than
images means that only 32-bit numbers are moved across sublanes, once for a column of the filter.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from capibara.errors import rule_error
from capibara.kernels.core.context import current_interpret, matmul_precision
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.conv.conv2d import rules
from capibara.kernels.ops.linalg.gemm.tpu.forward import matrix_precision
from capibara.kernels.pallas import vmem
from capibara.kernels.pallas.scratch import vmem_bytes

MOST_WINDOW = 5


@dataclasses.dataclass(frozen=True)
class RowsConfig:
    """Rows of the output, and outputs, that a program computes."""

    rows: int
    outputs: int

    def __post_init__(self) -> None:
        if self.rows < 1 or self.outputs < 1:
            raise rule_error("rows and outputs are above 0", self, "use rows=8, outputs=128")


def _padded(count: int, to: int) -> int:
    return math.ceil(count / to) * to


def _columns(n: rules.Sizes, itemsize: int) -> int:
    """Columns of a block: the output's and the filter's reach, as whole sublanes."""
    return _padded(n.out_columns + n.window[1] - 1, 32 // itemsize)


def _specs(n: rules.Sizes, config: RowsConfig, width: int) -> dict[str, Any]:
    """What `pallas_call` moves: a block of rows, its halo where the filter has one, the filters; the result."""
    rows, halo = config.rows, n.window[0] - 1
    in_specs = [pl.BlockSpec((None, rows, width, n.cin), lambda b, o, i: (b, i, 0, 0))]
    if halo:
        each = rows // halo
        in_specs.append(pl.BlockSpec((None, halo, width, n.cin), lambda b, o, i: (b, (i + 1) * each, 0, 0)))
    in_specs.append(pl.BlockSpec((*n.window, n.cin, config.outputs), lambda b, o, i: (0, 0, 0, o)))
    out_specs = pl.BlockSpec((None, rows, n.out_columns, config.outputs), lambda b, o, i: (b, i, 0, o))
    return {"in_specs": in_specs, "out_specs": out_specs}


def _vmem_bytes(n: rules.Sizes, dtype: Any, config: RowsConfig) -> int:
    """What is moved, and what the compiler adds: the rows in one piece again, the product before and after it is
    shifted, and the sum."""
    width = _columns(n, dtype.itemsize)
    specs = _specs(n, config, width)
    image = pltpu.VMEM((config.rows + n.window[0] - 1, width, n.cin), dtype)
    product = pltpu.VMEM((config.rows, width, config.outputs), jnp.float32)
    moved = ((spec, dtype) for spec in (*specs["in_specs"], specs["out_specs"]))
    return vmem_bytes(moved, [image, product, product, product])


def candidates(call: Call) -> Sequence[RowsConfig]:
    """Blocks that fit VMEM, the largest first; the halo is a whole number of its own blocks."""
    n = rules.sizes_of(call)
    dtype = call.need("inputs").dtype
    step = max(n.window[0] - 1, 1)
    rows = {min(_padded(r, step), _padded(n.out_rows, step)) for r in (64, 32, 16, 8, 4, 2, 1)}
    outputs = {o for o in (512, 256, 128) if n.cout % o == 0} or {n.cout}
    configs = [RowsConfig(r, o) for r in sorted(rows, reverse=True) for o in sorted(outputs, reverse=True)]
    fit = [config for config in configs if _vmem_bytes(n, dtype, config) <= vmem.limit(call)]
    return sorted(fit, key=lambda c: -c.rows * c.outputs / (c.rows + n.window[0] - 1))


def refuses(call: Call) -> str | None:
    dtype = np.dtype(call.need("inputs").dtype).name
    n = rules.sizes_of(call)
    if dtype not in ("bfloat16", "float32"):
        return f"a TPU's matrix units take bfloat16 and float32, not {dtype}"
    for name in ("strides", "dilation"):
        if call.params[name] != (1, 1):
            return f"it is for {name} of 1, and they are {call.params[name]}"
    if call.params["groups"] != 1:
        return f"it is for one group of channels, and there are {call.params['groups']}"
    if max(n.window) > MOST_WINDOW:
        return f"it is for filters up to {MOST_WINDOW}x{MOST_WINDOW}, and these are {n.window[0]}x{n.window[1]}"
    if 0 in (n.images, n.cin, n.cout):
        return "an operand is empty"
    asked = call.params["precision"] or matmul_precision()
    if dtype == "float32" and asked not in (None, "default", "bfloat16", "highest", "float32"):
        return f"Mosaic has no {asked!r} precision between one pass and the full six"
    if not candidates(call):
        return f"no block of rows of {n.columns} columns and {n.cin} channels fits the core's VMEM"
    return None


def _body(*refs: Any, window: tuple[int, int], out_columns: int, precision: Any) -> None:
    x_ref, *halo, w_ref, y_ref = refs
    rows, width, channels = x_ref.shape
    # The block and its halo: rows are not part of the tiled axes, so this is no movement across sublanes.
    seen = jnp.concatenate([x_ref[...], halo[0][...]], 0) if halo else x_ref[...]
    acc = None
    for s in range(window[1]):
        product = None
        for r in range(window[0]):
            term = lax.dot_general(
                seen[r : r + rows].reshape(rows * width, channels), w_ref[r, s], (((1,), (0,)), ((), ())),
                precision=precision, preferred_element_type=jnp.float32,
            )  # fmt: skip
            product = term if product is None else product + term
        assert product is not None
        shifted = product.reshape(rows, width, -1)[:, s : s + out_columns]
        acc = shifted if acc is None else acc + shifted
    assert acc is not None
    y_ref[...] = acc.astype(y_ref.dtype)


def conv2d_tpu(
    inputs: jax.Array, filters: jax.Array, *, config: RowsConfig, strides: Any, padding: Any, dilation: Any,
    groups: int, precision: str | None,
) -> jax.Array:  # fmt: skip
    """The convolution as one Pallas call; see the module's text."""
    n = rules.sizes(inputs, filters, strides=strides, padding=padding, dilation=dilation)
    halo = n.window[0] - 1
    rows, width = config.rows, _columns(n, inputs.dtype.itemsize)
    blocks = math.ceil(n.out_rows / rows)
    (top, _), (left, _) = n.pads
    bottom, right = blocks * rows + halo - n.rows - top, width - n.columns - left
    zero = jnp.zeros((), inputs.dtype)
    padded = lax.pad(inputs, zero, ((0, 0, 0), (top, bottom, 0), (left, right, 0), (0, 0, 0)))
    operands = [padded, padded, filters] if halo else [padded, filters]
    y = pl.pallas_call(
        functools.partial(
            _body, window=n.window, out_columns=n.out_columns, precision=matrix_precision(inputs.dtype, precision)
        ),
        out_shape=out_struct((n.images, blocks * rows, n.out_columns, n.cout), inputs.dtype, inputs),
        grid=(n.images, math.ceil(n.cout / config.outputs), blocks),
        **_specs(n, config, width),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel")),
        cost_estimate=pl.CostEstimate(
            flops=2 * n.images * blocks * rows * n.out_columns * n.cout * math.prod(n.window) * n.cin,
            bytes_accessed=(padded.size + filters.size) * inputs.dtype.itemsize
            + n.images * blocks * rows * n.out_columns * n.cout * inputs.dtype.itemsize,
            transcendentals=0,
        ),
        interpret=current_interpret().pallas_argument(),
        name="capibara_conv2d",
    )(*operands)  # fmt: skip
    return y[:, : n.out_rows]


IMPLEMENTATION = Implementation(
    "pallas_tpu",
    conv2d_tpu,
    platforms=("tpu",),
    refuses=refuses,
    rank=lambda call: 5.5,  # below XLA until it has been timed on a TPU
    kernel=True,
    config_type=RowsConfig,
    default_config=lambda call: candidates(call)[0],
    candidates=candidates,
)
