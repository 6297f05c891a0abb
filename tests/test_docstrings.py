"""Every example in a docstring runs and gives what it says."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

SOURCES = Path(__file__).parents[1] / "src"
# What an example may use without importing it, as a reader would.
NAMES = {"jax": jax, "jnp": jnp, "np": np}


def _modules() -> list[str]:
    found = (path for path in SOURCES.rglob("*.py") if ">>> " in path.read_text(encoding="utf-8"))
    return sorted(".".join(path.relative_to(SOURCES).with_suffix("").parts).removesuffix(".__init__") for path in found)


def test_there_are_examples() -> None:
    assert len(_modules()) > 30


@pytest.mark.parametrize("name", _modules())
def test_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), extraglobs=NAMES, optionflags=doctest.ELLIPSIS)
    assert result.attempted
    assert not result.failed
