"""What dispatch takes on an H200 where no tuned case speaks: what was faster there in a run beside the others.

The figures are in benchmarks/results (untuned shapes); a choice changes when another run says otherwise.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from capibara.kernels import attention, explain, gated_activation, nearest_code, rms_norm, target
from capibara.kernels.core import tables
from capibara.kernels.ops.layers import activation, cross_entropy

bf16, f32 = jnp.bfloat16, jnp.float32
OURS = "hopper"


def _of(shape: tuple[int, ...], dtype: object = bf16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _taken(fn: object, *operands: jax.ShapeDtypeStruct) -> list[str]:
    with target("gpu", "NVIDIA H200"):
        return [s.implementation for s in explain(fn, *operands).selections]


@pytest.mark.parametrize(
    ("shape", "kv_heads", "forward", "backward"),
    [
        ((8, 1536, 20, 96), 20, OURS, "cudnn"),  # head sizes whose columns come in panels; level by the models
        ((3, 2500, 16, 112), 16, OURS, "cudnn"),
        ((1, 4096, 128, 192), 128, "cudnn", "cudnn"),
        ((9, 512, 32, 128), 32, "cudnn", OURS),  # 59 µs for 63, without what XLA fills
        ((15, 1024, 25, 64), 25, "cudnn", OURS),
        ((8, 1536, 16, 40), 16, "cudnn", "cudnn"),  # not timed
        ((1, 4500, 28, 128), 4, OURS, OURS),  # a length that is no multiple of 8
        ((1, 5300, 14, 64), 2, OURS, OURS),
        ((16, 577, 16, 64), 16, "cudnn", OURS),
        ((8, 1024, 12, 64), 12, OURS, OURS),
        ((8, 2048, 16, 128), 8, OURS, OURS),  # of a step of 1.14 billion parameters: 14.1 ms for cuDNN's 16.6
        ((1, 32768, 8, 128), 8, OURS, OURS),  # 3 % less time, and half of the memory beside the gradients
        ((1, 32768, 16, 128), 2, OURS, "cudnn"),
        ((4, 4096, 28, 128), 4, OURS, OURS),  # as timed with 32 heads on 8, 4 % ahead
        ((1, 16384, 32, 128), 8, OURS, OURS),  # 1 to 5 % ahead
    ],
)
def test_attention(shape: tuple[int, ...], kv_heads: int, forward: str, backward: str) -> None:
    batch, length, _, head_dim = shape
    q, kv = _of(shape), _of((batch, length, kv_heads, head_dim))

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attention(q, k, v, causal=True, layout="bthd").astype(f32).sum()

    with target("gpu", "NVIDIA H200"):
        selections = explain(jax.grad(loss), q, kv, kv).selections
    assert {s.call.op.name: s.implementation for s in selections} == {"attention": forward, "attention_grad": backward}
    if kv_heads == 4:
        assert not any("near case" in s.why for s in selections)


def test_a_near_tuned_case_lends_its_tiles_and_not_its_order() -> None:
    """Which tiles start when, and which query heads share a program, hangs on how many there are."""

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attention(q, k, v, causal=True, layout="bthd", implementation="hopper").astype(f32).sum()

    q = _of((3, 2048, 32, 64))
    with target("gpu", "NVIDIA H200"):
        forward, *_, backward = explain(jax.grad(loss), q, q, q).selections
        for chosen in (forward, backward):
            tuned = tables.find(chosen.call, ["hopper"], to_configure=True)
            assert tuned is not None
            assert not tuned.exact
            assert chosen.config == chosen.call.op.implementations["hopper"].for_call(tuned.config, chosen.call)
            assert chosen.config != tuned.config
    assert (forward.config.block_k, forward.config.programs, forward.config.section) == (256, 132, 96)
    assert (backward.config.order, backward.config.sharers) == ("batch tile head", 0)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "order", "sharers"), [(16, 16, "batch tile head", 0), (16, 4, "tile batch head", 1)]
)
def test_which_keys_start_when_hangs_on_how_many_heads_share_them(
    heads: int, kv_heads: int, order: str, sharers: int
) -> None:
    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attention(q, k, v, causal=True, layout="bthd", implementation="hopper").astype(f32).sum()

    q, kv = (_of((3, 2048, count, 128)) for count in (heads, kv_heads))
    with target("gpu", "NVIDIA H200"):
        backward = explain(jax.grad(loss), q, kv, kv).selections[-1]
    assert (backward.config.order, backward.config.sharers) == (order, sharers)


@pytest.mark.parametrize(
    ("kind", "gated", "rate", "shape", "forward", "backward"),
    [
        ("gelu", False, 0.0, (16384, 3072), OURS, OURS),
        ("gelu", False, 0.0, (100, 3072), OURS, OURS),
        ("gelu_tanh", False, 0.0, (16384, 3072), OURS, OURS),
        ("silu", False, 0.0, (8192, 4096), OURS, "xla"),
        ("relu", False, 0.0, (16384, 4096), OURS, "xla"),
        ("silu", True, 0.0, (2048, 14336), "xla", "xla"),
        ("gelu", False, 0.1, (8192, 3072), OURS, OURS),
        ("silu", True, 0.1, (8192, 8192), "xla", "xla"),
        ("gelu", True, 0.1, (4096, 4096), OURS, "xla"),  # a gradient has a rule of its own
        ("relu", False, 0.1, (8192, 4096), "xla", "xla"),
    ],
)
def test_activation(kind: str, gated: bool, rate: float, shape: tuple[int, ...], forward: str, backward: str) -> None:
    given = {"dropout_rate": rate, "key": jax.random.key(0)} if rate else {}
    fn = gated_activation if gated else activation

    def backward_pass(d_out: jax.Array, *x: jax.Array) -> object:
        return jax.vjp(lambda *x: fn(*x, kind=kind, **given), *x)[1](d_out)

    taken = _taken(backward_pass, *[_of(shape)] * (3 if gated else 2))
    assert (taken[0], taken[-1]) == (forward, backward)


@pytest.mark.parametrize(
    ("shape", "forward", "backward"),
    [
        ((16384, 128), "xla", "xla"),
        ((100, 5120), "xla", OURS),
        ((2048, 7168), OURS, OURS),
        ((4096, 16384), OURS, "xla"),
    ],
)
def test_rms_norm(shape: tuple[int, int], forward: str, backward: str) -> None:
    assert _taken(rms_norm, _of(shape), _of(shape[1:])) == [forward]

    def loss(x: jax.Array, scale: jax.Array) -> jax.Array:
        return rms_norm(x, scale).astype(f32).sum()

    taken = _taken(jax.grad(loss), _of(shape), _of(shape[1:]))
    assert taken[-1] == backward


@pytest.mark.parametrize(("rows", "codes", "width"), [(65536, 8192, 8), (65537, 1024, 256), (1000, 64, 100)])
def test_nearest_code_of_any_width_and_number_of_rows(rows: int, codes: int, width: int) -> None:
    assert _taken(nearest_code, _of((rows, width), f32), _of((codes, width), f32)) == [OURS]


def test_cross_entropy_makes_its_gradient_in_the_forward_pass() -> None:
    operands = (_of((8192, 768)), _of((768, 50257)), _of((8192,), jnp.int32))

    def ops(reduction: str = "mean", **options: object) -> set[str]:
        def loss(hidden: jax.Array, weights: jax.Array, labels: jax.Array) -> jax.Array:
            return cross_entropy(hidden, weights, labels, reduction=reduction, **options).sum()

        return {s.call.op.name for s in explain(jax.grad(loss, (0, 1)), *operands).selections}

    with target("gpu", "NVIDIA H200"):
        assert "cross_entropy_and_grad" in ops()
        assert "cross_entropy_grad" in ops(reduction="none")  # what becomes of a token's loss is not known there
        assert "cross_entropy_grad" in ops(gradient="recompute")
    assert "cross_entropy_grad" in ops()  # elsewhere the two have not been timed
