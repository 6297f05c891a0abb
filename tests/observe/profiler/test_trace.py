"""What is read of a trace: rows of a GPU and of a TPU, which this machine has not, and time that overlaps."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from capibara.observe.profiler.trace import _read, merged, overlap, read_trace, union_seconds


@dataclass
class Event:
    name: str
    start_ns: float
    duration_ns: float
    stats: dict[str, Any] = field(default_factory=dict)


@dataclass
class Line:
    name: str
    events: list[Event]


@dataclass
class Plane:
    name: str
    lines: list[Line]


@dataclass
class Data:
    planes: list[Plane]


@pytest.mark.quick
def test_a_gpus_command_buffers_leave_kernels_alone() -> None:
    named = {"hlo_op": "gemm.1", "hlo_module": "jit_step", "program_id": 7}
    buffer = {**named, "hlo_op": "command_buffer_3"}
    rows = [Event("nvjet_gemm", 0, 5e3, named), Event("loop_add_fusion", 6e3, 1e3), Event("tanh_4", 7e3, 1e3, buffer)]
    stream = Line("Stream #13(Compute)", rows)
    derived = Line("XLA Modules", [Event("jit_step", 0, 8e3)])
    reading = _read(Data([Plane("/device:GPU:0", [stream, derived])]))
    assert [(row.op, row.kernel) for row in reading.rows] == [
        ("gemm.1", "nvjet_gemm"),
        ("", "loop_add_fusion"),
        ("", "tanh_4"),
    ]
    assert reading.kernel_rows_only == 2
    assert reading.rows[0].program_id == 7


@pytest.mark.quick
def test_a_tpus_rows_are_its_instructions_without_their_loops() -> None:
    ops = Line("XLA Ops", [Event("%while.2 = (s32[]) while(...)", 0, 9e3), Event("%fusion.1 = f32[] fusion()", 0, 4e3)])
    steps = Line("Steps", [Event("0", 0, 9e3)])
    reading = _read(Data([Plane("/device:TPU:0", [steps, ops])]))
    assert [row.op for row in reading.rows] == ["fusion.1"]
    assert not reading.kernel_rows_only


@pytest.mark.quick
def test_time_that_several_cover_counts_once() -> None:
    assert merged([(3, 4), (0, 2), (1, 3)]) == [(0, 4)]
    assert union_seconds([(0, 2), (1, 3), (5, 6)]) == 4
    assert overlap([(0, 2), (4, 6)], [(1, 5)]) == 2


def test_a_trace_that_was_cut_short(tmp_path: Path) -> None:
    file = tmp_path / "cut.xplane.pb"
    file.write_bytes(b"\x0a\xff\xff\x03half of it")
    with pytest.raises(ValueError, match="whole"):
        read_trace(file)
