"""Capibara's own ops in a traced program: their cost, and how they are split, are the op's own.

Only a kernel is read so. An implementation in plain JAX is what the compiler sees, so its body is counted, and each
of its steps says which op it belongs to; but where it loops as long as its data say, which no trace knows, the op's
cost does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from capibara.kernels.core.dispatch import MARK
from capibara.kernels.core.spec import Cost
from capibara.program.factors import WHOLE, Factors, whole

__all__ = ["marked_call", "op_node_parts"]


def marked_call(eqn: Any, selections: list[Any]) -> Any:
    """The decision that dispatch took for this call of an op; None when it is no op's."""
    name = eqn.params.get("name", "") if eqn.primitive.name in ("jit", "pjit") else ""
    return selections[int(name.removeprefix(MARK))] if isinstance(name, str) and name.startswith(MARK) else None


def op_node_parts(selection: Any, eqn: Any) -> tuple[Factors, Cost] | None:
    """How an op's kernel is split, and its cost.

    None when the body is to be counted: it is plain JAX of known length, or calls ops of its own (a gradient's passes),
    or is not the call that was decided on (its transposition).
    """
    call = selection.call
    implementation = call.op.implementations[selection.implementation]
    body = eqn.params["jaxpr"].jaxpr
    if not (implementation.kernel or _loops_by_data(body)) or _calls_ops(body):
        return None
    present = [x for x in call.args if x is not None]
    given = [tuple(atom.aval.shape) for atom in eqn.invars]
    if given != [tuple(x.shape) for x in present] or any(hasattr(atom, "val") for atom in eqn.invars):
        return None
    results = [tuple(var.aval.shape) for var in eqn.outvars]
    return _factors(call, given, results), call.op.cost(call)


def _factors(call: Any, shapes: list[tuple[int, ...]], results: list[tuple[int, ...]]) -> Factors:
    partition = call.op.partition
    if partition is None:
        return whole(tuple(shapes), tuple(results))
    operands, outs = partition.factors(call)
    # Results that nobody reads are gone from the call: those left are matched in order.
    terms = iter(outs)
    outs = [next((term for term in terms if len(term) == len(shape)), None) for shape in results]
    if [len(t) for t in operands] != [len(s) for s in shapes] or None in outs:
        return whole(tuple(shapes), tuple(results))
    inner, kept = dict(partition.sizes(call)), set(partition.replicated(call))
    ids: dict[str, int] = {}
    sizes: list[int] = []
    sides: list[tuple[int, ...]] = []
    for term, shape in zip((*operands, *outs), (*shapes, *results), strict=True):
        side = []
        for axis, length in zip(term, shape, strict=True):
            if axis[0] in kept:
                side.append(WHOLE)
                continue
            if axis[0] not in ids:
                ids[axis[0]] = len(sizes)
                sizes.append(length // math.prod(inner[name] for name in axis[1:]))
            side.append(ids[axis[0]])
        sides.append(tuple(side))
    shown = {axis[0] for term in outs for axis in term}
    reduced = frozenset(ids[name] for name in partition.reduced if name in ids and name not in shown)
    return Factors(tuple(sides[: len(shapes)]), tuple(sides[len(shapes) :]), tuple(sizes), reduced)


def _calls_ops(jaxpr: Any) -> bool:
    return any(str(eqn.params.get("name", "")).startswith(MARK) for eqn in _equations(jaxpr))


def _loops_by_data(jaxpr: Any) -> bool:
    return any(eqn.primitive.name == "while" for eqn in _equations(jaxpr))


def _equations(jaxpr: Any) -> Iterator[Any]:
    """Of a function, and of those that it holds."""
    for eqn in jaxpr.eqns:
        yield eqn
        for param in eqn.params.values():
            for inner in param if isinstance(param, tuple | list) else (param,):
                opened = getattr(inner, "jaxpr", inner)
                if hasattr(opened, "eqns"):
                    yield from _equations(opened)
