"""The selective scan on Hopper."""

from capibara.kernels.ops.scan.selective.hopper.backward import GRAD_IMPLEMENTATION
from capibara.kernels.ops.scan.selective.hopper.forward import IMPLEMENTATION

__all__ = ["GRAD_IMPLEMENTATION", "IMPLEMENTATION"]
