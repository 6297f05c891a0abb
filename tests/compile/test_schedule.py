"""Reading a dump. The samples are written here, in the shape of libtpu's own."""

from __future__ import annotations

import pytest

from capibara.compile import KernelSchedule, describe_dump, schedule_lengths
from capibara.compile.dump import by_program, dump_files
from capibara.compile.report import RUNTIME_KIND
from capibara.compile.schedule import instruction_counts, slot_counts, vmem_allocated

ANALYSIS = """Schedule analysis:
    total scheduled bundles:    12
    empty scheduled bundles:    3
    non empty scheduled bundles: 9
       8.50 scheduled bundles (94.44%): %kernel.1 = f32[8,128]{1,0:T(8,128)} custom-call(%a)
       0.50 scheduled bundles ( 5.56%): <no hlo>
    [opcode]       9 scheduled bundles (94.44%): custom-call
"""
BUNDLES = """$region0: #{kernel.1}
  #allocation0 [shape = 'u8[4096]{0}', space=vmem, size = 0x1000, scoped, tag = 'operand span for operand 0']
  #allocation1 [shape = 's32[1]{0}', space=sflag, size = 0x4, scoped, tag = 'scoped memory for kernel.1']
  #allocation2_spill [shape = 'u8[8192]{0}', space=vmem, size = 0x2000, scoped, tag = 'spill slots']
     0   :  { %s1_s0 = smov 1 /* entry bundle: %kernel.1 = custom-call(%a) 0x7 : { %x = vst } */ }
   0x1   :  { %v2_v0 = vld [vmem:[#allocation0] sm:$0xff]  ;;  %s3_s1 = sadd.s32 %s1_s0, 4 }
   0x2 LB: > { %v4_v1 = vadd.f32 %v2_v0, %v2_v0  ;;  %v5_v2 = vld [vmem:[#allocation0 + $0x8] sm:$0xff] }
   0x3   : >> { %6 = vst [vmem:[#allocation2_spill] sm:$0xff] /*vst_source=*/%v4_v1  ;;
               %7 = vmatmul.f32.gmra.mxu0 %v5_v2 }
   0x4   :  {}
   0x5   :  { %8 = sbr.rel (!%p9_p0) target bundleno = 2 (0x2), region = 3 }
"""
SLOTS = """== CAPACTIY:
MXU, XLU, VALU, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU
    2     2     4     3     3     1     1     2
== UTILIZATION:
    0     0     0     0     0     0     0     1
    0     0     0     1     0     0     0     1
    1     0     1     1     0     1     1     0
"""


def write(folder, program, number, label, text, stamp=1777396851540540302):
    path = folder / f"{stamp}-{program}-{number:02d}-{label}.txt"
    path.write_text(text)
    return path


@pytest.fixture
def dump(tmp_path):
    write(tmp_path, "kernel.1", 68, "schedule-analysis_final_bundles", ANALYSIS)
    write(tmp_path, "kernel.1", 69, "final_bundles", BUNDLES)
    write(tmp_path, "kernel.1", 67, "final_hlo-static-per-bundle-utilization", SLOTS)
    write(tmp_path, "TLP", 30, "schedule-analysis_final_bundles", ANALYSIS.replace("12", "99"))
    (tmp_path / "1777396851540540302-jit_fn-hlo.txt").write_text("HloModule jit_fn\n")
    return tmp_path


@pytest.mark.quick
def test_a_kernel(dump):
    kernels = {kernel.name: kernel for kernel in schedule_lengths(dump)}
    assert kernels["kernel.1"] == KernelSchedule(
        name="kernel.1",
        bundles=12,
        empty_bundles=3,
        kind="custom-call",
        slots={
            "MXU": 1,
            "XLU": 0,
            "VALU": 1,
            "VLOAD": 2,
            "VLOAD:FILL": 0,
            "VSTORE": 1,
            "VSTORE:SPILL": 1,
            "SALU": 2,
        },
        ops={"vld": 2, "smov": 1, "sadd": 1, "vadd": 1, "vst": 1, "vmatmul": 1, "sbr": 1},
        vmem_bytes=0x3000,
    )
    assert kernels["TLP"].kind == RUNTIME_KIND
    assert kernels["TLP"].bundles == 99


def test_without_the_analysis_the_listing_is_counted(tmp_path):
    write(tmp_path, "fusion", 69, "final_bundles", BUNDLES)
    (kernel,) = schedule_lengths(tmp_path)
    assert kernel.bundles == 6
    assert kernel.empty_bundles is None
    assert kernel.kind is None
    assert kernel.slots == {}


@pytest.mark.parametrize("text", ["", "a format that nobody has seen yet\n", "0x: {\n", "== UTILIZATION:\n 1 2\n"])
def test_what_is_not_found_is_none(tmp_path, text):
    for label in (
        "schedule-analysis_final_bundles",
        "final_bundles",
        "final_hlo-static-per-bundle-utilization",
    ):
        write(tmp_path, "odd", 69, label, text)
    assert schedule_lengths(tmp_path) == [KernelSchedule("odd")]


def test_files_that_were_there_before_are_left_out(dump):
    old = {file.path for file in dump_files(dump)}
    assert schedule_lengths(dump, ignore=old) == []
    write(dump, "late.2", 68, "schedule-analysis_final_bundles", ANALYSIS, stamp=1777396851540540999)
    assert [kernel.name for kernel in schedule_lengths(dump, ignore=old)] == ["late.2"]


def test_an_empty_or_missing_directory(tmp_path):
    assert schedule_lengths(tmp_path) == []
    assert schedule_lengths(tmp_path / "absent") == []


@pytest.mark.parametrize(
    ("name", "program", "label"),
    [
        ("1777396851540540302-add_fusion-01-original.txt", "add_fusion", "original"),
        ("1777396851540540302-moe-k_8-bt_32_32-69-final_bundles.txt", "moe-k_8-bt_32_32", "final_bundles"),
        ("1777396851540540302-a-12-b.1-105-post-GVN-2.txt", "a-12-b.1", "post-GVN-2"),
        (
            "1777396851540540302-<late-initialization>-69-final_bundles.txt",
            "<late-initialization>",
            "final_bundles",
        ),
        ("flash.3-70-final_bundles.txt", "flash.3", "final_bundles"),
    ],
)
def test_file_names(tmp_path, name, program, label):
    (tmp_path / name).write_text("")
    (file,) = dump_files(tmp_path)
    assert (file.program, file.label) == (program, label)


def test_files_in_folders_and_a_pass_that_runs_twice(tmp_path):
    folder = tmp_path / "module_1"
    folder.mkdir()
    write(folder, "k", 19, "post-cssa", "first")
    last = write(folder, "k", 22, "post-cssa", "second")
    assert by_program(dump_files(tmp_path))["k"]["post-cssa"].path == last


def test_vmem_counts_each_allocation_once():
    assert vmem_allocated(BUNDLES + BUNDLES) == 0x3000
    assert vmem_allocated("no allocations") is None
    assert vmem_allocated(BUNDLES.replace("0x2000", "0xffffffffffffffff")) is None


def test_counts_of_nothing():
    assert instruction_counts("%v1 = vadd.f32 %v0, %v0") == {}  # not a listing of bundles
    assert slot_counts("MXU, XLU\n 1 2\n") == {}


@pytest.mark.quick
def test_describe_dump(dump):
    text = describe_dump(dump, lines=3, tail=1)
    assert "5 files" in text.splitlines()[0]
    assert "program 'kernel.1': 3 passes" in text
    assert "total scheduled bundles:    12" in text
    assert "… 3 lines …" in text  # seven lines of analysis, three and one of them shown
    assert "HloModule jit_fn" in text  # a file whose name is new to us is shown too


def test_describe_an_empty_dump(tmp_path):
    assert "LIBTPU_INIT_ARGS" in describe_dump(tmp_path / "absent")
