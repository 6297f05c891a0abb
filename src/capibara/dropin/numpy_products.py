"""What jnp's matmul, dot and einsum call inside an optimisation context.

Each takes jnp's own function first and then its arguments. A call that is a matrix product of floating arrays
goes through gemm; any other, and any mistake, is jnp's own call, untouched, so that every result has the
shape, type and weak type that jnp gives, and every error is the one jnp raises.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_einsum

from capibara.kernels.ops.linalg.contraction import OPTIMIZE, plan
from capibara.kernels.ops.linalg.einsum import contract_as
from capibara.kernels.ops.linalg.gemm.api import gemm
from capibara.kernels.ops.linalg.gemm.rules import DTYPES
from capibara.kernels.ops.linalg.pairwise import How, contract_pair, groups, laid_out_by_type
from capibara.kernels.ops.linalg.rounding import rounded

_KEYWORDS = frozenset({"precision", "preferred_element_type", "out_sharding"})


def matmul(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """jnp.matmul: the last two axes multiply, those in front broadcast."""
    found = _pair(original, args, kwargs)
    if found is None:
        return original(*args, **kwargs)
    a, b, how = found
    if a.ndim == b.ndim == 2 and a.shape[1] == b.shape[0]:
        a, b, precision, out_dtype = rounded(a, b, how.precision, how.out_dtype)
        return gemm(a, b, precision=precision, out_dtype=out_dtype)
    labelled = _matmul_labels(a.shape, b.shape)
    if labelled is None:
        return original(*args, **kwargs)
    (a_axes, a_labels), (b_axes, b_labels), out_labels, out_shape = labelled
    if groups(tuple(a_labels), tuple(b_labels), tuple(out_labels)) is None:
        return original(*args, **kwargs)
    a, b = jnp.squeeze(a, a_axes), jnp.squeeze(b, b_axes)
    return contract_pair(a, a_labels, b, b_labels, out_labels, how).reshape(out_shape)


def dot(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """jnp.dot: the last axis of a with the last but one of b; all other axes stay."""
    found = _pair(original, args, kwargs)
    if found is None or 0 in (found[0].ndim, found[1].ndim):
        return original(*args, **kwargs)
    a, b, how = found
    k = -1 if b.ndim == 1 else -2
    if a.shape[-1] != b.shape[k]:
        return original(*args, **kwargs)
    names = [opt_einsum.get_symbol(i) for i in range(a.ndim + b.ndim)]
    a_labels, b_labels = names[: a.ndim], names[a.ndim :]
    out_labels = a_labels[:-1] + [x for i, x in enumerate(b_labels) if i != b.ndim + k]
    b_labels[k] = a_labels[-1]
    if groups(tuple(a_labels), tuple(b_labels), tuple(out_labels)) is None:
        return original(*args, **kwargs)
    return contract_pair(a, "".join(a_labels), b, "".join(b_labels), "".join(out_labels), how)


def einsum(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """jnp.einsum of a string and two operands or more, with at least one matrix product in it."""
    equation, *operands = args or ("",)
    optimize = kwargs.get("optimize", "auto")
    known = {"optimize", "precision", "preferred_element_type", "out_sharding"}
    if (
        not isinstance(equation, str)
        or len(operands) < 2
        or not set(kwargs) <= known
        or not (isinstance(optimize, str | bool) and optimize in OPTIMIZE)
    ):
        return original(*args, **kwargs)
    arrays = _arrays(operands)
    how = None if arrays is None else _how(arrays, {k: v for k, v in kwargs.items() if k != "optimize"})
    if arrays is None or how is None:
        return original(*args, **kwargs)
    try:
        steps = plan(equation, tuple(x.shape for x in arrays), optimize).steps
    except ValueError:
        # The equation does not fit the operands; jnp says so in its own words.
        return original(*args, **kwargs)
    if not any(step.by == "gemm" for step in steps):
        return original(*args, **kwargs)
    return contract_as(equation, arrays, how, optimize, limit=None)


def _pair(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[jax.Array, jax.Array, How] | None:
    """The two operands and how to multiply them; None for a call that is jnp's own."""
    if args and len(args) == 2:
        operands: tuple[Any, ...] = args
        options = kwargs
    else:
        try:
            bound = inspect.signature(original).bind(*args, **kwargs)
        except TypeError:
            return None
        options = dict(bound.arguments)
        operands = (options.pop("a", None), options.pop("b", None))
    if not set(options) <= _KEYWORDS:
        return None
    arrays = _arrays(operands)
    how = None if arrays is None else _how(arrays, options)
    return None if arrays is None or how is None else (arrays[0], arrays[1], how)


def _arrays(operands: Any) -> tuple[jax.Array, ...] | None:
    """The operands as arrays; None when one is of a kind that gemm does not take."""
    found = []
    for x in operands:
        if isinstance(x, np.ndarray):
            x = jnp.asarray(x) if x.dtype.kind in "fV" else None
        if not isinstance(x, jax.Array) or np.dtype(x.dtype).name not in DTYPES:
            return None
        # A weak type, a Python number's, gives way to the other operand's in jnp, or stays if both are.
        if jax.typeof(x).weak_type or laid_out_by_type(x):
            return None
        if not all(isinstance(n, int) for n in x.shape):  # a symbolic size, while exporting
            return None
        found.append(x)
    return tuple(found)


def _how(arrays: tuple[jax.Array, ...], options: dict[str, Any]) -> How | None:
    if options.get("out_sharding") is not None:
        return None
    natural = jnp.result_type(*arrays)
    out = options.get("preferred_element_type")
    if out is not None:
        try:
            asked = np.dtype(out)
        except TypeError:
            return None
        # A narrower type than the inputs' has rules of its own, and one that jax would truncate warns.
        if asked != jax.dtypes.canonicalize_dtype(asked) or jnp.promote_types(asked, natural) != asked:
            return None
        if asked.name not in DTYPES:
            return None
        natural = asked
    known, precision = _precision(options.get("precision"))
    return How(precision=precision, out_dtype=np.dtype(natural).name) if known else None


def _precision(asked: Any) -> tuple[bool, str | None]:
    """(whether gemm has it, gemm's name for it); jnp's "float32" is a number of passes, not a type."""
    if isinstance(asked, tuple) and len(asked) == 2 and asked[0] == asked[1]:
        asked = asked[0]
    if asked is None:
        return True, None
    if not isinstance(asked, str | jax.lax.Precision):
        return False, None
    try:
        return True, jax.lax.Precision(asked).name.lower()
    except ValueError:
        return False, None


def _matmul_labels(
    a_shape: tuple[int, ...], b_shape: tuple[int, ...]
) -> tuple[tuple[tuple[int, ...], str], tuple[tuple[int, ...], str], str, tuple[int, ...]] | None:
    """For each operand the axes to drop, as they only broadcast, and the others' labels; then the result's.

    None when the shapes do not go together.
    """
    if not a_shape or not b_shape:
        return None
    a_lead, b_lead = a_shape[:-2], b_shape[:-2]
    k = b_shape[0] if len(b_shape) == 1 else b_shape[-2]
    if a_shape[-1] != k:
        return None
    try:
        lead = np.broadcast_shapes(a_lead, b_lead)
    except ValueError:
        return None
    names = [opt_einsum.get_symbol(i) for i in range(len(lead) + 3)]
    row, column, summed = names[len(lead) :]

    def labelled(own: tuple[int, ...], rest: str) -> tuple[tuple[int, ...], str]:
        skip = len(lead) - len(own)
        # An axis of one element is dropped from both operands; the reshape at the end brings it back.
        dropped = tuple(i for i, n in enumerate(own) if n == 1)
        return dropped, "".join(names[skip + i] for i in range(len(own)) if i not in dropped) + rest

    a_matrix, b_matrix = len(a_shape) > 1, len(b_shape) > 1
    a = labelled(a_lead, (row if a_matrix else "") + summed)
    b = labelled(b_lead, summed + (column if b_matrix else ""))
    kept = "".join(name for name, n in zip(names, lead, strict=False) if n != 1)
    out = kept + (row if a_matrix else "") + (column if b_matrix else "")
    shape = (*lead, *(a_shape[-2:-1] if a_matrix else ()), *(b_shape[-1:] if b_matrix else ()))
    return a, b, out, shape
