"""Layouts compiled: by XLA for virtual devices here and in a process of its own, by the TPU compiler where it is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from capibara.compile import tpu_compiler
from capibara.mesh import with_sharding_constraint
from capibara.mesh.layout import Layout
from capibara.mesh.mesh import MeshConfig
from capibara.parallel.job import Job
from capibara.plan.compiled import Compiled, compile_layout, lower_layout, partition_layout
from capibara.plan.evidence import Witness, checked_level
from capibara.plan.place import place
from capibara.plan.target import Recipe
from capibara.plan.worker import compile_elsewhere

WIDE, INNER, ROWS = 256, 512, 64
PROGRAM = """
import jax
import jax.numpy as jnp
from capibara.mesh import with_sharding_constraint
print("a file may print while it is loaded")

def step(weights, x):
    y = with_sharding_constraint(x @ weights["up"], ("batch", "mlp"))
    y = with_sharding_constraint(y @ weights["down"], ("batch", None))
    return jax.tree.map(lambda w: w * 0.5, weights), jnp.sum(y)

def shapes():
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    return {"args": ({"down": f32(512, 256), "up": f32(256, 512)}, f32(64, 256)), "donate": (0,)}
"""


def _step(weights: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    y = with_sharding_constraint(x @ weights["up"], ("batch", "mlp"))
    y = with_sharding_constraint(y @ weights["down"], ("batch", None))
    return jax.tree.map(lambda w: w * 0.5, weights), jnp.sum(y)


def _job() -> Job:
    weights = {
        "down": jax.ShapeDtypeStruct((INNER, WIDE), jnp.float32),
        "up": jax.ShapeDtypeStruct((WIDE, INNER), jnp.float32),
    }
    args = (weights, jax.ShapeDtypeStruct((ROWS, WIDE), jnp.float32))
    return Job(build=lambda: (_step, args), roles=("params", "batch"), donate=(0,), name="mlp")


def _tensor_parallel() -> Layout:
    specs = (P("model", None), P(None, "model"), P("data", None))
    return Layout(MeshConfig((4, 8)), specs, {"batch": "data", "mlp": "model"}, name="data 4 x model 8")


def _check_tensor_parallel(made: Compiled) -> None:
    assert made.error is None, made.error
    weights, rows = 2 * WIDE * INNER * 4 / 8, ROWS * WIDE * 4 / 4
    assert made.arguments == weights + rows, "each weight over 8, the batch over 4"
    assert made.aliased == weights, "outputs lie like the donated arguments they replace"
    assert made.total_bytes is not None
    assert made.total_bytes >= made.arguments
    reduced = [one for one in made.collectives if one.kind == "all_reduce"]
    # The second product sums over the model axis: one chip's part of [64 / 4, 256] float32 is exchanged.
    largest = max(reduced, key=lambda one: one.bytes)
    assert (largest.bytes, largest.axes) == (ROWS / 4 * WIDE * 4, ("model",))


@pytest.mark.quick
def test_xla_partitions_as_the_layout_says() -> None:
    _check_tensor_parallel(partition_layout(_job(), _tensor_parallel()))


def test_a_layouts_rules_decide_the_constraints() -> None:
    mesh = _tensor_parallel().mesh.build(jax.devices()[:32])
    split = lower_layout(_job(), _tensor_parallel(), mesh).as_text()
    whole = lower_layout(_job(), replace(_tensor_parallel(), rules={"batch": "data"}), mesh).as_text()
    marks = [line for line in split.splitlines() if "sharding_constraint" in line or "@Sharding" in line]
    assert marks
    # "mlp" is not named by the second layout, and so stays whole, whatever the default table says.
    assert sum('"model"' in line for line in marks) == 1
    assert not any('"model"' in line for line in whole.splitlines() if "sharding_constraint" in line)


def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM, encoding="utf-8")
    made = compile_elsewhere(Recipe(f"{file}:step"), _tensor_parallel(), "xla", "v4-64")
    _check_tensor_parallel(made)
    assert "32 virtual CPU devices" in made.evidence


def test_a_process_that_dies_is_an_answer(tmp_path: Path) -> None:
    made = compile_elsewhere(Recipe(str(tmp_path / "gone.py:step")), _tensor_parallel(), "xla", "v4-64")
    assert made.error_kind == "crash"
    assert made.error is not None
    assert "gone.py" in made.error


def test_a_program_that_cannot_be_laid_out_so_is_an_answer() -> None:
    layout = replace(_tensor_parallel(), specs=(P("model", None), P(None, "model"), P("data", None, "model")))
    made = partition_layout(_job(), layout)
    assert made.error is not None
    assert made.arguments is None
    assert made.total_bytes is None


def test_more_devices_than_there_are() -> None:
    layout = replace(_tensor_parallel(), mesh=MeshConfig((8, 8)))
    with pytest.raises(ValueError, match="xla_force_host_platform_device_count=64"):
        partition_layout(_job(), layout)


def test_a_program_that_is_no_training_job_has_no_stages() -> None:
    made = partition_layout(_job(), replace(_tensor_parallel(), stages=2))
    assert made.error_kind == "pipeline"
    assert made.error is not None
    assert "only a training job" in made.error
    witness = Witness(_job(), place("v4-64"), "xla", 1, limit=30.0)
    assert witness(replace(_tensor_parallel(), stages=2)).error == made.error, "what cannot be built is refused"


def test_an_answer_survives_json() -> None:
    from capibara.program.chip import Collective

    once, often = Collective("all_gather", ("model",), 4.0), Collective("all_reduce", ("data",), 8.0, "line 3")
    made = Compiled("xla", "by hand", 1.0, 2.0, 3.0, 1.0, collectives=(often, often, once), seconds=0.5)
    assert Compiled.from_dict(json.loads(json.dumps(made.as_dict()))) == made
    assert made.total_bytes == 5.0
    assert made.exchanges == (("all_reduce", ("data",), 2, 16.0), ("all_gather", ("model",), 1, 4.0))


def test_the_tpu_compiler_or_a_line_that_says_why_not() -> None:
    made = compile_layout(_job(), _tensor_parallel(), "v4-64")
    if tpu_compiler().available:
        assert made.error is None, made.error
        assert made.aliased == 2 * WIDE * INNER * 4 / 8
    else:
        assert made.error_kind == "no_compiler"
        assert made.error is not None
        assert "libtpu" in made.error


def test_levels_are_checked_before_anything_is_done() -> None:
    tpu, gpu = place("v4-32"), place("h200")
    assert checked_level("analytic", None, tpu) == 0
    assert checked_level("xla", None, tpu) == 1
    assert checked_level("xla", 3, tpu) == 3
    for level, confirm, where, said in (
        ("exact", None, tpu, "'analytic', 'xla', 'tpu'"),
        ("analytic", 2, tpu, "add --level xla"),
        ("xla", 0, tpu, "from 1 up"),
        ("tpu", None, gpu, "Level 'tpu' is for TPU slices. Got h200. Fix: use level 'gpu'"),
        ("gpu", None, tpu, "Level 'gpu' is for GPUs. Got v4-32. Fix: use level 'tpu'"),
    ):
        with pytest.raises(ValueError, match=said):
            checked_level(level, confirm, where)


def test_a_witness_refuses_what_does_not_fit_and_asks_about_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "a": Compiled("tpu", "", 40.0, 0.0, 0.0, 0.0),
        "b": Compiled("tpu", "", error="still compiling", error_kind="timeout"),
        "c": Compiled("tpu", "", 10.0, 0.0, 0.0, 0.0),
        "d": Compiled("tpu", "", temporaries=50.0, error="RESOURCE_EXHAUSTED", error_kind="hbm_oom"),
    }
    monkeypatch.setattr("capibara.plan.evidence.compile_layout", lambda job, layout, where: answers[layout.name])
    witness = Witness(_job(), place("v4-64"), "tpu", 2, limit=30.0)
    said = [witness(replace(_tensor_parallel(), name=name)) for name in "adbcc"]
    too_large, refused, silent, taken, unasked = said
    assert too_large is not None
    assert too_large.total_bytes == 40.0, "the compiler's own figure"
    assert refused is not None
    assert (refused.error, refused.total_bytes) == ("RESOURCE_EXHAUSTED", 50.0)
    assert silent is None, "a compiler that did not answer has neither refused nor confirmed a layout"
    assert taken is not None
    assert taken.error is None
    assert unasked is None
    assert [layout.name for layout, _ in witness.said] == ["a", "d", "b", "c"], "two that stand are enough"
