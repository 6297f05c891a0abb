"""What each argument of a program is, by what the program does with it.

- A random key flows into jax's random primitives. Keys and scalars have no rows and no weights: "other".
- The rows of the batch are the leading dimension that passes through the products and is never summed over by one
  going forward; what has it in front is the batch, and so is what the program shuffles by a random key.
- In a training step, what comes back updated is carried from step to step: where gradients are computed from it, it is
  the parameters, and where they are not, the optimizer's state.
- Tokens are integers of two or more dimensions that are looked up in a table of weights. Labels are not (they pick
  from scores, which depend on the batch), nor are images; then a step has examples.

What none of this settles is assumed, and said to be: an integer array is data, a float array is a weight (or a
constant, in a training step that does not update it).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capibara.program.graph import Body, Node, Program

__all__ = ["Findings", "argument_roles", "is_key", "token_arrays"]

_RANDOM = frozenset(
    ("random_wrap", "random_bits", "random_split", "random_fold_in", "random_unwrap", "random_clone", "threefry2x32")
)
_MOVES = frozenset(
    ("reshape", "squeeze", "expand_dims", "transpose", "convert_element_type", "copy", "slice", "dynamic_slice")
)


@dataclass(frozen=True)
class Findings:
    """The role of each argument, why, and what of it is assumed."""

    roles: tuple[str, ...]
    why: tuple[str, ...]
    """Of each argument, in words."""
    assumed: tuple[int, ...]
    """Arguments of which the program does not tell."""
    other: frozenset[int]
    """Flat arguments that are no rows though their argument is the batch: keys among the data."""
    names: tuple[str, ...]
    """What the function calls them."""
    rows: int | None
    """How many rows pass through the products; None where none were found."""

    def note(self) -> str:
        """A line for the report: every role, and what is assumed."""
        told = ", ".join(
            f"{name}: {role} ({why})" for name, role, why in zip(self.names, self.roles, self.why, strict=True)
        )
        line = f"roles of the arguments, by what the program does with them: {told}"
        if self.assumed:
            line += f"; assumed of {', '.join(self.names[number] for number in self.assumed)}"
        return f"{line}; `roles` of plan() or of what shapes() returns overrides them"


def is_key(leaf: Any) -> bool:
    """Whether an array is of jax's type for random keys."""
    import jax
    import jax.numpy as jnp

    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def argument_roles(fn: Callable[..., Any], args: Sequence[Any], donate: Sequence[int] = ()) -> Findings:
    """The role of each argument of `fn(*args)`; it is traced once."""
    import jax

    from capibara.program.tracing import trace

    program = trace(fn, args, donate=donate)
    flow = _Flow.of(program, [is_key(leaf) for leaf in jax.tree.leaves(tuple(args))])
    counts = [len(jax.tree.leaves(one)) for one in args]
    starts = [sum(counts[:number]) for number in range(len(counts))]
    leaves = [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
    rows = _rows(program, flow)
    decided = [_role(program, flow, list(own), rows) for own in leaves]
    names = tuple(_name(program, own, number) for number, own in enumerate(leaves))
    return Findings(
        tuple(role for role, _, _ in decided),
        tuple(why for _, why, _ in decided),
        tuple(number for number, (_, _, assumed) in enumerate(decided) if assumed),
        frozenset(flow.keys),
        names,
        next((program.arguments[n].shape[0] for n, place in flow.leading.items() if place == rows), None),
    )


def token_arrays(
    fn: Callable[..., Any], args: Sequence[Any], roles: Sequence[str]
) -> list[tuple[str, tuple[int, ...]]]:
    """Path and shape of each array of tokens among the batch; those that belong to the same tokens are there once."""
    from capibara.program.groups import ties_of
    from capibara.program.tracing import trace

    program = trace(fn, args, roles=roles)
    flow = _Flow.of(program, [False] * len(program.arguments))
    ties = ties_of(program)
    found: dict[Any, tuple[str, tuple[int, ...]]] = {}
    for number in sorted(flow.looked_up):
        one = program.arguments[number]
        if one.role == "batch" and len(one.shape) > 1 and _is_integer(one.dtype):
            # Positions and segments are added to the tokens' own rows, and so share their dimensions.
            place = tuple(ties.find(one.value, dim) for dim in range(len(one.shape)))
            found.setdefault(place, (one.path, one.shape))
    return list(found.values())


def _is_integer(dtype: str) -> bool:
    return dtype.startswith(("int", "uint"))


def _name(program: Program, own: range, number: int) -> str:
    if not own:
        return f"argument {number}"
    path = program.arguments[own[0]].path
    return path.split("[")[0].split(".")[0] or f"argument {number}"


def _role(program: Program, flow: _Flow, own: list[int], rows: int | None) -> tuple[str, str, bool]:
    """Role, why, and whether it is assumed."""
    arrays = [n for n in own if program.arguments[n].shape and n not in flow.keys]
    if not arrays:
        kinds = {"a random key" if n in flow.keys else "a scalar" for n in own}
        return "other", " and ".join(sorted(kinds)) or "empty", False
    if not any(flow.read(program, n) for n in arrays):
        return "other", "nothing reads it", False
    # What a training step updates is not its data, whatever its dimensions are tied to.
    own_rows = [n for n in arrays if not (flow.trains and n in flow.kept_back)]
    if rows is not None and any(flow.leading.get(n) == rows for n in own_rows):
        return "batch", "it has the rows that pass through the products", False
    if rows is not None and any(rows in flow.places.get(n, ()) for n in own_rows):
        return "other", "it has the rows, but not as its first dimension, and so stays whole", True
    if any(n in flow.shuffled for n in arrays):
        return "batch", "its rows are shuffled by a random key", False
    whole = all(_is_integer(program.arguments[n].dtype) or program.arguments[n].dtype == "bool" for n in arrays)
    if flow.trains:
        floats = [n for n in arrays if not _is_integer(program.arguments[n].dtype)]
        if floats and (all(n in flow.kept_back for n in floats) or flow.returned(program, own)):
            if any(n in flow.differentiated for n in floats):
                return "params", "gradients are computed from it and it comes back updated", False
            return "state", "it comes back updated and no gradient is computed from it", False
        if whole:
            return "batch", "integers that are not updated are taken for data", True
        if rows is None or any(_is_integer(program.arguments[n].dtype) for n in arrays):
            return "batch", "what is not updated is taken for data", True
        if any(n in flow.summed for n in arrays):
            return "params", "products with the rows sum over a dimension of it", False
        return "other", "neither updated nor rows: taken for a constant", True
    if whole:
        return "batch", "integers are taken for data", True
    if rows is not None:
        return "params", "floats that the rows meet", False
    return "params", "floats are taken for weights", True


@dataclass
class _Flow:
    """Which flat arguments (as bits) each value depends on, and what that says of them."""

    keys: set[int] = field(default_factory=set)
    shuffled: set[int] = field(default_factory=set)
    looked_up: set[int] = field(default_factory=set)
    """Arguments that are indices into a table which does not depend on the batch."""
    differentiated: set[int] = field(default_factory=set)
    kept_back: set[int] = field(default_factory=set)
    """Arguments that come back, element by element, in an output of their shape and type."""
    leading: dict[int, int] = field(default_factory=dict)
    """Argument -> the set of dimensions that its first one is tied to."""
    places: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """The same of all its dimensions."""
    summed: set[int] = field(default_factory=set)
    """Arguments with a dimension that a forward product sums over."""
    trains: bool = False
    used: set[int] = field(default_factory=set)
    by_gradient: set[int] = field(default_factory=set)
    """Values that a backward node goes into."""
    compared: set[int] = field(default_factory=set)
    """Values that hold where integers are equal: rows of zeros and a one."""
    depends: dict[int, int] = field(default_factory=dict)
    direct: dict[int, int] = field(default_factory=dict)
    free: int = 0
    """Bits of the keys and scalars."""
    batch: int = 0
    """Bits of what is known to be the batch."""

    @classmethod
    def of(cls, program: Program, typed_keys: Sequence[bool]) -> _Flow:
        self = cls()
        for number, one in enumerate(program.arguments):
            self.depends[one.value] = self.direct[one.value] = 1 << number
            if typed_keys[number]:
                self.keys.add(number)
        # Keys first: whether a lookup is a shuffle depends on them.
        self._keys(program.nodes, {one.value: n for n, one in enumerate(program.arguments)})
        scalars = sum(1 << n for n, one in enumerate(program.arguments) if not one.shape)
        self.free = scalars | sum(1 << n for n in self.keys)
        self.batch = sum(1 << n for n, one in enumerate(program.arguments) if one.role == "batch")
        self._walk(program.nodes, program)
        wanted: dict[tuple[tuple[int, ...], str], int] = {}
        for value in program.outputs:
            kind = (program.values[value].shape, program.values[value].dtype)
            wanted[kind] = wanted.get(kind, 0) | self.direct.get(value, 0)
        for number, one in enumerate(program.arguments):
            if wanted.get((one.shape, one.dtype), 0) >> number & 1 or one.donated:
                self.kept_back.add(number)
        return self

    def read(self, program: Program, number: int) -> bool:
        value = program.arguments[number].value
        return program.uses.get(value, 0) > 0 or value in self.used

    def returned(self, program: Program, own: Sequence[int]) -> bool:
        """Whether outputs in a row, all made from gradients, are like these arguments: a function that returns them."""
        like = [(program.arguments[n].shape, program.arguments[n].dtype) for n in own]
        made = [(program.values[v].shape, program.values[v].dtype) for v in program.outputs]
        for start in range(len(made) - len(like) + 1):
            run = program.outputs[start : start + len(like)]
            if made[start : start + len(like)] == like and all(value in self.by_gradient for value in run):
                return True
        return False

    def _keys(self, nodes: Sequence[Node], forms: dict[int, int]) -> None:
        """Follow each argument through what only moves it, into the random primitives."""
        for node in nodes:
            if node.body is not None:
                for outer, inner in _entries(node.body):
                    if outer in forms:
                        forms[inner] = forms[outer]
                self._keys(node.body.nodes, forms)
                continue
            if node.primitive in _RANDOM:
                words = 2 if node.primitive == "threefry2x32" else 1  # the rest is what is counted or folded in
                self.keys.update(forms[value] for value in node.inputs[:words] if value in forms)
            if node.primitive in _MOVES and node.inputs and node.inputs[0] in forms:
                forms.update(dict.fromkeys(node.outputs, forms[node.inputs[0]]))

    def _walk(self, nodes: Sequence[Node], program: Program) -> None:
        for node in nodes:
            body = node.body
            if body is not None:
                for outer, inner in _entries(body):
                    self._same(outer, inner)
                    self.used.add(outer)
                self._walk(body.nodes, program)
                for inner, outer in _exits(body):
                    self._same(inner, outer)
                continue
            depends = 0
            for value in node.inputs:
                depends |= self.depends.get(value, 0)
            self.trains |= node.backward and node.matrix
            by_gradient = node.backward or any(value in self.by_gradient for value in node.inputs)
            if node.backward:
                self._bits(depends, self.differentiated)
            self._lookups(node, program)
            for value in node.outputs:
                self.depends[value] = depends
                self.direct[value] = self._directly(node, value, program)
                if by_gradient:
                    self.by_gradient.add(value)
                if node.primitive == "eq" or (not node.matrix and self.compared.intersection(node.inputs)):
                    self.compared.add(value)

    def _same(self, source: int, target: int) -> None:
        self.depends[target] = self.depends.get(target, 0) | self.depends.get(source, 0)
        self.direct[target] = self.direct.get(target, 0) | self.direct.get(source, 0)
        for known in (self.by_gradient, self.compared):
            if source in known:
                known.add(target)

    def _directly(self, node: Node, value: int, program: Program) -> int:
        """Arguments that reach a value element by element."""
        if node.matrix or node.primitive in ("gather", "sort"):
            return 0
        new = program.values[value].shape
        found = 0
        for one in node.inputs:
            old = program.values[one].shape
            if old == new or (node.primitive in _MOVES and math.prod(old) == math.prod(new)):
                found |= self.direct.get(one, 0)
        return found

    def _lookups(self, node: Node, program: Program) -> None:
        if node.primitive == "gather" and len(node.inputs) > 1 and not node.backward:
            table, index = self.depends.get(node.inputs[0], 0), self.depends.get(node.inputs[1], 0)
            if index and not index & ~self.free:
                # Rows in an order that only a key knows.
                moved = self.direct.get(node.inputs[0], 0)
                self._bits(moved, self.shuffled)
            elif table and not table & self.batch:
                self._bits(index & ~table & ~self.free, self.looked_up)
        elif node.matrix and len(node.inputs) == 2 and not node.backward:
            # One of two operands compares integers, and the other has no batch: a lookup written as a product.
            for value, other in (node.inputs, node.inputs[::-1]):
                one, table = self.depends.get(value, 0), self.depends.get(other, 0)
                if value in self.compared and table and not table & self.batch and self._integers(one, program):
                    self._bits(one, self.looked_up)

    def _integers(self, bits: int, program: Program) -> bool:
        found: set[int] = set()
        self._bits(bits, found)
        return all(_is_integer(program.arguments[n].dtype) for n in found)

    @staticmethod
    def _bits(bits: int, into: set[int]) -> None:
        while bits:
            low = bits & -bits
            into.add(low.bit_length() - 1)
            bits ^= low


def _entries(body: Body) -> Iterator[tuple[int, int]]:
    yield from ((start, inner) for start, inner, _, _ in body.carried)
    yield from body.sliced


def _exits(body: Body) -> Iterator[tuple[int, int]]:
    yield from ((end, after) for _, _, end, after in body.carried if after >= 0)
    yield from body.stacked


def _rows(program: Program, flow: _Flow) -> int | None:
    """The leading dimension that most of the forward products carry and none of them sums over."""
    from capibara.program.groups import ties_of

    ties = ties_of(program)
    summed: set[int] = set()
    carried: dict[int, float] = {}

    def look(nodes: Sequence[Node], trips: int) -> None:
        for node in nodes:
            if node.body is not None:
                look(node.body.nodes, trips * node.body.trips)
            elif node.matrix and not node.backward:
                mine: set[int] = set()
                sides = (*node.factors.operands, *node.factors.results)
                for value, side in zip((*node.inputs, *node.outputs), sides, strict=True):
                    for dim, factor in enumerate(side):
                        if factor >= 0 and program.values[value].shape[dim] > 1:
                            place = ties.find(value, dim)
                            (summed if factor in node.factors.reduced else mine).add(place)
                for place in mine:
                    carried[place] = carried.get(place, 0.0) + trips * node.flops

    look(program.nodes, 1)
    best: dict[int, float] = {}
    for number, one in enumerate(program.arguments):
        places = flow.places[number] = tuple(
            ties.find(one.value, dim) for dim, size in enumerate(one.shape) if size > 1
        )
        if summed.intersection(places):
            flow.summed.add(number)
        if one.shape and one.shape[0] > 1 and number not in flow.keys:
            place = flow.leading[number] = ties.find(one.value, 0)
            updated = flow.trains and number in flow.kept_back
            if place in carried and place not in summed and not updated:
                best[place] = carried[place]
    return max(best, key=lambda place: (best[place], place), default=None)
