"""Settings of the process that are put back."""

from __future__ import annotations

import jax
import pytest

from capibara.mesh.overrides import Overrides


@pytest.fixture
def overrides() -> Overrides:
    return Overrides({"jax_default_matmul_precision": (jax.default_matmul_precision, "bfloat16")})


def test_applied_and_put_back(overrides: Overrides) -> None:
    with jax.default_matmul_precision("tensorfloat32"):  # this thread's, which must not be taken for the process's
        overrides.apply()
        overrides.apply()
        assert overrides.applied
        assert jax.default_matmul_precision.get_global() == "bfloat16"
        overrides.undo()
    assert not overrides.applied
    assert jax.config.jax_default_matmul_precision is None
    overrides.undo()
    assert jax.config.jax_default_matmul_precision is None


def test_what_somebody_else_set_meanwhile_stays(overrides: Overrides) -> None:
    try:
        overrides.apply()
        jax.config.update("jax_default_matmul_precision", "float32")
        overrides.undo()
        assert jax.config.jax_default_matmul_precision == "float32"
    finally:
        jax.config.update("jax_default_matmul_precision", None)
