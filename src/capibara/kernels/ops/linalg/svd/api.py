"""fast_svd: the public function and what it checks.

It is a function and not an op. An op has one specification that every implementation meets to a tolerance known from
the shapes; how near a random sketch comes to the exact triplets depends on the singular values themselves, so the
fastest implementation could not be chosen on one's behalf, tuned or compared element by element. The choice is the
`method`, `svd_plan` says in words which one a call takes and why, and the products with the matrix are gemm's.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from capibara.errors import rule_error
from capibara.kernels.core import tables
from capibara.kernels.core.operands import as_array
from capibara.kernels.core.spec import describe
from capibara.kernels.ops.linalg.placement import on_their_device, target_for
from capibara.kernels.ops.linalg.svd import derivative
from capibara.kernels.ops.linalg.svd.choice import Plan, choose
from capibara.kernels.ops.linalg.svd.rows import AxisName, Rows

DTYPES = ("bfloat16", "float16", "float32", "float64")


@overload
def fast_svd(
    matrix: Array, *, rank: int | None = None, compute_uv: Literal[True] = True, method: str = "auto",
    oversampling: int = 10, power_iterations: int = 2, key: Any = 0, core: str = "auto", axis_name: AxisName = None,
) -> tuple[Array, Array, Array]: ...  # fmt: skip


@overload
def fast_svd(
    matrix: Array, *, rank: int | None = None, compute_uv: Literal[False], method: str = "auto", oversampling: int = 10,
    power_iterations: int = 2, key: Any = 0, core: str = "auto", axis_name: AxisName = None,
) -> Array: ...  # fmt: skip


@overload
def fast_svd(
    matrix: Array, *, rank: int | None = None, compute_uv: bool, method: str = "auto", oversampling: int = 10,
    power_iterations: int = 2, key: Any = 0, core: str = "auto", axis_name: AxisName = None,
) -> Array | tuple[Array, Array, Array]: ...  # fmt: skip


def fast_svd(
    matrix: Float[Array, "*B M N"],
    *,
    rank: int | None = None,
    compute_uv: bool = True,
    method: str = "auto",
    oversampling: int = 10,
    power_iterations: int = 2,
    key: Any = 0,
    core: str = "auto",
    axis_name: AxisName = None,
) -> Float[Array, "*B r"] | tuple[Float[Array, "*B M r"], Float[Array, "*B r"], Float[Array, "*B r N"]]:
    """The leading `rank` singular triplets (u [..., M, r], s [..., r], vh [..., r, N]) of a matrix, or all of them.

    s is in descending order, and the largest element of each row of vh is positive, so that results can be compared.
    Narrow floats are computed in float32, which is then the type of the result. A matrix with a NaN or an infinity
    gives NaN throughout. Derivatives are those of the exact triplets; see `derivative` for where they do not exist.

    Args:
      matrix: [..., M, N], any number of batch axes. On a mesh it may be sharded by rows (or columns): Gram matrices
        and narrow sketches are what devices exchange, never the matrix.
      rank: how many triplets; None for min(M, N).
      compute_uv: False returns s alone.
      method: "exact"; "randomized", which needs `rank`, takes 2 * power_iterations + 2 products with the matrix, and
        has an expected error near the best possible where singular values fall; "auto": randomized where rank is given
        and rank + oversampling is at most half of the smaller side, exact otherwise.
        The next four are for the sketch: with "exact" they are refused, with "auto" they hold where one is taken.
      oversampling: columns of the random sketch beyond `rank`. More is more accurate and costs in proportion.
      power_iterations: rounds that sharpen the sketch, for singular values that fall slowly. 0 is fastest.
      key: a jax.random key or an int, for the sketch: one key, one result.
      core: what decomposes the randomized method's small square matrix: "xla", the platform's library; "jacobi", a
        loop of rotations that compiles quickly anywhere; "auto": jacobi on a TPU, xla elsewhere.
      axis_name: inside shard_map, the mesh axis (or axes) that the rows are spread over: `matrix` is then one
        device's rows, u its rows of u, and s and vh are whole on every device.

    >>> u, s, vh = fast_svd(jnp.diag(0.5 ** jnp.arange(64.0)), rank=2)
    >>> [round(float(x), 3) for x in s]
    [1.0, 0.5]
    """
    matrix = as_array("fast_svd", "matrix", matrix)
    plan = svd_plan(
        matrix,
        rank=rank,
        compute_uv=compute_uv,
        method=method,
        oversampling=oversampling,
        power_iterations=power_iterations,
        core=core,
        axis_name=axis_name,
    )
    if method == "exact" and not (isinstance(key, int) and key == 0):
        raise rule_error("key is for a sketch, and the exact method takes none", f"key={key!r}", "leave it out")
    with on_their_device((matrix,)):
        return _compiled(matrix, _key(key), plan, tables.generation())


def svd_plan(
    matrix: Any,
    *,
    rank: int | None = None,
    compute_uv: bool = True,
    method: str = "auto",
    oversampling: int = 10,
    power_iterations: int = 2,
    core: str = "auto",
    axis_name: AxisName = None,
) -> Plan:
    """How `fast_svd` with these arguments would do it and why, in words and as data; nothing is computed.

    >>> svd_plan(jax.ShapeDtypeStruct((4096, 1024), "float32"), rank=64).method
    'randomized'
    """
    if len(matrix.shape) < 2:
        raise rule_error("fast_svd takes matrices [..., M, N]", describe(matrix), "give it two axes or more")
    if np.dtype(matrix.dtype).name not in DTYPES:
        raise rule_error(
            f"fast_svd takes {', '.join(DTYPES)}",
            describe(matrix),
            "convert it with .astype(...), or use jnp.linalg.svd",
        )
    *_, rows, columns = matrix.shape
    return choose(
        Rows(axis_name).count(rows),
        columns,
        rank=rank,
        compute_uv=compute_uv,
        method=method,
        oversampling=oversampling,
        power_iterations=power_iterations,
        core=core,
        axis_name=axis_name,
        target=target_for((matrix,)),
    )


def _key(key: Any) -> jax.Array:
    if isinstance(key, int | np.integer):
        return jax.random.key(int(key))
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.ndim == 0:
        return key
    raise rule_error(
        "key is one jax.random.key or an int", describe(key) if hasattr(key, "dtype") else repr(key), "pass one"
    )


@functools.partial(jax.jit, static_argnums=(2, 3))
def _compiled(matrix: jax.Array, key: jax.Array, plan: Plan, tuned: int) -> Any:
    # `tuned` is part of jit's key: a choice of gemm's that was traced before a table changed is made again.
    *batch, rows, columns = matrix.shape
    wide = matrix.astype(jnp.promote_types(matrix.dtype, jnp.float32))
    if 0 in matrix.shape:
        values = jnp.zeros((*batch, plan.rank), wide.dtype)
        if not plan.compute_uv:
            return values
        return (
            jnp.zeros((*batch, rows, plan.rank), wide.dtype),
            values,
            jnp.zeros((*batch, plan.rank, columns), wide.dtype),
        )

    # The same for every matrix of a batch: each is decomposed as it would be alone.
    sketch = jax.random.normal(key, (columns, plan.sketch), wide.dtype)

    def one(a: jax.Array) -> Any:
        # Sums of squares stay in range, whatever the matrix's own size.
        size = _power_of_two(jax.lax.stop_gradient(a), Rows(plan.axis_name))
        if not plan.compute_uv:
            return derivative.singular_values(a / size, sketch, plan) * size
        u, s, vh = derivative.triplets(a / size, sketch, plan)
        return u, s * size, vh

    out = jax.vmap(one)(wide.reshape(math.prod(batch), rows, columns)) if batch else one(wide)
    return jax.tree.map(lambda x: x.reshape(*batch, *x.shape[1:]), out) if batch else out


def _power_of_two(a: jax.Array, rows: Rows) -> jax.Array:
    """The largest element's magnitude, as a power of two: dividing by it rounds nothing. 1 for zeros, NaN for NaN."""
    largest = rows.largest(jnp.max(jnp.abs(a)))
    _, exponent = jnp.frexp(largest)
    # The power and its reciprocal, by which some devices divide, are both normal numbers.
    least = jnp.finfo(a.dtype).minexp
    power = jnp.ldexp(jnp.ones((), a.dtype), jnp.clip(exponent, least, -least))
    return jnp.where(jnp.isfinite(largest), jnp.where(largest == 0, 1, power), jnp.nan)
