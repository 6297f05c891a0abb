"""Reading jax's own form of a traced function, whose details differ between versions."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["called", "dtype_of", "holds_function", "opened", "read", "scan_parts"]


def scan_parts(params: Any) -> tuple[int, int]:
    """How many of a scan's operands are constants, and how many are carried: jax 0.12 writes them as trees."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carried, _ = params["ft_in"].unpack()
    return len(consts), len(carried)


def read(env: dict[Any, int | None], atom: Any) -> int | None:
    """The value of a variable; None for a literal, and for what is dropped."""
    return None if hasattr(atom, "val") else env[atom]


def opened(inner: Any) -> tuple[Any, Any]:
    return (inner.jaxpr, inner.consts) if hasattr(inner, "jaxpr") else (inner, ())


def called(eqn: Any) -> Any:
    """The one function that a call primitive runs on exactly its operands; None for any other primitive.

    A reduction by a function of its own has such a parameter too: that function takes elements, not the operands.
    """
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call"):
        inner = eqn.params.get(key)
        jaxpr = getattr(inner, "jaxpr", inner)
        if hasattr(jaxpr, "eqns") and _alike(jaxpr.invars, eqn.invars) and _alike(jaxpr.outvars, eqn.outvars):
            return inner
    return None


def holds_function(eqn: Any) -> bool:
    """Whether a primitive carries a function of its own, which nobody opened."""
    return any(hasattr(getattr(param, "jaxpr", param), "eqns") for param in eqn.params.values())


def _alike(inner: Any, outer: Any) -> bool:
    shapes = [[getattr(atom.aval, "shape", None) for atom in atoms] for atoms in (inner, outer)]
    return shapes[0] == shapes[1]


def dtype_of(aval: Any) -> tuple[str, float]:
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return "token", 0.0
    name = getattr(dtype, "name", str(dtype))
    if name.startswith("key<"):
        return "uint32", 8.0
    bits = {"int4": 4, "uint4": 4, "int2": 2, "uint2": 2, "float4_e2m1fn": 4}.get(name)
    return name, bits / 8 if bits else float(np.dtype(dtype).itemsize)
