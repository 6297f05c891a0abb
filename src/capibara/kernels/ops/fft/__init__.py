"""The fft family: Fourier transforms by matrix products, the vendors' transforms, and what is made of them."""

from capibara.kernels.ops.fft.api import FFT, IRFFT, RFFT, fft_planes
from capibara.kernels.ops.fft.convolve import fft_convolve
from capibara.kernels.ops.fft.filter.api import FFT_FILTER
from capibara.kernels.ops.fft.numpy_forms import (
    fft,
    fft2,
    fftn,
    ifft,
    ifft2,
    ifftn,
    irfft,
    irfft2,
    radix_fft,
    rfft,
    rfft2,
)
from capibara.kernels.ops.fft.plan import Plan, plan, smooth_length
from capibara.kernels.ops.fft.sharded import sharded_fft

__all__ = [
    "FFT",
    "FFT_FILTER",
    "IRFFT",
    "RFFT",
    "Plan",
    "fft",
    "fft2",
    "fft_convolve",
    "fft_planes",
    "fftn",
    "ifft",
    "ifft2",
    "ifftn",
    "irfft",
    "irfft2",
    "plan",
    "radix_fft",
    "rfft",
    "rfft2",
    "sharded_fft",
    "smooth_length",
]
