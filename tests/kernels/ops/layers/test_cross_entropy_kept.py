"""Cross-entropy of few tokens on a GPU: all logits are made once and kept for the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from capibara.kernels import explain, target
from capibara.kernels.ops.layers import CROSS_ENTROPY, cross_entropy
from capibara.kernels.ops.layers.cross_entropy.in_forward import fits_at_once

DEPTH, WORDS = 16, 64
FORMS: list[dict[str, Any]] = [
    {},
    {"transpose_weights": True, "z_loss": 1e-2},
    {"label_smoothing": 0.2, "z_loss": 1e-3, "softcap": 3.0, "reduction": "sum"},
]


@pytest.fixture(autouse=True)
def _on_a_gpu() -> Iterator[None]:
    """What is chosen there is plain JAX, and runs here."""
    with target("gpu", "NVIDIA H200"):
        yield


def _draw(lead: tuple[int, ...], dtype: str = "float32") -> tuple[Any, Any, Any]:
    generator = np.random.default_rng(len(lead))
    hidden = jnp.asarray(generator.standard_normal((*lead, DEPTH)) / DEPTH**0.5, dtype)
    weights = jnp.asarray(2 * generator.standard_normal((DEPTH, WORDS)), dtype)
    return hidden, weights, jnp.asarray(generator.integers(0, WORDS, lead), jnp.int32)


def _both(**options: Any) -> Any:
    return jax.value_and_grad(functools.partial(cross_entropy, **options), argnums=(0, 1))


def _close(got: Any, wanted: Any) -> None:
    # Float32 throughout: numbers up to about 5, sums over 64 logits and 16 tokens, in another order.
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=5e-6, rtol=1e-6)


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize("given", FORMS, ids=lambda form: "-".join(form) or "plain")
def test_it_is_what_making_them_again_gives(given: dict[str, Any]) -> None:
    hidden, weights, labels = _draw((2, 9))
    arrays = (hidden, weights.T if "transpose_weights" in given else weights, labels.at[0, 3].set(-100))
    _close(jax.jit(_both(**given))(*arrays), jax.jit(_both(**given, gradient="recompute"))(*arrays))
    seen = {s.call.op.name: s.call for s in explain(_both(**given), *arrays).selections}
    assert set(seen) == {"cross_entropy", "cross_entropy_grad"}
    assert seen["cross_entropy_grad"]["logits"] is not None


@pytest.mark.quick
@pytest.mark.parametrize("gradient", [None, "in_forward"])
def test_three_products_and_the_weights_gradient_is_rounded_on_its_way(gradient: str | None) -> None:
    text = jax.jit(_both(gradient=gradient)).lower(*_draw((24,), "bfloat16")).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) == 3
    assert [line.endswith(f"tensor<{DEPTH}x{WORDS}xbf16>") for line in products].count(True) == 1
    if gradient is None:  # in_forward multiplies it by the cotangent, in a pass of its own
        assert f"tensor<{DEPTH}x{WORDS}xf32>" not in text


@pytest.mark.quick
@pytest.mark.parametrize(("tokens", "columns"), [(P("data", "model"), None), (P("data"), "model")])
def test_on_a_mesh(tokens: P, columns: str | None) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu")[:8])
    arrays = _draw((8, 4))
    split = NamedSharding(mesh, P(None, columns))
    at_tokens = NamedSharding(mesh, tokens)
    placed = tuple(jax.device_put(x, s) for x, s in zip(arrays, (at_tokens, split, at_tokens), strict=True))
    fn = jax.jit(_both(label_smoothing=0.1))
    got = fn(*placed)
    _close(got, jax.jit(_both(label_smoothing=0.1, gradient="recompute"))(*arrays))
    assert got[1][1].sharding.is_equivalent_to(split, 2)
    assert "all-gather" not in fn.lower(*placed).compile().as_text()


@pytest.mark.quick
def test_under_shard_map_and_vmap() -> None:
    hidden, weights, labels = _draw((16,))
    wanted = jax.jit(_both(reduction="sum", gradient="recompute"))(hidden, weights, labels)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:8])

    def local(hidden: Any, weights: Any, labels: Any) -> Any:
        return jax.lax.psum(cross_entropy(hidden, weights, labels, reduction="sum"), "data")

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P(), P("data")), out_specs=P())
    _close(jax.jit(jax.value_and_grad(mapped, argnums=(0, 1)))(hidden, weights, labels), wanted)

    each = jax.jit(jax.vmap(_both(reduction="sum"), in_axes=(0, None, 0)))(
        hidden.reshape(4, 4, -1), weights, labels.reshape(4, 4)
    )
    assert each[1][1].shape == (4, DEPTH, WORDS)
    _close((each[0].sum(), (each[1][0].reshape(16, -1), each[1][1].sum(0))), wanted)


@pytest.mark.parametrize(
    ("tokens", "depth", "vocabulary", "at_once"),
    [
        (1099, 2560, 50280, True),
        (2335, 3584, 256000, True),
        (1233, 2048, 50257, False),  # rows that are padded in chunks
        (16384, 2048, 32000, False),
        (16384, 4096, 128256, False),
    ],
)
def test_where_it_takes_no_more_memory(tokens: int, depth: int, vocabulary: int, at_once: bool) -> None:
    shapes = ((tokens, depth), "bfloat16"), ((depth, vocabulary), "bfloat16"), ((tokens,), "int32")
    arrays = [jax.ShapeDtypeStruct(*x) for x in shapes]
    assert fits_at_once(CROSS_ENTROPY.call(*arrays)) == at_once
    names = {s.call.op.name for s in explain(_both(), *arrays).selections}
    assert ("cross_entropy_grad" in names, "cross_entropy_and_grad" in names) == (at_once, not at_once)
