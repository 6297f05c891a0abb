"""Whether the layers of a function keep the rows of its batch apart: only then can rows pass them in parts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from capibara.errors import rule_error
from capibara.parallel.program.graph import Node, Program
from capibara.parallel.program.groups import ties_of

__all__ = ["check_rows_stay_apart", "where_rows_meet"]


def check_rows_stay_apart(fn: Callable[..., Any], args: Sequence[Any], batch: Collection[int]) -> None:
    """An error where a layer adds up, normalises or otherwise mixes rows of the batch."""
    met = where_rows_meet(fn, args, batch)
    if met:
        raise rule_error(
            "Layers that run as a pipeline treat the rows of a batch one by one, for they see a microbatch at a time",
            f"{met} in the loop over layers, which reduces over the rows",
            "take the statistics of each row alone, or lay the batch out without stages",
        )


def where_rows_meet(fn: Callable[..., Any], args: Sequence[Any], batch: Collection[int]) -> str | None:
    """The operation inside of a loop over parameters that reduces over the batch's rows; None where none does."""
    from capibara.parallel.program.trace import trace

    roles = ["batch" if number in batch else "params" for number in range(len(args))]
    program = trace(fn, args, roles=roles)
    ties = ties_of(program)
    rows = {ties.find(one.value, 0) for one in program.arguments if one.role == "batch" and one.shape}
    for node in _in_layers(program):
        for value, side in zip(node.inputs, node.factors.operands, strict=True):
            for dim, factor in enumerate(side):
                if factor in node.factors.reduced and ties.find(value, dim) in rows:
                    return f"{node.primitive} {node.name}"
    return None


def _in_layers(program: Program) -> Iterator[Node]:
    for node in program.nodes:
        body = node.body
        if body is not None and body.sliced and not any(program.values[outer].from_batch for outer, _ in body.sliced):
            yield from _inside(body.nodes)


def _inside(nodes: Sequence[Node]) -> Iterator[Node]:
    for node in nodes:
        if node.body is None:
            yield node
        else:
            yield from _inside(node.body.nodes)
