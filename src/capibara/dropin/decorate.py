"""The `tpu_kernel` decorator: a function compiled, named in profiles, at one precision, with dispatch on."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax

from capibara.errors import rule_error, unknown_name
from capibara.precision import PrecisionConfig

# What the innermost decorated function says of attention; None where there is none.
_efficient_attention = jax.make_user_context(None)


def attention_dispatches() -> bool:
    """Whether jax's attention goes through dispatch here, as far as decorated functions have a say."""
    return _efficient_attention.value is not False


class Context(Protocol):
    """What makes the surroundings of a call: capibara's optimisation context."""

    def __call__(self, *, precision: str) -> contextlib.AbstractContextManager[Any]: ...


def tpu_kernel(
    fn: Callable[..., Any] | None = None,
    *,
    context: Context,
    precision: PrecisionConfig | str = PrecisionConfig.DEFAULT,
    use_efficient_attention: bool = False,
    **jit_options: Any,
) -> Any:
    """Compile a function, name it in profiles, and run it in `context` at a precision.

    Args:
      context: called with the name of a dtype policy, gives the context that the function is traced in.
      precision: DEFAULT, HIGH, HIGHEST or FP8 (or their names in small letters): the policy of the context
        and jax's default matrix precision, which products of float32 operands heed.
      use_efficient_attention: whether `capibara.jax.nn.dot_product_attention` inside the function goes through
        kernel dispatch, or is jax's own. capibara's own attention always dispatches.
      jit_options: static_argnames, donate_argnums and the like, for `jax.jit`.
    """
    config = _config(precision)
    if fn is None:
        return functools.partial(
            tpu_kernel,
            context=context,
            precision=config,
            use_efficient_attention=use_efficient_attention,
            **jit_options,
        )
    if not callable(fn):
        raise rule_error("tpu_kernel decorates a function", repr(fn), "pass options by name")
    return _decorated(fn, context, config, use_efficient_attention, jit_options)


def _decorated(
    fn: Callable[..., Any],
    context: Context,
    config: PrecisionConfig,
    use_efficient_attention: bool,
    jit_options: dict[str, Any],
) -> Callable[..., Any]:
    name = getattr(fn, "__name__", type(fn).__name__)

    @functools.wraps(fn)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(name):
            return fn(*args, **kwargs)

    jitted = jax.jit(scoped, **jit_options)

    def inside(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            # All three are part of jit's cache key: what was traced for one is never run for another.
            with (
                context(precision=config.policy.name),
                _efficient_attention(bool(use_efficient_attention)),
                jax.default_matmul_precision(_matrix_precision(config)),
            ):
                return method(*args, **kwargs)

        return call

    wrapped: Any = inside(jitted)
    wrapped.lower = inside(jitted.lower)
    wrapped.precision = config
    return wrapped


def _matrix_precision(config: PrecisionConfig) -> str:
    return "default" if config is PrecisionConfig.FP8 else config.value


def _config(precision: PrecisionConfig | str) -> PrecisionConfig:
    if isinstance(precision, PrecisionConfig):
        return precision
    choices = {one.value: one for one in PrecisionConfig}
    if not isinstance(precision, str) or precision.lower() not in choices:
        raise unknown_name("precision", precision, choices)
    return choices[precision.lower()]
