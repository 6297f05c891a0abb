"""Which steps become one pass, and what bytes that pass moves."""

from __future__ import annotations

import pytest
from tests.cost.programs import Maker

from capibara.cost.fusion import LoopPass, Pass, fuse
from capibara.cost.rewrites import hoist_conversions, narrow_operands, sink_constants
from capibara.program.chip import Loop

MB = 1024 * 1024


def _passes(maker: Maker, *outputs: int, platform: str = "tpu") -> list[Pass]:
    made, _ = fuse(maker.program(*outputs), platform)
    assert all(isinstance(one, Pass) for one in made)
    return [one for one in made if isinstance(one, Pass)]


@pytest.mark.quick
def test_a_chain_is_one_pass_and_moves_its_ends_only() -> None:
    m = Maker()
    x, a, b, y = m.buffer(1024, 1024, argument=True), *(m.buffer(1024, 1024) for _ in range(3))
    m.step("mul", (x, x), a)
    m.step("exp", (a,), b)
    m.step("add", (b, x), y)
    (one,) = _passes(m, y)
    assert (one.reads, one.writes, one.bytes) == ((x,), (y,), 8 * MB)


def test_a_reduction_ends_a_pass_with_its_producers_inside() -> None:
    m = Maker()
    x, a, s = m.buffer(1024, 1024, argument=True), m.buffer(1024, 1024), m.buffer(1024)
    m.step("mul", (x, x), a)
    m.step("reduce_sum", (a,), s)
    (one,) = _passes(m, s)
    assert one.bytes == 4 * MB + 4096


def test_a_dear_step_with_two_readers_apart_is_kept_and_a_cheap_one_is_repeated() -> None:
    """exp feeds a sum and a product: it is written once. A negation in its place is computed in both."""
    for primitive, count, moved in (("exp", 3, (8 + 4 + 8) * MB), ("neg", 2, (4 + 8) * MB)):
        m = Maker()
        x, e, y = m.buffer(1024, 1024, argument=True), m.buffer(1024, 1024), m.buffer(1024, 1024)
        s = m.buffer(1024)
        m.step(primitive, (x,), e)
        m.step("reduce_sum", (e,), s)
        m.step("div", (e, s), y)
        found = _passes(m, y)
        assert len(found) == count
        # The row sums are 4 kB, written and read once.
        assert sum(one.bytes for one in found) == moved + 2 * 4096


def test_a_product_takes_its_epilogue_along_on_a_tpu_only() -> None:
    m = Maker()
    a, b = (m.buffer(256, 256, dtype="bfloat16", argument=True) for _ in range(2))
    residual = m.buffer(256, 256, argument=True)
    wide, y = m.buffer(256, 256), m.buffer(256, 256)
    m.product(a, b, wide, 256, 256, 256)
    m.step("add", (wide, residual), y)
    tpu, gpu = _passes(m, y), _passes(m, y, platform="gpu")
    assert [one.kind for one in tpu] == ["matrix"]
    assert [one.kind for one in gpu] == ["matrix", "vector"]
    side = 256 * 256
    assert tpu[0].bytes == side * (2 + 2 + 4 + 4)
    assert sum(one.bytes for one in gpu) == side * (2 + 2 + 4) + side * 12


def test_a_gpus_product_writes_the_type_that_its_result_is_converted_to() -> None:
    m = Maker()
    a, b = (m.buffer(256, 256, dtype="bfloat16", argument=True) for _ in range(2))
    wide, narrow, y = m.buffer(256, 256), m.buffer(256, 256, dtype="bfloat16"), m.buffer(256, 256, dtype="bfloat16")
    m.product(a, b, wide, 256, 256, 256)
    m.step("convert_element_type", (wide,), narrow)
    m.step("tanh", (narrow,), y)
    product, rest = _passes(m, y, platform="gpu")
    assert product.kind == "matrix"
    assert product.writes == (narrow,)
    assert rest.reads == (narrow,)


def test_views_move_nothing() -> None:
    m = Maker()
    x, t, y = m.buffer(64, 32, argument=True), m.buffer(32, 64), m.buffer(32, 64)
    m.step("transpose", (x,), t)
    m.step("exp", (t,), y)
    (one,) = _passes(m, y)
    assert one.reads == (x,)


def test_an_optimizer_update_is_one_pass() -> None:
    """new m leaves the program and is read by the update: it is one more result of the same pass."""
    m = Maker()
    p, g, old = (m.buffer(1024, 1024, argument=True) for _ in range(3))
    new_m, scaled, new_p = (m.buffer(1024, 1024) for _ in range(3))
    m.step("add", (old, g), new_m)
    m.step("sqrt", (new_m,), scaled)
    m.step("sub", (p, scaled), new_p)
    (one,) = _passes(m, new_p, new_m)
    assert set(one.writes) == {new_p, new_m}
    assert one.bytes == 5 * 4 * MB


def test_a_slice_reads_what_it_writes() -> None:
    m = Maker()
    x, y = m.buffer(1024, 1024, argument=True), m.buffer(16, 1024)
    m.step("dynamic_slice", (x,), y)
    (one,) = _passes(m, y)
    assert one.bytes == 2 * 16 * 1024 * 4


def test_kernels_and_collectives_stand_alone() -> None:
    m = Maker()
    x, a, b, y = m.buffer(64, 64, argument=True), *(m.buffer(64, 64) for _ in range(3))
    m.step("neg", (x,), a)
    m.step("custom", (a,), b, op="norm", bytes=123.0)
    m.collective("all_reduce", ("data",), b, y)
    assert [(one.kind, one.bytes) for one in _passes(m, y)][1] == ("op", 123.0)
    assert [one.kind for one in _passes(m, y)] == ["vector", "op", "collective"]


def test_a_scanned_weights_conversion_is_done_before_the_loop_and_once() -> None:
    m = Maker()
    x, w = m.buffer(8, 64, dtype="bfloat16", argument=True), m.buffer(4, 64, 64, argument=True, name="w")
    loops = []
    carry = x
    for _ in range(2):
        x_in, x_out = m.buffer(8, 64, dtype="bfloat16"), m.buffer(8, 64, dtype="bfloat16")
        wide, narrow = m.buffer(64, 64), m.buffer(64, 64, dtype="bfloat16")
        m.step("convert_element_type", (wide,), narrow)
        m.product(x_in, narrow, x_out, 8, 64, 64)
        body, m.steps = tuple(m.steps), []
        after = m.buffer(8, 64, dtype="bfloat16")
        loops.append(Loop(4, body, (carry, w), (after,), carried=((carry, x_in), (after, x_out)), sliced=((w, wide),)))
        carry = after
    m.steps = list(loops)
    hoisted = hoist_conversions(m.program(carry))
    assert [type(step).__name__ for step in hoisted.steps] == ["Step", "Loop", "Loop"]
    stack = hoisted.steps[0].writes[0]
    assert (hoisted.buffers[stack].name, hoisted.buffers[stack].bytes) == ("w in bfloat16", 4 * 64 * 64 * 2)
    for loop in hoisted.steps[1:]:
        assert isinstance(loop, Loop)
        assert stack in loop.reads
        assert w not in loop.reads
        assert [step.primitive for step in loop.body if not isinstance(step, Loop)] == ["dot_general"]
    assert isinstance(fuse(hoisted)[0][1], LoopPass)


def test_a_mask_is_computed_inside_the_loop_that_reads_it() -> None:
    m = Maker()
    x = m.buffer(512, 512, argument=True)
    rows, columns, mask = m.buffer(512, 512, dtype="int32"), m.buffer(512, 512, dtype="int32"), m.buffer(512, 512)
    weighed = m.buffer(512, 512)
    for counter in (rows, columns):
        m.step("iota", (), counter)
    m.step("ge", (rows, columns), mask)
    m.step("exp", (x,), weighed)
    outside, m.steps = m.steps, []
    x_in, x_out, after = (m.buffer(512, 512) for _ in range(3))
    m.step("select_n", (mask, x_in, weighed), x_out)
    body = tuple(m.steps)
    loop = Loop(4, body, (x, mask, weighed), (after,), carried=((x, x_in), (after, x_out)))
    m.steps = [*outside, loop]
    *left, sunk = sink_constants(m.program(after)).steps
    # What has to be computed from memory stays where it is.
    assert [step.primitive for step in left if not isinstance(step, Loop)] == ["exp"]
    assert isinstance(sunk, Loop)
    assert sunk.reads == (x, weighed)
    assert [step.primitive for step in sunk.body if not isinstance(step, Loop)] == ["iota", "iota", "ge", "select_n"]


def test_what_only_products_read_is_stored_narrow() -> None:
    m = Maker()
    x, w = m.buffer(256, 256, argument=True), m.buffer(256, 256, argument=True)
    only, both, turned, s = m.buffer(256, 256), m.buffer(256, 256), m.buffer(256, 256), m.buffer(256)
    y, z = m.buffer(256, 256), m.buffer(256, 256)
    m.step("exp", (x,), only)
    m.step("transpose", (only,), turned)
    m.step("tanh", (x,), both)
    m.step("reduce_sum", (both,), s)
    m.product(turned, w, y, 256, 256, 256)
    m.product(both, w, z, 256, 256, 256)
    narrow = narrow_operands(m.program(y, z, s)).buffers
    assert {id for id, buffer in narrow.items() if buffer.dtype == "bfloat16"} == {only, turned}
    assert narrow[only].bytes == 256 * 256 * 2


def test_the_gradient_of_a_pick_is_merged_and_an_embeddings_is_not() -> None:
    """One number a row into zeros is a comparison with the row's index; whole rows are a pass of their own."""
    for updates, passes in (((1024,), 1), ((1024, 1024), 2)):
        m = Maker()
        x, indices = m.buffer(1024, 1024, argument=True), m.buffer(1024, dtype="int32", argument=True)
        given = m.buffer(*updates, argument=True)
        zeros, put, y = (m.buffer(1024, 1024) for _ in range(3))
        m.step("broadcast_in_dim", (), zeros)
        m.step("scatter-add", (zeros, indices, given), put)
        m.step("add", (x, put), y)
        assert len(_passes(m, y)) == passes


def test_a_pick_does_not_wait_for_its_consumer() -> None:
    m = Maker()
    x, indices = m.buffer(1024, 1024, argument=True), m.buffer(1024, dtype="int32", argument=True)
    picked, y = m.buffer(1024), m.buffer(1024)
    m.step("gather", (x, indices), picked, bytes=3 * 4096.0)
    m.step("log", (picked,), y)
    assert [one.name for one in _passes(m, y)] == ["gather", "log"]
