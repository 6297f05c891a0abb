"""TPUs: libtpu's functions, and its service from another process, by stand-ins that answer as they do."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from capibara.errors import CapibaraError
from capibara.hardware.chips import chip_for
from capibara.observe.sensors import HostSensor, LibtpuSensor, NvidiaSensor, TpuRuntimeSensor, default_sensors
from capibara.observe.sensors.found import _OLD, _TPUS, tpu_chip
from capibara.observe.sensors.tpu_runtime import METHOD, fields, metric_request, metric_values

# As libtpu 0.0.42 lists them.
NEW = {
    "tensorcore_util": ["41.5", "40.0"],
    "duty_cycle_pct": ["97.25", "96.00"],
    "hbm_capacity_total": ["34088157184", "34088157184"],
    "hbm_capacity_usage": ["8522039296", "17044078592"],
    "hlo_queue_size": ["tensorcore_0: 1"],
    "ici_link_health": ["..."],
}


def _sdk(told: Mapping[str, list[str]], module: str = "tpumonitoring") -> Any:
    monitoring = SimpleNamespace(
        list_supported_metrics=lambda: list(told), get_metric=lambda name: SimpleNamespace(data=lambda: told[name])
    )
    return SimpleNamespace(**{module: monitoring})


@pytest.mark.quick
@pytest.mark.parametrize("module", ["tpumonitoring", "monitoring"])
def test_libtpu_by_the_names_of_its_release(module: str) -> None:
    first, second = LibtpuSensor("TPU v4", _sdk(NEW, module)).read()
    assert (first.source, first.kind, first.chip) == ("tpu:0", "tpu", "TPU v4")
    assert first.values == pytest.approx(
        {"utilization": 0.9725, "tensorcore_utilization": 0.415, "memory_used": 8522039296, "memory_total": 34088157184}
    )
    assert second.values["memory_used"] == 17044078592
    older = {"duty_cycle_pct": ["10"], "tensorcore_utilization": ["5"]}
    [alone] = LibtpuSensor(sdk=_sdk(older, module)).read()
    assert alone.values == pytest.approx({"utilization": 0.1, "tensorcore_utilization": 0.05})


@pytest.mark.quick
def test_libtpu_of_another_time_says_so() -> None:
    with pytest.raises(CapibaraError, match="none of tpumonitoring, monitoring"):
        LibtpuSensor(sdk=SimpleNamespace()).read()
    with pytest.raises(CapibaraError, match=r"none of the figures .*'aura'"):
        LibtpuSensor(sdk=_sdk({"aura": []})).read()


@pytest.mark.quick
def test_a_figure_that_libtpu_does_not_tell_takes_no_other_with_it(
    caplog: pytest.LogCaptureFixture, nothing_said_yet: None
) -> None:
    sensor = LibtpuSensor(sdk=_sdk({**NEW, "tensorcore_util": ["not on this chip"]}))
    assert sensor.read()[0].values.keys() == {"utilization", "memory_used", "memory_total"}
    sensor.read()
    assert caplog.text.count("libtpu does not tell tensorcore_util") == 1
    with pytest.raises(ValueError, match="could not convert"):
        LibtpuSensor(sdk=_sdk({name: ["none"] for name in NEW})).read()


@pytest.mark.quick
def test_chips_of_two_devices_share_what_is_told_by_chip() -> None:
    told = {
        "duty_cycle_pct": ["50", "70"],
        "hbm_capacity_usage": ["1", "2", "3", "4"],
        "hbm_capacity_total": ["9", "9", "9", "9"],
    }
    busy = [one.values["utilization"] for one in LibtpuSensor("TPU v3", _sdk(told)).read()]
    assert busy == pytest.approx([0.5, 0.5, 0.7, 0.7])
    of_v4 = LibtpuSensor("TPU v4", _sdk(told)).read()
    assert ["utilization" in one.values for one in of_v4] == [True, True, False, False]


def test_the_installed_libtpu_lists_the_names() -> None:
    sdk = pytest.importorskip("libtpu.sdk", reason="needs libtpu: pip install '.[tpu]'")
    listed = set(sdk.tpumonitoring.list_supported_metrics())
    assert {name for name in NEW if not name.startswith(("hlo", "ici"))} <= listed


# The service, as bytes: written here without the code that reads them.


def _varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    out = b""
    while True:
        number, low = number >> 7, number & 0x7F
        out += bytes([low | 0x80 if number else low])
        if not number:
            return out


def _field(number: int, value: int | float | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    if isinstance(value, float):
        return _varint(number << 3 | 1) + struct.pack("<d", value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _response(name: str, values: Mapping[int, int | float]) -> bytes:
    metrics = b""
    for device, value in values.items():
        attribute = _field(1, b"device-id") + _field(2, _field(3, device))
        gauge = _field(1, value) if isinstance(value, float) else _field(2, value)
        timestamp = _field(1, 1_700_000_000) + _field(2, 5)
        metrics += _field(3, _field(1, attribute) + _field(2, timestamp) + _field(3, gauge))
    return _field(1, _field(1, name.encode()) + _field(2, b"what it is") + metrics)


@pytest.mark.quick
def test_messages_as_they_are_on_the_wire() -> None:
    assert metric_request("x" * 200) == _field(1, b"x" * 200)
    answer = _response("m", {0: 34_088_157_184, 1: -5, 300: 7})
    assert metric_values(answer) == {0: 34088157184.0, 1: -5.0, 300: 7.0}
    assert metric_values(_response("m", {2: 97.25, 0: 0.0})) == {2: 97.25, 0: 0.0}
    assert metric_values(b"") == {}
    unnamed = _field(1, _field(3, _field(3, _field(1, 12.5))))
    assert metric_values(unnamed) == {0: 12.5}, "no attribute is device 0"
    assert list(fields(_varint(9 << 3 | 5) + b"abcd" + _field(1, 1))) == [(1, 1)], "four bytes are passed over"


@pytest.mark.parametrize("data", [b"\x08", b"\x0a\xff\x01a", b"\x09abc", b"\x0b", b"\x08" + b"\xff" * 11])
def test_bytes_that_are_no_message(data: bytes) -> None:
    with pytest.raises(CapibaraError, match="no message"):
        list(fields(data))


@pytest.mark.quick
def test_protobuf_itself_reads_them_alike() -> None:
    """The same message by protobuf, which knows the service's declaration as tpu-info publishes it."""
    descriptor_pb2 = pytest.importorskip("google.protobuf.descriptor_pb2", reason="needs protobuf")
    from google.protobuf import descriptor_pool, message_factory

    kind = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="metric.proto", package="t", syntax="proto3")

    def message(name: str, *declared: tuple[str, int, Any, str, bool]) -> None:
        made = file.message_type.add(name=name)
        for field, number, type_, of, several in declared:
            label = kind.LABEL_REPEATED if several else kind.LABEL_OPTIONAL
            added = made.field.add(name=field, number=number, type=type_, label=label)
            if of:
                added.type_name = f".t.{of}"

    message("AttrValue", ("int_attr", 3, kind.TYPE_INT64, "", False))
    message("Attribute", ("key", 1, kind.TYPE_STRING, "", False), ("value", 2, kind.TYPE_MESSAGE, "AttrValue", False))
    message("Gauge", ("as_double", 1, kind.TYPE_DOUBLE, "", False), ("as_int", 2, kind.TYPE_INT64, "", False))
    message("Metric", ("attribute", 1, kind.TYPE_MESSAGE, "Attribute", False),
            ("gauge", 3, kind.TYPE_MESSAGE, "Gauge", False))  # fmt: skip
    message("TPUMetric", ("name", 1, kind.TYPE_STRING, "", False), ("metrics", 3, kind.TYPE_MESSAGE, "Metric", True))
    message("MetricResponse", ("metric", 1, kind.TYPE_MESSAGE, "TPUMetric", False))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    response = message_factory.GetMessageClass(pool.FindMessageTypeByName("t.MetricResponse"))()
    for device, value in {0: 12.5, 1: 50.0, 129: 99.75}.items():
        metric = response.metric.metrics.add()
        metric.attribute.value.int_attr = device
        metric.gauge.as_double = value
    assert metric_values(response.SerializeToString()) == {0: 12.5, 1: 50.0, 129: 99.75}


class Runtime:
    """libtpu's service in this process: the figures of two chips, as long as `told` has them."""

    def __init__(self, grpc: Any) -> None:
        from concurrent.futures import ThreadPoolExecutor

        self.told: dict[str, dict[int, int | float]] = {
            "tpu.runtime.hbm.memory.usage.bytes": {0: 8_000_000_000, 1: 9_000_000_000},
            "tpu.runtime.hbm.memory.total.bytes": {0: 34_088_157_184, 1: 34_088_157_184},
            "tpu.runtime.tensorcore.dutycycle.percent": {0: 97.5, 1: 12.0},
        }

        def answer(request: bytes, context: Any) -> bytes:
            name = next(value for number, value in fields(request) if number == 1)
            assert isinstance(name, bytes)
            if name.decode() not in self.told:
                context.abort(grpc.StatusCode.NOT_FOUND, "no such metric")
            return _response(name.decode(), self.told[name.decode()])

        service, _, method = METHOD.strip("/").partition("/")
        handler = grpc.method_handlers_generic_handler(service, {method: grpc.unary_unary_rpc_method_handler(answer)})
        self.server = grpc.server(ThreadPoolExecutor(2))
        self.server.add_generic_rpc_handlers((handler,))
        self.port = self.server.add_secure_port("localhost:0", grpc.local_server_credentials())
        self.server.start()


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    grpc = pytest.importorskip("grpc", reason="needs grpcio: pip install '.[monitor]'")
    made = Runtime(grpc)
    yield made
    made.server.stop(0)


@pytest.mark.quick
def test_the_service_of_another_process(runtime: Runtime) -> None:
    sensor = TpuRuntimeSensor([runtime.port], chip="TPU v4", timeout_s=30)
    first, second = sensor.read()
    assert (first.source, first.chip) == ("tpu:0", "TPU v4")
    assert first.values == {"utilization": 0.975, "memory_used": 8e9, "memory_total": 34_088_157_184.0}
    assert second.values["utilization"] == pytest.approx(0.12)
    del runtime.told["tpu.runtime.tensorcore.dutycycle.percent"]  # a release without it
    assert sensor.read()[0].values.keys() == {"memory_used", "memory_total"}
    runtime.server.stop(0).wait()
    with pytest.raises(CapibaraError, match="no program holds the TPUs"):
        sensor.read()
    sensor.close()


@pytest.mark.quick
def test_ports_of_several_processes(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    import grpc

    other = Runtime(grpc)
    other.told = {name: {device + 2: value for device, value in told.items()} for name, told in other.told.items()}
    monkeypatch.setenv("TPU_RUNTIME_METRICS_PORTS", f"{runtime.port},{other.port}")
    sensor = TpuRuntimeSensor(timeout_s=30)
    assert [reading.source for reading in sensor.read()] == ["tpu:0", "tpu:1", "tpu:2", "tpu:3"]
    sensor.close()
    other.server.stop(0)
    monkeypatch.setenv("TPU_RUNTIME_METRICS_PORTS", "a,b")
    with pytest.raises(ValueError, match="ports with commas"):
        TpuRuntimeSensor()


@pytest.mark.quick
def test_a_service_that_does_not_answer() -> None:
    pytest.importorskip("grpc", reason="needs grpcio: pip install '.[monitor]'")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        sensor = TpuRuntimeSensor([silent.getsockname()[1]], host="127.0.0.1", timeout_s=0.2)
        with pytest.raises(CapibaraError, match=r"127\.0\.0\.1:\d+ answers DEADLINE_EXCEEDED|Nothing answers at"):
            sensor.read()
        sensor.close()


def _device(folder: Path, name: str, vendor: str, device: str, subsystem: str = "0x0000") -> None:
    (folder / name).mkdir(parents=True)
    for file, text in {"vendor": vendor, "device": device, "subsystem_device": subsystem}.items():
        (folder / name / file).write_text(f"{text}\n")


@pytest.mark.quick
def test_which_sensors_a_machine_has(tmp_path: Path) -> None:
    dev, pci = tmp_path / "dev", tmp_path / "pci"
    dev.mkdir()
    _device(pci, "0000:00:01.0", "0x8086", "0x005e")
    _device(pci, "0000:00:02.0", "0x1ae0", "0x0042")  # Google's network card
    assert tpu_chip(pci) is None
    assert [type(one) for one in default_sensors(pci=pci, dev=dev)] == [HostSensor]
    (dev / "nvidiactl").touch()
    assert [type(one) for one in default_sensors(pci=pci, dev=dev)] == [NvidiaSensor, HostSensor]
    _device(pci, "0000:00:03.0", "0x1ae0", "0x005e")
    assert tpu_chip(pci) == "TPU v4"
    assert [type(one) for one in default_sensors(pci=pci, dev=dev)] == [LibtpuSensor, NvidiaSensor, HostSensor]
    pytest.importorskip("grpc", reason="needs grpcio: pip install '.[monitor]'")
    assert type(default_sensors(own_process=False, pci=pci, dev=dev)[0]) is TpuRuntimeSensor
    _device(tmp_path / "old", "0", "0x1ae0", "0x0027", "0x004f")
    assert tpu_chip(tmp_path / "old") == "TPU v3"
    assert all(chip_for(name) is not None for name in (*_TPUS.values(), *_OLD.values())), "names are jax's"
