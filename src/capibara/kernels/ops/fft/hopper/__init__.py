"""The transforms on Hopper: up to 4096 points in one pass, and 2^14 to 2^18 in two, as planes or complex numbers."""

from capibara.kernels.ops.fft.hopper.forward import IMPLEMENTATION
from capibara.kernels.ops.fft.hopper.long import LONG_IMPLEMENTATION, PAIRS_IMPLEMENTATION

__all__ = ["IMPLEMENTATION", "LONG_IMPLEMENTATION", "PAIRS_IMPLEMENTATION"]
