"""Long causal filters on Hopper, and the gradient for their taps."""

from capibara.kernels.ops.fft.causal.hopper.forward import IMPLEMENTATION, TAPS_IMPLEMENTATION

__all__ = ["IMPLEMENTATION", "TAPS_IMPLEMENTATION"]
