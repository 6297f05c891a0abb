"""Every parallelism of the planner's own layouts trains as one device does: losses, gradients and new parameters."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tests.train.tiny_runs import DENSE, MOE, packed_batches, run_loop, tiny_model

STEPS = 2
BOUND = 1e-5
"""Of float32: losses of about 4 have an ulp of 5e-7, and each device adds up its own rows first."""

MODELS = {"dense": DENSE, "moe": MOE}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@functools.lru_cache(maxsize=4)
def alone(kind: str, rows: int, folder: Path) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
    """The run on one device."""
    loop, result = run_loop(tiny_model(folder, MODELS[kind]), packed_batches(STEPS, rows))
    return result.history, [np.asarray(leaf) for leaf in jax.tree.leaves(loop.params)]


def assert_same_run(kind: str, rows: int, folder: Path, axes: dict[str, int], **options: Any) -> str:
    """The run on a mesh is that on one device; the layout's name."""
    history, params = alone(kind, rows, folder)
    loop, result = run_loop(tiny_model(folder, MODELS[kind]), packed_batches(STEPS, rows), axes, **options)
    for mine, its in zip(result.history, history, strict=True):
        assert mine["loss"] == pytest.approx(its["loss"], abs=BOUND)
        assert mine["grad_norm"] == pytest.approx(its["grad_norm"], rel=BOUND)
    for leaf, expected in zip(jax.tree.leaves(loop.params), params, strict=True):
        np.testing.assert_allclose(np.asarray(leaf), expected, rtol=BOUND, atol=BOUND)
        assert len(leaf.sharding.device_set) == np.prod(list(axes.values()))
    return loop.compiled.chosen.layout.name


def test_stages_of_packed_rows_beside_data_and_tensor_parallel(folder: Path) -> None:
    name = assert_same_run("dense", 8, folder, {"data": 2, "model": 2, "pipeline": 2}, settings={"accumulate": 2})
    assert "pipeline 2" in name


def test_experts_over_devices(folder: Path) -> None:
    assert "expert 2" in assert_same_run("moe", 8, folder, {"data": 4, "expert": 2})


@pytest.mark.spread(4)
@pytest.mark.parametrize(
    ("kind", "axes", "options"),
    [
        ("dense", {"data": 8}, {"parameters": ("replicated",)}),
        ("dense", {"data": 8}, {"parameters": ("optimizer",)}),
        ("dense", {"data": 8}, {"parameters": ("full",)}),
        ("dense", {"model": 8}, {}),
        ("dense", {"sequence": 8}, {}),
        ("dense", {"pipeline": 4, "data": 2}, {"settings": {"accumulate": 4}}),
        ("dense", {"data": 2, "sequence": 2, "model": 2}, {}),
        ("dense", {"data": 4, "model": 2}, {"settings": {"accumulate": 2, "remat": "full"}}),
        ("moe", {"expert": 8}, {}),
        ("moe", {"data": 2, "expert": 2, "model": 2}, {}),
        ("moe", {"data": 8}, {"parameters": ("full",)}),
    ],
)
def test_a_mesh_of_8(kind: str, axes: dict[str, int], options: dict[str, Any], folder: Path) -> None:
    name = assert_same_run(kind, 8, folder, axes, **options)
    assert all(f"{axis} {size}" in name for axis, size in axes.items())
    if options.get("parameters") == ("full",):
        assert "fully sharded" in name


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("kind", "axes", "options"),
    [
        ("dense", {"data": 32}, {"parameters": ("full",)}),
        ("dense", {"data": 4, "model": 8}, {}),
        ("dense", {"data": 4, "sequence": 2, "model": 4}, {}),
        ("dense", {"data": 2, "pipeline": 4, "model": 4}, {"settings": {"accumulate": 4}}),
        ("moe", {"data": 4, "expert": 8}, {}),
        ("moe", {"data": 4, "expert": 4, "model": 2}, {}),
    ],
)
def test_a_mesh_of_32(kind: str, axes: dict[str, int], options: dict[str, Any], folder: Path) -> None:
    assert_same_run(kind, 32, folder, axes, **options)


@pytest.mark.parametrize(("kind", "axes"), [("dense", {"data": 2, "model": 4}), ("moe", {"expert": 2, "model": 2})])
def test_every_dimension_that_the_model_axis_can_cut(
    kind: str, axes: dict[str, int], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model this small the planner cuts the head alone; here heads and ffn too, as it does of large ones."""
    from capibara.plan.search.space import Space

    def widest(self: Space, mesh: Any, everything: bool = False) -> list[tuple[int, ...]]:
        size = dict(mesh).get("model", 1)
        return [tuple(g for g in self.anatomy.model if self.anatomy.sizes[g] % size == 0 and g != self.anatomy.hub)]

    monkeypatch.setattr(Space, "cuts", widest)
    monkeypatch.setattr(Space, "moves", lambda self, point: [])
    name = assert_same_run(kind, 8, folder, axes)
    assert "heads" in name


def test_a_mesh_that_does_not_divide_says_what_would(folder: Path) -> None:
    from capibara.plan.search.plans import DoesNotFit

    model = tiny_model(folder, DENSE)
    with pytest.raises(DoesNotFit, match="6 rows of the batch do not divide over 4 chips"):
        run_loop(model, packed_batches(1, 6), {"data": 4})
    with pytest.raises(DoesNotFit, match="a sequence of 12 does not divide over 8 chips"):
        run_loop(model, packed_batches(1, 8, 12), {"sequence": 8})
    with pytest.raises(DoesNotFit, match="4 layers do not divide into 3 stages"):
        run_loop(model, packed_batches(1, 12), {"pipeline": 3}, settings={"accumulate": 3})


def test_rows_that_meet_in_a_layer_are_no_pipeline(folder: Path) -> None:
    """A mixture of experts sorts the tokens of all rows."""
    from capibara.plan.search.plans import DoesNotFit

    with pytest.raises(DoesNotFit, match="no stages of a pipeline"):
        run_loop(tiny_model(folder, MOE), packed_batches(1, 8), {"pipeline": 2}, settings={"accumulate": 2})
