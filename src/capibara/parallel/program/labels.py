"""What a step is called: the program's own scopes, and the line that made it."""

from __future__ import annotations

import os
from typing import Any

__all__ = ["joined", "label", "line_of"]

_LIBRARY = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

# Who calls a kernel or a constraint is asked for, and not the line behind it that makes the operation.
_BEHIND = tuple(
    os.path.join(_LIBRARY, *path) for path in (("kernels", ""), ("parallel", "program", ""), ("parallel", "rules.py"))
)


def line_of(traceback: Any) -> str:
    """file:line of the innermost frame that is not jax's: the caller's, or this library's where it is all its own."""
    from jax._src import source_info_util

    try:
        frames = list(source_info_util.user_frames(traceback))
    except (AttributeError, TypeError):  # an internal of jax, and only a label
        return ""
    frames = [frame for frame in frames if not frame.file_name.startswith(_BEHIND)] or frames
    for frame in frames:
        if not frame.file_name.startswith(_LIBRARY + os.sep):
            return f"{os.path.basename(frame.file_name)}:{frame.start_line}"
    return f"{os.path.basename(frames[0].file_name)}:{frames[0].start_line}" if frames else ""


# Scopes that jax's transformations add.
_PLUMBING = frozenset({"", "jvp()", "transpose(jvp())", "vmap()", "rematted_computation", "checkpoint"})


def label(scope: str, line: str) -> str:
    shown = "/".join(part for part in scope.split("/") if part not in _PLUMBING)
    return f"{shown} {line}".strip()


def joined(scope: str, inner: str) -> str:
    return f"{scope}/{inner}" if scope and inner else scope or inner
