"""A whole training step around any loss: gradients, accumulation over microbatches, recomputation, the optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from capibara.errors import rule_error, unknown_name
from capibara.parallel.job import Job, counted
from capibara.parallel.optimizers import optimizer_named
from capibara.parallel.pipelines.program import pipelined, why_not_pipelined
from capibara.parallel.remat import POLICIES, checkpoint_scans, outermost_scans
from capibara.program.argument_roles import is_key

__all__ = ["microbatches_of", "training_job", "training_step"]

_ACCUMULATE = (1, 2, 4, 8, 16, 32, 64, 128)


def training_step(
    loss: Callable[[Any, Any], Any],
    optimizer: Any = "adamw",
    *,
    remat: str = "none",
    accumulate: int = 1,
    mixed: bool = True,
    microbatches: int | None = None,
) -> Callable[[Any, Any, Any], tuple[Any, Any, Any]]:
    """`step(params, state, batch) -> (params, state, loss)` for `loss(params, batch)`, a mean over the batch's rows.

    With `accumulate` n, n microbatches run one after another and their gradients are averaged, which is the same
    step where the loss is a mean of equal rows. With `mixed`, gradients are added up in float32 whatever the
    parameters' type; without, in the parameters' type. `remat` is one of `POLICIES`.

    With `microbatches` n, the loss's layers run as a pipeline along the mesh axis "pipeline", n microbatches passing
    through its stages (`capibara.parallel.pipelined`): under a mesh that has the axis, with the layers' parameters and
    state laid out along it.
    """
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise rule_error("accumulate is a whole number from 1 up", repr(accumulate), "use 1")
    _, update = optimizer_named(optimizer, mixed)
    slim = checkpoint_scans(loss, remat)
    if microbatches is not None:
        slim = pipelined(slim, microbatches=microbatches, float32_sums=mixed)
    grad = jax.value_and_grad(slim)

    def whole(params: Any, batch: Any) -> Any:
        return grad(params, batch)

    def in_parts(params: Any, batch: Any) -> Any:
        _check_accumulate(accumulate, _rows(batch))
        parts = jax.tree.map(lambda x: microbatches_of(x, accumulate), batch)
        zero = jax.tree.map(lambda p: jnp.zeros(p.shape, _sum_dtype(p.dtype, mixed)), params)

        def one(carry: Any, part: Any) -> Any:
            total, gradients = carry
            value, more = grad(params, part)
            added = jax.tree.map(lambda a, b: a + b.astype(a.dtype), gradients, more)
            return (total + value.astype(jnp.float32), added), None

        (total, gradients), _ = jax.lax.scan(one, (jnp.float32(0), zero), parts)
        return total / accumulate, jax.tree.map(lambda g: g / accumulate, gradients)

    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
        value, gradients = (whole if accumulate == 1 else in_parts)(params, batch)
        params, state = update(params, state, gradients)
        return params, state, value

    return step


def training_job(
    loss: Callable[[Any, Any], Any],
    params: Any,
    batch: Any,
    *,
    optimizer: Any = "adamw",
    tokens: int | None = None,
    mixed: bool = True,
    knobs: Mapping[str, Sequence[Any]] | None = None,
    name: str = "",
) -> Job:
    """The job of training with `loss(params, batch)`, from the shapes of both.

    `optimizer` is "adamw", "sgd", or an object with `init(params)` and `update(gradients, state, params)` as optax
    makes them. With `mixed`, its moments and the sums of gradients are float32 whatever the parameters' type. `knobs`
    limits what is tried: `{"remat": ("full",), "accumulate": (1, 2)}`. The types the loss computes in are its own.
    """
    shapes, rows = jax.eval_shape(lambda t: t, params), _rows(batch)
    inputs = jax.eval_shape(lambda t: t, batch)
    _check_loss(loss, shapes, inputs)
    init, _ = optimizer_named(optimizer, mixed)
    state = jax.eval_shape(init, shapes)
    scans = outermost_scans(loss, shapes, inputs)
    tried, beyond = _knobs(knobs, rows, scans)
    notes: tuple[str, ...] = ()
    if not scans:
        notes += ("the loss has no scan over layers, so nothing can be recomputed: remat is not tried",)
    work = counted(loss, (shapes, inputs), ("params", "batch"), tokens=tokens, rows=rows)
    notes += work.notes

    def build(remat: str = "none", accumulate: int = 1) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        step = training_step(loss, optimizer, remat=remat, accumulate=accumulate, mixed=mixed)
        return step, (shapes, state, inputs)

    def staged(microbatches: int, remat: str = "none") -> tuple[Callable[..., Any], tuple[Any, ...]]:
        step = training_step(loss, optimizer, remat=remat, mixed=mixed, microbatches=microbatches)
        return step, (shapes, state, inputs)

    def again(smaller: Any, fewer: int | None) -> Callable[[], Job]:
        def job() -> Job:
            made = training_job(
                loss, params, smaller, optimizer=optimizer, tokens=fewer, mixed=mixed, knobs=knobs, name=name
            )
            return replace(made, unit=work.unit)  # what is half as many is the same thing

        return job

    smaller: dict[str, Callable[[], Job]] = {}
    half = None if work.count is None else work.count // 2
    if rows % 2 == 0:
        smaller["half the batch"] = again(_halved(inputs, 0), half)
    refused: dict[str, str] = {}
    if _sequence(inputs) % 2 == 0:
        refusal = _refusal(loss, shapes, _halved(inputs, 1))
        if refusal:
            refused["half the sequence"] = refusal
        else:
            smaller["half the sequence"] = again(_halved(inputs, 1), half)
    return Job(
        build=build,
        roles=("params", "state", "batch"),
        donate=(0, 1),
        tokens=work.count,
        knobs=tried,
        name=name or getattr(loss, "__name__", ""),
        beyond=beyond,
        smaller=MappingProxyType(smaller),
        not_smaller=MappingProxyType(refused),
        notes=notes,
        staged=staged,
        why_no_stages=functools.cache(
            lambda: why_not_pipelined(loss, (shapes, inputs), microbatches=tried["accumulate"])
        ),
        unit=work.unit,
        rows=rows,
        lengths=work.lengths,
        optimizer=optimizer if isinstance(optimizer, str) else type(optimizer).__name__,
    )


def microbatches_of(x: Any, parts: int) -> Any:
    # Rows that lie together on a chip go to different microbatches: then the axis that the loop runs over is the inner
    # one and stays whole on every chip, and each microbatch is spread over all of them.
    return jnp.swapaxes(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 0, 1)


def _sum_dtype(dtype: Any, mixed: bool) -> Any:
    return jnp.promote_types(dtype, jnp.float32) if mixed else dtype


def _check_accumulate(parts: Any, rows: int) -> None:
    if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1 or rows % parts:
        raise rule_error(
            f"accumulate divides the batch's {rows} rows",
            repr(parts),
            f"use one of {', '.join(str(n) for n in range(1, rows + 1) if rows % n == 0)}",
        )


def _check_loss(loss: Callable[[Any, Any], Any], params: Any, batch: Any) -> None:
    """What a gradient needs, by name; whatever the loss itself says to its arguments is its own error."""
    if not callable(loss):
        raise rule_error("A loss is a function of parameters and a batch", repr(loss), "pass loss(params, batch)")
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise rule_error(
                "Parameters that are trained are floats",
                f"{leaf.dtype} at {jax.tree_util.keystr(path)}",
                "close the loss over what is not trained",
            )
    found = jax.eval_shape(loss, params, batch)
    if not isinstance(found, jax.ShapeDtypeStruct) or found.shape or not jnp.issubdtype(found.dtype, jnp.floating):
        alone = isinstance(found, jax.ShapeDtypeStruct)
        fix = "loss(...).mean()" if alone and found.shape else "loss(...)[0]"
        raise rule_error("A loss gives one real number", str(found), f"return the mean alone: {fix}")


def _rows(batch: Any) -> int:
    sizes = {leaf.shape[0] if leaf.shape else 0 for leaf in jax.tree.leaves(batch)}
    if len(sizes) != 1 or 0 in sizes:
        keys = [
            jax.tree_util.keystr(path)
            for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
            if is_key(leaf) or (leaf.shape == (2,) and leaf.dtype == jnp.uint32)
        ]
        if keys and sizes - {0, 2}:
            raise rule_error(
                "Every array of a batch has the same number of rows, and a random key has none",
                f"what looks like one at {', '.join(keys)}",
                "bind it with functools.partial, or plan the whole step without train",
            )
        raise rule_error(
            "Every array of a batch has the same number of rows, its first dimension",
            f"first dimensions {sorted(sizes)} (0 for a scalar)",
            "give each array the batch as its first dimension, and close the loss over the rest",
        )
    return int(sizes.pop())


def _sequence(batch: Any) -> int:
    """The second dimension that all arrays of the batch share, 1 where there is none."""
    sizes = {leaf.shape[1] if len(leaf.shape) > 1 else 1 for leaf in jax.tree.leaves(batch)}
    return int(sizes.pop()) if len(sizes) == 1 else 1


def _refusal(loss: Callable[[Any, Any], Any], params: Any, batch: Any) -> str:
    """What the loss says to this batch; "" where it takes it. A second dimension that is no sequence cannot be cut."""
    try:
        jax.eval_shape(loss, params, batch)
    except Exception as error:  # noqa: BLE001 - whatever the loss says to a batch that nobody promised it
        first = str(error).strip().splitlines()
        return f"{type(error).__name__}: {first[0]}" if first else type(error).__name__
    return ""


def _halved(batch: Any, axis: int) -> Any:
    def half(leaf: Any) -> Any:
        shape = (*leaf.shape[:axis], leaf.shape[axis] // 2, *leaf.shape[axis + 1 :])
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    return jax.tree.map(half, batch)


def _knobs(
    given: Mapping[str, Sequence[Any]] | None, rows: int, scans: int
) -> tuple[Mapping[str, tuple[Any, ...]], Mapping[str, tuple[Any, ...]]]:
    possible = {
        "remat": POLICIES if scans else ("none",),
        "accumulate": tuple(parts for parts in _ACCUMULATE if rows % parts == 0),
    }
    tried = dict(possible)
    for name, values in (given or {}).items():
        if name not in possible:
            raise unknown_name("knob", name, possible)
        tried[name] = tuple(values)
        if not tried[name]:
            raise rule_error(f"The knob {name!r} has one or more values to try", repr(values), "name one")
    for value in tried["remat"]:
        if value not in POLICIES:
            raise unknown_name("remat policy", value, POLICIES)
    for parts in tried["accumulate"]:
        _check_accumulate(parts, rows)
    beyond = {name: tuple(v for v in values if v not in tried[name]) for name, values in possible.items()}
    return MappingProxyType(tried), MappingProxyType({name: values for name, values in beyond.items() if values})
