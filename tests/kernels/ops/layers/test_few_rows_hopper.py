"""The Hopper kernels of few_rows: their numbers and synchronisation by emulation, their cuts, what they refuse."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.kernels.pallas import hopper_emulator as emulator

from capibara.kernels import target
from capibara.kernels.ops.layers.activation import formulas
from capibara.kernels.ops.layers.few_rows.api import FEW_ROWS
from capibara.kernels.ops.layers.few_rows.hopper import IMPLEMENTATION, forward, join
from capibara.kernels.ops.layers.few_rows.hopper.forward import (
    WeightStreamConfig,
    candidates,
    few_rows_hopper,
    fill,
    program_bytes,
)
from capibara.kernels.pallas.hopper import SMEM_BYTES

BF16 = jnp.dtype("bfloat16")


class _Tiles:
    """The tiles [stage, eight, atom, 8, 64] that a reference [stage, rows, columns] to swizzled memory is made of."""

    def __init__(self, whole: emulator.Ref) -> None:
        self.whole = whole

    @property
    def at(self) -> Any:
        return emulator._At(self)

    def narrow(self, index: Any) -> emulator.Ref:
        if len(index) == 2:
            return _AllTiles(self.whole, *index)
        stage, eight, atom, rows = index
        start = int(eight) * 8 + int(rows.start)
        columns = slice(int(atom) * 64, int(atom) * 64 + 64)
        return self.whole.narrow((stage, slice(start, start + rows.size), columns))


class _AllTiles:
    """The tiles [atom, 8, 64] of eight rows of a stage, as one copy writes them."""

    tiled = False

    def __init__(self, whole: emulator.Ref, stage: Any, eight: int) -> None:
        self.rows = whole.narrow((stage, slice(eight * 8, eight * 8 + 8)))

    def write(self, value: Any) -> None:
        self.rows.write(value.swapaxes(0, 1).reshape(self.rows.shape))


def _as_tiles(whole: Callable[[], Any], tiles: Callable[[], Any]) -> Callable[[], Any]:
    def make() -> tuple[Any, Any]:
        ref = whole()
        stages, rows, columns = ref.array.shape
        assert tiles().array.shape == (stages, rows // 8, columns // 64, 8, 64)
        return ref, _Tiles(ref)

    return make


@contextlib.contextmanager
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with emulator.emulated(forward, join, formulas), monkeypatch.context() as patched:
        patched.setattr(forward, "plgpu", emulator._Shim(forward.plgpu, RefUnion=_as_tiles))
        yield


def _normal(seed: int, *shape: int, dtype: Any = BF16) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32)).astype(dtype)


def _within(found: Any, wanted: Any, units: float, length: int) -> None:
    """So many roundings of the result's type, and sqrt(length) of the float32 sums, of the largest number."""
    roundoff = float(jnp.finfo(found.dtype).eps) / 2
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    assert found.shape == wanted.shape
    largest = np.abs(wanted).max()
    assert np.all(np.abs(found - wanted) <= units * roundoff * np.abs(wanted) + 8 * 2.0**-24 * length**0.5 * largest)


def _exact(x: Any, weight: Any) -> np.ndarray:
    return np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T


@pytest.mark.parametrize("rows", [1, 5, 8, 12, 24])
@pytest.mark.parametrize(
    "config",
    [
        WeightStreamConfig(64, 64, 2),  # a ring that comes round
        WeightStreamConfig(128, 64, 3, splits=2),  # five steps in parts of three and two
        WeightStreamConfig(64, 64, 8, splits=4),  # two, two, one and none
    ],
)
def test_products(rows: int, config: WeightStreamConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = _normal(rows, rows, 320), _normal(7, 256, 320)
    with emulated(monkeypatch):
        y = jax.block_until_ready(few_rows_hopper(x, weight, config=config, gate=None, eps=1e-6))
    assert y.dtype == BF16
    _within(y, _exact(x, weight), 1, 320)


EARLY = {
    "a ring that comes round": (24, WeightStreamConfig(64, 64, 2), {}),
    "splits, of which one has nothing": (24, WeightStreamConfig(64, 64, 8, splits=4), {}),
    "one row": (1, WeightStreamConfig(64, 64, 3), {}),
    "gated": (5, WeightStreamConfig(64, 64, 6), {"gate": "silu"}),
    "joined": (12, WeightStreamConfig(64, 64, 3, splits=2), {"residual": True}),
    "8 bits": (8, WeightStreamConfig(64, 128, 2, sharers=1), {"int8": True}),
}


def _run_early(name: str, monkeypatch: pytest.MonkeyPatch, *, early: bool) -> Any:
    rows, config, asked = EARLY[name]
    inner = 384 if "int8" in asked else 320
    x, weight, weight_scale = _normal(rows, rows, inner), _normal(7, 256, inner), None
    if "int8" in asked:
        weight, weight_scale = jnp.round(20 * weight).astype(jnp.int8), jnp.full(256, 0.05, jnp.float32)
    beside = (_normal(3, rows, 256), _normal(4, 256)) if "residual" in asked else (None, None)
    given = x, weight, *beside, weight_scale
    held = emulator.started_early(weight.shape, (256,)) if early else contextlib.nullcontext()
    with emulated(monkeypatch), held:
        run = jax.jit(lambda *given: few_rows_hopper(*given, config=config, gate=asked.get("gate"), eps=1e-6))
        return jax.block_until_ready(run(*given))


@pytest.mark.quick
@pytest.mark.parametrize("name", EARLY)
def test_started_early_it_gives_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And touches nothing but the weight before the kernel before is done."""
    for found, wanted in zip(
        jax.tree.leaves(_run_early(name, monkeypatch, early=True)),
        jax.tree.leaves(_run_early(name, monkeypatch, early=False)),
        strict=True,
    ):
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(wanted, np.float32))


@pytest.mark.quick
@pytest.mark.parametrize(("name", "module"), [("one row", forward), ("joined", join)])
def test_who_does_not_await_the_kernel_before_is_found_out(
    name: str, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "await_previous", lambda: None)
    with pytest.raises(Exception, match=r"before the kernel before is done|does not await"):
        _run_early(name, monkeypatch, early=True)


@pytest.mark.parametrize("gate", ["silu", "gelu", "gelu_tanh", "relu"])
def test_gates(gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program's outputs of either half meet, the gate's first."""
    dtype = jnp.float16 if gate == "relu" else BF16
    x, weight = _normal(1, 3, 256, dtype=dtype), _normal(2, 256, 256, dtype=dtype)
    with emulated(monkeypatch):
        y = jax.block_until_ready(
            few_rows_hopper(x, weight, config=WeightStreamConfig(64, 128, 2), gate=gate, eps=1e-6)
        )
    first, second = np.split(_exact(x, weight).astype(np.float32), 2, axis=1)
    act = {"silu": jax.nn.silu, "gelu": lambda z: jax.nn.gelu(z, approximate=False), "gelu_tanh": jax.nn.gelu,
           "relu": jax.nn.relu}[gate]  # fmt: skip
    assert y.dtype == dtype
    _within(y, np.asarray(act(first)) * second, 1.1, 256)


@pytest.mark.parametrize(("rows", "splits"), [(1, 4), (9, 2), (8, 1)])
def test_residual_and_norm(rows: int, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, residual, scale = _normal(1, rows, 256), _normal(2, 256, 256), _normal(3, rows, 256), _normal(4, 256)
    with emulated(monkeypatch):
        total, normal = jax.block_until_ready(
            few_rows_hopper(
                x, weight, residual, scale, config=WeightStreamConfig(64, 64, 4, splits), gate=None, eps=1e-3
            )
        )
    wanted = _exact(x, weight) + np.asarray(residual, np.float64)
    _within(total, wanted, 1, 256)
    # Of what was rounded: the norm adds one rounding of its own.
    wide = np.asarray(total, np.float64)
    spread = 1 / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-3)
    _within(normal, wide * spread * np.asarray(scale, np.float64), 1.1, 256)


def _eight_bits(seed: int, outputs: int, inner: int) -> tuple[Any, Any, np.ndarray]:
    """(8-bit numbers, the scales of their outputs, their products)."""
    draw = np.random.default_rng(seed)
    weight = draw.integers(-128, 128, (outputs, inner), np.int8)
    scale = draw.uniform(0.5, 2, outputs).astype(np.float32) / 1024
    return jnp.asarray(weight), jnp.asarray(scale), weight.astype(np.float64) * scale.astype(np.float64)[:, None]


@pytest.mark.parametrize(
    ("rows", "config"),
    [
        (1, WeightStreamConfig(64, 256, 2, sharers=2)),  # a ring that comes round
        (8, WeightStreamConfig(128, 256, 2, splits=2, sharers=2)),
        (5, WeightStreamConfig(64, 128, 3)),  # one warpgroup
        (24, WeightStreamConfig(64, 512, 2, splits=2, sharers=2)),
        (1, WeightStreamConfig(64, 512, 2, sharers=4)),
        (12, WeightStreamConfig(128, 512, 2, splits=2, sharers=4)),
        (12, WeightStreamConfig(64, 256, 3, splits=8, sharers=2)),  # some programs have nothing to do
    ],
)
@pytest.mark.parametrize("out_dtype", [None, "float32"])
def test_eight_bits(rows: int, config: WeightStreamConfig, out_dtype: str | None, monkeypatch: Any) -> None:
    x, (weight, scale, wide) = _normal(rows, rows, 1024), _eight_bits(7, 256, 1024)
    with emulated(monkeypatch):
        y = jax.block_until_ready(
            few_rows_hopper(x, weight, weight_scale=scale, config=config, gate=None, eps=1e-6, out_dtype=out_dtype)
        )
    assert y.dtype == (out_dtype or BF16)
    _within(y, _exact(x, wide), 1, 1024)


@pytest.mark.parametrize(("dtype", "sharers"), [(jnp.bfloat16, 2), (jnp.float16, 2), (jnp.bfloat16, 4)])
def test_eight_bits_and_a_gate(dtype: Any, sharers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both halves have scales of their own, and are scaled before the gate; four warpgroups are two for each half."""
    config = WeightStreamConfig(64, 256, 2, sharers=sharers)
    x, (weight, scale, wide) = _normal(1, 3, 512, dtype=dtype), _eight_bits(2, 256, 512)
    with emulated(monkeypatch):
        y = jax.block_until_ready(few_rows_hopper(x, weight, weight_scale=scale, config=config, gate="silu", eps=1e-6))
    first, second = np.split(_exact(x, wide).astype(np.float32), 2, axis=1)
    assert y.dtype == dtype
    _within(y, np.asarray(jax.nn.silu(first)) * second, 1.1, 512)


@pytest.mark.parametrize(("rows", "splits"), [(1, 4), (9, 1)])
def test_eight_bits_with_residual_and_norm(rows: int, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, residual, norm_scale = _normal(1, rows, 1024), _normal(3, rows, 256), _normal(4, 256)
    weight, scale, wide = _eight_bits(2, 256, 1024)
    with emulated(monkeypatch):
        total, normal = jax.block_until_ready(
            few_rows_hopper(
                x,
                weight,
                residual,
                norm_scale,
                scale,
                config=WeightStreamConfig(64, 256, 2, splits, sharers=2),
                gate=None,
                eps=1e-3,
            )
        )
    _within(total, _exact(x, wide) + np.asarray(residual, np.float64), 1, 1024)
    exact = np.asarray(total, np.float64)
    spread = 1 / np.sqrt((exact**2).mean(1, keepdims=True) + 1e-3)
    _within(normal, exact * spread * np.asarray(norm_scale, np.float64), 1.1, 256)


@pytest.mark.quick
def test_eight_bits_are_cut_deep_enough() -> None:
    with pytest.raises(ValueError, match="128 deep at least"):
        few_rows_hopper(
            _normal(0, 1, 128), *_eight_bits(1, 128, 128)[:1], weight_scale=jnp.ones(128),
            config=WeightStreamConfig(depth=64), gate=None, eps=1e-6,
        )  # fmt: skip


@pytest.mark.quick
def test_cuts_fill_the_chip_and_fit_its_memory() -> None:
    with target("gpu", "NVIDIA H200"):
        for case in FEW_ROWS.cases:
            call = FEW_ROWS.call(*case.args(), **case.params)
            if IMPLEMENTATION.refusal(call) is not None:
                continue
            gated = "gate" in case.params
            configs = candidates(call)
            for config in configs:
                taken = program_bytes(config, case.shapes[0][0], gated=gated, weight_dtype=case.args()[1].dtype)
                assert taken <= SMEM_BYTES + 1024
                assert not gated or config.splits == 1
            if case.name.startswith("llama"):
                held = case.shapes[1][0] // (2 if gated else 1)
                alone = not gated and case.shapes[2] is None  # a sum of its parts would be a pass more
                least = 0.45 if alone else 0.84
                assert fill(held // configs[0].outputs, configs[0].splits, 132) > least, (case.name, configs[0])
                assert not alone or configs[0].splits == 1


@pytest.mark.quick
@pytest.mark.parametrize(
    ("shapes", "dtype", "said"),
    [
        (((65, 128), (128, 128)), "bfloat16", "1 to 64 rows, not 65"),
        (((1, 128), (128, 128)), "float32", "not float32"),
        (((1, 96), (128, 96)), "bfloat16", "multiples of 64"),
        (((1, 128), (64, 128)), "bfloat16", "from 128"),
        (((1, 128), (192, 128), (1, 192), (192,)), "bfloat16", "multiple of 128 numbers"),
        (((1, 192), (128, 192), None, None, (128,)), "bfloat16", "8-bit weights .* multiple of 128, not 192"),
    ],
)
def test_what_is_refused(shapes: Any, dtype: str, said: str) -> None:
    given = [None if s is None else jax.ShapeDtypeStruct(s, jnp.dtype(dtype)) for s in shapes]
    if len(given) == 5:
        given[1] = jax.ShapeDtypeStruct(shapes[1], jnp.int8)
    with target("gpu", "NVIDIA H200"):
        call = FEW_ROWS.call(*given)
        assert re.search(said, str(IMPLEMENTATION.refusal(call)))
    with target("gpu", "NVIDIA A100-SXM4-80GB"):
        assert "Hopper" in str(IMPLEMENTATION.refusal(FEW_ROWS.call(*call.args)))


@pytest.mark.quick
def test_a_gated_product_is_not_split() -> None:
    with pytest.raises(ValueError, match="not split"):
        few_rows_hopper(
            _normal(0, 1, 128), _normal(1, 256, 128), config=WeightStreamConfig(splits=2), gate="silu", eps=1e-6
        )
