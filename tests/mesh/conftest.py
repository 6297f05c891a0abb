"""What the tests of the optimisation context share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import pytest

from capibara.mesh import context
from capibara.mesh.context import active


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Every test leaves this thread as it was."""
    yield
    assert not active()
    assert jax.config.jax_default_matmul_precision is None
    assert jax.sharding.get_mesh().empty
    assert context._INNERMOST.get() is None


@pytest.fixture
def traced() -> tuple[Callable[[float], jax.Array], list[bool]]:
    """A jitted function that adds one where a context is active, and what each of its traces saw."""
    traces: list[bool] = []

    @jax.jit
    def function(x: float) -> jax.Array:
        traces.append(active())
        return jnp.asarray(x) + (1 if active() else 0)

    return function, traces
