"""causal_conv1d on Hopper."""

from capibara.kernels.ops.conv.causal1d.hopper.backward import GRAD_IMPLEMENTATION
from capibara.kernels.ops.conv.causal1d.hopper.forward import IMPLEMENTATION

__all__ = ["GRAD_IMPLEMENTATION", "IMPLEMENTATION"]
