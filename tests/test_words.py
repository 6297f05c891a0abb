"""docs/words.md: one word for one thing, over the signatures of all public functions."""

from __future__ import annotations

import importlib
import inspect
import re
import typing
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import capibara
from capibara import kernels
from capibara.cli.main import app
from capibara.kernels import attention, explain, sequence_parallel_attention

ROOMS = ("kernels", "mesh", "parallel", "plan", "models")
PAGE = (Path(__file__).parents[1] / "docs" / "words.md").read_text(encoding="utf-8")
# Their keywords are another function's.
OPEN = {"explain", "tune"}


def _table(header: str) -> list[list[set[str]]]:
    """The rows of the table with this header, each cell as the words in it that are set as code."""
    rows = PAGE.split(f"| {header} |")[1].split("\n\n")[0].splitlines()[2:]
    return [[set(re.findall(r"`([^`]+)`", cell)) for cell in row.strip("|").split("|")] for row in rows]


WORDS = _table("word | what it is | not")
OTHERS = _table("function | words | whose")


def _public() -> Iterator[tuple[str, Callable[..., Any]]]:
    for room in ROOMS:
        module = importlib.import_module(f"capibara.{room}")
        for name in module.__all__:
            found = getattr(module, name)
            if callable(found) and not (inspect.isclass(found) and issubclass(found, Exception)):
                yield name, found


PUBLIC = dict(_public())


def _parameters(fn: Callable[..., Any]) -> Iterator[str]:
    """By name, with those that a TypedDict of keywords stands for."""
    for name, parameter in inspect.signature(fn).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            if fn.__name__ not in OPEN:
                (options,) = typing.get_args(typing.get_type_hints(inspect.unwrap(fn))[name])
                yield from typing.get_type_hints(options)
        else:
            yield name


@pytest.mark.quick(cases="all")
@pytest.mark.parametrize("name", PUBLIC)
def test_parameters_are_called_by_the_words(name: str) -> None:
    allowed = set().union(*(words for functions, words, _ in OTHERS if name in functions))
    for parameter in set(_parameters(PUBLIC[name])) - allowed:
        for words, _, forbidden in WORDS:
            wrong = [pattern for pattern in forbidden if fnmatch(parameter, pattern)]
            assert not wrong or parameter in words, f"{name}({parameter}=): the word is {sorted(words)}"


@pytest.mark.quick
def test_the_page_names_what_is_there() -> None:
    assert len(WORDS) > 15
    used = {parameter for fn in PUBLIC.values() for parameter in _parameters(fn)}
    for words, _, _ in WORDS:
        assert all(any(fnmatch(name, word) for name in used | {"kind"}) for word in words), words
    for functions, words, _ in OTHERS:
        assert functions <= set(PUBLIC)
        for name in functions:
            assert words <= set(_parameters(PUBLIC[name])), name


@pytest.mark.quick
def test_results_have_types() -> None:
    """`Any` stands for a tree's own type, or for what a caller's function gives, and nothing else."""
    for name, fn in PUBLIC.items():
        if not inspect.isclass(fn):
            returned = inspect.signature(fn).return_annotation
            assert returned is not inspect.Signature.empty, name
            assert not re.search(r"\bAny\b", str(returned)), f"{name} returns {returned}"


@pytest.mark.quick
def test_ops_functions_and_commands_have_one_name() -> None:
    ops = kernels.registry()
    listed = {op: functions for names, functions, _ in _table("op | functions | why") for op in names}
    for name, op in ops.items():
        if name not in kernels.__all__:
            assert name in listed, f"{name} is behind no function of its name: docs/words.md lists those"
            assert listed[name] <= set(kernels.__all__)
            assert set(op.functions) <= listed[name]
    assert set(listed) <= set(ops)
    assert kernels.lookup("state_space_dual") is ops["ssd"]
    x = jnp.ones((8, 16))
    (found,) = explain("rms_norm", x).selections
    assert (found.call.op.name, found.call.params["kind"]) == ("norm", "rms")
    printed = CliRunner().invoke(app, ["kernels", "explain", "rms_norm", "f32[8,16]"])
    assert "kind=rms" in printed.output


@pytest.mark.quick
@pytest.mark.parametrize("package", [capibara, *(importlib.import_module(f"capibara.{room}") for room in ROOMS)])
def test_dir_is_what_is_public(package: Any) -> None:
    assert sorted(dir(package)) == sorted(package.__all__)
    for name in package.__all__:
        assert getattr(package, name) is not None


@pytest.mark.quick
def test_attention_is_laid_out_and_spelled_as_jax_nn_has_it() -> None:
    import jax

    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 12, heads, 8)), "float32") for heads in (4, 2, 2))
    wanted = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    np.testing.assert_allclose(attention(q, k, v, is_causal=True), wanted, atol=2e-6)
    np.testing.assert_array_equal(attention(q, k, v, is_causal=True), attention(q, k, v, causal=True))
    np.testing.assert_array_equal(attention(q, k, v, causal=True, is_causal=True), attention(q, k, v, causal=True))
    turned = attention(*(x.swapaxes(1, 2) for x in (q, k, v)), causal=True, layout="bhtd")
    np.testing.assert_allclose(turned.swapaxes(1, 2), wanted, atol=2e-6)
    for fn in (attention, lambda *x, **o: sequence_parallel_attention(*x, axis_name="none", **o)):
        with pytest.raises(ValueError, match=r"one rule.*causal=False and is_causal=True.*pass one"):
            fn(q, k, v, causal=False, is_causal=True)
