"""How much of a device may be used, and the error for what it cannot hold."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from capibara.errors import CapibaraError, parts_of, rule_error, unknown_name
from capibara.hardware.facts import GiB

if TYPE_CHECKING:
    from capibara.memory.autopsy import Autopsy

__all__ = [
    "MemoryLimitError",
    "checked_choice",
    "checked_share",
    "checked_size",
    "gib_for",
    "limit_error",
    "limit_in_force",
]


class MemoryLimitError(CapibaraError, ValueError):
    """A memory limit cannot hold what was asked for; nothing was allocated.

    `autopsy` has what lay there then, where that was looked at.
    """

    autopsy: Autopsy | None = None


def limit_error(rule: str, arrived: object, fix: str) -> MemoryLimitError:
    """The error in the house form."""
    said = rule_error(rule, arrived, fix)
    error = MemoryLimitError(str(said))
    error.parts = parts_of(said)  # type: ignore[attr-defined]
    return error


def gib_for(count: int) -> str:
    """A number of GiB, short enough to write, that so many bytes fit in.

    >>> gib_for(2**30), gib_for(12345)
    ('1', '1.14972e-05')
    """
    text = f"{count / GiB:.6g}"
    return text if float(text) * GiB >= count else f"{count / GiB * (1 + 1e-5):.6g}"


def checked_size(name: str, gigabytes: float) -> int:
    """Bytes of a size in GiB."""
    number = isinstance(gigabytes, int | float) and not isinstance(gigabytes, bool)
    if not number or not 0 < gigabytes < math.inf or gigabytes * GiB < 1:
        raise rule_error(f"{name} is a number of GiB above 0", repr(gigabytes), f"use {name}=32.0")
    return int(gigabytes * GiB)


def checked_share(name: str, share: float) -> float:
    number = isinstance(share, int | float) and not isinstance(share, bool)
    if not number or not 0 < share <= 1:
        raise rule_error(f"{name} is a share of the limit, above 0 and at most 1", repr(share), f"use {name}=0.85")
    return float(share)


def checked_choice(kind: str, name: str, choices: Iterable[str]) -> str:
    listed = tuple(choices)
    if name not in listed:
        raise unknown_name(kind, name, listed)
    return name


def limit_in_force(limit: int) -> int:
    """The limit, or what programs may have of a device where that is less: 30.75 of a v4 chip's 32 GiB."""
    import jax

    from capibara.hardware.devices import attached

    here = {device.id for device in jax.local_devices()}
    known: list[Any] = [one.memory_limit_bytes for one in attached() if one.index in here]
    return min([limit, *(one for one in known if one)])
