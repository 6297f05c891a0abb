"""The layouts to choose from: mesh shapes, what each axis cuts, what is sharded over data, and the job's knobs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from jax.sharding import PartitionSpec

from capibara.mesh.choices import AXES, divisors, mesh_config
from capibara.mesh.layout import Layout
from capibara.plan.search.plans import bytes_in_words
from capibara.program.anatomy import Anatomy, Leaf

__all__ = ["PARAMETERS", "Point", "Space", "Unfit", "partition"]

PARAMETERS = ("replicated", "optimizer", "full")
"""What is cut over the data axis: nothing, the optimizer's state (and with it the gradients), or the parameters too."""

_WORDS = {"replicated": "replicated", "optimizer": "optimizer sharded", "full": "fully sharded"}


@dataclass(frozen=True, order=True)
class Point:
    """One choice of everything there is to choose; `Space.layout` makes a layout of it."""

    mesh: tuple[tuple[str, int], ...]
    """Axis and size, in the order of `AXES`; axes of one are left out."""
    model: tuple[int, ...] = ()
    """Groups of dimensions that the model axis cuts."""
    parameters: str = "replicated"
    choices: tuple[tuple[str, Any], ...] = ()
    offload: bool = False

    def axis(self, name: str) -> int:
        return dict(self.mesh).get(name, 1)

    def choosing(self, **changes: Any) -> Point:
        return replace(self, choices=tuple((name, changes.get(name, value)) for name, value in self.choices))


class Unfit(Exception):
    """A point that is no layout, or none for this memory; the text says why."""

    def __init__(self, reason: str, bytes: float | None = None) -> None:
        super().__init__(reason)
        self.bytes = bytes
        """What it takes of a chip at the least, where that is the reason."""


@dataclass(frozen=True)
class Space:
    """Every layout of one job on so many chips."""

    anatomy: Anatomy
    chips: int
    knobs: Mapping[str, tuple[Any, ...]]
    mesh: tuple[tuple[str, int], ...] | None = None
    """The one mesh to use, where the caller gave it."""
    memory_limit: float = math.inf
    """Bytes of a chip: what the arguments alone do not fit into is refused without a look."""
    pipelines: bool = False
    why_no_stages: str = ""
    """Why the job cannot be a pipeline; "" where it can."""
    offload: bool = True
    parameters: tuple[str, ...] = PARAMETERS
    """What may be cut over the data axis, of `PARAMETERS`."""

    # What there is.

    def meshes(self) -> list[tuple[tuple[str, int], ...]]:
        """Products of useful axes that make up the chips, most data first."""
        if self.mesh is not None:
            return [self.mesh]
        useful = [name for name in AXES if self._largest(name) > 1]
        found: list[tuple[tuple[str, int], ...]] = []
        for sizes in itertools.product(*(divisors(self.chips, self._largest(name)) for name in useful)):
            if math.prod(sizes) == self.chips:
                found.append(tuple((n, size) for n, size in zip(useful, sizes, strict=True) if size > 1))
        # Where nothing can be cut into so many, the chips still run it: each of them the whole.
        found = found or [(("data", self.chips),)]
        return sorted(found, key=lambda mesh: (len(mesh), -dict(mesh).get("data", 1), mesh))

    def _largest(self, axis: str) -> int:
        """The most that an axis can usefully have."""
        sizes = self.anatomy.sizes
        if axis == "model":
            return max((sizes[group] for group in self.anatomy.model), default=1)
        if axis == "pipeline" and (not self.pipelines or self.why_no_stages):
            return 1
        groups = {
            "data": self.anatomy.batch,
            "sequence": self.anatomy.sequence,
            "expert": self.anatomy.experts,
            "pipeline": self.anatomy.layers,
        }[axis]
        return max((sizes[group] for group in groups), default=1)

    def cuts(self, mesh: tuple[tuple[str, int], ...], everything: bool = False) -> list[tuple[int, ...]]:
        """Sets of groups for the model axis of a mesh: the usual ones, or every one there is.

        A group that the axis does not divide is left out of the usual ones. On a mesh that was given, a model axis that
        divides nothing cuts nothing.
        """
        size = dict(mesh).get("model", 1)
        if size == 1:
            return [()]
        sizes = self.anatomy.sizes
        able = [group for group in self.anatomy.model if sizes[group] % size == 0]
        if not able and self.mesh is not None:
            return [()]
        if everything:
            return [one for n in range(1, len(able) + 1) for one in itertools.combinations(able, n)]
        usual = [tuple(g for g in colour if g in able) for colour in self.anatomy.colours]
        return list(dict.fromkeys(one for one in usual if one))

    def shardings(self, mesh: tuple[tuple[str, int], ...]) -> list[str]:
        """What can be cut over the data axis of a mesh."""
        axes = dict(mesh)
        if all(axes.get(name, 1) == 1 for name in _SHARDING_AXES):
            return ["replicated"]
        return [word for word in self.parameters if word != "optimizer" or self.anatomy.of_role("state")]

    def settings(self) -> list[tuple[tuple[str, Any], ...]]:
        """Every combination of the knobs, the preferred first."""
        names = list(self.knobs)
        return [tuple(zip(names, values, strict=True)) for values in itertools.product(*self.knobs.values())]

    def points(self) -> Iterator[Point]:
        """All of it."""
        hosts = (False, True) if self.can_offload else (False,)
        for mesh in self.meshes():
            for cut, how in itertools.product(self.cuts(mesh, everything=True), self.shardings(mesh)):
                for setting, host in itertools.product(self.settings(), hosts):
                    yield Point(mesh, cut, how, setting, host)

    @property
    def can_offload(self) -> bool:
        return self.offload and any(leaf.shape for leaf in self.anatomy.of_role("state"))

    def moves(self, point: Point) -> list[Point]:
        """What differs from a point in one respect: of a knob, by one of its values."""
        found = [replace(point, parameters=word) for word in self.shardings(point.mesh)]
        for name, value in point.choices:
            at = self.knobs[name].index(value)
            near = self.knobs[name][max(0, at - 1) : at + 2]
            found += [point.choosing(**{name: other}) for other in near]
        size = point.axis("model")
        if size > 1:
            for group in self.anatomy.model:
                if self.anatomy.sizes[group] % size == 0:
                    changed = tuple(sorted({*point.model} ^ {group}))
                    found += [replace(point, model=changed)] if changed else []
        for mesh in self.meshes():
            if _near(dict(mesh), dict(point.mesh)):
                able = [g for g in point.model if self.anatomy.sizes[g] % dict(mesh).get("model", 1) == 0]
                same = tuple(able) if dict(mesh).get("model", 1) > 1 else ()
                cuts = [same] if same or "model" not in dict(mesh) else self.cuts(mesh)
                ways = self.shardings(mesh)
                how = point.parameters if point.parameters in ways else ways[-1]
                found += [replace(point, mesh=mesh, model=cut, parameters=how) for cut in cuts]
        if self.can_offload:
            found.append(replace(point, offload=not point.offload))
        return [one for one in dict.fromkeys(found) if one != point]

    # What a point means.

    def layout(self, point: Point) -> Layout:
        """The layout of a point; `Unfit` says why there is none."""
        axes = dict(point.mesh)
        stages = axes.get("pipeline", 1)
        self._check_stages(stages, point)
        self._check_batch(axes)
        accumulate = dict(point.choices).get("accumulate", 1)
        rows = math.prod(axes.get(name, 1) for name in _BATCH_AXES)
        for leaf in self.anatomy.of_role("batch"):
            if leaf.shape and accumulate > 1 and leaf.shape[0] % (rows * accumulate):
                raise Unfit(f"{leaf.shape[0]} rows do not divide over {rows} chips x {accumulate} microbatches")
        for group in self.anatomy.layers if stages > 1 else ():
            if self.anatomy.sizes.get(group, 0) % stages:
                raise Unfit(f"{self.anatomy.sizes[group]} layers do not divide into {stages} stages")
        specs = tuple(self._spec(leaf, point, axes) for leaf in self.anatomy.leaves)
        host = tuple(
            position
            for position, leaf in enumerate(self.anatomy.leaves)
            if point.offload and leaf.role == "state" and leaf.shape
        )
        held = sum(
            leaf.bytes / _shards(spec, axes)
            for position, (leaf, spec) in enumerate(zip(self.anatomy.leaves, specs, strict=True))
            if position not in host
        )
        if held > self.memory_limit:
            words = bytes_in_words(held, self.memory_limit)
            raise Unfit(f"needs {words} a chip for its arguments alone", held)
        return Layout(
            mesh=mesh_config(axes),
            specs=specs,
            rules=self._rules(point, axes),
            choices=point.choices,
            host=host,
            stages=stages,
            name=self.words(point if self._sharded(specs) else replace(point, parameters="replicated")),
        )

    def _check_stages(self, stages: int, point: Point) -> None:
        if stages == 1:
            return
        if self.why_no_stages:
            raise Unfit(f"no stages of a pipeline: {self.why_no_stages}")
        microbatches = dict(point.choices).get("accumulate", stages)
        if microbatches % stages:
            raise Unfit(f"{microbatches} microbatches do not divide over {stages} stages")

    def _sharded(self, specs: Sequence[PartitionSpec]) -> bool:
        """Whether anything is cut over the data axis: nothing is where nothing divides."""
        held = (s for leaf, s in zip(self.anatomy.leaves, specs, strict=True) if leaf.role in ("params", "state"))
        return any(name in _SHARDING_AXES for spec in held for entry in spec for name in _several(entry))

    def words(self, point: Point) -> str:
        """A point in words: "data 4 x model 8 (heads, mlp), fully sharded, remat full"."""
        parts = []
        for name, size in point.mesh or (("data", 1),):
            cut = _listed(dict.fromkeys(map(self.anatomy.word, point.model))) if name == "model" else ""
            parts.append(f"{name} {size}" + (f" ({cut})" if cut else ""))
        words = [" x ".join(parts), _WORDS[point.parameters]]
        for name, value in point.choices:
            if value != self.knobs[name][0] or name == "remat":
                piped = name == "accumulate" and point.axis("pipeline") > 1
                words.append(f"{value} microbatches in flight" if piped else f"{name} {value}")
        if point.offload:
            words.append("optimizer state on the host")
        return ", ".join(words)

    def _check_batch(self, axes: Mapping[str, int]) -> None:
        rows, sizes = math.prod(axes.get(name, 1) for name in _BATCH_AXES), self.anatomy.sizes
        for group in self.anatomy.batch:
            if sizes[group] % rows:
                raise Unfit(
                    f"{sizes[group]} rows of the batch do not divide over {rows} chips{_near_by(sizes[group], rows)}"
                )
        for group in self.anatomy.sequence:
            if sizes[group] % axes.get("sequence", 1):
                over = axes["sequence"]
                raise Unfit(
                    f"a sequence of {sizes[group]} does not divide over {over} chips{_near_by(sizes[group], over)}"
                )
        for group in self.anatomy.experts:
            if sizes[group] % axes.get("expert", 1):
                raise Unfit(f"{sizes[group]} experts do not divide over {axes['expert']} chips")

    def _spec(self, leaf: Leaf, point: Point, axes: Mapping[str, int]) -> PartitionSpec:
        entries: list[tuple[str, ...]] = [()] * len(leaf.shape)
        if leaf.role == "batch":
            for position, group in enumerate(leaf.groups):
                if position == 0 and group in self.anatomy.batch:
                    entries[position] = _present(_BATCH_AXES, axes)
                elif group in self.anatomy.sequence and ("sequence",) not in entries:
                    entries[position] = _present(("sequence",), axes)
            return partition(entries)
        if leaf.role not in ("params", "state"):
            return PartitionSpec()
        for position, group in enumerate(leaf.groups):
            if group in self.anatomy.layers and position == 0:
                entries[position] = _present(("pipeline",), axes)
            elif group in self.anatomy.experts and ("expert",) not in entries:
                entries[position] = _present(("expert",), axes)
            elif group in point.model and ("model",) not in entries and leaf.shape[position] % axes["model"] == 0:
                entries[position] = ("model",)
        if point.parameters == "full" or (point.parameters == "optimizer" and leaf.role == "state"):
            self._shard(leaf, entries, axes)
        return partition(entries)

    def _shard(self, leaf: Leaf, entries: list[tuple[str, ...]], axes: Mapping[str, int]) -> None:
        """Cut an array over the chips that hold the same part of it, along the dimension with the most left."""
        inner = [p for p, group in enumerate(leaf.groups) if group not in self.anatomy.layers]
        if len(inner) < 2:
            return  # A vector: to gather it costs a message and to keep it costs nothing.
        taken = {name for entry in entries for name in entry}
        over = tuple(name for name in _present(_SHARDING_AXES, axes) if name not in taken)
        for names in (over[start:end] for n in range(len(over), 0, -1) for start, end in [(0, n)]):
            parts = math.prod(axes[name] for name in names)
            left = {
                p: leaf.shape[p] // math.prod((axes[name] for name in entries[p]), start=1)
                for p in inner
                if leaf.shape[p] % (parts * math.prod((axes[name] for name in entries[p]), start=1)) == 0
            }
            if left:
                # A whole dimension before one that is already cut: then a gather is one run of memory.
                best = min(left, key=lambda p: (bool(entries[p]), -left[p], p))
                entries[best] = (*entries[best], *names)
                return

    def _rules(self, point: Point, axes: Mapping[str, int]) -> Mapping[str, str | tuple[str, ...] | None]:
        batch = _present(_BATCH_AXES, axes)
        model = "model" if axes.get("model", 1) > 1 else None
        hub = self.anatomy.hub
        rules: dict[str, str | tuple[str, ...] | None] = {
            "batch": batch[0] if len(batch) == 1 else batch or None,
            "sequence": "sequence" if axes.get("sequence", 1) > 1 else None,
            "expert": "expert" if axes.get("expert", 1) > 1 else None,
            "stage": "pipeline" if axes.get("pipeline", 1) > 1 else None,
            "hidden": model if hub in point.model else None,
            "heads": model,
            "mlp": model,
            "vocab": model,
        }
        # Where the program's own names meet a group, the group's layout is what the name means.
        for group, words in self.anatomy.logical.items():
            if group in self.anatomy.model:
                rules.update(dict.fromkeys(words, model if group in point.model else None))
        return MappingProxyType(rules)


_BATCH_AXES = ("data", "expert")
_SHARDING_AXES = ("data", "expert", "sequence")


# An unrolled program has a group a layer: a name says the first few.
_NAMED = 4


def _listed(names: Iterable[str]) -> str:
    found = list(names)
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return ", ".join(found[:_NAMED]) + more


def _near_by(size: int, parts: int) -> str:
    """The nearest sizes that do divide."""
    below = size // parts * parts
    return f" ({below} or {below + parts} would)" if below else f" ({parts} would)"


def _near(one: Mapping[str, int], other: Mapping[str, int]) -> bool:
    """Whether one mesh is the other with a factor moved from one axis to another."""
    return sum(one.get(name, 1) != other.get(name, 1) for name in AXES) == 2


def _present(names: Sequence[str], axes: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(name for name in names if axes.get(name, 1) > 1)


def partition(entries: Sequence[tuple[str, ...]]) -> PartitionSpec:
    """The spec with these mesh axes on each dimension, without the whole ones at its end."""
    found = [entry[0] if len(entry) == 1 else entry or None for entry in entries]
    while found and found[-1] is None:
        found.pop()
    return PartitionSpec(*found)


def _several(entry: Any) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry or ()


def _shards(spec: PartitionSpec, axes: Mapping[str, int]) -> int:
    names = [name for entry in spec for name in _several(entry)]
    return math.prod(axes.get(name, 1) for name in names)
