"""Small programs that the tests of `trace` and `spread` share."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import pytest


@pytest.fixture(scope="session")
def llama() -> ModuleType:
    """A decoder in plain JAX, the one that was compiled for v4 and measured."""
    path = Path(__file__).parents[2] / "benchmarks" / "plain_llama.py"
    spec = importlib.util.spec_from_file_location("plain_llama", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def shape() -> Callable[..., jax.ShapeDtypeStruct]:
    def make(*sizes: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))

    return make


@pytest.fixture(scope="session")
def momentum() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A training step whose optimizer keeps one array a weight."""

    def make(loss: Callable[..., Any]) -> Callable[..., Any]:
        def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
            value, grads = jax.value_and_grad(loss)(params, batch)
            state = jax.tree.map(lambda m, g: 0.9 * m + g, state, grads)
            return jax.tree.map(lambda p, m: p - 0.1 * m, params, state), state, value

        return step

    return make
