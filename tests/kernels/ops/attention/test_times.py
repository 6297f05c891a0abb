"""What attention's time is made of: whole tiles, the busiest core's share, and what is idle beside it."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from capibara.kernels import lookup, target
from capibara.kernels.core.spec import TimeTerms
from capibara.kernels.ops.attention import times
from capibara.kernels.ops.attention.hopper import walks


def _gradient_of(shape: tuple[int, ...]) -> tuple[Any, ...]:
    q, lse = jax.ShapeDtypeStruct(shape, "bfloat16"), jax.ShapeDtypeStruct(shape[:3], "float32")
    return q, q, q, *[None] * 6, q, lse, q, None


def _forward(implementation: str = "hopper", kv_heads: int = 16, shape: Any = (4, 16, 4096, 128), **params: Any) -> Any:
    q = jax.ShapeDtypeStruct(shape, "bfloat16")
    k = jax.ShapeDtypeStruct((shape[0], kv_heads, *shape[2:]), "bfloat16")
    with target("gpu", "NVIDIA H200"):
        return times.forward(lookup("attention").call(q, k, k, *[None] * 6, **params), implementation)


def _backward(
    implementation: str = "hopper", kv_heads: int = 16, shape: Any = (4, 16, 4096, 128), **params: Any
) -> TimeTerms:
    q = jax.ShapeDtypeStruct(shape, "bfloat16")
    k = jax.ShapeDtypeStruct((shape[0], kv_heads, *shape[2:]), "bfloat16")
    lse = jax.ShapeDtypeStruct(shape[:3], "float32")
    with target("gpu", "NVIDIA H200"):
        call = lookup("attention_grad").call(q, k, k, *[None] * 6, q, lse, q, None, **params)
        found = times.backward(call, implementation)
    assert found is not None
    return found


@pytest.mark.quick
def test_work_is_of_whole_tiles() -> None:
    whole = _forward().terms["work"]
    assert whole == pytest.approx(1e-6 * 4 * 16 * 4096 * 4096 * 128 / 132)
    assert _forward(shape=(4, 16, 4097, 128)).terms["work"] == pytest.approx(whole * (33 / 32) ** 2)
    causal = _forward(causal=True).terms["work"]
    assert causal == pytest.approx(whole * 33 / 64)  # the diagonal's tiles are whole
    assert _forward(window=(127, 0)).terms["work"] < causal / 8


def test_columns_come_in_steps_that_differ() -> None:
    ours, theirs = (_forward(name, shape=(4, 16, 4096, 80)).terms["work"] for name in ("hopper", "cudnn"))
    assert theirs == pytest.approx(ours * 96 / 80)


@pytest.mark.quick
def test_cores_wait_for_the_last_programs() -> None:
    """133 programs take as long as 264."""
    full = _forward(shape=(132, 1, 128, 128), kv_heads=1)
    assert full.terms["idle"] == pytest.approx(0.0)
    one_more = _forward(shape=(133, 1, 128, 128), kv_heads=1)
    assert one_more.terms["work"] + one_more.terms["idle"] == pytest.approx(2 * full.terms["work"])


def test_our_backward_pass_has_a_program_for_keys_of_a_key_head() -> None:
    heads = (2, 14, 6144, 64)
    # 96 programs of seven query heads, which one core after another would wait for: as many as there are heads.
    alone, shared = _backward(kv_heads=14, shape=heads), _backward(kv_heads=2, shape=heads)
    assert alone.terms["programs"] == pytest.approx(shared.terms["programs"])
    assert shared.terms["idle"] == pytest.approx(alone.terms["idle"])
    # 2048 programs suffice.
    assert _backward(kv_heads=2, shape=(16, 16, 4096, 128)).terms["programs"] == pytest.approx(16 * 2 * 32 / 132)
    assert _backward("cudnn", 16).terms["programs"] == _backward("cudnn", 2).terms["programs"]


def test_what_is_beside_a_gradients_kernel() -> None:
    """Sums in float32 are zeroed and rounded; cuDNN writes the gradients of shared keys for each query head."""
    short, long = (4, 16, 1024, 128), (4, 16, 2048, 128)
    assert _backward(shape=short, causal=True).terms["float32 sums"] == 0.0
    assert _backward(shape=long, causal=True).terms["float32 sums"] == pytest.approx(1e-6 * 8 * 4 * 16 * 2048 * 128)
    assert _backward("cudnn", 16, shape=long).terms["keys of heads"] == 0.0
    assert _backward("cudnn", 4, shape=long).terms["keys of heads"] == pytest.approx(1e-6 * 8 * 4 * 16 * 2048 * 128)
    assert _backward(kv_heads=4, shape=long).terms["keys of heads"] == 0.0


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "length", "order", "sharers"),
    [
        (4, 16, 16, 4096, "batch tile head", 0),  # another order would be little sooner
        (8, 16, 4, 2048, "tile batch head", 0),
        (5, 64, 8, 1000, "tile batch head", 0),  # shorter programs would end sooner, but for their sums
        (1, 28, 4, 4096, "batch tile head", 1),
        (2, 14, 2, 6144, "batch tile head", 1),  # and not the other order, by what programs take to begin
    ],
)
def test_programs_that_end_soonest(
    batch: int, heads: int, kv_heads: int, length: int, order: str, sharers: int
) -> None:
    """Causal, of heads of 128."""
    q, k = (jax.ShapeDtypeStruct((batch, n, length, 128), "bfloat16") for n in (heads, kv_heads))
    lse = jax.ShapeDtypeStruct((batch, heads, length), "float32")
    walks.busiest_with_keys.cache_clear()
    with target("gpu", "NVIDIA H200"):
        call = lookup("attention_grad").call(q, k, k, *[None] * 6, q, lse, q, None, causal=True)
        assert walks.programs_of_keys(call, 128, 64) == {"order": order, "sharers": sharers}


def test_wide_heads_and_panels_cost_more() -> None:
    """Heads of which two warpgroups have a role each, by a coefficient of their own; only calls like those fit it."""

    def extra(head_dim: int, length: int = 4096) -> set[str]:
        found = _backward(shape=(4, 16, length, head_dim))
        assert ("divided" in found.words) == (head_dim == 256)
        return {name for name in ("wide", "panels", "by rows", "divided") if found.terms[name] > 0}

    assert [extra(64), extra(96), extra(128, 1500), extra(208)] == [set(), {"panels"}, {"by rows"}, {"wide", "panels"}]
    assert [extra(256), extra(256, 1500)] == [{"divided"}, {"divided", "by rows"}]


def test_of_what_was_not_run_it_says_nothing() -> None:
    assert _forward(softcap=30.0) is None
    assert _forward("xla") is None
    assert _forward(causal=True).words == ("bf16", "causal")
    assert _forward(window=(127, 0)).words == ("bf16", "window")
    q = jax.ShapeDtypeStruct((1, 8, 32768, 128), "bfloat16")
    lse = jax.ShapeDtypeStruct((1, 8, 32768), "float32")
    with target("gpu", "NVIDIA H200"):
        very_long = lookup("attention_grad").call(q, q, q, *[None] * 6, q, lse, q, None)
        windowed = lookup("attention_grad").call(*_gradient_of((1, 8, 4096, 128)), causal=True, window=(1023, 0))
        of_192 = lookup("attention_grad").call(*_gradient_of((1, 8, 4096, 192)))
    assert times.backward(very_long, "hopper") is None  # as are all of 16k
    assert times.backward(windowed, "hopper") is None
    assert times.backward(of_192, "cudnn") is None
