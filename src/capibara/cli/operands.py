"""Operands and parameters as they are typed: `bf16[4096,4096]`, `-`, `activation=gelu`."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from capibara.errors import rule_error, unknown_name

if TYPE_CHECKING:
    import jax

# Short names beside numpy's own.
SHORT = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "u8": "uint8",
    "u16": "uint16",
    "u32": "uint32",
    "u64": "uint64",
    "c64": "complex64",
    "c128": "complex128",
    "f8e4m3": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
}
DTYPES = (*SHORT.values(), "bool")
ABSENT = "-"

_OPERAND = re.compile(r"(?P<dtype>\w+)\[(?P<dims>[^\[\]]*)\]")


def operand(text: str) -> jax.ShapeDtypeStruct | None:
    """`bf16[4096,1024]` as a shape and a type; `-` is an absent operand."""
    import jax
    import jax.numpy as jnp

    if text == ABSENT:
        return None
    found = _OPERAND.fullmatch(text.replace(" ", ""))
    if found is None:
        raise rule_error(
            "An operand is a type and a shape such as bf16[4096,4096], or - for an absent one",
            repr(text),
            "write the type, then the dimensions in square brackets, separated by commas",
        )
    dtype = SHORT.get(found["dtype"], found["dtype"])
    if dtype not in DTYPES:
        raise unknown_name("type of an operand", found["dtype"], (*SHORT, *DTYPES))
    dims = found["dims"].split(",") if found["dims"] else []
    for dim in dims:
        if not dim.isdecimal():
            raise rule_error(
                "The dimensions of an operand are whole numbers",
                f"{dim!r} in {text!r}",
                "write bf16[128,256]",
            )
    return jax.ShapeDtypeStruct(tuple(map(int, dims)), jnp.dtype(dtype))


def parameters(texts: Sequence[str]) -> dict[str, Hashable]:
    """`key=value` pairs; numbers, true, false and none are read as such and the rest is text."""
    found: dict[str, Hashable] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise rule_error("A parameter is key=value", repr(text), "write --param activation=gelu")
        found[key.strip()] = _value(value.strip())
    return found


def names(text: str) -> list[str]:
    """A comma-separated list, without its blanks."""
    return [name.strip() for name in text.split(",") if name.strip()]


def _value(text: str) -> Hashable:
    words: dict[str, Hashable] = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
