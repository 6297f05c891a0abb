"""Queries and keys turned, keys and values written to their pages: the op `paged_write`."""

from __future__ import annotations

from capibara.kernels.ops.attention.paged_write.api import PAGED_WRITE, paged_write

__all__ = ["PAGED_WRITE", "paged_write"]
