"""The Hopper search, emulated: its arithmetic, its bound on the error, and the synchronisation of its ring."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.kernels.pallas import hopper_emulator as emulator

from capibara.kernels.core.context import Target
from capibara.kernels.core.spec import Call
from capibara.kernels.ops.vq.nearest.api import NEAREST_CODE
from capibara.kernels.ops.vq.nearest.hopper import common, few, forward, prepare, resolve, search, search_resident
from capibara.kernels.ops.vq.nearest.hopper.common import SearchConfig

pytestmark = [
    pytest.mark.quick,
    pytest.mark.filterwarnings("ignore:invalid value encountered in cast"),  # the emulator marks integers as NaN
]

KERNELS = (common, few, prepare, resolve, search, search_resident)

PROGRAMS = 2


def _nd_loop(shape: tuple[int, ...], *, collective_axes: str) -> Any:
    (count,) = shape

    def run(body: Any) -> None:
        mine = range(emulator._here.program.place[collective_axes], count, PROGRAMS)
        for turn, index in enumerate(mine):
            body(type("Loop", (), {"index": (np.int32(index),), "local_index": np.int32(turn)}))

    return run


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    with emulator.emulated(*KERNELS):
        kernel = search.plgpu.kernel

        def whole(body: Any, **kwargs: Any) -> Any:
            made = kernel(body, **{"num_threads": 1, **kwargs})
            return lambda *arrays: made(*arrays)

        search.plgpu.__dict__.update(nd_loop=_nd_loop, kernel=whole, async_prefetch=lambda ref: None)
        search.lax.__dict__.update(
            bitcast_convert_type=lambda x, dtype: np.asarray(x).view(dtype),
            rsqrt=lambda x: (1 / np.sqrt(x)).astype(np.float32),
        )
        yield


def _found(x: Any, codebook: Any, config: SearchConfig) -> tuple[np.ndarray, np.ndarray]:
    """(indices after the search and the comparison, how many codes of each row were compared), by emulation."""

    def call(x: Any, codebook: Any) -> tuple[Any, Any]:
        prepared = prepare.prepare(codebook, config.tile)
        run_search = search_resident.search_resident if config.resident else search.search
        found = run_search(x, *prepared, config, PROGRAMS)
        indices = resolve.resolve(x, codebook, found, prepared.half, config.kept, streams=config.resident)
        if found.shape[0] == config.kept + 1:
            return indices, found[config.kept, : x.shape[0]]
        word, byte = divmod(config.kept, 4)
        return indices, found[word, : x.shape[0]] >> (8 * byte) & 0xFF

    with emulated():
        indices, counts = jax.jit(call)(jnp.asarray(x), jnp.asarray(codebook))
        return np.asarray(indices), np.asarray(counts)


def _distances(x: Any, codebook: Any) -> np.ndarray:
    x, codebook = (np.asarray(v).astype(np.float64) for v in (x, codebook))
    return ((x[:, None] - codebook[None]) ** 2).sum(-1)


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


RESIDENT = SearchConfig(256, 4, 6, resident=True)
CONFIGS = [SearchConfig(64, 2), SearchConfig(128, 3, 6), SearchConfig(256, 2, 3), RESIDENT]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_row_has_the_true_nearest(config: SearchConfig, dtype: str) -> None:
    """More rows than programs take at once, a last tile that is not full, several tiles of codes."""
    x, codebook = (jnp.asarray(v).astype(dtype) for v in (_normal(0, 296, 128), _normal(1, 300, 128)))
    indices, counts = _found(x, codebook, config)
    assert (counts < config.kept).mean() > 0.95
    np.testing.assert_array_equal(indices, _distances(x, codebook).argmin(1))
    if dtype == "float32":
        assert (counts > 1).any(), "no row had two codes that float16 cannot tell apart: a weak test"


@pytest.mark.parametrize("config", [SearchConfig(64, 2), RESIDENT], ids=str)
def test_near_ties_are_told_apart(config: SearchConfig) -> None:
    """Pairs of codes closer to each other than float16 shows; duplicates, whose lowest index is right."""
    base = _normal(2, 40, 128)
    codebook = np.concatenate([base, base * np.float32(1 + 2**-13), base[:20], _normal(3, 29, 128)])
    x = (base[np.arange(200) % 40] + 0.3 * _normal(4, 200, 128)).astype(np.float32)
    indices, counts = _found(x, codebook, config)
    np.testing.assert_array_equal(indices, _distances(x, codebook).argmin(1))
    assert (counts > 1).all()


def test_what_hides_in_a_stream() -> None:
    """Three equal codes of one stream: the search keeps two of them, and the lowest is the third."""
    codebook = _normal(20, 256, 128)
    codebook[[5, 5 + 16, 5 + 7 * 16]] = codebook[5]
    x = (codebook[5] + 0.1 * _normal(21, 128, 128)).astype(np.float32)
    indices, counts = _found(x, codebook, RESIDENT)
    assert (counts == 2).all(), "the search was to find two of the three"
    assert (indices == 5).all()


@pytest.mark.parametrize("scale", [1e-25, 1e-12, 1e12])
def test_the_scale_of_the_data_is_no_matter(scale: float) -> None:
    """Also where squares of what is compared are below all numbers of float32."""
    x, codebook = _normal(5, 136, 128), _normal(6, 60, 128)
    codebook[30:45] = codebook[:15] * np.float32(1 + 2**-13)
    x[:15] = codebook[:15]
    x, codebook = x * np.float32(scale), codebook * np.float32(scale)
    indices, counts = _found(x, codebook, SearchConfig(64, 2))
    assert (counts < 4).mean() > 0.5
    assert (counts > 1).mean() > 0.1
    np.testing.assert_array_equal(indices, _distances(x, codebook).argmin(1))


@pytest.mark.parametrize("config", [SearchConfig(64, 2), RESIDENT], ids=str)
def test_small_numbers_of_bfloat16(config: SearchConfig) -> None:
    """Their products would vanish in float32; scaled, they are as exact as any."""
    x, codebook = (jnp.asarray(1e-25 * v, jnp.bfloat16) for v in (_normal(5, 136, 128), _normal(6, 140, 128)))
    indices, counts = _found(x, codebook, config)
    assert (counts < config.kept).mean() > 0.95
    np.testing.assert_array_equal(indices, _distances(x, codebook).argmin(1))


@pytest.mark.parametrize(
    ("config", "copies"),
    [(SearchConfig(64, 2), 7), (RESIDENT, 7), (RESIDENT, 11)],
    ids=["bytes", "words", "slices"],
)
def test_where_the_list_is_not_complete_all_codes_are_compared(config: SearchConfig, copies: int) -> None:
    """Duplicates beyond it, what float16 cannot hold, rows and codes of no number."""
    x, codebook = _normal(7, 136, 128), np.tile(_normal(8, 12, 128), (copies, 1))
    x[3, 5], x[70], x[100, 0], x[135] = np.nan, np.inf, 1e6, 1e-9
    codebook[0], codebook[1, 0] = np.nan, np.inf
    indices, counts = _found(x, codebook, config)
    assert (counts == config.kept).sum() > 100
    codebook[:2] = 1e30  # nobody's nearest
    right = _distances(x, codebook).argmin(1)
    right[[3, 70]] = -1
    np.testing.assert_array_equal(indices, right)


@pytest.mark.parametrize(("codes", "none"), [(6, 2), (270, 130)])
def test_where_every_distance_overflows_the_first_that_can_be_used_is_taken(codes: int, none: int) -> None:
    """Also where the first slice has none."""
    far = np.full((16, 128), 1e18, np.float32)  # its squares are float32 numbers, those of twice as much are not
    codebook = -np.tile(far[:1], (codes, 1))
    codebook[:none] = np.nan
    indices, _ = _found(far, codebook, SearchConfig(64, 2))
    assert (indices == none).all()


def test_a_full_list_is_shared_by_many_programs() -> None:
    """One program a row would be what a whole batch waits for: 8192 codes, 4 at a time, are 2 ms on an H200."""
    for codes in (129, 1024, 8192, 100_000):
        length = resolve.slice_length(codes)
        slices = -(-codes // length)
        assert slices > 1
        assert slices <= resolve.MOST_SLICES
        assert slices <= 0.02 * codes, "a word a slice: more than 2 % of a table of rows by codes"
    assert resolve.slice_length(8192) <= 128


def test_only_full_lists_are_compared_with_all_codes() -> None:
    """Of 296 rows, in three parts of 128, some of each; the last part begins inside the one before it."""
    x, codebook = _normal(30, 296, 128), _normal(31, 300, 128)
    found = np.zeros((5, 296), np.int32)
    full = [0, 127, 130, 255, 256, 295]
    found[4, full] = 4
    half = np.full(300, 1.0, np.float32)
    half[:200] = 1e30
    with emulated():
        by_slices = jax.jit(lambda *arrays: resolve.by_slices(*arrays, kept=4))
        made = np.asarray(by_slices(x, codebook, found, half))
    distances = _distances(x[full], codebook)
    assert (made[0, full] == -1).all()
    np.testing.assert_array_equal(made[1, full], 200 + distances[:, 200:256].argmin(1))
    np.testing.assert_array_equal(made[2, full], 256 + distances[:, 256:].argmin(1))
    others = np.delete(made, full, axis=1)
    assert (others == others.flat[0]).all(), "rows whose list is complete were looked at"


@pytest.mark.parametrize("kept", [2, 3, 6, 8])
def test_lists_of_few_codes_are_bytes(kept: int) -> None:
    """A word an entry would be more than a twentieth of a table of rows by 64 codes."""
    entries = np.random.default_rng(kept).integers(0, 128, (kept + 1, 8)).astype(np.int32)
    words = np.stack(common.packed(list(entries), 64))
    assert len(words) == common.words_of(kept, 64)
    assert len(words) < 64 / 20
    for row in range(8):
        entry = common.entry_of(words, row, kept)
        assert [int(entry(place)) for place in range(kept + 1)] == entries[:, row].tolist()
        assert [int(entry(np.int32(place))) for place in range(kept + 1)] == entries[:, row].tolist()


@pytest.mark.parametrize("codes", [60, 300])
def test_bounds_are_the_largest_of_the_codes_that_can_be_used(codes: int) -> None:
    """By one program, and by several whose last has few codes."""
    codebook = _normal(32, codes, 512)
    codebook[[7, -2]] *= [[3], [5]]
    codebook[3, 3] = np.nan
    with emulated():
        prepared = jax.jit(lambda c: prepare.prepare(c, 64))(codebook)
        narrow, half, centre, bounds = map(np.asarray, prepared)
    codebook[3] = centre
    wide = (codebook - centre) * bounds[0]
    lost = wide - narrow[:codes].astype(np.float32)
    lost[3] = 0
    largest = [np.sqrt((each.astype(np.float64) ** 2).sum(1).max()) for each in (wide, lost)]
    # 512 additions in float32, whose errors are a few units in the last place; what was lost is smaller, and exact.
    np.testing.assert_allclose(bounds[1:3], largest, rtol=1e-5)
    assert bounds[3] == 0
    assert half[3] == half[codes:].min() == 1e30


@pytest.mark.parametrize(
    ("codes", "width", "config"),
    [(64, 768, SearchConfig(64, 5, 6)), (8192, 768, RESIDENT), (8192, 2048, SearchConfig(256, 3, 4))],
)
def test_the_default_is_what_was_fastest_on_a_chip(codes: int, width: int, config: SearchConfig) -> None:
    x, codebook = (jax.ShapeDtypeStruct((n, width), jnp.float32) for n in (65536, codes))
    call = Call(NEAREST_CODE, (x, codebook), NEAREST_CODE.params, Target("gpu", "NVIDIA H200"))
    assert forward.refuses(call) is None
    chosen = forward.candidates(call)[0]
    # How long a ring fits beside rows that stay is arithmetic.
    assert (chosen.tile, chosen.kept, chosen.resident) == (config.tile, config.kept, config.resident)
    assert chosen.resident or chosen.stages == config.stages


def test_what_stays_has_its_tile() -> None:
    with pytest.raises(ValueError, match="tile is 64 where codes stay"):
        SearchConfig(128, 4, resident=True)


def test_one_code() -> None:
    x, codebook = _normal(9, 24, 128), _normal(10, 1, 128)
    indices, counts = _found(x, codebook, SearchConfig(64, 2))
    assert (indices == 0).all()
    assert (counts == 1).all()


def _of_few(x: Any, codebook: Any) -> np.ndarray:
    config = SearchConfig(64, 3, 4, resident=True)
    with emulated():
        nearest = jax.jit(lambda x, c: few.nearest_of_few(x, c, config, PROGRAMS))
        return np.asarray(nearest(jnp.asarray(x), jnp.asarray(codebook)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("codes", [64, 37])
def test_codes_that_stay(codes: int, dtype: str) -> None:
    """Near ties, more rows than the programs take at once, a last tile that overlaps the one before it."""
    x, codebook = _normal(0, 296, 128), _normal(1, codes, 128)
    codebook[20:30] = codebook[:10] * np.float32(1 + 2**-13)
    codebook[30:35] = codebook[5:10]
    x, codebook = (jnp.asarray(v).astype(dtype) for v in (x, codebook))
    np.testing.assert_array_equal(_of_few(x, codebook), _distances(x, codebook).argmin(1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_small_codes_that_stay(dtype: str) -> None:
    x, codebook = (jnp.asarray(1e-25 * v, dtype) for v in (_normal(5, 136, 128), _normal(6, 60, 128)))
    np.testing.assert_array_equal(_of_few(x, codebook), _distances(x, codebook).argmin(1))


def test_codes_that_stay_and_what_float16_cannot_hold() -> None:
    x, codebook = _normal(7, 136, 128), np.tile(_normal(8, 12, 128), (5, 1))
    x[3, 5], x[70], x[100, 0], x[135] = np.nan, np.inf, 1e6, 1e-9
    codebook[0], codebook[1, 0], codebook[2] = np.nan, np.inf, 1e5
    indices = _of_few(x, codebook)
    codebook[:2] = 1e30  # nobody's nearest
    right = _distances(x, codebook).argmin(1)
    right[[3, 70]] = -1
    np.testing.assert_array_equal(indices, right)


@pytest.mark.parametrize(("rows", "width"), [(37, 20), (64, 128), (5, 130)])
def test_any_width_and_number_of_rows(rows: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros beside rows and codes change no distance, and rows that are added are cut again."""
    monkeypatch.setattr(forward, "multiprocessors", lambda kind: PROGRAMS)
    x, codebook = _normal(5, rows, width), _normal(6, 70, width)
    config = SearchConfig(64, 2)
    with emulated():
        made = jax.jit(
            lambda x, c: forward.nearest_code_hopper(x, c, config=config, return_distances=False, return_stats=False)
        )(x, codebook)
        indices = np.asarray(made)
    assert indices.shape == (rows,)
    np.testing.assert_array_equal(indices, _distances(x, codebook).argmin(1))
