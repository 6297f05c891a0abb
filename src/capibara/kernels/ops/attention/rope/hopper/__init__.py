"""rope on Hopper."""

from capibara.kernels.ops.attention.rope.hopper.forward import IMPLEMENTATION

__all__ = ["IMPLEMENTATION"]
