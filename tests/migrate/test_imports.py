"""CAP1xx: every form of importing jax, and the line that replaces it."""

from __future__ import annotations

import pytest

from capibara.migrate.rules import check_text
from capibara.migrate.settings import Settings


@pytest.mark.quick(cases="all")
@pytest.mark.parametrize(
    ("source", "code", "fix"),
    [
        ("import jax", "CAP101", "import capibara.jax as jax"),
        ("import jax as j", "CAP101", "import capibara.jax as j"),
        ("import jax.numpy as jnp", "CAP101", "import capibara.jax.numpy as jnp"),
        ("import jax.numpy", "CAP101", "import capibara.jax as jax and import capibara.jax.numpy"),
        ("from jax import jit, vmap as v", "CAP102", "from capibara.jax import jit, vmap as v"),
        ("from jax.experimental import pallas", "CAP102", "from capibara.jax.experimental import pallas"),
        ("from jax.numpy import *", "CAP103", "from capibara.jax.numpy import *"),
        (
            "import importlib\nimportlib.import_module('jax.numpy')",
            "CAP104",
            'importlib.import_module("capibara.jax.numpy")',
        ),
        ("__import__('jax')", "CAP104", 'importlib.import_module("capibara.jax")'),
    ],
)
def test_each_form(source: str, code: str, fix: str) -> None:
    (found,) = check_text(source, "a.py", Settings(select=("CAP1",)))
    assert (found.code, found.severity, found.fix) == (code, "info", f"write {fix}")
    if code != "CAP104":
        exec(fix.replace(" and ", "\n"), {})


def test_others_are_not_jax() -> None:
    source = "import jaxlib, jaxtyping\nfrom .jax import x\nfrom jax_md import y\nimport capibara.jax as jax"
    assert check_text(source, "a.py", Settings(select=("CAP1",))) == ()
