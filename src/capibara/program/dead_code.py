"""What nobody reads is not computed: the compiler drops it, so the graph does."""

from __future__ import annotations

from capibara.program.graph import Body, Node

__all__ = ["live"]


def live(nodes: list[Node], wanted: set[int]) -> list[Node]:
    """The nodes that `wanted` values need, in order. `wanted` grows to everything that they read."""
    kept: list[Node] = []
    for node in reversed(nodes):
        if not wanted.intersection(node.outputs):
            continue
        if node.body is not None:
            _trim(node, node.body, wanted)
        wanted.update(node.inputs)
        kept.append(node)
    kept.reverse()
    return kept


def _trim(node: Node, body: Body, wanted: set[int]) -> None:
    """Drop what a loop carries or stacks for nobody."""
    body.stacked = [(inner, outer) for inner, outer in body.stacked if outer in wanted]
    needed = [one for one in body.carried if one[3] in wanted]
    nodes = body.nodes
    while True:
        inside = {inner for inner, _ in body.stacked} | {end for _, _, end, _ in needed}
        if body.until is not None:
            inside.add(body.until)
        nodes = live(list(body.nodes), inside)
        more = [one for one in body.carried if one not in needed and one[1] in inside]
        if not more:
            break
        needed += more
    body.nodes = nodes
    body.carried = [one for one in body.carried if one in needed]
    body.sliced = [(outer, inner) for outer, inner in body.sliced if inner in inside]
    internal = {inner for _, inner in body.sliced} | {start for _, start, _, _ in body.carried} | _made(nodes)
    free = [value for value in sorted(inside) if value not in internal]
    entering = [start for start, _, _, _ in body.carried] + [outer for outer, _ in body.sliced]
    node.inputs = tuple(dict.fromkeys((*entering, *free)))
    node.outputs = tuple([after for *_, after in body.carried] + [outer for _, outer in body.stacked])


def _made(nodes: list[Node]) -> set[int]:
    return {value for node in nodes for value in node.outputs}
