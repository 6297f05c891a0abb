"""The kernel object: `TPUv4Kernels`."""

from capibara.core.kernels.tpu_v4_wrappers import TPUv4Kernels

__all__ = ["TPUv4Kernels"]
