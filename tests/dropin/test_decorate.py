"""tpu_kernel: one program, a name in profiles, a precision, and a context, each of them visible."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.dropin import decorate
from capibara.precision import PrecisionConfig

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)), jnp.float32)


class Entered:
    """Remembers the precision of every context that was entered, and which are still open."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.open = 0

    @contextlib.contextmanager
    def __call__(self, *, precision: str) -> Iterator[None]:
        self.seen.append(precision)
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1


@pytest.mark.quick
def test_it_is_traced_once_and_inside_the_context() -> None:
    entered, traces = Entered(), []

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        """a @ b"""
        traces.append(entered.open)
        return a @ b

    kernel = decorate.tpu_kernel(product, context=entered)
    np.testing.assert_allclose(kernel(X, X), X @ X, rtol=1e-6)
    kernel(X, b=X)
    kernel(X, X)
    assert traces == [1, 1]  # once for each way to pass b
    assert entered.seen == ["bfloat16"] * 3
    assert entered.open == 0
    assert (kernel.__name__, kernel.__doc__) == ("product", "a @ b")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("precision", "policy", "passes"),
    [
        (PrecisionConfig.DEFAULT, "bfloat16", "DEFAULT"),
        (PrecisionConfig.HIGH, "mixed", "HIGH"),
        (PrecisionConfig.HIGHEST, "float32", "HIGHEST"),
        (PrecisionConfig.FP8, "fp8", "DEFAULT"),
        ("highest", "float32", "HIGHEST"),
    ],
)
@pytest.mark.filterwarnings("ignore:precision='fp8'")
def test_a_precision_is_a_policy_and_a_number_of_passes(precision: Any, policy: str, passes: str) -> None:
    entered = Entered()
    kernel = decorate.tpu_kernel(precision=precision, context=entered)(lambda a: a @ a)
    text = str(kernel.lower(X).as_text())
    assert text.count(f"precision = [{passes}, {passes}]") == 1
    assert entered.seen == [policy]
    assert jax.config.jax_default_matmul_precision is None


def test_its_name_is_in_the_program() -> None:
    def my_layer(a: jax.Array) -> jax.Array:
        return a @ a

    kernel = decorate.tpu_kernel(my_layer, context=Entered())
    assert "my_layer" in kernel.lower(X).as_text(debug_info=True)


def test_under_transformations_and_jits_own_options() -> None:
    kernel = decorate.tpu_kernel(context=Entered(), static_argnames="power")(lambda a, power=2: jnp.sum(a**power))
    np.testing.assert_allclose(kernel(X, power=3), jnp.sum(X**3), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(kernel)(X), 2 * X, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.vmap(kernel))(X), jnp.sum(X**2, 1), rtol=1e-6)


@pytest.mark.quick
def test_the_innermost_function_says_how_attention_runs() -> None:
    seen: list[bool] = []

    def look(a: jax.Array) -> jax.Array:
        seen.append(decorate.attention_dispatches())
        return a

    on, off, unsaid = (
        decorate.tpu_kernel(look, context=Entered(), **options)
        for options in ({"use_efficient_attention": True}, {"use_efficient_attention": False}, {})
    )
    fresh = decorate.tpu_kernel(look, context=Entered(), use_efficient_attention=False)
    for kernel in (on, off, unsaid, decorate.tpu_kernel(fresh, context=Entered(), use_efficient_attention=True)):
        kernel(X)
    assert seen == [True, False, False, False]
    assert decorate.attention_dispatches()  # outside of any, the context alone decides
    # One function that is traced for one answer is not reused for the other.
    shared = jax.jit(look)
    seen.clear()
    for flag in (True, False, True):
        decorate.tpu_kernel(lambda a: shared(a), context=Entered(), use_efficient_attention=flag)(X)
    assert seen == [True, False]


def test_a_mistake_is_named() -> None:
    with pytest.raises(ValueError, match=r"Unknown precision 'hgh'. Did you mean 'high'.*'highest'"):
        decorate.tpu_kernel(precision="hgh", context=Entered())
    with pytest.raises(ValueError, match="decorates a function"):
        decorate.tpu_kernel(PrecisionConfig.HIGH, context=Entered())
