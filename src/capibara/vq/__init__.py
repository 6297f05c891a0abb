"""Vector quantization: `capibara.vq.vqbit` has the layer, `capibara.kernels` the ops it is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.vq import vqbit as vqbit

__all__, __getattr__, __dir__ = exports(
    __name__,
    {},
    modules=("vqbit",),
)
