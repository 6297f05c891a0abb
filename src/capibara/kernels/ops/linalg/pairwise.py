"""A contraction of two labelled arrays as one matrix product.

Labels fall in four groups: kept by both operands and the result (batch), summed (contracted), and kept by one
operand (its free labels). Operands whose labels lie as [batch, free, contracted] or [batch, contracted, free]
are a gemm as they stand, since gemm reads a transposed matrix in place; only another order is permuted first.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from capibara import precision as precisions
from capibara.kernels.ops.linalg.gemm.api import gemm
from capibara.kernels.ops.linalg.gemm.rules import DTYPES, LAX_PRECISIONS
from capibara.kernels.ops.linalg.rounding import rounded


@dataclasses.dataclass(frozen=True)
class How:
    """How the products of a contraction run."""

    precision: str | None = None
    """gemm's: a policy of capibara, or one of jax's names for float32 inputs."""
    out_dtype: str | None = None
    implementation: str | None = None
    """Force one of gemm's; None leaves it to dispatch."""
    fuse: bool = True
    """False keeps XLA from fusing anything into a product or out of one."""
    transpose_in_place: bool = True
    """False lays every operand out as plain row-major matrices first, which copies the transposed ones."""


class Groups(NamedTuple):
    """The labels of a matrix product, each group in the order in which it is flattened."""

    batch: tuple[str, ...]
    left: tuple[str, ...]
    right: tuple[str, ...]
    contracted: tuple[str, ...]
    swapped: bool
    """The second operand is gemm's left one, which spares a transpose of the result."""


@functools.lru_cache(maxsize=4096)
def groups(a: tuple[str, ...], b: tuple[str, ...], out: tuple[str, ...]) -> Groups | None:
    """How this contraction is a matrix product; None when it is not one.

    It is one when something is summed and something is left of either operand. An outer or elementwise
    product sums nothing, and an inner product of vectors leaves nothing: XLA has better forms for those.
    """
    in_a, in_b, in_out = set(a), set(b), set(out)
    contracted = tuple(x for x in a if x in in_b and x not in in_out)
    batch = tuple(x for x in out if x in in_a and x in in_b)
    left = tuple(x for x in out if x in in_a and x not in in_b)
    right = tuple(x for x in out if x in in_b and x not in in_a)
    if not contracted or not (left or right):
        return None
    free = [x for x in out if x not in batch]
    swapped = free[0] in in_b
    if swapped:
        a, b, left, right = b, a, right, left
    # Several summed labels are flattened in the order that leaves more operands where they are.
    orders = (tuple(x for x in a if x in contracted), tuple(x for x in b if x in contracted))
    in_place = lambda order: (  # noqa: E731
        (a in (batch + left + order, batch + order + left)) + (b in (batch + order + right, batch + right + order))
    )
    return Groups(batch, left, right, max(orders, key=in_place), swapped)


def is_product(a: Any, b: Any) -> bool:
    """Whether gemm takes these two operands, whatever their labels."""
    return all(np.dtype(x.dtype).name in DTYPES for x in (a, b)) and not any(map(laid_out_by_type, (a, b)))


def laid_out_by_type(x: Any) -> bool:
    """On a mesh with explicit axes the layout is part of the type, and flattening axes would change it."""
    spec = getattr(getattr(jax.typeof(x), "sharding", None), "spec", ())
    return any(entry is not None for entry in spec)


def contract_pair(a: Any, a_labels: str, b: Any, b_labels: str, out_labels: str, how: How) -> jax.Array:
    """Contract two arrays. Each has distinct labels, shared ones of equal size, and none that it alone sums.

    >>> x = jnp.ones((2, 3, 4)); y = jnp.ones((2, 5, 4))
    >>> contract_pair(x, "bnd", y, "bkd", "bnk", How()).shape
    (2, 3, 5)
    """
    found = groups(tuple(a_labels), tuple(b_labels), tuple(out_labels)) if is_product(a, b) else None
    if found is None:
        return plain(f"{a_labels},{b_labels}->{out_labels}", (a, b), how)
    if not how.fuse:
        a, b = jax.lax.optimization_barrier((a, b))
    if found.swapped:
        a, a_labels, b, b_labels = b, b_labels, a, a_labels
    out = _product(a, tuple(a_labels), b, tuple(b_labels), tuple(out_labels), found, how)
    return out if how.fuse else jax.lax.optimization_barrier(out)


def plain(equation: str, operands: tuple[Any, ...], how: How) -> jax.Array:
    """jnp's own einsum of one or two operands, in the types that `how` asks for."""
    precision, out = how.precision, how.out_dtype
    if precision is not None and precision not in LAX_PRECISIONS:
        policy = precisions.policy(precision)
        operands = policy.cast_to_compute(operands)
        precision = policy.matmul_precision
        if out is None and all(jnp.issubdtype(x.dtype, jnp.floating) for x in operands):
            out = policy.output_dtype
    return jnp.einsum(equation, *operands, precision=precision, preferred_element_type=out)


def _product(
    a: Any,
    a_labels: tuple[str, ...],
    b: Any,
    b_labels: tuple[str, ...],
    out_labels: tuple[str, ...],
    found: Groups,
    how: How,
) -> jax.Array:
    batch, left, right = found.batch, found.left, found.right
    mapped: tuple[str, ...] = ()
    if may_be_spread(a, b):
        # Two axes split over a mesh cannot be flattened into one without moving data, so all but one axis of
        # each group is mapped over: XLA then sees a product with several axes, and splits it as it likes.
        mapped = batch[:-1] + left[:-1] + right[:-1]
        batch, left, right = batch[-1:], left[-1:], right[-1:]

    sizes = dict(zip(a_labels, a.shape, strict=True)) | dict(zip(b_labels, b.shape, strict=True))
    one = functools.partial(
        _flat_product, batch=batch, left=left, right=right, contracted=found.contracted, sizes=sizes, how=how
    )
    fn: Callable[[Any, Any], jax.Array] = functools.partial(
        one,
        a_labels=tuple(x for x in a_labels if x not in mapped),
        b_labels=tuple(x for x in b_labels if x not in mapped),
    )
    for index in reversed(range(len(mapped))):
        outer = mapped[:index]
        axis = lambda labels, label, outer=outer: (  # noqa: E731
            [x for x in labels if x not in outer].index(label) if label in labels else None
        )
        fn = jax.vmap(fn, in_axes=(axis(a_labels, mapped[index]), axis(b_labels, mapped[index])))
    out = fn(a, b)
    return permute(out, mapped + batch + left + right, out_labels)


def _flat_product(
    a: Any,
    b: Any,
    *,
    a_labels: tuple[str, ...],
    b_labels: tuple[str, ...],
    batch: tuple[str, ...],
    left: tuple[str, ...],
    right: tuple[str, ...],
    contracted: tuple[str, ...],
    sizes: dict[str, int],
    how: How,
) -> jax.Array:
    count = lambda labels: math.prod(sizes[x] for x in labels)  # noqa: E731
    lead = (count(batch),) if batch else ()

    def matrices(x: Any, labels: tuple[str, ...], rows: tuple[str, ...], columns: tuple[str, ...]) -> tuple[Any, bool]:
        """x as [batch, rows, columns], or transposed in place where that is how it lies."""
        in_place = labels == batch + columns + rows and labels != batch + rows + columns
        if in_place and how.transpose_in_place:
            return x.reshape(*lead, count(columns), count(rows)), True
        moved = permute(x, labels, batch + rows + columns)
        if moved is not x and not how.transpose_in_place:
            # XLA would fold the transpose into the product again.
            moved = jax.lax.optimization_barrier(moved)
        return moved.reshape(*lead, count(rows), count(columns)), False

    a, transpose_a = matrices(a, a_labels, left, contracted)
    b, transpose_b = matrices(b, b_labels, contracted, right)
    a, b, precision, out_dtype = rounded(a, b, how.precision, how.out_dtype)
    out = gemm(
        a,
        b,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        precision=precision,
        out_dtype=out_dtype,
        implementation=how.implementation,
    )
    return out.reshape([sizes[x] for x in batch + left + right])


def permute(x: Any, labels: tuple[str, ...], wanted: tuple[str, ...]) -> Any:
    """x with its axes in the wanted order; x itself when they are."""
    return x if labels == wanted else jnp.transpose(x, [labels.index(label) for label in wanted])


def may_be_spread(*arrays: Any) -> bool:
    """Whether one of these may lie on several devices; of a tracer only the surroundings tell."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.manual_axes and set(mesh.manual_axes) == set(mesh.axis_names):
        return False
    for x in arrays:
        if isinstance(x, jax.core.Tracer):
            if not mesh.empty or jax.device_count() > 1:
                return True
        elif isinstance(x, jax.Array) and len(x.sharding.device_set) > 1:
            return True
    return False
