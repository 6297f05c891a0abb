"""What names stand for, which functions are traced, and what a comment silences."""

from __future__ import annotations

import ast

import pytest

from capibara.migrate.module import Module


def _resolved(source: str, expression: str) -> str | None:
    """Of the last expression in the source that is written so."""
    module = Module.parse(source)
    nodes = [
        node
        for node in module.nodes(ast.Name, ast.Attribute, ast.Call)
        if ast.unparse(node) == expression and isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
    ]
    return module.resolve(max(nodes, key=lambda node: (node.lineno, node.col_offset)))  # type: ignore[attr-defined]


@pytest.mark.quick(cases="all")
@pytest.mark.parametrize(
    ("source", "expression", "path"),
    [
        ("import jax\njax.numpy.dot", "jax.numpy.dot", "jax.numpy.dot"),
        ("import jax.numpy as jnp\njnp.dot", "jnp.dot", "jax.numpy.dot"),
        ("import jax.numpy\njax.lax.scan", "jax.lax.scan", "jax.lax.scan"),
        ("from jax import numpy as np\nnp.dot", "np.dot", "jax.numpy.dot"),
        ("from jax import numpy as np\nnp = 1\nnp.dot", "np.dot", None),
        ("import jax\nf = jax.jit\nf(x)", "f", "jax.jit"),
        ("import jax\na = b\nb = a\na", "a", None),
        ("import jax\ndef g(jax):\n  return jax.jit", "jax.jit", None),
        ("import jax\ndef g():\n  return jax.jit", "jax.jit", "jax.jit"),
        ("import jax\nclass A:\n  jax = 1\n  def g(self):\n    return jax.jit", "jax.jit", "jax.jit"),
        ("import jax\nclass A:\n  jax = 1\n  y = jax.jit", "jax.jit", None),
        ("import jax\n[jax.jit for jax in y]", "jax.jit", None),
        ("import jax\n[z for z in jax.devices()]", "jax.devices", "jax.devices"),
        ("import jax\ny = lambda jax: jax.jit", "jax.jit", None),
        ("import jax\nfor jax in y: pass\njax.jit", "jax.jit", None),
        ("import jax\nwith y as jax: pass\njax.jit", "jax.jit", None),
        ("import jax\ntry: pass\nexcept E as jax: pass\njax.jit", "jax.jit", None),
        ("import jax\ndef jax(): pass\njax.jit", "jax.jit", None),
        ("import jax\ndef g():\n  global jax\n  jax = 3\njax.jit", "jax.jit", None),
        ("import jax\ndef g():\n  if (jax := 3): pass\njax.jit", "jax.jit", "jax.jit"),
        ("import jax\njax, b = 1, 2\njax.jit", "jax.jit", None),
        ("import jax\nmatch y:\n  case {'a': jax}: pass\njax.jit", "jax.jit", None),
        ("from .x import jax\njax.jit", "jax.jit", ".x.jax.jit"),
        ("try:\n  import jax\nexcept ImportError:\n  jax = None\njax.jit", "jax.jit", "jax.jit"),
        (
            "try:\n  import jax.numpy as jnp\nexcept ImportError:\n  import numpy as jnp\njnp.dot",
            "jnp.dot",
            "jax.numpy.dot",
        ),
        ("if y:\n  import jax.numpy as jnp\nelse:\n  import numpy as jnp\njnp.dot", "jnp.dot", None),
        ("import capibara.jax as jax\njax.numpy.dot", "jax.numpy.dot", "jax.numpy.dot"),
        ("import importlib\nj = importlib.import_module('jax.numpy')\nj.dot", "j.dot", "jax.numpy.dot"),
        ("__import__('jax.numpy').jit", "__import__('jax.numpy').jit", "jax.jit"),
        ("import jax\ngetattr(jax, 'jit')", "getattr(jax, 'jit')", "jax.jit"),
        ("import jax\ngetattr(jax, 'jit', None)", "getattr(jax, 'jit', None)", None),
    ],
)
def test_a_name_is_what_it_was_imported_as(source: str, expression: str, path: str | None) -> None:
    assert _resolved(source, expression) == path


def test_capibara_is_told_from_jax_where_that_matters() -> None:
    module = Module.parse("import capibara.jax as jax\njax.jit(f)")
    assert (module.origin(module.calls[0].func), module.bindings) == ("capibara.jax.jit", {"jax": "capibara.jax"})


@pytest.mark.quick
def test_traced_functions_and_why() -> None:
    module = Module.parse(
        "import jax\nfrom functools import partial\n"
        "@jax.jit\ndef a(x):\n  def b(): pass\n"
        "@partial(jax.jit, static_argnums=1)\ndef c(x, n): pass\n"
        "def d(c, x): pass\njax.lax.scan(d, 0, x)\n"
        "def e(x): pass\njax.vmap(lambda x: x)\n"
        "def body(i, x): pass\njax.lax.fori_loop(0, 3, body, x)\n"
        "def f(x): pass\npartial(jax.jit, donate_argnums=0)(f)\n"
        "def g(x): pass\njax.lax.switch(i, [g], x)\n"
    )
    functions = {one.name: one for one in module.functions}
    transforms = {name: one.transform for name, one in functions.items()}
    assert transforms == {
        "a": "jax.jit",
        "b": "jax.jit",
        "c": "jax.jit",
        "d": "jax.lax.scan",
        "e": None,
        "<lambda>": "jax.vmap",
        "body": "jax.lax.fori_loop",
        "f": "jax.jit",
        "g": "jax.lax.switch",
    }
    assert functions["b"].why == "inside a, decorated with jax.jit"
    assert functions["d"].why == "given to jax.lax.scan in line 9"
    assert functions["a"].staged
    assert not functions["<lambda>"].staged
    assert functions["c"].call is not None
    assert [keyword.arg for keyword in functions["c"].call.keywords] == ["static_argnums"]
    assert {functions["e"].traced, functions["g"].traced} == {False, True}


def test_the_function_around_a_node() -> None:
    module = Module.parse("import jax\n@jax.jit\ndef a(x):\n  return [g(y) for y in x]\nclass B:\n  h(1)\ng(2)")
    around = {ast.unparse(call): module.function_around(call) for call in module.calls}
    assert around["g(y)"] is not None
    assert (around["g(y)"].name, around["h(1)"], around["g(2)"]) == ("a", None, None)


@pytest.mark.quick
def test_noqa() -> None:
    module = Module.parse("a  # noqa\nb  # noqa: CAP201, E501\nc  # NOQA:CAP3\nd = '# noqa'\n")
    silenced = [[module.noqa(line, code) for code in ("CAP201", "CAP301")] for line in range(1, 6)]
    assert silenced == [[True, True], [True, False], [False, True], [False, False], [False, False]]


def test_columns_are_characters() -> None:
    module = Module.parse('import jax\ny = "ñandú", jax.jit\n')
    node = next(node for node in module.nodes(ast.Attribute))
    found = module.finding(node, "CAP201", "gone")
    assert (found.column, found.end_column) == (14, 21)


def test_a_sum_deeper_than_the_stack() -> None:
    module = Module.parse("import jax\ny = " + " + ".join(["jax.pi"] * 900))
    assert {module.resolve(node) for node in module.nodes(ast.Attribute)} == {"jax.pi"}
