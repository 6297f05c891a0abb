"""The int8 codec on the TPU."""

from capibara.kernels.ops.collective.compressed.tpu.codec import DECODE, ENCODE

__all__ = ["DECODE", "ENCODE"]
