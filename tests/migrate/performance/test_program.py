"""A program as a user writes one: the rules that no published package broke fire in it, and jax agrees with them."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from capibara.migrate.rules import check_text
from capibara.migrate.settings import Settings

PROGRAM = '''\
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np

log = logging.getLogger(__name__)


class Recurrent:
    """A small recurrent network, and how it is trained."""

    def __init__(self, width=16):
        self.width = width

    def init(self, key):
        inner, outer = jax.random.split(key)
        return {
            "inner": 0.1 * jax.random.normal(inner, (self.width, self.width)),
            "outer": 0.1 * jax.random.normal(outer, (self.width, 1)),
        }


def unroll(params, inputs):
    state = jnp.zeros(inputs.shape[1])
    outputs = []
    for step in range(inputs.shape[0]):  # CAP301
        state = jnp.tanh(state @ params["inner"] + inputs[step])
        outputs.append(state)
    return jnp.stack(outputs)


def loss_fn(params, inputs, targets):
    predicted = unroll(params, inputs) @ params["outer"]
    return jnp.mean((predicted[..., 0] - targets) ** 2)


@jax.jit
def train_step(params, inputs, targets):
    loss, grads = jax.value_and_grad(loss_fn)(params, inputs, targets)
    print("loss", loss)  # CAP303
    log.info("loss %s", loss)  # CAP303
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


@jax.jit
def clipped(grads):
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    if float(norm) > 1.0:  # CAP302
        grads = jax.tree.map(lambda g: g / norm, grads)
    return grads


@jax.jit
def histogram(x):
    scaled = (x - jnp.min(x)) / jnp.max(x)
    return np.histogram(np.asarray(scaled), bins=4)[0]  # CAP302


@functools.partial(jax.jit, static_argnames=("axes",))
def pooled(x, axes):
    return jnp.mean(x, axis=axes)


def evaluate(params, inputs):
    return pooled(unroll(params, inputs), axes=[0, 1])  # CAP309
'''


def _marked(code: str) -> list[int]:
    return [number for number, line in enumerate(PROGRAM.splitlines(), start=1) if line.endswith(f"# {code}")]


@pytest.mark.quick(cases="all")
@pytest.mark.parametrize("code", ["CAP301", "CAP302", "CAP303", "CAP309"])
def test_each_is_found_where_it_is(code: str) -> None:
    found = check_text(PROGRAM, "program.py", Settings(select=("CAP3",)))
    assert [one.line for one in found if one.code == code] == _marked(code)
    assert all(one.severity == "warning" for one in found if one.code == code)


@pytest.fixture(scope="module")
def program() -> ModuleType:
    module = ModuleType("program")
    exec(compile(PROGRAM, "program.py", "exec"), module.__dict__)
    return module


def test_jax_agrees(program: Any, capsys: pytest.CaptureFixture[str]) -> None:
    params = program.Recurrent(4).init(jax.random.key(0))
    size = functools.partial(jnp.ones, dtype=jnp.float32)
    # CAP301: the program grows with the length of the loop.
    short, long = (str(jax.make_jaxpr(program.unroll)(params, size((steps, 4)))).count("tanh") for steps in (2, 6))
    assert (short, long) == (2, 6)
    # CAP302: a traced value has no number.
    with pytest.raises(jax.errors.ConcretizationTypeError):
        program.clipped(params)
    with pytest.raises(jax.errors.TracerArrayConversionError):
        program.histogram(size(8))
    # CAP303: it is printed once, while jax traces, and as no number.
    for _ in range(2):
        program.train_step(params, size((2, 4)), size(2))
    printed = capsys.readouterr().out
    assert printed.count("loss") == 1
    assert "Tracer" in printed or "Traced" in printed
    # CAP309: a static argument is looked up by its hash.
    with pytest.raises(ValueError, match="hashable"):
        program.evaluate(params, size((2, 4)))
