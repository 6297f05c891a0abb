"""Whole estimates: bounds, overlap, pipelines, speed."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from tests.cost.programs import Maker, layers

from capibara.cost.calibration import Calibration, Run
from capibara.cost.estimate import estimate
from capibara.cost.result import Estimate
from capibara.hardware.chips import chip
from capibara.hardware.topology import slice_by_name
from capibara.mesh.mesh import MeshConfig
from capibara.program.chip import ChipProgram, Loop

V4_32 = slice_by_name("v4-32")
MESH = MeshConfig((4, 4))
ONE = MeshConfig((1,), ("data",))


def _product(n: int, dtype: str = "bfloat16") -> ChipProgram:
    m = Maker()
    a, b, c = m.buffer(n, n, dtype=dtype, argument=True), m.buffer(n, n, dtype=dtype, argument=True), 0
    c = m.buffer(n, n, dtype=dtype)
    m.product(a, b, c, n, n, n)
    return m.program(c)


@pytest.mark.quick
def test_one_large_product_is_bound_by_the_matrix_units() -> None:
    found = estimate(_product(8192), MESH, V4_32)
    assert found.bound == "matrix"
    least = 2 * 8192**3 / chip("v4").peak_flops("bfloat16")
    assert least < found.low <= found.seconds <= found.high
    assert found.flops == found.model_flops == 2 * 8192**3
    assert found.mfu == pytest.approx(least / found.seconds)
    assert found.seconds_by_bound["matrix"] == pytest.approx(found.seconds)
    assert not found.links


def test_a_copy_is_bound_by_memory() -> None:
    m = Maker()
    x, y = m.buffer(8192, 8192, argument=True), m.buffer(8192, 8192)
    m.step("neg", (x,), y, flops=8192.0**2)
    found = estimate(m.program(y), MESH, V4_32)
    assert found.bound == "memory"
    assert [part.bytes for part in found.parts] == [2 * 8192**2 * 4]


def test_sizes_that_do_not_fill_the_units_cost_their_padding() -> None:
    """One column more than 1024 takes another tile of 128."""

    def seconds(n: int) -> float:
        m = Maker()
        a, b, c = m.buffer(8192, 8192, argument=True), m.buffer(8192, n, argument=True), m.buffer(8192, n)
        m.product(a, b, c, 8192, n, 8192)
        return estimate(m.program(c), MESH, V4_32).seconds

    assert seconds(1025) == pytest.approx(seconds(1024) * 1032 / 1024, rel=0.02)
    assert seconds(1032) == pytest.approx(seconds(1025), rel=0.01)


def test_a_gathered_weight_hides_behind_products_and_a_reduction_between_them_does_not() -> None:
    alone = estimate(layers(rows=4096), MESH, V4_32)
    gathered = estimate(layers(rows=4096, exchange="all_gather"), MESH, V4_32)
    reduced = estimate(layers(rows=4096, exchange="all_reduce"), MESH, V4_32)
    assert gathered.link_seconds > 0
    hidden = min(chip("v4").efficiency.overlap * gathered.link_seconds, gathered.compute_seconds)
    assert gathered.exposed_seconds == pytest.approx(gathered.link_seconds - hidden)
    assert gathered.exposed_seconds < 0.5 * gathered.link_seconds
    assert reduced.exposed_seconds == pytest.approx(reduced.link_seconds)
    assert reduced.seconds == pytest.approx(reduced.compute_seconds + reduced.link_seconds)
    assert alone.link_seconds == 0
    (use,) = gathered.links
    assert (use.kind, use.axes, use.link, use.count, use.why) == ("all_gather", ("data",), "ICI", 4, "by hand")
    # Three quarters of 1024x1024 bfloat16 come from others, four times.
    assert use.bytes == 4 * 1024 * 1024 * 2 * 3 / 4
    for found in (gathered, reduced):
        assert found.low <= found.seconds <= found.high


def test_recomputation_is_not_model_flops() -> None:
    program = _product(1024)
    again = replace(program, steps=(replace(program.steps[0], recompute=True),))
    assert estimate(again, MESH, V4_32).model_flops == 0
    assert estimate(again, MESH, V4_32).flops == 2 * 1024**3


def _accumulated(trips: int) -> ChipProgram:
    """The layers, run for each of `trips` microbatches."""
    inner = layers()
    loop = inner.steps[0]
    assert isinstance(loop, Loop)
    return replace(inner, steps=(Loop(trips, (loop,), loop.reads, loop.writes, name="microbatches"),))


def test_a_pipeline_waits_and_holds_what_is_in_flight() -> None:
    program = _accumulated(8)
    mesh = MeshConfig((4, 4), ("pipeline", "data"))
    flat = estimate(program, mesh, V4_32)
    piped = estimate(program, mesh, V4_32, stages=4, microbatches=8)
    assert flat.bubble_seconds == 0
    # Three of eight microbatches' time: (8 + 4 - 1) / 8 of the whole.
    assert piped.bubble_seconds == pytest.approx(flat.seconds * 3 / 8)
    assert piped.link_seconds > 0
    assert piped.seconds == pytest.approx(flat.seconds + piped.bubble_seconds + piped.link_seconds)
    # Ten more ticks' kept activations of 4 MiB; of what enters the layers, 1 MiB, all microbatches' and all ticks'.
    assert piped.memory.temporaries - flat.memory.temporaries == (10 * 4 + (8 + 11) * 1) * 1024 * 1024
    more = estimate(_accumulated(16), mesh, V4_32, stages=4, microbatches=16)
    assert more.bubble_seconds / more.seconds < piped.bubble_seconds / piped.seconds


def test_memory_is_held_against_the_chip_or_the_limit() -> None:
    found = estimate(layers(), MESH, V4_32)
    assert found.memory.limit == chip("v4").capacity_bytes
    assert found.memory.fits
    # The margin is part of the question whether it fits.
    needed = found.memory.total * (1 + found.memory.margin)
    assert found.memory.margin > 0
    assert estimate(layers(), MESH, V4_32, memory_limit=needed + 1).memory.fits
    assert not estimate(layers(), MESH, V4_32, memory_limit=needed - 1).memory.fits
    assert len(found.memory.largest) <= 5
    assert found.memory.largest[0][1] >= found.memory.largest[-1][1]


def _calibrated(base: Estimate, times: float, more_bytes: float = 0.0) -> Calibration:
    """Twenty runs of a program, each so much longer and larger than predicted."""
    total = base.memory.total
    run = Run(base.seconds_by_bound, base.seconds, times * base.seconds, total, total + more_bytes)
    return Calibration("v4", (run,) * 20)


def test_a_calibration_changes_what_was_measured() -> None:
    base = estimate(_product(16384), MESH, V4_32)
    slower = estimate(_product(16384), MESH, V4_32, calibration=_calibrated(base, 1.25, 1e8))
    assert slower.seconds == pytest.approx(1.25 * base.seconds, rel=0.02)
    assert slower.low < slower.seconds < slower.high
    assert slower.mfu == pytest.approx(base.mfu / 1.25, rel=0.02)
    assert sum(part.seconds for part in slower.parts) > 1.15 * sum(part.seconds for part in base.parts)
    assert slower.memory.total == pytest.approx(base.memory.total + 1e8, rel=0.01)
    assert slower.correction is not None
    assert len(slower.correction.witnesses) == 20
    reduced = estimate(layers(rows=4096, exchange="all_reduce"), MESH, V4_32)
    linked = estimate(layers(rows=4096, exchange="all_reduce"), MESH, V4_32, calibration=_calibrated(reduced, 1.5))
    assert linked.seconds == pytest.approx(1.5 * reduced.seconds, rel=0.03)
    # A step of 1.5 ms: most of its surplus is read as its start, the rest as slow links and units.
    assert linked.link_seconds > reduced.link_seconds
    assert linked.correction is not None
    assert linked.correction.step_seconds > 0.3e-3
    with pytest.raises(ValueError, match="the chip that it was measured on"):
        estimate(_product(256), MESH, V4_32, calibration=Calibration("h200"))


def test_on_one_gpu() -> None:
    found = estimate(_product(8192), ONE, chip("h200"))
    # 1.38 and 1.62 ms were measured on two machines.
    assert 1.3e-3 < found.seconds < 1.7e-3


def test_counts_start_at_one() -> None:
    with pytest.raises(ValueError, match="stages is a whole number"):
        estimate(_product(256), MESH, V4_32, stages=0)


def test_eight_hundred_steps_take_milliseconds() -> None:
    """The promise is 20 ms of one core; the least of five, and twice that, absorb a slower one."""
    m = Maker()
    x = m.buffer(256, 256, argument=True)
    for index in range(800):
        y = m.buffer(256, 256)
        if index % 8:
            m.step("exp" if index % 3 else "add", (x, x), y, flops=65536.0)
        else:
            m.product(x, x, y, 256, 256, 256)
        x = y
    program = m.program(x)
    times = []
    for _ in range(5):
        start = time.process_time()
        estimate(program, MESH, V4_32)
        times.append(time.process_time() - start)
    assert min(times) < 0.04


def test_what_lies_in_the_hosts_memory_is_fetched_and_not_counted() -> None:
    m = Maker()
    kept, x = m.buffer(4096, 4096, argument=True, name="kept"), m.buffer(4096, 4096, argument=True)
    m.buffers[kept] = replace(m.buffers[kept], host=True)
    here, y = m.buffer(4096, 4096), m.buffer(4096, 4096)
    m.step("host_to_device", (kept,), here, name="fetch")
    m.step("add", (here, x), y)
    found = estimate(m.program(y), MESH, V4_32)
    size = 4096 * 4096 * 4
    assert found.memory.arguments == size
    assert found.bound == "host"
    (use,) = found.links
    assert (use.kind, use.link, use.count, use.bytes) == ("host_to_device", "PCIe", 1, size)
    assert found.seconds > size / 16e9


def test_notes_say_what_was_measured() -> None:
    assert "not measured on tpu_v4: products" in estimate(_product(256), MESH, V4_32).notes[-1]
    assert estimate(_product(256), ONE, chip("h200")).notes[-1].startswith("Measured on h200: products, memory.")


def _moved(m: Maker, *outputs: int, donated: tuple[int, ...] = ()) -> tuple[float, float]:
    """Bytes moved, and bytes beside the arguments."""
    found = estimate(m.program(*outputs, donated=donated), ONE, chip("h200"))
    reserved = chip("h200").efficiency.reserved_bytes
    return sum(part.bytes for part in found.parts), found.memory.temporaries - reserved


def test_a_view_that_leaves_is_a_copy_of_its_argument() -> None:
    m = Maker()
    x, turned = m.buffer(1024, 512, argument=True), m.buffer(512, 1024)
    m.step("transpose", (x,), turned)
    assert _moved(m, turned) == (2 * 4 * 1024 * 512, 4 * 1024 * 512)


@pytest.mark.parametrize(("donated", "copies"), [((0,), 0), ((), 1)])
def test_what_may_not_be_overwritten_is_copied_before_a_slice_of_it_changes(
    donated: tuple[int, ...], copies: int
) -> None:
    m = Maker()
    cache, row = m.buffer(4096, 128, argument=True), m.buffer(1, 128, argument=True)
    after = m.buffer(4096, 128)
    m.step("dynamic_update_slice", (cache, row), after, bytes=2.0 * 4 * 128)
    size = 4 * 4096 * 128
    assert _moved(m, after, donated=donated) == (2 * 4 * 128 + copies * 2 * size, copies * size)


def test_a_convolution_of_one_channel_a_group_is_left_to_the_vector_units() -> None:
    def seconds(sizes: tuple[int, ...]) -> float:
        m = Maker()
        x, out = m.buffer(64, 56 * 56, argument=True), m.buffer(64, 56 * 56)
        flops = 2.0 * 64 * 56 * 56 * 256 * 9
        m.step("conv_general_dilated", (x,), out, flops=flops, matrix=True, dtype="bfloat16", sizes=sizes)
        return estimate(m.program(out), MESH, V4_32).seconds

    table = V4_32.chip.efficiency
    thin, dense = seconds((256, 64 * 56 * 56, 1, 9)), seconds((1, 64 * 56 * 56, 256, 9 * 256))
    assert dense < thin
    assert thin == pytest.approx(
        2.0 * 64 * 56 * 56 * 256 * 9 / V4_32.chip.vector_flops / table.matrix.mid + table.launch_seconds
    )


def test_a_calibration_takes_no_more_than_there_is() -> None:
    base = estimate(_product(1024), MESH, V4_32)
    found = estimate(_product(1024), MESH, V4_32, calibration=_calibrated(base, 1.0, -0.999 * base.memory.total))
    assert found.memory.temporaries == 0.0
    assert found.memory.total == found.memory.arguments


@pytest.mark.parametrize("limit", [-1.0, 0.0, float("nan")])
def test_a_limit_is_above_zero(limit: float) -> None:
    with pytest.raises(ValueError, match="memory_limit is a number of bytes above zero"):
        estimate(_product(256), ONE, chip("h200"), memory_limit=limit)


def test_products_that_a_chip_has_no_units_for_are_said() -> None:
    m = Maker()
    a, out = m.buffer(256, 256, argument=True), m.buffer(256, 256)
    m.step("dot_general", (a, a), out, flops=2.0 * 256**3, matrix=True, dtype="float64", sizes=(1, 256, 256, 256))
    assert any("no units for products in float64" in note for note in estimate(m.program(out), MESH, V4_32).notes)
    assert not any("float64" in note for note in estimate(_product(256), MESH, V4_32).notes)
    assert not any("float64" in note for note in estimate(m.program(out), ONE, chip("h200")).notes)
