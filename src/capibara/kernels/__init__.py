"""Accelerator kernels: ops with a specification, implementations that say why not, and one dispatch loop."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capibara.kernels import attention as attention
    from capibara.kernels.context import Interpret as Interpret
    from capibara.kernels.context import Target as Target
    from capibara.kernels.context import current_interpret as current_interpret
    from capibara.kernels.context import current_target as current_target
    from capibara.kernels.context import interpret as interpret
    from capibara.kernels.context import target as target
    from capibara.kernels.dispatch import explain as explain
    from capibara.kernels.linalg.gemm.api import gemm as gemm
    from capibara.kernels.op import Call as Call
    from capibara.kernels.op import Case as Case
    from capibara.kernels.op import Cost as Cost
    from capibara.kernels.op import Gradient as Gradient
    from capibara.kernels.op import Implementation as Implementation
    from capibara.kernels.op import Op as Op
    from capibara.kernels.op import Partition as Partition
    from capibara.kernels.op import lookup as lookup
    from capibara.kernels.op import register as register
    from capibara.kernels.op import registry as registry
    from capibara.kernels.op import unregister as unregister
    from capibara.kernels.transforms import out_struct as out_struct

_WHERE = {
    "Call": "op",
    "Case": "op",
    "Cost": "op",
    "Gradient": "op",
    "Implementation": "op",
    "Interpret": "context",
    "Op": "op",
    "Partition": "op",
    "Target": "context",
    "current_interpret": "context",
    "current_target": "context",
    "explain": "dispatch",
    "gemm": "linalg",
    "interpret": "context",
    "lookup": "op",
    "out_struct": "transforms",
    "register": "op",
    "registry": "op",
    "target": "context",
    "unregister": "op",
}

# Families that are called by their own name: the folder is the function.
_CALLED = ("attention",)

__all__ = sorted([*_WHERE, *_CALLED])


def __getattr__(name: str) -> Any:
    if name in _CALLED:
        return importlib.import_module(f"capibara.kernels.{name}")
    if name in _WHERE:
        return getattr(importlib.import_module(f"capibara.kernels.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'capibara.kernels' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE, *_CALLED})
