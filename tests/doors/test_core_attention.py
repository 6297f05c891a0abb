"""TPUv4Kernels.flash_attention: masks of every form, dropout by the object's keys, and a sequence over a mesh."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import logging
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.core.kernels import TPUv4Kernels
from capibara.kernels import explain
from capibara.kernels.ops.attention import sequence
from capibara.kernels.ops.attention.api import ATTENTION, attention
from capibara.kernels.ops.attention.chunks import ChunkConfig
from capibara.kernels.ops.attention.mask_shapes import mask_and_bias
from capibara.mesh import use_rules
from capibara.surface import products as levels

RNG = np.random.default_rng(0)
Q = jnp.asarray(RNG.normal(size=(2, 4, 24, 16)), jnp.float32)
K, V = (jnp.asarray(RNG.normal(size=(2, 2, 24, 16)), jnp.float32) for _ in range(2))
# Two products, of 16 and of 24 terms, in float32; four for an unlucky draw. bfloat16 rounds three operands, the
# scores through them, and the result.
FLOAT32 = 4 * (16**0.5 + 24**0.5) * 2**-24
BFLOAT16 = 6 * 2**-9

exactly = TPUv4Kernels("float32")


def exact(**options: Any) -> Any:
    return attention(Q, K, V, layout="bhtd", implementation="reference", **options)


def error(got: Any, want: Any) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.quick
def test_used_as_documented() -> None:
    kernels = TPUv4Kernels(
        precision="bfloat16",
        optimization_level="aggressive",
        enable_xla_fusion=True,
        memory_layout_optimization=True,
    )
    mask = jnp.ones((2, 24), bool).at[1, 20:].set(False)
    got = kernels.flash_attention(
        query=Q, key=K, value=V, attention_mask=mask, dropout_rate=0.1, causal=True, sequence_parallel=True
    )
    assert got.shape == Q.shape
    assert got.dtype == jnp.bfloat16
    still = kernels.flash_attention(Q, K, V, mask, causal=True)
    assert error(still, exact(causal=True, mask=mask[:, None, None])) < BFLOAT16
    # One in ten probabilities dropped, and the others 1/0.9 of what they were: neither nothing nor everything.
    assert 0.1 < error(got, still) < 0.9
    names = list(inspect.signature(TPUv4Kernels.flash_attention).parameters)[1:8]
    assert names == ["query", "key", "value", "attention_mask", "dropout_rate", "causal", "sequence_parallel"]


def test_masks_of_every_form() -> None:
    pairs = RNG.random((2, 4, 24, 24)) < 0.6
    padding = np.arange(24) < np.asarray([24, 11])[:, None]
    for mask, four in (
        (padding, padding[:, None, None]),
        (pairs[0, 0], pairs[None, None, 0, 0]),
        (pairs[:, 0], pairs[:, :1]),
        (pairs, pairs),
        (pairs[:1, :, :1], pairs[:1, :, :1]),
    ):
        for given in (mask, mask.astype(np.int32), np.where(mask, 0, -np.inf).astype(np.float32)):
            made, bias = mask_and_bias(given, 2, 4, 24, 24)
            np.testing.assert_array_equal(made, four)
            assert (bias is not None) == (given.dtype == np.float32)
            assert bias is None or not np.asarray(bias).any()
    want = exact(mask=jnp.asarray(padding[:, None, None]))
    assert error(exactly.flash_attention(Q, K, V, padding), want) < FLOAT32
    added = jnp.where(padding, 0, -jnp.inf)
    assert error(exactly.flash_attention(Q, K, V, added), want) < FLOAT32
    bias = jnp.asarray(RNG.normal(size=(24, 24)), jnp.float32)
    assert error(exactly.flash_attention(Q, K, V, bias), exact(bias=bias)) < FLOAT32
    # What is hidden altogether gives zeros, and a gradient without NaN.
    hidden = jnp.full((24, 24), -jnp.inf).at[1:].set(0)
    made, gradient = jax.value_and_grad(lambda q: exactly.flash_attention(q, K, V, hidden).sum())(Q)
    assert bool(jnp.isfinite(made))
    assert bool(jnp.isfinite(gradient).all())
    assert not np.asarray(gradient)[:, :, 0].any()


@pytest.mark.quick
def test_a_mask_that_fits_nothing_or_too_much_is_refused() -> None:
    for shape in ((24,), (3, 24), (2, 24, 23), (2, 3, 24, 24), (1, 2, 4, 24, 24)):
        with pytest.raises(ValueError, match=r"attention_mask is \[batch, keys\], .* 2 examples, 4 heads, 24 queries"):
            exactly.flash_attention(Q, K, V, np.ones(shape, bool))
    with pytest.raises(ValueError, match=r"here both fit.*mask\[:, None, None, :\] for the first"):
        exactly.flash_attention(Q[:, :, :2], K, V, np.ones((2, 24), bool))


@pytest.mark.quick
def test_dropout_draws_the_objects_next_key() -> None:
    one, two, other = TPUv4Kernels(seed=1), TPUv4Kernels(seed=1), TPUv4Kernels(seed=2)
    first, second = (one.flash_attention(Q, K, V, dropout_rate=0.3) for _ in range(2))
    np.testing.assert_array_equal(first, two.flash_attention(Q, K, V, dropout_rate=0.3))
    assert error(first, second) > 0.1
    assert error(first, other.flash_attention(Q, K, V, dropout_rate=0.3)) > 0.1
    copied = copy.deepcopy(one)
    np.testing.assert_array_equal(*(o.flash_attention(Q, K, V, dropout_rate=0.3) for o in (one, copied)))
    keyed = [o.flash_attention(Q, K, V, dropout_rate=0.3, rng=jax.random.key(7)) for o in (one, other)]
    np.testing.assert_array_equal(*keyed)
    with pytest.warns(UserWarning, match="Pass rng="):
        jax.jit(lambda q: one.flash_attention(q, K, V, dropout_rate=0.3))(Q)


def test_the_objects_choices_hold() -> None:
    def attend(kernels: TPUv4Kernels, **options: Any) -> Any:
        return lambda q, k, v: kernels.flash_attention(q, k, v, causal=True, **options)

    for level, implementation in (("none", "reference"), ("basic", "xla"), ("balanced", "xla")):
        assert explain(attend(TPUv4Kernels(optimization_level=level)), Q, K, V).implementation == implementation
    assert attend(TPUv4Kernels("mixed"))(Q, K, V).dtype == jnp.float32
    assert attend(TPUv4Kernels("mixed"), precision="bfloat16")(Q, K, V).dtype == jnp.bfloat16
    text = lambda kernels, **o: str(jax.make_jaxpr(attend(kernels, **o))(Q, K, V))  # noqa: E731
    assert "optimization_barrier" not in text(TPUv4Kernels())
    assert text(TPUv4Kernels(enable_xla_fusion=False)).count("optimization_barrier") == 2
    turned = tuple(x.swapaxes(1, 2) for x in (Q, K, V))
    copies = TPUv4Kernels("float32", memory_layout_optimization=False)
    assert "optimization_barrier" not in text(copies)
    for kernels in (exactly, copies):
        program = str(jax.make_jaxpr(attend(kernels, layout="bthd"))(*turned))
        assert ("optimization_barrier" in program) == (kernels is copies)
        got = attend(kernels, layout="bthd")(*turned)
        assert error(got.swapaxes(1, 2), exact(causal=True)) < FLOAT32
    assert error(exactly.flash_attention(Q, K, V, window=[2, 0]), exact(window=3)) < FLOAT32
    with pytest.raises(ValueError, match=r"Unknown argument of flash_attention 'windows'\. Did you mean 'window'"):
        exactly.flash_attention(Q, K, V, windows=3)


def test_aggressive_tunes_a_shape_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from capibara.kernels.lab import tuning

    tuned: list[Any] = []
    nothing = types.SimpleNamespace(best=None, path=None)
    monkeypatch.setattr(
        tuning, "autotune", lambda op, *operands, params: tuned.append((op.name, operands, params)) or nothing
    )
    levels._SEEN.clear()
    levels._TUNED.clear()
    made = ATTENTION.implementations["xla"]
    two = dataclasses.replace(made, candidates=lambda call: [ChunkConfig(n, n) for n in (8, 16)])
    monkeypatch.setitem(ATTENTION.implementations, "xla", two)
    kernels = TPUv4Kernels("float32", "aggressive")
    ids = np.zeros((2, 24), np.int32)
    for _ in range(2):
        kernels.flash_attention(Q, K, V, np.ones((2, 24), bool), segment_ids=ids)
    ((name, operands, params),) = tuned
    assert (name, params) == ("attention", {})
    # Masks and ids have values, since random bits would mean nothing.
    assert bool(operands[4].all())
    assert not bool(operands[5].any())
    jax.jit(lambda q: kernels.flash_attention(q, K, V, causal=True))(Q)
    assert len(tuned) == 1


@pytest.mark.quick
@pytest.mark.usefixtures("nothing_said_yet")
def test_without_a_mesh_or_an_axis_it_is_plain_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    plain = exactly.flash_attention(Q, K, V, causal=True)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with caplog.at_level(logging.WARNING, "capibara.kernels"):
        for _ in range(2):
            np.testing.assert_array_equal(exactly.flash_attention(Q, K, V, None, 0.0, True, True), plain)
            with jax.set_mesh(mesh):
                np.testing.assert_array_equal(
                    exactly.flash_attention(Q, K, V, causal=True, sequence_parallel=True), plain
                )
    said = [record.getMessage() for record in caplog.records]
    assert sum("no mesh of several devices is active" in line for line in said) == 1
    assert sum("the mesh has no axis 'sequence'; name one of 'data', 'model'" in line for line in said) == 1
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="Unknown mesh axis for sequence_parallel 'time'"):
        exactly.flash_attention(Q, K, V, sequence_parallel="time")
    with pytest.raises(ValueError, match="sequence_parallel is True, False or the name"):
        exactly.flash_attention(Q, K, V, sequence_parallel=3)  # type: ignore[arg-type]


@pytest.mark.usefixtures("nothing_said_yet")
def test_a_sequence_goes_where_the_rules_in_force_put_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = jax.make_mesh((2, 2, 2), ("data", "time", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    asked: list[tuple[Any, ...]] = []
    split = sequence.sequence_parallel_attention

    def noted(*args: Any, **options: Any) -> Any:
        asked.append(tuple(options[f"{what}axis_name"] for what in ("", "batch_", "head_")))
        return split(*args, **options)

    monkeypatch.setattr(sequence, "sequence_parallel_attention", noted)

    def axes(**rules: Any) -> tuple[Any, ...] | None:
        """The mesh axes of the sequence, the batch and the heads; None for plain attention."""
        asked.clear()
        jax.clear_caches()  # a program that was traced before asks nothing again
        with jax.set_mesh(mesh), use_rules(rules):
            jax.eval_shape(attend)
        return asked[0] if asked else None

    def attend() -> Any:
        return exactly.flash_attention(Q, K, V, causal=True, sequence_parallel=True)

    with caplog.at_level(logging.WARNING, "capibara.kernels"):
        assert axes() is None, "by default a sequence is on an axis of its name, which this mesh lacks"
        assert axes(sequence="time") == ("time", ("data",), ("model",))
        assert axes(sequence=("data",), batch=("time", "expert"), heads=None) == ("data", ("time",), None)
        # Two rows and two key heads divide over one axis each, and not over four devices.
        assert axes(sequence="time", batch=("data", "model"), heads="data") == ("time", None, ("data",))
        assert axes(sequence=None) is None
        assert axes(sequence=("time", "model")) is None
    with jax.set_mesh(mesh), use_rules({"sequence": "data", "batch": "time"}):
        assert error(attend(), exact(causal=True)) < FLOAT32
    said = "\n".join(record.getMessage() for record in caplog.records)
    for reason in ("no axis 'sequence'", "the rules split no sequence", "by time and model and a ring goes along one"):
        assert said.count(reason) == 1, reason


@pytest.mark.usefixtures("nothing_said_yet")
def test_a_sequence_over_a_mesh(caplog: pytest.LogCaptureFixture) -> None:
    mesh = jax.make_mesh((2, 4), ("data", "sequence"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def attend(q: Any, k: Any, v: Any, axis: Any = True, **options: Any) -> Any:
        return exactly.flash_attention(q, k, v, causal=True, sequence_parallel=axis, **options)

    with jax.set_mesh(mesh):
        program = str(jax.make_jaxpr(attend)(Q, K, V))
        assert "shard_map" in program
        assert "ppermute" in program
        assert str(jax.make_jaxpr(lambda *x: attend(*x, axis="sequence"))(Q, K, V)) == program
        assert "shard_map" not in str(jax.make_jaxpr(lambda q: attend(q, K, V, axis=False))(Q))
        value, pull = jax.vjp(jax.jit(lambda q: attend(q, K, V)), Q)
        (gradient,) = pull(value)
        with caplog.at_level(logging.WARNING, "capibara.kernels"):
            mask = np.ones((2, 24), bool)
            assert error(attend(Q, K, V, attention_mask=mask), exact(causal=True)) < FLOAT32
            for call in (
                lambda: attend(Q, K, V, dropout_rate=0.1, rng=jax.random.key(0)),
                lambda: attend(Q[:, :, :22], K[:, :, :22], V[:, :, :22]),
                lambda: attend(Q[:, :, :8], K, V),
                lambda: TPUv4Kernels("float32", "none").flash_attention(Q, K, V, sequence_parallel=True),
            ):
                assert "shard_map" not in str(jax.make_jaxpr(call)())
    whole, pull = jax.vjp(lambda q: attention(q, K, V, layout="bhtd", causal=True), Q)
    assert error(value, whole) < FLOAT32
    assert error(gradient, pull(whole)[0]) < 10 * FLOAT32
    said = "\n".join(record.getMessage() for record in caplog.records)
    for reason in (
        "takes no mask",
        "has no dropout",
        "4 devices along 'sequence' do not divide a length of 22",
        "as many queries as keys, not 8 and 24",
        "runs the reference",
    ):
        assert said.count(reason) == 1
