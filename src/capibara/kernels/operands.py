"""What a public function is given, as arrays and types."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.errors import rule_error


def as_array(what: str, name: str, x: Any, *, optional: bool = False) -> Any:
    """`x` as an array, or an error that names the function and the argument; an `optional` None stays None.

    >>> as_array("gemm", "a", [1.0, 2.0]).shape
    (2,)
    """
    if isinstance(x, jax.Array) or (optional and x is None):
        return x
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError) as error:  # None is the latter
        raise rule_error(f"{what} takes arrays", f"{name} of type {type(x).__name__}", "pass an array") from error


def as_dtype(name: str, given: Any) -> np.dtype[Any]:
    """A type, or an error that names the argument.

    >>> as_dtype("out_dtype", "bfloat16").itemsize
    2
    """
    try:
        return jnp.dtype(given)
    except TypeError as error:
        raise rule_error(f"{name} is a type, or the name of one", repr(given), "pass e.g. 'bfloat16'") from error
