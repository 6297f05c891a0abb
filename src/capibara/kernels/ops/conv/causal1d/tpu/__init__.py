"""causal_conv1d on the TPU."""

from capibara.kernels.ops.conv.causal1d.tpu.forward import IMPLEMENTATION

__all__ = ["IMPLEMENTATION"]
