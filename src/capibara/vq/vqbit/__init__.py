"""The VQbit layer: a codebook that learns, with what keeps all of it in use."""

from capibara.vq.vqbit.state import VQbitState
from capibara.vq.vqbit.vqbit_layer import VQbitLayer

__all__ = ["VQbitLayer", "VQbitState"]
