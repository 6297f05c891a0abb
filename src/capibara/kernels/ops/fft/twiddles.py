"""The constants of a transform: roots of unity, computed on the host in float64 and rounded once.

A root's exponent is reduced as a whole number before its angle is taken, so that an index of millions loses nothing.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

Planes = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


def roots(n: int, exponents: np.ndarray[Any, Any], inverse: bool) -> Planes:
    """exp(-2πi e / n), or its conjugate, as a real and an imaginary plane in float64; a quarter turn is exact."""
    turned = exponents % n
    angle = (2 * np.pi / n) * turned
    quarter, whole = np.divmod(4 * turned, n)
    cosine = np.where(whole == 0, np.array([1.0, 0.0, -1.0, 0.0])[quarter], np.cos(angle))
    sine = np.where(whole == 0, np.array([0.0, 1.0, 0.0, -1.0])[quarter], np.sin(angle))
    return cosine, sine if inverse else -sine


@functools.lru_cache(maxsize=64)
def dft(n: int, inverse: bool) -> Planes:
    """The DFT matrix [k, j]; it is symmetric."""
    index = np.arange(n, dtype=np.int64)
    return roots(n, np.outer(index, index), inverse)


@functools.lru_cache(maxsize=64)
def stacked_dft(n: int, inverse: bool) -> np.ndarray[Any, Any]:
    """The DFT matrix on planes, [plane out, k, plane in, j]: one real product does a complex one."""
    real, imag = dft(n, inverse)
    return np.stack([np.stack([real, -imag], 1), np.stack([imag, real], 1)])


@functools.lru_cache(maxsize=16)
def twiddles(n: int, rows: int, columns: int, inverse: bool, step: int = 1) -> np.ndarray[Any, Any]:
    """exp(-2πi step·row·column / n) as [plane, row, column] in float64."""
    row, column = np.arange(rows, dtype=np.int64), np.arange(columns, dtype=np.int64)
    return np.stack(roots(n, np.outer(row * step % n, column), inverse))


@functools.lru_cache(maxsize=16)
def chirp(n: int, padded: int, inverse: bool) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Bluestein's chirp exp(-πi j²/n) as planes [2, n], and the transform of the filter it makes, [2, padded].

    The filter's transform is divided by `padded`, so that the transform back needs no scale.
    """
    index = np.arange(n, dtype=np.int64)
    real, imag = roots(2 * n, index * index, inverse)
    wave = np.conj(real + 1j * imag)
    long = np.zeros(padded, np.complex128)
    long[:n] = wave
    long[padded - n + 1 :] = wave[1:][::-1]
    spectrum = np.fft.fft(long) / padded
    return np.stack([real, imag]), np.stack([spectrum.real, spectrum.imag])
