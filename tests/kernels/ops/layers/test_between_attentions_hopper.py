"""The Hopper kernel of between_attentions: its numbers and synchronisation by emulation, its plan, what it refuses."""

from __future__ import annotations

import contextlib
import functools
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.pallas import board_emulator
from tests.kernels.pallas import hopper_emulator as emulator

from capibara.kernels import explain, target, trust
from capibara.kernels.core.spec import Case
from capibara.kernels.lab.check import check_output, expected
from capibara.kernels.ops.layers.activation import formulas
from capibara.kernels.ops.layers.between_attentions import api, cases
from capibara.kernels.ops.layers.between_attentions.api import BETWEEN_ATTENTIONS
from capibara.kernels.ops.layers.between_attentions.hopper import IMPLEMENTATION, forward
from capibara.kernels.ops.layers.between_attentions.hopper.forward import LayerStreamConfig, plan_of
from capibara.kernels.ops.layers.between_attentions.rules import WEIGHTS
from capibara.kernels.pallas import grid
from capibara.kernels.pallas.hopper import SMEM_BYTES, smem_bytes

H200 = "NVIDIA H200"
SHALLOW = LayerStreamConfig(stages=2, in_flight=1)
DEEP = LayerStreamConfig(stages=4, in_flight=3)


def _union(*views: Any) -> Callable[[], Any]:
    """Of a row, swizzled memory [piece, rows, depth] and the first rows of its tiles, which lie as they are."""
    whole, tiles = views
    if tiles.tiled:
        return emulator._union(*views)

    def make() -> tuple[Any, Any]:
        ref = whole()
        pieces, rows, depth = ref.shape
        _, of_rows, of_depth, numbers = tiles.shape
        assert tiles.shape == (pieces, rows // 8, of_depth, 8 * depth // of_depth)
        apart = ref.array.reshape(pieces, of_rows, 8, of_depth, numbers // 8)
        return ref, emulator.Ref(apart[:, :, 0])

    return make


@contextlib.contextmanager
def emulated(monkeypatch: pytest.MonkeyPatch, programs: int) -> Iterator[None]:
    """A chip of few multiprocessors."""
    with board_emulator.emulated(monkeypatch, forward, formulas), monkeypatch.context() as patched:
        inside = emulator._Shim(forward.plgpu, RefUnion=_union)
        patched.setattr(forward, "plgpu", emulator._Divided(inside, forward.plgpu))
        patched.setattr(forward, "multiprocessors", lambda device_kind: programs)
        yield


def _case(inner: int, hidden: int, ffn: int, outputs: int, **options: Any) -> Case:
    return cases._case("emulated", inner, hidden, ffn, outputs, cases.HOSTILE, **options)


def _named(arrays: Any) -> Iterator[tuple[str, Any]]:
    return zip(BETWEEN_ATTENTIONS.operands, arrays, strict=True)


def _weights(arrays: Any) -> list[Any]:
    return [x for name, x in _named(arrays) if name in WEIGHTS and x is not None]


def _run(case: Case, config: LayerStreamConfig, board: Any = None, arrays: Any = None) -> tuple[Any, ...]:
    *operands, _ = case.arrays() if arrays is None else arrays
    params = {"gate": "silu", "out_parts": None, **case.params}
    return jax.block_until_ready(forward.between_attentions_hopper(*operands, board, config=config, eps=1e-6, **params))


def _assert_right(found: Any, case: Case, programs: int, arrays: Any = None) -> None:
    arrays = case.arrays() if arrays is None else arrays
    plan = plan_of(_weights(arrays), SHALLOW, programs=programs)
    assert plan is not None
    parts = {"out_parts": plan.products[3].splits} if len(plan.products) == 4 else {}
    result = check_output(found[:2], expected(BETWEEN_ATTENTIONS, arrays, {**case.params, **parts}))
    assert result.ok, result.why


BF16 = _case(256, 128, 256, 256)
BF16_WIDE = _case(512, 256, 256, 256)
INT8 = _case(512, 256, 256, 256, int8=True)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("case", "programs", "config"),
    [
        pytest.param(BF16, 3, SHALLOW, id="a-program-without-sums-and-two-rounds"),
        pytest.param(_case(512, 256, 512, 256), 8, DEEP, id="splits-of-all-sums"),
        pytest.param(_case(512, 128, 256, 256), 8, LayerStreamConfig(3, 3), id="four-splits-and-idle-programs"),
        pytest.param(_case(256, 256, 512, 256, dtype="float16"), 3, SHALLOW, id="float16-two-rounds-of-sums"),
        pytest.param(_case(128, 256, 256, 0, gate="gelu"), 2, DEEP, id="last-and-every-program-joins"),
        pytest.param(INT8, 5, SHALLOW, id="int8-a-program-without-units"),
        pytest.param(_case(512, 256, 512, 256, int8=True), 8, DEEP, id="int8-splits"),
        pytest.param(_case(512, 256, 256, 0, int8=True, dtype="float16"), 3, SHALLOW, id="int8-last-two-rounds"),
    ],
)
def test_emulated(case: Case, programs: int, config: LayerStreamConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated(monkeypatch, programs):
        found = _run(case, config)
    _assert_right(found, case, programs)


@pytest.mark.quick
@pytest.mark.parametrize("case", [BF16, INT8], ids=["bfloat16", "int8"])
def test_started_early_it_fetches_weights_alone(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others, the board among them, may still be the kernel's before."""
    arrays = case.arrays()
    held = [x.shape for name, x in _named(arrays) if "weight" in name and x is not None]

    def run() -> Any:
        with emulated(monkeypatch, 5), emulator.started_early(*held):
            return _run(case, SHALLOW)

    _assert_right(run(), case, 5)
    monkeypatch.setattr(forward, "await_previous", lambda: None)
    with pytest.raises(Exception, match=r"before the kernel before is done|does not await"):
        run()


@pytest.mark.parametrize("program", [0, 4])
@pytest.mark.parametrize("role", ["fetch", "multiply", "prepare"])
def test_a_warpgroup_may_be_late(role: str, program: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last program has no part in what the others wait for before the turn is ended: it still has to read it."""
    work = getattr(forward, role)

    def late(*given: Any) -> None:
        if forward.lax.axis_index("program") == program:
            time.sleep(0.5)
        work(*given)

    monkeypatch.setattr(forward, role, late)
    with emulated(monkeypatch, 5):
        found = _run(INT8, SHALLOW)
    _assert_right(found, INT8, 5)


@pytest.mark.quick
def test_every_digit_of_a_row_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's rounding hides the last one. Here the row is known, which is the last product's but for its weight."""
    arrays = INT8.arrays()
    without = [None if name.startswith("next_weight") else x for name, x in _named(arrays)]
    with emulated(monkeypatch, 5):
        _, found = _run(INT8, SHALLOW, arrays=arrays)
        _, row = _run(INT8, SHALLOW, arrays=without)
    x, weight, scale = (np.asarray(y, np.float64) for y in (row, arrays[7], arrays[11]))
    # The digits' error, as below, and that of eight operations in float32.
    error = np.abs(x).max() * (2.0**-22 * 128 / 127 + 4 * 2.0**-24) * np.abs(weight).sum(1)
    error = error + 8 * 2.0**-24 * np.abs(x) @ np.abs(weight).T
    assert (np.abs(np.asarray(found[0], np.float64) - x @ weight.T * scale) <= error * scale).all()


@pytest.mark.quick
def test_kernels_that_share_a_board(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three turns, of weights of another draw, of 8 bits, and of a last layer: what those before announced lies there
    still."""
    programs, other = 5, _case(512, 256, 256, 0)
    board, turns = forward.new_board(256, 256), ((BF16_WIDE, 0), (BF16_WIDE, 1), (INT8, 0), (other, 0))
    for turn, (case, seed) in enumerate(turns, 1):
        arrays = case.arrays(seed)
        with emulated(monkeypatch, programs):
            *found, board = _run(case, SHALLOW, board, arrays)
        _assert_right(found, case, programs, arrays)
        counters = board[: (1 + forward.EVENTS) * grid.LINE : grid.LINE]
        assert counters.tolist() == [turn, 2 * turn, 2 * turn, programs * turn]


@pytest.mark.parametrize("case", [BF16, INT8], ids=["bfloat16", "int8"])
def test_a_board_of_other_turns_numbers(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, begin = np.random.default_rng(0), (1 + forward.EVENTS) * grid.LINE
    board = np.zeros(forward.new_board(256, 256).shape, np.int32)
    pairs = board[begin:].reshape(-1, grid.WORDS)
    pairs[:, 0] = draw.choice([np.nan, np.inf, 1.0, -1e30], len(pairs)).astype(np.float32).view(np.int32)
    pairs[:, 1] = draw.choice([0, 2, -1, 1 << 30], len(pairs))
    with emulated(monkeypatch, 5):
        found = _run(case, DEEP, jnp.asarray(board))
    _assert_right(found, case, 5)


@pytest.mark.quick
def test_counters_alone_are_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulated memory is late enough: who takes what counters tell of, and not its turn, has old numbers."""
    wait_for = board_emulator.gather

    def gather(pairs: list[Any], shape: tuple[int, ...], layout: Any, turn: Any) -> list[np.ndarray]:
        if shape == (forward.THREADS,):  # parts of sums, which nothing counts
            return wait_for(pairs, shape, layout, turn)
        return [one.read()[:: grid.WORDS].copy().view(np.float32).reshape(shape) for one in pairs]

    monkeypatch.setattr(board_emulator, "gather", gather)
    with emulated(monkeypatch, 5):
        found = _run(INT8, SHALLOW)
    with pytest.raises(AssertionError, match=r"tolerance|NaN"):
        _assert_right(found, INT8, 5)


def _of_sizes(inner: int, hidden: int, ffn: int, outputs: int, dtype: str) -> list[jax.ShapeDtypeStruct]:
    held = (hidden, inner), (2 * ffn, hidden), (hidden, ffn), (outputs, hidden)
    return [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in held[: 4 if outputs else 3]]


def _taken(
    weights: list[jax.ShapeDtypeStruct], plan: forward.Plan, program: int
) -> Iterator[tuple[int, Any, Any, Any]]:
    """What a program fetches: (which weight, its rows, its columns, the stage)."""
    taken: list[tuple[int, Any, Any, Any]] = []
    held = [emulator.Ref(np.broadcast_to(np.zeros((), w.dtype), w.shape)) for w in weights]

    def copied(source: emulator.Ref, into: emulator.Ref, barrier: Any) -> None:
        number = next(n for n, weight in enumerate(held) if weight.array is source.array)
        assert source.shape == into.shape
        taken.append((number, *source.part, into.part[0]))

    rings = tuple(
        emulator.Ref(np.broadcast_to(np.zeros((), jnp.int8), (plan.config.stages, p.halves * p.outputs, p.depth)))
        for p in plan.products[:2]
    )
    barriers = emulator._barrier(num_barriers=plan.config.stages)()
    memory: Any = forward.Memory(None, None, (None, None), tuple(held), (), None, None, None)
    smem = {"weight": rings, "filled": barriers, "drained": barriers}
    with emulator.emulated(forward), pytest.MonkeyPatch.context() as patched, emulator.as_program(program=program):
        waits = {"copy_gmem_to_smem": copied, "barrier_wait": lambda barrier: None}
        patched.setattr(forward, "plgpu", emulator._Shim(forward.plgpu, **waits))
        forward.fetch(memory, plan, smem)
    return iter(taken)


LLAMA_1B, LLAMA_8B = (2048, 2048, 8192, 4096), (4096, 4096, 14336, 6144)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("sizes", "dtype", "programs"),
    [
        ((256, 128, 256, 256), "float16", 3),
        ((512, 256, 256, 0), "int8", 5),
        (LLAMA_1B, "bfloat16", 114),
        (LLAMA_8B, "int8", 132),
        (LLAMA_1B, "int8", 132),
    ],
)
def test_every_piece_of_a_weight_is_fetched_by_one_program_once(
    sizes: tuple[int, int, int, int], dtype: str, programs: int
) -> None:
    weights = _of_sizes(*sizes, dtype)
    plan = plan_of(weights, LayerStreamConfig(), programs=programs)
    assert plan is not None
    times = [np.zeros((w.shape[0] // 32, w.shape[1] // 64), np.int32) for w in weights]
    busy = 0
    for program in range(programs):
        slots = []
        for number, (row, rows), (column, columns), slot in _taken(weights, plan, program):
            times[number][row // 32 : (row + rows) // 32, column // 64 : (column + columns) // 64] += 1
            assert (rows * columns * jnp.dtype(dtype).itemsize) == forward.PIECE_BYTES // 2
            slots.append(slot)
        assert slots == [n // 2 % plan.config.stages for n in range(len(slots))]
        busy += bool(slots)
    assert all((count == 1).all() for count in times)
    assert busy == min(programs, max(product.units for product in plan.products))


@pytest.mark.quick
@settings(max_examples=200)
@given(
    st.integers(1, 40), st.integers(1, 80), st.integers(1, 60), st.integers(0, 40), st.integers(1, 144), st.booleans()
)
def test_a_board_has_room_for_any_plan(
    inner: int, hidden: int, ffn: int, outputs: int, programs: int, int8: bool
) -> None:
    sizes = [256 * n for n in (inner, hidden, ffn, outputs)]
    plan = plan_of(_of_sizes(*sizes, "int8" if int8 else "bfloat16"), SHALLOW, programs=programs)
    assert plan is not None
    board = jax.eval_shape(functools.partial(forward.new_board, sizes[1], sizes[2]))
    assert board.shape[0] >= grid.board_words(forward.EVENTS, plan.pairs[-1])
    for product in plan.products:
        assert product.pieces * product.depth * product.splits in sizes
        assert product.rounds(programs) == 1 or product.splits == 1
    # A part of the board begins with a line.
    assert all(first % 16 == 0 for first in plan.pairs)
    # A second round's row is put when the first was used, which is said once a product.
    if plan.joiners <= programs:
        assert all(plan.products[number].rounds(programs) <= 2 for number in (0, 2))


def _like(name: str, **change: Any) -> list[Any]:
    case = BETWEEN_ATTENTIONS.case(name)
    like = [x if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in case.args()]
    for operand, made in change.items():
        like[BETWEEN_ATTENTIONS.operands.index(operand)] = made
    return like


@pytest.mark.quick
def test_rings_that_fit_beside_the_row() -> None:
    found = {}
    with target("gpu", H200):
        for case in BETWEEN_ATTENTIONS.cases:
            call = BETWEEN_ATTENTIONS.call(*case.args(), **case.params)
            if not {"gpu", "test"} & case.tags or forward.parts_of(call) is None:
                continue
            configs = forward.candidates(call)
            for config in configs:
                plan = plan_of(_weights(case.args()), config, programs=132)
                assert plan is not None
                assert smem_bytes(forward.scratch(plan, jnp.bfloat16)) <= SMEM_BYTES
                assert config.in_flight <= config.stages
            found[case.name] = forward.parts_of(call), configs[0].stages if configs else None
    assert found == {
        "llama-1b": (2, 10), "llama-8b": (1, 6), "llama-1b-int8": (2, 10), "llama-8b-int8": (1, None),
        "llama-1b-last": (1, 10), "llama-1b-int8-last": (1, 10), "float16": (2, 10), "wide-attention": (4, 10),
        "int8-small": (2, 10), "small-last": (1, 10),
    }  # fmt: skip


@pytest.mark.quick(cases="all")
@pytest.mark.parametrize(
    ("sizes", "options", "said"),
    [
        ((256, 256, 512, 256), {"rows": 2}, "one row, not 2"),
        ((256, 256, 512, 256), {"dtype": "float32"}, "not float32"),
        ((256, 256, 512, 256), {}, "left in 2 parts here, not 1"),
        ((256, 256, 512, 256), {"out_parts": 4}, "left in 2 parts here, not 4"),
        ((192, 256, 512, 256), {"out_parts": 2}, "192 inputs, 256 of the residual .* all multiples of 128"),
        ((256, 192, 512, 256), {"out_parts": 2}, "256 inputs, 192 of the residual .* all multiples of 128"),
        ((256, 256, 320, 256), {"out_parts": 2}, "320 of the mlp and 256 outputs .* all multiples of 128"),
        ((256, 256, 512, 96), {"out_parts": 2}, "512 of the mlp and 96 outputs .* all multiples of 128"),
        ((384, 256, 512, 256), {"int8": True}, "384 inputs.* all multiples of 256"),
        ((256, 256, 384, 256), {"int8": True}, "384 of the mlp.* all multiples of 256"),
        ((128, 17024, 128, 0), {}, "not all multiples"),  # more columns than the programs' threads
        (LLAMA_8B, {"int8": True}, "a row of 7168 numbers leaves no room for 4 pieces"),
        ((256, 256, 512, 256), {"out_parts": 2}, "None"),
        ((256, 256, 512, 0), {}, "None"),
    ],
)
def test_what_is_refused(sizes: tuple[int, int, int, int], options: dict[str, Any], said: str) -> None:
    case = _case(*sizes, **options)
    with target("gpu", H200):
        assert re.search(said, str(IMPLEMENTATION.refusal(BETWEEN_ATTENTIONS.call(*case.args(), **case.params))))


@pytest.mark.quick
def test_chips_that_are_refused() -> None:
    given = BETWEEN_ATTENTIONS.case("llama-1b").args()
    for kind, said in (
        ("NVIDIA A100-SXM4-80GB", "written for Hopper"),
        ("NVIDIA H800", "how many do on NVIDIA H800 is not known"),
        (H200, "None"),
    ):
        with target("gpu", kind):
            assert said in str(IMPLEMENTATION.refusal(BETWEEN_ATTENTIONS.call(*given, out_parts=2)))


@pytest.mark.quick
def test_it_is_taken_where_it_was_timed() -> None:
    parts = functools.partial(api.kernel_parts, gate="silu", eps=1e-6)
    with target("gpu", H200):
        for name in ("llama-1b", "llama-1b-int8"):
            assert parts(*_like(name)) == 2
            assert parts(*_like(f"{name}-last")) == 1
        assert parts(*_like("llama-8b")) is None  # not timed
        assert parts(*_like("llama-8b-int8")) is None
        assert parts(*_like("odd")) is None
        for name, taken in (("llama-1b", "hopper"), ("llama-8b", "xla")):
            case = BETWEEN_ATTENTIONS.case(name)
            found = explain(functools.partial(api.between_attentions, **case.params), *_like(name)).selections
            assert [s.implementation for s in found if s.call.op is BETWEEN_ATTENTIONS] == [taken]
        with trust("predicted"):
            assert parts(*_like("llama-8b")) == 1
            assert parts(*_like("llama-8b-int8")) is None
    assert parts(*_like("llama-1b")) is None


@pytest.mark.quick
@pytest.mark.parametrize(("stages", "in_flight"), [(1, 1), (4, 0), (4, 5)])
def test_rings_that_make_no_sense(stages: int, in_flight: int) -> None:
    with pytest.raises(ValueError, match=r"stages is 2 or more, and in_flight 1 to as many. Got .* Fix: use stages=10"):
        LayerStreamConfig(stages, in_flight)


@pytest.mark.quick
def test_boards_and_rings_that_do_not_fit() -> None:
    case = _case(256, 256, 512, 256, out_parts=2)
    with target("gpu", H200):
        with pytest.raises(
            ValueError, match=r"A board has \d+ words here. Got \(64,\). Fix: use new_board\(256, 512\)"
        ):
            _run(case, DEEP, jnp.zeros(64, jnp.int32))
        with pytest.raises(ValueError, match=r"A ring fits beside the row.*Got .*stages=14.*Fix: leave the config out"):
            _run(case, LayerStreamConfig(14))


def _digits(row: np.ndarray) -> tuple[np.ndarray, float]:
    """The three digits of each of a row's numbers, as float64, and what the last one counts."""
    plan = plan_of(_of_sizes(256, 256, 256, 0, "int8"), SHALLOW, programs=4)
    assert plan is not None
    pieces = row.size // plan.gated_depth
    tiles = emulator.Ref(np.full((pieces, forward.DIGITS, *plan.wide), 77, np.int8))
    smem = {
        "x": (None, tiles),
        "sums": emulator.Ref(np.zeros(forward.WARPS, np.float32)),
        "digit": emulator.Ref(np.full(forward.THREADS, np.nan, np.float32)),
    }
    with pytest.MonkeyPatch.context() as patched, board_emulator.emulated(patched, forward), emulator.as_program():
        forward._put(row.reshape(pieces, *plan.wide), plan, smem)
    (one,) = np.unique(smem["digit"].array)
    return tiles.array.transpose(1, 0, 2, 3).reshape(forward.DIGITS, -1).astype(np.float64), float(one)


@pytest.mark.quick
@given(
    st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1, max_size=8),
    st.integers(0, 99),
    st.integers(-120, 120),
)
def test_three_digits_of_7_bits_are_a_number(some: list[float], seed: int, exponent: int) -> None:
    """Half of what the last digit counts is left out; float32 rounds four times on the way, each number by itself."""
    row = (np.random.default_rng(seed).standard_normal(256) * 2.0**exponent).astype(np.float32)
    for numbers in (row, np.concatenate([np.array(some, np.float32), row])[:256]):
        (high, middle, low), one = _digits(numbers)
        assert np.abs(high).max() <= 127
        assert max(np.abs(middle).max(), np.abs(low).max()) <= 64
        largest = max(float(np.abs(numbers).max()), 1e-30)
        error = np.abs((high * 2**14 + middle * 2**7 + low) * one - numbers.astype(np.float64)).max()
        assert error <= largest * (2.0**-22 * 128 / 127 + 4 * 2.0**-24)
