"""What JAX's transformations need to know of a kernel that they cannot see into.

A Pallas kernel has no derivative, and no rule to be batched or partitioned. This file wraps one with the op's own:
gradient (custom_vjp) around batching (custom_vmap) around partitioning over a mesh (custom_partitioning).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from capibara.kernels.op import Call, Config, Gradient, Implementation, Prefer, Preference


def plain(call: Call, impl: Implementation, config: Config) -> Callable[..., Any]:
    """An implementation in plain JAX: its parameters bound, nothing else."""
    extra = {} if impl.config_type is None else {"config": config}
    params = {k: v for k, v in call.params.items() if k not in call.op.hints or k in impl.hints}

    def implementation(*arrays: Any) -> Any:
        return impl.fn(*arrays, **params, **extra)

    return implementation


def kernel(
    call: Call, impl: Implementation, config: Config, *, split: bool, pinned: bool, asked_config: Config
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A kernel for concrete arrays, and the same for tracers with the op's rules around it.

    A `pinned` implementation was asked for, and its gradient keeps to it. An `asked_config` is kept by every forward
    pass that the rules make of this call: differentiated, batched, or on one device's shards.
    """
    same = Preference(call.op.name, impl.name, asked_config)
    compute = _skip_absent(_varying(plain(call, impl, config)), call)
    if split:
        compute = _partitioned(compute, call, same)
    batched = _batched(compute, call, same)
    inlined = jax.jit(batched, inline=True)

    def eager(*arrays: Any) -> Any:
        return inlined(*(x for x in arrays if x is not None))

    forward = same if pinned or asked_config is not None else None
    backward = Preference(call.op.name, impl.name) if pinned else None
    return eager, _differentiable(eager, call, forward, backward)


def vary_alike(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Inside shard_map: mark every operand as varying over the axes that any of them varies over.

    A kernel's operands must agree; doing it outside of the kernel's custom_vjp makes the cotangent of a
    replicated operand the sum over the axes, as it must be.
    """
    axes = frozenset[str]().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays if x is not None))

    def vary(x: Any) -> Any:
        if x is None:
            return None
        missing = tuple(sorted(axes - jax.typeof(x).manual_axis_type.varying))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return tuple(map(vary, arrays))


def vary_like(x: Any, like: jax.Array) -> Any:
    """`x`, marked as varying over the mesh axes that `like` varies over: what a loop starts from in shard_map."""
    missing = jax.typeof(like).manual_axis_type.varying - jax.typeof(x).manual_axis_type.varying
    return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def out_struct(shape: tuple[int, ...], dtype: Any, like: jax.Array) -> jax.ShapeDtypeStruct:
    """A kernel's output, varying over the mesh axes that its operand `like` varies over."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(like).manual_axis_type)


def _varying(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, its results marked as varying over the mesh axes that its operands vary over.

    A Mosaic GPU kernel forgets those axes, whatever its out_type says, and a gradient must have its operand's.
    """

    def marked(*arrays: Any) -> Any:
        (like, *_) = vary_alike(tuple(x for x in arrays if x is not None))
        return jax.tree.map(lambda x: vary_like(x, like), fn(*arrays))

    return marked


def _skip_absent(fn: Callable[..., Any], call: Call) -> Callable[..., Any]:
    """custom_vmap and custom_partitioning take arrays only, so absent operands are left out and put back here."""

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


def _partitioned(fn: Callable[..., Any], call: Call, prefer: Preference) -> Callable[..., Any]:
    from capibara.kernels.dispatch import run

    op = call.op
    present = [x for x in call.args if x is not None]
    wrapped = custom_partitioning(fn)
    terms: tuple[list[Any], list[Any]]  # the factors of each axis of each operand, and of each output
    if op.partition is None:
        # Without a rule every device computes the whole: each dimension is a factor that must not be split.
        names = [[f"d{i}_{j}" for j in range(len(x.shape))] for i, x in enumerate(present)]
        shapes = jax.eval_shape(fn, *present)
        outs = [[f"o{i}_{j}" for j in range(len(x.shape))] for i, x in enumerate(jax.tree.leaves(shapes))]
        rule = ", ".join(map(" ".join, names)) + " -> " + ", ".join(map(" ".join, outs))
        terms = ([[(f,) for f in term] for term in names], [[(f,) for f in term] for term in outs])
        whole = tuple(factor for group in (*names, *outs) for factor in group)
        reduced: tuple[str, ...] = ()
        sizes: dict[str, int] = {}
    else:
        rule = op.partition.rule(call)
        terms = op.partition.factors(call)
        named = {f for side in terms for term in side for axis in term for f in axis}
        whole = tuple(f for f in op.partition.replicated(call) if f in named)
        # A factor that a result keeps is not summed away by this call, though other calls of the op do.
        kept = {f for term in terms[1] for axis in term for f in axis}
        reduced = tuple(f for f in op.partition.reduced if f not in kept)
        sizes = dict(op.partition.sizes(call))

    # The partitioner wants special factors in the order in which the rule first names them.
    order = rule.replace("->", " ").translate(str.maketrans("(),", "   ")).split()
    whole, reduced = (tuple(sorted(factors, key=order.index)) for factors in (whole, reduced))

    def partition(mesh: Any, arg_shapes: Any, result_shape: Any) -> Any:
        leaves, tree = jax.tree.flatten(result_shape)
        split = _split_factors(mesh, (arg_shapes, leaves), terms, whole, sizes)

        def shardings(side: list[list[tuple[str, ...]]]) -> list[NamedSharding]:
            specs = (PartitionSpec(*(split.get(axis[0]) for axis in term)) for term in side)
            return [NamedSharding(mesh, spec) for spec in specs]

        arg_shardings = tuple(shardings(terms[0]))
        out_shardings = jax.tree.unflatten(tree, shardings(terms[1]))
        axes = tuple(dict.fromkeys(a for factor in reduced for a in split.get(factor, ())))

        def local(*shards: Any) -> Any:
            full = _restore(shards, call)
            if op.partition is not None and op.partition.local is not None:
                return op.partition.local(op, full, dict(call.params), split, prefer)
            if axes and op.partition is not None and op.partition.combine is not None:
                return op.partition.combine(op, full, dict(call.params), axes, prefer)
            return run(op, full, dict(call.params), prefer=prefer, local=True)

        return mesh, local, out_shardings, arg_shardings

    wrapped.def_partition(
        partition=partition,
        sharding_rule=rule,
        reduction_factors=reduced,
        need_replication_factors=whole,
        **sizes,
    )
    return wrapped


def _split_factors(
    mesh: Any, shapes: Any, terms: Any, whole: tuple[str, ...], sizes: dict[str, int]
) -> dict[str, tuple[str, ...]]:
    """Each factor that is split over the mesh, with the mesh axes that split it: one choice for all arrays.

    What the partitioner proposes need not agree between the arrays, nor spare the factors that must be whole. Wishes
    are granted in order, the outputs' first: a factor is split by the first that asks, if its length divides and no
    other factor has that mesh axis. An axis made of several factors is split along its first.
    """
    found: dict[str, tuple[str, ...]] = {}
    taken: set[str] = set()
    for side in (1, 0):
        for term, array in zip(terms[side], shapes[side], strict=True):
            for axis, entry, length in zip(term, array.sharding.spec, array.shape, strict=False):
                named = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
                if not named or axis[0] in whole or axis[0] in found or taken & set(named):
                    continue
                # The first factor's length is what the others leave of the axis.
                factor = length // math.prod(sizes[f] for f in axis[1:])
                if factor % math.prod(mesh.shape[name] for name in named) == 0:
                    found[axis[0]] = named
                    taken |= set(named)
    return found


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
        from capibara.kernels.dispatch import run

        return run(op, arrays, params, prefer=prefer), arrays

    def backward(arrays: Any, cotangent: Any, params: dict[str, Any], prefer: Prefer) -> tuple[Any, ...]:
        _, pull = jax.vjp(lambda *xs: call.op.reference(*xs, **call.specified), *arrays)
        return pull(cotangent)

    return Gradient(forward, backward)
