"""The two passes of long transforms on Hopper, emulated: their arithmetic and their synchronisation."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels import target
from capibara.kernels.fft import fft, pallas_gpu_long, pallas_gpu_long_body
from capibara.kernels.fft.api import FFT
from capibara.kernels.fft.pallas_gpu_long import (
    PAIRS_LENGTHS,
    RADICES,
    ProgramsConfig,
    mosaic_gpu_long,
    refuses,
    two_passes,
    two_passes_of_pairs,
)
from capibara.kernels.fft.pallas_gpu_pairs import TURNS
from capibara.kernels.fft.rules import tolerance_of

_path = Path(__file__).parent.parent / "attention" / "hopper_emulator.py"
_spec = importlib.util.spec_from_file_location("long_hopper_emulator", _path)
assert _spec is not None
assert _spec.loader is not None
emulator: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(emulator)
emulator.KERNELS = (pallas_gpu_long_body,)


def _emulated(monkeypatch: pytest.MonkeyPatch, kernel: Any) -> Any:
    monkeypatch.setattr(pallas_gpu_long_body, "keep_transposed", lambda ref, value: ref.write(np.asarray(value).T))
    with emulator.emulated():
        re, im = jax.block_until_ready(kernel())
    return np.asarray(re) + 1j * np.asarray(im)


def _split(value: Any) -> tuple[Any, Any]:
    """What the threads keep of pairs: the columns of each eight in the order of TURNS."""
    z = np.ascontiguousarray(value).view(np.complex64).reshape(64, -1, 8)[..., TURNS].reshape(64, -1)
    return z.real.copy(), z.imag.copy()


def _join(re: Any, im: Any) -> Any:
    z = (re + 1j * im).astype(np.complex64).reshape(64, -1, 8)
    made = np.empty_like(z)
    made[..., TURNS] = z
    return made.reshape(64, -1).view(np.float32)


def _view(kernel: Any, operands: Any, out: Any) -> Any:
    """Numbers of complex arrays by turns, on the host."""
    made = kernel(*(jnp.asarray(np.asarray(x).view(np.float32)) if x.dtype == "complex64" else x for x in operands))
    return [np.asarray(x).view(np.complex64) if o.dtype == "complex64" else x for x, o in zip(made, out, strict=True)]


def _error(got: Any, wanted: Any) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


@pytest.mark.newest
@pytest.mark.parametrize(("n", "signals", "inverse"), [(1 << 14, 3, True), (1 << 15, 2, False), (1 << 18, 1, True)])
def test_two_passes(n: int, signals: int, inverse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every small radix, both directions, several signals, tiles that do not divide among the warpgroups."""
    re, im = jnp.asarray(np.random.default_rng(n).standard_normal((2, signals, n)), "float32")
    got = _emulated(monkeypatch, lambda: two_passes(re, im, programs=3, inverse=inverse, scale=0.5))
    transform = np.fft.ifft if inverse else np.fft.fft
    wanted = transform(np.asarray(re, "float64") + 1j * np.asarray(im), norm="forward" if inverse else "backward") * 0.5
    assert _error(got, wanted) < tolerance_of((n,), "bfloat16") / 2  # in norm; the other half is for the worst point


def test_the_scale_is_the_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pallas_gpu_long, "multiprocessors", lambda kind: 2)
    n = 1 << 14
    re, im = jnp.asarray(np.random.default_rng(1).standard_normal((2, 1, 2, n)), "float32")
    how: dict[str, Any] = {"precision": "bfloat16", "axes": 1, "factors": None}

    def kernel() -> Any:
        return mosaic_gpu_long(re, im, config=ProgramsConfig(), inverse=True, norm="ortho", **how)

    wanted = np.fft.ifft(np.asarray(re, "float64") + 1j * np.asarray(im), norm="ortho")
    assert _error(_emulated(monkeypatch, kernel), wanted) < tolerance_of((n,), "bfloat16") / 2


@pytest.mark.newest
@pytest.mark.parametrize(("n", "signals", "inverse"), [(1 << 15, 2, False), (1 << 17, 1, True)])
def test_pairs(n: int, signals: int, inverse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Complex numbers as they lie in memory; no radix in the first pass, and one."""
    for name, stand_in in (("split_pairs", _split), ("join_planes", _join)):
        monkeypatch.setattr(pallas_gpu_long_body, name, stand_in)
    monkeypatch.setattr(pallas_gpu_long, "call_viewed", _view)
    x = np.random.default_rng(n).standard_normal((2, signals, n)).astype("float32")
    z = jnp.asarray(x[0] + 1j * x[1])

    def kernel() -> Any:
        made = two_passes_of_pairs(z, programs=3, inverse=inverse, scale=0.5)
        return made.real, made.imag

    transform = np.fft.ifft if inverse else np.fft.fft
    wanted = transform(x[0].astype("float64") + 1j * x[1], norm="forward" if inverse else "backward") * 0.5
    assert _error(_emulated(monkeypatch, kernel), wanted) < tolerance_of((n,), "bfloat16") / 2


@pytest.mark.newest
@pytest.mark.parametrize(("n", "name"), [(1 << 16, "mosaic_gpu_long"), (1 << 16, "mosaic_gpu_pairs")])
def test_lowers_for_hopper(n: int, name: str) -> None:
    """Layouts and copies, which nothing emulates; with pairs the kernels are called with the complex arrays."""

    def call(z: jax.Array) -> Any:
        return fft(z, precision="bfloat16", implementation=name)

    with target("gpu", "NVIDIA H200"):
        traced = jax.jit(call).trace(jax.ShapeDtypeStruct((4, n), jnp.complex64))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "stablehlo.custom_call @mosaic_gpu" in line]
    assert len(calls) == 2
    assert all(("complex<f32>" in line) == (name == "mosaic_gpu_pairs") for line in calls)


@pytest.mark.parametrize(
    ("n", "params", "words"),
    [
        (1 << 14, {"precision": "float32"}, "bfloat16 numbers"),
        (1 << 13, {}, "16384, 32768"),
        (1 << 14, {"factors": (128, 128)}, "its own radices"),
        (1 << 14, {"axes": 2}, "one axis"),
    ],
)
def test_says_why_not(n: int, params: dict[str, Any], words: str) -> None:
    plane = jnp.zeros((2, n))
    with target("gpu", "NVIDIA H200"):
        assert words in str(refuses(FFT.call(plane, plane, **{"precision": "bfloat16", **params})))


def test_radices_make_the_lengths() -> None:
    assert set(PAIRS_LENGTHS) < set(RADICES)
    assert all(n == 64 * first * 64 * second for n, (first, second) in RADICES.items())
