"""Compiling for a slice by name. Where there is no libtpu the CPU's compiler stands in for the TPU's."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import capibara.compile.aot as aot
from capibara.compile import ChipCompiler, CompileReport, KernelSchedule, compile_for, topology_mesh
from capibara.compile.selfcheck import stock_pallas_matmul, xla_matmul
from capibara.errors import UnknownNameError

MIB = 2**20
SQUARE = jax.ShapeDtypeStruct((128, 128), jnp.float32)
ABSENT = ChipCompiler(False, "libtpu is not installed.", None)
PRESENT = ChipCompiler(True, "libtpu 9.9 is installed.", "9.9")


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setattr(aot, "chip_compiler", lambda platform: ABSENT)


@pytest.fixture
def stand_in(monkeypatch):
    """A TPU compiler that is really the CPU's: the same calls of jax, with devices that exist here."""
    monkeypatch.setattr(aot, "chip_compiler", lambda platform: PRESENT)
    monkeypatch.setattr(aot, "_devices", lambda slice_name: jax.devices("cpu")[:1])


@pytest.mark.quick
def test_without_the_compiler_it_is_lowered_and_says_so(no_compiler):
    report = compile_for(*stock_pallas_matmul(512, 256), "v4-32", vmem_static_bytes=3 * MIB)
    assert report.ok
    assert not report.compiled
    assert report.evidence == "lowered only: libtpu is not installed. pip install 'jax[tpu]'"
    assert report.name == "matmul"
    assert report.slice_name == "v4-32"
    assert report.custom_calls == ("tpu_custom_call",)
    assert report.vmem_limit_bytes == 16 * MIB
    assert (report.vmem_bytes, report.vmem_source) == (3 * MIB, "caller")
    assert report.bundles is None
    assert report.hbm_temp_bytes is None
    assert report.kernels == ()


def test_without_the_compiler_a_bad_kernel_still_fails(no_compiler):
    report = compile_for(*stock_pallas_matmul(512, 100), "v4-32", name="bad")
    assert (report.name, report.ok, report.error_kind) == ("bad", False, "lowering")
    assert "divisible by 8 and 128" in report.error


def test_an_unknown_slice_is_the_callers_mistake(no_compiler):
    with pytest.raises(UnknownNameError, match="v9-32"):
        compile_for(*xla_matmul(8), "v9-32")


@pytest.mark.quick
def test_figures_are_read_back(stand_in):
    report = compile_for(*xla_matmul(256, "float32"), "v4-32", name="matmul")
    assert report.ok, report.error
    assert report.compiled
    assert report.evidence == "compiled by the TPU compiler libtpu 9.9 for v4-32; predicted, not run on a chip"
    assert report.hbm_argument_bytes == 2 * 256 * 256 * 4
    assert report.hbm_output_bytes == 256 * 256 * 4
    assert report.flops == pytest.approx(2 * 256**3, rel=0.01)
    assert report.bytes_accessed is not None
    assert report.seconds is not None
    assert report.seconds > 0
    assert (report.vmem_bytes, report.vmem_source, report.bundles) == (None, None, None)


def test_no_arguments_and_trees(stand_in):
    assert compile_for(lambda: jnp.ones(3), (), "v4-32").ok
    assert compile_for(lambda tree: tree["a"] + tree["b"], ({"a": SQUARE, "b": SQUARE},), "v4-32").ok


def test_donations_survive(stand_in):
    donating = jax.jit(lambda x: x + 1, donate_argnums=0)
    assert compile_for(donating, (SQUARE,), "v4-32").ok


def test_a_failure_in_lowering(stand_in):
    report = compile_for(lambda x: x @ jnp.ones((3, 5)), (SQUARE,), "v4-32")
    assert (report.ok, report.compiled, report.error_kind) == (False, False, "lowering")
    assert report.evidence == "not compiled: failed in lowering for v4-32"
    assert report.seconds is not None


class Refusing:
    """Lowers, and fails in the compiler with the given text."""

    __name__ = "refusing"

    def __init__(self, text):
        self.text = text

    def trace(self, *args):
        raise AssertionError

    def lower(self, *args):
        return self

    def as_text(self):
        return 'stablehlo.custom_call @tpu_custom_call(%0) {backend_config = ""}'

    def compile(self):
        raise jax.errors.JaxRuntimeError(self.text)


@pytest.mark.parametrize(
    ("text", "kind", "vmem"),
    [
        ("Scoped allocation with size 18.00M and limit 16.00M: memory space vmem", "vmem_oom", 18 * MIB),
        ("E1000: CompileTimeHbmOom: Used 40.00G of 30.75G hbm.", "hbm_oom", None),
        ("INTERNAL: Mosaic failed to compile TPU kernel", "lowering", None),
        ("INTERNAL: who knows", "other", None),
    ],
)
def test_failures_in_the_compiler(stand_in, text, kind, vmem):
    report = compile_for(Refusing(text), (SQUARE,), "v4-32")
    assert (report.ok, report.error_kind, report.vmem_bytes) == (False, kind, vmem)
    assert text in report.error
    assert report.evidence == "refused by the TPU compiler libtpu 9.9 for v4-32"
    assert report.vmem_scoped_limit_bytes == (16 * MIB if vmem else None)


def test_a_topology_that_cannot_be_made_is_not_a_lowering_error(monkeypatch, stand_in):
    def fail(slice_name):
        raise RuntimeError("libtpu does not know this topology")

    monkeypatch.setattr(aot, "_devices", fail)
    report = compile_for(*xla_matmul(8), "v4-32")
    assert (report.ok, report.error_kind) == (False, "other")


HLO = """
  %flash.3 = f32[8]{0} custom-call(%a), backend_config={LIMIT,"used_scoped_memory_configs":[USED]}
  %copy.1 = f32[8]{0} copy(%a), backend_config={"used_scoped_memory_configs":[LITTLE]}
"""
for word, json_text in {
    "LIMIT": '"scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"16777216"}]',
    "USED": '{"memory_space":"1","offset":"0","size":"2097152"}',
    "LITTLE": '{"memory_space":"1","offset":"0","size":"4096"}',
}.items():
    HLO = HLO.replace(word, json_text)


def test_schedules_and_vmem_are_joined(monkeypatch, stand_in, tmp_path):
    def write(program, bundles):
        path = tmp_path / f"1777396851-{program}-68-schedule-analysis_final_bundles.txt"
        path.write_text(f"total scheduled bundles: {bundles}")

    write("old", 50)
    monkeypatch.setattr(aot, "_optimized_hlo", lambda compiled: HLO)

    def fn(x):  # stands for libtpu, which writes while it compiles
        for program in ("flash.3", "fusion", "TLP"):
            write(program, 700)
        return x + 1

    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--xla_jf_dump_to={tmp_path}")
    report = compile_for(fn, (SQUARE,), "v4-32", vmem_static_bytes=1)
    assert report.bundles == 1400  # libtpu's own program and what was there before are not counted
    assert (report.vmem_bytes, report.vmem_source) == (2 * MIB, "compiler")
    assert report.vmem_scoped_limit_bytes == 16 * MIB
    flash = KernelSchedule("flash.3", bundles=700, kind="custom-call", vmem_bytes=2 * MIB)
    assert report.kernel("flash") == flash
    assert report.kernel("copy.1") == KernelSchedule("copy.1", kind="copy", vmem_bytes=4096)
    assert report.kernel("absent") is None


def test_a_report_survives_json(stand_in):
    kernels = (KernelSchedule("k", bundles=3, slots={"MXU": 1}, ops={"vld": 2}),)
    report = CompileReport("n", True, "words", kernels=kernels, custom_calls=("tpu_custom_call",))
    assert CompileReport.from_dict(report.as_dict()) == report


def test_a_mesh_without_devices_to_lower_over(no_compiler):
    mesh = topology_mesh("v4-64", {"data": 4, "model": 8})
    assert dict(mesh.shape) == {"data": 4, "model": 8}
    sharded = jax.ShapeDtypeStruct(
        (256, 256), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("data", "model"))
    )
    report = compile_for(functools.partial(jnp.sum, axis=0), (sharded,), "v4-64")
    assert report.ok, report.error


def test_a_mesh_must_cover_the_slice(stand_in):
    with pytest.raises(ValueError, match="must multiply to its 1 devices"):
        topology_mesh("v4-64", {"data": 4, "model": 8})
    mesh = topology_mesh("v4-64", {"data": 1})
    sharded = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    assert compile_for(lambda x: x * 2, (sharded,), "v4-64").ok


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("slice_name", ["v4-32", "v5p-8"])
def test_the_real_compiler(slice_name):
    report = compile_for(*stock_pallas_matmul(2048, 512), slice_name)
    assert report.ok, report.error
    assert report.compiled
    assert report.custom_calls == ("tpu_custom_call",)
    assert report.hbm_argument_bytes == 2 * 2048 * 2048 * 2
    assert report.vmem_source == "compiler"
    # Two buffers each for two operands and the result in bf16, and an accumulator in float32.
    assert report.vmem_bytes >= 512 * 512 * (3 * 2 * 2 + 4)


@pytest.mark.tpu_compiler
def test_the_real_compiler_runs_out_of_vmem():
    report = compile_for(*stock_pallas_matmul(4096, 2048), "v4-32")
    assert (report.ok, report.error_kind) == (False, "vmem_oom"), report.error
    assert report.vmem_bytes > report.vmem_limit_bytes
