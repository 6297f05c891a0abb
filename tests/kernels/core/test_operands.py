"""What is no array of numbers, and leading axes that do not fit, are the caller's mistakes, named alike everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from capibara.core.kernels import TPUv4Kernels
from capibara.jax.tpu_v4 import backend
from capibara.kernels import attention
from capibara.kernels.ops import fft, linalg, scan, vq
from capibara.kernels.ops.linalg.einsum import contract
from capibara.surface import tiling as layout
from vishwamai.kernels import tpu

linalg_ops, layer_ops, vq_ops = backend.TpuV4LinalgOps(), backend.TpuV4LayerOps(), backend.TpuV4VQOps()
kernels = TPUv4Kernels("float32")
X, ROW = jnp.ones((2, 2)), jnp.ones(2)
TEXT = np.array([["a", "b"], ["c", "d"]])
NOT_NUMBERS: dict[str, Any] = {
    "text": TEXT,
    "objects": TEXT.astype(object),
    "dates": np.array([["2020-01-01", "2020-01-02"]], "datetime64[D]"),
    "rows of several lengths": [[1.0, 2.0], [3.0]],
}

CALLS: dict[str, Callable[[Any], Any]] = {
    "gemm": lambda x: linalg.gemm(x, X),
    "gemm's bias": lambda x: linalg.gemm(X, X, bias=x),
    "optimized_gemm": lambda x: linalg_ops.optimized_gemm(X, x, "bfloat16", use_async=True, chunk_size=1),
    "gemm by tiles": lambda x: tpu.gemm(x, X, block_size=128, use_bfloat16=True),
    "optimized_matmul": lambda x: kernels.optimized_matmul(X, x),
    "einsum": lambda x: contract("ij,jk->ik", x, X),
    "einsum_optimize": lambda x: kernels.einsum_optimize("ij,jk->ik", [x, X]),
    "attention": lambda x: attention(x, x, x, layout="bhtd"),
    "flash_attention": lambda x: backend.TpuV4AttentionOps().flash_attention(x, x, x, precision="bfloat16"),
    "layer_norm": lambda x: layer_ops.layer_norm(x, ROW, ROW),
    "layer_norm in float32": lambda x: layer_ops.layer_norm(x, ROW, ROW, precision="float32"),
    "fast_layer_norm": lambda x: kernels.fast_layer_norm(x, ROW, ROW),
    "batch_operations": lambda x: kernels.batch_operations("gelu", [x]),
    "cross_entropy": lambda x: layer_ops.cross_entropy(x, X, jnp.zeros(2, int)),
    "fft": fft.fft,
    "nearest_code": lambda x: vq.nearest_code(x, X),
    "nearest_code in bfloat16": lambda x: vq_ops.nearest_code(X, x, precision="bfloat16"),
    "linear_recurrence": lambda x: scan.linear_recurrence(x, X),
    "parallel_scan": lambda x: scan.parallel_scan(lambda carry, x: (carry, x), X, {"x": x}),
    "winograd_conv2d": lambda x: backend.TpuV4ConvOps().winograd_conv2d(x, X, precision="mixed"),
    "tile_layout": layout.tile_layout,
}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "kind"),
    # Lists are trees of numbers to a scan.
    [(n, k) for n in CALLS for k in NOT_NUMBERS if (n, k) != ("parallel_scan", "rows of several lengths")],
)
def test_no_array_of_numbers(name: str, kind: str) -> None:
    given = NOT_NUMBERS[kind]
    arrived = r"of type list.*every row is as long" if isinstance(given, list) else r"no type of numbers.*\.astype\("
    with pytest.raises(ValueError, match=rf"arrays?\. Got .*{arrived}"):
        CALLS[name](given)


def _ones(*shapes: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(map(jnp.ones, shapes))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: linalg.gemm(*_ones((2, 2, 3, 4), (3, 4, 5))), r"leading axes.*\(2, 2\) and \(3,\)"),
        (lambda: linalg.gemm(*_ones((2, 2, 3, 4), (2, 3, 4, 5))), r"leading axes.*\(2, 2\) and \(2, 3\)"),
        (lambda: linalg.gemm(*_ones((2, 3, 4), (3, 4, 5))), "batch axes of a and b are equal"),
        (lambda: linalg_ops.optimized_gemm(*_ones((2, 2, 3, 4), (3, 4, 5)), chunk_size=2), "leading axes"),
        (lambda: tpu.gemm(*_ones((2, 3, 4), (3, 4, 5)), block_size=128), "leading axes"),
        (lambda: kernels.optimized_matmul(*_ones((2, 2, 3, 4), (3, 4, 5))), "leading axes"),
        (lambda: linalg.gemm(*_ones((2, 2, 3, 4), (4, 5)), residual=1.0), "residual has the output's shape"),
        (lambda: contract("bij,bjk->bik", *_ones((2, 3, 4), (3, 4, 5))), "one size, or 1.*2 and 3"),
        (lambda: contract("bij,bjk->bik", jnp.ones((2, 3, 4))), "a term of letters for each operand"),
        (lambda: contract("ij,jk-ik", X, X), "a term of letters for each operand"),
        (lambda: attention(*_ones((2, 1, 8, 4), (3, 1, 8, 4), (3, 1, 8, 4)), layout="bhtd"), "Fix:"),
        (lambda: scan.linear_recurrence(*_ones((2, 8, 4), (3, 8, 4))), "Fix:"),
        (lambda: vq.nearest_code(*_ones((2, 4), (5, 3))), "Fix:"),
    ],
)
def test_leading_axes_that_do_not_fit(call: Callable[[], Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call()
