"""Compiling an op's kernels: the right programs, for the right chip, with what a grid step must cost."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from capibara.compile import kernels, lower_for
from capibara.compile.aot import topology_mesh
from capibara.compile.report import CompileReport, KernelSchedule
from capibara.errors import ImplementationRefused
from capibara.kernels.core.op import lookup


@pytest.mark.quick
def test_grid_steps_and_matrix_cycles() -> None:
    gemm = lookup("gemm")
    (draft,) = kernels._drafts(gemm, ["square-4096"], kernels.place("v4-32").chip, peers=True)
    tile = draft.config
    assert draft.steps == (4096 // tile.block_m) * (4096 // tile.block_n) * (4096 // tile.block_k)
    assert draft.matrix_cycles == 2 * tile.block_m * tile.block_n * tile.block_k / 131_072
    assert set(draft.names) == {"ours", "stock", "xla"}
    assert draft.jobs["gemm/square-4096/pallas_tpu"].kwargs["config"]["block_m"] == tile.block_m


def test_a_program_without_one_pallas_call_has_no_steps() -> None:
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    assert kernels.grid_steps(jnp.dot, (x, x)) is None
    gemm = lookup("gemm")
    fn, args = kernels.implementation_program(gemm, gemm.case("odd"), "pallas_tpu")
    assert kernels.grid_steps(fn, args) == 1
    assert kernels.grid_steps(lambda a, b: (fn(a, b), fn(a, b)), args) is None


def test_a_program_is_dispatched_for_the_chip_it_names() -> None:
    fn, args = kernels.program("gemm", "odd", "pallas_tpu", {"block_m": 128, "block_n": 128, "block_k": 128})
    assert jax.eval_shape(fn, *args).shape == (3, 7)
    fn, args = kernels.program("gemm", "odd", "pallas_tpu", device_kind="NVIDIA H200")
    with pytest.raises(ImplementationRefused, match="it is for tpu"):
        jax.eval_shape(fn, *args)


def test_stock_programs() -> None:
    fn, args = kernels.stock("gemm", "square-4096")
    assert jax.eval_shape(fn, *args).shape == (4096, 4096)
    with pytest.raises(ValueError, match="no stock TPU kernel"):
        kernels.stock("gemm", "prime")


def test_the_bundles_of_a_step_are_the_one_kernels() -> None:
    def report(*kinds: str) -> CompileReport:
        made = tuple(KernelSchedule(f"k{i}", bundles=100 + i, kind=kind) for i, kind in enumerate(kinds))
        return CompileReport("one", True, "a test", kernels=made)

    assert kernels.body_bundles(report("custom-call", "fusion", "runtime")) == 100
    assert kernels.body_bundles(report("custom-call", "custom-call")) is None
    assert kernels.body_bundles(report("fusion")) is None
    assert kernels.body_bundles(None) is None


@pytest.mark.tpu_compiler
def test_the_compiler_reports_vmem_and_bundles() -> None:
    (row,) = kernels.compile_kernels([lookup("gemm")], "v4-8", cases=["few-rows"])
    assert row.ours is not None
    assert row.ours.compiled, row.ours.error
    assert row.ours.vmem_bytes is not None
    assert row.ours.vmem_bytes <= 16 * 2**20
    bundles = kernels.body_bundles(row.ours)
    assert bundles is not None
    assert row.matrix_cycles is not None
    assert bundles >= row.matrix_cycles


@pytest.mark.quick
def test_a_collective_is_compiled_for_all_chips_of_the_slice() -> None:
    """v4-32 has 16 chips: so many rows, and the part of each, whatever the case says."""
    op = lookup("reduce_scatter")
    wanted = kernels.place("v4-32")
    (draft,) = kernels._drafts(op, ["small_f32"], wanted.chip, peers=True, devices=wanted.devices)
    assert "got 8 x 128" in draft.note, "128 rows are 16 on each of the case's own 8 devices"
    drafts = list(kernels._drafts(op, None, wanted.chip, peers=True, devices=wanted.devices))
    assert [d.case for d in drafts] == [c.name for c in op.cases if "tpu" in c.tags]
    for job in drafts[0].jobs.values():
        assert job.mesh == {"x": 16}
        fn, (rows,) = kernels.program(**job.kwargs, mesh=topology_mesh(None, job.mesh))
        assert rows.shape == (16, 4096, 4096)
        result = lower_for(fn, [rows], "tpu")
        assert result.ok, result.error


@pytest.mark.quick
def test_a_gpus_kernels_are_lowered_where_its_compiler_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from capibara.compile import availability

    gone = availability.ChipCompiler(False, "not here.", None, "pip install it", "XLA's compiler for GPUs")
    monkeypatch.setattr(availability, "gpu_compiler", lambda: gone)
    (row,) = kernels.compile_kernels([lookup("few_rows")], "h200", cases=["float16"], peers=False)
    assert (row.implementation, row.ok) == ("hopper", True)
    assert row.ours is not None
    assert not row.ours.compiled
    assert row.matrix_cycles is None, "a TPU's account"


@pytest.mark.quick
def test_kernels_and_cases_are_those_of_the_platform() -> None:
    assert [one.name for one in kernels.kernels_for(lookup("few_rows"), "gpu")] == ["hopper"]
    assert kernels.kernels_for(lookup("few_rows"), "tpu") == []
    assert {case.name for case in kernels.cases_for(lookup("few_rows"), "gpu")} >= {"float16", "a-tile"}
