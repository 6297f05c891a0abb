"""CAP304: float64, which TPUs compute in software, GPUs at a fraction of their rate, and jax halves in silence."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from capibara.migrate.findings import Finding
from capibara.migrate.module import Module
from capibara.migrate.performance.values import ARRAY_MODULES

__all__ = ["check_float64"]

_DOUBLE = frozenset({"jax.numpy.float64", "jax.numpy.complex128", "jax.numpy.double", "numpy.float64", "numpy.double"})
_NAMES = frozenset({"float64", "complex128", "f8", "double"})
_FIX = "use float32, or bfloat16 with sums in float32; keep float64 for numpy, on the host"


def check_float64(module: Module) -> Iterator[Finding]:
    """Types of arrays that are made or cast, `jnp.float64(x)`, and `jax_enable_x64`."""
    for call in module.calls:
        path = module.resolve(call.func)
        if path in ("jax.numpy.float64", "jax.numpy.complex128", "jax.numpy.double"):
            yield module.finding(call, "CAP304", f"`{ast.unparse(call.func)}` makes a value of 64 bits", _FIX)
            continue
        if _enables(call, path):
            message = "64-bit types are turned on for all of the process: Python floats become float64"
            yield module.finding(call, "CAP304", message, "leave it off; numpy has float64 on the host")
            continue
        if path is not None and path.startswith(ARRAY_MODULES):
            given = [*call.args[1:], *(one.value for one in call.keywords if one.arg in ("dtype", "new_dtype"))]
            keyword = [one.value for one in call.keywords if one.arg in ("dtype", "new_dtype")]
        elif path is None and isinstance(call.func, ast.Attribute) and call.func.attr == "astype":
            given = call.args[:1]  # of whose array is not known: jax's own type names say it
            keyword = []
        else:
            continue
        for value in given:
            named = module.resolve(value)
            text = isinstance(value, ast.Constant) and value.value in _NAMES and value in keyword
            if text or (named in _DOUBLE and (path is not None or (named or "").startswith("jax."))):
                message = f"an array of `{ast.unparse(value)}`: without jax_enable_x64 it is float32 in silence"
                yield module.finding(value, "CAP304", f"{message}, with it TPUs compute it in software", _FIX)
    yield from _flags(module)


def _enables(call: ast.Call, path: str | None) -> bool:
    if path in ("jax.experimental.enable_x64", "jax.enable_x64"):
        first = call.args[0] if call.args else None
        return not (isinstance(first, ast.Constant) and first.value is False)
    if path in ("jax.config.update", "jax.config.config.update") and len(call.args) == 2:
        name, value = call.args
        return (
            isinstance(name, ast.Constant)
            and name.value == "jax_enable_x64"
            and isinstance(value, ast.Constant)
            and value.value is True
        )
    return False


def _flags(module: Module) -> Iterator[Finding]:
    """`os.environ["JAX_ENABLE_X64"] = "1"`."""
    for node in module.nodes(ast.Assign):
        assert isinstance(node, ast.Assign)
        target = node.targets[0]
        if (
            isinstance(target, ast.Subscript)
            and isinstance(target.slice, ast.Constant)
            and target.slice.value == "JAX_ENABLE_X64"
            and module.resolve(target.value) == "os.environ"
            and isinstance(node.value, ast.Constant)
            and str(node.value.value).lower() in ("1", "true", "yes", "on")
        ):
            message = "64-bit types are turned on for all of the process: Python floats become float64"
            yield module.finding(node, "CAP304", message, "leave it off; numpy has float64 on the host")
