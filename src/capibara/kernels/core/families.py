"""The kernel families, imported when the registry is first asked for."""

from __future__ import annotations

import importlib

FAMILIES = ("linalg", "attention", "layers", "vq", "scan", "conv", "fft", "collective")


def load() -> None:
    """Import every family, which registers its ops."""
    for family in FAMILIES:
        importlib.import_module(f"capibara.kernels.ops.{family}")
