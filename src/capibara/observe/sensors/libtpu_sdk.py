"""TPU chips by libtpu's own monitoring functions, in the process that runs them.

libtpu tells no temperature and no power. Its module and its figures have had several names; each release is asked for
those that it lists. Off a TPU its functions look for a cloud's metadata server for a minute, so nobody calls them where
there is no chip (`found.py`).
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from capibara.errors import CapibaraError, say_once
from capibara.hardware.chips import chip_for
from capibara.observe.sensors.reading import Reading

__all__ = ["LibtpuSensor", "tpu_readings"]

_log = logging.getLogger("capibara.observe")

_MODULES = ("tpumonitoring", "monitoring")

# Ours -> theirs, the first that a release lists; and what one of theirs is in ours.
_NAMES: Mapping[str, tuple[tuple[str, ...], float]] = {
    "utilization": (("duty_cycle_pct", "duty_cycle"), 0.01),
    "tensorcore_utilization": (("tensorcore_util", "tensorcore_utilization"), 0.01),
    "memory_used": (("hbm_capacity_usage", "hbm_memory_usage"), 1.0),
    "memory_total": (("hbm_capacity_total", "hbm_memory_total"), 1.0),
}


class LibtpuSensor:
    """Readings of "tpu:0" and on: the chips that this process holds.

    Args:
      chip: the kind of chip, as jax calls it.
      sdk: the module, where it is not the installed `libtpu.sdk`.
    """

    name = "libtpu"
    accelerators = True

    def __init__(self, chip: str | None = None, sdk: Any = None) -> None:
        self._chip = chip
        self._sdk = sdk
        self._module: Any = None
        self._asked: dict[str, str] = {}

    def read(self) -> Sequence[Reading]:
        if self._module is None:
            self._open()
        told: dict[str, dict[int, float]] = {}
        errors: list[Exception] = []
        for ours, theirs in self._asked.items():
            scale = _NAMES[ours][1]
            try:
                values = [scale * float(value) for value in self._module.get_metric(theirs).data()]
            except Exception as error:  # noqa: BLE001  # a figure that is listed, and that this chip does not have
                say_once(_log, theirs, "libtpu does not tell %s: %s", theirs, error)
                errors.append(error)
            else:
                told[ours] = dict(enumerate(values))
        if not told:
            raise errors[0]
        return tpu_readings(told, self._chip)

    def _open(self) -> None:
        sdk = self._sdk or importlib.import_module("libtpu.sdk")
        module = next((getattr(sdk, name) for name in _MODULES if hasattr(sdk, name)), None)
        if module is None:
            raise CapibaraError(f"This libtpu has none of {', '.join(_MODULES)}: it is too old, or too new")
        listed = set(module.list_supported_metrics())
        chosen = {ours: next((one for one in names if one in listed), None) for ours, (names, _) in _NAMES.items()}
        self._asked = {ours: theirs for ours, theirs in chosen.items() if theirs is not None}
        if not self._asked:
            raise CapibaraError(f"This libtpu lists none of the figures that are known here: {sorted(listed)}")
        self._module = module

    def close(self) -> None:
        self._module = None


def tpu_readings(told: Mapping[str, Mapping[int, float]], chip: str | None) -> list[Reading]:
    """Readings a device, of figures by device.

    Where a chip has two devices (v2, v3), memory is told by device and work by chip: each device has its chip's.
    """
    devices = sorted({device for values in told.values() for device in values})
    facts = None if chip is None else chip_for(chip)
    two = facts is not None and facts.devices_per_chip == 2
    by_device: dict[int, dict[str, float]] = {device: {} for device in devices}
    for name, values in told.items():
        by_chip = two and 2 * len(values) == len(devices)
        in_order = [values[key] for key in sorted(values)]
        for place, device in enumerate(devices):
            if by_chip:
                by_device[device][name] = in_order[place // 2]
            elif device in values:
                by_device[device][name] = values[device]
    return [Reading(f"tpu:{device}", "tpu", figures, chip) for device, figures in by_device.items()]
