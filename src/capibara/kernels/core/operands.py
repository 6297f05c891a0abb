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
        raise no_array(f"{what} takes arrays", name, x) from error


def no_array(rule: str, name: str, x: Any) -> ValueError:
    """The error for what is no array of numbers: an array of text or objects, a list that is none, or no array at all.

    >>> no_array("gemm takes arrays", "a", np.array(["x"]))
    ValueError("gemm takes arrays. Got a of <U1[1], which is no type of numbers. Fix: convert it, e.g. with \
.astype('float32').")
    """
    dtype = getattr(x, "dtype", None)
    if dtype is not None:
        shape = ",".join(map(str, getattr(x, "shape", ())))
        return rule_error(
            rule, f"{name} of {dtype}[{shape}], which is no type of numbers", "convert it, e.g. with .astype('float32')"
        )
    lists = isinstance(x, list | tuple)
    fix = "pass an array of numbers" + (", or lists of them in which every row is as long" if lists else "")
    return rule_error(rule, f"{name} of type {type(x).__name__}", fix)


def as_dtype(name: str, given: Any) -> np.dtype[Any]:
    """A type, or an error that names the argument.

    >>> as_dtype("out_dtype", "bfloat16").itemsize
    2
    """
    try:
        return jnp.dtype(given)
    except TypeError as error:
        raise rule_error(f"{name} is a type, or the name of one", repr(given), "pass e.g. 'bfloat16'") from error
