"""The conv family: convolutions of images and of sequences."""

from capibara.kernels.ops.conv.causal1d.api import CAUSAL_CONV1D, CAUSAL_CONV1D_GRAD, causal_conv1d, causal_conv1d_step
from capibara.kernels.ops.conv.conv2d.api import CONV2D, conv2d, winograd_conv2d
from capibara.kernels.ops.conv.conv2d.points import direct_error_bound, winograd_error_bound
from capibara.kernels.ops.conv.long.api import LONG_CONV, long_conv

__all__ = [
    "CAUSAL_CONV1D",
    "CAUSAL_CONV1D_GRAD",
    "CONV2D",
    "LONG_CONV",
    "causal_conv1d",
    "causal_conv1d_step",
    "conv2d",
    "direct_error_bound",
    "long_conv",
    "winograd_conv2d",
    "winograd_error_bound",
]
