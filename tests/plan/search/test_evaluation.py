"""The search with the library's own cost model, on programs small enough to enumerate."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from capibara.cost.result import Estimate
from capibara.hardware.topology import slice_by_name
from capibara.mesh import with_sharding_constraint
from capibara.mesh.layout import Layout
from capibara.models import decoder
from capibara.models.config import ModularModelConfig
from capibara.parallel.job import program_job
from capibara.parallel.training_step import training_job
from capibara.plan.search.evaluation import PaperModel
from capibara.plan.search.exploration import Exploration
from capibara.plan.search.search import search
from capibara.plan.search.space import Point, Space
from capibara.program import spread

ON = "v4-16"


def _shape(*sizes: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def _loss(params: Any, batch: Any) -> jax.Array:
    x = batch["x"] @ params["in"]
    x, _ = jax.lax.scan(lambda x, w: (x + jax.nn.relu(x @ w["up"]) @ w["down"], None), x, params["layers"])
    return jnp.mean((x @ params["out"] - batch["y"]) ** 2)


def _job(rows: int = 4096, **keywords: Any) -> Any:
    layers = {"up": _shape(4, 512, 2048), "down": _shape(4, 2048, 512)}
    params = {"in": _shape(64, 512), "layers": layers, "out": _shape(512, 64)}
    return training_job(_loss, params, {"x": _shape(rows, 64), "y": _shape(rows, 64)}, **keywords)


class _Remembering(PaperModel):
    """The same model; what one search has costed, another does not cost again."""

    def estimate(self, layout: Layout) -> Estimate:
        key = repr(layout)
        if key not in self.__dict__.setdefault("known", {}):
            self.known[key] = super().estimate(layout)
        return self.known[key]


@pytest.fixture(scope="module")
def cost() -> _Remembering:
    return _Remembering(_job(knobs={"accumulate": (1,), "remat": ("none", "full")}), slice_by_name(ON))


@pytest.mark.parametrize("target", ["throughput", "latency", "memory"])
def test_within_a_twentieth_of_the_exhaustive_search(cost: _Remembering, target: str) -> None:
    where, limit = cost.slice, float(cost.slice.chip.capacity_bytes)
    space = Space(cost.anatomy(), where.chips, cost.job.knobs, memory_limit=limit, offload=False)
    quick, whole = (Exploration(space, cost, target, budget) for budget in (60, 10**6))
    quick.go()
    whole.exhaust()
    found, best = (min(one.results.values(), key=one.worth) for one in (quick, whole))
    assert quick.evaluations < whole.evaluations
    assert quick.worth(found)[1] <= 1.05 * whole.worth(best)[1]


@pytest.mark.quick
def test_few_rows_cut_the_model_and_many_the_batch() -> None:
    few, many = (search(_job(rows, knobs={"accumulate": (1,)}), ON).best for rows in (8, 2**20))
    assert few is not None
    assert many is not None
    assert many.layout.mesh.axes == {"data": 8, "model": 1}
    assert few.layout.mesh.axes["model"] > 1 or "sequence" in few.layout.mesh.axes
    assert many.estimate.memory.fits


def test_less_memory_is_another_layout_that_fits() -> None:
    job = _job(2**18, knobs={"accumulate": (1, 4)})
    roomy = search(job, ON).best
    assert roomy is not None
    limit = 0.5 * roomy.estimate.memory.total
    tight = search(job, ON, memory_limit=limit).best
    assert tight is not None
    assert tight.estimate.memory.limit == limit
    assert tight.estimate.memory.total <= limit
    assert tight.layout != roomy.layout


def test_any_function_can_be_planned() -> None:
    def scores(w: Any, ids: jax.Array) -> jax.Array:
        return jax.nn.softmax(w["embed"][ids] @ w["out"])

    w = {"embed": _shape(4096, 256), "out": _shape(256, 4096)}
    plans = search(program_job(scores, (w, _shape(64, 32, dtype="int32"))), ON)
    assert plans.best is not None
    assert plans.best.layout.choices == ()
    assert "roles of the arguments, by what the program does with them" in plans.notes[0]


def test_a_function_that_does_not_trace_keeps_its_own_error() -> None:
    with pytest.raises(TypeError, match="dot_general"):
        search(program_job(lambda w, x: w @ x, (_shape(3, 4), _shape(3, 4)), roles=("params", "batch")), ON)


def test_work_that_chips_repeat_is_no_useful_work() -> None:
    def fn(weights: Any, x: jax.Array) -> jax.Array:
        return x @ weights["small"] @ weights["large"]

    weights = {"small": _shape(512, 512), "large": _shape(512, 4096)}
    job = program_job(fn, (weights, _shape(1, 512)), roles=("params", "batch"))
    model = PaperModel(job, slice_by_name(ON))
    space = Space(model.anatomy(), 8, job.knobs)
    flops = 2 * 512 * (512 + 4096)
    for mesh in space.meshes():
        for cut in space.cuts(mesh, everything=True):
            found = model.estimate(space.layout(Point(mesh, cut)))
            # Some cuts leave a product whole on each chip: more is computed, and no more of it counts.
            assert found.model_flops == pytest.approx(flops / 8)
            assert found.flops >= found.model_flops * (1 - 1e-9)


def test_a_job_is_not_traced_again_for_another_slice() -> None:
    job = _job(rows=64)
    model = PaperModel(job, slice_by_name(ON))
    model.anatomy()
    (choices,) = model._programs
    assert model.elsewhere(job, slice_by_name("v4-64")).program(choices) is model.program(choices)
    # Another batch, or another chip, for which kernels are chosen anew, is another program.
    assert model.elsewhere(_job(rows=32), slice_by_name(ON)).program(choices) is not model.program(choices)
    assert model.elsewhere(job, slice_by_name("v5p-32")).program(choices) is not model.program(choices)


@pytest.mark.parametrize("constrained", [False, True])
def test_a_lookup_that_nothing_follows_may_leave_the_batch_whole(constrained: bool) -> None:
    """Of a decoder for four chips the compiler held the whole batch on each, until one constraint was written."""

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        y = x @ w
        return x + jax.nn.softmax(jnp.einsum("bth,bsh->bts", y, y)) @ y, None

    def loss(params: Any, batch: Any) -> jax.Array:
        x = params["embed"][batch["ids"]]
        x = with_sharding_constraint(x, ("batch", None, None)) if constrained else x
        return jnp.mean(jax.lax.scan(layer, x, params["layers"])[0] ** 2)

    params = {"embed": _shape(4096, 256), "layers": _shape(4, 256, 256)}
    job = training_job(loss, params, {"ids": _shape(16, 4096, dtype="int32")})
    where = slice_by_name("v4-8")
    cost = PaperModel(job, where)
    space = Space(cost.anatomy(), where.chips, job.knobs)
    found = cost.estimate(space.layout(Point((("data", 4),), (), "full", tuple(job.defaults().items()))))
    noted = [note for note in found.notes if "the compiler may hold the whole batch on every chip" in note]
    assert len(noted) == (0 if constrained else 1)
    # Four tables of scores and not one, of each that there is.
    tables = sum(size for _, size in found.memory.largest if size >= 4 * 4096 * 4096 * 2)
    assert tables > 0.5 * found.memory.temporaries
    assert (found.memory.unsure > 3 * tables) is not constrained


def test_what_is_picked_out_of_activations_leaves_the_batch_split() -> None:
    """Two towers whose logits are batch by batch: the compiler keeps a chip's rows of them, and took 17 GiB where the
    whole batch on every chip would be 98."""

    def loss(params: Any, batch: Any) -> jax.Array:
        one, other = batch["images"] @ params["image"], batch["texts"] @ params["text"]
        logits = one @ other.T
        picked = (jnp.take_along_axis(jax.nn.log_softmax(x), batch["pairs"][:, None], 1) for x in (logits, logits.T))
        return -sum(picked).mean()

    params = {"image": _shape(256, 128), "text": _shape(256, 128)}
    job = training_job(
        loss, params, {"images": _shape(4096, 256), "texts": _shape(4096, 256), "pairs": _shape(4096, dtype="int32")}
    )
    where = slice_by_name("v4-8")
    cost = PaperModel(job, where)
    space = Space(cost.anatomy(), where.chips, job.knobs)
    found = cost.estimate(space.layout(Point((("data", 4),), (), "full", tuple(job.defaults().items()))))
    assert not [note for note in found.notes if "the whole batch on every chip" in note]
    assert found.memory.most < 3 * 4096 * 4096 * 4  # of the whole batch it would be more tables than these


TOKENS, HIDDEN, FFN, EXPERTS, TOP = 32 * 64, 64, 128, 8, 2


@pytest.fixture(scope="module")
def mixture() -> PaperModel:
    """A training step of a decoder with experts; everything is recomputed."""
    model = ModularModelConfig(
        hidden=HIDDEN,
        layers=2,
        vocab=256,
        pattern="attention+moe",
        blocks={"attention": {"heads": 4}, "moe": {"experts": EXPERTS, "top_k": TOP, "ffn": FFN}},
    )
    loss, params = decoder.make_loss(model), decoder.param_shapes(model)
    knobs = {"remat": ("full",), "accumulate": (1,)}
    return PaperModel(training_job(loss, params, decoder.batch_shapes(32, 64), knobs=knobs), slice_by_name(ON))


@pytest.mark.parametrize(
    ("mesh", "sorted_here", "sent"),
    [
        ((("data", 8),), {TOKENS // 8 * TOP}, set()),
        # Room for all tokens of a device at each of the 8, in bfloat16, and the number of each one's expert.
        (
            (("expert", 8),),
            {TOKENS // 8 * TOP, 8 * TOKENS // 8},
            {("all_to_all", ("expert",), 8 * TOKENS // 8 * width) for width in (HIDDEN * 2, 4)},
        ),
        # Sums of the tokens' parts, and of their gradients'.
        ((("data", 4), ("model", 2)), {TOKENS // 4 * TOP}, {("all_reduce", ("model",), TOKENS // 4 * HIDDEN * 2)}),
    ],
)
def test_a_mixture_is_counted_as_it_runs_on_the_mesh(
    mixture: PaperModel, mesh: Any, sorted_here: set[int], sent: Any
) -> None:
    assert mixture.asks_for_mesh
    space = Space(mixture.anatomy(), 8, mixture.job.knobs)
    assert mesh in space.meshes(), "the experts and their width may be split"
    wide = tuple(group for group, words in space.anatomy.logical.items() if "mlp" in words)
    point = Point(mesh, wide if "model" in dict(mesh) else (), "full", tuple(mixture.job.defaults().items()))
    layout = space.layout(point)
    chip = spread(mixture.program_on(layout), layout)
    steps = [step for step, _ in chip.walk()]
    by_expert = [step for step in steps if step.primitive == "sort"]
    assert {chip.buffers[step.writes[0]].shape for step in by_expert} == {(n,) for n in sorted_here}
    found = [step.collective for step in steps if step.collective is not None]
    own = {(one.kind, one.axes, one.bytes) for one in found if one.why.startswith("the program's own")}
    assert {one for one in own if "data" not in one[1] and one[2] > EXPERTS * FFN} >= sent
    # What the mixture gathers are weights, in the type that they are used in, and no tokens.
    gathered = [one.bytes for one in found if one.kind == "all_gather" and one.why.startswith("the shard_map")]
    assert max(gathered, default=0) <= EXPERTS * HIDDEN * FFN * 2 / dict(mesh).get("model", 1)
    # Rules that the mixture does not go by are the same trace.
    others = dataclasses.replace(layout, rules={**layout.rules, "vocab": None, "heads": None})
    assert mixture.program_on(others) is mixture.program_on(layout)
    useful = mixture.program(point.choices).model_flops / 8
    assert mixture.estimate(layout).model_flops == pytest.approx(useful)


def test_a_search_that_traces_for_each_mesh_turns_the_knobs_of_the_first_before_others(cost: _Remembering) -> None:
    space = Space(cost.anatomy(), 8, cost.job.knobs, offload=False)
    usual, dear = (Exploration(space, cost, dear=dear) for dear in (False, True))
    usual.go()
    dear.go()
    assert {dict(point.choices)["remat"] for point in list(dear.results)[:4]} == {"none", "full"}
    assert {dict(point.choices)["remat"] for point in list(usual.results)[:4]} == {"full"}
    best = [min(run.results.values(), key=run.worth) for run in (usual, dear)]
    assert best[0].layout == best[1].layout
