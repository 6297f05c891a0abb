"""The vq family: the nearest code of every row, and what vector quantization makes of it."""

from capibara.kernels.ops.vq.nearest.api import NEAREST_CODE, nearest_code
from capibara.kernels.ops.vq.quantize import look_up, product_vq, quantize, residual_vq, straight_through

__all__ = ["NEAREST_CODE", "look_up", "nearest_code", "product_vq", "quantize", "residual_vq", "straight_through"]
