"""What tells one call of an op from another, when its decision is looked up."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from capibara.kernels.ops.conv import conv2d
from capibara.kernels.ops.linalg import gemm

X = jnp.ones((1, 6, 6, 2))
W = jnp.ones((3, 3, 2, 2))


def test_a_number_inside_of_a_tuple_has_a_type() -> None:
    """(2.0, 2.0) is (2, 2) to a dictionary, and not to the op's check."""
    conv2d(X, W, strides=(2, 2))
    with pytest.raises(ValueError, match="stride"):
        conv2d(X, W, strides=(2.0, 2.0))


def test_a_config_that_no_dictionary_can_hold() -> None:
    with pytest.raises(ValueError, match=r"config=\{'block': 3\}.*the config's own class"):
        gemm(jnp.ones((2, 2)), jnp.ones((2, 2)), config={"block": 3}, implementation="xla")
