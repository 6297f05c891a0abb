"""What JAX's transformations need to know of a kernel that they cannot see into.

A Pallas kernel has no derivative, and no rule to be batched or partitioned. This file wraps one with the op's own:
gradient (custom_vjp) around batching (custom_vmap) around partitioning over a mesh (`partitioned`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.custom_batching import custom_vmap
from jax.sharding import Mesh

from capibara.kernels.core import partitioned
from capibara.kernels.core.placement import Placement
from capibara.kernels.core.spec import Call, Config, Gradient, Implementation, Prefer, Preference
from capibara.kernels.core.varying import vary_alike, vary_like


def plain(call: Call, impl: Implementation, config: Config) -> Callable[..., Any]:
    """An implementation in plain JAX: its parameters bound, nothing else."""
    extra = {} if impl.config_type is None else {"config": config}
    params = {k: v for k, v in call.params.items() if k not in call.op.hints or k in impl.hints}

    def implementation(*arrays: Any) -> Any:
        return impl.fn(*arrays, **params, **extra)

    return implementation


def kernel(
    call: Call,
    impl: Implementation,
    config: Config,
    *,
    split: bool | Placement,
    pinned: bool,
    asked_config: Config,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A kernel for concrete arrays, and the same for tracers with the op's rules around it.

    `split` is where the operands lie on a mesh, or True for XLA's partitioner to say. A `pinned` implementation was
    asked for, and its gradient keeps to it. An `asked_config` is kept by every forward pass that the rules make of
    this call: differentiated, batched, or on one device's shards.
    """
    same = Preference(call.op.name, impl.name, asked_config)
    compute = _skip_absent(_varying(plain(call, impl, config)), call)
    if isinstance(split, Placement):
        compute = partitioned.by_shard_map(compute, call, same, split)
    elif split:
        compute = partitioned.by_partitioner(compute, call, same)
    # On Explicit axes vmap goes through shard_map to each device's call, which has the rule: where types say how arrays
    # are split, no reshape folds an axis in front of a split batch.
    batched = compute if isinstance(split, Placement) and split.explicit else _batched(compute, call, same)
    eager = _on_own_mesh(jax.jit(batched, inline=True), split)
    forward = same if pinned or asked_config is not None else None
    backward = Preference(call.op.name, impl.name) if pinned else None
    return eager, _differentiable(eager, call, forward, backward)


def plain_on_shards(
    call: Call, impl: Implementation, config: Config, where: Placement
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`plain` on each device's part, for concrete arrays and for tracers: JAX differentiates and batches shard_map."""
    compute = _skip_absent(plain(call, impl, config), call)
    split = partitioned.by_shard_map(compute, call, Preference(call.op.name, impl.name, config), where)

    def traced(*arrays: Any) -> Any:
        return split(*(x for x in arrays if x is not None))

    return _on_own_mesh(jax.jit(split), where), traced


def _on_own_mesh(fn: Callable[..., Any], split: bool | Placement) -> Callable[..., Any]:
    """`fn` of the present operands: concrete arrays say themselves what mesh they are on, whichever is active."""
    own = split.mesh.abstract_mesh if isinstance(split, Placement) and isinstance(split.mesh, Mesh) else None

    def eager(*arrays: Any) -> Any:
        present = (x for x in arrays if x is not None)
        if own is None:
            return fn(*present)
        with jax.sharding.use_abstract_mesh(own):
            return fn(*present)

    return eager


def _varying(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, its results marked as varying over the mesh axes that its operands vary over.

    A Mosaic GPU kernel forgets those axes, whatever its out_type says, and a gradient must have its operand's.
    """

    def marked(*arrays: Any) -> Any:
        (like, *_) = vary_alike(tuple(x for x in arrays if x is not None))
        return jax.tree.map(lambda x: vary_like(x, like), fn(*arrays))

    return marked


def _skip_absent(fn: Callable[..., Any], call: Call) -> Callable[..., Any]:
    """custom_vmap and what partitions take arrays only, so absent operands are left out and put back here."""

    def present_only(*present: Any) -> Any:
        return fn(*_restore(present, call))

    return present_only


def _restore(present: Any, call: Call) -> tuple[Any, ...]:
    given = iter(present)
    return tuple(None if x is None else next(given) for x in call.args)


def _batched(fn: Callable[..., Any], call: Call, prefer: Preference) -> Callable[..., Any]:
    op = call.op
    wrapped = custom_vmap(fn)

    @wrapped.def_vmap
    def rule(axis_size: int, batched: list[bool], *present: Any) -> tuple[Any, Any]:
        if op.batch is not None:
            full_batched = tuple(bool(b) for b in _restore_flags(batched, call))
            out = op.batch(op, axis_size, full_batched, _restore(present, call), dict(call.params), prefer)
        else:
            # No rule of its own: one element after another, which is right for any op.
            mapped = [x for x, b in zip(present, batched, strict=True) if b]

            def one(slices: list[Any]) -> Any:
                inner = iter(slices)
                return fn(*(next(inner) if b else x for x, b in zip(present, batched, strict=True)))

            out = jax.lax.map(one, mapped)
        return out, jax.tree.map(lambda _: True, out)

    return wrapped


def _restore_flags(flags: list[bool], call: Call) -> tuple[bool, ...]:
    given = iter(flags)
    return tuple(False if x is None else next(given) for x in call.args)


def _differentiable(
    eager: Callable[..., Any], call: Call, prefer_forward: Prefer, prefer_backward: Prefer
) -> Callable[..., Any]:
    op = call.op
    params = dict(call.params)
    gradient = op.gradient or _reference_gradient(call)

    @jax.custom_vjp
    def differentiable(*arrays: Any) -> Any:
        return eager(*arrays)

    def forward(*arrays: Any) -> tuple[Any, Any]:
        return gradient.forward(op, arrays, params, prefer_forward)

    def backward(residuals: Any, cotangent: Any) -> tuple[Any, ...]:
        return gradient.backward(residuals, cotangent, params, prefer_backward)

    differentiable.defvjp(forward, backward)
    return differentiable


def _reference_gradient(call: Call) -> Gradient:
    """For an op that brings no gradient: differentiate its reference."""

    def forward(op: Any, arrays: tuple[Any, ...], params: dict[str, Any], prefer: Prefer) -> tuple[Any, Any]:
        return op.run(arrays, params, prefer=prefer), arrays

    def backward(arrays: Any, cotangent: Any, params: dict[str, Any], prefer: Prefer) -> tuple[Any, ...]:
        _, pull = jax.vjp(lambda *xs: call.op.reference(*xs, **call.specified), *arrays)
        return pull(cotangent)

    return Gradient(forward, backward)
