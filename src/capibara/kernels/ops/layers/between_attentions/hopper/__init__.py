"""between_attentions on Hopper."""

from capibara.kernels.ops.layers.between_attentions.hopper.forward import IMPLEMENTATION, new_board, parts_of

__all__ = ["IMPLEMENTATION", "new_board", "parts_of"]
