"""grouped_gemm and grouped_gated_gemm: the public functions, and the three ops behind them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from capibara.errors import rule_error
from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op, register
from capibara.kernels.core.operands import as_array, as_dtype
from capibara.kernels.core.spec import Gradient, Implementation
from capibara.kernels.ops.layers.grouped import gradient, hopper, mesh, peers, rules, tpu, xla
from capibara.kernels.ops.layers.grouped.cases import CASES, GATED_CASES, WEIGHTS_CASES
from capibara.kernels.ops.layers.grouped.reference import reference, reference_gated, reference_weights

GROUPED_GEMM: Op = Op(
    "grouped_gemm",
    family="layers",
    reference=reference,
    operands=("lhs", "rhs", "group_sizes"),
    params={"transpose_rhs": False, "out_dtype": None},
    check=rules.check,
    cost=rules.cost,
    tolerance=rules.tolerance,
    gradient=Gradient(gradient.forward, lambda *args: gradient.backward(GROUPED_GEMM, GROUPED_GEMM_WEIGHTS, *args)),
    batch=mesh.batch,
    partition=mesh.PARTITION,
    cases=CASES,
    peers={"ragged_dot": peers.ragged_dot},
)

GROUPED_GEMM_WEIGHTS: Op = Op(
    "grouped_gemm_weights",
    family="layers",
    reference=reference_weights,
    operands=("lhs", "d_out", "group_sizes"),
    params={"transpose": False, "out_dtype": None},
    check=rules.check_weights,
    cost=rules.cost,
    tolerance=rules.tolerance_weights,
    gradient=Gradient(gradient.forward, lambda *args: gradient.backward_weights(GROUPED_GEMM, *args)),
    batch=mesh.batch_weights,
    partition=mesh.PARTITION_WEIGHTS,
    cases=WEIGHTS_CASES,
    peers={"ragged_dot": peers.ragged_dot_weights},
)

GROUPED_GATED_GEMM: Op = Op(
    "grouped_gated_gemm",
    family="layers",
    reference=reference_gated,
    operands=("lhs", "gate", "up", "group_sizes"),
    params={"activation": "silu", "return_products": False},
    check=rules.check_gated,
    cost=rules.cost,
    tolerance=rules.tolerance_gated,
    gradient=Gradient(
        gradient.forward_gated, lambda *args: gradient.backward_gated(GROUPED_GEMM, GROUPED_GEMM_WEIGHTS, *args)
    ),
    batch=mesh.batch,
    partition=mesh.partition_gated(GROUPED_GEMM),
    cases=GATED_CASES,
    peers={"ragged_dot": peers.ragged_dot_gated},
)

for _op, _implementations in (
    (GROUPED_GEMM, (xla.IMPLEMENTATION, tpu.IMPLEMENTATION, hopper.IMPLEMENTATION)),
    (GROUPED_GEMM_WEIGHTS, (xla.WEIGHTS_IMPLEMENTATION, tpu.WEIGHTS_IMPLEMENTATION, hopper.WEIGHTS_IMPLEMENTATION)),
    (GROUPED_GATED_GEMM, (xla.GATED_IMPLEMENTATION, tpu.GATED_IMPLEMENTATION, hopper.GATED_IMPLEMENTATION)),
):
    _op.implement(*_implementations, Implementation("reference", _op.reference))


def grouped_gemm(
    lhs: Float[Array, "M K"],
    rhs: Float[Array, "G rows_of_weight columns_of_weight"],
    group_sizes: Int[Array, " G"],
    *,
    transpose_rhs: bool = False,
    out_dtype: Any = None,
    padded_rows: bool = False,
    implementation: str | None = None,
    config: Any = None,
) -> Float[Array, "M N"]:
    """Each row of lhs times its group's weight, accumulated in float32: the experts of a mixture in one product.

    The rows are sorted by group: the first group_sizes[0] meet rhs[0], the next group_sizes[1] meet rhs[1], and so on,
    as in `jax.lax.ragged_dot`. A group may be empty. NaN in one group's rows stays in those rows. The gradient of rhs
    is zero for an empty group.

    Outside of `jit` the sizes are checked, which waits for them where a device still computes them. Traced sizes
    cannot be: a size below 0 then counts as 0, and groups end at the last row.

    Args:
      lhs: [M, K].
      rhs: a weight a group, [G, K, N], or [G, N, K] with `transpose_rhs`; no copy is made for the transpose.
      group_sizes: how many rows each group has, G whole numbers.
      transpose_rhs: the weights lie transposed.
      out_dtype: the output's type; by default the operands' own.
      padded_rows: the sizes may sum to less than M. The rows past the last group are zeros in the result, whatever
        lhs holds there. Without it such sizes are an error, where they can be seen.
      implementation: force one by name ("xla", "pallas_tpu", "hopper", "reference"); a refusal is an error. For
        forward-mode derivatives (`jvp`, `jacfwd`) ask for "reference", which is plain JAX to JAX as well.
      config: that implementation's tuning choices; by default from the tuned table or a rule.

    >>> rows = jnp.ones((3, 2)); weights = jnp.stack([jnp.eye(2), 10 * jnp.eye(2)])
    >>> grouped_gemm(rows, weights, jnp.array([1, 2])).tolist()
    [[1.0, 1.0], [10.0, 10.0], [10.0, 10.0]]
    >>> grouped_gemm(rows, weights, jnp.array([1, 1]), padded_rows=True).tolist()
    [[1.0, 1.0], [10.0, 10.0], [0.0, 0.0]]
    """
    lhs, rhs = (as_array("grouped_gemm", name, x) for name, x in (("lhs", lhs), ("rhs", rhs)))
    sizes = _group_sizes(GROUPED_GEMM, lhs, group_sizes, padded_rows)
    params: dict[str, Any] = {}
    if transpose_rhs:
        params["transpose_rhs"] = True
    if out_dtype is not None and (out := as_dtype("out_dtype", out_dtype)) != jnp.result_type(lhs, rhs):
        params["out_dtype"] = out.name
    return run(GROUPED_GEMM, (lhs, rhs, sizes), params, implementation=implementation, config=config)


def grouped_gated_gemm(
    lhs: Float[Array, "M K"],
    gate: Float[Array, "G K F"],
    up: Float[Array, "G K F"],
    group_sizes: Int[Array, " G"],
    *,
    activation: str = "silu",
    padded_rows: bool = False,
    implementation: str | None = None,
    config: Any = None,
) -> Float[Array, "M F"]:
    """activation(lhs @ gate) · (lhs @ up), each row by its group's two weights: the first half of a gated expert.

    Both products stay in float32 until they have met; under differentiation they are kept, rounded to the operands'
    type. Rows, sizes and what is checked are as in `grouped_gemm`.

    Args:
      lhs: [M, K], sorted by group.
      gate, up: weights a group, both [G, K, F].
      group_sizes, padded_rows, implementation, config: see `grouped_gemm`.
      activation: "silu" (SwiGLU), "gelu" (by erf), "gelu_tanh", "relu" or "sigmoid".

    >>> rows = jnp.array([[1.0], [2.0]]); one = jnp.ones((2, 1, 1))
    >>> grouped_gated_gemm(rows, one, 3 * one, jnp.array([1, 1]), activation="relu").tolist()
    [[3.0], [12.0]]
    """
    named = (("lhs", lhs), ("gate", gate), ("up", up))
    lhs, gate, up = (as_array("grouped_gated_gemm", name, x) for name, x in named)
    sizes = _group_sizes(GROUPED_GATED_GEMM, lhs, group_sizes, padded_rows)
    params = {} if activation == "silu" else {"activation": activation}
    return run(GROUPED_GATED_GEMM, (lhs, gate, up, sizes), params, implementation=implementation, config=config)


def _group_sizes(op: Op, lhs: jax.Array, group_sizes: Any, padded_rows: bool) -> jax.Array:
    """int32 sizes, which fit the rows where that can be seen."""
    sizes = as_array(op.name, "group_sizes", group_sizes)
    if sizes.ndim != 1 or not jnp.issubdtype(sizes.dtype, jnp.integer) or lhs.ndim != 2:
        return sizes  # the op's check says what is wrong
    if not isinstance(group_sizes, jax.core.Tracer):
        _check_sizes(np.asarray(group_sizes), lhs.shape[0], padded_rows)
    return sizes.astype(jnp.int32)


def _check_sizes(sizes: np.ndarray, rows: int, padded_rows: bool) -> None:
    if (sizes < 0).any():
        at = int(np.argmax(sizes < 0))
        raise rule_error("A group has 0 rows or more", f"{sizes[at]} for group {at}", "pass counts")
    total = int(sizes.sum())
    if total > rows:
        raise rule_error(f"The groups share the {rows} rows of lhs", f"sizes that sum to {total}", "pass fewer")
    if total < rows and not padded_rows:
        raise rule_error(
            f"The group sizes sum to the {rows} rows of lhs",
            f"{total}",
            "pass padded_rows=True if the last rows are padding, or check the sizes",
        )


GROUPED_GEMM.public = grouped_gemm
GROUPED_GATED_GEMM.public = grouped_gated_gemm
for _op in (GROUPED_GEMM_WEIGHTS, GROUPED_GEMM, GROUPED_GATED_GEMM):
    register(_op)
