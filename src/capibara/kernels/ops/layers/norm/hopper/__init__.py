"""Norm on Hopper."""

from capibara.kernels.ops.layers.norm.hopper.backward import GRAD_IMPLEMENTATION
from capibara.kernels.ops.layers.norm.hopper.forward import IMPLEMENTATION

__all__ = ["GRAD_IMPLEMENTATION", "IMPLEMENTATION"]
