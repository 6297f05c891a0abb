"""An out-of-memory error says what lay there, who made it, what was predicted and what would fit."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.errors import JaxRuntimeError
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from capibara.errors import runtime_status
from capibara.hardware.facts import GiB
from capibara.memory import MemoryLimitError, TpuMemoryManager, autopsy_of
from capibara.memory.autopsy import Autopsy, autopsy, examine, is_out_of_memory
from capibara.memory.offload import HostCopy
from capibara.memory.profile import Frame, made_by, read_profile

ASKED = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate {} bytes."
MANY = (3_000_000,)
"""More than other tests leave alive."""


def found_by(context: Any, text: str = ASKED.format(GiB)) -> Autopsy:
    with pytest.raises(JaxRuntimeError) as caught, context:
        raise JaxRuntimeError(text)
    found = autopsy_of(caught.value)
    assert found is not None
    assert str(found) in caught.value.__notes__
    return found


def make_the_large_one() -> jax.Array:
    return jnp.full(MANY, 2.0)


@jax.jit
def doubled(x: jax.Array) -> jax.Array:
    return 2 * x


def call_a_program(x: jax.Array) -> jax.Array:
    return doubled(x)


@pytest.mark.quick
def test_the_allocators_own_error_gets_the_buffers_and_their_makers() -> None:
    large = make_the_large_one()
    product = call_a_program(large)
    with pytest.raises(JaxRuntimeError) as caught, autopsy():
        jnp.ones((1 << 46,), jnp.float32).block_until_ready()  # a CPU may find out later than the call
    found = autopsy_of(caught.value)
    assert found is not None
    assert found.asked_bytes == (1 << 46) * 4
    assert found.devices[0].used >= 2 * large.nbytes
    ours = [one for one in found.buffers if f"float32[{MANY[0]}]" in one.arrays]
    makers = {one.made_by.function: one for one in ours if one.made_by is not None}
    assert {"make_the_large_one", "call_a_program"} <= set(makers)
    maker = makers["make_the_large_one"].made_by
    assert maker is not None
    assert maker.file == __file__
    assert maker.line == make_the_large_one.__code__.co_firstlineno + 1
    assert [one.bytes for one in found.buffers] == sorted((one.bytes for one in found.buffers), reverse=True)
    assert "made by make_the_large_one (test_autopsy.py:" in str(found)
    json.dumps(found.as_dict())
    assert product.nbytes == large.nbytes


@pytest.mark.quick
def test_so_does_that_of_a_function_that_has_run_before() -> None:
    """JAX raises a ValueError there."""

    @jax.jit
    def spread(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x, (1 << 46,))

    @jax.jit
    def slowly(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 100, lambda _, x: jnp.tanh(x @ x), x)[0, 0]

    square = jnp.ones((600, 600))
    with contextlib.suppress(JaxRuntimeError):
        spread(slowly(square)).block_until_ready()  # what waits for another program is begun, and fails later
    one = jax.block_until_ready(slowly(square))
    with pytest.raises((JaxRuntimeError, ValueError), match="RESOURCE_EXHAUSTED") as caught, autopsy():
        spread(one).block_until_ready()
    found = autopsy_of(caught.value)
    assert found is not None
    assert found.asked_bytes == (1 << 46) * 4
    assert runtime_status(caught.value) == "RESOURCE_EXHAUSTED"


def test_calls_on_one_line_are_counted_together_and_not_as_devices() -> None:
    device = jax.devices()[0]
    with jax.default_device(device):
        # Large: the largest are told, and what other tests left behind is among them.
        n = 1 << 16
        params = {"up": jnp.ones((96, n)), "down": jnp.ones((n, 96)), "head": jnp.ones((n, 192))}
    found = examine(JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes."))
    here = [one for one in found.buffers if one.bytes in (2 * 96 * n * 4, 96 * n * 4)]
    (both,) = [one for one in here if any("96" in said for said in one.arrays)]
    assert both.devices == (str(device),)
    assert (both.count, both.bytes) == (2, sum(params[name].nbytes for name in ("up", "down")))
    assert set(both.arrays) == {f"float32[96,{n}]", f"float32[{n},96]"}
    (head,) = [one for one in found.buffers if one.arrays == (f"float32[{n},192]",)]
    assert (head.count, head.bytes) == (1, params["head"].nbytes)
    assert [one.bytes for one in found.buffers] == sorted((one.bytes for one in found.buffers), reverse=True)


def test_parts_on_several_devices_are_one_row_and_host_copies_none() -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[4:8])
    divided = jax.device_put(np.zeros((4, 1 << 21), np.float32), NamedSharding(mesh, PartitionSpec("data")))
    copy = HostCopy(divided).wait()
    rows = [one for one in found_by(autopsy()).buffers if one.bytes == 1 << 23]
    assert [len(one.devices) for one in rows] == [4]
    assert rows[0].arrays == ("float32[4,2097152]",)
    assert copy.nbytes == divided.nbytes


@pytest.mark.quick
@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (JaxRuntimeError(ASKED.format(8)), True),
        (JaxRuntimeError("RESOURCE_EXHAUSTED: Attempting to allocate 1.00G. That was not possible."), True),
        (JaxRuntimeError("RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory in memory space hbm."), True),
        (JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 65.05M of 64.00M"), False),
        (JaxRuntimeError("RESOURCE_EXHAUSTED: Error opening the bucket: quota"), False),
        (JaxRuntimeError("UNAVAILABLE: Out of memory"), False),
        (ValueError(ASKED.format(8)), True),  # of a jitted function that has run before
        (TypeError(ASKED.format(8)), False),
        (MemoryLimitError("refused"), True),
    ],
)
def test_which_errors_are_about_memory(error: Exception, is_one: bool) -> None:
    assert is_out_of_memory(error) == is_one
    with pytest.raises(type(error)) as caught, autopsy():
        raise error
    assert (autopsy_of(caught.value) is not None) == is_one


@pytest.mark.quick
def test_a_managers_refusal_and_its_context_have_one() -> None:
    with pytest.raises(MemoryLimitError) as refused:
        TpuMemoryManager(memory_limit_gb=1e-6).register("x", np.zeros(4096, np.float32))
    assert autopsy_of(refused.value) is not None
    manager = TpuMemoryManager(memory_limit_gb=1.0)
    assert found_by(manager.managed_context()).asked_bytes == GiB


def loss(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
    return jnp.mean((batch @ params["a"] @ params["b"]) ** 2)


def shapes(side: int) -> tuple[Any, Any]:
    weight = jax.ShapeDtypeStruct((side, side), jnp.float32)
    return {"a": weight, "b": weight}, jax.ShapeDtypeStruct((64, side), jnp.float32)


def test_the_plans_prediction_stands_beside_and_the_nearest_change() -> None:
    """Two weights of 36 GiB with gradients and moments: one H200 does not have that."""
    found = found_by(autopsy(loss, shapes(98304), on="h200", train=True))
    assert found.prediction is not None
    assert found.prediction.total > found.prediction.limit
    assert any("98304" in name for name, _ in found.prediction.largest)
    assert found.nearest_change is not None
    assert "h200x" in found.nearest_change
    assert f"nearest change that fits: {found.nearest_change}" in str(found)


class Planned:
    """What `autopsy` reads of a plan."""

    def __init__(self, total: float, limit: float, fits: bool = True, name: str = "as it is") -> None:
        from types import SimpleNamespace as Fields

        memory = Fields(total=total, arguments=0.0, temporaries=total, limit=limit, largest=())
        self.best = Fields(layout=Fields(name=name), estimate=Fields(memory=memory), bytes=total)
        self.where, self.name, self.changes, self.fits = Fields(name="a chip"), "step", (), fits


def test_which_change_is_named_where_the_plan_had_room() -> None:
    used = max(device.used for device in examine(MemoryLimitError("x")).devices)
    asked: list[float | None] = []

    def beside(limit: float | None) -> Any:
        return Planned(total=used, limit=1.5 * used)

    array = jnp.ones(MANY)
    assert "of other arrays" in str(found_by(autopsy(plan=beside)).nearest_change)

    def low(limit: float | None) -> Any:
        asked.append(limit)
        return Planned(100.0 * GiB, 1e6 * GiB) if limit is None else Planned(limit * GiB, 1e6, name="remat full")

    assert "remat full" in str(found_by(autopsy(plan=low)).nearest_change)
    assert asked[0] is None
    assert asked[1] is not None
    assert 0 < asked[1] <= 95
    assert array.nbytes


@pytest.mark.quick
def test_a_plan_that_fails_is_a_note_and_hides_nothing() -> None:
    found = found_by(autopsy(loss, shapes(256), on="no such chip", train=True))
    assert found.prediction is None
    assert "no such chip" in found.notes[0]
    assert found.buffers
    no_chip = found_by(autopsy(loss, shapes(256), train=True))
    assert "name one" in no_chip.notes[0]


def test_where_there_is_no_profile_the_arrays_speak(monkeypatch: pytest.MonkeyPatch) -> None:
    large = make_the_large_one()
    monkeypatch.setattr(jax.profiler, "device_memory_profile", lambda: b"not a profile")
    found = found_by(autopsy())
    assert any(one.arrays == (f"float32[{MANY[0]}]",) and one.made_by is None for one in found.buffers)
    assert "who made the buffers is not known" in found.notes[0]
    assert large.nbytes


@pytest.fixture
def profile() -> Iterator[bytes]:
    array = jnp.arange(1000.0)
    yield jax.profiler.device_memory_profile()
    assert array.nbytes


@pytest.mark.quick
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_profile_that_was_cut_short_is_refused(profile: bytes, share: float) -> None:
    whole = gzip.decompress(profile)
    for damaged in (profile[: int(len(profile) * share)], gzip.compress(whole[: int(len(whole) * 0.7) + 1])):
        with pytest.raises(ValueError, match="whole"):
            read_profile(damaged)


def test_what_a_profile_holds(profile: bytes) -> None:
    found = read_profile(profile)
    assert {one.device for one in found} >= {"cpu:0"}
    assert all(one.count > 0 for one in found)
    assert any(frame.file == __file__ for one in found for frame in one.stack)


def test_whose_frame_it_is() -> None:
    inside = Frame("bind", f"{jax.__path__[0]}/core.py", 1)
    ours = Frame("_one_step", __import__("capibara").__path__[0] + "/train/loop.py", 2)
    installed = Frame("wrapper", np.__path__[0] + "/x.py", 3)
    users = Frame("main", "/home/someone/train.py", 4)
    assert made_by((inside, ours, installed, users)) == (ours, users)
    assert made_by((inside,)) == (None, None)
