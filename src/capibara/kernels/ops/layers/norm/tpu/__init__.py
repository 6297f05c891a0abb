"""Norm on the TPU."""

from capibara.kernels.ops.layers.norm.tpu.backward import GRAD_IMPLEMENTATION
from capibara.kernels.ops.layers.norm.tpu.forward import IMPLEMENTATION

__all__ = ["GRAD_IMPLEMENTATION", "IMPLEMENTATION"]
