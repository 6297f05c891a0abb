"""Reading compiler errors."""

from __future__ import annotations

import pytest

from capibara.compile.failures import classify, over_limit, thrown_by_compilers, useful_lines

MIB = 2**20

SCOPED = (
    "JaxRuntimeError: RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom:\n"
    "Ran out of memory in memory space vmem while allocating on stack for %kernel.1 = f32[8,128]. "
    "Scoped allocation with size 18.00M and limit 16.00M exceeded scoped vmem limit by 2.00M."
)
WHOLE = "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 65.05M of 64.00M vmem. Exceeded."
ONE = (
    "RESOURCE_EXHAUSTED: Allocation (size=134217728) would exceed memory (size=67108864) :: "
    "#allocation25 [shape = 'u8[134217728]{0}', space=vmem, size = 0x8000000, tag = 'scoped memory']"
)
HBM = (
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: XLA:TPU compile permanent error. Ran out of memory in "
    "memory space hbm. Used 126.45G of 94.75G hbm. Exceeded hbm capacity by 31.70G."
)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (SCOPED, "vmem_oom"),
        (WHOLE, "vmem_oom"),
        (ONE, "vmem_oom"),
        (ONE.replace("vmem", "smem"), "smem_oom"),
        (HBM, "hbm_oom"),
        ("total memory required for HLO temporaries (40G) exceeds available HBM (30G)", "hbm_oom"),
        ("INTERNAL: Mosaic failed to compile TPU kernel: unsupported relayout", "lowering"),
        ("E2003: CompileTimeMosaicUnprovenMemoryAccessAlignment", "lowering"),
        ("INTERNAL: something else", "other"),
    ],
)
def test_kinds(text, kind):
    assert classify(text, lowering=False) == kind


def test_before_the_compiler_it_is_lowering():
    assert classify("TypeError: bad operand", lowering=True) == "lowering"
    assert classify("TypeError: bad operand", lowering=False) == "other"


@pytest.mark.parametrize(
    ("text", "used", "limit"),
    [
        (SCOPED, 18 * MIB, 16 * MIB),
        (WHOLE, round(65.05 * MIB), 64 * MIB),
        (ONE, 128 * MIB, 64 * MIB),
        (HBM, round(126.45 * 1024 * MIB), round(94.75 * 1024 * MIB)),
        ("Scoped allocation with size 640.0K and limit 512.0K exceeded", 640 * 1024, 512 * 1024),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (80.00G) "
            "exceeds available HBM (30.75G).",
            80 * 2**30,
            round(30.75 * 2**30),
        ),
    ],
)
def test_sizes(text, used, limit):
    assert over_limit(text) == (used, limit)


def test_no_sizes():
    assert over_limit("out of memory, sorry") is None


def test_useful_lines_drops_noise_and_the_long_tail():
    text = "Traceback (most recent call last):\nfirst\n\n--------------------\n" + "\n".join(map(str, range(50)))
    lines = useful_lines(text, limit=3).splitlines()
    assert lines == ["first", "0", "1", "… and 48 more lines"]


def test_useful_lines_cuts_wide_ones():
    assert useful_lines("x" * 5000, width=10) == "x" * 9 + "…"


def test_only_exceptions_are_caught():
    caught = thrown_by_compilers()
    assert not any(issubclass(kind, (KeyboardInterrupt, SystemExit, MemoryError)) for kind in caught)
    assert Exception not in caught
