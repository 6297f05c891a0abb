"""Loops and branches of a traced function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from capibara.program.factors import Factors
from capibara.program.graph import Body, Node
from capibara.program.jaxprs import opened, read, scan_parts

if TYPE_CHECKING:
    from capibara.program.build import Builder

__all__ = ["cond", "scan", "while_loop"]


def scan(build: Builder, eqn: Any, env: dict[Any, int | None], scope: str) -> Node:
    params = eqn.params
    consts, carries = scan_parts(params)
    trips = int(params["length"])
    jaxpr, held = opened(params["jaxpr"])
    inside: dict[Any, int | None] = {}
    for var, const in zip(jaxpr.constvars, held, strict=True):
        inside[var] = build.constant(var.aval, const)
    for var, atom in zip(jaxpr.invars[:consts], eqn.invars[:consts], strict=True):
        inside[var] = read(env, atom)
    starts = [build.array(env, atom) for atom in eqn.invars[consts : consts + carries]]
    rows = [build.array(env, atom) for atom in eqn.invars[consts + carries :]]
    batch = any(
        build.values[value].from_batch for value in (*starts, *rows, *(v for v in inside.values() if v is not None))
    )
    where = build.where(eqn, scope)
    for var, value in zip(jaxpr.invars[consts : consts + carries], starts, strict=True):
        inside[var] = build.value(var.aval, build.values[value].name, batch).id
    for var, value in zip(jaxpr.invars[consts + carries :], rows, strict=True):
        outer = build.values[value]
        inside[var] = build.value(var.aval, outer.name, outer.from_batch).id
    nodes = build.nodes(jaxpr, inside, scope)
    ends = [build.array(inside, atom) for atom in jaxpr.outvars]
    after = []
    for var, end in zip(eqn.outvars, ends, strict=True):
        inner = build.values[end]
        after.append(build.value(var.aval, inner.name, inner.from_batch).id)
        env[var] = after[-1]
    entered = [inside[var] for var in jaxpr.invars[consts:]]
    carried = [
        (start, entered[i], ends[i], after[i]) for i, start in enumerate(starts) if entered[i] is not None
    ]  # fmt: skip
    sliced = [(row, entered[carries + i]) for i, row in enumerate(rows)]
    stacked = list(zip(ends[carries:], after[carries:], strict=True))
    body = Body(nodes, trips, carried, sliced, stacked)  # type: ignore[arg-type]
    return _loop(build, "scan", where, body, scope)


def while_loop(build: Builder, eqn: Any, env: dict[Any, int | None], scope: str) -> Node:
    params = eqn.params
    skipped, consts = params["cond_nconsts"], params["body_nconsts"]
    jaxpr, held = opened(params["body_jaxpr"])
    inside: dict[Any, int | None] = {}
    for var, const in zip(jaxpr.constvars, held, strict=True):
        inside[var] = build.constant(var.aval, const)
    for var, atom in zip(jaxpr.invars[:consts], eqn.invars[skipped : skipped + consts], strict=True):
        inside[var] = read(env, atom)
    starts = [build.array(env, atom) for atom in eqn.invars[skipped + consts :]]
    batch = any(build.values[value].from_batch for value in starts)
    where = build.where(eqn, scope)
    entered = []
    for var, value in zip(jaxpr.invars[consts:], starts, strict=True):
        entered.append(build.value(var.aval, build.values[value].name, batch).id)
        inside[var] = entered[-1]
    nodes, until = _condition(build, eqn, env, entered, scope)
    nodes += build.nodes(jaxpr, inside, scope)
    ends = [build.array(inside, atom) for atom in jaxpr.outvars]
    after = []
    for var, end in zip(eqn.outvars, ends, strict=True):
        after.append(build.value(var.aval, build.values[end].name, batch).id)
        env[var] = after[-1]
    build.say(f"a while loop of unknown length counts as one trip ({where})")
    body = Body(nodes, 1, list(zip(starts, entered, ends, after, strict=True)), [], [], until)
    return _loop(build, "while", where, body, scope)


def _condition(
    build: Builder, eqn: Any, env: dict[Any, int | None], entered: list[int], scope: str
) -> tuple[list[Node], int | None]:
    """What decides on another trip: it is computed in each of them."""
    jaxpr, held = opened(eqn.params["cond_jaxpr"])
    count = eqn.params["cond_nconsts"]
    inside: dict[Any, int | None] = {}
    for var, const in zip(jaxpr.constvars, held, strict=True):
        inside[var] = build.constant(var.aval, const)
    for var, atom in zip(jaxpr.invars[:count], eqn.invars[:count], strict=True):
        inside[var] = read(env, atom)
    inside.update(zip(jaxpr.invars[count:], entered, strict=True))
    nodes = build.nodes(jaxpr, inside, scope)
    return nodes, read(inside, jaxpr.outvars[0])


def _loop(build: Builder, kind: str, where: str, body: Body, scope: str) -> Node:
    outputs = tuple([after for *_, after in body.carried] + [outer for _, outer in body.stacked])
    entering = [start for start, _, _, _ in body.carried] + [outer for outer, _ in body.sliced]
    return Node(
        kind, where, tuple(dict.fromkeys(entering)), outputs, Factors((), (), ()), op=build.op,
        backward="transpose(" in scope, recompute="rematted_computation" in scope, body=body,
    )  # fmt: skip


def cond(build: Builder, eqn: Any, env: dict[Any, int | None], scope: str) -> list[Node]:
    best: tuple[tuple[float, float], list[Node], dict[Any, int | None]] | None = None
    for branch in eqn.params["branches"]:
        jaxpr, consts = opened(branch)
        inside: dict[Any, int | None] = {}
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            inside[var] = build.constant(var.aval, const)
        for var, atom in zip(jaxpr.invars, eqn.invars[1:], strict=True):
            inside[var] = read(env, atom)
        nodes = build.nodes(jaxpr, inside, scope)
        cost = (_work(nodes), _written(build, nodes))
        if best is None or cost > best[0]:
            outs = {var: read(inside, atom) for var, atom in zip(eqn.outvars, jaxpr.outvars, strict=True)}
            best = (cost, nodes, outs)
    assert best is not None  # jax makes no cond without branches
    env.update(best[2])
    build.say(f"of a cond, the branch with the most work counts ({build.where(eqn, scope)})")
    return best[1] + _chosen(build, eqn, env, scope)


def _chosen(build: Builder, eqn: Any, env: dict[Any, int | None], scope: str) -> list[Node]:
    """The results wait for what was decided by: a node that only hands them on keeps it in the program."""
    decided = read(env, eqn.invars[0])
    found = [(var, env[var]) for var in eqn.outvars if env[var] is not None]
    if decided is None or not found:
        return []
    sides: list[tuple[int, ...]] = []
    lengths: list[int] = []
    outputs = []
    for var, source in found:
        assert source is not None
        known = build.values[source]
        sides.append(tuple(range(len(lengths), len(lengths) + len(known.shape))))
        lengths += known.shape
        env[var] = build.value(var.aval, known.name, known.from_batch).id
        outputs.append(env[var])
    factors = Factors((*sides, ()), tuple(sides), tuple(lengths))
    inputs = (*(source for _, source in found), decided)
    return [build.handed_on("cond", eqn, scope, inputs, tuple(outputs), factors)]  # type: ignore[arg-type]


def _written(build: Builder, nodes: list[Node]) -> float:
    return sum(
        node.body.trips * _written(build, node.body.nodes)
        if node.body is not None
        else sum(build.values[value].bytes for value in node.outputs)
        for node in nodes
    )


def _work(nodes: list[Node]) -> float:
    return sum(
        node.body.trips * _work(node.body.nodes) if node.body is not None else node.flops + (node.bytes or 0.0)
        for node in nodes
    )
