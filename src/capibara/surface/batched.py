"""One operation on many tensors of different shapes, in as few launches as their shapes allow.

What works on rows (norms, softmax, products with one right side) takes the rows of all tensors of as many columns as
one tensor. What works on numbers (gelu) takes all of them. Norms with vectors of their own, and products with right
sides of their own, are stacked where their shapes agree. The rest runs on its own.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from capibara import precision as precisions
from capibara.errors import rule_error, unknown_name
from capibara.kernels.core import tables
from capibara.kernels.core.operands import as_array
from capibara.kernels.core.spec import describe
from capibara.kernels.ops.layers.activation.api import gelu
from capibara.kernels.ops.layers.norm.api import NORM, layer_norm, rms_norm
from capibara.kernels.ops.linalg.gemm.api import gemm
from capibara.kernels.ops.linalg.placement import on_their_device
from capibara.kernels.ops.linalg.rounding import rounded
from capibara.surface.layers import number
from capibara.surface.products import LEVELS, Settings, tune_once

FLAT_COLUMNS = 1024  # numbers that have no rows of their own are given rows of so many


@dataclasses.dataclass(frozen=True)
class Operation:
    """How one operation is called, and what may join one launch."""

    call: Callable[..., Any]  # of x, the vectors by name, `how`, and the options
    vectors: tuple[str, ...] = ()  # parameters that are arrays
    options: tuple[str, ...] = ()
    numbers: bool = False  # it works on each number alone
    stacks: bool = False  # it takes a leading axis of tensors, and of vectors


@dataclasses.dataclass(frozen=True)
class _How:
    operation: str
    precision: str
    implementation: str | None
    fuse: bool


@dataclasses.dataclass(frozen=True)
class Launch:
    """Tensors that are computed together: by their rows, as one stack, or as numbers; alone, if there is one."""

    members: tuple[int, ...]
    joined: str
    options: tuple[tuple[str, Hashable], ...]


def _layer_norm(x: Any, how: _How, weight: Any = None, bias: Any = None, **options: Any) -> Any:
    if _grouped_vectors(weight, bias):
        return NORM(x, weight, bias, implementation=how.implementation, **{"eps": 1e-5, **options})
    return layer_norm(x, weight, bias, implementation=how.implementation, **options)


def _rms_norm(x: Any, how: _How, weight: Any = None, **options: Any) -> Any:
    if _grouped_vectors(weight):
        return NORM(x, weight, kind="rms", implementation=how.implementation, **options)
    return rms_norm(x, weight, implementation=how.implementation, **options)


def _grouped_vectors(*vectors: Any) -> bool:
    """[groups, columns], one for each element of x's first axis: the op takes them, its public functions do not."""
    return any(vector is not None and vector.ndim == 2 for vector in vectors)


def _gelu(x: Any, how: _How, **options: Any) -> Any:
    return gelu(x, implementation=how.implementation, **options)


def _softmax(x: Any, how: _How) -> Any:
    wide = jnp.promote_types(jnp.float32, x.dtype)
    return jax.nn.softmax(x.astype(wide), axis=-1).astype(x.dtype)


def _matmul(x: Any, how: _How, b: Any) -> Any:
    if x.ndim > b.ndim > 2:
        b = b.reshape(b.shape[0], *(1,) * (x.ndim - b.ndim), *b.shape[1:])  # a stack's first axes meet
    # Both sides are rounded already, each tensor by itself: one scale of fp8 is for a tensor, not for its neighbours.
    policy = precisions.policy(how.precision)
    a, b, precision, out = rounded(x, b, policy.matmul_precision, policy.output_dtype)
    return gemm(a, b, precision=precision, out_dtype=out, implementation=how.implementation)


OPERATIONS = {
    "layer_norm": Operation(_layer_norm, ("weight", "bias"), ("eps",), stacks=True),
    "rms_norm": Operation(_rms_norm, ("weight",), ("eps", "offset"), stacks=True),
    "softmax": Operation(_softmax),
    "gelu": Operation(_gelu, (), ("approximate",), numbers=True),
    "matmul": Operation(_matmul, ("b",), stacks=True),
}


def batch_operations(
    settings: Settings,
    operation_type: str,
    inputs: Any,
    parameters: Any = None,
    parallel_execution: bool = True,
    precision: str | None = None,
) -> list[jax.Array]:
    """The operation of each tensor, in order.

    Args:
      operation_type: "layer_norm", "rms_norm", "softmax" (each over the last axis), "gelu" or "matmul".
      inputs: a list of tensors, or an array whose first axis counts them; for "matmul" pairs (a, b), or left sides
        with the right one in the parameters.
      parameters: a dictionary for all tensors, or a list of one for each. Norms take weight, bias (layer norm), eps
        and offset (RMS norm), gelu takes approximate, matmul takes b.
      parallel_execution: one program, with one launch a group of tensors that can be computed together. False: a
        program for each tensor, one after another.
      precision: another than the settings'.
    """
    if operation_type not in OPERATIONS:
        raise unknown_name("operation_type", operation_type, OPERATIONS)
    operation = OPERATIONS[operation_type]
    tensors, options = _read(operation_type, operation, inputs, parameters)
    if not tensors:
        return []
    plan = launches(operation, tensors, options, together=bool(parallel_execution))
    how = _How(
        operation_type,
        precisions.policy(precision or settings.precision).name,
        LEVELS[settings.optimization_level],
        settings.enable_xla_fusion,
    )
    parts = (plan,) if parallel_execution else tuple((launch,) for launch in plan)
    made: dict[int, jax.Array] = {}
    for part in parts:
        members = [i for launch in part for i in launch.members]
        made.update(zip(members, _launched(settings, how, part, [tensors[i] for i in members]), strict=True))
    return [made[i] for i in range(len(tensors))]


def _read(
    name: str, operation: Operation, inputs: Any, parameters: Any
) -> tuple[list[dict[str, jax.Array]], list[dict[str, Hashable]]]:
    """Each tensor with its vectors, and its options. An array that was given twice is one object in both places."""
    if not isinstance(inputs, Sequence) and getattr(inputs, "ndim", 0) < 1:
        raise rule_error("inputs is a list of tensors", type(inputs).__name__, "pass [x, y, ...]")
    given = list(inputs)
    each = [parameters or {}] * len(given) if parameters is None or isinstance(parameters, Mapping) else [*parameters]
    if len(each) != len(given):
        raise rule_error("There is a dictionary of parameters for each tensor, or one for all",
                         f"{len(each)} for {len(given)}", "pass as many, or one")  # fmt: skip
    arrays: dict[int, jax.Array] = {}

    def array(what: str, x: Any) -> jax.Array:
        if id(x) not in arrays:
            made = as_array(f"batch_operations({name!r})", what, x)
            if not jnp.issubdtype(made.dtype, jnp.floating) or made.ndim == 0:
                raise rule_error(
                    f"batch_operations({name!r}) takes float arrays", f"{what} of {describe(made)}", "cast"
                )
            arrays[id(x)] = made
        return arrays[id(x)]

    tensors, options = [], []
    for x, mine in zip(given, each, strict=True):
        mine = dict(mine)
        if name == "matmul" and isinstance(x, tuple | list):
            if len(x) != 2 or "b" in mine:
                raise rule_error("matmul takes pairs (a, b), or a's and parameters={'b': b}", f"{len(x)} arrays, and "
                                 f"{'a' if 'b' in mine else 'no'} b in the parameters", "pass one b")  # fmt: skip
            x, mine["b"] = x
        for key in mine:
            if key not in (*operation.vectors, *operation.options):
                raise unknown_name(f"parameter of {name}", key, (*operation.vectors, *operation.options))
        if name == "matmul" and mine.get("b") is None:
            raise rule_error("matmul takes pairs (a, b), or a's and parameters={'b': b}", "no b", "pass one")
        vectors = {key: array(key, mine[key]) for key in operation.vectors if mine.get(key) is not None}
        tensors.append({"x": array("a tensor", x), **vectors})
        options.append({key: _option(key, value) for key, value in mine.items() if key in operation.options})
    return tensors, options


def _option(name: str, value: Any) -> Hashable:
    """A switch or a number, as Python has it: options are part of jit's key, and arrays cannot be."""
    return bool(value) if name == "approximate" else number(name, value)


def launches(
    operation: Operation,
    tensors: Sequence[Mapping[str, jax.Array]],
    options: Sequence[Mapping[str, Hashable]],
    together: bool = True,
) -> tuple[Launch, ...]:
    """Which tensors go together."""
    said = [tuple(sorted(mine.items())) for mine in options]
    if not together:
        return tuple(Launch((i,), "alone", mine) for i, mine in enumerate(said))
    if operation.numbers:
        keys: list[Any] = [(t["x"].dtype, mine) for t, mine in zip(tensors, said, strict=True)]
        return _grouped(range(len(keys)), keys, "numbers", said)
    keys = []
    for i, tensor in enumerate(tensors):
        vectors = {name: x for name, x in tensor.items() if name != "x"}
        shared = tuple((name, id(x)) for name, x in vectors.items())
        # Only a plain matrix on the right side means the same to every row.
        apart = "b" in vectors and (vectors["b"].ndim != 2 or tensor["x"].ndim < 2)
        keys.append((tensor["x"].shape[-1], tensor["x"].dtype, shared, said[i], i if apart else None))
    by_rows = _grouped(range(len(keys)), keys, "rows", said)
    if not operation.stacks:
        return by_rows
    single = [launch.members[0] for launch in by_rows if len(launch.members) == 1]
    shapes = []
    for i, tensor in enumerate(tensors):
        x, b = tensor["x"], tensor.get("b")
        apart = b is not None and (min(x.ndim, b.ndim) < 2 or 2 < b.ndim != x.ndim)
        alike = tuple((name, y.shape, y.dtype) for name, y in tensor.items())
        shapes.append((alike, said[i], i if apart else None))
    stacked = _grouped(single, shapes, "stack", said)
    return (*(launch for launch in by_rows if len(launch.members) > 1), *stacked)


def _grouped(indices: Any, keys: Sequence[Any], joined: str, said: Sequence[Any]) -> tuple[Launch, ...]:
    groups: dict[Any, list[int]] = {}
    for i in indices:
        groups.setdefault(keys[i], []).append(i)
    return tuple(Launch(tuple(g), joined if len(g) > 1 else "alone", said[g[0]]) for g in groups.values())


def _launched(settings: Settings, how: _How, plan: tuple[Launch, ...], tensors: list[Any]) -> list[Any]:
    # Counted anew: a plan is part of jit's key, and where its tensors stand among all others is not its business.
    places = itertools.count()
    plan = tuple(dataclasses.replace(launch, members=tuple(next(places) for _ in launch.members)) for launch in plan)
    leaves, tree = jax.tree.flatten(tensors)
    if settings.optimization_level == "aggressive":
        tune_once((how, plan, tree), lambda *xs: _all(jax.tree.unflatten(tree, xs), how, plan), leaves)
    if not settings.compiled:
        return _all(tensors, how, plan)
    with on_their_device(leaves):
        return _compiled(tensors, how=how, plan=plan, tuned=tables.generation())


# `tuned` is part of jit's key: a choice that was traced before a table changed is made again.
@functools.partial(jax.jit, static_argnames=("how", "plan", "tuned"))
def _compiled(tensors: list[Any], *, how: _How, plan: tuple[Launch, ...], tuned: int) -> list[Any]:
    return _all(tensors, how, plan)


def _all(tensors: Sequence[Any], how: _How, plan: tuple[Launch, ...]) -> list[Any]:
    return [result for launch in plan for result in _one(launch, how, [tensors[i] for i in launch.members])]


def _one(launch: Launch, how: _How, tensors: Sequence[Any]) -> list[Any]:
    """One launch: join, run, part again."""
    policy = precisions.policy(how.precision)
    call = OPERATIONS[how.operation].call
    xs = [policy.cast_to_compute(t["x"]) for t in tensors]
    # A product's right side is rounded too, before it is stacked; the vectors of a norm keep their own type.
    each = [
        {name: policy.cast_to_compute(value) if name == "b" else value for name, value in t.items() if name != "x"}
        for t in (tensors if launch.joined == "stack" else tensors[:1])
    ]
    vectors = each[0]

    def run(x: Any, vectors: Mapping[str, Any]) -> Any:
        if not how.fuse:
            x, vectors = jax.lax.optimization_barrier((x, vectors))
        made = policy.cast_to_output(call(x, how=how, **vectors, **dict(launch.options)))
        return made if how.fuse else jax.lax.optimization_barrier(made)

    if launch.joined == "alone":
        return [run(xs[0], vectors)]
    if launch.joined == "stack":
        return list(run(jnp.stack(xs), {name: jnp.stack([own[name] for own in each]) for name in vectors}))
    if launch.joined == "numbers":
        flat = jnp.concatenate([x.reshape(-1) for x in xs])
        count = flat.shape[0]
        made = run(jnp.pad(flat, (0, -count % FLAT_COLUMNS)).reshape(-1, FLAT_COLUMNS), vectors).reshape(-1)
        ends = list(itertools.accumulate(x.size for x in xs))
        return [made[end - x.size : end].reshape(x.shape) for x, end in zip(xs, ends, strict=True)]
    made = run(jnp.concatenate([x.reshape(-1, x.shape[-1]) for x in xs]), vectors)
    rows = [math.prod(x.shape[:-1]) for x in xs]
    ends = list(itertools.accumulate(rows))
    return [
        made[end - n : end].reshape(*x.shape[:-1], made.shape[-1]) for x, n, end in zip(xs, rows, ends, strict=True)
    ]
