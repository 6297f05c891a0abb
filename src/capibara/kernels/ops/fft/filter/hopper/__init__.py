"""The filter on Hopper."""

from capibara.kernels.ops.fft.filter.hopper.forward import IMPLEMENTATION

__all__ = ["IMPLEMENTATION"]
