"""conv2d on Hopper."""

from capibara.kernels.ops.conv.conv2d.hopper.forward import IMPLEMENTATION

__all__ = ["IMPLEMENTATION"]
