"""Which sensors a machine has, and which one watches what a user names."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from capibara.errors import rule_error
from capibara.observe.sensors.host import HostSensor
from capibara.observe.sensors.libtpu_sdk import LibtpuSensor
from capibara.observe.sensors.nvidia import NvidiaSensor
from capibara.observe.sensors.process import ProcessSensor
from capibara.observe.sensors.reading import Sensor
from capibara.observe.sensors.run_folder import RunSensor
from capibara.observe.sensors.server import ServerSensor
from capibara.observe.sensors.tpu_runtime import TpuRuntimeSensor

__all__ = ["default_sensors", "sensor_for", "tpu_chip"]

PCI = Path("/sys/bus/pci/devices")
DEV = Path("/dev")
_GOOGLE = "0x1ae0"
# PCI device -> jax's name of the chip. v2 and v3 have one number, and differ in that of the subsystem.
_TPUS = {
    "0x005e": "TPU v4",
    "0x0063": "TPU v5 lite",
    "0x0062": "TPU v5",
    "0x006f": "TPU v6 lite",
    "0x0076": "TPU7x",
}
_OLD = {"0x004e": "TPU v2", "0x004f": "TPU v3"}


def tpu_chip(pci: Path = PCI) -> str | None:
    """The kind of TPU that is in this machine, as jax calls it; None without one. Asks the kernel, not libtpu."""
    for device in sorted(pci.glob("*")):
        try:
            if (device / "vendor").read_text().strip() != _GOOGLE:
                continue
            number = (device / "device").read_text().strip()
            name = _TPUS.get(number)
            if name is None and number == "0x0027":
                name = _OLD.get((device / "subsystem_device").read_text().strip())
        except OSError:
            continue
        if name is not None:  # Google's network cards have the vendor too
            return name
    return None


def default_sensors(*, own_process: bool = True, pci: Path = PCI, dev: Path = DEV) -> list[Sensor]:
    """The sensors of what is in this machine: its accelerators, and the host.

    Args:
      own_process: whether this process is the one that uses the TPUs, so that libtpu itself can be asked; another's
        are asked for through the port of its runtime.
      pci: the kernel's folder of PCI devices.
      dev: the folder of device files.
    """
    sensors: list[Sensor] = []
    chip = tpu_chip(pci)
    if chip is not None:
        through_port = not own_process and importlib.util.find_spec("grpc") is not None
        sensors.append(TpuRuntimeSensor(chip=chip) if through_port else LibtpuSensor(chip))
    if (dev / "nvidiactl").exists():
        sensors.append(NvidiaSensor())
    return [*sensors, HostSensor()]


def sensor_for(what: str) -> Sensor:
    """What watches a process (its number), a server (its http address) or a run (its folder).

    >>> import os
    >>> sensor_for(str(os.getpid())).name == f"pid {os.getpid()}"
    True
    """
    if what.isascii() and what.isdigit():
        return ProcessSensor(int(what))
    if what.startswith(("http://", "https://")):
        return ServerSensor(what)
    if what and Path(what).is_dir():
        return RunSensor(what)
    raise rule_error(
        "What is watched is a run's folder, a server's http address, or a process's number",
        repr(what),
        "write runs/dev, http://127.0.0.1:8000 or 4711",
    )
