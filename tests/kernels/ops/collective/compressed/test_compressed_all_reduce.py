"""The compressed all-reduce: within its bound, the same bits everywhere, a quarter of the bytes, on trees and axes."""

from __future__ import annotations

import functools
import math
import runpy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from capibara.kernels import interpret, target, trust
from capibara.kernels.ops.collective.compressed import compressed_all_reduce, error_bound
from capibara.kernels.ops.collective.compressed.all_reduce import _whole

BYTES = runpy.run_path(str(Path(__file__).parents[5] / "benchmarks" / "collective_bytes.py"))
BOTH = ("data", "chip")


def _mesh(*shape: int) -> jax.sharding.Mesh:
    """Of one axis, "data", or of two."""
    kinds = (AxisType.Auto,) * len(shape)
    devices = jax.devices("cpu")[: math.prod(shape)]
    return jax.make_mesh(shape, BOTH[: len(shape)], axis_types=kinds, devices=devices)


def _reduce(tree: Any, axis_name: Any, **how: Any) -> Any:
    """`tree` has a row a device; the result is the same on all, and shard_map knows that it is."""
    return _reducer(axis_name, **how)(tree)


@functools.lru_cache
def _reducer(axis_name: Any, *, mesh: jax.sharding.Mesh, check_vma: bool = True, **how: Any) -> Any:
    def local(tree: Any) -> Any:
        return compressed_all_reduce(jax.tree.map(lambda x: x[0], tree), axis_name, **how)

    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=P(mesh.axis_names), out_specs=P(), check_vma=check_vma)
    )  # fmt: skip


@functools.lru_cache
def _of_eight(unbiased: bool) -> Any:
    def local(x: jax.Array, key: jax.Array) -> Any:
        made, none = compressed_all_reduce(x[0], "data", block_size=16, key=key if unbiased else None)
        assert none is None
        return made

    return jax.jit(jax.shard_map(local, mesh=_mesh(8), in_specs=(P("data"), P()), out_specs=P()))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 30), decades=st.integers(0, 12), unbiased=st.booleans())
def test_the_error_is_within_the_documented_bound(seed: int, decades: int, unbiased: bool) -> None:
    generator = np.random.default_rng(seed)
    # Every value, and every device, has a magnitude of its own.
    x = generator.standard_normal((8, 50)) * 10.0 ** generator.integers(-decades, decades + 1, (8, 50))
    x = (x * 10.0 ** generator.integers(-2, 3, (8, 1))).astype(np.float32)
    got = np.asarray(_of_eight(unbiased)(x, jax.random.key(seed)), np.float64)
    error = np.abs(got - x.astype(np.float64).sum(0))
    for start in range(0, 50, 16):
        maxima = np.abs(x[:, start : start + 16]).max(1)
        assert error[start : start + 16].max() <= error_bound(maxima, unbiased=unbiased)


@pytest.mark.quick
@pytest.mark.parametrize(("axes", "check_vma"), [("data", False), (BOTH, True)])
def test_a_tree_of_any_sizes_and_types(axes: Any, check_vma: bool) -> None:
    mesh = _mesh(8) if axes == "data" else _mesh(4, 2)
    generator = np.random.default_rng(1)
    shapes = {"w": (3, 67), "b": (5,), "one": (), "none": (0, 4), "half": (33,)}
    tree = {name: generator.standard_normal((8, *shape)).astype(np.float32) for name, shape in shapes.items()}
    # A leaf that is small beside the others keeps its own precision: it shares no block with them.
    tree["b"] *= 1e-6
    tree["half"] = jnp.asarray(tree["half"], jnp.bfloat16)
    how = {"op": "mean", "block_size": 32, "bucket_bytes": 512, "check_vma": check_vma}
    got, state = _reduce(tree, axes, mesh=mesh, **how)
    assert state is None
    for name, x in tree.items():
        assert got[name].shape == shapes[name]
        assert got[name].dtype == x.dtype
        if x.size:
            wide = np.asarray(x, np.float64).reshape(8, -1)
            bound = error_bound(np.abs(wide).max(1)) / 8
            rounding = float(jnp.finfo(x.dtype).eps) * np.abs(wide.mean(0)).max()  # to the leaf's own type
            assert np.abs(np.asarray(got[name], np.float64).reshape(-1) - wide.mean(0)).max() <= bound + rounding


def test_every_device_has_the_same_bits_and_the_key_changes_them() -> None:
    x = np.random.default_rng(2).standard_normal((8, 700)).astype(np.float32)

    def each(x: jax.Array, key: jax.Array) -> jax.Array:
        made, _ = compressed_all_reduce(x[0], "data", key=key)
        return made[None]

    run = jax.jit(jax.shard_map(each, mesh=_mesh(8), in_specs=(P("data"), P()), out_specs=P("data"), check_vma=False))
    first, again, other = (np.asarray(run(x, jax.random.key(k))) for k in (0, 0, 1))
    assert (first == first[0]).all()
    assert (first == again).all()
    assert (first != other).any()


def test_an_exact_axis_inside_a_compressed_one() -> None:
    generator = np.random.default_rng(3)
    x = generator.standard_normal((8, 300)).astype(np.float32)
    # The devices of the first inner group hold numbers that cancel: only a sum made before rounding is this small.
    x[:3] = 1000 * generator.standard_normal((3, 300))
    x[2] -= x[:3].sum(0)
    got, _ = _reduce(x, "data", mesh=_mesh(2, 4), inner_axis_name="chip", block_size=300)
    pieces = x.astype(np.float64).reshape(2, 4, 300).sum(1)
    # The inner sums are in float32: four additions, of numbers up to the largest, on each of two groups.
    bound = error_bound(np.abs(pieces).max(1)) + 2 * 4 * 2 * np.abs(x).max() * 2.0**-24
    assert np.abs(np.asarray(got) - pieces.sum(0)).max() <= bound
    flat, _ = _reduce(x, BOTH, mesh=_mesh(2, 4), block_size=300)
    assert np.abs(np.asarray(flat) - pieces.sum(0)).max() > 2 * bound


def test_a_bucket_of_empty_leaves() -> None:
    x = {"none": np.ones((4, 0, 3), np.float32), "w": np.ones((4, 5), np.float32)}
    for how in ({"axis_name": BOTH}, {"axis_name": "data", "inner_axis_name": "chip"}):
        got, _, metrics = _reduce(x, mesh=_mesh(2, 2), bucket_bytes=1, return_metrics=True, **how)  # a bucket a leaf
        assert got["none"].shape == (0, 3)
        # Ones are 127 whole steps, but for float32: two codings of four roundings each.
        np.testing.assert_allclose(got["w"], 4.0, rtol=8 * 2.0**-24)
        assert int(metrics.non_finite) == 0


def test_one_device_is_exact() -> None:
    x = np.random.default_rng(4).standard_normal((1, 100)).astype(np.float32)
    got, _ = _reduce(x, "data", mesh=_mesh(1))
    np.testing.assert_array_equal(got, x[0])


def test_what_is_not_finite_is_seen_in_its_place_and_counted() -> None:
    x = np.ones((8, 100), np.float32)
    x[2, 40], x[5, 70] = np.nan, np.inf
    got, _, metrics = _reduce(x, "data", mesh=_mesh(8), return_metrics=True)
    assert np.flatnonzero(np.isnan(got)).tolist() == [40, 70]
    assert int(metrics.non_finite) == 4  # two where they were encoded, and the two sums
    clean = _reduce(np.ones((8, 100), np.float32), "data", mesh=_mesh(8), return_metrics=True)[2]
    assert int(clean.non_finite) == 0
    assert float(clean.unsent) < 2.0**-15  # ones are 127 whole steps, but for float32
    rough = np.random.default_rng(5).standard_normal((8, 100)).astype(np.float32)
    assert 1e-4 < float(_reduce(rough, "data", mesh=_mesh(8), return_metrics=True)[2].unsent) < 2 / 127


def test_it_sends_less_than_a_third_of_the_bytes_of_float32() -> None:
    """Counted from the compiled programs of 32 devices: one byte a value for four, and four more for every 256."""
    devices = 32
    values = sum(math.prod(shape) for shape in BYTES["SHAPES"].values())
    exact, compressed = (BYTES["sent_bytes"](BYTES["program"](way, devices), devices) for way in BYTES["WAYS"][:2])
    assert exact == pytest.approx(2 * (devices - 1) / devices * 4 * values)  # the textbook's
    assert compressed <= 0.30 * exact
    # Padding to whole blocks: under a block a leaf, and under a block a device.
    padding = (len(BYTES["SHAPES"]) + devices) * 256
    assert 260 / 1024 <= compressed / exact <= 260 / 1024 * (1 + padding / values)


def test_on_a_tpu_the_kernels_are_taken_and_give_the_same_bits() -> None:
    x = np.random.default_rng(2).standard_normal((2, 4000)).astype(np.float32)

    def mapped(check_vma: bool) -> Any:
        local = lambda x: compressed_all_reduce(x[0], "data")[0]  # noqa: E731
        return jax.shard_map(local, mesh=_mesh(2), in_specs=P("data"), out_specs=P(), check_vma=check_vma)

    plain = jax.jit(mapped(True))(x)
    with target("tpu", "TPU v4"), trust("predicted"):
        lowered = jax.export.export(jax.jit(mapped(True)), platforms=["tpu"])(x).mlir_module()
        with interpret("hlo"):  # which marks nothing as varying
            emulated = jax.jit(mapped(False), compiler_options={"xla_backend_optimization_level": 0})(x)
    assert lowered.count("tpu_custom_call") == 4  # codes of both phases, and numbers of what arrives and of the result
    np.testing.assert_array_equal(plain, emulated)


def test_a_large_bucket_is_filled_up_to_whole_registers() -> None:
    """A device's share then begins with a register, and a small bucket is not filled with more than its own size."""
    assert [_whole(count, 8, 256) for count in (8 * 256, 100 * 8 * 1024)] == [8 * 256, 8 * 1024]
    assert _whole(10**9, 8, 16) == 8 * 16  # such blocks are in no register of their own


def test_the_count_reads_groups_and_kinds() -> None:
    lines = """
      %a = f32[8,4]{1,0} all-reduce(f32[8,4]{1,0} %x), replica_groups={{0,1},{2,3}}, to_apply=%add
      %b = (s8[1,16]{1,0}, s8[1,16]{1,0}) all-to-all(s8[1,16]{1,0} %p, s8[1,16]{1,0} %q), replica_groups=[2,2]<=[4]
      %c = bf16[16]{0} all-gather(bf16[4]{0} %y), channel_id=1, dimensions={0}
      %d = f32[4]{0} reduce-scatter(f32[16]{0} %z), dimensions={0}
      %e = f32[4]{0} collective-permute(f32[4]{0} %z), source_target_pairs={{0,1}}
      %f = f32[4]{0} add(f32[4]{0} %z, f32[4]{0} %z)
    """
    lines += "%g = f32[2]{0} all-reduce(f32[2]{0} %x), replica_groups={{0,2},{1,3}}, to_apply=%add"
    assert BYTES["sent_bytes"](lines, 4, across=True) == 8
    assert BYTES["sent_bytes"](lines, 4) == 8 + 2 * 128 / 2 + 32 / 2 + 32 * 3 / 4 + 64 * 3 / 4 + 16


def test_bad_input_says_what_to_do() -> None:
    x, mesh = np.ones((8, 4), np.float32), _mesh(8)
    for op in ("max", "min"):
        with pytest.raises(ValueError, match=r"is a sum or a mean.*bucketed_all_reduce"):
            _reduce(x, "data", mesh=mesh, op=op)
    with pytest.raises(ValueError, match="reduction"):
        _reduce(x, "data", mesh=mesh, op="median")
    with pytest.raises(ValueError, match="Compression is for bfloat16"):
        _reduce(np.ones((8, 4), np.int32), "data", mesh=mesh)
    with pytest.raises(ValueError, match="block_size is a positive whole number"):
        _reduce(x, "data", mesh=mesh, block_size=2.5)
    with pytest.raises(ValueError, match="bucket_bytes is a positive whole number"):
        _reduce(x, "data", mesh=mesh, bucket_bytes=0)
    with pytest.raises(ValueError, match="are different axes"):
        _reduce(x, BOTH, mesh=_mesh(4, 2), inner_axis_name="chip")
    with pytest.raises(ValueError, match="has no derivative"):
        jax.grad(lambda x: _reduce(x, "data", mesh=mesh)[0].sum())(x)
    with pytest.raises(ValueError, match=r"with inner_axis_name .*Got inner_axis_name='fast'.*Fix: call it inside"):
        _reduce(x, "data", mesh=mesh, inner_axis_name="fast")
    # It takes no global arrays, so that is no advice.
    with pytest.raises(ValueError, match=r"Fix: call it inside jax\.shard_map\.$"):
        compressed_all_reduce(x, "data")
    for bad in ([], [1.0, -1.0]):
        with pytest.raises(ValueError, match="block_maxima has a magnitude for each device"):
            error_bound(bad)
