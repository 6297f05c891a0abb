"""Where figures come from, a file a source. `capibara.observe.polling` asks them, and waits for none.

Names load when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.observe.sensors.found import default_sensors as default_sensors
    from capibara.observe.sensors.found import sensor_for as sensor_for
    from capibara.observe.sensors.host import HostSensor as HostSensor
    from capibara.observe.sensors.libtpu_sdk import LibtpuSensor as LibtpuSensor
    from capibara.observe.sensors.nvidia import NvidiaSensor as NvidiaSensor
    from capibara.observe.sensors.process import ProcessSensor as ProcessSensor
    from capibara.observe.sensors.reading import METRICS as METRICS
    from capibara.observe.sensors.reading import Reading as Reading
    from capibara.observe.sensors.reading import Sensor as Sensor
    from capibara.observe.sensors.run_folder import RunSensor as RunSensor
    from capibara.observe.sensors.server import ServerSensor as ServerSensor
    from capibara.observe.sensors.tpu_runtime import TpuRuntimeSensor as TpuRuntimeSensor

__all__, __getattr__, __dir__ = exports(
    __name__,
    {
        "found": "default_sensors sensor_for",
        "host": "HostSensor",
        "libtpu_sdk": "LibtpuSensor",
        "nvidia": "NvidiaSensor",
        "process": "ProcessSensor",
        "reading": "METRICS Reading Sensor",
        "run_folder": "RunSensor",
        "server": "ServerSensor",
        "tpu_runtime": "TpuRuntimeSensor",
    },
)
