"""What a row of the embedding gets from a batch in which its token is frequent."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.models import decoder


@pytest.mark.quick
@pytest.mark.parametrize("stored", [jnp.float32, jnp.bfloat16])
def test_the_gradient_of_a_frequent_token_is_summed_in_float32(stored) -> None:
    # 4096 times 1/64: a sum in bfloat16 stops growing at 256/64, where half of its step is what is added.
    table = jnp.zeros((8, 4), stored)
    ids = jnp.full((2, 2048), 3)
    _, pull = jax.vjp(lambda t: decoder._rows(t, ids, jnp.bfloat16), table)
    (gradient,) = pull(jnp.full((2, 2048, 4), 1 / 64, jnp.bfloat16))
    assert gradient.dtype == stored
    np.testing.assert_array_equal(np.asarray(gradient, np.float32)[3], 64.0)
    assert not np.asarray(gradient, np.float32)[[0, 1, 2, 4, 5, 6, 7]].any()
