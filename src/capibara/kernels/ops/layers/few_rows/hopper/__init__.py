"""Products of a few rows on Hopper."""

from capibara.kernels.ops.layers.few_rows.hopper.forward import IMPLEMENTATION

__all__ = ["IMPLEMENTATION"]
