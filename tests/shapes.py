"""The shapes in signatures, checked in every call that a test makes and the library takes.

jaxtyping's import hook, with beartype, looks at arguments before a function runs. Here they are looked at together with
the result, after it: what the function refuses is its own to refuse, in its own words, and what it takes has to be
what the signature says. Arrays of numpy, lists and numbers, which public functions take too, count as the arrays that
are made of them; annotations without a shape are mypy's affair.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from beartype import BeartypeConf, BeartypeStrategy, beartype
from jaxtyping import AbstractArray, install_import_hook

SOURCES = Path(__file__).parents[1] / "src"


def modules() -> list[str]:
    """Those that name shapes."""
    files = [path for path in SOURCES.rglob("*.py") if "from jaxtyping import" in path.read_text()]
    return sorted(".".join(path.relative_to(SOURCES).with_suffix("").parts) for path in files)


def install() -> None:
    """Put jaxtyping's hook in front of them."""
    install_import_hook(modules(), "tests.shapes.after_the_call")


def after_the_call(fn: Callable[..., Any]) -> Callable[..., Any]:
    """What jaxtyping calls to have a function's arguments checked, and once more for those and the result."""
    if not any(name.startswith("ret") and name[3:].isdigit() for name in inspect.signature(fn).parameters):
        return fn  # the look before the call, which is left out
    shaped = {name: hint for name, hint in fn.__annotations__.items() if has_shape(hint)}
    if not shaped:
        return fn
    fn.__annotations__ = {name: shaped.get(name, Any) for name in fn.__annotations__}
    checked = beartype(fn, conf=BeartypeConf(strategy=BeartypeStrategy.On))
    signature = inspect.signature(fn)

    @functools.wraps(fn)
    def check(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        for name in shaped:
            if name in bound.arguments:
                bound.arguments[name] = _as_array(bound.arguments[name])
        return checked(*bound.args, **bound.kwargs)

    return check


def has_shape(hint: Any) -> bool:
    if inspect.isclass(hint):
        return issubclass(hint, AbstractArray)
    return any(map(has_shape, typing.get_args(hint)))


def _as_array(x: Any) -> Any:
    import jax.numpy as jnp

    return jnp.asarray(x) if isinstance(x, np.ndarray | np.generic | list | tuple | int | float | complex) else x
