"""The search alone, on a decoder's anatomy by hand and a cost model of ten lines."""

from __future__ import annotations

import contextlib
import dataclasses
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from jax.sharding import PartitionSpec
from tests.plan.search.standins import HEADS, HIDDEN, MLP, VOCAB, TenLines, decoder

from capibara.hardware.chips import chip
from capibara.hardware.topology import Slice, slice_by_name
from capibara.mesh.mesh import MeshConfig
from capibara.parallel.job import Job
from capibara.plan.search.confirmation import MOST_REFUSALS
from capibara.plan.search.exploration import TARGETS, Exploration
from capibara.plan.search.plans import DoesNotFit, Fix
from capibara.plan.search.search import search
from capibara.plan.search.space import Point, Space, Unfit
from capibara.program.anatomy import Anatomy, Leaf

KNOBS = MappingProxyType({"remat": ("none", "dots", "full"), "accumulate": (1, 2, 4)})
EVERYTHING = sum(leaf.bytes for leaf in decoder().leaves)


def _job(anatomy: Anatomy, **changes: Any) -> Job:
    return Job(build=lambda: anatomy, roles=(), knobs=KNOBS, tokens=1024, **changes)  # type: ignore[arg-type]


def _search(limit: float = EVERYTHING, anatomy: Anatomy | None = None, on: str = "v4-16", **keywords: Any) -> Any:
    anatomy = anatomy or decoder()
    keywords = {"model": lambda job, slice: TenLines(job.build(), limit), "memory_limit": limit, **keywords}
    return search(keywords.pop("job", _job(anatomy)), on, **keywords)


def _every_layout() -> list[Any]:
    """On 8 chips, with everything recomputed and the most microbatches."""
    space = Space(decoder(), 8, KNOBS)
    found = []
    for point in space.points():
        if dict(point.choices)["remat"] == "full":
            with contextlib.suppress(Unfit):
                found.append(space.layout(point))
    return found


# What a layout is.


def test_the_dimensions_of_a_decoder_are_told_apart() -> None:
    anatomy = decoder()
    assert anatomy.hub == HIDDEN
    # Heads and not the features of one head; a cut by columns, then by rows, first.
    assert anatomy.colours == ((HEADS, MLP, VOCAB), (HIDDEN,))
    assert not anatomy.experts


def test_experts_are_seen_by_where_they_stand() -> None:
    shapes = {"router": ((64, 8), (3, 9)), "up": ((8, 64, 32), (9, 3, 6)), "down": ((8, 32, 64), (9, 6, 3))}
    leaves = [Leaf(name, "params", shape, 4, groups) for name, (shape, groups) in shapes.items()]
    anatomy = Anatomy((*leaves, Leaf("tokens", "batch", (16, 64), 4, (0, 1))))
    assert anatomy.experts == {9}
    space = Space(anatomy, 8, {})
    assert (("expert", 8),) in space.meshes()
    layout = space.layout(Point((("data", 2), ("expert", 4))))
    assert tuple(layout.specs[1]) == ("expert",)
    assert tuple(layout.specs[3]) == (("data", "expert"),)


def test_a_point_in_words_and_specs() -> None:
    space = Space(decoder(), 32, KNOBS)
    point = Point(
        (("data", 4), ("model", 8)), (HEADS, MLP, VOCAB), "full", (("remat", "full"), ("accumulate", 2)), offload=True
    )
    layout = space.layout(point)
    words = "data 4 x model 8 (heads, mlp, vocab), fully sharded, remat full, accumulate 2, optimizer state on the host"
    assert layout.name == words
    by_name = dict(zip([leaf.name for leaf in space.anatomy.leaves], layout.specs, strict=True))
    assert by_name["q"] == PartitionSpec(None, "data", "model")
    assert by_name["down"] == PartitionSpec(None, "model", "data")
    assert by_name["norm"] == PartitionSpec()
    assert by_name["tokens"] == PartitionSpec("data")
    assert layout.rules["heads"] == "model"
    assert layout.rules["hidden"] is None
    assert layout.rules["batch"] == "data"
    assert len(layout.host) == 12
    other = dict(zip(by_name, space.layout(dataclasses.replace(point, parameters="optimizer")).specs, strict=True))
    assert other["q"] == PartitionSpec(None, None, "model")
    assert other["mean/q"] == PartitionSpec(None, "data", "model")


def test_the_name_of_a_cut_through_many_layers_is_short() -> None:
    leaves = [Leaf(f"w{n}", "params", (16, 8), 4, (n, 100)) for n in range(9)]
    space = Space(Anatomy(tuple(leaves), names=MappingProxyType({n: f"w{n}" for n in range(9)})), 8, {})
    assert space.words(Point((("model", 8),), tuple(range(9)))) == "model 8 (w0, w1, w2, w3 and 5 more), replicated"


def test_what_does_not_divide_is_refused_by_name() -> None:
    space = Space(decoder(rows=6, length=10), 8, KNOBS)
    with pytest.raises(Unfit, match=r"6 rows of the batch do not divide over 4 chips \(4 or 8 would\)"):
        space.layout(Point((("data", 4), ("model", 2)), (MLP,)))
    with pytest.raises(Unfit, match="a sequence of 10 does not divide over 4"):
        space.layout(Point((("data", 2), ("sequence", 4))))
    with pytest.raises(Unfit, match="6 rows do not divide over 2 chips x 2 microbatches"):
        space.layout(Point((("data", 2), ("model", 4)), (MLP,), choices=(("accumulate", 2),)))
    small = Space(decoder(), 8, KNOBS, memory_limit=1000)
    with pytest.raises(Unfit, match="for its arguments alone"):
        small.layout(Point((("data", 8),)))


def test_pipelines_are_tried_when_asked_for() -> None:
    assert not any("pipeline" in dict(mesh) for mesh in Space(decoder(), 8, KNOBS).meshes())
    space = Space(decoder(), 8, KNOBS, pipelines=True)
    assert (("pipeline", 4), ("data", 2)) in space.meshes()
    layout = space.layout(Point((("pipeline", 4), ("data", 2))))
    assert layout.stages == 4
    assert layout.specs[1] == PartitionSpec("pipeline")
    with pytest.raises(Unfit, match="6 layers do not divide into 4 stages"):
        Space(decoder(layers=6), 8, KNOBS, pipelines=True).layout(Point((("pipeline", 4), ("data", 2))))
    for parts, said in ((2, "2 microbatches do not divide over 4 stages"), (4, None)):
        point = Point((("pipeline", 4), ("data", 2)), choices=(("remat", "full"), ("accumulate", parts)))
        if said is None:
            assert "4 microbatches in flight" in space.layout(point).name
            continue
        with pytest.raises(Unfit, match=said):
            space.layout(point)
    barred = dataclasses.replace(space, why_no_stages="its layers are no scan")
    assert not any("pipeline" in dict(mesh) for mesh in barred.meshes())
    with pytest.raises(Unfit, match="no stages of a pipeline: its layers are no scan"):
        barred.layout(Point((("pipeline", 4), ("data", 2))))


# The search.


@pytest.mark.parametrize(
    ("target", "rows", "link", "share"),
    [
        ("throughput", 8, 1e8, 3.0),
        ("throughput", 64, 1e10, 0.4),
        ("throughput", 16, 1e9, 0.15),
        ("latency", 64, 1e9, 0.1),
        ("memory", 16, 1e9, 0.15),
    ],
)
def test_within_a_twentieth_of_the_exhaustive_search(target: str, rows: int, link: float, share: float) -> None:
    # One head and a prime length: few enough layouts to enumerate, on 8 chips.
    anatomy = decoder(rows=rows, length=7, heads=1)
    limit = share * EVERYTHING
    space = Space(anatomy, 8, KNOBS, memory_limit=limit)
    quick, whole = (Exploration(space, TenLines(anatomy, limit, link), target, budget) for budget in (220, 10**6))
    quick.go()
    whole.exhaust()
    found, best = (min(one.results.values(), key=one.worth) for one in (quick, whole))
    assert best.fits
    assert found.fits
    assert quick.evaluations < whole.evaluations / 2
    assert quick.worth(found)[1] <= 1.05 * whole.worth(best)[1]


def test_the_targets_choose_differently() -> None:
    best = {target: _search(10 * EVERYTHING, decoder(rows=64), target=target).best for target in TARGETS}
    assert len({one.layout.name for one in best.values()}) == 3
    assert min(best, key=lambda target: best[target].estimate.seconds) == "throughput"
    assert min(best, key=lambda target: best[target].estimate.high) == "latency"
    assert min(best, key=lambda target: best[target].estimate.memory.total) == "memory"


def test_the_same_plan_twice_and_no_layout_costed_twice() -> None:
    anatomy = decoder()
    models = [TenLines(anatomy, EVERYTHING) for _ in range(2)]
    first, second = (_search(model=lambda job, slice, m=model: m) for model in models)
    assert [one.layout for one in first.ranked] == [one.layout for one in second.ranked]
    assert models[0].seen == models[1].seen
    assert first.evaluations == len(models[0].seen) == len({repr(layout) for layout in models[0].seen})


def test_ranked_layouts_differ_in_kind_and_top_says_how_many() -> None:
    plans = _search(top=5)
    assert len(plans.ranked) == 5
    seconds = [one.estimate.seconds for one in plans.ranked]
    assert seconds == sorted(seconds)
    assert len({(one.layout.mesh, one.layout.specs) for one in plans.ranked}) == 5
    assert len(_search(top=1).ranked) == 1


def test_a_given_mesh_is_kept_and_checked() -> None:
    plans = _search(mesh={"data": 2, "model": 4})
    assert {one.layout.mesh.axes["model"] for one in plans.ranked} == {4}
    assert _search(mesh=MeshConfig((2, 4))).best.layout == plans.best.layout
    with pytest.raises(ValueError, match=r"multiply to the chips, 8.*Fix: use data=2, model=4"):
        _search(mesh={"data": 3, "model": 4})
    with pytest.raises(ValueError, match="Did you mean 'model'"):
        _search(mesh={"data": 2, "modle": 4})


def test_less_memory_turns_recomputation_then_the_host_on() -> None:
    roomy, tight = _search(10 * EVERYTHING).best, _search(0.1 * EVERYTHING).best
    assert dict(roomy.layout.choices)["remat"] == "none"
    assert tight.estimate.seconds > roomy.estimate.seconds
    assert tight.estimate.memory.total <= 0.1 * EVERYTHING
    assert _search(0.15 * EVERYTHING).best.layout.host
    assert _search(0.15 * EVERYTHING, offload=False, fixes=False).best is None


def test_budget_and_deadline_stop_it() -> None:
    assert _search(budget=5).evaluations == 5
    stopped = _search(deadline_s=0.0)
    assert stopped.evaluations == 1
    assert not stopped.complete
    assert stopped.best is not None, "the best so far"
    assert _search().complete
    assert _search(deadline_s=600.0).complete


def test_what_was_looked_at_is_told() -> None:
    told: list[str] = []
    plans = _search(tell=told.append)
    assert f"{plans.evaluations} layouts looked at, best so far {plans.best.layout.name}: " in told[-1]


def test_out_of_time_no_more_changes_are_tried_and_that_is_said() -> None:
    half = decoder(rows=2)

    def never() -> Any:
        raise AssertionError("to make a smaller job takes time that is spent")

    job = _job(decoder(), smaller={"half the batch": lambda: _job(half, smaller={"half the batch": never})})
    limit = 0.04 * EVERYTHING
    plans = _search(limit, job=job, deadline_s=1e-9)
    assert plans.best is None
    assert not plans.complete
    assert plans.fixes == ()
    # With time for it, something is found.
    in_time = _job(decoder(), smaller={"half the batch": lambda: _job(half)})
    assert _search(limit, job=in_time, deadline_s=600.0).complete


def test_a_compiler_has_the_last_word() -> None:
    plain = _search(top=3)
    limit = plain.best.estimate.memory.limit
    asked: list[str] = []

    def confirm(layout: Any) -> Any:
        asked.append(layout.name)
        if layout == plain.ranked[0].layout:
            return SimpleNamespace(error="no such product", total_bytes=None)
        if layout == plain.ranked[1].layout:
            return SimpleNamespace(error=None, total_bytes=1.01 * limit)
        return SimpleNamespace(error=None, total_bytes=0.9 * limit)

    plans = _search(top=2, confirm=confirm)
    assert len(asked) == 4
    assert plans.best.confirmed
    assert plans.best.estimate.memory.total == pytest.approx(0.9 * limit)
    first, second = plans.by_compiler
    assert (first.layout, first.reason) == (plain.ranked[0].layout, "the compiler refused it: no such product")
    assert second.layout == plain.ranked[1].layout
    assert second.reason.startswith("the compiler needs")
    assert second.bytes == 1.01 * limit, "the compiler's bytes, and not the model's"
    out = [one.layout for one in plans.by_compiler]
    assert all(one.layout not in out for one in plans.ranked), "what was refused is not offered again"


def test_after_a_refusal_the_next_is_the_best_that_fits_if_the_model_is_as_low_again() -> None:
    model, asked = TenLines(decoder(), EVERYTHING), []

    def confirm(layout: Any) -> Any:
        asked.append(layout)
        too_large = len(asked) == 1
        return SimpleNamespace(
            error="out of memory" if too_large else None, total_bytes=1.5 * EVERYTHING if too_large else None
        )

    plans = _search(top=1, confirm=confirm, model=lambda job, slice: model, fixes=False)
    seen = [(layout, model.estimate(layout)) for layout in list(model.seen)]
    first, second = (model.estimate(layout) for layout in asked[:2])
    assert plans.low == pytest.approx(1.5 * EVERYTHING / first.memory.total)
    believed = [(one.seconds, layout.name) for layout, one in seen if plans.low * one.memory.total <= EVERYTHING]
    assert (second.seconds, asked[1].name) == min(believed)


def test_when_the_compiler_takes_none_of_the_tried_the_verdict_has_its_bytes() -> None:
    plans = _search(confirm=lambda layout: SimpleNamespace(error="too large", total_bytes=1.2 * EVERYTHING))
    assert plans.best is None
    assert len(plans.by_compiler) == MOST_REFUSALS
    assert plans.unasked > 0
    near = plans.closest
    assert near.by_compiler
    assert near.bytes == 1.2 * EVERYTHING
    # A change is offered where it fits with the model as low as the compiler found it.
    assert all(fix.estimate.memory.total * plans.low <= EVERYTHING for fix in plans.fixes)


def test_a_compiler_settles_what_the_models_margin_leaves_open() -> None:
    least = min(TenLines(decoder(), EVERYTHING).estimate(layout).memory.total for layout in _every_layout())

    class Unsure(TenLines):
        def estimate(self, layout: Any) -> Any:
            found = super().estimate(layout)
            return dataclasses.replace(found, memory=dataclasses.replace(found.memory, margin=0.1))

    job, limit = _job(decoder()), 1.05 * least
    keywords = {"model": lambda job, slice: Unsure(decoder(), limit), "fixes": False, "memory_limit": limit}
    assert search(job, "v4-16", **keywords).best is None
    taken = search(
        job, "v4-16", **keywords, confirm=lambda layout: SimpleNamespace(error=None, total_bytes=0.99 * limit)
    )
    assert taken.best is not None
    assert taken.best.confirmed
    assert taken.best.layout not in [one.layout for one in taken.refused]
    # One that knows nothing of the chip's memory is not asked, whatever it would say.
    asked: list[Any] = []

    class Elsewhere:
        settles = False

        def __call__(self, layout: Any) -> Any:
            asked.append(layout)
            return SimpleNamespace(error=None, total_bytes=None)

    assert search(job, "v4-16", **keywords, confirm=Elsewhere()).best is None
    assert not asked
    # And where it does not answer, the model's word stands.
    assert search(job, "v4-16", **keywords, confirm=lambda layout: None).best is None


@pytest.mark.parametrize("error", [None, "too large"])
def test_a_compiler_settles_what_the_model_cannot(error: str | None) -> None:
    """Every layout has the limit inside of its range: without a compiler none fits, and one that takes it decides."""

    class Unsure(TenLines):
        def estimate(self, layout: Any) -> Any:
            found = super().estimate(layout)
            return dataclasses.replace(found, memory=dataclasses.replace(found.memory, unsure=2.0 * EVERYTHING))

    def unsure(job: Any, slice: Any) -> Any:
        return Unsure(job.build(), EVERYTHING)

    alone = _search(model=unsure, fixes=False)
    assert alone.best is None
    unsettled = [one.reason for one in alone.refused if one.estimate and one.estimate.memory.may_fit]
    assert unsettled
    assert all(reason.startswith("may need") for reason in unsettled)
    asked: list[str] = []

    def confirm(layout: Any) -> Any:
        asked.append(layout.name)
        return SimpleNamespace(error=error, total_bytes=0.9 * EVERYTHING if error is None else None)

    plans = _search(model=unsure, fixes=False, confirm=confirm, top=2)
    if error is not None:
        assert plans.best is None
        assert len(asked) == MOST_REFUSALS
        return
    assert plans.best is not None
    assert plans.best.confirmed
    assert plans.best.estimate.memory.most == pytest.approx(0.9 * EVERYTHING)  # the compiler's word leaves no range


# When nothing fits.


def test_the_error_names_the_cheapest_change_that_fits() -> None:
    limit = 0.04 * EVERYTHING
    half = decoder(rows=2)
    job = _job(
        decoder(rows=4),
        beyond=MappingProxyType({"accumulate": (64,)}),
        smaller=MappingProxyType({"half the batch": lambda: _job(half)}),
        not_smaller=MappingProxyType({"half the sequence": "KeyError: rows"}),
    )
    plans = _search(limit, job=job)
    assert plans.best is None
    untried = "half the sequence was not tried: the program refuses it (KeyError: rows)"
    assert untried in plans.notes
    assert untried not in _search(EVERYTHING, job=job).notes, "nobody asks when it fits"
    # More chips were tried by the same model, and so was half the batch, which does not help here: state is the most.
    assert [fix.change for fix in plans.fixes] == ["v4-64 (32 chips, 2x4x4)"]
    assert plans.nearest_fix.estimate.memory.fits
    with pytest.raises(DoesNotFit, match=r"at best on v4-16 .*needs .* KiB a chip.*Fix: v4-64") as error:
        plans.require()
    assert error.value.plans is plans


def test_what_is_far_from_fitting_is_given_up_soon_and_so_are_its_halves() -> None:
    def batch(rows: int) -> Job:
        less = {"half the batch": lambda: batch(rows // 2)} if rows > 1 else {}
        return _job(decoder(rows=rows), smaller=MappingProxyType(less))

    models: list[TenLines] = []

    def model(job: Any, slice: Any) -> TenLines:
        models.append(TenLines(job.build(), limit))
        return models[-1]

    limit = 0.001 * EVERYTHING
    plans = _search(limit, job=batch(64), model=model)
    assert plans.best is None
    assert plans.closest is not None
    # Parameters are most of it: the first half shows that no smaller batch can help, and 1/4 to 1/16 are not tried.
    here = [one for one in models if one.anatomy().leaves[-1].shape[0] < 64]
    assert {one.anatomy().leaves[-1].shape[0] for one in here[:1]} == {32}
    tried_alone = [one.anatomy().leaves[-1].shape[0] for one in models[1:3]]
    assert tried_alone == [32, 64], "half the batch, then the batch on more chips"
    # Four meshes, without and with the state on the host.
    assert all(len(one.seen) <= 8 for one in models)


def test_a_little_too_large_is_searched_whole() -> None:
    model = TenLines(decoder(), 0.0)
    least = min(model.estimate(layout).memory.total for layout in _every_layout())
    plans = _search(least / 1.1, fixes=False)
    assert plans.best is None
    assert plans.evaluations > 30
    assert _search(least / 1.5, fixes=False).evaluations < 30


def test_knobs_that_nobody_asked_for_are_a_fix() -> None:
    limit = EVERYTHING
    knobs = MappingProxyType({"remat": ("none",), "accumulate": (1,)})
    job = dataclasses.replace(_job(decoder(rows=256)), knobs=knobs)
    assert _search(limit, job=job, fixes=False).best is None
    told = dataclasses.replace(job, beyond=MappingProxyType({"remat": ("dots", "full")}))
    changes = [fix.change for fix in _search(limit, job=told).fixes]
    assert "remat dots or full" in changes
    assert any("chips" in change for change in changes)


def test_freeing_the_mesh_and_the_host_are_fixes() -> None:
    changes = [fix.change for fix in _search(0.15 * EVERYTHING, offload=False).fixes]
    assert "the optimizer's state on the host" in changes
    changes = [fix.change for fix in _search(0.18 * EVERYTHING, mesh={"data": 8}, offload=False).fixes]
    assert "a mesh of another shape" in changes


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"target": "speed"}, "Choices: 'throughput', 'latency', 'memory'"),
        ({"top": 0}, "top is a whole number"),
        ({"memory_limit": -1.0}, "positive number of bytes"),
        ({"on": "v4-33"}, "v4-32"),
    ],
)
def test_bad_input_is_named(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _search(**keywords)


def test_a_change_is_as_dear_as_its_chips_are_many_and_its_tokens_are_few() -> None:
    best = _search().best

    def cost(slice: str, tokens: int | None) -> float:
        job = dataclasses.replace(_job(decoder(rows=4)), tokens=tokens)
        return Fix("", slice_by_name(slice), job, best.layout, best.estimate).cost

    assert cost("v4-64", 8) == pytest.approx(4 * cost("v4-16", 8))
    assert cost("v4-16", None) == pytest.approx(8 * cost("v4-16", 8)) == pytest.approx(8 * best.estimate.seconds)


def test_cutting_a_microbatch_further_is_given_up_only_where_it_cannot_be_enough() -> None:
    estimate = _search().best.estimate

    def hopeless(limit: float, more: int) -> bool:
        memory = dataclasses.replace(estimate.memory, arguments=4.0, temporaries=8.0, limit=limit)
        run = Exploration(None, None)  # type: ignore[arg-type]
        return run._hopeless(1, dataclasses.replace(estimate, memory=memory), more)

    # Halved, the temporaries are 4 at the least; quartered 2.
    assert (hopeless(8.0, 2), hopeless(7.0, 2), hopeless(7.0, 4)) == (False, True, False)


def test_more_gpus_of_a_host_are_a_change_too() -> None:
    one = Slice("h200", chip("h200"), (1,))
    plans = _search(0.3 * EVERYTHING, on=one, offload=False)
    assert plans.best is None
    more = [fix for fix in plans.fixes if fix.change.startswith("h200x")]
    assert [(fix.change, fix.slice.chips) for fix in more] == [("h200x8 of one host", 8)]
