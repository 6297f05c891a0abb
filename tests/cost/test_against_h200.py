"""A whole step of training on one H200: predicted against measured."""

from __future__ import annotations

import pytest
from jax.sharding import PartitionSpec
from tests.cost.decoder import traced_step

from capibara.cost.estimate import estimate
from capibara.hardware.chips import chip
from capibara.hardware.facts import GiB
from capibara.mesh.layout import Layout
from capibara.mesh.mesh import MeshConfig
from capibara.program import spread


@pytest.mark.quick
def test_the_step_of_a_decoder_of_a_billion() -> None:
    """Measured 2026-11-15: python benchmarks/plain_llama.py --shape 1b --batch 8 --sequence 2048, JAX 0.11.2."""
    mesh = MeshConfig((1,), ("data",))
    program = traced_step("1b", "none", 8, True, "NVIDIA H200")
    layout = Layout(mesh, (PartitionSpec(),) * len(program.arguments))
    found = estimate(spread(program, layout), mesh, chip("h200"))
    # What the project promises of a step's time and of its memory.
    assert found.seconds == pytest.approx(250.2e-3, rel=0.2)
    assert found.low < 250.2e-3 < found.high
    assert found.memory.total == pytest.approx(57.96 * GiB, rel=0.1)
    assert found.memory.arguments == pytest.approx(12.7 * GiB, rel=0.01)
