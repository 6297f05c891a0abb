"""What a step is called: the program's own scopes, and the line that made it."""

from __future__ import annotations

import os
import re
from typing import Any

__all__ = ["RENAMES_NOTHING", "joined", "label", "line_of", "shown"]

_LIBRARY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# Who calls a kernel, a constraint or a block's product is asked for, not the line behind it that makes the operation.
_BEHIND = tuple(
    os.path.join(_LIBRARY, *path)
    for path in (("kernels", ""), ("program", ""), ("mesh", "rules.py"), ("models", "blocks", "spec.py"))
)


def line_of(traceback: Any) -> str:
    """file:line of the innermost frame that is not jax's: the caller's, or this library's where it is all its own.

    Nothing where all of the frames are a kernel's or a constraint's own: what jax keeps between calls has no caller.
    """
    from jax._src import source_info_util

    try:
        frames = list(source_info_util.user_frames(traceback))
    except (AttributeError, TypeError):  # an internal of jax, and only a label
        return ""
    frames = [frame for frame in frames if not frame.file_name.startswith(_BEHIND)]
    for frame in frames:
        if not frame.file_name.startswith(_LIBRARY + os.sep):
            return f"{os.path.basename(frame.file_name)}:{frame.start_line}"
    return f"{os.path.basename(frames[0].file_name)}:{frames[0].start_line}" if frames else ""


# Scopes that jax's transformations add, and what they wrap around those of the program.
_PLUMBING = frozenset({"", "rematted_computation", "checkpoint"})
_WRAPPED = re.compile(r"(?:jvp|vmap|transpose|linearize|pjit|jit)\((.*)\)")


def label(scope: str, line: str) -> str:
    """The program's own scopes and the line; "(backward)" where differentiation made the operation."""
    shown = "/".join(part for part in map(_unwrapped, scope.split("/")) if part not in _PLUMBING)
    return " ".join(part for part in (shown, line, "(backward)" if "transpose(" in scope else "") if part)


def _unwrapped(part: str) -> str:
    while match := _WRAPPED.fullmatch(part):
        part = match[1]
    return part


# What these give back is what they were given: constraints, and what a recomputation policy wraps around what it keeps.
RENAMES_NOTHING = frozenset({"logical_axes", "sharding_constraint", "name", "reduce_precision", "pvary"})


def shown(primitive: str) -> str:
    """What an operation is called in a report: a constraint that is kept in the trace is no operation of its own."""
    return "constraint" if primitive in ("logical_axes", "sharding_constraint") else primitive


def joined(scope: str, inner: str) -> str:
    return f"{scope}/{inner}" if scope and inner else scope or inner
