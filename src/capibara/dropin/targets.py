"""Objects named by text, "package.module:name" or "package.module", and loaded when they are needed."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["load"]


def load(target: str) -> Any:
    """The object; of "package.module", the module."""
    module, _, name = target.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found
