"""The Hopper kernels of long causal filters, emulated: their arithmetic and their synchronisation."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from tests.kernels.pallas import hopper_emulator as emulator

from capibara.kernels import explain, fft_convolve, target
from capibara.kernels.ops.fft.causal.api import CAUSAL_FILTER, CAUSAL_TAPS
from capibara.kernels.ops.fft.causal.hopper import forward, kernel
from capibara.kernels.ops.fft.causal.hopper.forward import ProgramsConfig, refuses
from capibara.kernels.ops.fft.causal.hopper.kernel import PRODUCTS, places
from capibara.kernels.ops.fft.causal.hopper.products import ROWS
from capibara.kernels.ops.fft.causal.reference import reference, reference_taps


def _load_in_order(ref: Any) -> np.ndarray:
    value, made = ref.read(), np.empty(ROWS * ROWS, ref.dtype)
    made[places()] = value.reshape(-1)
    return made.reshape(value.shape)


def _store_in_order(ref: Any, value: np.ndarray) -> None:
    ref.write(value.reshape(-1)[places()].reshape(value.shape))


def _added(total: Any, left: Any, right: Any, *, turned: tuple[bool, bool] = (False, False)) -> np.ndarray:
    left, right = (ref.transpose((1, 0)) if turn else ref for ref, turn in zip((left, right), turned, strict=True))
    made = total if total is not None else np.zeros((ROWS, ROWS), np.float32)
    read = (np.asarray(x.read() if isinstance(x, emulator.Ref) else x, np.float32) for x in (left, right))
    return made + np.matmul(*read)


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """The emulator has no registers: blocks in their order are put in a matrix's, and back. Products do not wait."""
    with emulator.emulated(kernel), pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "load_in_order", _load_in_order)
        patch.setattr(kernel, "store_in_order", _store_in_order)
        patch.setattr(kernel, "keep_block", lambda ref, value, layout: ref.write(value))
        patch.setattr(kernel, "added", _added)
        patch.setattr(kernel, "ready", lambda sums, later: tuple(sums))
        patch.setattr(kernel, "hidden_zero", lambda step, stage: np.int32(0))
        kernel.run.clear_cache()  # what was traced outside is not emulated, and must not be found there afterwards
        try:
            yield
        finally:
            kernel.run.clear_cache()


# Six roundings of the data and four of the constants on the way, each of 2^-8 at most and 0.39 of that in the root mean
# square, for x and for h: 0.39 · 2^-8 · sqrt(20) = 0.0068, and a seventh more.
BOUND = 2**-7
# A signal that goes with one of up to twice its size shares its errors: sqrt((1 + 4) / 2).
BOUND_OF_PAIRS = 1.6 * BOUND


def _normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape), "float32")


def _errors(got: Any, wanted: Any) -> Any:
    """Of each signal by itself."""
    got, wanted = np.asarray(got, "float64"), np.asarray(wanted, "float64")
    return np.linalg.norm(got - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("batch", "time", "taps", "conjugate"),
    [(2, 16384, 16384, False), (2, 9001, 300, True), (3, 8192, 8192, False), (2, 5000, 5000, True)],
)
def test_filter(batch: int, time: int, taps: int, conjugate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """More signals than programs, one a million times another; whole matrices and ones with zeros after.

    Up to 8192 numbers two signals go together, of three one alone.
    """
    monkeypatch.setattr(forward, "multiprocessors", lambda kind: 4)
    x, h = _normal(batch, 3, time) * jnp.array([1e6, 1.0, 1e-6])[:batch, None, None], _normal(3, taps)
    with emulated():
        got = forward.causal_filter_hopper(x, h, config=ProgramsConfig(), conjugate=conjugate)
        jax.block_until_ready(got)
    bound = BOUND if time > 8192 else BOUND_OF_PAIRS
    assert _errors(got, reference(x, h, conjugate=conjugate)).max() < bound


def test_bfloat16_signals_and_their_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read and written as they are; the filters' gradient is float32."""
    monkeypatch.setattr(forward, "multiprocessors", lambda kind: 1)
    x, h = _normal(1, 2, 3000).astype("bfloat16"), _normal(2, 40)
    with emulated():
        got = jax.block_until_ready(forward.causal_filter_hopper(x, h, config=ProgramsConfig(), conjugate=False))
        taps = jax.block_until_ready(forward.causal_taps_hopper(x, x, config=ProgramsConfig(), taps=40))
    assert (got.dtype, taps.dtype) == (jnp.bfloat16, jnp.float32)
    assert _errors(got, reference(x.astype("float32"), h)).max() < BOUND
    assert _errors(taps, reference_taps(x, x, taps=40)).max() < BOUND


@pytest.mark.quick
def test_taps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient for the filters: a spectrum for each signal, and a sum over the batch."""
    monkeypatch.setattr(forward, "multiprocessors", lambda kind: 1)
    flow, x = _normal(2, 2, 5000), _normal(2, 2, 5000, seed=1)
    with emulated():
        got = jax.block_until_ready(forward.causal_taps_hopper(flow, x, config=ProgramsConfig(), taps=700))
    assert got.shape == (2, 700)
    assert _errors(got, reference_taps(flow, x, taps=700)).max() < BOUND


def test_a_nan_stays_in_its_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more than 8192 numbers; shorter signals go in pairs, and `fft_convolve` says so."""
    monkeypatch.setattr(forward, "multiprocessors", lambda kind: 1)
    x = _normal(2, 1, 8193).at[0, 0, 50].set(jnp.nan)
    with emulated():
        got = np.asarray(forward.causal_filter_hopper(x, _normal(1, 9), config=ProgramsConfig(), conjugate=False))
    assert np.isnan(got[0]).any()
    assert np.isfinite(got[1]).all()


def test_an_odd_one_out_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three the last goes with the first. It is read again beside the second, whose NaN would show it written."""
    monkeypatch.setattr(forward, "multiprocessors", lambda kind: 1)
    x = _normal(3, 1, 100).at[1, 0, 50].set(jnp.nan)
    with emulated():
        got = np.asarray(forward.causal_filter_hopper(x, _normal(1, 9), config=ProgramsConfig(), conjugate=False))
    assert np.isnan(got[1]).any()
    assert np.isfinite(got[[0, 2]]).all()


@pytest.mark.quick
def test_blocks_in_order_are_the_registers_of_wgmma() -> None:
    """JAX's own layout, by numpy: tiles, of which some axes are the warps, lanes and pairs, and the rest registers."""
    layout: Any = plgpu.Layout.WGMMA.to_mgpu()
    tiled = np.arange(ROWS * ROWS).reshape(ROWS, ROWS)
    for tile in layout.tiling.tiles:
        kept, cut = tiled.shape[: -len(tile)], tiled.shape[-len(tile) :]
        split = tiled.reshape(*kept, *(n for size, t in zip(cut, tile, strict=True) for n in (size // t, t)))
        first = range(len(kept), split.ndim, 2)
        tiled = split.transpose(*range(len(kept)), *first, *(axis + 1 for axis in first))
    threads = [*layout.warp_dims, *layout.lane_dims, layout.vector_dim]
    by_thread = np.moveaxis(tiled, threads, [0, 1, 2, -1]).reshape(128, -1, 2)
    in_memory = places().reshape(4, 128, 4, 2).swapaxes(0, 1).reshape(128, -1, 2)  # four pairs are 16 bytes
    np.testing.assert_array_equal(in_memory, by_thread)


def test_says_why_not() -> None:
    def why(x: tuple[int, int, int], kind: str = "NVIDIA H200") -> str | None:
        with target("gpu", kind):
            return refuses(CAUSAL_FILTER.call(jnp.zeros(x), jnp.zeros((x[1], 1))))

    assert why((1, 1, 16384)) is None
    assert "up to 16384" in str(why((1, 1, 16385)))
    assert "empty" in str(why((0, 1, 8)))
    assert "Hopper" in str(why((1, 1, 8), "NVIDIA A100"))


@pytest.mark.parametrize(
    ("time", "taps", "name"),
    [
        (4096, 4096, "xla"),  # it would cost as much as 8192 numbers
        (6144, 6144, "xla"),  # transforms of 12288 points, which have a kernel
        (8000, 8000, "hopper"),  # 16000 points have none
        (8192, 8192, "hopper"),
        (12288, 4096, "xla"),  # 16384 points
        (16384, 16384, "hopper"),
        (16385, 1, "xla"),  # too long
    ],
)
def test_long_signals_take_it(time: int, taps: int, name: str) -> None:
    x, h = jax.ShapeDtypeStruct((2, 3, time), "float32"), jax.ShapeDtypeStruct((3, taps), "float32")
    with target("gpu", "NVIDIA H200"):
        found = explain(lambda x, h: fft_convolve(x, h, precision="bfloat16"), x, h)
    assert found.selections[0].implementation == name


@pytest.mark.parametrize(("time", "name"), [(8191, "xla"), (8192, "hopper"), (16385, "xla")])
def test_the_filters_gradient_takes_it(time: int, name: str) -> None:
    x = jax.ShapeDtypeStruct((2, 3, time), "float32")
    with target("gpu", "NVIDIA H200"):
        assert explain(lambda flow, x: CAUSAL_TAPS(flow, x, taps=9), x, x).selections[0].implementation == name


@pytest.mark.parametrize(("dtype", "taken"), [("bfloat16", "bfloat16"), ("float16", "float32")])
def test_fft_convolve_hands_types_on(dtype: str, taken: str) -> None:
    """To widen what the kernel rounds again is a pass over memory; float16 has numbers that bfloat16 has not."""
    x, h = jax.ShapeDtypeStruct((2, 3, 9000), dtype), jax.ShapeDtypeStruct((3, 9000), dtype)
    with target("gpu", "NVIDIA H200"):
        found = explain(lambda x, h: fft_convolve(x, h, precision="bfloat16"), x, h).selections[0]
    assert [found.call.need(name).dtype.name for name in ("x", "h")] == [taken, taken]


def test_bad_calls_say_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"1 to T taps.*fft_convolve"):
        CAUSAL_FILTER(jnp.ones((2, 3, 8)), jnp.ones((3, 9)))
    with pytest.raises(ValueError, match="taps=9"):
        CAUSAL_TAPS(jnp.ones((2, 3, 8)), jnp.ones((2, 3, 8)), taps=9)
    with pytest.raises(ValueError, match="float32 or bfloat16 x"):
        CAUSAL_FILTER(jnp.ones((2, 3, 8), "float16"), jnp.ones((3, 8)))


@pytest.mark.quick
def test_lowers_for_hopper() -> None:
    """Layouts and copies, which nothing emulates."""

    def call(x: jax.Array, h: jax.Array) -> jax.Array:
        return CAUSAL_FILTER(x, h, implementation="hopper")

    given = (jax.ShapeDtypeStruct((2, 3, 16384), jnp.float32), jax.ShapeDtypeStruct((3, 16384), jnp.float32))
    with target("gpu", "NVIDIA H200"):
        text = jax.jit(call).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 2  # the spectra, and the filter


def _gathered(address: int, descriptor: int, turned: bool) -> np.ndarray:
    """What an instruction reads by a descriptor [64, 16], as numbers of a block whose bytes begin at `address`.

    PTX's canonical layouts with a swizzle of 128 bytes: summed over along a row or, `turned`, from row to row."""
    begin, down = (descriptor & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
    assert descriptor >> 62 == 1, "a swizzle of 128 bytes"
    outer, inner = np.indices((ROWS, 16))
    row, column = (inner, outer) if turned else (outer, inner)
    logical = begin + row // 8 * down + row % 8 * 128 + column * 2
    # The hardware's swizzle is of the address, and keep_block's of the row and its 16 bytes: its own inverse.
    return (logical - address) // 2


@pytest.mark.quick
def test_instructions_read_the_blocks_they_are_given() -> None:
    """The assembly that no emulation runs: where each of its instructions reads, which numbers of a block that is."""
    given = (jax.ShapeDtypeStruct((2, 3, 16384), jnp.float32), jax.ShapeDtypeStruct((3, 16384), jnp.float32))
    with target("gpu", "NVIDIA H200"):
        lowered = jax.jit(lambda x, h: CAUSAL_FILTER(x, h, implementation="hopper")).trace(*given)
        text = lowered.lower(lowering_platforms=("cuda",)).as_text().replace("\\0A", "\n")
    assert {int(n) for n in re.findall(r"wgmma.wait_group.sync.aligned (\d+);", text)} == {0, PRODUCTS, 2 * PRODUCTS}
    address, kinds = 3 * 8192, set()
    for piece in re.findall(r"\{ \.reg \.pred add;.*?commit_group\.sync\.aligned; \}", text, re.DOTALL):
        words: dict[str, int] = {}
        for line in piece.split(";"):
            line = line.strip()
            if found := re.fullmatch(r"or\.b32 place, place, (\d+)", line):
                low = (address >> 4 & 0x3FFF) | int(found[1])
            elif found := re.fullmatch(r"mov\.b64 (\w+), \{place, (\d+)\}", line):
                words[found[1]] = low | int(found[2]) << 32
            elif found := re.fullmatch(r"add\.s64 (\w+), (\w+), (\d+)", line):
                words[found[1]] = words[found[2]] + int(found[3])
        assert "setp.ne.b32 add, 1, 0;" in piece, "the product is added"
        products = re.findall(r"mma_async\S+ \{[^}]*\}, (\{[^}]*\}|\w+), (\w+), add, ([\d, ]+);", piece)
        assert len(products) == ROWS // 16
        parts: dict[str, list[np.ndarray]] = {"left": [], "right": []}
        for left, right, flags in products:
            positive, also, *turned = map(int, flags.split(","))
            assert (positive, also) == (1, 1)
            parts["right"].append(_gathered(address, words[right], bool(turned[-1])))
            if left in words:
                parts["left"].append(_gathered(address, words[left], bool(turned[0])))
            kind = turned[0] if left in words else None, turned[-1], "wgmma.fence" in piece
        for name, turn in (("left", kind[0]), ("right", kind[1])):
            if parts[name]:
                block = np.arange(ROWS * ROWS).reshape(ROWS, ROWS)
                np.testing.assert_array_equal(np.concatenate(parts[name], 1), block.T if turn else block)
        kinds.add(kind)
    # A X, U A^T, V conj(A) and A^H W; registers are there first where a sum or a left operand is new.
    assert kinds == {(0, 1, True), (0, 1, False), (None, 0, True), (None, 1, True), (1, 1, True), (1, 1, False)}


def test_passes_of_one_shape_are_lowered_once() -> None:
    """The gradient has six kernels: of the filters' spectra and of filtering by them two each, of the taps its own."""
    x, h = jax.ShapeDtypeStruct((2, 3, 16384), jnp.float32), jax.ShapeDtypeStruct((3, 16384), jnp.float32)

    def both(x: jax.Array, h: jax.Array, flow: jax.Array) -> Any:
        config = ProgramsConfig()
        forward_pass, back = (forward.causal_filter_hopper(a, h, config=config, conjugate=a is flow) for a in (x, flow))
        return forward_pass, back, forward.causal_taps_hopper(flow, x, config=config, taps=16384)

    with target("gpu", "NVIDIA H200"):
        text = jax.jit(both).trace(x, h, x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 4
