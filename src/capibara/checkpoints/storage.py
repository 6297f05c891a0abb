"""Folders of checkpoints, on this machine or in an object store, and which errors are the storage's."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from capibara.errors import rule_error

__all__ = ["Alert", "is_local", "remove", "storage_path", "storage_reason"]

# What tensorstore, which writes the arrays, says: a ValueError whose text has the code of the operating system, or a
# status of the store.
_OS_CODE = re.compile(r"os_error_code='(\d+)'")
_STORE_STATUS = re.compile(
    r"^(RESOURCE_EXHAUSTED|UNAVAILABLE|DEADLINE_EXCEEDED|PERMISSION_DENIED|UNAUTHENTICATED|ABORTED|DATA_LOSS): Error "
)


@dataclass(frozen=True)
class Alert:
    """Something that went wrong beside the training, which goes on."""

    kind: str
    step: int
    text: str
    time: float = field(default_factory=time.time)

    def __str__(self) -> str:
        return f"step {self.step}: {self.text}"


def storage_path(folder: str | os.PathLike[str]) -> Any:
    """An `epath.Path`: `scheme://...` exactly as it is, anything else as an absolute path of this machine.

    >>> str(storage_path("gs://bucket/run/checkpoints"))
    'gs://bucket/run/checkpoints'
    """
    from etils import epath

    text = os.fspath(folder)
    if "://" in text:
        return epath.Path(text)
    if re.match(r"^(gs|s3|hdfs|https?|file):/", text):
        raise rule_error(
            "An object store's address keeps both of its slashes",
            f"{text!r}, as pathlib makes it",
            "pass it as a string, or as an etils.epath.Path",
        )
    return epath.Path(os.path.abspath(os.path.expanduser(text)))


def is_local(path: Any) -> bool:
    return "://" not in os.fspath(path)


def remove(path: Any) -> None:
    """A folder and all that is in it; nothing where there is none."""
    if path.exists():
        path.rmtree()


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        inner = waiting.pop(0)
        if id(inner) in seen:
            continue
        seen.add(id(inner))
        yield inner
        if isinstance(inner, BaseExceptionGroup):
            waiting.extend(inner.exceptions)
        waiting.extend(cause for cause in (inner.__cause__, inner.__context__) if cause is not None)


def storage_reason(error: BaseException) -> str | None:
    """Why the storage did not take a save, in a line; None for an error that is not the storage's."""
    for inner in _chain(error):
        if isinstance(inner, OSError):
            return f"{inner.strerror or inner}" + (f" ({inner.filename})" if inner.filename else "")
        code = _OS_CODE.search(str(inner))
        if code:
            return os.strerror(int(code.group(1)))
        if _STORE_STATUS.match(str(inner)):
            return str(inner).splitlines()[0]
    return None
