"""A function held at one of jax's matrix precisions, whoever differentiates it and when."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax


def held_at(passes: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` at jax's matrix precision `passes`, its backward pass too, which JAX traces after this call is over."""
    precise = functools.partial(jax.default_matmul_precision, passes)

    @jax.custom_vjp
    def held(differentiated: Any, given: Any) -> Any:
        with precise():
            return run(differentiated, given)

    def forward(differentiated: Any, given: Any) -> Any:
        with precise():
            return jax.vjp(lambda wanted: run(wanted, given), differentiated)

    def backward(pull: Any, cotangent: Any) -> Any:
        with precise():
            (made,) = pull(cotangent)
            return made, None

    held.defvjp(forward, backward)
    return held
