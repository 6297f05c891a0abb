"""The layers family: what stands between the products of a model."""

from capibara.kernels.layers.norm.api import NORM, NORM_GRAD, layer_norm, rms_norm

__all__ = ["NORM", "NORM_GRAD", "layer_norm", "rms_norm"]
