"""The linear recurrence on the TPU."""

from capibara.kernels.ops.scan.recurrence.tpu.backward import GRAD_IMPLEMENTATION
from capibara.kernels.ops.scan.recurrence.tpu.forward import IMPLEMENTATION

__all__ = ["GRAD_IMPLEMENTATION", "IMPLEMENTATION"]
