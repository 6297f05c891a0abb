"""Activation on the TPU."""

from capibara.kernels.ops.layers.activation.tpu.both_passes import GRAD_IMPLEMENTATION, IMPLEMENTATION

__all__ = ["GRAD_IMPLEMENTATION", "IMPLEMENTATION"]
