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

from capibara.kernels import nearest_code, target, trust
from capibara.kernels.core.context import Target
from capibara.kernels.core.spec import Call
from capibara.kernels.ops.vq.nearest.api import NEAREST_CODE
from capibara.kernels.ops.vq.nearest.hopper import (
    common,
    direct,
    forward,
    prepare,
    resolve,
    resolve_parts,
    search,
    search_parts,
    search_resident,
)
from capibara.kernels.ops.vq.nearest.hopper.common import PartLists, SearchConfig

pytestmark = [
    pytest.mark.quick,
    pytest.mark.filterwarnings("ignore:invalid value encountered in cast"),  # the emulator marks integers as NaN
]

KERNELS = (common, direct, prepare, resolve, resolve_parts, search, search_parts, search_resident)

PROGRAMS = 2


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    with emulator.emulated(*KERNELS):
        kernel = search.plgpu.kernel

        def whole(body: Any, **kwargs: Any) -> Any:
            made = kernel(body, **{"num_threads": 1, **kwargs})
            return lambda *arrays: made(*arrays)

        search.plgpu.__dict__.update(kernel=whole, async_prefetch=lambda ref: None)
        search.lax.__dict__.update(
            bitcast_convert_type=lambda x, dtype: np.asarray(x).view(dtype),
            rsqrt=lambda x: (1 / np.sqrt(x)).astype(np.float32),
        )
        yield


def _found(x: Any, codebook: Any, config: SearchConfig) -> tuple[np.ndarray, np.ndarray]:
    """(indices after the search and the comparison, how many codes of each row were compared), by emulation."""

    def call(x: Any, codebook: Any) -> tuple[Any, Any]:
        if config.parts > 1:
            return _found_by_parts(x, codebook, config)
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


def _found_by_parts(x: Any, codebook: Any, config: SearchConfig) -> tuple[Any, Any]:
    """Indices, and how many codes of the lists that matter are compared: `kept` where one of these is full."""
    length = config.tile * search_parts.tiles_of_a_part(codebook.shape[0], config.tile, config.parts)
    if config.resident:
        prepared = prepare.prepare(codebook, length * config.parts)
        lists = search_resident.search_resident(x, *prepared, config, PROGRAMS)
    else:
        lists = search_parts.search_parts(x, codebook, config)
    low, high = (lists[:, at * config.parts :][:, : config.parts].view(jnp.float32) for at in range(2))
    matter = ~(high < low.max(1, keepdims=True))
    counts = lists[:, 2 * config.parts :][:, : config.parts * (config.kept + 1)][:, config.kept :: config.kept + 1]
    counts = jnp.where(matter, counts, 0)
    compared = jnp.where((counts >= config.kept).any(1), config.kept, jnp.minimum(counts.sum(1), config.kept - 1))
    return resolve_parts.resolve_parts(x, codebook, lists, length, config), compared


def _distances(x: Any, codebook: Any) -> np.ndarray:
    x, codebook = (np.asarray(v).astype(np.float64) for v in (x, codebook))
    return ((x[:, None] - codebook[None]) ** 2).sum(-1)


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


RESIDENT = SearchConfig(256, 4, 6, resident=True)
PARTS = SearchConfig(128, 2, parts=3)
RESIDENT_PARTS = SearchConfig(256, 4, 6, resident=True, parts=2)
FORMS = [SearchConfig(64, 2), RESIDENT, PARTS, RESIDENT_PARTS]
CONFIGS = [
    *FORMS,
    SearchConfig(128, 3, 6),
    SearchConfig(256, 2, 3),
    SearchConfig(128, 2, 6, parts=2),  # of two tiles each
    SearchConfig(128, 2, parts=4),  # the last has no codes
]


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


@pytest.mark.parametrize(("codes", "parts"), [(1024, 2), (1030, 2), (1100, 4)], ids=["even", "odd", "one"])
def test_parts_of_several_tiles_beside_rows_that_stay(codes: int, parts: int) -> None:
    """A span is two tiles of a part, or one where a part's are odd; the last part has codes that are none."""
    config = SearchConfig(256, 5, 6, resident=True, parts=parts)
    x, codebook = _normal(40, 130, 128), _normal(41, codes, 128)
    codebook[codes - 60 :] = codebook[:60] * np.float32(1 + 2**-13)
    x[:60] = codebook[:60] + 0.3 * x[:60]
    indices, counts = _found(x, codebook, config)
    assert (counts[:60] > 1).all()
    assert (counts < config.kept).mean() > 0.9
    np.testing.assert_array_equal(indices, _distances(x, codebook).argmin(1))


@pytest.mark.parametrize("config", [PARTS, RESIDENT_PARTS], ids=str)
def test_a_part_of_one_code(config: SearchConfig) -> None:
    """It is nearly that of another part. What else its list has is no code, or another part's, and is not compared."""
    x, codebook = _normal(47, 128, 128), _normal(48, 257, 128)
    codebook[256] = codebook[0] * np.float32(1 + 2**-13)
    x = (codebook[np.where(np.arange(128) < 64, 0, 200)] + 0.3 * x).astype(np.float32)
    indices, counts = _found(x, codebook, config)
    assert (counts[:64] == 2).all()
    assert (counts[64:] == 1).all()
    assert set(indices) == {0, 200, 256}
    np.testing.assert_array_equal(indices, _distances(x, codebook).argmin(1))


@pytest.mark.parametrize("config", FORMS, ids=str)
def test_near_ties_are_told_apart(config: SearchConfig) -> None:
    """Pairs of codes closer to each other than float16 shows; duplicates, whose lowest index is right. Of both, one
    code is among the first and one among the last, which is another part."""
    base = _normal(2, 40, 128)
    codebook = np.concatenate([base, _normal(3, 231, 128), base * np.float32(1 + 2**-13), base[:20]])
    x = (base[np.arange(200) % 40] + 0.3 * _normal(4, 200, 128)).astype(np.float32)
    indices, counts = _found(x, codebook, config)
    np.testing.assert_array_equal(indices, _distances(x, codebook).argmin(1))
    assert (counts > 1).all()


@pytest.mark.parametrize(("config", "span"), [(RESIDENT, 0), (RESIDENT_PARTS, 0), (RESIDENT_PARTS, 256)], ids=str)
def test_what_hides_in_a_stream(config: SearchConfig, span: int) -> None:
    """Three equal codes of one stream: the search keeps two of them, and the lowest is the third."""
    codebook = _normal(20, 256 * config.parts, 128)
    lowest = span + 5
    codebook[[lowest, lowest + 16, lowest + 7 * 16]] = codebook[lowest]
    x = (codebook[lowest] + 0.1 * _normal(21, 128, 128)).astype(np.float32)
    indices, counts = _found(x, codebook, config)
    assert (counts == 2).all(), "the search was to find two of the three"
    assert (indices == lowest).all()


@pytest.mark.parametrize("config", [SearchConfig(64, 2), PARTS, RESIDENT_PARTS], ids=str)
@pytest.mark.parametrize("scale", [1e-25, 1e-12, 1e12])
def test_the_scale_of_the_data_is_no_matter(scale: float, config: SearchConfig) -> None:
    """Also where squares of what is compared are below all numbers of float32."""
    x, codebook = _normal(5, 136, 128), _normal(6, 140, 128)
    codebook[30:45] = codebook[:15] * np.float32(1 + 2**-13)
    x[:15] = codebook[:15]
    x, codebook = x * np.float32(scale), codebook * np.float32(scale)
    indices, counts = _found(x, codebook, config)
    assert (counts < config.kept).mean() > 0.5
    assert (counts > 1).mean() > 0.1
    np.testing.assert_array_equal(indices, _distances(x, codebook).argmin(1))


@pytest.mark.parametrize("config", FORMS, ids=str)
def test_small_numbers_of_bfloat16(config: SearchConfig) -> None:
    """Their products would vanish in float32; scaled, they are as exact as any."""
    x, codebook = (jnp.asarray(1e-25 * v, jnp.bfloat16) for v in (_normal(5, 136, 128), _normal(6, 140, 128)))
    indices, counts = _found(x, codebook, config)
    assert (counts < config.kept).mean() > 0.95
    np.testing.assert_array_equal(indices, _distances(x, codebook).argmin(1))


@pytest.mark.parametrize("config", FORMS, ids=str)
@pytest.mark.parametrize("scale", [1, 1e15])
def test_long_codes_of_bfloat16(scale: float, config: SearchConfig) -> None:
    """Of codes whose norms have no place in a score every distance is computed."""
    x, codebook = (jnp.asarray(by * _normal(n, 128, 128), jnp.bfloat16) for by, n in ((scale, 5), (1e15, 6)))
    indices, counts = _found(x, codebook, config)
    assert (counts == config.kept).all()
    np.testing.assert_array_equal(indices, _distances(x, codebook).argmin(1))


@pytest.mark.parametrize("config", FORMS, ids=str)
def test_rows_so_long_that_no_code_would_be_better(config: SearchConfig) -> None:
    """Their scores are below that of no code, which codes that cannot be used have, and with which lists begin."""
    x, codebook = np.zeros((128, 128)), 1e13 * np.abs(_normal(6, config.tile * config.parts, 128))
    x[:8] = -3e17 * np.abs(_normal(5, 8, 128))
    codebook[7, 3] = np.nan
    x, codebook = (jnp.asarray(v, jnp.bfloat16) for v in (x, codebook))
    indices, counts = _found(x, codebook, config)
    assert (counts[:8] == config.kept).all()
    distances = np.nan_to_num(_distances(x, codebook), nan=np.inf)
    # Rows so far away are as far from every code as float32 shows: differences and their squares are rounded, and 128
    # of them added, each by 2⁻²⁴ or less.
    found, least = distances[np.arange(128), indices], distances.min(1)
    assert (found[:8] <= least[:8] * (1 + 2 * 131 * 2.0**-24)).all()
    np.testing.assert_array_equal(indices[8:], distances[8:].argmin(1))


@pytest.mark.parametrize("column_bits", [common.COLUMN_BITS, search_resident.COLUMN_BITS])
def test_scores_of_zero_are_not_told_apart(column_bits: int) -> None:
    """Where all codes are one, their scores are zeros with columns in the low bits: the largest must not be ahead."""
    zero = jnp.float32(0)
    bound = common.error_bound(zero, zero, zero, jnp.asarray([1, 0, 0, 0], jnp.float32), 128, column_bits)
    largest = np.int32(column_bits).view(np.float32)
    assert float(largest) > 0
    assert float(bound) > 2 * float(largest)


@pytest.mark.parametrize(
    ("config", "copies"),
    [(SearchConfig(64, 2), 7), (RESIDENT, 7), (RESIDENT, 11), (PARTS, 25), (RESIDENT_PARTS, 25)],
    ids=["bytes", "words", "slices", "parts", "resident parts"],
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


@pytest.mark.parametrize(
    ("config", "codes", "none"),
    [(SearchConfig(64, 2), 6, 2), (SearchConfig(64, 2), 270, 130), (PARTS, 270, 130), (RESIDENT_PARTS, 600, 530)],
    ids=str,
)
def test_where_every_distance_overflows_the_first_that_can_be_used_is_taken(
    config: SearchConfig, codes: int, none: int
) -> None:
    """Also where the first slice has none, or the first part."""
    far = np.full(
        (128 if config.parts > 1 else 16, 128), 1e18, np.float32
    )  # its squares are float32 numbers, those of twice as much are not
    codebook = -np.tile(far[:1], (codes, 1))
    codebook[:none] = np.nan
    indices, _ = _found(far, codebook, config)
    assert (indices == none).all()


@pytest.mark.parametrize("config", [PARTS, RESIDENT_PARTS], ids=str)
def test_rows_that_no_code_can_be_used_for(config: SearchConfig) -> None:
    x, codebook = _normal(42, 128, 128), np.full((300, 128), np.nan, np.float32)
    indices, _ = _found(x, codebook, config)
    assert (indices == -1).all()


def _resolved(lists: np.ndarray, x: np.ndarray, codebook: np.ndarray, length: int, config: SearchConfig) -> np.ndarray:
    with emulated():
        call = jax.jit(lambda *arrays: resolve_parts.resolve_parts(*arrays, length, config))
        return np.asarray(call(x, codebook, lists))


def _lists(rows: int, config: SearchConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lists of rows of which no part matters but for the last, (all, the bounds [rows, 2, parts], [rows, parts, list]).

    They are views. Every count is one.
    """
    layout = PartLists(config.parts, config.kept)
    lists = np.full((rows, layout.words), 77, np.int32)
    bounds = lists[:, : 2 * config.parts].view(np.float32).reshape(rows, 2, config.parts)
    bounds[:] = np.float32([-2, -1])[:, None]
    bounds[:, :, -1] = 1
    of_parts = lists[:, 2 * config.parts : layout.place(config.parts, 0)].reshape(rows, config.parts, config.kept + 1)
    of_parts[..., -1] = 1
    return lists, bounds, of_parts


def test_all_codes_of_the_parts_that_matter_are_compared_and_no_others() -> None:
    """Of 300 codes in three parts, the last of which has 44."""
    x, codebook = _normal(43, 5, 128), _normal(44, 300, 128)
    lists, bounds, of_parts = _lists(5, PARTS)
    of_parts[0, 2, 0] = 299  # certain
    bounds[1, :, 1], of_parts[1, 1, -1] = 1, PARTS.kept  # the list of one of two parts is full
    of_parts[2, 2, -1] = PARTS.kept
    bounds[3, :, 0], bounds[3, :, 2] = 3, 2.5
    of_parts[3, 0, -1] = PARTS.kept
    bounds[4, :, 0], of_parts[4, 0, 0], of_parts[4, 2, 0] = 1, 100, 299  # two parts, each with one code
    distances = _distances(x, codebook)
    right = [299, 128 + distances[1, 128:].argmin(), 256 + distances[2, 256:].argmin(), distances[3, :128].argmin()]
    right.append(100 if distances[4, 100] < distances[4, 299] else 299)
    np.testing.assert_array_equal(_resolved(lists, x, codebook, 128, PARTS), right)
    assert (distances.argmin(1) != right).any(), "as if all codes had been compared: a weak test"


def test_as_many_parts_as_there_may_be() -> None:
    """All matter to one row, and one to another: sums of parts are told apart from places."""
    config = SearchConfig(128, 2, 2, parts=common.MOST_PARTS)
    x, codebook = _normal(45, 3, 128), _normal(46, 300, 128)
    x[0] = np.nan  # would have no code if it were compared with any
    lists, bounds, of_parts = _lists(3, config)
    of_parts[:, :, 0] = np.arange(config.parts) % 300
    bounds[1], of_parts[1, 1, -1] = np.nan, config.kept
    bounds[2, :, 0] = 1
    of_parts[2, -1, 0] = 1
    distances = _distances(x, codebook)
    right = [(config.parts - 1) % 300, distances[1].argmin(), distances[2, :2].argmin()]
    np.testing.assert_array_equal(_resolved(lists, x, codebook, 128, config), right)


def test_what_is_written_of_a_part() -> None:
    """The least and the most that its best score may be, its codes, and how many may be the nearest."""
    layout, rows = PartLists(5, 3), common.BLOCK_M
    values = [np.full(rows, value, np.float32) for value in (4, 3, 1.9)]
    values[0][7] = np.nan
    codes = [np.full(rows, code, np.int32) for code in (30, 20, 10)]
    with emulated(), emulator.as_program():
        lists = emulator.Ref(np.full((rows + 2, layout.words), 77, np.int32))
        layout.write(lists, 2, 3, (values, codes), np.ones(rows, np.float32), np.zeros(rows, np.int32))
    made = lists.array[2:]
    assert (lists.array[:2] == 77).all()
    np.testing.assert_array_equal(made[:, 3].view(np.float32), values[0] - 1)
    np.testing.assert_array_equal(made[:, 5 + 3].view(np.float32), values[0] + 1)
    entries = made[:, [layout.place(3, entry) for entry in range(4)]]
    assert (np.delete(entries, 7, axis=0) == [30, 20, 10, 2]).all()
    assert (entries[7] == [30, 20, 10, 3]).all(), "what cannot be compared counts"
    assert (made != 77).sum() == 6 * rows


@pytest.mark.parametrize(("parts", "kept"), [(2, 2), (8, 4), (43, 6), (64, 8), (1024, 5)])
def test_where_lists_of_parts_lie(parts: int, kept: int) -> None:
    """Each number has a place of its own, and what a program's threads read together is whole."""
    lists = PartLists(parts, kept)
    places = [*range(2 * parts), *(lists.place(part, entry) for part in range(parts) for entry in range(kept + 1))]
    assert sorted(places) == list(range(len(places)))
    assert lists.words == max(len(places), lists.vector)
    assert lists.vector % common.THREADS == 0
    assert 2 * parts <= lists.vector < 2 * parts + common.THREADS


def test_parts_are_as_many_as_programs_and_each_has_codes() -> None:
    for units in (1, 2, 5, 33, 100, 132, 300):
        for codes in (1, 128, 129, 1000, 1024, 16384, 65536, 10**6):
            for tile, programs in ((128, 264), (256, 132)):
                parts, tiles = forward.parts_for(units, codes, tile, programs), -(-codes // tile)
                length = search_parts.tiles_of_a_part(codes, tile, parts)
                assert 1 <= parts <= common.MOST_PARTS
                assert parts == 1 or parts * units <= programs
                assert (parts - 1) * length < tiles <= parts * length
    assert forward.parts_for(33, 1024, 128, 264) == 8
    assert forward.parts_for(5, 16384, 128, 264) == 43


def _candidates(rows: int, width: int, codes: int, dtype: str) -> list[SearchConfig]:
    x, codebook = (jax.ShapeDtypeStruct((n, width), dtype) for n in (rows, codes))
    return list(forward.candidates(Call(NEAREST_CODE, (x, codebook), {}, Target("gpu", "NVIDIA H200"))))


@pytest.mark.parametrize(
    ("shape", "first"),
    [
        ((2100, 128, 1024, "float32"), SearchConfig(128, 2, 4, parts=8)),
        ((2600, 256, 12000, "float32"), SearchConfig(256, 12, 5, resident=True, parts=6)),
        ((700, 512, 4096, "float16"), SearchConfig(256, 12, 5, resident=True, parts=16)),
        ((512, 768, 8192, "bfloat16"), SearchConfig(256, 6, 5, resident=True, parts=32)),
        ((1, 4096, 8192, "float32"), None),  # rows that do not fit beside a ring
        ((65536, 768, 8192, "float32"), None),
        ((2100, 128, 128, "float32"), None),
    ],
    ids=str,
)
def test_few_rows_have_parts_first(shape: Any, first: SearchConfig | None) -> None:
    """The first three as an H200 timed them; and what has no parts."""
    found = _candidates(*shape)
    assert any(config.parts > 1 for config in found) == (first is not None)
    assert found[0] == first or (first is None and found[0].parts == 1)


def test_fewer_rows_than_a_program_has_are_not_timed() -> None:
    """Parts are first where predictions are trusted; elsewhere only by name and by tuning."""
    with trust("predicted"):
        predicted = _candidates(37, 20, 300, "float32")
    with trust("measured"):
        measured = _candidates(37, 20, 300, "float32")
    assert predicted[0] == SearchConfig(128, 2, 4, parts=3)
    assert measured[0].parts == 1
    assert set(measured) == set(predicted)


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
    with pytest.raises(ValueError, match="tile is 256 where rows stay"):
        SearchConfig(128, 4, resident=True)


@pytest.mark.parametrize(
    ("message", "config"),
    [
        ("parts is from 1 to 1024", {"tile": 128, "stages": 2, "parts": 0}),
        ("parts is from 1 to 1024", {"tile": 128, "stages": 2, "parts": 1025}),
        ("else 128", {"tile": 256, "stages": 2, "parts": 2}),
        ("tile is 256 where rows stay", {"tile": 64, "stages": 2, "parts": 2, "resident": True}),
    ],
)
def test_parts_have_their_tile(message: str, config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        SearchConfig(**config)


def test_codes_fewer_than_a_part_are_not_divided() -> None:
    with pytest.raises(ValueError, match="Parts are of 128 codes or more"):
        forward.nearest_by_parts(jnp.zeros((64, 128)), jnp.zeros((127, 128)), PARTS)


@pytest.mark.parametrize("parts", [1, 2])
def test_the_shortest_list_lowers(parts: int) -> None:
    """A list of two that is not full has one code, and no second whose stream there is to look at."""
    config = SearchConfig(256, 4, 2, resident=True, parts=parts)
    given = jax.ShapeDtypeStruct((1024, 128), "float32"), jax.ShapeDtypeStruct((300, 128), "float32")
    with target("gpu", "NVIDIA H200"):
        found = jax.jit(lambda x, c: NEAREST_CODE(x, c, implementation="hopper", config=config)).trace(*given)
        assert "mosaic_gpu" in found.lower(lowering_platforms=("cuda",)).as_text()


def test_one_code() -> None:
    x, codebook = _normal(9, 24, 128), _normal(10, 1, 128)
    indices, counts = _found(x, codebook, SearchConfig(64, 2))
    assert (indices == 0).all()
    assert (counts == 1).all()


@pytest.mark.parametrize("config", [SearchConfig(64, 2), PARTS, RESIDENT_PARTS], ids=str)
@pytest.mark.parametrize(("rows", "width"), [(37, 20), (64, 128), (5, 130), (1, 200)])
def test_any_width_and_number_of_rows(
    rows: int, width: int, config: SearchConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros beside rows and codes change no distance, and rows that are added are cut again."""
    monkeypatch.setattr(forward, "multiprocessors", lambda kind: PROGRAMS)
    x, codebook = _normal(5, rows, width), _normal(6, 170 if config.parts > 1 else 70, width)
    with emulated():
        made = jax.jit(
            lambda x, c: forward.nearest_code_hopper(x, c, config=config, return_distances=False, return_stats=False)
        )(x, codebook)
        indices = np.asarray(made)
    assert indices.shape == (rows,)
    np.testing.assert_array_equal(indices, _distances(x, codebook).argmin(1))


@pytest.mark.parametrize("config", [SearchConfig(64, 2, parts=3, direct=1), SearchConfig(64, 2, direct=4)], ids=str)
@pytest.mark.parametrize("width", [3, 8])
def test_distances_lower_for_cuda(width: int, config: SearchConfig) -> None:
    given = jax.ShapeDtypeStruct((1000, width), "bfloat16"), jax.ShapeDtypeStruct((300, width), "bfloat16")
    with target("gpu", "NVIDIA H200"):
        found = jax.jit(lambda x, c: NEAREST_CODE(x, c, implementation="hopper", config=config)).trace(*given)
        assert "mosaic_gpu" in found.lower(lowering_platforms=("cuda",)).as_text()


def test_rows_a_thread_are_one_two_or_four_of_narrow_codes() -> None:
    with pytest.raises(ValueError, match="direct is 0, 1, 2 or 4 rows a thread"):
        SearchConfig(64, 2, direct=3)
    with pytest.raises(ValueError, match="direct is for codes of up to 8 columns"):
        direct.nearest_directly(jnp.zeros((4, 9)), jnp.zeros((4, 9)), SearchConfig(64, 2, direct=1))


def test_a_near_case_of_another_width_lends_nothing_that_does_not_fit() -> None:
    narrow, wide = (SearchConfig(64, 2, direct=1), SearchConfig(256, 4, 6, resident=True))
    for width, config in ((8, narrow), (16, wide)):
        with target("gpu", "NVIDIA H200"):
            call = NEAREST_CODE.call(*(jax.ShapeDtypeStruct((n, width), jnp.float32) for n in (3000, 1024)))
        assert forward.for_call(config, call) == config
        for lent in (narrow, wide):
            assert bool(forward.for_call(lent, call).direct) == (width == 8)


def _directly(x: Any, codebook: Any, config: SearchConfig) -> np.ndarray:
    with emulated():
        found = jax.jit(lambda *arrays: direct.nearest_directly(*arrays, config))(jnp.asarray(x), jnp.asarray(codebook))
        return np.asarray(found)


@pytest.mark.parametrize(
    "config", [SearchConfig(64, 2, parts=parts, direct=n) for parts, n in ((1, 4), (3, 1), (5, 2))]
)
@pytest.mark.parametrize(("width", "dtype"), [(8, "float32"), (3, "float32"), (1, "float16"), (5, "bfloat16")])
def test_narrow_codes_directly(config: SearchConfig, width: int, dtype: str) -> None:
    """Rows and codes that fill no tile, parts of one tile, of several and of none; of equal codes the first."""
    x, codebook = (jnp.asarray(v).astype(dtype) for v in (_normal(0, 300, width), _normal(1, 150, width)))
    codebook = jnp.concatenate([codebook, codebook[::-1]])
    found, wanted = _directly(x, codebook, config), _distances(x, codebook)
    assert (found < 150).all(), "the lowest index of equal codes"
    chosen, least = wanted[np.arange(300), found], wanted.min(1)
    assert (chosen - least <= 2 * (width + 4) * 2.0**-24 * chosen).all()  # what two sums of differences round


@pytest.mark.parametrize("parts", [1, 2])
def test_narrow_codes_that_are_no_numbers_or_at_the_ends_of_their_range(parts: int) -> None:
    config = SearchConfig(64, 2, parts=parts, direct=1)
    nan, inf = np.nan, np.inf
    codebook = np.array([[nan, 0], [1.3e19, 1.3e19], [inf, 1], [5, 5], [-1.3e19, -1.3e19], [1.9e19, 0]], np.float32)
    codebook = np.concatenate([codebook, np.tile(codebook[3:4] + 1, (100, 1))])
    x = np.array([[1, 1], [nan, 0], [0, -inf], [4, 6], [3e38, 3e38], [1.2e19, 1.2e19], [1.8e19, 0]], np.float32)
    np.testing.assert_array_equal(_directly(x, codebook, config), nearest_code(x, codebook, implementation="reference"))
    assert (_directly(x, np.full_like(codebook, nan), config) == -1).all()
    small = np.float32(1e-25) * _normal(2, 100, 2)
    rows = np.concatenate([small[7:9], [[1e18, 0]]]).astype(np.float32)
    np.testing.assert_array_equal(_directly(rows, small, config), nearest_code(rows, small, implementation="reference"))


@pytest.mark.parametrize(
    ("rows", "codes", "parts", "direct"),
    [(2236, 1024, 16, 1), (60480, 16384, 5, 4), (1, 2, 1, 1), (1 << 20, 64, 1, 4), (2236, 1984, 16, 1)],
)
def test_narrow_codes_are_shared_out(rows: int, codes: int, parts: int, direct: int) -> None:
    with target("gpu", "NVIDIA H200"):
        call = NEAREST_CODE.call(*(jax.ShapeDtypeStruct((n, 8), jnp.float32) for n in (rows, codes)))
    assert forward.candidates(call)[0] == SearchConfig(64, 2, parts=parts, direct=direct)
