"""One program under many layouts: what is kept of one changes nothing for the next, and walks skip what has settled."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from capibara.mesh.layout import Layout
from capibara.parallel.training_step import training_job
from capibara.plan.place import place
from capibara.plan.search import evaluation
from capibara.plan.search.evaluation import PaperModel
from capibara.plan.search.exploration import Exploration
from capibara.plan.search.space import Space
from capibara.program import propagate, spread, trace
from capibara.program.graph import Program

DEPTH = 4


def _loss(params: Any, batch: Any) -> jax.Array:
    """Unrolled layers and a loop: both kinds of walks."""
    x = params["embed"][batch]
    for w in params["unrolled"]:
        x = x + jnp.tanh(x @ w["up"]) @ w["down"]
    x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params["stack"])
    return jnp.mean(jax.nn.logsumexp(x @ params["embed"].T, -1))


@pytest.fixture(scope="module")
def layouts() -> tuple[Program, list[Layout]]:
    def f32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params = {
        "embed": f32(128, 64),
        "unrolled": [{"up": f32(64, 256), "down": f32(256, 64)} for _ in range(DEPTH)],
        "stack": f32(3, 64, 64),
    }
    job = training_job(_loss, params, jax.ShapeDtypeStruct((16, 32), jnp.int32), knobs={"remat": ("none",)})
    job = dataclasses.replace(job, knobs={"remat": ("none",), "accumulate": (1,)})
    where = place("v4-16")
    model = PaperModel(job, where)
    run = Exploration(Space(model.anatomy(), where.chips, job.knobs), model, budget=24)
    run.go()
    found = [one.layout for one in run.results.values() if one.layout is not None]
    return model.program(found[0].choices), list({layout.name: layout for layout in found}.values())


def test_what_one_layout_left_behind_changes_nothing_for_the_next(layouts: tuple[Program, list[Layout]]) -> None:
    program, every = layouts
    assert len(every) > 10
    for layout in every:
        alone = dataclasses.replace(program, memo={})
        assert spread(program, layout) == spread(alone, layout), layout.name


def test_walks_visit_what_changed_and_end_where_they_always_did(
    layouts: tuple[Program, list[Layout]], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, every = layouts
    settled = [propagate.place(program, layout) for layout in every]

    visits: list[int] = []
    toward = propagate._toward

    def always(placement: Any, node: Any, back: bool) -> None:
        due = placement.due_back if back else placement.due_along
        visits.append(due[node.number])
        due[node.number] = 1
        toward(placement, node, back)

    monkeypatch.setattr(propagate, "_toward", always)
    for layout, found in zip(every, settled, strict=True):
        assert propagate.place(program, layout).of == found.of, layout.name
    # The program is walked five times, and to visit all of it on three of them would be 0.6.
    assert sum(visits) < 0.6 * len(visits)


def test_garbage_is_not_collected_inside_of_a_layout_and_is_between_two(monkeypatch: pytest.MonkeyPatch) -> None:
    where = place("v4-8")
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    model = PaperModel(training_job(lambda w, x: jnp.mean((x @ w) ** 2), x, x), where)
    seen: list[bool] = []
    real = evaluation.estimate

    def estimate(*args: Any, **keywords: Any) -> Any:
        seen.append(gc.isenabled())
        return real(*args, **keywords)

    monkeypatch.setattr(evaluation, "estimate", estimate)
    run = Exploration(Space(model.anatomy(), where.chips, model.job.knobs), model, budget=2)
    assert gc.isenabled()
    run.go()
    assert seen == [False, False]
    assert gc.isenabled()
    gc.disable()
    try:
        model.estimate(next(one.layout for one in run.results.values() if one.layout is not None))
        assert not gc.isenabled(), "whoever turned it off keeps it off"
    finally:
        gc.enable()


def test_a_program_is_traced_alike_with_its_nodes_numbered() -> None:
    program = trace(lambda w, x: jnp.tanh(x @ w), (jax.ShapeDtypeStruct((4, 4), jnp.float32),) * 2)
    readers = program.touching
    assert sorted({number for numbers in readers for number in numbers}) == [node.number for node in program.nodes]
