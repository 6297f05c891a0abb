"""TPU chips from outside of the process that runs them: libtpu's RuntimeMetricService, which tpu-info reads too.

The service speaks gRPC on port 8431 of the machine, while a program holds its TPUs. Three messages of it are needed,
and they are few bytes each, so they are written and read here as they are on the wire: protobuf's fields are a number
and a type, then a varint, eight bytes, or a length and so many bytes.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from capibara.distribution import NAME
from capibara.errors import CapibaraError, rule_error
from capibara.observe.sensors.libtpu_sdk import tpu_readings
from capibara.observe.sensors.reading import Reading

__all__ = ["DEFAULT_PORT", "METHOD", "TpuRuntimeSensor", "fields", "metric_request", "metric_values"]

DEFAULT_PORT = 8431
PORTS_VARIABLE = "TPU_RUNTIME_METRICS_PORTS"
"""libtpu's own: a port for each of several processes that share a machine's chips, with commas."""
METHOD = "/tpu.monitoring.runtime.RuntimeMetricService/GetRuntimeMetric"

# Ours -> theirs, and what one of theirs is in ours.
_NAMES: Mapping[str, tuple[str, float]] = {
    "utilization": ("tpu.runtime.tensorcore.dutycycle.percent", 0.01),
    "memory_used": ("tpu.runtime.hbm.memory.usage.bytes", 1.0),
    "memory_total": ("tpu.runtime.hbm.memory.total.bytes", 1.0),
}
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5


class TpuRuntimeSensor:
    """Readings of "tpu:0" and on: the chips of this machine, whichever process holds them.

    Args:
      ports: of the processes that hold chips; those of $TPU_RUNTIME_METRICS_PORTS, or 8431.
      host: the machine.
      chip: the kind of chip, as jax calls it.
      timeout_s: for one figure of one process.
    """

    name = "tpu runtime"
    accelerators = True

    def __init__(
        self,
        ports: Sequence[int] | None = None,
        host: str = "localhost",
        chip: str | None = None,
        timeout_s: float = 2.0,
    ) -> None:
        self._addresses = [f"{host}:{port}" for port in (_ports() if ports is None else ports)]
        self._local = host in ("localhost", "127.0.0.1", "::1")
        self._chip = chip
        self._timeout_s = timeout_s
        self._channels: list[Any] = []
        self._calls: list[Any] = []

    def read(self) -> Sequence[Reading]:
        if not self._calls:
            self._open()
        told: dict[str, dict[int, float]] = {name: {} for name in _NAMES}
        for address, call in zip(self._addresses, self._calls, strict=True):
            for ours, (theirs, scale) in _NAMES.items():
                for device, value in self._ask(address, call, theirs).items():
                    told[ours][device] = scale * value
        return tpu_readings({name: values for name, values in told.items() if values}, self._chip)

    def _ask(self, address: str, call: Any, name: str) -> dict[int, float]:
        import grpc

        try:
            return metric_values(call(metric_request(name), timeout=self._timeout_s))
        except grpc.RpcError as error:
            code = error.code()
            if code is grpc.StatusCode.UNAVAILABLE:
                raise CapibaraError(f"Nothing answers at {address}: no program holds the TPUs") from error
            if code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INVALID_ARGUMENT):
                return {}  # a release that does not have this figure
            raise CapibaraError(f"{address} answers {code.name} for {name}") from error

    def _open(self) -> None:
        try:
            import grpc
        except ImportError as missing:
            raise CapibaraError(
                f"TPUs of other processes are read by grpcio: pip install '{NAME}[monitor]'"
            ) from missing
        for address in self._addresses:
            if self._local:
                channel = grpc.secure_channel(address, grpc.local_channel_credentials())
            else:
                channel = grpc.insecure_channel(address)
            self._channels.append(channel)
            # Without serializers gRPC hands on the bytes as they are.
            self._calls.append(channel.unary_unary(METHOD))

    def close(self) -> None:
        self._calls = []
        while self._channels:
            self._channels.pop().close()


def _ports() -> list[int]:
    text = os.environ.get(PORTS_VARIABLE, "")
    try:
        return [int(word) for word in text.split(",") if word.strip()] or [DEFAULT_PORT]
    except ValueError as error:
        raise rule_error(f"${PORTS_VARIABLE} is ports with commas", repr(text), "write 8431,8432") from error


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value & (1 << 64) - 1, at
    raise ValueError("a number of more than 64 bits")


def metric_request(name: str) -> bytes:
    """MetricRequest { string metric_name = 1; }"""
    text = name.encode()
    return _varint(1 << 3 | _BYTES) + _varint(len(text)) + text


def fields(data: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """The fields of a message in order: numbers as they are, eight bytes as a double, the rest as bytes.

    >>> list(fields(metric_request("a")))
    [(1, b'a')]
    """
    at = 0
    try:
        while at < len(data):
            key, at = _read_varint(data, at)
            number, wire = key >> 3, key & 7
            if wire == _VARINT:
                value, at = _read_varint(data, at)
                yield number, value
            elif wire == _EIGHT:
                yield number, struct.unpack_from("<d", data, at)[0]
                at += 8
            elif wire == _BYTES:
                size, at = _read_varint(data, at)
                if at + size > len(data):
                    raise ValueError("it ends inside of a field")
                yield number, data[at : at + size]
                at += size
            elif wire == _FOUR:
                at += 4
            else:
                raise ValueError(f"a field of the wire type {wire}")
    except (IndexError, struct.error, ValueError) as error:
        raise CapibaraError(f"The TPU runtime's answer is no message that is known here: {error}") from error


def _only(data: bytes, wanted: int) -> list[bytes]:
    return [value for number, value in fields(data) if number == wanted and isinstance(value, bytes)]


def metric_values(response: bytes) -> dict[int, float]:
    """Device -> value, of a MetricResponse whose metrics are gauges.

    MetricResponse { TPUMetric metric = 1; }  TPUMetric { repeated Metric metrics = 3; }
    Metric { Attribute attribute = 1; Gauge gauge = 3; }  Attribute { AttrValue value = 2; }
    AttrValue { int64 int_attr = 3; }  Gauge { double as_double = 1; int64 as_int = 2; }

    proto3 leaves out an attribute of 0 where it is no member of a oneof; a device that is not named is number 0.
    """
    values: dict[int, float] = {}
    for metric in (one for tpu in _only(response, 1) for one in _only(tpu, 3)):
        device = 0
        for value in (inner for attribute in _only(metric, 1) for inner in _only(attribute, 2)):
            device = next((int(n) for number, n in fields(value) if number == 3 and isinstance(n, int)), 0)
        for gauge in _only(metric, 3):
            for number, n in fields(gauge):
                if number in (1, 2) and not isinstance(n, bytes):
                    # An int64 below 0 comes as its two's complement.
                    values[device] = float(n - (1 << 64) if number == 2 and n >= 1 << 63 else n)
    return values
