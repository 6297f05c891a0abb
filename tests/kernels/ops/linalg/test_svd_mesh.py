"""fast_svd of matrices that lie on several devices: no device ever holds the whole matrix."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from capibara.kernels import fast_svd

M, N, RANK = 512, 64, 6
RNG = np.random.default_rng(0)
SPECTRUM = 0.8 ** np.arange(N)
A = (np.linalg.qr(RNG.normal(size=(M, N)))[0] * SPECTRUM) @ np.linalg.qr(RNG.normal(size=(N, N)))[0]


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:8])


def assert_close(found: Any, alone: Any) -> None:
    for one, other in zip(found, alone, strict=True):
        # Sums over devices are in another order: rounding, 4 sqrt(M + N) units, over gaps of a fifth of s_6 = 0.33.
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), atol=25 * 4 * (M + N) ** 0.5 * 2.0**-24)


def gathered(program: str) -> int:
    """The most elements that any gathering or exchanging operation of a compiled program gives."""
    found = re.findall(r"= \(?\w+\[([\d,]*)\][^=]*? (?:all-gather|all-to-all|collective-permute)", program)
    return max((int(np.prod([int(d) for d in shape.split(",") if d])) for shape in found), default=0)


@pytest.mark.parametrize("split", ["rows", "columns"])
def test_sharded_by_the_partitioner(split: str) -> None:
    spec = P("rows", None) if split == "rows" else P(None, "rows")
    placed = NamedSharding(mesh(), spec)
    fn = jax.jit(lambda x: fast_svd(x, rank=RANK))
    program = fn.lower(jax.ShapeDtypeStruct(A.shape, jnp.float32, sharding=placed)).compile()
    found = program(jax.device_put(jnp.asarray(A, jnp.float32), placed))
    assert_close(found, fast_svd(jnp.asarray(A, jnp.float32), rank=RANK))
    text = program.as_text()
    assert "all-reduce" in text
    # Rows: sums of narrow sketches and Gram matrices alone. Columns: each device's largest of each row of vh, too.
    assert gathered(text) <= (0 if split == "rows" else RANK * 8)
    assert found[0 if split == "rows" else 2].sharding.is_equivalent_to(placed, 2)


@pytest.mark.quick
@pytest.mark.parametrize("keywords", [{"rank": RANK}, {"rank": RANK, "core": "jacobi"}, {}], ids=str)
def test_rows_over_an_axis_of_shard_map(keywords: dict[str, Any]) -> None:
    """What is checked by name: values are replicated (check_vma), nothing is gathered, and the gradient is right."""
    a = jnp.asarray(A, jnp.float32)
    over = mesh()
    mapped = jax.jit(
        jax.shard_map(
            lambda x: fast_svd(x, axis_name="rows", **keywords),
            mesh=over,
            in_specs=P("rows", None),
            out_specs=(P("rows", None), P(), P()),
        )
    )
    placed = jax.device_put(a, NamedSharding(over, P("rows", None)))
    alone = fast_svd(a, **keywords)
    program = mapped.lower(placed).compile()
    found = program(placed)
    assert_close([x[..., :RANK] if i < 2 else x[:RANK] for i, x in enumerate(found)],
                 [x[..., :RANK] if i < 2 else x[:RANK] for i, x in enumerate(alone)])  # fmt: skip
    assert gathered(program.as_text()) == 0


def test_gradient_inside_shard_map() -> None:
    a = jnp.asarray(A, jnp.float32)
    weights = jnp.asarray(RNG.normal(size=(M, N)), jnp.float32)

    def loss(x: Any, w: Any, **keywords: Any) -> Any:
        u, s, vh = fast_svd(x, rank=3, **keywords)
        return jnp.sum((u * jnp.sin(s)) @ vh * w)

    def spread(x: Any, w: Any) -> Any:
        return jax.lax.psum(loss(x, w, axis_name="rows"), "rows")

    mapped = jax.shard_map(spread, mesh=mesh(), in_specs=(P("rows", None), P("rows", None)), out_specs=P())
    got = jax.jit(jax.grad(mapped))(a, weights)
    want = jax.jit(jax.grad(loss))(a, weights)
    # Rounding, 4 sqrt(M + N) units, through gaps of 0.2 s twice, once in the vectors and once in their derivative.
    assert np.linalg.norm(got - want) < 25 * 4 * (M + N) ** 0.5 * 2.0**-24 * np.linalg.norm(want)


@pytest.mark.quick
def test_a_wide_matrix_over_an_axis_is_refused_by_exact() -> None:
    mapped = jax.shard_map(
        lambda x: fast_svd(x, axis_name="rows", compute_uv=False), mesh=mesh(), in_specs=P("rows", None), out_specs=P()
    )
    with pytest.raises(ValueError, match=r"as many rows as columns, or more. Got a matrix of 16 x 64"):
        jax.eval_shape(mapped, jnp.ones((16, N)))
