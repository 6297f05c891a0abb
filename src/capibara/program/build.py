"""From jax's own form of a traced function to nodes: calls are opened, loops become bodies, ops keep their cost."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Hashable, Iterator
from typing import Any

import jax
import numpy as np

from capibara.program import loops
from capibara.program.factors import Factors, whole
from capibara.program.graph import Node, Value
from capibara.program.jaxprs import called, dtype_of, holds_function, opened, read
from capibara.program.kernel_body import kernel_products
from capibara.program.labels import RENAMES_NOTHING, joined, label, line_of
from capibara.program.manual import exchange_of
from capibara.program.op_calls import marked_call, op_node_parts
from capibara.program.primitives.registry import RULES
from capibara.program.primitives.rule import made_of

__all__ = ["Builder"]

_FREE_ON_HOST = frozenset({"debug_callback", "debug_print"})
# Larger constants are told apart by what they are, not by what they hold.
_COMPARED_BYTES = 1 << 20


class Builder:
    """Collects values and notes while a jaxpr is walked."""

    def __init__(self, selections: list[Any], platform: str, share_repeats: bool = False) -> None:
        self.values: list[Value] = []
        self.constants: list[int] = []
        self.notes: list[str] = []
        self._selections = selections
        self._platform = platform
        self._lines: dict[int, str] = {}
        self.op: str | None = None
        self._kinds: dict[Any, int] = {}
        self.local: set[int] = set()
        self._inside = False  # of a shard_map
        self._known: dict[Any, tuple[Any, int]] = {}
        self._site = ""  # the line of the call that is being opened
        self._repeats: dict[Hashable, list[int | None]] | None = {} if share_repeats else None
        self._literals: dict[Any, tuple[str, str]] = {}  # of the variables of opened calls

    def value(self, aval: Any, name: str, from_batch: bool = False) -> Value:
        dtype, size = dtype_of(aval)
        made = Value(len(self.values), tuple(int(n) for n in getattr(aval, "shape", ())), dtype, size, name, from_batch)
        self.values.append(made)
        if self._inside:
            self.local.add(made.id)
        return made

    def constant(self, aval: Any, const: Any) -> int:
        # One array that several functions close over is one constant. It is kept, so that its id stays its own.
        same = id(const) if self._repeats is None else _contents(const)
        key = (same, str(aval), self._inside)
        if key not in self._known:
            made = self.value(aval, "constant")
            self.constants.append(made.id)
            self._known[key] = (const, made.id)
        return self._known[key][1]

    def array(self, env: dict[Any, int | None], atom: Any) -> int:
        """The value of a variable; a literal becomes a constant, for a place that needs an array."""
        found = read(env, atom)
        return self.constant(atom.aval, getattr(atom, "val", 0.0)) if found is None else found

    def nodes(self, jaxpr: Any, env: dict[Any, int | None], scope: str) -> list[Node]:
        """The nodes of a jaxpr whose inputs are in `env`; its variables are added there."""
        made: list[Node] = []
        for eqn in jaxpr.eqns:
            made += self._equation(eqn, env, scope)
        return made

    def _equation(self, eqn: Any, env: dict[Any, int | None], scope: str) -> list[Node]:
        before, self._site = self._site, self._line(eqn)
        try:
            return self._opened(eqn, env, joined(scope, str(eqn.source_info.name_stack)))
        finally:
            self._site = before

    def _opened(self, eqn: Any, env: dict[Any, int | None], stack: str) -> list[Node]:
        name = eqn.primitive.name
        if name in ("scan", "while", "cond", "shard_map"):
            with self._apart():
                if name == "scan":
                    return [loops.scan(self, eqn, env, stack)]
                if name == "while":
                    return [loops.while_loop(self, eqn, env, stack)]
                return loops.cond(self, eqn, env, stack) if name == "cond" else self._manual(eqn, env, stack)
        if name in _FREE_ON_HOST:
            return []
        if name == "custom_linear_solve":
            return self._solve(eqn, env, stack)
        call = marked_call(eqn, self._selections)
        if call is not None:
            return self._op_call(call, eqn, env, stack)
        if name not in RULES and name != "pallas_call":  # whose body is for parts of its operands
            inner = called(eqn)
            if inner is not None:
                return self._inline(inner, eqn, env, stack)
        key = None if self._repeats is None else self._written_as(eqn, env)
        if key is None or self._repeats is None:
            return [self._plain(eqn, env, stack)]
        before = self._repeats.get(key)
        if before is not None:
            env.update(zip(eqn.outvars, before, strict=True))
            return []
        node = self._plain(eqn, env, stack)
        self._repeats[key] = [env[var] for var in eqn.outvars]
        return [node]

    def _written_as(self, eqn: Any, env: dict[Any, int | None]) -> Hashable:
        """What two equations that compute the same have alike; None for one that is more than its results."""
        if eqn.effects or holds_function(eqn):
            return None
        known = [read(env, atom) for atom in eqn.invars]
        operands = [
            self._literal(atom) if value is None else value for atom, value in zip(eqn.invars, known, strict=True)
        ]
        return None if None in operands else (eqn.primitive.name, tuple(operands), str(eqn.params))

    def _literal(self, atom: Any) -> tuple[str, str] | None:
        """A number that the program has written in it: its type and value."""
        return (str(atom.aval), str(atom.val)) if hasattr(atom, "val") else self._literals.get(atom)

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """What a loop or a branch computes is there in it alone."""
        before = self._repeats
        self._repeats = None if before is None else {}
        try:
            yield
        finally:
            self._repeats = before

    def _solve(self, eqn: Any, env: dict[Any, int | None], scope: str) -> list[Node]:
        """Of a linear system's four functions only the one that solves it runs; each has operands of its own."""
        lengths = eqn.params["const_lengths"]
        first = lengths.matvec + lengths.vecmat
        given = [*eqn.invars[first : first + lengths.solve], *eqn.invars[sum(lengths) :]]
        return self._inline(eqn.params["jaxprs"].solve, eqn, env, scope, given)

    def _inline(
        self, inner: Any, eqn: Any, env: dict[Any, int | None], scope: str, given: list[Any] | None = None
    ) -> list[Node]:
        jaxpr, consts = opened(inner)
        inside: dict[Any, int | None] = {}
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            inside[var] = self.constant(var.aval, const)
        made: list[Node] = []
        for var, atom in zip(jaxpr.invars, eqn.invars if given is None else given, strict=True):
            inside[var] = read(env, atom)
            if inside[var] is None and (literal := self._literal(atom)) is not None:
                self._literals[var] = literal
            if eqn.params.get("prevent_cse") and eqn.params.get("differentiated") and inside[var] is not None:
                made.append(self._barrier(eqn, inside, var, scope))
        made += self.nodes(jaxpr, inside, scope)
        for var, atom in zip(eqn.outvars, jaxpr.outvars, strict=True):
            env[var] = read(inside, atom)
        return made

    def _manual(self, eqn: Any, env: dict[Any, int | None], scope: str) -> list[Node]:
        """The body of a shard_map, between nodes that lay its operands out as it says."""
        mesh = tuple((str(name), int(size)) for name, size in eqn.params["mesh"].shape.items())
        jaxpr, consts = opened(eqn.params["jaxpr"])
        inside: dict[Any, int | None] = {}
        made: list[Node] = []
        manual = eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes", dict(mesh)))
        automatic = [name for name, size in mesh if size > 1 and name not in manual]
        if automatic and not self._inside:
            self.say(
                f"inside of a shard_map the axes {', '.join(automatic)} are left to the compiler, and counted as if "
                f"every chip did all of it ({self.where(eqn, scope)})"
            )
        before, self._inside = self._inside, True
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            inside[var] = self.constant(var.aval, const)
        for var, atom, spec in zip(jaxpr.invars, eqn.invars, eqn.params["in_specs"], strict=True):
            outer = read(env, atom)
            inside[var] = None
            if outer is not None:
                known = self.values[outer]
                inner = self.value(var.aval, known.name, known.from_batch)
                inside[var] = inner.id
                made.append(self._border("manual_in", outer, inner.id, (tuple(spec), mesh), eqn, scope))
        made += self.nodes(jaxpr, inside, scope)
        ends = [self.array(inside, atom) for atom in jaxpr.outvars]
        self._inside = before
        for var, end, spec in zip(eqn.outvars, ends, eqn.params["out_specs"], strict=True):
            result = self.value(var.aval, self.values[end].name, self.values[end].from_batch).id
            env[var] = result
            made.append(self._border("manual_out", end, result, (tuple(spec), mesh), eqn, scope))
        return made

    def _border(self, kind: str, source: int, result: int, spec: tuple[Any, Any], eqn: Any, scope: str) -> Node:
        shapes = (self.values[source].shape,), (self.values[result].shape,)
        factors = whole(*shapes, unknown=False)
        node = Node(kind, self.where(eqn, scope), (source,), (result,), factors, op=self.op, marker=("manual", *spec))
        node.kind = self._kinds.setdefault((factors, kind), len(self._kinds))
        return node

    def _barrier(self, eqn: Any, env: dict[Any, int | None], var: Any, scope: str) -> Node:
        """What enters a recomputation is a value of its own, so that no copy of the first pass is used again."""
        source = env[var]
        assert source is not None
        outer = self.values[source]
        env[var] = self.value(var.aval, outer.name, outer.from_batch).id
        dims = tuple(range(len(outer.shape)))
        factors = Factors((dims,), (dims,), outer.shape, linear=True)
        kind = self._kinds.setdefault((factors, outer.from_batch), len(self._kinds))
        made = self.values[-1].id
        where = self.where(eqn, scope)
        return Node("optimization_barrier", where, (source,), (made,), factors, op=self.op, kind=kind)

    def handed_on(
        self, primitive: str, eqn: Any, scope: str, inputs: tuple[int, ...], outputs: tuple[int, ...], factors: Factors
    ) -> Node:
        """A node that moves nothing: its results are its first operands."""
        seen = (factors, tuple((self.values[value].bytes, self.values[value].from_batch) for value in inputs))
        kind = self._kinds.setdefault(seen, len(self._kinds))
        where = self.where(eqn, scope)
        backward, again = "transpose(" in scope, "rematted_computation" in scope
        return Node(
            primitive, where, inputs, outputs, factors, bytes=0.0, op=self.op, backward=backward, recompute=again,
            kind=kind,
        )  # fmt: skip

    def _op_call(self, selection: Any, eqn: Any, env: dict[Any, int | None], scope: str) -> list[Node]:
        before, self.op = self.op, selection.call.op.name
        try:
            parts = op_node_parts(selection, eqn)
            if parts is None:
                return self._inline(called(eqn), eqn, env, scope)
            factors, cost = parts
            node = self._node(self.op, eqn, env, scope, factors)
            node.flops, node.matrix, node.vector_flops = cost.flops, cost.matrix_flops > 0, cost.vector_flops
            node.dtype, node.bytes, node.call = cost.dtype, cost.bytes, selection.call
            return [node]
        finally:
            self.op = before

    def _plain(self, eqn: Any, env: dict[Any, int | None], scope: str) -> Node:
        name, params = eqn.primitive.name, eqn.params
        shapes = [tuple(atom.aval.shape) for atom in eqn.invars if hasattr(atom.aval, "shape")]
        results = [tuple(var.aval.shape) for var in eqn.outvars if hasattr(var.aval, "shape")]
        if len(shapes) != len(eqn.invars) or len(results) != len(eqn.outvars):  # tokens of ordered effects
            return self._node(name, eqn, env, scope, Factors(((),) * len(eqn.invars), ((),) * len(eqn.outvars), ()))
        if name in ("logical_axes", "sharding_constraint"):
            return self._marker(eqn, env, scope)
        sent = exchange_of(eqn) if self._inside else None
        if sent is not None:
            node = self._node(name, eqn, env, scope, whole(tuple(shapes), tuple(results), unknown=False))
            node.marker = ("exchange", *sent)
            return node
        if name == "pallas_call":
            return self._opaque(eqn, env, scope, shapes, results)
        made = made_of(name, shapes, results, params)
        node = self._node(name, eqn, env, scope, made.factors)
        if made.note:
            self.say(f"{made.note} ({node.name})")
        if name not in RULES and holds_function(eqn):
            self.say(f"{name}: what the function inside of it computes is not counted ({node.name})")
        node.flops, node.idle, node.matrix, node.mnk = made.flops, made.idle, made.matrix, made.mnk
        if made.matrix:
            # A product of two complex numbers is four of real ones.
            fold = math.prod(2 for atom in eqn.invars[:2] if dtype_of(atom.aval)[0].startswith("complex"))
            node.flops, node.idle = node.flops * fold, node.idle * fold
        if made.moved is not None:
            present = [not hasattr(atom, "val") and env[atom] is not None for atom in eqn.invars]
            present += [True] * len(eqn.outvars)
            node.moved = tuple(times for times, here in zip(made.moved, present, strict=True) if here)
        node.dtype = self._peak_dtype(eqn) if made.matrix else dtype_of(eqn.outvars[0].aval)[0]
        return node

    def _peak_dtype(self, eqn: Any) -> str:
        """The type whose peak a product runs at: on a TPU, float32 at default precision is one bfloat16 pass."""
        kinds = [dtype_of(atom.aval) for atom in eqn.invars[:2]]
        dtype = max(kinds, key=lambda kind: kind[1])[0]
        dtype = {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)
        precision = eqn.params.get("precision")
        named = precision[0] if isinstance(precision, tuple) else precision
        if self._platform == "tpu" and dtype == "float32" and getattr(named, "name", "DEFAULT") == "DEFAULT":
            return "bfloat16"
        return dtype

    def _marker(self, eqn: Any, env: dict[Any, int | None], scope: str) -> Node:
        dims = tuple(range(len(eqn.outvars[0].aval.shape)))
        factors = Factors((dims,), (dims,), tuple(eqn.outvars[0].aval.shape), linear=True)
        node = self._node(eqn.primitive.name, eqn, env, scope, factors)
        if eqn.primitive.name == "logical_axes":
            node.marker = ("names", eqn.params["names"])
        else:
            spec = getattr(eqn.params["sharding"], "spec", None)
            if spec is None:
                self.say(f"a constraint that names no mesh axes was passed over ({node.name})")
            else:
                free = eqn.params.get("unconstrained_dims", ())
                entries = (*spec, *(None,) * (len(dims) - len(spec)))
                node.marker = ("axes", tuple("?" if dim in free else entry for dim, entry in enumerate(entries)))
        return node

    def _opaque(self, eqn: Any, env: Any, scope: str, shapes: list[Any], results: list[Any]) -> Node:
        node = self._node(eqn.primitive.name, eqn, env, scope, whole(tuple(shapes), tuple(results)))
        estimate = eqn.params.get("cost_estimate")
        if estimate is not None:
            node.flops, node.bytes, node.matrix = float(estimate.flops), float(estimate.bytes_accessed), True
            node.dtype = dtype_of(eqn.invars[0].aval)[0] if eqn.invars else "float32"
            return node
        counted = kernel_products(eqn.params)
        if counted is not None:
            node.flops, node.dtype = counted
            node.matrix = True
            what = "the products of its body"
        else:
            what = "no operations"
        self.say(f"a Pallas kernel without a cost_estimate counts its bytes once and {what} ({node.name})")
        return node

    def _node(self, primitive: str, eqn: Any, env: dict[Any, int | None], scope: str, factors: Factors) -> Node:
        """A node with its results; literals are left out of its operands."""
        given = [read(env, atom) for atom in eqn.invars]
        inputs = tuple(value for value in given if value is not None)
        kept = tuple(side for side, value in zip(factors.operands, given, strict=True) if value is not None)
        if len(kept) != len(given):
            # A sum with a constant is not linear.
            factors = dataclasses.replace(factors, operands=kept, linear=False)
        from_batch = any(self.values[value].from_batch for value in inputs)
        where = self.where(eqn, scope)
        kept_as = [self.values[value].name for value in inputs] if primitive in RENAMES_NOTHING else []
        outputs = []
        for var in eqn.outvars:
            named = kept_as[0] if kept_as else f"{primitive} {where}".rstrip()
            outputs.append(self.value(var.aval, named, from_batch).id)
            env[var] = outputs[-1]
        seen = (factors, tuple((self.values[value].bytes, self.values[value].from_batch) for value in inputs))
        return Node(
            primitive, where, inputs, tuple(outputs), factors, op=self.op, backward="transpose(" in scope,
            recompute="rematted_computation" in scope, kind=self._kinds.setdefault(seen, len(self._kinds)),
        )  # fmt: skip

    def say(self, note: str) -> None:
        self.notes.append(note)

    def where(self, eqn: Any, scope: str) -> str:
        return label(scope, self._line(eqn))

    def _line(self, eqn: Any) -> str:
        """The line of an equation; what jax keeps between calls has none, and takes the call's."""
        traceback = eqn.source_info.traceback
        line = self._lines.get(id(traceback))
        if line is None:
            line = self._lines[id(traceback)] = line_of(traceback)
        return line or self._site


def _contents(const: Any) -> Hashable:
    """Of a small array, its values: a table that each layer makes anew is one constant to a compiler."""
    small = getattr(const, "nbytes", 0) <= _COMPARED_BYTES and not isinstance(const, jax.core.Tracer)
    return np.asarray(const).tobytes() if small else id(const)
