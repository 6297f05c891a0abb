"""Training meshes: five axes, sizes that multiply, and the nearest that do."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.mesh.chips import chips

from capibara.mesh.axis_wiring import wiring
from capibara.mesh.training_mesh import TRAINING_AXES, create_training_mesh, nearest_sizes, training_mesh_config


@pytest.mark.quick
def test_the_documented_call() -> None:
    mesh = create_training_mesh(
        total_chips=32, data_parallel_size=8, model_parallel_size=4, pipeline_parallel_size=1
    )  # fmt: skip
    assert dict(mesh.shape) == {"pipeline": 1, "data": 8, "expert": 1, "sequence": 1, "model": 4}
    assert mesh.axis_names == TRAINING_AXES
    assert mesh.devices.size == 32


@pytest.mark.quick
def test_every_size_is_an_axis() -> None:
    mesh = create_training_mesh(32, 2, 2, 2, expert_parallel_size=2, sequence_parallel_size=2)
    assert set(mesh.shape.values()) == {2}
    assert dict(create_training_mesh(16, 1, 2, 4, sequence_parallel_size=2).shape) == {
        "pipeline": 4,
        "data": 1,
        "expert": 1,
        "sequence": 2,
        "model": 2,
    }


def test_the_config_needs_no_devices() -> None:
    config = training_mesh_config(4096, 64, 8, 8)
    assert config.axes == {"pipeline": 8, "data": 64, "expert": 1, "sequence": 1, "model": 8}
    assert config.target == "training"


def test_the_model_axis_has_the_nearest_chips() -> None:
    devices = chips((2, 4, 4))
    mesh = create_training_mesh(32, 2, 8, 2, devices=devices)
    found = wiring(mesh)
    assert found["model"].ring
    # A grid without wrap-around has to cut a dimension for 2 x 2 x 8: the stages pay, which talk least.
    assert (found["pipeline"].max_hops, found["data"].max_hops) == (2, 1)


def test_given_devices_are_taken() -> None:
    devices = jax.devices()[8:16]
    mesh = create_training_mesh(8, 4, 2, 1, devices=devices)
    assert set(mesh.devices.flat) == set(devices)


def test_fewer_devices_than_chips_says_how_to_simulate_them() -> None:
    with pytest.raises(ValueError, match=r"needs 64 devices. Got 32 cpu devices.*device_count=64") as caught:
        create_training_mesh(64, 16, 4, 1)
    assert "v4-128 slice (64 chips" in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "fix"),
    [
        # (chips, data, model, pipeline): data is what changes for free, then the axis that talks least.
        ((32, 8, 8, 1), "data_parallel_size=4, or model_parallel_size=4"),
        ((64, 8, 4, 1), "data_parallel_size=16, or model_parallel_size=8"),
        ((32, 8, 4, 2), "data_parallel_size=4, or pipeline_parallel_size=1"),
        # 5 to 8 is a change of 1.6, where 5 to 4 needs another of 2.
        ((32, 5, 4, 1), "data_parallel_size=8, or data_parallel_size=4 and model_parallel_size=8"),
        ((12, 8, 2, 1), "data_parallel_size=6, or data_parallel_size=12 and model_parallel_size=1"),
        ((32, 1, 1, 1), "data_parallel_size=32"),
    ],
)
def test_sizes_that_do_not_multiply_name_the_nearest_that_do(asked: tuple[int, ...], fix: str) -> None:
    chips_, data, model, pipeline = asked
    product = data * model * pipeline
    with pytest.raises(ValueError) as caught:
        training_mesh_config(*asked)
    text = str(caught.value)
    assert f"multiply to total_chips={chips_}" in text
    assert f"data {data} x model {model} x pipeline {pipeline} x expert 1 x sequence 1 = {product}" in text
    assert text.endswith(f"Fix: use {fix}.")


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.sampled_from([6, 16, 32, 48, 64]), st.tuples(*[st.sampled_from([1, 2, 3, 4, 8])] * 5))
def test_the_nearest_multiply_and_no_other_is_nearer(total: int, given_sizes: tuple[int, ...]) -> None:
    asked = dict(zip(TRAINING_AXES, given_sizes, strict=True))

    def change(sizes: dict[str, int]) -> float:
        return math.prod(max(sizes[axis], asked[axis]) / min(sizes[axis], asked[axis]) for axis in asked)

    near = nearest_sizes(total, asked, count=3)
    assert all(math.prod(sizes.values()) == total for sizes in near)
    factors = [change(sizes) for sizes in near]
    assert factors == sorted(factors)
    # Doubling or halving one size less and another more, from the answer: still an answer, and never a smaller change.
    best = near[0]
    for grown in asked:
        for shrunk in asked:
            if grown != shrunk and min(asked[grown], asked[shrunk]) > 1 and best[shrunk] % 2 == 0:
                other = {**best, grown: best[grown] * 2, shrunk: best[shrunk] // 2}
                # Ratios of whole numbers in float64: equal ones may differ in the last bit.
                assert change(other) >= factors[0] * (1 - 1e-12)


@pytest.mark.parametrize("size", [0, -1, 2.0, "8", True, None])
def test_a_size_is_a_whole_number(size: object) -> None:
    with pytest.raises(ValueError, match="model_parallel_size is a whole number from 1 up"):
        create_training_mesh(32, 8, size, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="total_chips is a whole number from 1 up"):
        create_training_mesh(size, 8, 4, 1)  # type: ignore[arg-type]


def test_numpy_integers_are_whole_numbers() -> None:
    assert training_mesh_config(np.int64(32), np.int32(8), 4).size == 32  # type: ignore[arg-type]


def test_the_error_for_absurdly_many_chips_comes_at_once() -> None:
    with pytest.raises(ValueError, match="use data_parallel_size=34359738368, or expert"):
        training_mesh_config(2**40, 8, 4, 2, 2, 2)
    with pytest.raises(ValueError, match="Fix: make them multiply to 1000000000039"):  # a prime
        training_mesh_config(10**12 + 39, 8, 4)


def test_of_equal_changes_the_one_that_touches_fewer_axes_is_nearer() -> None:
    asked = {"pipeline": 1, "data": 2, "expert": 2, "sequence": 1, "model": 2}
    # All by a factor of 4; one axis, the model's, before data and expert together.
    assert [{**asked, axis: 8} for axis in ("data", "expert", "model")] == list(nearest_sizes(32, asked, count=3))
