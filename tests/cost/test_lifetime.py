"""Peak memory of hand-made programs, to the byte."""

from __future__ import annotations

import pytest
from tests.cost.programs import Maker, layers

from capibara.cost.fusion import fuse
from capibara.cost.lifetime import Peak, peak_memory
from capibara.cost.padding import padded_bytes
from capibara.program.chip import Buffer, ChipProgram, Loop

MB = 1024 * 1024


def _peak(program: ChipProgram, platform: str = "tpu") -> Peak:
    passes, same = fuse(program, platform)
    return peak_memory(program, passes, same, platform)


def _buffer(shape: tuple[int, ...], dtype: str, each: int) -> Buffer:
    count = 1
    for size in shape:
        count *= size
    return Buffer(0, float(count * each), shape, dtype)


@pytest.mark.parametrize(
    ("shape", "dtype", "each", "expected"),
    [
        ((256, 256), "float32", 4, 256 * 256 * 4),
        # Three columns: the 1024 rows become the minor dimension, the three a tile of four rows.
        ((1024, 3), "float32", 4, 1024 * 4 * 4),
        # Nothing but the 3x3 to tile: one tile of four rows each.
        ((3, 3), "float32", 4, 4 * 128 * 4),
        ((16, 100), "bfloat16", 2, 16 * 128 * 2),
        ((7,), "float32", 4, 128 * 4),
        ((), "float32", 4, 4),
        ((0, 5), "float32", 4, 0),
    ],
)
def test_tiles_of_a_tpu(shape: tuple[int, ...], dtype: str, each: int, expected: float) -> None:
    assert padded_bytes(_buffer(shape, dtype, each), "tpu") == expected


def test_a_gpu_aligns_and_a_host_buffer_is_nowhere() -> None:
    assert padded_bytes(_buffer((7,), "float32", 4), "gpu") == 256
    assert padded_bytes(Buffer(0, 1e9, (250_000_000,), "float32", host=True), "tpu") == 0


@pytest.mark.quick
def test_two_products_keep_what_is_between_them() -> None:
    """a @ b = c, c @ b = d: c and d are both there while the second runs."""
    m = Maker()
    a, b = (m.buffer(1024, 1024, argument=True) for _ in range(2))
    c, d = m.buffer(1024, 1024, name="c"), m.buffer(1024, 1024, name="d")
    m.product(a, b, c, 1024, 1024, 1024)
    m.product(c, b, d, 1024, 1024, 1024)
    found = _peak(m.program(d))
    assert (found.arguments, found.temporaries) == (8 * MB, 8 * MB)
    assert {name for name, _ in found.live} == {f"{one} float32[1024,1024]" for one in ("b0", "b1", "c", "d")}
    assert [size for _, size in found.timeline] == [4 * MB, 8 * MB]


def test_elementwise_work_is_done_in_place() -> None:
    m = Maker()
    a, b = (m.buffer(1024, 1024, argument=True) for _ in range(2))
    c, s, d = m.buffer(1024, 1024), m.buffer(1024), m.buffer(1024, 1024)
    m.product(a, b, c, 1024, 1024, 1024)
    m.step("reduce_max", (c,), s)
    m.step("exp", (c,), d)
    # exp has c twice to read (here and in the maximum), so c is there; d takes its place.
    found = _peak(m.program(d, s))
    assert found.temporaries == 4 * MB + 4096


def test_a_donated_argument_is_taken_over() -> None:
    def made(donated: tuple[int, ...]) -> Peak:
        m = Maker()
        p, g, new = m.buffer(1024, 1024, argument=True), m.buffer(1024, 1024, argument=True), m.buffer(1024, 1024)
        m.step("sub", (p, g), new)
        return _peak(m.program(new, donated=donated))

    assert made(()).temporaries == 4 * MB
    assert made((0,)).temporaries == 0


def test_a_donated_argument_that_is_read_later_is_not_overwritten() -> None:
    m = Maker()
    p, new, late = m.buffer(1024, 1024, argument=True), m.buffer(1024, 1024), m.buffer(1024, 1024, dtype="bfloat16")
    m.product(p, p, new, 1024, 1024, 1024)
    m.product(p, new, late, 1024, 1024, 1024)
    assert _peak(m.program(new, late, donated=(0,))).temporaries == 6 * MB


def test_what_only_makes_memory_waits_for_its_reader() -> None:
    """Zeros that are written first and read last are not alive while the large product runs."""
    m = Maker()
    a = m.buffer(1024, 1024, argument=True)
    zeros, big, small, out = m.buffer(2048, 1024), m.buffer(4096, 1024), m.buffer(1024), m.buffer(2048, 1024)
    one = m.buffer(1, argument=True)
    m.step("custom", (one,), zeros)
    m.product(a, a, big, 4096, 1024, 1024)
    m.step("reduce_sum", (big,), small)
    m.step("custom", (zeros, small), out)
    # 16 MB for the product, then 8 + 8 for zeros and the result; never all three.
    assert _peak(m.program(out)).temporaries == 16 * MB + 4096


def test_a_loop_keeps_its_stack_whole_and_its_carry_in_place() -> None:
    """512x1024 bfloat16 is 1 MB. The stack is 4, the result 1 (x is not donated), a trip makes one more."""
    found = _peak(layers(trips=4, width=1024, rows=512))
    assert found.arguments == 1 * MB + 4 * 2 * MB
    # The product's epilogue writes the next carry while the product still reads this one: 1 MB more.
    assert found.temporaries == 4 * MB + 1 * MB + 1 * MB
    assert found.stashed == 4 * MB
    assert found.at.startswith("layers: ")


def test_a_gathered_weight_is_there_once() -> None:
    plain, gathered = _peak(layers()), _peak(layers(exchange="all_gather"))
    assert gathered.temporaries == plain.temporaries + 2 * MB
    assert "gathered bfloat16[1024,1024]" in {name for name, _ in gathered.live}


@pytest.mark.parametrize(("reduced", "worst"), [(False, 12), (True, 16)])
def test_a_layers_reduced_weight_gradient_comes_last_and_its_operands_wait(reduced: bool, worst: int) -> None:
    """Numbers of 1024x1024 float32, 4 MB each.

    Products make dy, dw (which leaves the loop) and big of dy, wide (8 MB) of big, dx of wide. The worst moment has
    big and wide; where dw is reduced it is done last, and dy is there as well.
    """
    m = Maker()
    side = (1024, 1024)
    start, xs = m.buffer(*side, argument=True), m.buffer(4, *side, argument=True)
    dz, x, dy, dw, big, dx = (m.buffer(*side) for _ in range(6))
    wide = m.buffer(2048, 1024)
    m.product(dz, dz, dy, 1024, 1024, 1024)
    m.product(x, dy, dw, 1024, 1024, 1024)
    leaving = dw
    if reduced:
        leaving = m.buffer(*side)
        m.collective("all_reduce", ("data",), dw, leaving)
    m.product(dy, dy, big, 1024, 1024, 1024)
    m.product(big, big, wide, 2048, 1024, 1024)
    m.product(wide, wide, dx, 1024, 1024, 2048)
    body, m.steps = tuple(m.steps), []
    grads, end = m.buffer(4, *side), m.buffer(*side)
    m.steps.append(
        Loop(
            4,
            body,
            (start, xs),
            (end, grads),
            carried=((start, dz), (end, dx)),
            sliced=((xs, x),),
            stacked=((leaving, grads),),
            backward=True,
        )
    )
    found = _peak(m.program(end, grads))
    # Whole all the time: the stack of four and the result. On top of it the worst moment of a trip.
    assert found.temporaries == 4 * 4 * MB + 4 * MB + worst * MB


@pytest.mark.parametrize(
    ("chips", "platform", "parts"),
    [(8, "tpu", 4 + 1), (2, "tpu", 2 + 1), (64, "tpu", 64 + 1), (8, "gpu", 8 + 1)],
)
def test_a_product_that_is_reduced_and_scattered_is_made_in_parts(chips: int, platform: str, parts: int) -> None:
    """On a TPU over up to 32 chips: two parts of the product are made and two sent, beside the chip's own result."""
    m = Maker()
    a = m.buffer(4096, 4096, argument=True)
    whole, mine = m.buffer(4096, 4096), m.buffer(4096 // chips, 4096)
    m.product(a, a, whole, 4096, 4096, 4096)
    m.collective("reduce_scatter", ("data",), whole, mine)
    assert _peak(m.program(mine), platform).temporaries == parts * 64 * MB / chips


@pytest.mark.parametrize(
    ("window", "platform", "extra"), [(12, "tpu", 128), (12, "gpu", 0), (1, "tpu", 0), (96, "tpu", 0)]
)
def test_rows_that_are_looked_up_are_padded_meanwhile(window: int, platform: str, extra: int) -> None:
    """4096 rows of a few numbers out of a table: each fills a tile's lanes until it is put in order, or is added."""
    m = Maker()
    table = m.buffer(64, window, argument=True)
    ids = m.buffer(4096, 1, dtype="int32", argument=True)
    found = m.buffer(4096, window)
    m.step("gather", (table, ids), found)
    mine = padded_bytes(m.buffers[found], platform)
    assert _peak(m.program(found), platform).temporaries == mine + 4096 * extra * 4
    m = Maker()
    table, updates = m.buffer(64, window, argument=True), m.buffer(4096, window, argument=True)
    ids = m.buffer(4096, 1, dtype="int32", argument=True)
    found = m.buffer(64, window)
    m.step("scatter-add", (table, ids, updates), found)
    mine = padded_bytes(m.buffers[found], platform)
    assert _peak(m.program(found), platform).temporaries == mine + 4096 * extra * 4


@pytest.mark.parametrize(
    ("primitive", "platform", "unsure"), [("sort", "tpu", 2), ("tanh", "tpu", 0), ("sort", "gpu", 0)]
)
def test_what_was_never_compared_with_the_compiler_is_unsure(primitive: str, platform: str, unsure: int) -> None:
    """A product and what is made of it, 4 MB each: as much again where nobody has checked such a program."""
    m = Maker()
    x = m.buffer(1024, 1024, argument=True)
    copy, made, out = m.buffer(1024, 1024), m.buffer(1024, 1024), m.buffer(1024, 1024)
    m.product(x, x, copy, 1024, 1024, 1024)
    m.step(primitive, (copy,), made)
    m.product(copy, made, out, 1024, 1024, 1024)
    found = _peak(m.program(out), platform)
    assert found.unsure == unsure * 4 * MB
    assert found.unchecked == (("sort",) if unsure else ())
