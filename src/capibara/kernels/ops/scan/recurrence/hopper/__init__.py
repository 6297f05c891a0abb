"""The linear recurrence on Hopper."""

from capibara.kernels.ops.scan.recurrence.hopper.backward import GRAD_IMPLEMENTATION
from capibara.kernels.ops.scan.recurrence.hopper.forward import IMPLEMENTATION

__all__ = ["GRAD_IMPLEMENTATION", "IMPLEMENTATION"]
