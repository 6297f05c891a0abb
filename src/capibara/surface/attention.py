"""Attention by the choices of a kernel object: how much is optimised, fused, laid out, and in what precision.

| optimization_level | attention runs as |
|---|---|
| "none" | the reference: every pair of query and key at once, operation by operation |
| "basic" | plain XLA, in chunks |
| "balanced" | what dispatch picks |
| "aggressive" | what dispatch picks after the shape was tuned, at its first sight and outside of traces |

`enable_xla_fusion=False` puts a barrier on either side of the attention, and `memory_layout_optimization=False` copies
operands of the layout "bthd" into the kernel's own order first.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax

from capibara.errors import rule_error, say_once, unknown_name
from capibara.kernels.core import tables
from capibara.kernels.ops.attention import inputs
from capibara.kernels.ops.attention.mask_shapes import mask_and_bias
from capibara.kernels.ops.linalg.placement import on_their_device
from capibara.surface.draws import Draws
from capibara.surface.flash import flash_attention
from capibara.surface.products import Settings, tune_once

logger = logging.getLogger("capibara.kernels")

OPTIONS = ("block_size", "query_offset", "return_lse", "scale", "softcap", "window")
LEVELS: dict[str, str | None] = {"none": "reference", "basic": "xla", "balanced": None, "aggressive": None}
"""Level -> the implementation it forces; None leaves it to dispatch."""


class MeshAxes(NamedTuple):
    """The mesh axes that split a sequence, the batch and the heads; one that a mesh lacks splits nothing."""

    sequence: tuple[str, ...]
    batch: tuple[str, ...]
    heads: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _How:
    """What of a call is not an array."""

    precision: str
    implementation: str | None
    fuse: bool
    in_place: bool
    layout: str
    axis: str | None  # splits the sequence; None for plain attention
    batch_axis: tuple[str, ...] | None
    head_axis: tuple[str, ...] | None
    options: tuple[tuple[str, Hashable], ...]


def attend(
    settings: Settings,
    draws: Draws,
    axes: MeshAxes,
    query: Any,
    key: Any,
    value: Any,
    *,
    attention_mask: Any = None,
    dropout_rate: float = 0.0,
    causal: bool = False,
    sequence_parallel: bool | str = False,
    rng: Any = None,
    precision: str | None = None,
    layout: str = "bhtd",
    segment_ids: Any = None,
    key_segment_ids: Any = None,
    **options: Any,
) -> Any:
    """Attention by the settings; a dropout without a key draws the object's next one."""
    for name in options:
        if name not in OPTIONS:
            raise unknown_name("argument of flash_attention", name, OPTIONS)
    rate = inputs.static_float("dropout_rate", dropout_rate)
    if rate <= 0:
        rng = None  # nothing is drawn
    elif rng is None:
        rng = draws.next()
    q, k, v = (inputs.array(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    # Shapes alone: nothing is transposed yet.
    q4, k4, _ = jax.eval_shape(lambda *x: inputs.heads_first(layout, query=x[0], key=x[1], value=x[2]), q, k, v)
    mask, bias = mask_and_bias(attention_mask, q4.shape[0], q4.shape[1], q4.shape[2], k4.shape[2])
    arrays = {
        "query": q, "key": k, "value": v, "mask": mask, "bias": bias, "segment_ids": segment_ids,
        "key_segment_ids": key_segment_ids, "dropout_key": rng,
    }  # fmt: skip
    arrays = {name: inputs.array(name, x) for name, x in arrays.items() if x is not None}
    implementation = LEVELS[settings.optimization_level]
    asked: dict[str, Any] = {"causal": bool(causal), "dropout_rate": rate, **options}
    asked = {name: tuple(x) if isinstance(x, list) else x for name, x in asked.items()}  # to be part of jit's key
    axis = _sequence_axis(sequence_parallel, axes.sequence)
    if axis is not None:
        reason = _not_in_a_ring(axis, implementation, q4.shape, k4.shape, arrays, asked)
        if reason is not None:
            say_once(logger, reason, "sequence_parallel: plain attention on the same mesh, since %s", reason)
            axis = None
    how = _How(
        precision=precision or settings.precision,
        implementation=implementation,
        fuse=settings.enable_xla_fusion,
        in_place=settings.memory_layout_optimization,
        layout=layout,
        axis=axis,
        batch_axis=None if axis is None else _dividing(axes.batch, axis, q4.shape[0]),
        head_axis=None if axis is None else _dividing(axes.heads, axis, k4.shape[1]),
        options=tuple(sorted(asked.items())),
    )
    if settings.optimization_level == "aggressive" and axis is None:
        names = tuple(arrays)
        tune_once(how, lambda *xs: _attended(dict(zip(names, xs, strict=True)), how), tuple(arrays.values()))
    if not settings.compiled:
        return _attended(arrays, how)
    with on_their_device((q, k, v)):
        return _compiled(arrays, how=how, tuned=tables.generation())


@functools.partial(jax.jit, static_argnames=("how", "tuned"))
def _compiled(arrays: dict[str, Any], *, how: _How, tuned: int) -> Any:
    # `tuned` is part of jit's key: a choice that was traced before a table changed is made again.
    return _attended(arrays, how)


def _attended(arrays: dict[str, Any], how: _How) -> Any:
    rest = dict(arrays)
    q, k, v = rest.pop("query"), rest.pop("key"), rest.pop("value")
    layout = how.layout
    options: dict[str, Any] = dict(how.options)
    if not how.in_place and layout == "bthd":
        q, k, v = jax.lax.optimization_barrier(tuple(x.swapaxes(1, 2) for x in (q, k, v)))
        layout = "bhtd"
    if not how.fuse:
        q, k, v = jax.lax.optimization_barrier((q, k, v))
    options |= {"layout": layout, "implementation": how.implementation}
    if how.axis is None:
        out = flash_attention(q, k, v, precision=how.precision, **rest, **options)
    else:
        from capibara.kernels.ops.attention.sequence import sequence_parallel_attention

        del options["dropout_rate"]  # 0, or this would not be a ring
        split = functools.partial(
            sequence_parallel_attention,
            axis_name=how.axis,
            batch_axis_name=how.batch_axis,
            head_axis_name=how.head_axis,
        )
        out = flash_attention(q, k, v, precision=how.precision, attend=split, **rest, **options)
    if not how.fuse:
        out = jax.lax.optimization_barrier(out)
    if layout == how.layout:
        return out
    return (out[0].swapaxes(1, 2), out[1]) if isinstance(out, tuple) else out.swapaxes(1, 2)


def _sequence_axis(asked: bool | str, usual: tuple[str, ...]) -> str | None:
    """The mesh axis to split the sequence by; None for plain attention, which is said where more was asked for."""
    if asked is False or asked is None:
        return None
    if asked is not True and not isinstance(asked, str):
        raise rule_error(
            "sequence_parallel is True, False or the name of a mesh axis", repr(asked), 'pass "sequence", or True'
        )
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        text = "sequence_parallel: plain attention, since no mesh of several devices is active (jax.set_mesh)"
        say_once(logger, None, text)
        return None
    if asked is not True:
        if asked not in mesh.axis_names:
            raise unknown_name("mesh axis for sequence_parallel", asked, mesh.axis_names)
        return None if mesh.shape[asked] == 1 else asked
    here = [axis for axis in usual if axis in mesh.axis_names]
    if not here:
        lacking = f"the mesh has no axis {' or '.join(map(repr, usual))}" if usual else "the rules split no sequence"
        say_once(
            logger,
            (lacking, mesh.axis_names),
            "sequence_parallel=True: plain attention, since %s; name one of %s to split the sequence by it",
            lacking,
            ", ".join(map(repr, mesh.axis_names)),
        )
        return None
    split = [axis for axis in here if mesh.shape[axis] > 1]
    if len(split) > 1:
        say_once(
            logger,
            tuple(split),
            "sequence_parallel=True: plain attention, since the rules split a sequence by %s and a ring goes along one "
            "mesh axis; name one of them",
            " and ".join(split),
        )
        return None
    return split[0] if split else None


def _not_in_a_ring(
    axis: str,
    implementation: str | None,
    query: tuple[int, ...],
    key: tuple[int, ...],
    arrays: dict[str, Any],
    options: dict[str, Any],
) -> str | None:
    """Why the sequence cannot be split over the mesh axis; None when it can. Shapes are heads first."""
    if implementation == "reference":
        return "optimization_level='none' runs the reference, which sees the whole sequence"
    given = [name for name in ("mask", "bias", "key_segment_ids") if name in arrays]
    if given:
        return f"a split sequence takes no {' and no '.join(given)}"
    if options["dropout_rate"]:
        return "a split sequence has no dropout"
    for name in ("block_size", "query_offset"):
        if options.get(name):
            return f"a split sequence takes no {name}"
    if query[2] != key[2]:
        return f"a split sequence has as many queries as keys, not {query[2]} and {key[2]}"
    devices = jax.sharding.get_abstract_mesh().shape[axis]
    if query[2] % devices:
        return f"{devices} devices along {axis!r} do not divide a length of {query[2]}"
    return None


def _dividing(names: tuple[str, ...], taken: str, size: int) -> tuple[str, ...] | None:
    """Those of the mesh axes that are there and free, where they divide."""
    shape = jax.sharding.get_abstract_mesh().shape
    free = tuple(name for name in names if name != taken and name in shape)
    return free if free and size % math.prod(shape[name] for name in free) == 0 else None
