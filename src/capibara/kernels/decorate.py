"""The `tpu_kernel` decorator: a function compiled, named in profiles, at one precision, with dispatch on."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import jax

from capibara.errors import rule_error, unknown_name
from capibara.precision import PrecisionConfig


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
      use_efficient_attention: send the function's attention through dispatch. jax's own attention is not
        redirected in this version, so it means nothing yet, and the first call of such a function says so.
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
            if use_efficient_attention:
                _say_no_attention()
            # Both are part of jit's cache key: the function is traced once for each precision, never mixed.
            with (
                context(precision=config.policy.name),
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


@functools.cache
def _say_no_attention() -> None:
    warnings.warn(
        "use_efficient_attention=True means nothing in this version: jax's attention is not redirected yet. "
        "Call capibara.kernels.attention, which dispatches by itself.",
        UserWarning,
        stacklevel=3,
    )
