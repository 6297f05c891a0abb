"""The router on Hopper."""

from capibara.kernels.ops.layers.router.hopper.forward import IMPLEMENTATION

__all__ = ["IMPLEMENTATION"]
