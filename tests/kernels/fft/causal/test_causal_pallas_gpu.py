"""The Hopper kernels of long causal filters, emulated: their arithmetic and their synchronisation."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels import explain, target
from capibara.kernels.fft import fft_convolve
from capibara.kernels.fft.causal import pallas_gpu, pallas_gpu_body
from capibara.kernels.fft.causal.api import CAUSAL_FILTER, CAUSAL_TAPS
from capibara.kernels.fft.causal.pallas_gpu import ProgramsConfig, refuses
from capibara.kernels.fft.causal.reference import reference, reference_taps

_path = Path(__file__).parents[2] / "attention" / "hopper_emulator.py"
_spec = importlib.util.spec_from_file_location("causal_hopper_emulator", _path)
assert _spec is not None
assert _spec.loader is not None
emulator: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(emulator)
emulator.KERNELS = (pallas_gpu_body,)

# Six roundings of the data and four of the constants on the way, each of 2^-9 at most and 0.6 of that at random, for
# x and for h: 0.6 · 2^-9 · sqrt(20) = 0.0052, and a half more.
BOUND = 2**-7


def _normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape), "float32")


def _errors(got: Any, wanted: Any) -> Any:
    """Of each signal by itself."""
    got, wanted = np.asarray(got, "float64"), np.asarray(wanted, "float64")
    return np.linalg.norm(got - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)


@pytest.mark.newest
@pytest.mark.parametrize(("time", "taps", "conjugate"), [(16384, 16384, False), (9001, 300, True)])
def test_filter(time: int, taps: int, conjugate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six signals for four programs, one a million times another; whole matrices and ones with zeros after."""
    monkeypatch.setattr(pallas_gpu, "multiprocessors", lambda kind: 4)
    x, h = _normal(2, 3, time) * jnp.array([1e6, 1.0])[:, None, None], _normal(3, taps)
    with emulator.emulated():
        got = pallas_gpu.mosaic_gpu(x, h, config=ProgramsConfig(), conjugate=conjugate)
        jax.block_until_ready(got)
    assert _errors(got, reference(x, h, conjugate=conjugate)).max() < BOUND


@pytest.mark.newest
def test_taps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient for the filters: a spectrum for each signal, and a sum over the batch."""
    monkeypatch.setattr(pallas_gpu, "multiprocessors", lambda kind: 1)
    flow, x = _normal(2, 2, 5000), _normal(2, 2, 5000, seed=1)
    with emulator.emulated():
        got = jax.block_until_ready(pallas_gpu.mosaic_gpu_taps(flow, x, config=ProgramsConfig(), taps=700))
    assert got.shape == (2, 700)
    assert _errors(got, reference_taps(flow, x, taps=700)).max() < BOUND


def test_a_nan_stays_in_its_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pallas_gpu, "multiprocessors", lambda kind: 1)
    x = _normal(2, 1, 200).at[0, 0, 50].set(jnp.nan)
    with emulator.emulated():
        got = np.asarray(pallas_gpu.mosaic_gpu(x, _normal(1, 9), config=ProgramsConfig(), conjugate=False))
    assert np.isnan(got[0]).any()
    assert np.isfinite(got[1]).all()


def test_says_why_not() -> None:
    def why(x: tuple[int, int, int], kind: str = "NVIDIA H200") -> str | None:
        with target("gpu", kind):
            return refuses(CAUSAL_FILTER.call(jnp.zeros(x), jnp.zeros((x[1], 1))))

    assert why((1, 1, 16384)) is None
    assert "up to 16384" in str(why((1, 1, 16385)))
    assert "empty" in str(why((0, 1, 8)))
    assert "Hopper" in str(why((1, 1, 8), "NVIDIA A100"))


def test_long_signals_take_it() -> None:
    """A short one would cost as much as one of 16384 numbers."""

    def chosen(time: int) -> str:
        x, h = jax.ShapeDtypeStruct((2, 3, time), "float32"), jax.ShapeDtypeStruct((3, time), "float32")
        with target("gpu", "NVIDIA H200"):
            return explain(lambda x, h: fft_convolve(x, h, precision="bfloat16"), x, h).selections[0].implementation

    assert [chosen(time) for time in (4096, 8193, 16384, 16385)] == ["composed", "mosaic_gpu", "mosaic_gpu", "composed"]


def test_bad_calls_say_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"1 to T taps.*fft_convolve"):
        CAUSAL_FILTER(jnp.ones((2, 3, 8)), jnp.ones((3, 9)))
    with pytest.raises(ValueError, match="taps=9"):
        CAUSAL_TAPS(jnp.ones((2, 3, 8)), jnp.ones((2, 3, 8)), taps=9)
    with pytest.raises(ValueError, match="float32 x"):
        CAUSAL_FILTER(jnp.ones((2, 3, 8), "bfloat16"), jnp.ones((3, 8)))


@pytest.mark.newest
def test_lowers_for_hopper() -> None:
    """Layouts and copies, which nothing emulates."""

    def call(x: jax.Array, h: jax.Array) -> jax.Array:
        return CAUSAL_FILTER(x, h, implementation="mosaic_gpu")

    given = (jax.ShapeDtypeStruct((2, 3, 16384), jnp.float32), jax.ShapeDtypeStruct((3, 16384), jnp.float32))
    with target("gpu", "NVIDIA H200"):
        text = jax.jit(call).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 2  # the spectra, and the filter
