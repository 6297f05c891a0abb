"""The documented path of the VQbit layer."""

from capibara.models.vqbit.layer import VQbitLayer

__all__ = ["VQbitLayer"]
