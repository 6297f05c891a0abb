"""paged_write on Hopper."""

from capibara.kernels.ops.attention.paged_write.hopper.forward import IMPLEMENTATION

__all__ = ["IMPLEMENTATION"]
