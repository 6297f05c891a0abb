"""The Hopper kernels of causal_conv1d: their numbers and their synchronisation emulated, and how work is cut."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.kernels.pallas import hopper_emulator as emulator

from capibara.kernels import causal_conv1d, explain, target, trust
from capibara.kernels.core.spec import Case
from capibara.kernels.lab.check import check_output, expected
from capibara.kernels.ops.conv import CAUSAL_CONV1D, CAUSAL_CONV1D_GRAD
from capibara.kernels.ops.conv.causal1d.cases import case, grad_case
from capibara.kernels.ops.conv.causal1d.hopper import backward, forward, walk
from capibara.kernels.ops.conv.causal1d.hopper.walk import Cut, WalkConfig, cut_channels, splits_for
from capibara.kernels.ops.layers.activation import tanh_formulas

NONE: frozenset[str] = frozenset()
H200 = "NVIDIA H200"

CASES = [
    # Three stretches of two and three tiles, the last one past the end, and a piece of the channels past the last.
    (case("stretches", (2, 29, 768), 4, NONE, activation="silu"), WalkConfig(4, 4, 2, 3)),
    # More tiles than a ring holds, in one stretch.
    (case("ring", (1, 21, 512), 3, NONE, weights="float32"), WalkConfig(2, 4, 3, 1)),
    # A filter that reaches past tiles and past the one after a stretch, and fills the ring; lines of 64 channels.
    (case("far", (1, 17, 320), 8, NONE, activation="silu", bias=False), WalkConfig(2, 2, 7, 2)),
    (case("half", (2, 5, 256), 2, NONE, dtype="float16"), WalkConfig(4, 2, 4, 2)),
    (case("wide", (1, 6, 128), 4, NONE, dtype="float32", bias=False, return_final_state=True), WalkConfig(4, 1, 2, 2)),
    # A time shorter than the filter, whose last inputs begin with zeros.
    (case("short", (2, 2, 256), 4, NONE, dtype="float32", return_final_state=True), WalkConfig(8, 2, 2, 1)),
]  # fmt: skip


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize(("case", "config"), CASES, ids=lambda x: getattr(x, "name", None))
def test_emulated(case: Case, config: WalkConfig) -> None:
    with emulator.emulated(forward, backward, walk, tanh_formulas):
        arrays = case.arrays()
        params = {"activation": None, "return_final_state": False, **case.params}
        out = jax.jit(functools.partial(forward.conv_forward, config=config, **params))(*arrays)
        result = check_output(out, expected(CAUSAL_CONV1D, arrays, case.params))
        assert result.ok, result.why

        # The cotangent of the last inputs is XLA's to take.
        back = grad_case(case)
        arrays = (*back.arrays()[:5], None)
        asked = {"activation": None, **back.params}
        out = jax.jit(functools.partial(backward.conv_backward, config=config, **asked))(*arrays)
        result = check_output(out, expected(CAUSAL_CONV1D_GRAD, arrays, back.params))
        assert result.ok, result.why


@pytest.mark.quick
@pytest.mark.parametrize("channels", [256, 512])
def test_the_last_tile_of_a_sequence_leaves_the_next_one_alone(channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator drops what a copy writes past the end of any axis; JAX's plain copy, which it takes for one run of
    memory, only what is past the end of the array."""
    copied: list[Any] = []

    def to_memory(source: Any, place: Any, **more: Any) -> None:
        sequence, (first, count), lines, width = place.part
        if (lines, width) == ((0, place.array.shape[2]), (0, place.array.shape[3])):
            assert first + count <= place.array.shape[1], f"rows {first}:{first + count} of sequence {sequence}"
            copied.append(count)
        emulate(source, place, **more)

    emulate = emulator._to_gmem
    monkeypatch.setattr(emulator, "_to_gmem", to_memory)
    made = case("rest", (2, 13, channels), 3, NONE)
    config = WalkConfig(4, channels // 128, 3, 2)
    with emulator.emulated(forward, backward, walk, tanh_formulas):
        arrays, back = made.arrays(), grad_case(made).arrays()
        params: dict[str, Any] = {"activation": None, "return_final_state": False}
        y = jax.jit(functools.partial(forward.conv_forward, config=config, **params))(*arrays)
        assert check_output(y, expected(CAUSAL_CONV1D, arrays, {})).ok
        dx = jax.jit(functools.partial(backward.conv_backward, config=config, activation=None))(*back)
        assert check_output(dx, expected(CAUSAL_CONV1D_GRAD, back, {})).ok
    assert sorted(copied) == [1] * 4 + [4] * 12  # both passes, three whole tiles of a sequence and the rest


def test_a_stretch_takes_in_what_lies_behind_it_and_nothing_else() -> None:
    """One cotangent alone, behind the first stretch: it reaches three inputs of it, and sums of the second alone."""
    x, w, *_ = case("one", (1, 16, 256), 4, NONE, dtype="float32", bias=False).arrays()
    config = WalkConfig(4, 2, 2, 2)
    flow = jnp.zeros_like(x).at[0, 8].set(1.0)
    with emulator.emulated(forward, backward, walk, tanh_formulas):
        run = jax.jit(functools.partial(backward.conv_backward, config=config, activation=None))
        dx, dw, _, _ = run(x, w, None, None, flow)
    np.testing.assert_array_equal(dx[0, 5:9], w)
    assert not np.asarray(dx[0, :5]).any()
    assert not np.asarray(dx[0, 9:]).any()
    np.testing.assert_array_equal(dw, x[0, 5:9])


@pytest.mark.quick
def test_channels_are_cut_in_whole_lines() -> None:
    assert cut_channels(1536, 4) == Cut(6, 256, 2, 4)
    assert cut_channels(5376, 4) == Cut(21, 256, 2, 4)
    assert Cut(21, 256, 2, 4).pieces == 11
    assert cut_channels(320, 2) == Cut(5, 64, 4, 2)
    assert cut_channels(256, 4) is None  # fewer than 128 threads have channels for
    assert cut_channels(1000, 2) is None


@pytest.mark.quick
def test_splits_fill_the_chip_once_or_often() -> None:
    slots = 132 * 4
    # (sequences times pieces, tiles): a short model fills the chip in one round.
    assert 6 * splits_for(6, 256, slots) <= slots
    assert 6 * splits_for(6, 256, slots) > slots / 2
    # Where 528 programs run at a time, 704 would leave a second round for 176 of them; stretches fill several.
    programs = 704 * splits_for(704, 60, slots)
    assert programs / slots / -(-programs // slots) > 0.9
    assert splits_for(10_000, 1, slots) == 1


@pytest.mark.quick
def test_long_filters_have_fewer_channels_a_thread() -> None:
    """The gradient of eight taps would take 322 registers for eight channels, and there are 255."""
    x, w = jax.ShapeDtypeStruct((2, 100, 2048), jnp.bfloat16), jax.ShapeDtypeStruct((8, 2048), jnp.bfloat16)
    with target("gpu", H200):
        call = CAUSAL_CONV1D_GRAD.call(x, w, None, None, x, activation="silu")
        assert {config.vector for config in backward.candidates(call)} == {2, 4}
        assert CAUSAL_CONV1D_GRAD.implementations["hopper"].refusal(call) is None


@pytest.mark.parametrize("activation", [None, "silu"])
def test_every_config_lowers_for_cuda(activation: str | None) -> None:
    x, w, bias = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 100, 1536), (4, 1536), (1536,)))
    with target("gpu", H200):
        for op, args in ((CAUSAL_CONV1D, (x, w, bias)), (CAUSAL_CONV1D_GRAD, (x, w, bias, None, x))):
            configs = op.implementations["hopper"].candidates(op.call(*args, activation=activation))
            assert {c.vector for c in configs} == {2, 4, 8}
            for config in configs if activation else configs[:1]:
                asked = functools.partial(op, implementation="hopper", config=config, activation=activation)

                def call(*given: Any, asked: Any = asked, args: Any = args) -> Any:
                    present = iter(given)
                    return asked(*(None if a is None else next(present) for a in args))

                lowered = jax.export.export(jax.jit(call), platforms=["cuda"])(*(a for a in args if a is not None))
                assert "mosaic_gpu" in lowered.mlir_module()


def _taken(shape: tuple[int, int, int], dtype: str = "bfloat16", activation: str | None = "silu") -> tuple[str, str]:
    x, w = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((4, shape[2]), dtype)
    with target("gpu", H200):
        there = explain("causal_conv1d", x, w, activation=activation)
        back = explain("causal_conv1d_grad", x, w, None, None, x, activation=activation)
    return there.implementation, back.implementation


@pytest.mark.quick
def test_both_passes_run_on_a_hopper_where_they_were_timed() -> None:
    assert _taken((2, 2048, 1536)) == ("hopper", "hopper")
    assert _taken((2, 2048, 1536), activation=None) == ("hopper", "hopper")
    assert _taken((2, 2048, 2816)) == ("hopper", "hopper")
    # Another chip of the architecture goes by the same rule.
    x, w = jax.ShapeDtypeStruct((2, 2048, 1536), jnp.bfloat16), jax.ShapeDtypeStruct((4, 1536), jnp.bfloat16)
    with target("gpu", "NVIDIA H100 80GB HBM3"):
        assert explain("causal_conv1d", x, w).implementation == "hopper"


@pytest.mark.quick
def test_elsewhere_it_waits_for_rows_whatever_is_trusted() -> None:
    with trust("predicted"):
        assert _taken((2, 1024, 1536)) == ("xla", "xla")  # less than 4 million numbers
        assert _taken((2, 4096, 1536), "float32", None) == ("xla", "xla")
        # One piece for all channels, as at the row that was wrong on the chip; two channels a thread.
        assert _taken((5, 54830, 256), activation=None) == ("xla", "xla")
        assert _taken((8, 4096, 512)) == ("xla", "xla")
        assert _taken((8, 4096, 768)) == ("xla", "xla")
        assert _taken((8, 4096, 640)) == ("xla", "xla")  # lines of 128 channels


@pytest.mark.quick
def test_it_says_why_not() -> None:
    def reason(shape: tuple[int, int, int], dtype: Any, width: int = 4, device: str = H200, **more: Any) -> str:
        x, w = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((width, shape[2]), dtype)
        state = jax.ShapeDtypeStruct((shape[0], width - 1, shape[2]), dtype) if more.pop("state", False) else None
        with target("gpu", device):
            said = CAUSAL_CONV1D.implementations["hopper"].refusal(CAUSAL_CONV1D.call(x, w, None, state, **more))
        assert said is not None
        return said

    assert "enough for bfloat16; x is float16" in reason((1, 4, 256), jnp.float16, activation="silu")
    assert "a multiple of 64 from 256 on" in reason((1, 4, 200), jnp.bfloat16)
    assert "initial state" in reason((1, 4, 256), jnp.bfloat16, state=True)
    assert "2 to 8 taps; not 9" in reason((1, 4, 256), jnp.bfloat16, 9)
    assert "empty" in reason((0, 4, 256), jnp.bfloat16)
    assert "written for Hopper" in reason((1, 4, 256), jnp.bfloat16, device="NVIDIA A100")
    with pytest.raises(ValueError, match="stages 2 or more"):
        WalkConfig(8, 4, 1, 1)
    x, w = jnp.ones((1, 4, 256)), jnp.ones((4, 256))
    params: dict[str, Any] = {"activation": None, "return_final_state": False}
    with pytest.raises(ValueError, match="whole lines"):
        forward.conv_forward(x, w, config=WalkConfig(8, 4, 2, 1), **params)
    with pytest.raises(ValueError, match="A ring holds the 6 rows"):
        backward.conv_backward(x, w, None, None, x, config=WalkConfig(2, 2, 2, 1), activation=None)
    with pytest.raises(ValueError, match="hopper"):
        causal_conv1d(jnp.ones((1, 4, 256)), jnp.ones((4, 256)), implementation="hopper")
