"""Whether a function keeps the rows of its batch apart in its layers: only then can rows pass them in parts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from capibara.errors import rule_error
from capibara.program.graph import Node, Program
from capibara.program.groups import ties_of

__all__ = ["check_rows_stay_apart", "where_rows_meet"]


def check_rows_stay_apart(
    fn: Callable[..., Any], args: Sequence[Any], batch: Collection[int], *, after: bool = True
) -> None:
    """An error where a layer adds up, orders or otherwise mixes rows of the batch, or what follows (`after`) does."""
    met = where_rows_meet(fn, args, batch, after=after)
    if met:
        raise rule_error(
            "Layers that run as a pipeline treat the rows of a batch one by one, for they see a microbatch at a time, "
            "and what follows them does so up to its sums over rows",
            met,
            "take the statistics of each row alone, or call capibara.parallel.pipeline, which looks into no layer",
        )


def where_rows_meet(
    fn: Callable[..., Any], args: Sequence[Any], batch: Collection[int], *, after: bool = True
) -> str | None:
    """The operation in which rows of the batch meet, though they may not; None where none is.

    In a loop over parameters they may not meet at all. What follows it (`after`) may reduce over them.
    """
    from capibara.program.tracing import trace

    roles = ["batch" if number in batch else "params" for number in range(len(args))]
    program = trace(fn, args, roles=roles)
    ties = ties_of(program)
    rows = {ties.find(one.value, 0) for one in program.arguments if one.role == "batch" and one.shape}

    def meet(node: Node, reduced: bool) -> bool:
        if _asks_for_work(program, node):
            return False
        for value, side in zip(node.inputs, node.factors.operands, strict=True):
            for dim, factor in enumerate(side):
                of_rows = program.values[value].shape[dim] > 1 and ties.find(value, dim) in rows
                if of_rows and (factor < 0 or (reduced and factor in node.factors.reduced)):
                    return True
        return False

    for node in _in_layers(program):
        if meet(node, reduced=True):
            return f"{node.title} in the loop over layers, in which rows meet"
    for node in _after_layers(program, rows_of=lambda value: _has(ties, program, value, rows)) if after else ():
        if any(meet(one, reduced=one is not node) for one in _inside([node])):
            return f"{node.title} after the loop over layers, which mixes rows"
    return None


def _asks_for_work(program: Program, node: Node) -> bool:
    """Whether an op asks if any row has work for it, as attention does of a chunk in which no segments meet.

    An op's result is its reference's whichever way it takes, so what it skips for a microbatch changes nothing. A
    user's own function may mean such a question otherwise.
    """
    return node.op is not None and node.primitive == "reduce_or" and program.values[node.outputs[0]].shape == ()


def _has(ties: Any, program: Program, value: int, rows: Collection[int]) -> bool:
    return any(ties.find(value, dim) in rows for dim in range(len(program.values[value].shape)))


def _is_layers(program: Program, node: Node) -> bool:
    body = node.body
    return bool(
        body is not None and body.sliced and not any(program.values[outer].from_batch for outer, _ in body.sliced)
    )


def _after_layers(program: Program, rows_of: Callable[[int], bool]) -> Iterator[Node]:
    """What runs a microbatch at a time: the nodes that results need beside the loop, but for totals made before it."""
    late: set[int] = set()
    for node in program.nodes:
        if _is_layers(program, node) or late.intersection(_read(node)):
            late.update(_made(node))
    wanted = set(program.outputs)
    for node in reversed(program.nodes):
        made = wanted.intersection(_made(node))
        if made and not _is_layers(program, node) and any(one in late or rows_of(one) for one in made):
            wanted.update(_read(node))
            yield node


def _read(node: Node) -> Sequence[int]:
    body = node.body
    if body is None:
        return node.inputs
    inside = [value for one in body.nodes for value in _read(one)]
    return [*node.inputs, *(start for start, *_ in body.carried), *(outer for outer, _ in body.sliced), *inside]


def _made(node: Node) -> Sequence[int]:
    body = node.body
    if body is None:
        return node.outputs
    return [*node.outputs, *(after for *_, after in body.carried), *(outer for _, outer in body.stacked)]


def _in_layers(program: Program) -> Iterator[Node]:
    for node in program.nodes:
        if node.body is not None and _is_layers(program, node):
            yield from _inside(node.body.nodes)


def _inside(nodes: Sequence[Node]) -> Iterator[Node]:
    for node in nodes:
        if node.body is None:
            yield node
        else:
            yield from _inside(node.body.nodes)
