"""The Hopper kernels of state space duality, emulated: their arithmetic and the synchronisation of their rings."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tests.kernels.pallas import hopper_emulator as emulator

from capibara.kernels import target
from capibara.kernels.core.spec import Case
from capibara.kernels.lab.check import check_output, expected
from capibara.kernels.ops.scan import SSD
from capibara.kernels.ops.scan.ssd.api import SSD_GRAD
from capibara.kernels.ops.scan.ssd.cases import ALL, grad_case, make_case
from capibara.kernels.ops.scan.ssd.hopper import backward, forward, states
from capibara.kernels.ops.scan.ssd.hopper.backward import GradConfig, ssd_backward
from capibara.kernels.ops.scan.ssd.hopper.forward import ChunksConfig, refuses, ssd_forward

KERNELS = (forward, states, backward)

NONE: frozenset[str] = frozenset()
CASES = [
    # Chunks beyond the ring and a piece of one, two groups; a head of two slices; less than a chunk, no dt.
    (make_case("groups", 1, 201, 4, 64, 2, 64, NONE, **ALL), ChunksConfig(2)),
    (make_case("wide", 1, 128, 1, 128, 1, 128, NONE), ChunksConfig(3)),
    (make_case("short", 2, 5, 2, 64, 1, 64, NONE, dt=False, D=False, return_final_state=True), ChunksConfig(1)),
]


@pytest.mark.quick
@pytest.mark.parametrize(("case", "config"), CASES, ids=lambda given: getattr(given, "name", ""))
def test_emulated(case: Case, config: ChunksConfig) -> None:
    arrays = case.arrays()
    params = {**SSD.params, **case.params}
    with emulator.emulated(*KERNELS):
        out = jax.jit(lambda *given: ssd_forward(*given, config=config, **params))(*arrays)
        jax.block_until_ready(out)
    result = check_output(out, expected(SSD, arrays, case.params))
    assert result.ok, result.why


GRAD_CASES = [
    # Slices and chunks beyond their rings and a piece of a chunk; groups; parts whose sums are added, a head of two
    # slices, no dt, no D.
    (make_case("one-group", 1, 201, 4, 64, 1, 64, NONE, **ALL), GradConfig(3, 1)),
    (make_case("groups", 1, 70, 4, 64, 2, 64, NONE), GradConfig(1, 1)),
    (make_case("parts", 1, 5, 3, 128, 1, 128, NONE, dt=False, D=False, return_final_state=True), GradConfig(2, 2)),
]


@pytest.mark.quick
@pytest.mark.parametrize(("case", "config"), GRAD_CASES, ids=lambda given: getattr(given, "name", ""))
def test_gradient_emulated(case: Case, config: GradConfig) -> None:
    case = grad_case(case)
    arrays = case.arrays()
    with emulator.emulated(*KERNELS):
        out = jax.jit(lambda *given: ssd_backward(*given, config=config))(*arrays)
        jax.block_until_ready(out)
    result = check_output(out, expected(SSD_GRAD, arrays, case.params))
    assert result.ok, result.why


def test_gradient_lowers_on_explicit_axes() -> None:
    """A kernel is traced with one device's shapes: with a sharded type its references could not be indexed."""
    case = grad_case(make_case("mesh", 2, 70, 4, 64, 2, 64, NONE, **ALL))
    devices = jax.devices("cpu")[:4]
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2, devices=devices)
    rows, state = P("data", None, "model"), P("data", "model")
    specs = (rows, rows, rows, rows, rows, P("model"), state, rows, state)
    given = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for x, spec in zip(case.args(), specs, strict=True)
    ]
    with target("gpu", "NVIDIA H200"), jax.set_mesh(mesh):
        traced = jax.jit(lambda *given: SSD_GRAD(*given, implementation="hopper")).trace(*given)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 3
    assert "all_reduce" in text  # of D, over the batch


def test_gradient_says_why_not() -> None:
    case = grad_case(make_case("no", 1, 64, 2, 64, 1, 64, NONE, dtype="float16"))
    with target("gpu", "NVIDIA H200"):
        assert "float16's range" in str(backward.refuses(SSD_GRAD.call(*case.args())))
        right = grad_case(make_case("yes", 1, 64, 2, 64, 1, 64, NONE))
        assert backward.refuses(SSD_GRAD.call(*right.args())) is None
    with pytest.raises(ValueError, match="stages and parts are 1 or more"):
        GradConfig(2, 0)
    with pytest.raises(ValueError, match="parts divides the 2 slices of a group"):
        ssd_backward(*right.arrays(), config=GradConfig(2, 3))


def test_gradient_parts_fill_the_chip() -> None:
    """A batch of one has its heads in parts, and no part that a tuner tries leaves a slice out."""
    case = grad_case(make_case("few", 1, 512, 12, 64, 1, 128, NONE))
    with target("gpu", "NVIDIA H200"):
        found = backward.candidates(SSD_GRAD.call(*case.args()))
    assert found[0] == GradConfig(2, 12)  # 8 chunks: not even all 12 slices apart make 132 programs
    assert all(12 % config.parts == 0 for config in found)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"states": 32}, "N is 64 or 128"),
        ({"width": 32}, "P is a multiple of 64"),
        ({"heads": 3}, "no pairs"),
        ({"dtype": "float32"}, "all bfloat16 or all float16"),
        ({"time": 0}, "empty"),
        ({"chunk": 128}, "chunks are 64 steps"),
    ],
)
def test_says_why_not(changed: dict[str, Any], words: str) -> None:
    sizes = {"batch": 1, "time": 64, "heads": 2, "width": 64, "groups": 1, "states": 64}
    given = {name: changed.get(name, size) for name, size in sizes.items()}
    case = make_case("no", *given.values(), NONE, dtype=changed.get("dtype", "bfloat16"))
    params = {"chunk": changed["chunk"]} if "chunk" in changed else {}
    with target("gpu", "NVIDIA H200"):
        reason = refuses(SSD.call(*case.args(), **params))
    assert reason is not None
    assert words in reason
