"""round_fp8 for Hopper."""

from capibara.kernels.ops.linalg.round_fp8.hopper.forward import IMPLEMENTATION

__all__ = ["IMPLEMENTATION"]
