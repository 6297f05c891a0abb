"""Which errors are the device's, and the error that tells the whole story of them."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from capibara.errors import TPUError, runtime_status

__all__ = ["DEVICE_STATUSES", "Attempt", "TpuError", "device_status", "named_device"]

DEVICE_STATUSES = ("UNAVAILABLE", "INTERNAL", "ABORTED", "DATA_LOSS", "DEADLINE_EXCEEDED")
"""The statuses of the runtime's errors that are the device's or the network's. RESOURCE_EXHAUSTED is none of them: a
program that needs too much memory needs it again. Neither is INVALID_ARGUMENT."""

# The runtime says INTERNAL also for what the program did: a Python callback that raised, a kernel that is refused.
_PROGRAMS_OWN = re.compile(r"[Cc]allback|Mosaic failed|ptxas|[Cc]ompilation|failed to compile|[Ll]owering")
_DEVICE = re.compile(
    r"\b(?:(?:tpu|gpu|cpu|cuda|device|ordinal|chip|core)(?:[ _]?(?:id|ordinal))?[ :_#=]{1,2}(\d+))", re.IGNORECASE
)


@dataclass(frozen=True)
class Attempt:
    """One failure, and what was done about it."""

    status: str
    text: str
    """The first line of the runtime's own error."""
    step: int | None = None
    """How many steps were done."""
    device: str | None = None
    """The device that the error names, or that did not answer afterwards."""
    restored: str = "nothing"
    devices: str = ""
    """What the next attempt ran on."""
    time: float = field(default_factory=time.time)

    def __str__(self) -> str:
        where = f" on {self.device}" if self.device else ""
        when = f" after step {self.step}" if self.step is not None else ""
        then = f"; then on {self.devices}" if self.devices else ""
        return f"{self.status}{where}{when}: {self.text} (restored: {self.restored}{then})"


class TpuError(TPUError):
    """A device failed and it could not be made good; the text tells every attempt.

    Attributes:
      attempts: each failure in order.
      status: of the last one, as the runtime calls it ("UNAVAILABLE").
      device: the device that it names; None where it names none.
      restored: what the state was last restored from.
    """

    def __init__(self, text: str, attempts: Sequence[Attempt] = ()) -> None:
        self.attempts = tuple(attempts)
        story = "".join(f"\n  {number}. {attempt}" for number, attempt in enumerate(self.attempts, 1))
        super().__init__(text + (":" + story if story else ""))
        self.reason = text

    @property
    def status(self) -> str | None:
        return self.attempts[-1].status if self.attempts else None

    @property
    def device(self) -> str | None:
        return next((attempt.device for attempt in reversed(self.attempts) if attempt.device), None)

    @property
    def restored(self) -> str | None:
        return self.attempts[-1].restored if self.attempts else None

    def __reduce__(self) -> tuple[type[TpuError], tuple[str, tuple[Attempt, ...]]]:
        return type(self), (self.reason, self.attempts)


def device_status(error: BaseException) -> str | None:
    """The status of an error that is a device's; None for every other error, which is the program's own.

    >>> device_status(jax.errors.JaxRuntimeError("UNAVAILABLE: TPU initialization failed: device 3 is gone"))
    'UNAVAILABLE'
    >>> device_status(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")) is None
    True
    """
    status = runtime_status(error)
    if status == "INTERNAL" and _PROGRAMS_OWN.search(str(error)):
        return None
    return status if status in DEVICE_STATUSES else None


def named_device(text: str) -> str | None:
    """The device that an error's text names, as it names it.

    >>> named_device("UNAVAILABLE: lost TPU:5"), named_device("INTERNAL: no name")
    ('TPU:5', None)
    """
    match = _DEVICE.search(text)
    return match.group(0) if match else None
