# ruff: noqa: E501
"""What each performance rule says, and beside it what it must leave alone."""

from __future__ import annotations

import textwrap

import pytest

from capibara.migrate.rules import check_text
from capibara.migrate.settings import Settings

_HEAD = "import functools\nimport jax\nimport jax.numpy as jnp\nimport numpy as np\nimport equinox as eqx\n"


def _codes(source: str) -> list[str]:
    found = check_text(_HEAD + textwrap.dedent(source), "text.py", Settings(select=("CAP3",)))
    assert all(one.message and one.fix and one.severity in ("warning", "info") for one in found)
    return [one.code for one in found]


_JIT = "@jax.jit\ndef f(x, y=None):\n    "

WRONG = {
    "CAP301": [
        _JIT + "x = jnp.sin(x)\n    for row in x:\n        y = row\n    return y",
        _JIT + "for i in range(x.shape[0]):\n        y = x[i]\n    return y",
        _JIT + "return [x[i] for i in range(len(x))] + [x.shape]",
        "def body(c, x):\n    for i, r in enumerate(jnp.sin(x)):\n        c = r\n    return c, x\njax.lax.scan(body, 0, 1)",
    ],
    "CAP302": [
        _JIT + "return jnp.sum(x).item()",
        _JIT + "return float(jnp.sum(x))",
        _JIT + "return np.asarray(jnp.sum(x))",
        _JIT + "return jax.device_get(x)",
        _JIT + "return x.tolist()",
        "@functools.partial(jax.jit, static_argnums=1)\ndef f(x, n):\n    return int(x.T[0])",
        "def g(a, n):\n    return float(a) + int(n)\n" + _JIT + "return g(jnp.sum(x), 2)",
        "def g(a):\n    return a.item()\ndef h(b):\n    return g(b)\n" + _JIT + "return h(x)",
        _JIT + "def g(a):\n        return float(a)\n    return g(jnp.sum(x))",
        _JIT + "loss, grads = jax.value_and_grad(g)(x)\n    return float(loss), grads",
        _JIT + "return float(sum(jnp.sum(a) for a in jax.tree.leaves(x)))",
    ],
    "CAP303": [
        _JIT + "print(x)",
        _JIT + 'print(f"loss {x}")',
        _JIT + 'print("loss {}".format(jnp.sum(x)))',
        "import logging\n" + _JIT + 'logging.info("loss %s", x)',
        "import logging\nlog = logging.getLogger('a')\n" + _JIT + 'log.info("loss %s", x)',
        "step = jax.grad(g)\n" + _JIT + "slope = step(x)\n    print(slope)",
    ],
    "CAP304": [
        "x = jnp.zeros(3, dtype=jnp.float64)",
        'x = jnp.zeros(3, dtype="float64")',
        "x = y.astype(jnp.float64)",
        "x = jnp.float64(1)",
        'jax.config.update("jax_enable_x64", True)',
        'import os\nos.environ["JAX_ENABLE_X64"] = "1"',
    ],
    "CAP305": [
        "for i in y:\n    z = jax.jit(lambda x: x + i)(i)",
        "for i in y:\n    @jax.jit\n    def g(x):\n        return x + i\n    g(i)",
        "for i in y:\n    g = jax.jit(functools.partial(f, i))\n    g(i)",
        "def f(x):\n    return jax.jit(lambda y: y + 1)(x)",
    ],
    "CAP306": [
        "def f(key):\n    a = jax.random.normal(key)\n    b = jax.random.uniform(key)\n    return a, b",
        "def f(key):\n    a, b = jax.random.split(key)\n    return jax.random.normal(key)",
        "def f(key):\n    for i in y:\n        jax.random.normal(key)",
        "def f(key):\n    return [jax.random.normal(key) for i in y]",
        "def f(key):\n    if y:\n        a = jax.random.normal(key)\n    return jax.random.normal(key)",
        "def f(keys):\n    return jax.random.normal(keys[0]), jax.random.normal(keys[0])",
        "def f(self):\n    return jax.random.normal(self.key) + jax.random.normal(self.key)",
        "def f(key):\n    while y:\n        k, s = jax.random.split(key)\n        jax.random.normal(s)",
    ],
    "CAP307": [
        "w = jnp.zeros((300, 512))",
        "w = jax.random.normal(key, (50257, 768))",
        "w = eqx.nn.Linear(784, 256, key=key)",
    ],
    "CAP308": [
        "@jax.jit\ndef step(state, batch):\n    state = update(state, batch)\n    return state, 1.0",
        "def step(params, opt_state):\n    new_params = g(params)\n    return new_params, 0\nrun = jax.jit(step)",
        "@jax.jit\ndef step(state, batch):\n    return state.apply_gradients(grads=batch)",
    ],
    "CAP309": [
        "@functools.partial(jax.jit, static_argnums=1)\ndef f(x, s):\n    return x\nf(1, [1, 2])",
        '@functools.partial(jax.jit, static_argnames=("s",))\ndef f(x, s):\n    return x\nf(1, s={"a": 1})',
        "def f(x, s):\n    return x\ng = jax.jit(f, static_argnums=(1,))\ng(1, np.array([1]))",
        "@functools.partial(jax.jit, static_argnums=1)\ndef f(x, s=[]):\n    return x",
        "jax.jit(f, static_argnums=1)(x, {1, 2})",
    ],
}

RIGHT = {
    "CAP301": [
        "def f(x):\n    for row in jnp.sin(x):\n        y = row",  # not traced
        _JIT + "for i in range(x.ndim):\n        y = x.shape[i]\n    return y",
        _JIT + "for leaf in x:\n        y = leaf\n    return y",  # may be a tuple
        _JIT + "for part in jnp.split(x, 2):\n        y = part\n    return y",
        _JIT + "for i in range(3):\n        x = x + x.shape[0]\n    return x",
    ],
    "CAP302": [
        "def f(x):\n    return float(jnp.sum(x))",
        _JIT + "return float(x.shape[0])",
        _JIT + "return np.asarray([1, 2])",
        "@functools.partial(jax.jit, static_argnames='n')\ndef f(x, n):\n    return int(n)",
        "@jax.jit\ndef f(x):\n    def host(v):\n        return np.asarray(v.T)\n    return jax.pure_callback(host, x, x)",
        "@eqx.filter_jit\ndef f(x):\n    return int(x)",
        "def g(a):\n    return float(jnp.sum(a))\ndef f(x):\n    return g(x)",  # nobody traces it
        "def g(a):\n    return np.asarray(a.T)\n" + _JIT + "return jax.pure_callback(g, x, jnp.sum(x))",
        _JIT + "(loss, n), grads = jax.value_and_grad(g, has_aux=True)(x)\n    return int(n)",
        _JIT + "return float(sum(n for n in (1, 2)))",
    ],
    "CAP303": [_JIT + 'print("traced")', _JIT + "print(x.shape)", "def f(x):\n    print(x)", _JIT + 'jax.debug.print("{x}", x=x)',
        _JIT + "zero = jax.tree.map(lambda _: True, x)\n    print(zero)",
        "def g(a, blocks):\n    print(blocks)\n" + _JIT + "return g(x.cells, x.blocks)",
    ],
    "CAP304": [
        "x = np.zeros(3, dtype=np.float64)",
        "if x.dtype == jnp.float64:\n    pass",
        'jax.config.update("jax_enable_x64", False)',
        "x = y.astype(np.float64)",  # of whose array is not known
    ],
    "CAP305": [
        "fs = [jax.jit(f) for f in y]",
        "def f(x):\n    return jax.jit(g)(x)",
        "def test_f():\n    jax.jit(lambda x: x)(1)",
        "@functools.lru_cache\ndef f(x):\n    return jax.jit(lambda y: y)(x)",
        "g = jax.jit(lambda x: x)\nfor i in y:\n    g(i)",
        "@jax.jit\ndef f(x):\n    return jax.jit(lambda y: y)(x)",
    ],
    "CAP306": [
        "def f(key):\n    key, s = jax.random.split(key)\n    a = jax.random.normal(s)\n    return jax.random.normal(key)",
        "def f(key):\n    if y:\n        return jax.random.normal(key)\n    return jax.random.uniform(key)",
        "def f(key):\n    if y:\n        a = jax.random.normal(key)\n    else:\n        a = jax.random.uniform(key)\n    return a",
        "def f(key):\n    return [jax.random.normal(jax.random.fold_in(key, i)) for i in y]",
        "def f(key):\n    return [jax.random.normal(k) for k in jax.random.split(key, 3)]",
        "def f(key):\n    for i in y:\n        key, s = jax.random.split(key)\n        jax.random.normal(s)",
        "def f(key):\n    for i in y:\n        if i:\n            x = jax.random.normal(key)\n            break",
        "def f(key):\n    if a:\n        x = jax.random.normal(key)\n    if not a:\n        x = jax.random.uniform(key)\n    return x",
        "def f(keys):\n    return jax.random.normal(keys[0]), jax.random.normal(keys[1])",
        "def f(self):\n    a = jax.random.normal(self.key)\n    self.step()\n    return a + jax.random.normal(self.key)",
        "def f(key):\n    a = jax.random.normal(key) if y else jax.random.uniform(key)\n    return a",
        "def f(key):\n    try:\n        return jax.random.normal(key)\n    except ValueError:\n        return jax.random.uniform(key)",
    ],
    "CAP307": ["w = jnp.zeros((256, 512))", "w = jnp.zeros((10, 300))", "w = jnp.zeros((300,))", "w = jnp.zeros((n, 300))"],
    "CAP308": [
        '@functools.partial(jax.jit, donate_argnames="state")\ndef step(state):\n    state = g(state)\n    return state',
        "@jax.jit\ndef loss(params, batch):\n    return jnp.sum(params)",
        "@jax.jit\ndef f(x):\n    x = x + 1\n    return x",
        "def step(state):\n    state = g(state)\n    return state",
    ],
    "CAP309": [
        "@functools.partial(jax.jit, static_argnums=1)\ndef f(x, s):\n    return x\nf([1], (1, 2))",
        "@jax.jit\ndef f(x, s):\n    return x\nf(1, [1, 2])",
    ],
}  # fmt: skip


@pytest.mark.quick(cases="all")
@pytest.mark.parametrize("code", list(WRONG))
def test_what_is_wrong_is_said_once(code: str) -> None:
    for source in WRONG[code]:
        assert _codes(source) == [code], source


@pytest.mark.quick(cases="all")
@pytest.mark.parametrize("code", list(RIGHT))
def test_what_is_right_is_left_alone(code: str) -> None:
    for source in RIGHT[code]:
        assert code not in _codes(source), source


@pytest.mark.quick
def test_a_loop_names_the_array_and_a_key_the_line_of_its_first_draw() -> None:
    source = "import jax\n\n@jax.jit\ndef f(x):\n    for i in range(x.shape[0]):\n        y = x[i]\n    return y\n"
    (found,) = check_text(source, "text.py", Settings(select=("CAP3",)))
    assert (found.line, found.column) == (5, 14)
    assert "`x`" in found.message
    assert "jax.jit" in found.message
    assert "scan" in found.fix
    drawn = "import jax\ndef f(key):\n    a = jax.random.normal(key)\n    return a + jax.random.normal(key)\n"
    (found,) = check_text(drawn, "text.py", Settings(select=("CAP3",)))
    assert found.line == 4
    assert "line 3" in found.message
    silenced = drawn.replace("normal(key)\n", "normal(key)  # noqa: CAP306\n")
    assert check_text(silenced, "text.py", Settings(select=("CAP3",))) == ()


@pytest.mark.quick
def test_names_bound_many_times_over_take_no_time() -> None:
    # Each binding asks for the one before: without memory this is ten to the sixteenth lookups.
    source = "def f(x):\n" + "".join(f"    x = x.replace('{n}', '')\n" for n in range(10)) + "    return jax.jit(x)\n"
    assert check_text("import jax\n" + source, "text.py", Settings()) is not None
