"""Reading exchanges out of a compiled program's text."""

from __future__ import annotations

import pytest

from capibara.program import Collective
from capibara.program.hlo_collectives import collectives_in

TEXT = """
HloModule jit_step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}

%body (p: (s32[], bf16[8,128])) -> (s32[], bf16[8,128]) {
  %p = (s32[], bf16[8,128]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %w = bf16[8,128]{1,0} get-tuple-element(%p), index=1
  %g = bf16[64,128]{1,0} all-gather(%w), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %t = (s32[], bf16[8,128]) tuple(%i, %w)
}

%cond (p: (s32[], bf16[8,128])) -> pred[] {
  %p = (s32[], bf16[8,128]{1,0}) parameter(0)
  ROOT %c = pred[] constant(true)
}

ENTRY %main (a: f32[4,4], b: bf16[8,128]) -> f32[4,4] {
  %a = f32[4,4]{1,0} parameter(0)
  %b = bf16[8,128]{1,0} parameter(1)
  %z = s32[] constant(0)
  %init = (s32[], bf16[8,128]) tuple(%z, %b)
  %loop = (s32[], bf16[8,128]) while(%init), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %start = (f32[4,4]{1,0}, f32[8,4]{1,0}) all-gather-start(%a), replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}
  %done = f32[8,4]{1,0} all-gather-done(%start)
  %swap = f32[4,4]{1,0} all-to-all(%a), replica_groups=mesh['p'=4,'q'=2], device_ids=([2,4]T(1,0)) {'p'}, dimensions={0}
  ROOT %r = f32[4,4]{1,0} all-reduce(%swap), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add, metadata={op_name="mean"}
}
"""


def test_kinds_bytes_axes_and_trips() -> None:
    found = collectives_in(TEXT, {"data": 2, "model": 4})
    gathered = Collective("all_gather", ("data", "model"), 64 * 128 * 2, "")
    assert found[:3] == [gathered] * 3
    asynchronous, swap, reduce = found[3:]
    # Devices 0 and 1 are half of a row of four: along no axis as a whole.
    assert (asynchronous.kind, asynchronous.axes, asynchronous.bytes) == ("all_gather", (), 8 * 4 * 4)
    assert (swap.kind, swap.axes, swap.bytes) == ("all_to_all", ("model",), 64.0)
    assert (reduce.kind, reduce.axes, reduce.bytes, reduce.why) == ("all_reduce", ("data",), 64.0, "mean")


def test_a_loop_of_unknown_length_says_so() -> None:
    found = collectives_in(TEXT.replace("known_trip_count", "something_else"))
    assert len(found) == 4
    assert found[0].axes == ()
    assert "unknown length" in found[0].why


@pytest.mark.parametrize(
    ("written", "bytes_"), [("s4[6]", 3.0), ("f8e4m3fn[6]", 6.0), ("pred[6]", 6.0), ("c64[6]", 48.0)]
)
def test_sizes_of_types(written: str, bytes_: float) -> None:
    lines = ["ENTRY %m (a: KIND) -> KIND {", "  %a = KIND parameter(0)", "  ROOT %r = KIND all-reduce(%a)", "}"]
    text = "\n".join(lines).replace("KIND", written)
    assert [one.bytes for one in collectives_in(text)] == [bytes_]


def test_no_groups_are_one_of_all_devices() -> None:
    text = "ENTRY %main (p: f32[4]) -> f32[4] {\n  %p = f32[4]{0} parameter(0)\n"
    text += "  ROOT %r = f32[4]{0} all-reduce(%p), replica_groups={}, to_apply=%add\n}\n"
    (found,) = collectives_in(text, {"data": 2, "one": 1, "model": 4})
    assert (found.axes, found.bytes) == (("data", "model"), 16.0)
    assert collectives_in("no program at all") == []
