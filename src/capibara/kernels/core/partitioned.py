"""How a kernel is split over a mesh: by a hook into XLA's partitioner, or, on TPU, by shard_map.

XLA cannot split what it cannot see into. On CPU and GPU `custom_partitioning` tells it how, whatever layout it chose.
TPU's compiler has no such hook (it fails with "Custom emitter for CustomSPMDPartitioning not found"), so there the
kernel is put in a shard_map whose layout is known before XLA runs: from `capibara.kernels.core.placement`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax._src.config import trace_context  # every setting of jax that a trace hangs on
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from capibara.kernels.core import naming
from capibara.kernels.core.placement import Placement, Split
from capibara.kernels.core.spec import Call, Preference
from capibara.kernels.core.varying import vary_like

Terms = list[list[tuple[str, ...]]]  # the factors of each axis of each array


def by_partitioner(fn: Callable[..., Any], call: Call, prefer: Preference) -> Callable[..., Any]:
    """`fn` of the present operands, split as XLA's partitioner lays them out."""
    read = _MeshRule.of(fn, call)

    def unnamed(*arrays: Any) -> Any:
        with set_xla_metadata(**{naming.ATTRIBUTE: None}):  # the call alone has the name, and not what it is made of
            return fn(*arrays)

    # Asked when a call is first made: one that was made before a cache was set up has no name, and is not found there.
    names = naming.wanted()
    wrapped = custom_partitioning(unnamed if names else fn)

    def partition(mesh: Any, arg_shapes: Any, result_shape: Any) -> Any:
        leaves, tree = jax.tree.flatten(result_shape)
        split = read.wished(mesh, (arg_shapes, leaves))
        arg_shardings, out_shardings = (
            [NamedSharding(mesh, spec) for spec in _specs(side, split)] for side in (read.operands, read.results)
        )
        return mesh, read.local(call, split, prefer), jax.tree.unflatten(tree, out_shardings), tuple(arg_shardings)

    wrapped.def_partition(
        partition=partition,
        sharding_rule=read.rule,
        reduction_factors=read.reduced,
        need_replication_factors=read.whole,
        **read.sizes,
    )
    if not names:
        return wrapped

    @functools.lru_cache(maxsize=16)
    def name_under(settings: Any) -> str | None:
        del settings  # of the key alone: a trace is another one under others
        return naming.program_name(fn, call, prefer)

    def named(*arrays: Any) -> Any:
        name = name_under(trace_context()) if naming.wanted() else None
        if name is None:
            return wrapped(*arrays)
        with set_xla_metadata(**{naming.ATTRIBUTE: name}):
            return wrapped(*arrays)

    return named


def by_shard_map(fn: Callable[..., Any], call: Call, prefer: Preference, placement: Placement) -> Callable[..., Any]:
    """`fn` of the present operands, split as `placement` says they lie."""
    read = _MeshRule.of(fn, call)
    present = [x for x in call.args if x is not None]
    split = placement.split(call, read.operands, read.whole, read.sizes)
    in_specs = tuple(_specs(read.operands, split))
    tree = jax.tree.structure(jax.eval_shape(fn, *present))
    out_specs = jax.tree.unflatten(tree, _specs(read.results, split))
    # A kernel's results are not typed by the axes they vary over, and what is summed is summed by `local`.
    mesh = placement.mesh
    mapped = jax.shard_map(
        read.local(call, split, prefer),
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        # A shard_map around this one has taken the others.
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
        check_vma=False,
    )

    def laid_out(*arrays: Any) -> Any:
        if AxisType.Explicit in mesh.axis_types:
            # Where layouts are types, shard_map takes no other than its own.
            specs = (_on_explicit(spec, mesh) for spec in in_specs)
            arrays = tuple(
                jax.sharding.reshard(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)
            )
        # The inner shard_map does not know over what the outer one's arrays vary.
        return jax.tree.map(lambda made: vary_like(made, arrays[0]), mapped(*arrays))

    return laid_out


def _on_explicit(spec: PartitionSpec, mesh: Any) -> PartitionSpec:
    """The part of a spec that is on axes of type Explicit: the others are in no array's type."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    entries = (entry if isinstance(entry, tuple) else (entry,) for entry in spec)
    return PartitionSpec(*(tuple(a for a in entry if kinds.get(a) == AxisType.Explicit) or None for entry in entries))


def _specs(terms: Terms, split: Split) -> list[PartitionSpec]:
    return [PartitionSpec(*(split.get(axis[0]) for axis in term)) for term in terms]


@dataclasses.dataclass(frozen=True)
class _MeshRule:
    """An op's mesh rule, read for one call."""

    rule: str
    operands: Terms
    results: Terms
    whole: tuple[str, ...]
    """Factors that no device may hold a part of."""
    reduced: tuple[str, ...]
    """Factors that are summed away."""
    sizes: Mapping[str, int]

    @staticmethod
    def of(fn: Callable[..., Any], call: Call) -> _MeshRule:
        operands: Terms
        results: Terms
        given = call.op.partition
        if given is None:
            # Without a rule every device computes the whole: each dimension is a factor that must not be split.
            present = [x for x in call.args if x is not None]
            names = [[f"d{i}_{j}" for j in range(len(x.shape))] for i, x in enumerate(present)]
            shapes = jax.eval_shape(fn, *present)
            outs = [[f"o{i}_{j}" for j in range(len(x.shape))] for i, x in enumerate(jax.tree.leaves(shapes))]
            rule = ", ".join(map(" ".join, names)) + " -> " + ", ".join(map(" ".join, outs))
            every = tuple(factor for group in (*names, *outs) for factor in group)
            operands, results = [[(f,) for f in term] for term in names], [[(f,) for f in term] for term in outs]
            return _MeshRule(rule, operands, results, every, (), {})
        rule = given.rule(call)
        operands, results = given.factors(call)
        named = {f for side in (operands, results) for term in side for axis in term for f in axis}
        # A factor that a result keeps is not summed away by this call, though other calls of the op do.
        kept = {f for term in results for axis in term for f in axis}
        # The partitioner wants special factors in the order in which the rule first names them.
        order = rule.replace("->", " ").translate(str.maketrans("(),", "   ")).split()
        whole = sorted((f for f in given.replicated(call) if f in named), key=order.index)
        reduced = sorted((f for f in given.reduced if f not in kept), key=order.index)
        return _MeshRule(rule, operands, results, tuple(whole), tuple(reduced), dict(given.sizes(call)))

    def local(self, call: Call, split: Split, prefer: Preference) -> Callable[..., Any]:
        """What one device does with its shards."""
        op, params = call.op, dict(call.params)
        axes = tuple(dict.fromkeys(a for factor in self.reduced for a in split.get(factor, ())))

        def one_device(*shards: Any) -> Any:
            given = iter(shards)
            full = tuple(None if x is None else next(given) for x in call.args)
            if op.partition is not None and op.partition.local is not None:
                return op.partition.local(op, full, params, split, prefer)
            if axes and op.partition is not None and op.partition.combine is not None:
                return op.partition.combine(op, full, params, axes, prefer)
            return op.run(full, params, prefer=prefer, local=True)

        return one_device

    def wished(self, mesh: Any, shapes: Any) -> Split:
        """Each factor that is split over the mesh, with the mesh axes that split it: one choice for all arrays.

        What the partitioner proposes need not agree between the arrays, nor spare the factors that must be whole.
        Wishes are granted in order, the outputs' first: a factor is split by the first that asks, if its length
        divides and no other factor has that mesh axis. An axis made of several factors is split along its first.
        """
        found: dict[str, tuple[str, ...]] = {}
        taken: set[str] = set()
        for terms, arrays in ((self.results, shapes[1]), (self.operands, shapes[0])):
            for term, array in zip(terms, arrays, strict=True):
                # XLA may hand over a layout that has no names of mesh axes, as it does where no operand is placed on
                # the mesh in force: nothing is wished then.
                spec = getattr(array.sharding, "spec", ())
                for axis, entry, length in zip(term, spec, array.shape, strict=False):
                    named = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
                    if not named or axis[0] in self.whole or axis[0] in found or taken & set(named):
                        continue
                    # The first factor's length is what the others leave of the axis.
                    factor = length // math.prod(self.sizes[f] for f in axis[1:])
                    if factor % math.prod(mesh.shape[name] for name in named) == 0:
                        found[axis[0]] = named
                        taken |= set(named)
        return found
