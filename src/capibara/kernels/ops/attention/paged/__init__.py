"""Paged, ragged attention for decoding: the op `paged_attention`."""

from __future__ import annotations

from capibara.kernels.ops.attention.paged.api import PAGED_ATTENTION, paged_attention

__all__ = ["PAGED_ATTENTION", "paged_attention"]
