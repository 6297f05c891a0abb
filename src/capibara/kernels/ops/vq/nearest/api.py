"""nearest_code: the public function, and the op behind it."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack, overload

from jaxtyping import Array, Float, Int

from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op, register
from capibara.kernels.core.operands import as_array
from capibara.kernels.core.spec import Gradient, Implementation
from capibara.kernels.ops.vq.nearest import gradient, hopper, mesh, peers, rules, tpu, xla
from capibara.kernels.ops.vq.nearest.cases import CASES
from capibara.kernels.ops.vq.nearest.reference import reference

NEAREST_CODE = Op(
    "nearest_code",
    family="vq",
    reference=reference,
    operands=("x", "codebook"),
    params={"return_distances": False, "return_stats": False},
    untuned=("return_distances", "return_stats"),  # both follow from the indices, whoever found them
    check=rules.check,
    cost=rules.cost,
    tolerance=rules.tolerance,
    gradient=Gradient(gradient.forward, gradient.backward),
    batch=mesh.batch,
    partition=mesh.PARTITION,
    cases=CASES,
    peers={"argmin": peers.argmin},
    excerpt=rules.first_rows,
)

NEAREST_CODE.implement(
    xla.IMPLEMENTATION,
    tpu.IMPLEMENTATION,
    hopper.IMPLEMENTATION,
    Implementation("reference", reference),
)


class _How(TypedDict, total=False):
    implementation: str | None
    config: Any


@overload
def nearest_code(
    x: Array, codebook: Array, *, return_distances: Literal[False] = False, return_stats: Literal[False] = False,
    **how: Unpack[_How],
) -> Array: ...  # fmt: skip


@overload
def nearest_code(
    x: Array, codebook: Array, *, return_distances: Literal[True], return_stats: Literal[False] = False,
    **how: Unpack[_How],
) -> tuple[Array, Array]: ...  # fmt: skip


@overload
def nearest_code(
    x: Array, codebook: Array, *, return_distances: Literal[False] = False, return_stats: Literal[True],
    **how: Unpack[_How],
) -> tuple[Array, Array, Array]: ...  # fmt: skip


@overload
def nearest_code(
    x: Array, codebook: Array, *, return_distances: Literal[True], return_stats: Literal[True], **how: Unpack[_How]
) -> tuple[Array, Array, Array, Array]: ...


@overload
def nearest_code(
    x: Array, codebook: Array, *, return_distances: bool = False, return_stats: bool = False, **how: Unpack[_How]
) -> Array | tuple[Array, ...]: ...


def nearest_code(
    x: Float[Array, "*rows D"],
    codebook: Float[Array, "K D"],
    *,
    return_distances: bool = False,
    return_stats: bool = False,
    implementation: str | None = None,
    config: Any = None,
) -> Int[Array, "*rows"] | tuple[Array, ...]:
    """The index of the code nearest to each row of x by Euclidean distance, int32 [...].

    The table of N x K distances is never stored. Ties go to the lowest index. In float32 the index is that of the true
    nearest code, but for codes whose distances differ by less than float32 rounds. Distances are compared at the scale
    of the largest code: of codes some 1e19 times smaller, whose squares vanish beside it, any may be taken.

    Args:
      x: rows [..., D]. A row with NaN or infinity (or whose squares overflow float32) has no nearest code: its index
        is -1, its distance NaN, and it joins no statistics.
      codebook: codes [K, D]. A code whose squared norm is not finite is nobody's nearest.
      return_distances: also return the squared distances, float32 [...], computed from differences.
      return_stats: also return how many rows each code has, float32 [K], and the sum of those rows, float32 [K, D]:
        what a moving average of the codes takes. On a mesh they are over the rows of all devices.
      implementation: force one by name ("xla", "pallas_tpu", "hopper", "reference"); a refusal is an error.
      config: that implementation's tuning choices; by default from the tuned table or a rule.

    Distances and sums are differentiable; indices and counts have no derivative.

    >>> codebook = jnp.array([[0.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    >>> nearest_code(jnp.array([[0.1, 0.0], [0.9, 0.1], [jnp.nan, 0.0]]), codebook).tolist()
    [0, 1, -1]
    """
    arrays = tuple(as_array("nearest_code", name, given) for name, given in (("x", x), ("codebook", codebook)))
    params: dict[str, Any] = {}
    if return_distances:
        params["return_distances"] = True
    if return_stats:
        params["return_stats"] = True
    return run(NEAREST_CODE, arrays, params, implementation=implementation, config=config)


NEAREST_CODE.public = nearest_code
register(NEAREST_CODE)
