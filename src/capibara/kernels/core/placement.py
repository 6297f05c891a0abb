"""Where a call's operands lie on a mesh, as far as it can be known while a function is traced.

An array outside of jit, or on mesh axes of type Explicit, says so itself. On Auto axes XLA decides later, so the op's
factors go where the table of logical axes puts them: the batch over "data", heads over "model". If the arrays lie
otherwise XLA moves them there and the result is the same.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from capibara.axes import current_rules
from capibara.errors import say_once
from capibara.kernels.core.spec import Call

logger = logging.getLogger("capibara.kernels")

_UNSPLITTABLE = "this call cannot be split (dropout, for one, is drawn by the place in the whole batch)"
_NO_FACTOR = (
    "no factor that may be split goes on one of them and divides. Name the axes as in the table of logical axes (data, "
    "model, ...), or give another table with capibara.mesh.use_rules"
)

Split = Mapping[str, tuple[str, ...]]
"""Factor -> the mesh axes that split it."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh, what is known of each present operand's layout on it, and the table for what is not."""

    mesh: Any
    specs: tuple[PartitionSpec, ...]
    free: tuple[str, ...]
    """Mesh axes whose use is not known: those of type Auto, inside of jit."""
    rules: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def explicit(self) -> bool:
        """Whether the operands' types say how they lie."""
        return AxisType.Explicit in self.mesh.axis_types

    def split(
        self, call: Call, operands: Sequence[Sequence[tuple[str, ...]]], whole: Sequence[str], sizes: Mapping[str, int]
    ) -> Split:
        """One choice of mesh axes for each factor: what the operands have, then what the table says."""
        lengths: dict[str, int] = {}
        wishes: list[tuple[str, tuple[str, ...]]] = []
        present = [x for x in call.args if x is not None]
        for term, x, spec in zip(operands, present, self.specs, strict=True):
            for axis, entry, length in zip(term, (*spec, *(None,) * len(term)), x.shape, strict=False):
                # An axis made of several factors is split along its first, whose length is what the others leave.
                lengths.setdefault(axis[0], length // math.prod(sizes[f] for f in axis[1:]))
                wishes.append((axis[0], entry if isinstance(entry, tuple) else () if entry is None else (entry,)))
        table, free = dict(self.rules), set(self.free)
        for factor, logical in (call.op.partition.logical if call.op.partition is not None else {}).items():
            wishes.append((factor, tuple(a for a in table.get(logical, ()) if a in free)))
        found: dict[str, tuple[str, ...]] = {}
        taken: set[str] = set()
        for factor, axes in wishes:
            if not axes or factor in whole or factor in found or factor not in lengths or taken & set(axes):
                continue
            if lengths[factor] % math.prod(self.mesh.shape[a] for a in axes) == 0:
                found[factor] = axes
                taken |= set(axes)
        if not found:
            axes = tuple(a for a in self.mesh.axis_names if a not in self.mesh.manual_axes)
            text = "%s runs whole on every device of a mesh with axes %s: %s"
            why = _UNSPLITTABLE if all(f in whole for f in lengths) else _NO_FACTOR
            say_once(logger, (call.op.name, axes, why), text, call.op.name, ", ".join(axes), why)
        return found


def placement(arrays: Sequence[Any]) -> Placement | None:
    """Where these operands lie on the mesh axes that no shard_map has taken; None where those are of one device."""
    present = [x for x in arrays if x is not None]
    if not any(isinstance(x, jax.core.Tracer) for x in present):
        laid_out = [getattr(x, "sharding", None) for x in present]
        meshes = [s.mesh for s in laid_out if isinstance(s, NamedSharding) and s.mesh.size > 1]
        if not meshes:
            return None
        # An array on one device or on another mesh, beside those on this one, is brought here whole.
        mesh = meshes[0]
        specs = tuple(s.spec if isinstance(s, NamedSharding) and s.mesh == mesh else PartitionSpec() for s in laid_out)
        return Placement(mesh, specs, (), ())
    types = [jax.typeof(x).sharding for x in present]
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        mesh = next((s.mesh for s in types if not s.mesh.empty), mesh)
    if all(mesh.shape[a] == 1 for a in mesh.axis_names if a not in mesh.manual_axes):
        return None
    specs = tuple(s.spec if not s.mesh.empty else PartitionSpec() for s in types)
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    free = tuple(name for name, kind in kinds if kind == AxisType.Auto)
    table = ((k, v if isinstance(v, tuple) else () if v is None else (v,)) for k, v in current_rules().items())
    return Placement(mesh, specs, free, tuple(table))


def on_explicit_axes(arrays: Sequence[Any]) -> bool:
    """Whether any of these operands lies on mesh axes of type Explicit: its type then says how."""
    for x in arrays:
        if x is None:
            continue
        sharding = jax.typeof(x).sharding if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types:
            return True
    return False


def needs_layout(call: Call, where: Placement | None) -> str | None:
    """Why a kernel cannot be split on this mesh: nobody can tell how the operands lie. None when it can."""
    if where is None or not where.free or (call.op.partition is not None and call.op.partition.logical):
        return None
    return (
        "on mesh axes of type Auto nothing says how these operands lie, and a kernel is split before it is compiled on "
        "a TPU and beside axes of type Explicit; call it inside shard_map, or on mesh axes of type Explicit"
    )
