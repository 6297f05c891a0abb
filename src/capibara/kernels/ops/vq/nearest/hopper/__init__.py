"""The nearest code on Hopper."""

from capibara.kernels.ops.vq.nearest.hopper.forward import IMPLEMENTATION

__all__ = ["IMPLEMENTATION"]
