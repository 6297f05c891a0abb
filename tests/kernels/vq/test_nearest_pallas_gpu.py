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

from capibara.kernels.vq.nearest import pallas_gpu, pallas_gpu_resolve, pallas_gpu_search
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
emulator.KERNELS = (pallas_gpu_search, pallas_gpu_resolve)

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

        pallas_gpu_search.plgpu.__dict__.update(nd_loop=_nd_loop, kernel=whole)
        pallas_gpu_search.lax.__dict__.update(
            bitcast_convert_type=lambda x, dtype: np.asarray(x).view(dtype),
            rsqrt=lambda x: (1 / np.sqrt(x)).astype(np.float32),
        )
        yield


def _found(x: Any, codebook: Any, config: SearchConfig, usable: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """(indices after the search and the comparison, which rows are left to search again), by emulation."""

    def call(x: Any, codebook: Any) -> tuple[Any, Any]:
        narrow, half, bounds = pallas_gpu._prepared(codebook, config.tile)
        found = pallas_gpu_search.search(x, narrow, half, bounds, config, PROGRAMS)
        return pallas_gpu_resolve.resolve(x, codebook, found, usable), found[config.kept, : x.shape[0]]

    with emulated():
        indices, counts = jax.jit(call)(jnp.asarray(x), jnp.asarray(codebook))
        return np.asarray(indices), np.asarray(counts)


def _distances(x: Any, codebook: Any) -> np.ndarray:
    x, codebook = (np.asarray(v).astype(np.float64) for v in (x, codebook))
    return ((x[:, None] - codebook[None]) ** 2).sum(-1)


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


CONFIGS = [SearchConfig(64, 2), SearchConfig(128, 3, 6), SearchConfig(256, 2, 3)]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_that_are_settled_have_the_true_nearest(config: SearchConfig, dtype: str) -> None:
    """More rows than programs take at once, a last tile that is not full, several tiles of codes."""
    x, codebook = (jnp.asarray(v).astype(dtype) for v in (_normal(0, 296, 128), _normal(1, 300, 128)))
    indices, counts = _found(x, codebook, config)
    settled = counts < config.kept
    assert settled.mean() > 0.95
    np.testing.assert_array_equal(indices[settled], _distances(x, codebook).argmin(1)[settled])
    if dtype == "float32":
        assert (counts[settled] > 1).any(), "no row had two codes that float16 cannot tell apart: a weak test"


def test_near_ties_are_told_apart_or_left() -> None:
    """Pairs of codes closer to each other than float16 shows; duplicates, whose lowest index is right."""
    base = _normal(2, 40, 128)
    codebook = np.concatenate([base, base * np.float32(1 + 2**-13), base[:20], _normal(3, 29, 128)])
    x = (base[np.arange(200) % 40] + 0.3 * _normal(4, 200, 128)).astype(np.float32)
    indices, counts = _found(x, codebook, SearchConfig(64, 2))
    settled = counts < 4
    assert settled.mean() > 0.9
    np.testing.assert_array_equal(indices[settled], _distances(x, codebook).argmin(1)[settled])
    assert (counts > 1).all()


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_the_scale_of_the_data_is_no_matter(scale: float) -> None:
    x, codebook = _normal(5, 136, 128) * np.float32(scale), _normal(6, 60, 128) * np.float32(scale)
    indices, counts = _found(x, codebook, SearchConfig(64, 2))
    settled = counts < 4
    assert settled.mean() > 0.9
    np.testing.assert_array_equal(indices[settled], _distances(x, codebook).argmin(1)[settled])


def test_what_float16_cannot_hold_is_left_to_be_searched_again() -> None:
    x, codebook = _normal(7, 136, 128), _normal(8, 60, 128)
    x[3, 5], x[70], x[100, 0], x[135] = np.nan, np.inf, 1e6, 1e-9
    codebook[7], codebook[9, 0] = np.nan, np.inf
    indices, counts = _found(x, codebook, SearchConfig(64, 2))
    left = counts == 4
    assert left[[3, 70, 100]].all()
    codebook[[7, 9]] = 1e9  # nobody's nearest
    right = _distances(x, codebook).argmin(1)
    np.testing.assert_array_equal(indices[~left], right[~left])
    made = pallas_gpu.again(jnp.asarray(x), jnp.asarray(codebook), jnp.asarray(indices), jnp.asarray(left))
    right[[3, 70]] = -1
    np.testing.assert_array_equal(np.asarray(made), right)


def test_a_few_codes_are_all_compared() -> None:
    """Where the list is not complete: duplicates beyond it, what float16 cannot hold, rows and codes of no number."""
    x, codebook = _normal(7, 136, 128), np.tile(_normal(8, 12, 128), (6, 1))
    x[3, 5], x[70], x[100, 0], x[135] = np.nan, np.inf, 1e6, 1e-9
    codebook[0], codebook[1, 0] = np.nan, np.inf
    config = SearchConfig(64, 2)
    indices, counts = _found(x, codebook, config, jnp.arange(72) > 1)
    assert (counts == config.kept).sum() > 100
    codebook[:2] = 1e30  # nobody's nearest
    right = _distances(x, codebook).argmin(1)
    right[[3, 70]] = -1
    np.testing.assert_array_equal(indices, right)
    far = np.full((16, 128), 1e18, np.float32)  # its squares are float32 numbers, those of twice as much are not
    indices, _ = _found(far, -np.tile(far[:1], (6, 1)), config, jnp.arange(6) > 1)
    assert (indices == 2).all(), "every distance overflows: the first that can be used"


def test_one_code() -> None:
    x, codebook = _normal(9, 24, 128), _normal(10, 1, 128)
    indices, counts = _found(x, codebook, SearchConfig(64, 2))
    assert (indices == 0).all()
    assert (counts == 1).all()


def test_every_chunk_is_searched_again() -> None:
    x, codebook = jnp.asarray(_normal(11, 90, 16)), jnp.asarray(_normal(12, 12, 16))
    made = pallas_gpu.again(x, codebook, jnp.full(90, -7, jnp.int32), jnp.arange(90) % 3 != 0)
    right = np.where(np.arange(90) % 3 != 0, _distances(x, codebook).argmin(1), -7)
    np.testing.assert_array_equal(np.asarray(made), right)
