"""Counting and tracing: what each gives, on one device and on eight."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from capibara.hardware import chip_for
from capibara.observe.profiler import last_profile, profile
from capibara.observe.profiler.executions import Executions, ProgramRuns
from capibara.observe.profiler.queues import FLUSH
from capibara.observe.profiler.result import Profile
from capibara.observe.profiler.session import _named, _ops
from capibara.observe.profiler.trace import Row, TraceReading
from capibara.program.hlo_work import HloOp, HloWork


@jax.jit
def step(x: jax.Array) -> jax.Array:
    with jax.named_scope("layer"):
        return jnp.tanh(x @ x)


def recorded(mode: str, run: object = None, trace_dir: Path | None = None) -> Profile:
    x = step(jnp.ones((64, 64)))
    with profile("here", mode, trace_dir) as recording:
        for _ in range(3):
            x = run(x) if callable(run) else step(x)
    assert recording.profile is not None
    return recording.profile


@pytest.mark.quick
def test_counting_gives_work_and_rates_and_no_times_of_operations() -> None:
    found = recorded("counting")
    assert found.total_flops == 3 * (2 * 64**3 + 64**2)
    assert found.tflops == pytest.approx(found.total_flops / found.seconds / 1e12)
    assert 0 < found.seconds <= found.wall_seconds
    assert math.isnan(found.metrics()["comm_overhead_ms"])
    assert all(op.seconds is None and op.roofline is None for op in found.ops)
    assert last_profile() is found


@pytest.mark.quick
def test_tracing_gives_the_time_of_every_operation(tmp_path: Path) -> None:
    found = recorded("tracing", trace_dir=tmp_path)
    timed = [op for op in found.ops if op.seconds]
    assert {op.kind for op in timed} >= {"product"}
    assert all("layer" in op.source for op in timed)
    (product,) = [op for op in timed if op.kind == "product"]
    assert product.count == 3
    # What a busy CPU's peaks were measured to be decides.
    moved = product.bytes / found.memory_bandwidth
    assert product.bound == ("compute" if product.matrix_flops / found.peak_flops["float32"] >= moved else "memory")
    assert product.roofline == pytest.approx(product.least_seconds / product.seconds)
    assert found.busy_seconds == pytest.approx(sum(op.seconds for op in timed), rel=0.05)
    assert found.metrics()["comm_overhead_ms"] == 0
    assert found.xplane_file is not None
    assert Path(found.xplane_file).stat().st_size > 0
    assert found.trace_file is not None
    rows = json.loads(gzip.decompress(Path(found.trace_file).read_bytes()))["traceEvents"]
    assert any(row.get("name") == product.op for row in rows)  # what Perfetto shows


@pytest.mark.parametrize("exchanges", [True, False])
def test_communication_takes_time_exactly_where_there_are_collectives(exchanges: bool) -> None:
    mesh = jax.make_mesh((8,), ("d",), devices=jax.devices()[:8])

    def local(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x.T @ x, "d") if exchanges else x @ x.T

    spec = jax.P() if exchanges else jax.P("d")
    function = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=jax.P("d"), out_specs=spec))
    x = jax.device_put(jnp.ones((64, 32)), jax.NamedSharding(mesh, jax.P("d")))
    function(x)
    with profile(mode="tracing") as recording:
        function(x)
    found = recording.profile
    assert found is not None
    assert found.programs[0].devices == 8
    assert (found.metrics()["comm_overhead_ms"] > 0) == exchanges
    assert ("collective" in {op.kind for op in found.ops}) == exchanges
    assert found.programs[0].matrix_flops == 8 * 2 * (8 * 32 * 32 if exchanges else 8 * 8 * 32)


def test_compiling_is_not_part_of_the_rate() -> None:
    def fresh(x: jax.Array) -> jax.Array:
        return jnp.sin(x) @ x

    with profile() as recording:
        jax.jit(fresh)(jnp.ones((16, 16))).block_until_ready()
    found = recording.profile
    assert found is not None
    assert 0 < found.compile_seconds < found.wall_seconds
    assert found.seconds < found.wall_seconds - found.compile_seconds / 2


def test_peak_memory_is_at_least_what_lies_there() -> None:
    held = jnp.ones((1 << 18,))
    found = recorded("counting")
    assert found.peak_memory_bytes >= held.nbytes
    assert found.memory_source


def test_nothing_ran() -> None:
    with profile() as recording:
        pass
    assert recording.profile is not None
    assert (recording.profile.runs, recording.profile.tflops, recording.profile.total_flops) == (0, 0, 0)


@pytest.mark.quick
def test_modes_are_named() -> None:
    with pytest.raises(ValueError, match=r"counting.*tracing"), profile(mode="sampling"):
        pass
    with pytest.raises(ValueError, match="mode='tracing'"), profile(trace_dir="somewhere"):
        pass
    with pytest.raises(ValueError, match=r"memory.*flops"), profile(captures=("flop",)):
        pass


def test_rows_without_a_programs_number_are_found_by_name() -> None:
    executions = Executions()
    executions.start()
    step(jnp.ones((64, 64)))
    executions.stop()
    (program,) = [one for one in executions.programs() if one.name == "jit_step"]
    op = program.work.ops[0].name
    row = Row("/device:GPU:0", 0, "jit_step", op, "kernel", 0.0, 1.0)
    other = Row("/device:GPU:0", 0, "", "", "kernel", 0.0, 1.0)
    named = _named(TraceReading([row, other]), executions.programs())
    assert [one.program_id for one in named.rows] == [program.program_id, 0]


@pytest.mark.quick
def test_kernels_without_an_instruction_are_of_the_program_that_runs_most() -> None:
    """As in command buffers: else nothing there could be held against another profile."""
    programs = [ProgramRuns(name, runs, 1, HloWork(name, (), 0, ()), runs, 0.0) for name, runs in (("a", 1), ("b", 30))]
    rows = [Row("/device:GPU:0", 0, "", "", "loop_add_fusion", float(i), i + 1e-3) for i in range(60)]
    chip = chip_for("NVIDIA H200")
    assert chip is not None
    (op,) = _ops(programs, TraceReading(rows), chip, 1)
    assert (op.op, op.count, op.runs) == ("loop_add_fusion", 60, 30)


@pytest.mark.quick
def test_a_kernels_rows_are_those_of_the_instructions_it_was_made_of() -> None:
    """Instructions that do the same share a kernel; each has its part of the rows, and keeps its work."""
    ops = tuple(
        HloOp(name, "fusion", "vector", 1, 0.0, 64.0, 128.0, "float32", "", kernel="add_fusion")
        for name in ("add_fusion", "add_fusion.1")
    )
    program = ProgramRuns("jit_step", 10, 1, HloWork("jit_step", ops, 0, ()), 7, 0.0)
    device = "/device:GPU:0"
    rows = [Row(device, 7, "jit_step", "", "add_fusion", float(i), i + (1e-3 if i % 2 else 3e-3)) for i in range(20)]
    rows.append(Row(device, 7, "jit_step", "", "nvjet_gemm", 30.0, 31.0))
    chip = chip_for("NVIDIA H200")
    assert chip is not None
    found = {op.op: op for op in _ops([program], TraceReading(rows), chip, 1)}
    assert found["add_fusion"].seconds == pytest.approx(30e-3)
    assert found["add_fusion.1"].seconds == pytest.approx(10e-3)
    assert found["add_fusion.1"].bytes == 1280
    assert found["nvjet_gemm"].seconds == 1.0


@pytest.mark.quick
def test_rows_of_one_run_are_one_time() -> None:
    op = HloOp("custom-call.1", "custom-call", "product", 2, 64.0, 0.0, 128.0, "bfloat16", "")
    program = ProgramRuns("jit_step", 5, 1, HloWork("jit_step", (op,), 0, ()), 7, 0.0)
    rows = []
    for run in range(10):
        rows.append(Row("/device:GPU:0", 7, "jit_step", op.name, "Memset", run, run + 1e-6))
        rows.append(Row("/device:GPU:0", 7, "jit_step", op.name, "nvjet", run + 0.5, run + 0.5 + 7e-4))
    chip = chip_for("NVIDIA H200")
    assert chip is not None
    (found,) = _ops([program], TraceReading(rows), chip, 1)
    assert found.median_seconds == pytest.approx(7.01e-4)
    assert found.seconds == pytest.approx(7.01e-3)


def test_the_profilers_own_program_is_no_row() -> None:
    rows = [
        Row("gpu:0", 7, "jit_step", "fusion", "fusion", 0.0, 1.0),
        Row("gpu:0", 9, f"jit_{FLUSH}", "wrapped_add", "wrapped_add", 1.0, 2.0),
    ]
    assert [row.module for row in _named(TraceReading(rows), []).rows] == ["jit_step"]
