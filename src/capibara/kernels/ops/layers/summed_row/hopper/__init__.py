"""summed_row on Hopper."""

from capibara.kernels.ops.layers.summed_row.hopper.forward import IMPLEMENTATION, parts_that_fill

__all__ = ["IMPLEMENTATION", "parts_that_fill"]
