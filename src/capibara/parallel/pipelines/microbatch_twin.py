"""A function traced for all rows of a batch and for one microbatch: which values have rows, and what counts them.

Both traces have the same equations. Where a value is longer for all rows, that dimension is the rows. Where a number
in the program is another one, it was made of the number of rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from capibara.errors import rule_error
from capibara.parallel.pipelines.layer_scan import LayerScan
from capibara.program.jaxprs import opened

__all__ = ["Twins", "check_layers_do_not_count", "rows_of"]

_RANDOM = ("random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform", "random_gamma")
# Operations of which the second and further operands say where to read or write: they pass on no number of a row.
_INDEXED = ("gather", "dynamic_slice", "scatter", "scatter-add", "scatter_add")
# Calls whose bodies are the user's own program. A kernel or an op may count the rows that it is given.
_OPEN = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2", "custom_jvp_call", "cond", "scan", "while")


def rows_of(whole: Any, part: Any) -> int | None:
    """The dimension of the rows, which is longer of all rows than of a microbatch's; None where there is none."""
    if len(whole.shape) != len(part.shape):
        raise _another_program(f"{whole.shape} of all rows and {part.shape} of a microbatch")
    found = [dim for dim, sizes in enumerate(zip(whole.shape, part.shape, strict=True)) if sizes[0] != sizes[1]]
    if len(found) > 1:
        raise rule_error(
            "The rows of a batch are one dimension of what is made of it",
            f"{whole.shape} of all rows and {part.shape} of a microbatch",
            "keep them apart from other dimensions",
        )
    return found[0] if found else None


class Twins:
    """The variables of a microbatch's trace beside those of all rows.

    With `one_program`, the microbatch's trace gets the numbers of the other: it is a part of that program, and not the
    function of a smaller batch.
    """

    def __init__(self, whole: LayerScan, part: LayerScan, *, one_program: bool) -> None:
        one, other = whole.closed.jaxpr, part.closed.jaxpr
        if not _alike(one.eqns, other.eqns):
            raise _another_program("other operations for a microbatch than for all rows")
        self.whole = whole
        pairs = [*zip(one.invars, other.invars, strict=True), *zip(one.constvars, other.constvars, strict=True)]
        for mine, its in zip(one.eqns, other.eqns, strict=True):
            pairs += zip(mine.outvars, its.outvars, strict=True)
        self.of = {its: mine for mine, its in pairs}
        """The variable of all rows."""
        self.part = _with_numbers_of(whole, part) if one_program else part

    def rows(self, atom: Any) -> int | None:
        """The dimension of a microbatch's variable that is its rows."""
        return None if isinstance(atom, core.Literal) else rows_of(self.of[atom].aval, atom.aval)

    def compute(self, atoms: Sequence[Any], values: dict[Any, Any]) -> list[Any]:
        """Variables without rows, named as the microbatch's are, from values of all rows."""
        return self.whole.compute([a if isinstance(a, core.Literal) else self.of[a] for a in atoms], values)

    def check_equations_do_not_count(self, kept: Sequence[Any]) -> None:
        """An error where some of the microbatch's equations number the rows or draw something for each."""
        pairs = zip(self.whole.closed.jaxpr.eqns, self.part.closed.jaxpr.eqns, strict=True)
        wholes = {id(its): mine for mine, its in pairs}
        numbers: set[Any] = set()
        for its in kept:
            reason = next(_draws(wholes[id(its)], its), None)
            if _numbers_rows(wholes[id(its)], its):
                numbers.update(its.outvars)
            elif any(not isinstance(atom, core.Literal) and atom in numbers for atom in _read(its)):
                numbers.update(its.outvars)
                if any(jnp.issubdtype(var.aval.dtype, jnp.inexact) for var in its.outvars):
                    reason = "a row's number in the batch (iota)"
            if reason:
                raise _counts(reason, "after its layers")


def check_layers_do_not_count(whole: LayerScan, part: LayerScan) -> None:
    """An error where a layer depends on how many rows there are, or on a row's number among them."""
    one, other = (opened(scan.equation.params["jaxpr"])[0].eqns for scan in (whole, part))
    if not _alike(one, other):
        raise _another_program("a layer of other operations for a microbatch than for all rows")
    for mine, its in zip(one, other, strict=True):
        reason = next(_reasons(mine, its), None)
        if reason:
            raise _counts(reason, "in the loop over layers")


def _reasons(mine: Any, its: Any) -> Iterator[str]:
    for a, b in zip(mine.invars, its.invars, strict=True):
        if isinstance(a, core.Literal) and isinstance(b, core.Literal) and not _same(a.val, b.val):
            yield f"the number {a.val} for all rows and {b.val} for a microbatch ({its.primitive.name})"
    if _numbers_rows(mine, its):
        yield "a row's number in the batch (iota)"
    yield from _draws(mine, its)
    for one, other in _bodies(mine, its):
        for pair in zip(one, other, strict=True):
            yield from _reasons(*pair)


def _draws(mine: Any, its: Any) -> Iterator[str]:
    if its.primitive.name in _RANDOM and any(map(_longer, mine.outvars, its.outvars)):
        yield f"random numbers for each row ({its.primitive.name})"
    for one, other in _bodies(mine, its):
        for pair in zip(one, other, strict=True):
            yield from _draws(*pair)


def _bodies(mine: Any, its: Any) -> Iterator[tuple[Any, Any]]:
    if its.primitive.name not in _OPEN:
        return
    for key, value in its.params.items():
        both = (mine.params[key], value)
        for one, other in zip(*(v if isinstance(v, tuple | list) else (v,) for v in both), strict=False):
            bodies: list[Any] = [getattr(getattr(body, "jaxpr", body), "eqns", None) for body in (one, other)]
            if bodies[0] is not None and bodies[1] is not None and _alike(*bodies):
                yield bodies[0], bodies[1]


def _numbers_rows(mine: Any, its: Any) -> bool:
    if its.primitive.name != "iota":
        return False
    along = its.params["dimension"]
    return bool(mine.outvars[0].aval.shape[along] != its.outvars[0].aval.shape[along])


def _read(equation: Any) -> Sequence[Any]:
    return equation.invars[:1] if equation.primitive.name in _INDEXED else equation.invars


def _with_numbers_of(whole: LayerScan, part: LayerScan) -> LayerScan:
    """The microbatch's program with the numbers of all rows': a mean's divisor is that of the whole batch."""
    jaxpr, equations = part.closed.jaxpr, []
    for mine, its in zip(whole.closed.jaxpr.eqns, part.closed.jaxpr.eqns, strict=True):
        atoms = [
            a if isinstance(a, core.Literal) and isinstance(b, core.Literal) and not _longer(a, b) else b
            for a, b in zip(mine.invars, its.invars, strict=True)
        ]
        equations.append(its.replace(invars=atoms))
    for a, b in zip(whole.closed.consts, part.closed.consts, strict=True):
        if jnp.shape(a) != jnp.shape(b):
            raise _counts(f"a constant of {jnp.shape(a)} for all rows and {jnp.shape(b)} for a microbatch", "in it")
    closed = part.closed.replace(jaxpr=jaxpr.replace(eqns=equations), consts=list(whole.closed.consts))
    return dataclasses.replace(part, closed=closed)


def _alike(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return [equation.primitive.name for equation in one] == [equation.primitive.name for equation in other]


def _longer(mine: Any, its: Any) -> bool:
    return bool(mine.aval.shape != its.aval.shape)


def _same(one: Any, other: Any) -> bool:
    return bool(np.array_equal(one, other, equal_nan=True)) if np.asarray(one).dtype.kind == "f" else bool(one == other)


def _counts(reason: str, where: str) -> ValueError:
    return rule_error(
        "What is done to a row in a pipeline does not depend on the other rows, nor on how many there are",
        f"{reason} {where}",
        "make it before the layers and pass it along (a mask of the batch, a key for each row), or use no stages",
    )


def _another_program(got: str) -> ValueError:
    return rule_error(
        "A function that is run as a pipeline does the same to a microbatch as to all rows",
        got,
        "do not branch on the number of rows",
    )
