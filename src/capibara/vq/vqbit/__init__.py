"""The VQbit layer: a codebook that learns, with what keeps all of it in use."""

from capibara.models.vqbit.layer import VQbitLayer
from capibara.models.vqbit.state import VQbitState

__all__ = ["VQbitLayer", "VQbitState"]
