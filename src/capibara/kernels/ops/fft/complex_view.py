"""A Mosaic GPU kernel on complex64 arrays, which Pallas does not have: it sees their numbers as float32, by turns.

XLA has no operation that would view a complex array as real numbers, and taking one apart and putting one together
costs a pass over memory each way. The compiled kernel, however, is a call with buffers, whatever their type: it is
lowered for float32 and called with the complex arrays themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import mlir

_viewed_p = core.Primitive("mosaic_gpu_viewed")
_viewed_p.multiple_results = True


def as_numbers(x: Any) -> jax.ShapeDtypeStruct:
    """The float32 array that a complex64 one is in memory; any other array's own shape."""
    if x.dtype != jnp.complex64:
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.ShapeDtypeStruct((*x.shape[:-1], 2 * x.shape[-1]), jnp.float32)


def call_viewed(kernel: Callable[..., Any], operands: Sequence[Any], out: Sequence[Any]) -> list[jax.Array]:
    """What `kernel`, one Mosaic GPU kernel on arrays shaped `as_numbers`, makes of operands that may be complex64.

    `out` are the shapes and types of the results, complex64 where the kernel makes float32 numbers by turns.
    """
    lowered = jax.jit(kernel).trace(*map(as_numbers, operands)).lower(lowering_platforms=("cuda",))
    target, attributes = _only_call(lowered.compiler_ir().operation, len(operands))
    return _viewed_p.bind(*operands, target=target, attributes=attributes, out=tuple(out))


def _only_call(module: Any, operands: int) -> tuple[str, tuple[tuple[str, Any], ...]]:
    """The name and the attributes of the one custom call in a module."""
    from jaxlib.mlir import ir

    found = []

    def walk(operation: Any) -> None:
        for region in operation.regions:
            for block in region.blocks:
                for inner in block.operations:
                    if inner.operation.name == "stablehlo.custom_call":
                        found.append(inner.operation)
                    walk(inner.operation)

    walk(module)
    assert len(found) == 1, f"one kernel, and no other call: {len(found)}"
    (call,) = found
    assert len(call.operands) == operands, "the kernel's constants are among its operands"
    config: Any = ir.DictAttr(call.attributes["mhlo.backend_config"])
    attributes = []
    for entry in config:
        is_text = isinstance(entry.attr, ir.StringAttr)
        attributes.append((entry.name, entry.attr.value_bytes if is_text else bool(ir.BoolAttr(entry.attr).value)))
    return ir.StringAttr(call.attributes["call_target_name"]).value, tuple(attributes)


def _abstract(*_: Any, target: str, attributes: Any, out: tuple[Any, ...]) -> list[Any]:
    del target, attributes
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in out]


def _lower(ctx: Any, *operands: Any, target: str, attributes: Any, out: Any) -> Any:
    from jaxlib.mlir import ir

    del out
    config = {
        name: ir.BoolAttr.get(value) if isinstance(value, bool) else ir.StringAttr.get(value)
        for name, value in attributes
    }
    return jax.ffi.ffi_lowering(target, backend_config=config)(ctx, *operands)


_viewed_p.def_abstract_eval(_abstract)
mlir.register_lowering(_viewed_p, _lower, platform="cuda")
