"""What is rewritten means the same, keeps its form, and is rewritten once."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.migrate.edits import LOADED
from capibara.migrate.fixes import diff, fix_file, fix_text, write
from capibara.migrate.rules import check_text
from capibara.migrate.settings import Settings

OLD = '''#!/usr/bin/env python
"""An old program."""
import jax, os
import jax.numpy as jnp
from jax.core import (
    Tracer,  # stays
    Jaxpr,  # goes
    Literal as L,
)
from jax.lib import xla_bridge
from jax.experimental.shard_map import shard_map
import jax.experimental.maps

h = shard_map(g, mesh, P(), P(), check_rep=True)
y = jax.tree_map(lambda a: a + 1, x)  # a comment
z = (jnp.product)(y), jnp.NINF, jnp.clip( x, a_min = 1 ), jnp.reshape(x, newshape=(2,)), xla_bridge.get_backend()
m = jax.experimental.maps.Mesh
c = jax.xla_computation(f)
'''
NEW = '''#!/usr/bin/env python
"""An old program."""
import jax, os
import capibara.jax
import jax.numpy as jnp
from jax.core import (
    Tracer,  # stays
)
from jax.extend.core import Jaxpr, Literal as L  # goes
from jax.extend import backend as xla_bridge
from jax import shard_map

h = shard_map(g, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=True)
y = jax.tree.map(lambda a: a + 1, x)  # a comment
z = (jnp.prod)(y), (-jnp.inf), jnp.clip( x, min = 1 ), jnp.reshape(x, shape=(2,)), xla_bridge.get_backend()
m = jax.sharding.Mesh
c = capibara.jax.xla_computation(f)
'''


@pytest.mark.quick
def test_a_program() -> None:
    fixed = fix_text(OLD, "a.py")
    assert fixed.after == NEW
    assert fixed.from_dropin == ("jax.xla_computation",)
    assert not any(one.severity == "error" for one in check_text(NEW, "a.py", Settings()))


@pytest.mark.quick
def test_to_capibara() -> None:
    fixed = fix_text(
        "import jax\nimport jax.numpy as jnp\nfrom jax import jit\njax.tree_map, jnp.in1d\n", "a.py", "capibara"
    )
    assert fixed.after == (
        "import capibara.jax as jax\nimport capibara.jax.numpy as jnp\nfrom capibara.jax import jit\n"
        "jax.tree.map, jnp.in1d\n"
    )


def test_without_adapters_such_names_stay() -> None:
    source = "import jax\njax.xla_computation(f), jax.tree_map\n"
    assert fix_text(source, "a.py", adapters=False).after == "import jax\njax.xla_computation(f), jax.tree.map\n"


def test_what_is_guarded_or_silenced_or_not_wanted_stays() -> None:
    for source in (
        "import jax\nif hasattr(jax, 'tree_map'):\n    jax.tree_map\n",
        "import jax\njax.tree_map  # noqa: CAP203\n",
        "import jax\ndef f(jax): return jax.tree_map\n",
    ):
        assert not fix_text(source, "a.py").changed
    assert not fix_text("import jax\njax.tree_map\n", "a.py", codes=frozenset({"CAP202"})).changed


_PARTS = [
    "import jax\n",
    "import jax.numpy as jnp, os\n",
    "from jax import tree_map, jit  # both\n",
    "from jax.core import (\n    Primitive,  # one\n    Tracer,\n)\n",
    "# above\nfrom jax.lib import xla_bridge\nxla_bridge.get_backend()\n",
    "from jax.experimental.shard_map import shard_map\nshard_map(f, m, a, b, auto=c)\n",
    "from jax.experimental.shard_map import shard_map\nshard_map(f, m, a, check_rep=False)\n",
    "import jax.experimental.maps\njax.experimental.maps.Mesh\n",
    "def f():\n    from jax.config import config\n    return config, jnp.trapz(1)\n",
    "jax.tree_map(f, jnp.clip(x, a_min=1)); jax.xla_computation\n",
    "from jax.numpy import *\ntrapz(x)\n",
    "import jax.experimental.stax as stax; stax.serial()\n",
    "try:\n    from jax.core import Jaxpr\nexcept ImportError:\n    Jaxpr = None\n",
    "class A:\n    x: jax.random.KeyArray = jnp.NINF\n",
]


@pytest.mark.quick
@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(_PARTS), min_size=1, max_size=6), st.sampled_from(["jax", "capibara"]), st.booleans())
def test_fixing_twice_is_fixing_once(parts: list[str], target: str, windows: bool) -> None:
    source = "".join(parts)
    source = source.replace("\n", "\r\n") if windows else source
    fixed = fix_text(source, "a.py", target)  # type: ignore[arg-type]
    ast.parse(fixed.after)
    assert not fix_text(fixed.after, "a.py", target).changed  # type: ignore[arg-type]
    assert ("\r\n" in fixed.after) == windows
    assert not windows or "\n" not in fixed.after.replace("\r\n", "")


def test_a_file_keeps_its_mode_its_encoding_and_its_link(tmp_path: Path) -> None:
    real = tmp_path / "real.py"
    real.write_bytes("# coding: latin-1\r\nimport jax  # ñ\r\njax.tree_map\r\n".encode("latin-1"))
    real.chmod(0o755)
    link = tmp_path / "link.py"
    link.symlink_to(real)
    data, fixed = fix_file(link, Settings())
    assert real.read_bytes() != data
    write(link, data)
    assert link.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o755
    assert real.read_bytes() == "# coding: latin-1\r\nimport jax  # ñ\r\njax.tree.map\r\n".encode("latin-1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.py", "real.py"]
    assert "-jax.tree_map" in diff(fixed, "real.py")


def test_a_notebook_keeps_the_rest(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": ["jax.tree_map ñ"]},
        {"cell_type": "code", "metadata": {"a": 1}, "outputs": [], "source": ["%matplotlib inline\n", "import jax"]},
        {"cell_type": "code", "outputs": [], "source": "jax.tree_map(f, x)\n!ls"},
    ]
    file = tmp_path / "a.ipynb"
    text = json.dumps({"cells": cells, "nbformat": 4}, indent=1, ensure_ascii=False) + "\n"
    file.write_text(text, encoding="utf-8")
    data, _ = fix_file(file, Settings())
    assert data.decode() == text.replace("jax.tree_map(f, x)", "jax.tree.map(f, x)")


def test_modules_that_import_jax_loads() -> None:
    """A dotted name reaches them, so that no import is added."""
    import subprocess
    import sys

    code = "import jax, sys; print(*(m for m in sys.modules if m.split('.')[0] == 'jax'))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert set(loaded) >= LOADED


@pytest.mark.quick(cases=3)
@pytest.mark.parametrize(
    ("source", "kept"),
    [
        # an import stays as long as something needs it
        ("from jax.experimental import maps\ndef f(jax): return maps.Mesh(jax)\n", "import maps"),
        ("from jax.experimental import maps\nmaps.Mesh(1)  # noqa: CAP202\n", "import maps"),
        ("from jax.experimental import maps\n__all__ = ['maps']\nmaps.Mesh\n", "import maps"),
        ("from jax.experimental import maps\nx: 'maps.Mesh'\nmaps.Mesh\n", "import maps"),
        # what is only bound for type checkers, or later, is not counted on
        (
            "if TYPE_CHECKING:\n  import jax\nfrom jax.experimental import maps\nm = maps.Mesh\n",
            "\nimport jax.sharding\nm",
        ),
        ("from jax.experimental import maps\nm = maps.Mesh\nimport jax\n", "import jax.sharding\nm"),
        # the flags are set before jax is imported
        (
            "import os\nos.environ['A'] = '1'\ndef f():\n  from jax.experimental import maps\n  maps.Mesh\n",
            "'1'\nimport jax",
        ),
        ("import jax\njax.tree_map = mine\njax.tree_map(f, x)\n", "\njax.tree_map(f, x)"),
        ("if new: from jax import tree_map\n", "if new: from jax.tree_util import tree_map"),
        ("import jax.config\njax.config.update('a', 1)\n", "import jax\njax.config.update"),
    ],
)
def test_no_name_is_left_without_its_import(source: str, kept: str) -> None:
    fixed = fix_text(source, "a.py")
    assert kept in fixed.after
    assert fix_text(fixed.after, "a.py").after == fixed.after
