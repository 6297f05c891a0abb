"""What a health check found: each fault by the device, link or host that has it, with the fix."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

__all__ = ["Finding", "HealthReport", "NoAnswer", "device_name", "within"]

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or that could be better."""

    check: str
    """ "matmul", "memory", "collective", "link", "temperature", "clock", "devices", "host", "missing_host" or
    "missing_process"."""
    subject: str
    """Who: "device 3", "link 2-3 of axis 'x'", "host worker-1", "/dev/shm"."""
    text: str
    fix: str
    serious: bool = True
    """False for advice: nothing fails by it."""
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.text}. Fix: {self.fix}."

    def as_dict(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)} | {"evidence": dict(self.evidence)}


@dataclass(frozen=True)
class HealthReport:
    """What `TpuDiagnostics.run_full_health_check` measured; `report["all_chips_online"]` is the same as the attribute.

    None stands for what was not measured: there is no sensor, no second device, or a check before it failed;
    `details["not_run"]` says why.
    """

    all_chips_online: bool
    """Every device that should be there is, and multiplies rightly."""
    temperature_normal: bool | None
    memory_healthy: bool | None
    interconnect_ok: bool | None
    clock_normal: bool | None
    host_ok: bool
    """What the operating system gives: /dev/shm, open files, a TPU that nobody else holds."""
    findings: tuple[Finding, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def healthy(self) -> bool:
        """Whether nothing serious was found."""
        return not any(one.serious for one in self.findings)

    def __getitem__(self, name: str) -> Any:
        if name not in self.keys():  # no dict
            raise KeyError(f"{name!r}; a health report has {', '.join(self.keys())}")
        return getattr(self, name)

    def keys(self) -> list[str]:
        return [one.name for one in fields(self)]

    def as_dict(self) -> dict[str, Any]:
        told = {name: self[name] for name in self.keys()}
        told["findings"] = [one.as_dict() for one in self.findings]
        return {"healthy": self.healthy, **told, "details": dict(self.details)}


class NoAnswer(Exception):
    """Something did not come back in time."""


def within(seconds: float, function: Callable[[], _Result]) -> _Result:
    """The function's result, if it comes within so many seconds.

    A device that is gone is waited for forever, so this is in a thread that is left behind then, and that the end of
    the process does not wait for.

    Raises:
      NoAnswer: it did not come.
    """
    results: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:  # noqa: BLE001  # it is the caller's, below
            errors.append(error)

    thread = threading.Thread(target=run, name="health check", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise NoAnswer(f"no answer within {seconds:g} s")
    return results[0]


def device_name(device: Any) -> str:
    """A jax device as people find it again: its number, kind, process, and its place in the slice."""
    coords = getattr(device, "coords", None)
    place = "" if coords is None else f" at {'x'.join(map(str, coords))}"
    return f"device {device.id} ({device.device_kind}{place}, process {device.process_index})"
