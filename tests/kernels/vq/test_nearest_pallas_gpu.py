"""The Hopper search, emulated: its arithmetic, its bound on the error, and the synchronisation of its ring."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels.vq.nearest import (
    pallas_gpu_few,
    pallas_gpu_prepare,
    pallas_gpu_resident,
    pallas_gpu_resolve,
    pallas_gpu_search,
)
from capibara.kernels.vq.nearest.pallas_gpu_search import SearchConfig

pytestmark = [
    pytest.mark.newest,
    pytest.mark.filterwarnings("ignore:invalid value encountered in cast"),  # the emulator marks integers as NaN
]

_path = Path(__file__).parent.parent / "attention" / "hopper_emulator.py"
_spec = importlib.util.spec_from_file_location("vq_hopper_emulator", _path)
assert _spec is not None
assert _spec.loader is not None
emulator: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(emulator)
emulator.KERNELS = (pallas_gpu_prepare, pallas_gpu_search, pallas_gpu_resident, pallas_gpu_few, pallas_gpu_resolve)

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
    with emulator.emulated():
        kernel = pallas_gpu_search.plgpu.kernel

        def whole(body: Any, **kwargs: Any) -> Any:
            made = kernel(body, **{"num_threads": 1, **kwargs})
            return lambda *arrays: made(*arrays)

        pallas_gpu_search.plgpu.__dict__.update(nd_loop=_nd_loop, kernel=whole, async_prefetch=lambda ref: None)
        pallas_gpu_search.lax.__dict__.update(
            bitcast_convert_type=lambda x, dtype: np.asarray(x).view(dtype),
            rsqrt=lambda x: (1 / np.sqrt(x)).astype(np.float32),
        )
        yield


def _found(x: Any, codebook: Any, config: SearchConfig) -> tuple[np.ndarray, np.ndarray]:
    """(indices after the search and the comparison, how many codes of each row were compared), by emulation."""

    def call(x: Any, codebook: Any) -> tuple[Any, Any]:
        prepared = pallas_gpu_prepare.prepare(codebook, config.tile)
        search = pallas_gpu_resident.search_resident if config.resident else pallas_gpu_search.search
        found = search(x, *prepared, config, PROGRAMS)
        indices = pallas_gpu_resolve.resolve(x, codebook, found, prepared.half, streams=config.resident)
        return indices, found[config.kept, : x.shape[0]]

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


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_the_scale_of_the_data_is_no_matter(scale: float) -> None:
    x, codebook = _normal(5, 136, 128) * np.float32(scale), _normal(6, 60, 128) * np.float32(scale)
    indices, counts = _found(x, codebook, SearchConfig(64, 2))
    assert (counts < 4).mean() > 0.9
    np.testing.assert_array_equal(indices, _distances(x, codebook).argmin(1))


@pytest.mark.parametrize("config", [SearchConfig(64, 2), RESIDENT], ids=str)
def test_where_the_list_is_not_complete_all_codes_are_compared(config: SearchConfig) -> None:
    """Duplicates beyond it, what float16 cannot hold, rows and codes of no number."""
    x, codebook = _normal(7, 136, 128), np.tile(_normal(8, 12, 128), (7, 1))
    x[3, 5], x[70], x[100, 0], x[135] = np.nan, np.inf, 1e6, 1e-9
    codebook[0], codebook[1, 0] = np.nan, np.inf
    indices, counts = _found(x, codebook, config)
    assert (counts == config.kept).sum() > 100
    codebook[:2] = 1e30  # nobody's nearest
    right = _distances(x, codebook).argmin(1)
    right[[3, 70]] = -1
    np.testing.assert_array_equal(indices, right)


def test_where_every_distance_overflows_the_first_that_can_be_used_is_taken() -> None:
    far = np.full((16, 128), 1e18, np.float32)  # its squares are float32 numbers, those of twice as much are not
    codebook = -np.tile(far[:1], (6, 1))
    codebook[:2] = np.nan
    indices, _ = _found(far, codebook, SearchConfig(64, 2))
    assert (indices == 2).all()


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
        few = jax.jit(lambda x, c: pallas_gpu_few.nearest_of_few(x, c, config, PROGRAMS))
        return np.asarray(few(jnp.asarray(x), jnp.asarray(codebook)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("codes", [64, 37])
def test_codes_that_stay(codes: int, dtype: str) -> None:
    """Near ties, more rows than the programs take at once, a last tile that overlaps the one before it."""
    x, codebook = _normal(0, 296, 128), _normal(1, codes, 128)
    codebook[20:30] = codebook[:10] * np.float32(1 + 2**-13)
    codebook[30:35] = codebook[5:10]
    x, codebook = (jnp.asarray(v).astype(dtype) for v in (x, codebook))
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
