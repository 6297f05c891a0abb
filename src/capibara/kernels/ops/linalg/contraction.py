"""The plan of an einsum: which pairs are contracted in which order, and where it is cut to fit a memory.

A plan is made of labels and sizes alone, so it hashes and is made once for each distinct call.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Sequence

import opt_einsum
from opt_einsum.parser import parse_einsum_input

from capibara.errors import rule_error, unknown_name
from capibara.kernels.ops.linalg.pairwise import groups

OPTIMIZE = ("optimal", "greedy", "auto", True, False)


@dataclasses.dataclass(frozen=True)
class Step:
    """One contraction: of one value or of two, numbered as operands first and then results in order."""

    inputs: tuple[int, ...]
    terms: tuple[str, ...]
    result: str
    shape: tuple[int, ...]
    flops: float
    by: str
    """ "gemm" or "einsum": whether it is a matrix product."""

    @property
    def equation(self) -> str:
        return f"{','.join(self.terms)}->{self.result}"


@dataclasses.dataclass(frozen=True)
class Chunks:
    """A loop over one index of the output, `size` elements at a time."""

    label: str
    size: int
    count: int
    length: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """An einsum as steps. A term has lost the labels whose axis of one element is broadcast."""

    equation: str
    terms: tuple[str, ...]
    squeezed: tuple[tuple[int, ...], ...]
    output: str
    steps: tuple[Step, ...]
    chunks: Chunks | None = None


@functools.lru_cache(maxsize=4096)
def plan(equation: str, shapes: tuple[tuple[int, ...], ...], optimize: str | bool) -> Plan:
    """The steps of `equation` on operands of these shapes."""
    if optimize not in OPTIMIZE:
        raise unknown_name("optimize", optimize, OPTIMIZE)
    try:
        inputs, output, _ = parse_einsum_input((equation, *shapes), shapes=True)
    except ValueError as error:
        raise rule_error(
            "An einsum's equation has a term of letters for each operand, and '->' before the output's",
            f"{equation!r} for {len(shapes)} operands ({str(error).rstrip('.')})", 'write e.g. "ij,jk->ik"',
        ) from error  # fmt: skip
    terms = inputs.split(",")
    sizes = _sizes(equation, terms, shapes)
    squeezed = tuple(
        tuple(i for i, (x, n) in enumerate(zip(term, shape, strict=True)) if n == 1 and sizes[x] != 1)
        for term, shape in zip(terms, shapes, strict=True)
    )
    kept = tuple(
        "".join(x for i, x in enumerate(term) if i not in gone) for term, gone in zip(terms, squeezed, strict=True)
    )
    return Plan(equation, kept, squeezed, output, tuple(_steps(kept, output, sizes, optimize)))


def _sizes(equation: str, terms: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for position, (term, shape) in enumerate(zip(terms, shapes, strict=True)):
        if len(term) != len(shape):
            raise rule_error(
                "Each operand has one index for each axis",
                f"{term!r} for operand {position} of shape {shape} in {equation!r}",
                "write one letter an axis, or `...` for the rest",
            )
        for label, size in zip(term, shape, strict=True):
            known = sizes.get(label, 1)
            if known != 1 and size not in (1, known):
                raise rule_error(
                    f"An index has one size, or 1, in all operands: {label!r} in {equation!r}",
                    f"{known} and {size}",
                    "check the shapes, or use another letter",
                )
            sizes[label] = known if size == 1 else size
    return sizes


def _order(terms: Sequence[str], output: str, sizes: dict[str, int], optimize: str | bool) -> list[tuple[int, ...]]:
    in_turn: list[tuple[int, ...]] = [(0, 1), *((0, len(terms) - 1 - i) for i in range(1, len(terms) - 1))]
    if len(terms) == 1:
        return [(0,)]
    # An empty index makes every order cost nothing.
    if len(terms) == 2 or optimize is False or 0 in sizes.values():
        return in_turn
    shapes = [tuple(sizes[x] for x in term) for term in terms]
    kind = "optimal" if optimize is True else optimize
    path, _ = opt_einsum.contract_path(f"{','.join(terms)}->{output}", *shapes, shapes=True, optimize=kind)
    return in_turn if any(len(pair) > 2 for pair in path) else list(path)


def _steps(terms: Sequence[str], output: str, sizes: dict[str, int], optimize: str | bool) -> list[Step]:
    live = list(enumerate(terms))
    steps: list[Step] = []
    for picked in _order(terms, output, sizes, optimize):
        taken = [live[i] for i in sorted(picked)]
        live = [value for i, value in enumerate(live) if i not in picked]
        wanted = {*output, *(label for _, term in live for label in term)}
        names = [term for _, term in taken]
        found = [x for term in names for x in term]
        result = output
        if live:
            # Batch labels first, as gemm leaves them, so that the next step finds them in place.
            shared = [x for x, n in Counter("".join(map(_distinct, names))).items() if n > 1 and x in wanted]
            result = _distinct("".join(shared) + "".join(x for x in found if x in wanted))
        summed = set(found) - set(result)
        reduced = [_distinct("".join(x for x in t if _kept(x, names, result))) for t in names]
        product = len(names) == 2 and groups(tuple(reduced[0]), tuple(reduced[1]), tuple(result)) is not None
        steps.append(
            Step(
                inputs=tuple(number for number, _ in taken),
                terms=tuple(names),
                result=result,
                shape=tuple(sizes[x] for x in result),
                flops=float(math.prod(sizes[x] for x in set(found))) * (2 if summed and len(names) == 2 else 1),
                by="gemm" if product else "einsum",
            )
        )
        live.append((len(terms) + len(steps) - 1, result))
    return steps


def _distinct(labels: str) -> str:
    return "".join(dict.fromkeys(labels))


def _kept(label: str, terms: Sequence[str], result: str) -> bool:
    """Whether a label takes part in the pair's product, or one operand sums it away beforehand."""
    return label in result or sum(label in term for term in terms) > 1


def reduced_term(position: int, step: Step) -> str:
    """The labels of a step's operand after its own diagonals and sums are taken."""
    return _distinct("".join(x for x in step.terms[position] if _kept(x, step.terms, step.result)))


def chunked(whole: Plan, item_bytes: int, limit: int) -> Plan:
    """The plan, cut along one index of the output so that no step's result is larger than `limit` bytes.

    Of the indices that can do it, the one that takes the fewest chunks, then the one that comes first in the
    output: a chunk along a leading axis lies in one piece.
    """
    sizes = {x: n for step in whole.steps for x, n in zip(step.result, step.shape, strict=True)}
    amounts = [(step, item_bytes * math.prod(step.shape)) for step in whole.steps]
    if all(amount <= limit for _, amount in amounts):
        return whole
    best: Chunks | None = None
    for label in whole.output:
        length = sizes[label]
        size = length
        for step, amount in amounts:
            if label in step.result:
                size = min(size, limit * length // amount if amount else length)
            elif amount > limit:
                size = 0
        if size:
            count = math.ceil(length / size)
            if best is None or count < best.count:
                best = Chunks(label, math.ceil(length / count), count, length)
    if best is None:
        raise _no_chunking(whole, amounts, item_bytes, limit, sizes)
    return dataclasses.replace(whole, chunks=best)


def _no_chunking(
    whole: Plan, amounts: Sequence[tuple[Step, int]], item_bytes: int, limit: int, sizes: dict[str, int]
) -> ValueError:
    step, amount = max(amounts, key=lambda pair: pair[1])
    # What one element of the best index would take: the least limit that some chunking meets.
    least = min(
        (
            max(a // sizes[label] if label in s.result and sizes[label] else a for s, a in amounts)
            for label in whole.output
        ),
        default=amount,
    )
    return rule_error(
        f"memory_efficient cuts {whole.equation!r} along one index of its output until the result of every "
        f"step fits {limit:,} bytes",
        f"{step.equation} of {amount:,} bytes, which no index of {whole.output!r} cuts small enough",
        f"pass memory_limit_bytes={least} or more, or another optimize= (another order of contraction)",
    )
