"""After a failure: which devices still answer, and a state's layout on those."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from capibara.errors import runtime_errors

__all__ = ["answering", "choose_devices", "on_devices", "platform_devices"]

logger = logging.getLogger(__name__)


def platform_devices(platform: str) -> list[Any]:
    """This process's devices of a platform; none where it has none."""
    import jax

    try:
        return list(jax.local_devices(backend=platform))
    except RuntimeError:  # jax's way to say that there is no such backend
        return []


def answering(devices: Iterable[Any], timeout: float = 30.0) -> list[Any]:
    """Those that add two numbers and give the answer within `timeout` seconds, all asked at once."""
    devices = list(devices)
    right: dict[Any, bool] = {}

    def ask(device: Any) -> None:
        import jax
        import numpy as np

        try:
            right[device] = int(jax.device_put(np.int32(2), device) + jax.device_put(np.int32(3), device)) == 5
        except runtime_errors() as error:
            logger.warning("%s does not answer: %s", device, str(error).splitlines()[0])

    # Daemons: one that never comes back must not keep the process.
    threads = [threading.Thread(target=ask, args=(device,), daemon=True) for device in devices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    return [device for device in devices if right.get(device)]


def choose_devices(
    in_use: Sequence[Any], *, fallback_to_gpu: bool, fallback_to_cpu: bool, timeout: float = 30.0
) -> list[Any]:
    """What is left of the devices in use; where nothing is, GPUs, then CPUs, as far as allowed. Empty: nothing."""
    left = answering(in_use, timeout)
    if left:
        return left
    platform = in_use[0].platform if in_use else ""
    for other, allowed in (("gpu", fallback_to_gpu), ("cpu", fallback_to_cpu)):
        if allowed and other != platform:
            left = answering(platform_devices(other), timeout)
            if left:
                return left
    return []


def _mesh_on(mesh: Any, devices: Sequence[Any]) -> Any:
    """A mesh of the same axes on these devices: where there are fewer, its longest axes are cut to a divisor."""
    import math

    import numpy as np
    from jax.sharding import Mesh

    shape = dict(mesh.shape)
    while math.prod(shape.values()) > len(devices):
        longest = max(shape, key=lambda name: shape[name])
        size = shape[longest]
        shape[longest] = next(part for part in range(size - 1, 0, -1) if size % part == 0)
    chosen = np.array(devices[: math.prod(shape.values())]).reshape(tuple(shape.values()))
    return Mesh(chosen, tuple(shape), axis_types=mesh.axis_types)


def on_devices(sharding: Any, devices: Sequence[Any]) -> Any:
    """The same layout on other devices. As every axis' length divides the old one, what was split still splits."""
    import jax
    from jax.sharding import NamedSharding

    if sharding.device_set <= set(devices):
        return sharding
    if isinstance(sharding, NamedSharding):
        return NamedSharding(_mesh_on(sharding.mesh, devices), sharding.spec)
    return jax.sharding.SingleDeviceSharding(devices[0])
