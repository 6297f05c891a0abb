"""Fourier transforms by their documented name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxtyping import Array, Complex, Float, Num

from capibara.kernels.ops import fft


class TpuV4FFTOps:
    """Fourier transforms: complex64 results, of any length.

    `precision`, as in the other objects, is "bfloat16", "float32", "mixed" or "fp8": that of the matrix products a
    transform is made of. There is no narrower complex type, so that results are complex64 in all of them and "mixed"
    is the same as "bfloat16": products of bfloat16 numbers with float32 sums. "fp8" (experimental, which is said once)
    rounds the signal to fp8 values and goes on in bfloat16, on every chip: it emulates fp8 and is not faster.
    """

    def radix_optimized_fft(
        self,
        signal: Num[Array, "*B n"],
        radix_factors: Sequence[int] | None = None,
        use_parallel: bool = True,
        precision: str = "float32",
        **extra: Any,
    ) -> Complex[Array, "*B n"]:
        """The discrete Fourier transform of the last axis.

        Args:
          radix_factors: the radices to prefer, each at most 128. Each is used, in turn, where it divides what is left
            of the length, and few and large ones fill in the rest: `capibara.kernels.explain` says which. None chooses
            few and large ones.
          use_parallel: transform all signals at once; False takes them one after another, in the memory of one.
          extra: inverse, and `capibara.kernels.fft`'s other arguments: n, norm, implementation, config.

        >>> import jax.numpy as jnp
        >>> TpuV4FFTOps().radix_optimized_fft(jnp.arange(4.0), radix_factors=[2, 2]).tolist()
        [(6+0j), (-2+2j), (-2+0j), (-2-2j)]
        """
        return fft.radix_fft(signal, radix_factors, one_by_one=not use_parallel, precision=precision, **extra)

    def inverse_fft(
        self, signal: Num[Array, "*B n"], precision: str = "float32", **extra: Any
    ) -> Complex[Array, "*B n"]:
        """The inverse transform of the last axis. `extra`: see `capibara.kernels.ifft`."""
        return fft.ifft(signal, precision=precision, **extra)

    def real_fft(
        self, signal: Float[Array, "*B n"], precision: str = "float32", **extra: Any
    ) -> Complex[Array, "*B k"]:
        """Half the spectrum of a real signal. `extra`: see `capibara.kernels.rfft`."""
        return fft.rfft(signal, precision=precision, **extra)

    def inverse_real_fft(
        self, spectrum: Num[Array, "*B k"], precision: str = "float32", **extra: Any
    ) -> Float[Array, "*B n"]:
        """The real signal of half a spectrum. `extra`: see `capibara.kernels.irfft`."""
        return fft.irfft(spectrum, precision=precision, **extra)

    def fft2(self, image: Num[Array, "*B m n"], precision: str = "float32", **extra: Any) -> Complex[Array, "*B m n"]:
        """The transform of the last two axes. `extra`: see `capibara.kernels.fft2`."""
        return fft.fft2(image, precision=precision, **extra)

    def inverse_fft2(
        self, image: Num[Array, "*B m n"], precision: str = "float32", **extra: Any
    ) -> Complex[Array, "*B m n"]:
        """The inverse transform of the last two axes. `extra`: see `capibara.kernels.ifft2`."""
        return fft.ifft2(image, precision=precision, **extra)

    def sharded_fft(
        self, signal: Num[Array, "*B n"], axis_name: str, precision: str = "float32", **extra: Any
    ) -> Complex[Array, "*B n"]:
        """The transform of a sharded last axis. `extra`: mesh, inverse, norm: see `kernels.fft.sharded_fft`."""
        return fft.sharded_fft(signal, axis_name=axis_name, precision=precision, **extra)
