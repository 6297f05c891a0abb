"""Activation on Hopper."""

from capibara.kernels.ops.layers.activation.hopper.both_passes import GRAD_IMPLEMENTATION, IMPLEMENTATION

__all__ = ["GRAD_IMPLEMENTATION", "IMPLEMENTATION"]
