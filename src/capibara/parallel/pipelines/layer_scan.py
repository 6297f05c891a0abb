"""The loop over layers inside of any function: found in its jaxpr, which is cut into what comes before and after it.

The loop is the scan that takes slices of parameters and carries something made of the batch. Of several, the one with
the most parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core

from capibara.errors import rule_error
from capibara.program.jaxprs import scan_parts

__all__ = ["LayerScan", "find_layers"]

# Calls that only group equations: a scan or a sum inside of them is as good as one outside.
_TRANSPARENT = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}


@dataclass(frozen=True)
class LayerScan:
    """A function's jaxpr and the scan over layers in it."""

    closed: Any
    place: int
    """Of the scan among the equations."""
    from_batch: frozenset[Any]
    """Variables that depend on the batch."""

    @property
    def equation(self) -> Any:
        return self.closed.jaxpr.eqns[self.place]

    @property
    def consts(self) -> list[Any]:
        return list(self.equation.invars[: scan_parts(self.equation.params)[0]])

    @property
    def carries(self) -> list[Any]:
        """What the first layer takes."""
        first, count = scan_parts(self.equation.params)
        return list(self.equation.invars[first : first + count])

    @property
    def results(self) -> list[Any]:
        """What the last layer gives."""
        return list(self.equation.outvars[: scan_parts(self.equation.params)[1]])

    @property
    def stacked(self) -> list[Any]:
        return list(self.equation.invars[sum(scan_parts(self.equation.params)) :])

    @property
    def arguments(self) -> list[Any]:
        return list(self.closed.jaxpr.invars)

    @property
    def outputs(self) -> list[Any]:
        return list(self.closed.jaxpr.outvars)

    @property
    def extras(self) -> list[Any]:
        """Of what is stacked, an output of each layer, that which something reads."""
        read = {atom for equation in self.closed.jaxpr.eqns for atom in equation.invars if not _is_literal(atom)}
        read |= {atom for atom in self.outputs if not _is_literal(atom)}
        return [var for var in self.equation.outvars[len(self.results) :] if var in read]

    def layer(self, consts: Sequence[Any], carry: Sequence[Any], weights: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """One layer's carry from the one before, and its own part of `extras`."""
        made = core.jaxpr_as_fun(self.equation.params["jaxpr"])(*consts, *carry, *weights)
        wanted = set(self.extras)
        return list(made[: len(carry)]), [
            x for var, x in zip(self.equation.outvars, made, strict=True) if var in wanted
        ]

    def depends(self, atom: Any) -> bool:
        """Whether it is made of the batch."""
        return not _is_literal(atom) and atom in self.from_batch

    def needed(self, atoms: Iterable[Any], given: Collection[Any] = ()) -> tuple[list[Any], list[Any]]:
        """What it takes to compute these: the equations, and of `given` and the arguments those that they read."""
        wanted = {atom for atom in atoms if not _is_literal(atom)}
        stop = {*given, *self.arguments, *self.closed.jaxpr.constvars}
        kept: list[Any] = []
        for equation in reversed(self.closed.jaxpr.eqns):
            if any(var in wanted and var not in stop for var in equation.outvars):
                kept.append(equation)
                wanted.update(atom for atom in equation.invars if not _is_literal(atom))
        sources = [var for var in dict.fromkeys([*given, *self.arguments]) if var in wanted]
        return kept[::-1], sources

    def made_of(self, atoms: Iterable[Any]) -> dict[Any, None]:
        """These and everything that is computed of them, in order."""
        found = dict.fromkeys(atoms)
        for equation in self.closed.jaxpr.eqns:
            if any(not _is_literal(atom) and atom in found for atom in equation.invars):
                found.update(dict.fromkeys(equation.outvars))
        return found

    def compute(self, atoms: Sequence[Any], values: dict[Any, Any]) -> list[Any]:
        """These variables, from the values of others."""
        equations, sources = self.needed(atoms, tuple(values))
        jaxpr = self.closed.jaxpr.replace(invars=sources, outvars=list(atoms), eqns=equations)
        return list(core.jaxpr_as_fun(self.closed.replace(jaxpr=jaxpr))(*(values[var] for var in sources)))


def find_layers(fn: Callable[..., Any], args: Sequence[Any], batch: Collection[int]) -> LayerScan:
    """The scan over layers of `fn(*args)`, of which the numbered arguments are the batch; an error says why none is."""
    closed = _inlined(jax.make_jaxpr(fn)(*args))
    jaxpr = closed.jaxpr
    fed = [number in batch for number, one in enumerate(args) for _ in jax.tree.leaves(one)]
    from_batch = {var for var, is_batch in zip(jaxpr.invars, fed, strict=True) if is_batch}
    reasons: list[str] = []
    found: dict[int, float] = {}
    for place, equation in enumerate(jaxpr.eqns):
        tainted = any(not _is_literal(atom) and atom in from_batch for atom in equation.invars)
        if equation.primitive.name == "scan":
            why_not = _why_not(LayerScan(closed, place, frozenset(from_batch)))
            if why_not:
                reasons.append(why_not)
            else:
                found[place] = sum(_size(atom) for atom in LayerScan(closed, place, frozenset()).stacked)
        if tainted:
            from_batch.update(equation.outvars)
    if not found:
        raise rule_error(
            "A function that is run as a pipeline scans over its layers: jax.lax.scan with stacked parameters as xs "
            "and an activation as carry",
            "; ".join(dict.fromkeys(reasons)) or "a function with no such scan at its top",
            "stack the layers' parameters and scan over them, or call capibara.parallel.pipeline where they are",
        )
    return LayerScan(closed, max(found, key=lambda place: (found[place], -place)), frozenset(from_batch))


def _why_not(scan: LayerScan) -> str | None:
    """Why a scan is none over layers that a pipeline can run."""
    length = scan.equation.params["length"]
    if not scan.needed(scan.stacked)[1]:
        return f"a scan of {length} steps that takes slices of no argument"
    if any(map(scan.depends, scan.stacked)):
        return f"a scan of {length} steps along the batch or what is made of it"
    if not any(map(scan.depends, scan.carries)):
        return f"a scan of {length} steps whose carry is not made of the batch"
    if scan.equation.params["reverse"]:
        return f"a scan of {length} steps that runs backwards"
    stacks = set(scan.extras)
    for equation in scan.closed.jaxpr.eqns:
        if equation.primitive.name == "scan" and any(
            not _is_literal(atom) and atom in stacks for atom in equation.invars
        ):
            # As the layers of a gradient do: every stage would need what all the others kept.
            return f"a scan of {length} steps whose stacked outputs another scan takes, as a gradient's does"
    return None


def _size(atom: Any) -> float:
    return float(math.prod(atom.aval.shape) * atom.aval.dtype.itemsize)


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, core.Literal)


def _inner(equation: Any) -> Any:
    key = _TRANSPARENT.get(equation.primitive.name)
    return None if key is None else equation.params[key]


def _inlined(closed: Any) -> Any:
    """The same function with the calls opened that only group equations."""
    if all(_inner(equation) is None for equation in closed.jaxpr.eqns):
        return closed
    return _inlined(jax.make_jaxpr(lambda *args: _run(closed, args))(*closed.in_avals))


def _run(closed: Any, args: Sequence[Any]) -> list[Any]:
    jaxpr = closed.jaxpr
    values = dict(zip([*jaxpr.invars, *jaxpr.constvars], [*args, *closed.consts], strict=True))
    for equation in jaxpr.eqns:
        given = [atom.val if _is_literal(atom) else values[atom] for atom in equation.invars]
        inner = _inner(equation)
        if inner is not None:
            made = core.jaxpr_as_fun(inner)(*given)
        else:
            names = list(dict.fromkeys(atom for atom in equation.invars if not _is_literal(atom)))
            one = jaxpr.replace(invars=names, constvars=[], outvars=list(equation.outvars), eqns=[equation])
            made = core.jaxpr_as_fun(core.ClosedJaxpr(one, []))(*(values[var] for var in names))
        values.update(zip(equation.outvars, made, strict=True))
    return [atom.val if _is_literal(atom) else values[atom] for atom in jaxpr.outvars]
