"""Loops and branches of a traced function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from capibara.parallel.program.factors import Factors
from capibara.parallel.program.graph import Body, Node
from capibara.parallel.program.jaxprs import opened, read, scan_parts

if TYPE_CHECKING:
    from capibara.parallel.program.build import Builder

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
    nodes = build.nodes(jaxpr, inside, scope)
    ends = [build.array(inside, atom) for atom in jaxpr.outvars]
    after = []
    for var, end in zip(eqn.outvars, ends, strict=True):
        after.append(build.value(var.aval, build.values[end].name, batch).id)
        env[var] = after[-1]
    build.say(f"a while loop of unknown length counts as one trip ({where})")
    body = Body(nodes, 1, list(zip(starts, entered, ends, after, strict=True)), [], [])
    return _loop(build, "while", where, body, scope)


def _loop(build: Builder, kind: str, where: str, body: Body, scope: str) -> Node:
    outputs = tuple([after for *_, after in body.carried] + [outer for _, outer in body.stacked])
    entering = [start for start, _, _, _ in body.carried] + [outer for outer, _ in body.sliced]
    return Node(
        kind, where, tuple(dict.fromkeys(entering)), outputs, Factors((), (), ()), op=build.op,
        backward="transpose(" in scope, recompute="rematted_computation" in scope, body=body,
    )  # fmt: skip


def cond(build: Builder, eqn: Any, env: dict[Any, int | None], scope: str) -> list[Node]:
    best: tuple[float, list[Node], dict[Any, int | None]] | None = None
    for branch in eqn.params["branches"]:
        jaxpr, consts = opened(branch)
        inside: dict[Any, int | None] = {}
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            inside[var] = build.constant(var.aval, const)
        for var, atom in zip(jaxpr.invars, eqn.invars[1:], strict=True):
            inside[var] = read(env, atom)
        nodes = build.nodes(jaxpr, inside, scope)
        cost = _work(nodes)
        if best is None or cost > best[0]:
            outs = {var: read(inside, atom) for var, atom in zip(eqn.outvars, jaxpr.outvars, strict=True)}
            best = (cost, nodes, outs)
    assert best is not None  # jax makes no cond without branches
    env.update(best[2])
    build.say(f"of a cond, the branch with the most work counts ({build.where(eqn, scope)})")
    return best[1]


def _work(nodes: list[Node]) -> float:
    return sum(
        node.body.trips * _work(node.body.nodes) if node.body is not None else node.flops + (node.bytes or 0.0)
        for node in nodes
    )
