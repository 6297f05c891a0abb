"""Vector quantization: `capibara.vq.vqbit` has the layer, `capibara.kernels.vq` the ops it is made of."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capibara.vq import vqbit as vqbit

__all__ = ["vqbit"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
