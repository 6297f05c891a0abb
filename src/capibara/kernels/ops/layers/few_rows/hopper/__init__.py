"""Products of a few rows on Hopper."""

from capibara.kernels.ops.layers.few_rows.hopper.forward import IMPLEMENTATION, parts_that_fill

__all__ = ["IMPLEMENTATION", "parts_that_fill"]
