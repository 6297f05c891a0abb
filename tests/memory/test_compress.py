"""Compression keeps to its bound for every type, at its extremes too, and loses nothing the second time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from capibara.memory.compress import CODES, _packers, pack, packed_bytes, packing_bytes, unpack, unpack_on_host
from capibara.memory.live import bytes_by_device


def extremes(dtype: str) -> np.ndarray:
    most = float(jnp.finfo(dtype).max)
    rows = np.random.default_rng(0).standard_normal((6, 33))
    rows[0] = 0
    rows[1] *= most / np.abs(rows[1]).max()
    rows[2] *= 1e-6
    rows[3, 0] = 100.0
    rows[4] = np.linspace(-1, 1, 33)
    return np.asarray(jnp.asarray(np.clip(rows, -most, most), dtype))


@pytest.mark.quick
@pytest.mark.parametrize(("code", "dtype"), [(code, dtype) for code, dtypes in CODES.items() for dtype in dtypes])
def test_the_error_is_within_its_bound_and_never_grows(code: str, dtype: str) -> None:
    values = extremes(dtype) if code == "int8" else extremes(dtype) / 2  # the largest float32 is no bfloat16
    packed = pack(jnp.asarray(values), code)
    assert packed is not None
    back = unpack(packed)
    assert back.dtype == values.dtype
    exact, got = values.astype(np.float64), np.asarray(back).astype(np.float64)
    worst = np.abs(got - exact).max()
    assert worst <= packed.error_bound
    assert packed.measured_error == pytest.approx(worst, rel=1e-6)
    row = np.abs(exact).max(axis=-1, keepdims=True)
    share = row / 127 if code == "int8" else np.abs(exact) / 256
    assert (np.abs(got - exact) <= np.maximum(share, 2.0**-25) * (1 + 1e-6)).all()
    again = pack(back, code)
    assert again is not None
    assert again.measured_error == 0
    np.testing.assert_array_equal(np.asarray(unpack(again)), np.asarray(back))
    on_host = unpack_on_host(
        np.asarray(packed.values), None if packed.scales is None else np.asarray(packed.scales), values.dtype
    )
    np.testing.assert_array_equal(on_host, np.asarray(back))


@pytest.mark.parametrize("worst", [np.nan, np.inf])
def test_what_has_no_code_is_not_packed(worst: float) -> None:
    values = np.ones((64, 64), np.float32)
    values[5, 7] = worst
    assert pack(jnp.asarray(values), "int8") is None
    assert pack(jnp.asarray(values), "bfloat16") is None


def test_a_number_that_bfloat16_does_not_reach() -> None:
    assert pack(jnp.asarray([[np.finfo(np.float32).max]]), "bfloat16") is None


@pytest.mark.quick
@pytest.mark.parametrize("code", ["bfloat16", "int8"])
def test_packing_takes_no_more_than_it_says(code: str) -> None:
    x = jnp.ones((256, 256))
    said = packing_bytes(code, x.shape, x.sharding)[jax.devices()[0]]
    scales_of, values_of, loss_of = _packers(code, "float32", x.sharding)
    scales = scales_of(x)
    values = values_of(x, scales)
    for program, args in ((scales_of, (x,)), (values_of, (x, scales)), (loss_of, (x, values, scales))):
        used = program.lower(*args).compile().memory_analysis()
        beside = max(used.argument_size_in_bytes - x.nbytes, 0)
        assert used.temp_size_in_bytes + used.output_size_in_bytes + beside <= said + 1024


@pytest.mark.quick
def test_a_divided_tensor_stays_where_it_lies() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:8])
    place = NamedSharding(mesh, PartitionSpec("data", "model"))
    values = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
    packed = pack(jax.device_put(values, place), "int8")
    assert packed is not None
    assert packed.values.sharding == place
    assert unpack(packed).sharding == place
    taken: dict[object, int] = {}
    for array in packed.arrays:
        for device, count in bytes_by_device(array.shape, array.dtype, array.sharding).items():
            taken[device] = taken.get(device, 0) + count
    most = packed_bytes("int8", values.shape, place)
    assert all(taken[device] <= most[device] for device in taken)


@pytest.mark.quick
def test_types_that_it_does_not_make_smaller_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Got int32\[4\]"):
        pack(jnp.arange(4), "int8")
    with pytest.raises(ValueError, match="Unknown code"):
        pack(jnp.ones(4), "int4")
