"""`TpuDiagnostics`: everything that can be measured of a machine's health, in an order in which nothing hangs."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from capibara.errors import rule_error
from capibara.hardware.chips import chip_for
from capibara.hardware.topology import slice_by_name
from capibara.observe.bottleneck import BottleneckReport, analyze_performance_bottlenecks
from capibara.observe.health.host import HostFiles, check_host
from capibara.observe.health.report import Finding, HealthReport, NoAnswer, device_name, within
from capibara.observe.health.slice_hosts import hosts_of_environment, missing_hosts
from capibara.observe.polling import Poller
from capibara.observe.profiler.result import Profile
from capibara.observe.sensors.found import default_sensors, tpu_chip
from capibara.observe.sensors.reading import ACCELERATORS, Reading, Sensor
from capibara.processes import MissingProcess, gather

__all__ = ["TpuDiagnostics"]

_SLOW_CLOCK = 0.5
_SENSORS_S = 5.0


class TpuDiagnostics:
    """Checks the accelerators of this process, the links between all, and the host.

    In a program of several processes every one of them makes the check at the same time; each tries its own devices,
    and all get the findings of all.

    Args:
      devices: to try; those of this process.
      mesh: whose axes and links are tried; the chips' grid on a TPU slice, one axis of all devices elsewhere.
      hosts: that have to be there, as "name" or "name:port"; those of $TPU_WORKER_HOSTNAMES and $CAPIBARA_COORDINATOR.
      expected_devices: how many there should be over all processes; by $TPU_ACCELERATOR_TYPE where it is set.
      sensors: in place of those of the machine.
      max_temperature: degrees Celsius that are still normal.
      memory_share: of each device's free memory, that is tested.
      deadline_s: seconds for one step on a device; one that hangs is named then.
      host_deadline_s: seconds that hosts have to answer.
      host_files: where the operating system's limits are looked up.
      tpu: the kind of TPU in this host; asked of the kernel where it is None.
      product: what multiplies two operands on a device, in place of a jitted product.
      write: what writes a block of memory, in place of a jitted fill.
      reduce: what sums along a mesh axis, in place of an all-reduce.
      measure: what times pairs of devices, in place of a ppermute.

    Examples:
        >>> import jax
        >>> report = TpuDiagnostics(devices=jax.devices()[:1], hosts=[]).run_full_health_check()
        >>> report["all_chips_online"], report.memory_healthy
        (True, True)
    """

    def __init__(
        self,
        *,
        devices: Sequence[Any] | None = None,
        mesh: Any = None,
        hosts: Sequence[str] | None = None,
        expected_devices: int | None = None,
        sensors: Sequence[Sensor] | None = None,
        max_temperature: float = 85.0,
        memory_share: float = 0.25,
        deadline_s: float = 120.0,
        host_deadline_s: float = 3.0,
        host_files: HostFiles | None = None,
        tpu: str | None = None,
        product: Callable[[Any, Any], Any] | None = None,
        write: Callable[[Any, str, int, int], Any] | None = None,
        reduce: Callable[[Any, str, Any], Any] | None = None,
        measure: Callable[[Sequence[tuple[Any, Any]], int], float] | None = None,
    ) -> None:
        if not 0 < max_temperature < 200:
            raise rule_error("max_temperature is in degrees Celsius, 0 to 200", repr(max_temperature), "leave it out")
        if not deadline_s > 0:
            raise rule_error("deadline_s is above 0 seconds", repr(deadline_s), "leave it out for 120")
        if not 0 < memory_share <= 0.9:
            raise rule_error("memory_share is above 0 and at most 0.9", repr(memory_share), "leave it out for 0.25")
        if expected_devices is not None and expected_devices < 1:
            raise rule_error("expected_devices is 1 or more", repr(expected_devices), "leave it out")
        self.devices, self.mesh = devices, mesh
        self.hosts = hosts_of_environment() if hosts is None else list(hosts)
        self.expected_devices = expected_devices
        self.sensors = sensors
        self.max_temperature = max_temperature
        self.memory_share = memory_share
        self.deadline_s, self.host_deadline_s = deadline_s, host_deadline_s
        self.host_files = host_files or HostFiles()
        self.tpu = tpu_chip() if tpu is None else tpu
        self._product, self._write, self._reduce, self._measure = product, write, reduce, measure

    def run_full_health_check(self) -> HealthReport:
        """Measure everything. What is wrong is in `findings`, with its fix; what was measured in `details`."""
        found = [*check_host(self.host_files, self.tpu), *missing_hosts(self.hosts, self.host_deadline_s)]
        not_run: dict[str, str] = {}
        details: dict[str, Any] = {"hosts": list(self.hosts), "not_run": not_run}
        devices: list[Any] = []
        gone = [one.subject for one in found if one.check == "missing_host"]
        if gone:
            # On a slice, asking jax for its devices waits for all hosts.
            not_run["devices"] = f"{', '.join(gone)} is missing, and the chips are not opened without all hosts"
        else:
            devices = self._open(found, details)
        linked = bool(devices) and self._on_devices(devices, found, details)
        temperature, clock = self._on_sensors(devices, found, details)
        if devices:
            found = self._of_all(found)
        return HealthReport(
            all_chips_online=bool(devices) and _none_of(found, "matmul", "devices", "missing_process"),
            temperature_normal=temperature,
            memory_healthy=_none_of(found, "memory") if "memory_bytes" in details else None,
            interconnect_ok=_none_of(found, "link", "collective", "missing_process") if linked else None,
            clock_normal=clock,
            host_ok=_none_of(found, "host"),
            findings=tuple(found),
            details=details,
        )

    def analyze_performance_bottlenecks(
        self, fn_or_profile: Profile | Callable[[], Any] | None = None
    ) -> BottleneckReport:
        """What slows a program down: `capibara.observe.analyze_performance_bottlenecks`."""
        return analyze_performance_bottlenecks(fn_or_profile)

    def _open(self, found: list[Finding], details: dict[str, Any]) -> list[Any]:
        """This process's devices, if they open."""

        def opened() -> tuple[list[Any], int]:
            import jax

            return list(jax.local_devices() if self.devices is None else self.devices), jax.device_count()

        fix = "end other programs that hold the chips; look at this host's log; restart it"
        try:
            devices, count = within(self.deadline_s, opened)
        except NoAnswer as silent:
            found.append(Finding("devices", "this host", f"jax gave {silent} when asked for its devices", fix))
            return []
        except RuntimeError as error:
            found.append(Finding("devices", "this host", f"jax cannot open its devices: {error}", fix))
            return []
        details["devices"] = [device_name(device) for device in devices]
        expected = self._expected()
        if expected is not None and count != expected:
            text = f"{count} devices are there and {expected} should be"
            found.append(Finding("devices", "the slice", text, fix, evidence={"there": count, "expected": expected}))
        return devices

    def _expected(self) -> int | None:
        if self.expected_devices is not None:
            return self.expected_devices
        kind = os.environ.get("TPU_ACCELERATOR_TYPE")
        if self.tpu is None or not kind:
            return None
        try:
            where = slice_by_name(kind)
        except ValueError:
            return None  # a name that the table does not have says nothing
        import jax

        return where.devices if jax.process_count() > 1 else where.devices // where.hosts

    def _on_devices(self, devices: list[Any], found: list[Finding], details: dict[str, Any]) -> bool:
        """Products, memory and links; whether links were tried."""
        import jax

        from capibara.observe.health import arithmetic, links, memory

        found += arithmetic.check_products(devices, self._product or arithmetic.multiply, self.deadline_s)
        # What hangs once hangs again, and everything behind it.
        hung = {one.subject for one in found if one.check == "matmul" and one.evidence.get("answered") is False}
        well = [device for device in devices if f"device {device.id}" not in hung]
        wrong, details["memory_bytes"] = memory.check_memory(
            well, self.memory_share, self._write or memory.fill, self.deadline_s
        )
        found += wrong
        not_run = details["not_run"]
        try:
            anyone = gather("health", sorted(hung), self.deadline_s)
        except MissingProcess as missing:
            found += [_absent(process, str(missing)) for process in missing.missing]
            not_run["links"] = "not every process came to the check"
            return True
        if any(anyone):
            names = ", ".join(name for hanging in anyone for name in hanging)
            not_run["links"] = f"{names} hangs, and exchanges would wait for it"
            return False
        everyone = jax.devices() if self.devices is None else devices
        mesh = links.whole_mesh(everyone) if self.mesh is None else self.mesh
        if mesh.devices.size == 1:
            not_run["links"] = "there is one device"
            return False
        try:
            sums = links.check_sums(mesh, self._reduce or links.all_reduce, self.deadline_s)
            found += sums
            if any(one.check == "link" for one in sums):
                not_run["links"] = "an all-reduce hangs, and what comes after it would wait"
                return True
            slow, measured, axes = links.check_links(mesh, self._measure or links.permute_seconds, self.deadline_s)
        except MissingProcess as missing:
            found += [_absent(process, str(missing)) for process in missing.missing]
            return True
        found += slow
        details["links"] = [link.as_dict() for link in measured]
        details["axes"] = {name: {"bytes_per_second": value} for name, value in axes.items()}
        return True

    def _on_sensors(
        self, devices: Sequence[Any], found: list[Finding], details: dict[str, Any]
    ) -> tuple[bool | None, bool | None]:
        """Whether temperatures and clocks are normal, read while the devices work."""
        from contextlib import nullcontext

        sensors = default_sensors() if self.sensors is None else list(self.sensors)
        accelerators = any(sensor.accelerators for sensor in sensors)
        poller = Poller(sensors, deadline_s=_SENSORS_S, first_deadline_s=_SENSORS_S)
        work: Any = nullcontext()
        if accelerators and devices and _none_of(found, "matmul"):
            from capibara.observe.health.arithmetic import at_work

            work = at_work(devices)
        try:
            with work:
                readings = poller.poll()
            details["sensors"] = {state.name: state.text or state.state for state in poller.states()}
        finally:
            poller.close()
        kinds = ACCELERATORS if accelerators else ("host",)
        told = [reading for reading in readings if reading.kind in kinds]
        details["readings"] = {reading.source: dict(reading.values) for reading in told}
        hot = [
            _hot(one, self.max_temperature) for one in told if one.values.get("temperature", 0) > self.max_temperature
        ]
        slow = _slow_clocks(told)
        found += hot + slow
        return (
            not hot if any("temperature" in one.values for one in told) else None,
            not slow if any("clock" in one.values for one in told) else None,
        )

    def _of_all(self, found: list[Finding]) -> list[Finding]:
        """The findings of every process, each once; one that does not come is a finding itself."""
        try:
            told = gather("health findings", [one.as_dict() for one in found], self.deadline_s)
        except MissingProcess as missing:
            seen = {one.subject for one in found if one.check == "missing_process"}
            absent = [_absent(process, str(missing)) for process in missing.missing]
            return [*found, *(one for one in absent if one.subject not in seen)]
        if len(told) == 1:
            return found
        everything = [Finding(**one) for process in told for one in process]
        # A link and the slice are seen by every process, a host's own faults by one.
        return list({(one.check, one.subject, one.text): one for one in everything}.values())


def _none_of(found: Sequence[Finding], *checks: str) -> bool:
    return not any(one.check in checks and one.serious for one in found)


def _absent(process: int, text: str) -> Finding:
    fix = f"look at the log of process {process}, and restart the program"
    return Finding("missing_process", f"process {process}", text, fix)


def _hot(reading: Reading, limit: float) -> Finding:
    degrees = reading.values["temperature"]
    return Finding(
        "temperature",
        reading.source,
        f"{reading.source} is at {degrees:.0f} °C, above {limit:.0f}",
        "look at its cooling and at what else runs on it; a chip that is too hot slows down or stops",
        evidence={"temperature": degrees, "limit": limit},
    )


def _slow_clocks(readings: Sequence[Reading]) -> list[Finding]:
    """At work, and at half of what the chip's row says or of what the others do."""
    clocks = {one.source: one.values["clock"] for one in readings if "clock" in one.values}
    found = []
    for reading in readings:
        clock = clocks.get(reading.source)
        chip = None if reading.chip is None else chip_for(reading.chip)
        usual = max(statistics.median(clocks.values()) if clocks else 0.0, (chip and chip.clock_hz) or 0.0)
        if clock is not None and clock <= _SLOW_CLOCK * usual:
            text = (
                f"{reading.source} runs at {clock / 1e6:.0f} MHz under load, {clock / usual:.0%} of {usual / 1e6:.0f}"
            )
            fix = "look at its power limit, its cooling, and what the driver says of throttling"
            found.append(Finding("clock", reading.source, text, fix, evidence={"clock": clock, "usual": usual}))
    return found
