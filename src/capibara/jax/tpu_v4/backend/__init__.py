"""The documented operations by family. Each is a function of a room under the name the documents give it."""

from __future__ import annotations

from capibara.jax.tpu_v4.backend.attention import TpuV4AttentionOps, init_multihead_attention
from capibara.jax.tpu_v4.backend.collective import TpuV4CollectiveOps
from capibara.jax.tpu_v4.backend.conv import TpuV4ConvOps
from capibara.jax.tpu_v4.backend.fft import TpuV4FFTOps
from capibara.jax.tpu_v4.backend.layers import TpuV4LayerOps, init_moe
from capibara.jax.tpu_v4.backend.linalg import TpuV4LinalgOps
from capibara.jax.tpu_v4.backend.scan import TpuV4ScanOps
from capibara.jax.tpu_v4.backend.vq import TpuV4VQOps

__all__ = [
    "TpuV4AttentionOps",
    "TpuV4CollectiveOps",
    "TpuV4ConvOps",
    "TpuV4FFTOps",
    "TpuV4LayerOps",
    "TpuV4LinalgOps",
    "TpuV4ScanOps",
    "TpuV4VQOps",
    "init_moe",
    "init_multihead_attention",
]


def __dir__() -> list[str]:
    return sorted(__all__)
