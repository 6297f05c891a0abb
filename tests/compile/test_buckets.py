"""Many sizes, few programs: what is declared is padded and cut, and nothing else is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.compile.buckets import bucketed, power_of_two_buckets
from capibara.compile.events import count_compilations


@pytest.mark.quick
def test_every_length_runs_in_a_program_of_its_bucket() -> None:
    @bucketed(
        {"length": power_of_two_buckets(4, 16)},
        pad={"x": {1: "length"}, "mask": {1: "length"}},
        cut={1: "length"},
        fill={"x": np.nan},
        on_host=True,
    )
    def centred(x: jax.Array, mask: jax.Array) -> jax.Array:
        mean = jnp.sum(jnp.where(mask, x, 0), 1, keepdims=True) / mask.sum(1, keepdims=True)
        return jnp.where(mask, x, 0) - mean

    rng = np.random.default_rng(0)
    with count_compilations() as counts:
        for length in range(1, 17):
            x = rng.standard_normal((2, length), np.float32)
            given = centred(x, np.ones((2, length), bool))
            assert given.shape == x.shape
            np.testing.assert_allclose(given, x - x.mean(1, keepdims=True), atol=1e-5)
    assert counts.programs == 3  # of 4, 8 and 16: nothing else was compiled
    assert centred.sizes_seen == 3


def test_the_true_size_and_several_results() -> None:
    @bucketed({"n": (4, 8)}, pad={"x": {0: "n"}}, cut=[{0: "n"}, {}], true_sizes={"count": "n"}, fill={"x": 100})
    def mean(x: jax.Array, count: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        kept = jnp.where(jnp.arange(x.shape[0]) < count, x, 0)
        return kept, kept.sum() / count

    kept, average = mean(jnp.arange(3.0))
    assert (kept.tolist(), float(average)) == ([0, 1, 2], 1.0)
    kept, average = mean(jnp.arange(5.0))
    assert (kept.shape, float(average)) == ((5,), 2.0)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="at most the largest bucket, 8"):
        bucketed({"n": (4, 8)}, pad={"x": {0: "n"}})(lambda x: x)(np.ones(9))
    with pytest.raises(ValueError, match="has one size in a call"):
        bucketed({"n": (4, 8)}, pad={"x": {0: "n"}, "y": {0: "n"}})(lambda x, y: x)(np.ones(3), np.ones(4))
    with pytest.raises(ValueError, match="a size that has buckets"):
        bucketed({"n": (4,)}, pad={"x": {0: "m"}})
    with pytest.raises(ValueError, match="whole numbers that grow"):
        bucketed({"n": (8, 4)}, pad={"x": {0: "n"}})
    with pytest.raises(ValueError, match="an argument of"):
        bucketed({"n": (8,)}, pad={"y": {0: "n"}})(lambda x: x)
    with pytest.raises(ValueError, match="cut to the size of an argument"):
        bucketed({"n": (8,), "m": (8,)}, pad={"x": {0: "n"}}, cut={0: "m"})
    with pytest.raises(ValueError, match="has a dimension 1"):
        bucketed({"n": (4, 8)}, pad={"x": {1: "n"}})(lambda x: x)(np.ones(3))
