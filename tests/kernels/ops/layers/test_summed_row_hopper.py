"""The Hopper kernel of summed_row: its numbers and synchronisation by emulation, its cuts, what it refuses."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.kernels.pallas import hopper_emulator as emulator

from capibara.kernels import few_rows, summed_row, target, trust
from capibara.kernels.lab.check import check_output, expected
from capibara.kernels.ops.layers.activation import formulas
from capibara.kernels.ops.layers.few_rows.hopper import forward as stream
from capibara.kernels.ops.layers.few_rows.hopper.forward import WeightStreamConfig, few_rows_hopper, program_bytes
from capibara.kernels.ops.layers.summed_row import api
from capibara.kernels.ops.layers.summed_row.api import SUMMED_ROW
from capibara.kernels.ops.layers.summed_row.hopper import IMPLEMENTATION, forward
from capibara.kernels.ops.layers.summed_row.hopper.forward import candidates, summed_row_hopper
from capibara.kernels.pallas.hopper import SMEM_BYTES

BF16 = jnp.dtype("bfloat16")


class _FirstRows:
    """The first rows of the tiles [tile, 8, 64] that swizzled memory [piece, 8, depth] is made of, as they lie."""

    def __init__(self, whole: emulator.Ref) -> None:
        self.whole = whole

    @property
    def at(self) -> Any:
        return emulator._At(self)

    def narrow(self, index: Any) -> _FirstRows:
        every, columns = index
        assert every == slice(None)
        assert (columns.start, columns.size) == (0, 64)
        return self

    def store(self, value: Any) -> None:
        pieces, _, depth = self.whole.array.shape
        assert value.shape == (pieces * depth // 64, 64)
        assert value.dtype == self.whole.dtype
        self.whole.array[:, 0] = value.reshape(pieces, depth)


def _as_first_rows(whole: Callable[[], Any], tiles: Callable[[], Any]) -> Callable[[], Any]:
    def make() -> tuple[Any, Any]:
        ref = whole()
        assert tiles().array.size == ref.array.size
        return ref, _FirstRows(ref)

    return make


def _late(prepare: Callable[..., None]) -> Callable[..., None]:
    """So late that who does not wait for the row reads memory that nobody wrote."""

    def late(*given: Any, **options: Any) -> None:
        time.sleep(0.1)
        prepare(*given, **options)

    return late


@contextlib.contextmanager
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with emulator.emulated(stream, forward, formulas), monkeypatch.context() as patched:
        patched.setattr(stream, "plgpu", emulator._Shim(stream.plgpu, RefUnion=_as_first_rows))
        patched.setattr(stream, "sum_of", lambda x, layout, scratch: x.sum(dtype=np.float32))
        patched.setattr(stream, "prepare", _late(stream.prepare))
        yield


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("a-tile", WeightStreamConfig(64, 64, 2)),  # a ring that comes round
        ("one-part", WeightStreamConfig(64, 128, 2)),
        ("float16", WeightStreamConfig(128, 64, 3, splits=2)),
        ("int8-a-tile", WeightStreamConfig(64, 128, 2)),  # one warpgroup, and the row before the third piece
        ("int8-a-tile", WeightStreamConfig(64, 256, 2, sharers=2)),  # the other waits for the row, too
    ],
)
def test_emulated(name: str, config: WeightStreamConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    case = SUMMED_ROW.case(name)
    arrays, params = case.arrays(), {"gate": None, "out_parts": None, **case.params}
    with emulated(monkeypatch):
        found = jax.block_until_ready(summed_row_hopper(*arrays, config=config, eps=1e-6, **params))
    result = check_output(found, expected(SUMMED_ROW, arrays, case.params))
    assert result.ok, result.why


@pytest.mark.quick
def test_started_early_it_awaits_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    case, config = SUMMED_ROW.case("a-tile"), WeightStreamConfig(64, 64, 2)
    arrays, params = case.arrays(), {"gate": None, "out_parts": None, **case.params}

    def run() -> Any:
        with emulated(monkeypatch), emulator.started_early(arrays[3].shape):
            return jax.block_until_ready(summed_row_hopper(*arrays, config=config, eps=1e-6, **params))

    result = check_output(run(), expected(SUMMED_ROW, arrays, case.params))
    assert result.ok, result.why
    monkeypatch.setattr(stream, "await_previous", lambda: None)
    with pytest.raises(Exception, match="read before the kernel before is done"):
        run()


def test_many_pieces_of_eight_bits_wait_for_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight is fetched on only after the row was added up: five pieces, two of them before."""
    draw = np.random.default_rng(0)
    weight = jnp.asarray(draw.integers(-128, 128, (128, 640), np.int8))
    scale = jnp.asarray(draw.uniform(0.5, 2, 128).astype(np.float32) / 1024)
    parts = jnp.asarray(draw.standard_normal((3, 1, 640), np.float32))
    residual, norm = (jnp.asarray(draw.standard_normal(s, np.float32)).astype(BF16) for s in ((1, 640), (640,)))
    arrays = parts, residual, norm, weight, scale
    with emulated(monkeypatch):
        found = jax.block_until_ready(
            summed_row_hopper(*arrays, config=WeightStreamConfig(64, 128, 4), gate=None, eps=1e-6, out_parts=None)
        )
    result = check_output(found, expected(SUMMED_ROW, arrays, {}))
    assert result.ok, result.why


@pytest.mark.parametrize("int8", [False, True])
def test_a_product_in_parts_is_cut_where_the_reference_cuts_it(int8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(1)
    x = jnp.asarray(draw.standard_normal((8, 512), np.float32)).astype(BF16)
    weight = jnp.asarray(draw.integers(-9, 10, (128, 512))).astype(jnp.int8 if int8 else BF16)
    scale = {"weight_scale": jnp.full(128, 0.5)} if int8 else {}
    config = WeightStreamConfig(64, 128, 2, splits=4)
    with emulator.emulated(stream, formulas):
        found = jax.block_until_ready(
            few_rows_hopper(x, weight, **scale, config=config, gate=None, eps=1e-6, out_parts=4)
        )
    wanted = few_rows(x, weight, **scale, out_parts=4, implementation="reference")
    assert found.dtype == jnp.float32
    assert found.shape == (4, 8, 128)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=512 * 2.0**-22 * 30)


@pytest.mark.quick
def test_cuts_fit_beside_the_row_and_are_deep_where_they_can_be() -> None:
    with target("gpu", "NVIDIA H200"):
        for case in SUMMED_ROW.cases:
            call = SUMMED_ROW.call(*case.args(), **case.params)
            if IMPLEMENTATION.refusal(call) is not None:
                continue
            inner, weight = case.shapes[1][1], case.args()[3]
            configs = candidates(call)
            for config in configs:
                gated = "gate" in case.params
                taken = program_bytes(config, 1, gated=gated, weight_dtype=weight.dtype, summed=inner)
                assert taken <= SMEM_BYTES + 1024
                assert config.splits == case.params.get("out_parts", 1)
            assert configs[0].stages >= 4 or not case.name.startswith("llama")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("rows", "parts", "inner", "outputs", "dtype", "said"),
    [
        (2, 2, 128, 128, "bfloat16", "one row, not 2"),
        (1, 9, 128, 128, "bfloat16", "up to 8 parts, not 9"),
        (1, 2, 128, 128, "float32", "not float32"),
        (1, 2, 192, 128, "bfloat16", "multiple of 128 up to 8192"),
        (1, 2, 128, 64, "bfloat16", "from 128"),
        (1, 2, 16384, 128, "bfloat16", "up to 8192"),
    ],
)
def test_what_is_refused(rows: int, parts: int, inner: int, outputs: int, dtype: str, said: str) -> None:
    def like(*shape: int, dtype: str = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    given = like(parts, rows, inner, dtype="float32"), like(rows, inner), like(inner), like(outputs, inner)
    with target("gpu", "NVIDIA H200"):
        assert re.search(said, str(IMPLEMENTATION.refusal(SUMMED_ROW.call(*given))))
    with target("gpu", "NVIDIA A100-SXM4-80GB"):
        assert "Hopper" in str(IMPLEMENTATION.refusal(SUMMED_ROW.call(*given)))


def _like(name: str) -> list[Any]:
    return [x if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in SUMMED_ROW.case(name).args()]


@pytest.mark.quick
def test_it_is_taken_where_it_was_seen_to_be_faster() -> None:
    """A wide row leaves a 16-bit weight too little room."""
    with target("gpu", "NVIDIA H200"):
        taken = {name: api.has_kernel(*_like(f"llama-{name}-gated"), gate="silu") for name in ("1b", "8b", "8b-int8")}
        assert taken == {"1b": True, "8b": False, "8b-int8": True}
        assert api.parts_to_leave(*_like("llama-1b-qkv")) == 4
        wider = (4, 1, 8192), (1, 8192), (8192,), (512, 8192), (512,)
        types = "float32", "bfloat16", "bfloat16", "int8", "float32"
        given = [jax.ShapeDtypeStruct(s, jnp.dtype(t)) for s, t in zip(wider, types, strict=True)]
        assert not api.has_kernel(*given)  # not timed
        with trust("predicted"):
            assert api.has_kernel(*_like("llama-8b-gated"), gate="silu")
    assert not api.has_kernel(*_like("llama-1b-gated"), gate="silu")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"parts": jnp.zeros((1, 8))}, "parts is .parts, rows, K."),
        ({"parts": jnp.zeros((2, 1, 8), BF16)}, "parts are float32"),
        ({"scale": jnp.zeros(4)}, "one number a column"),
        ({"weight": jnp.zeros((8, 4))}, "held by output"),
        ({"weight": jnp.zeros((4, 8), jnp.int8)}, "come together"),
        ({"weight": jnp.zeros((4, 8), BF16)}, "one type"),
        ({"gate": "none"}, "gate of summed_row"),
        ({"gate": "silu", "weight": jnp.zeros((3, 8))}, "as many of up"),
        ({"out_parts": 3}, "out_parts divides"),
        ({"out_parts": 2, "gate": "silu"}, "before a gate"),
        ({"eps": 0.0}, "eps is a finite float"),
    ],
)
def test_bad_calls_say_what_is_wrong(change: dict[str, Any], said: str) -> None:
    given = {"parts": jnp.zeros((2, 1, 8)), "residual": jnp.zeros((1, 8)), "scale": jnp.ones(8)}
    with pytest.raises(ValueError, match=said):
        summed_row(**{**given, "weight": jnp.zeros((4, 8)), **change})
