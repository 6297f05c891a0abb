"""State space duality on Hopper."""

from capibara.kernels.ops.scan.ssd.hopper.backward import GRAD_IMPLEMENTATION
from capibara.kernels.ops.scan.ssd.hopper.forward import IMPLEMENTATION

__all__ = ["GRAD_IMPLEMENTATION", "IMPLEMENTATION"]
