"""What a planner has to know of a program: which dimensions of its arguments go together, and what each is for."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

__all__ = ["Anatomy", "Leaf", "anatomy"]

# More experts than this in one layer: it is a vocabulary or a feature dimension.
_MOST_EXPERTS = 512


@dataclass(frozen=True)
class Leaf:
    """One flat argument."""

    name: str
    role: str
    shape: tuple[int, ...]
    itemsize: int
    groups: tuple[int, ...]
    """For each dimension, the group of dimensions that are laid out alike."""

    @functools.cached_property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class Anatomy:
    """The flat arguments of a program and what their dimensions are for."""

    leaves: tuple[Leaf, ...]
    layers: frozenset[int] = frozenset()
    """Groups that a scan runs along."""
    names: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))
    """Group -> a word for it: its logical axis where the program names one."""
    logical: Mapping[int, frozenset[str]] = field(default_factory=lambda: MappingProxyType({}))
    """Group -> logical axes that the program itself calls it by."""
    parts: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    """Group -> into how many equal parts it can be cut, where the program's inside allows fewer than the arguments."""

    def of_role(self, *roles: str) -> list[Leaf]:
        return [leaf for leaf in self.leaves if leaf.role in roles]

    @functools.cached_property
    def batch(self) -> frozenset[int]:
        """Groups of the rows of the batch."""
        return frozenset(leaf.groups[0] for leaf in self.of_role("batch") if leaf.groups)

    @functools.cached_property
    def sequence(self) -> frozenset[int]:
        """Groups of the second dimension of the batch, where no parameter has it (that would be features)."""
        held = {group for leaf in self.of_role("params") for group in leaf.groups}
        found = {leaf.groups[1] for leaf in self.of_role("batch") if len(leaf.groups) > 1}
        return frozenset(found - held - self.batch)

    @functools.cached_property
    def experts(self) -> frozenset[int]:
        """Groups that the program calls "expert", or that lead two or more stacks of matrices and nothing else.

        Heads lead the output projection too, but they come after the features in the input projections.
        """
        named = {group for group, words in self.logical.items() if "expert" in words}
        first: Counter[int] = Counter()
        elsewhere: set[int] = set()
        for leaf in self.of_role("params"):
            inner = [group for group in leaf.groups if group not in self.layers]
            if len(inner) >= 3:
                first[inner[0]] += 1
                elsewhere.update(inner[1:])
        sizes = self.sizes
        found = {group for group, times in first.items() if times >= 2 and sizes[group] <= _MOST_EXPERTS}
        return frozenset(named | (found - elsewhere - self.batch - self.sequence))

    @functools.cached_property
    def sizes(self) -> dict[int, int]:
        """Into how many parts each group can be cut: what divides every dimension of it."""
        found: dict[int, int] = {}
        for leaf in self.leaves:
            for group, size in zip(leaf.groups, leaf.shape, strict=True):
                found[group] = math.gcd(found.get(group, 0), size)
        return {group: math.gcd(size, self.parts.get(group, 0)) for group, size in found.items()}

    @functools.cached_property
    def model(self) -> tuple[int, ...]:
        """Groups that a model axis may cut: those of `colours`."""
        return tuple(sorted(group for colour in self.colours for group in colour))

    @functools.cached_property
    def _matrices(self) -> list[list[int]]:
        """The groups of each matrix of the parameters, without layers, experts and the batch's own."""
        out = self.layers | self.experts | self.batch | self.sequence
        inner = [[group for group in leaf.groups if group not in self.layers] for leaf in self.of_role("params")]
        return [[g for g in groups if g not in out and self.sizes[g] > 1] for groups in inner if len(groups) >= 2]

    @functools.cached_property
    def hub(self) -> int | None:
        """The group that most matrices share: the features that flow along the residual stream."""
        counts = Counter(group for groups in self._matrices for group in set(groups))
        return min(counts, key=lambda group: (-counts[group], group)) if counts else None

    def word(self, group: int) -> str:
        """A word for a group."""
        if group == self.hub and group not in self.logical:
            return "hidden"
        return self.names.get(group) or f"dimension of {self.sizes.get(group, 0)}"

    @functools.cached_property
    def colours(self) -> tuple[tuple[int, ...], ...]:
        """Two sets of groups such that a matrix has one dimension in each, as far as that is possible.

        Cutting one of the sets is tensor parallelism as it is usually written: a matrix cut by columns, then one by
        rows. The set without the hub comes first.
        """
        if self.hub is None:
            return ()
        colour: dict[int, int] = {}
        for start, side in [(self.hub, 1), *((group, 0) for groups in self._matrices for group in groups)]:
            pending = [] if start in colour else [start]
            colour.setdefault(start, side)
            while pending:
                here = pending.pop(0)
                for other in self._met(here):
                    if other not in colour:
                        colour[other] = 1 - colour[here]
                        pending.append(other)
        sets = [self._leading({g for g, c in colour.items() if c == side}) for side in (0, 1)]
        return tuple(one for one in sets if one)

    def _leading(self, groups: set[int]) -> tuple[int, ...]:
        """Those of the groups that some matrix has before the others: heads, and not the features of one head."""
        first = [[group for group in matrix if group in groups][:1] for matrix in self._matrices]
        return tuple(sorted({group for one in first for group in one}))

    def _met(self, group: int) -> list[int]:
        """Groups that share a matrix with this one."""
        return sorted({other for matrix in self._matrices if group in matrix for other in matrix} - {group})


def anatomy(program: Any, roles: Sequence[str]) -> Anatomy:
    """The anatomy of a traced program (`capibara.program.trace`)."""
    import numpy as np

    groups = program.groups
    leaves = tuple(
        Leaf(argument.path, role, argument.shape, _itemsize(np, argument.dtype), groups.of[number])
        for number, (argument, role) in enumerate(zip(program.arguments, roles, strict=True))
    )
    return Anatomy(
        leaves,
        layers=frozenset(group.id for group in groups if group.stacked and "params" in group.roles),
        names=MappingProxyType({group.id: _word(group, program) for group in groups}),
        logical=MappingProxyType({group.id: frozenset(group.names) for group in groups if group.names}),
        parts=MappingProxyType({group.id: group.parts for group in groups}),
    )


def _word(group: Any, program: Any) -> str:
    if group.names:
        return str(group.names[0])
    if group.looked_up:
        return "vocab"
    argument, dimension = min(group.members)
    return f"{program.arguments[argument].path}[{dimension}]"


def _itemsize(np: Any, dtype: str) -> int:
    import jax.numpy as jnp

    return int(np.dtype(jnp.dtype(dtype)).itemsize)
