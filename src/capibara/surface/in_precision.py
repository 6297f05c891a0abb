"""A layer by a precision policy: what its rows are rounded to, how its products are made, and the result's type."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from capibara import precision as precisions
from capibara.errors import rule_error
from capibara.kernels.core.held import held_at
from capibara.kernels.core.operands import as_array
from capibara.kernels.ops.layers.moe.expert_parallel import EXPERT_WEIGHTS, expert_parallel_moe
from capibara.kernels.ops.layers.moe.layer import moe_layer

ALL, FIRST, NONE = "all", "first", "none"


def in_precision(
    fn: Callable[..., Any],
    precision: str | None,
    arrays: Sequence[Any],
    *,
    rounds: Sequence[int] = (0,),
    results: str = ALL,
    **options: Any,
) -> Any:
    """`fn(*arrays, **options)` by a policy: "bfloat16", "float32", "mixed" or "fp8"; None changes nothing.

    Args:
      rounds: which of `arrays` (each an array, a tree of them, or None) the policy rounds. Others keep their type.
      results: which results get the policy's result type: "all", the "first", or "none". Whole numbers keep theirs.
    """
    if precision is None:
        return fn(*arrays, **options)
    policy = precisions.policy(precision)
    arrays = tuple(_numbers(fn, i, x) if i in rounds else x for i, x in enumerate(arrays))
    given = {name: x for name, x in options.items() if isinstance(x, jax.Array)}
    static = {name: x for name, x in options.items() if name not in given}
    rounded = tuple(policy.cast_to_compute(x) if i in rounds else x for i, x in enumerate(arrays))

    def run(arrays: Any, given: Any) -> Any:
        return fn(*arrays, **static, **given)

    wide = any(jnp.result_type(x) == jnp.float32 for i in rounds for x in jax.tree.leaves(rounded[i]))
    if wide and static.get("implementation") == "reference":
        # Plain JAX: its products keep their precision when they are transposed, and forward-mode derivatives work.
        with jax.default_matmul_precision(policy.matmul_precision):
            made = run(rounded, given)
    else:
        made = (held_at(policy.matmul_precision, run) if wide else run)(rounded, given)
    if results == NONE:
        return made
    if results == FIRST:
        return (policy.cast_to_output(made[0]), *made[1:])
    return policy.cast_to_output(made)


def _numbers(fn: Callable[..., Any], index: int, tree: Any) -> Any:
    """The arrays that `fn`'s argument of this index holds, or an error that names both."""

    def one(path: Any, x: Any) -> Any:
        if isinstance(x, jax.Array):
            return x
        name = list(inspect.signature(fn).parameters)[index]
        return as_array(getattr(fn, "__name__", "this function"), f"{name}{jax.tree_util.keystr(path)}", x)

    return jax.tree_util.tree_map_with_path(one, tree, is_leaf=lambda x: isinstance(x, list))


def moe_in_precision(
    params: Mapping[str, Any],
    x: Any,
    precision: str | None,
    mesh: Mesh | None = None,
    axis_name: str | None = None,
    token_axis_names: Sequence[str] | None = None,
    **options: Any,
) -> Any:
    """(y, metrics): `moe_layer`, or `expert_parallel_moe` where a mesh is given, by a policy.

    The rows and the experts' weights are rounded. The router's weights and the metrics keep float32: which expert is
    best hangs on the last bits.
    """
    fn: Callable[..., Any] = moe_layer
    if mesh is not None:
        places: dict[str, Any] = {"axis_name": axis_name, "token_axis_names": token_axis_names}
        fn = functools.partial(expert_parallel_moe, mesh=mesh, **{k: v for k, v in places.items() if v is not None})
    elif axis_name is not None or token_axis_names is not None:
        raise rule_error(
            "axis_name and token_axis_names are axes of the mesh", "no mesh", "pass mesh= too, or leave them out"
        )
    others_only = ("pair_capacity_factor",) if mesh is None else ("capacity_factor", "keep")
    for name in others_only:
        if options.pop(name, None) is not None:
            if mesh is None:
                raise rule_error(f"{name} is for experts over a mesh", "no mesh", "pass mesh= too, or capacity_factor")
            raise rule_error(f"{name} is for experts on one device", "a mesh", "pass pair_capacity_factor, or no mesh")
    experts = {name: value for name, value in params.items() if name in EXPERT_WEIGHTS}
    others = {name: value for name, value in params.items() if name not in EXPERT_WEIGHTS}

    def moe(experts: Any, others: Any, x: Any, **options: Any) -> Any:
        return fn({**others, **experts}, as_array("moe_layer", "x", x), **options)

    return in_precision(moe, precision, (experts, others, x), rounds=(0, 2), results=FIRST, **options)
