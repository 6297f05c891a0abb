"""CAP2xx: what is gone is an error where it runs, and nowhere else."""

from __future__ import annotations

import pytest

from capibara.migrate.rules import check_text
from capibara.migrate.settings import Settings


def _found(source: str) -> list[tuple[str, str]]:
    return [(one.code, one.severity) for one in check_text(source, "a.py", Settings(select=("CAP2",)))]


@pytest.mark.quick(cases="all")
@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("import jax\njax.tree_map(f, x)", "CAP203"),
        ("import jax.numpy as jnp\njnp.trapz(x)", "CAP203"),
        ("from jax.core import Primitive", "CAP202"),
        ("from jax.lib import xla_bridge\nxla_bridge.get_backend()", "CAP203"),
        ("import jax.experimental.maps", "CAP204"),
        ("from jax.experimental.maps import *", "CAP204"),
        ("from jax.config import config", "CAP202"),
        ("import jax\njax.xla_computation(f)", "CAP201"),
        ("from jax.numpy import *\ntrapz(x)", "CAP203"),
        ("import importlib\nimportlib.import_module('jax.experimental.maps')", "CAP204"),
        ("import jax\ngetattr(jax, 'tree_map')(f, x)", "CAP203"),
        ("import jax.numpy as jnp\njnp.clip(x, a_min=1)", "CAP205"),
        ("import jax\njax.ShapeDtypeStruct((1,), 'f4', None)", "CAP206"),
        ("from functools import partial\nimport jax\npartial(jax.checkpoint, concrete=True)", "CAP205"),
        ("import jax\njax.some_name_of_no_release", "CAP211"),
        ("from jax.core import unitvar", "CAP211"),
        ("import jax.numpy as jnp\njnp.arrray([1])", "CAP211"),
        ("import jax\njax.scipy.linalg.solve(a, b, sym_pos=True)", "CAP205"),
        # what capibara.jax does not serve either
        ("from capibara.jax.experimental import maps\nmaps.serial_loop('l', 2)", "CAP201"),
        ("from capibara.jax.lax import infeed", "CAP201"),
    ],
)
def test_what_breaks(source: str, code: str) -> None:
    found = _found(source)
    if code == "CAP206":
        code = found[0][0]  # the argument is gone as a whole
        assert code in ("CAP205", "CAP206")
    assert found == [(code, "error")]


@pytest.mark.quick(cases=3)
@pytest.mark.parametrize(
    "source",
    [
        "import jax\njax.config.update('a', 1)",
        "import jax\njax.checkpoint(f)",
        "import jax\njax.tree.map(f, x); jax.numpy.dot(x, x)",
        "import jax\njax.some_name_of_the_program = 1\njax.some_name_of_the_program",
        "import jax\njax.version.__version__; jax.numpy.ndarray.no_member; jax.config.jax_no_option",
        "import jax\ndef f(jax): return jax.tree_map",
        "import jax\njax.tree_map = jax.tree.map\njax.tree_map(f, x)",
        "import capibara.jax as jax\njax.tree_map(f, x)",
        "from .jax import tree_map",
        "import jax\njax.jit(f, no_release_took_this=1)",
        "import jax.numpy as jnp\njnp.clip(*args, **kwargs)",
        "x = 'jax.tree_map'",
        "import jax\nsetattr(jax, 'tree_map', jax.tree.map)\njax.tree_map(f, x)",
        "import jax\ndef f():\n  jax = g()\n  def h():\n    nonlocal jax\n    return jax.tree_map",
    ],
)
def test_what_does_not(source: str) -> None:
    assert _found(source) == []


@pytest.mark.quick(cases=3)
@pytest.mark.parametrize(
    "source",
    [
        "try:\n  from jax.core import Primitive\nexcept ImportError:\n  pass",
        "try:\n  import jax.new\nexcept ImportError:\n  from jax.core import Primitive",
        "import jax\ntry:\n  f = jax.tree_map\nexcept AttributeError:\n  f = None",
        "import jax\nf = jax.tree_map if hasattr(jax, 'tree_map') else None",
        "import jax\nif jax.__version_info__ < (0, 5):\n  f = jax.tree_map",
        "import jax\ndef g():\n  if hasattr(jax.tree, 'map'):\n    return jax.tree.map\n  return jax.tree_map",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  from jax.core import Primitive",
        "import jax\nok = hasattr(jax, 'tree_map') and jax.tree_map",
        "import contextlib, jax\nwith contextlib.suppress(AttributeError):\n  jax.tree_map",
        "import jax.numpy as jnp\ntry:\n  jnp.clip(x, a_min=1)\nexcept TypeError:\n  pass",
        "import jax, pytest\n@pytest.mark.skipif(not hasattr(jax, 'tree_map'), reason='')\ndef test(): jax.tree_map",
        "import jax, pytest\nif not hasattr(jax, 'tree_map'):\n  pytest.skip('')\njax.tree_map",
        "def f(x):\n  if not hasattr(x, '__array_namespace__'):\n    import jax.experimental.array_api",
        "import jax\naval = jax.typeof(x)\nif not hasattr(aval, 'vma'):\n  jax.tree_map",
        "import jax\ntry:\n  import jax.extend.core\n  NEW = True\nexcept ImportError:\n  NEW = False\n"
        "if not NEW:\n  jax.tree_map",
    ],
)
def test_what_is_guarded(source: str) -> None:
    found = _found(source)
    assert found
    assert set(found) == {("CAP208", "info")}


@pytest.mark.parametrize(
    "source",
    [
        "import jax\ntry:\n  f = jax.tree_map\nexcept KeyError:\n  pass",
        "import jax\nif backend == 'jax':\n  f = jax.tree_map",
        "import jax\nif has_bias:\n  f = jax.tree_map",
        "import jax\ntry:\n  f = jax.tree_map\nexcept Exception:\n  raise",
        # the newest jax is let through
        "import jax\nif jax.__version_info__ < (0, 4, 30):\n  raise ImportError\njax.tree_map",
        "import jax\nassert jax.__version_info__ >= (0, 4, 30)\njax.tree_map",
        "import jax\nif Version(jax.__version__) >= Version('0.4.30'):\n  jax.tree_map",
        "import jax\nif jax.__version_info__[:2] == (0, 4):\n  pass\nelse:\n  jax.tree_map",
        "import jax\nif hasattr(jax, 'jit'):\n  jax.tree_map",
        "import jax\nif TYPE_CHECKING:\n  pass\nelse:\n  jax.tree_map",
        # that there is a jax is no news
        "try:\n  import jax\n  HAS_JAX = True\nexcept ImportError:\n  HAS_JAX = False\nif HAS_JAX:\n  jax.tree_map",
        "import jax\nfrom utils import is_jax_available\nif is_jax_available():\n  jax.tree_map",
        "try:\n  import jax\n  jax.tree_map\nexcept ImportError:\n  pass",
        "import pytest\njax = pytest.importorskip('jax')\njax.tree_map",
        # about something else
        "import jax\nif hasattr(x, 'shape'):\n  jax.tree_map",
        "import jax\nif hasattr(self.model, 'apply'):\n  jax.tree_map",
        "import jax\ntry:\n  import wandb\n  HAS_WANDB = True\nexcept ImportError:\n  HAS_WANDB = False\n"
        "if HAS_WANDB:\n  jax.tree_map",
        "import jax\ntry:\n  import wandb\nexcept ImportError:\n  jax.tree_map",
        "import jax, pytest\nwith pytest.raises(ValueError):\n  jax.tree_map",
        "import jax, numpy\nif numpy.__version__ >= '2':\n  jax.tree_map",
        "import jax\nAPI_VERSION = 2\nif API_VERSION == 2:\n  jax.tree_map",
    ],
)
def test_what_is_no_guard(source: str) -> None:
    assert _found(source) == [("CAP203", "error")]


def test_an_import_that_fails_with_another_message_is_an_error() -> None:
    again = "try:\n  from jax.lib import xla_bridge\nexcept ImportError as e:\n  raise ImportError('jax?') from e"
    assert _found(again) == [("CAP203", "error")]
    assert _found(again.replace("raise ImportError('jax?') from e", "raise SkipTest")) == [("CAP208", "info")]


def test_a_second_choice_that_is_gone_too() -> None:
    source = "try:\n  from jax.experimental import maps\nexcept ImportError:\n  from jax.experimental import stax"
    assert [severity for _, severity in _found(source)] == ["info", "error"]


def test_annotations_that_nobody_evaluates() -> None:
    late = "from __future__ import annotations\nimport jax\ndef f(k: jax.random.KeyArray): pass"
    assert _found(late) == [("CAP209", "warning")]
    assert _found(late.partition("\n")[2]) == [("CAP203", "error")]


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from jax._src.core import Jaxpr, Literal\nJaxpr", [("CAP210", "warning")]),
        ("import jax._src.core as core\ncore.Jaxpr", [("CAP210", "warning")]),
        ("from jax import _src", [("CAP210", "warning")]),
        ("import jax\njax._src.core.Jaxpr", [("CAP210", "warning")]),
        ("try:\n  from jax._src import core\nexcept ImportError:\n  core = None", [("CAP210", "info")]),
        ("from mine._src import core\nfrom ._src import core", []),
        ("import jax._src.core\njax._src.core.Jaxpr", [("CAP210", "warning")]),
        ("from jax import lax\nlax._reduce_window_sum(x)", [("CAP210", "warning")]),
        ("from jax.interpreters.xla import _DeviceArray", [("CAP210", "warning")]),
        ("import jax\njax.__version__; jax.jit.__name__", []),
    ],
)
def test_private_names(source: str, found: list[tuple[str, str]]) -> None:
    assert _found(source) == found


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize(
    ("source", "found"),
    [
        # what a module of jax.experimental imports for itself is there, and not in the table
        ("from jax.experimental import multihost_utils\nmultihost_utils.core", [("CAP211", "warning")]),
        ("import jax\nf = jax.new_name if hasattr(jax, 'new_name') else None", [("CAP208", "info")]),
        ("from __future__ import annotations\nimport jax\ndef f(x: jax.core.Unit): pass", [("CAP209", "warning")]),
    ],
)
def test_names_of_no_release(source: str, found: list[tuple[str, str]]) -> None:
    assert _found(source) == found


def test_a_name_that_nothing_stands_in_for_is_said_besides_its_module() -> None:
    # Importing the module from capibara.jax mends the first line and not the second.
    source = "from jax.experimental import maps\nmaps.Mesh(devices, names)\nmaps.serial_loop('l', 2)\n"
    found = check_text(source, "a.py", Settings(select=("CAP2",)))
    assert [(one.line, one.severity) for one in found] == [(1, "error"), (3, "error")]
    assert "named axes are gone" in found[1].fix


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize(
    ("test", "severity"),
    [
        ("jax.__version__ < '0.5'", "warning"),  # "0.12" is before "0.5" as text
        ("'0.4.30' <= jax.__version__", "warning"),
        ("jax.__version__ >= '0.11'", "info"),
        ("jax.__version__ > '0.0.9'", "info"),
        ("jax.__version__ == '0.4.30'", None),
        ("jax.__version_info__ < (0, 5)", None),
        ("Version(jax.__version__) < Version('0.5')", None),
        ("numpy.__version__ < '0.5'", None),
    ],
)
def test_versions_as_text(test: str, severity: str | None) -> None:
    source = f"import jax, numpy\nfrom packaging.version import Version\nold = {test}\n"
    assert _found(source) == ([] if severity is None else [("CAP212", severity)])


def test_a_chain_of_a_thousand_calls_is_followed() -> None:
    assert _found("import jax\nx = jax.jit" + ".b()" * 900 + "\njax.tree_map(f)") == [("CAP203", "error")]
