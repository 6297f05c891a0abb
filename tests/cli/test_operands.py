"""Operands as they are typed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from capibara.cli import operands


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "shape", "dtype"),
    [
        ("bf16[4096,1024]", (4096, 1024), jnp.bfloat16),
        ("bfloat16[8]", (8,), jnp.bfloat16),
        ("f32[]", (), jnp.float32),
        ("float32[1,2,3]", (1, 2, 3), jnp.float32),
        ("i32[0]", (0,), jnp.int32),
        ("f8e4m3[16,16]", (16, 16), jnp.float8_e4m3fn),
        ("bool[4]", (4,), jnp.bool_),
        ("f16[ 2, 3 ]", (2, 3), jnp.float16),
    ],
)
def test_shapes(text: str, shape: tuple[int, ...], dtype: object) -> None:
    assert operands.operand(text) == jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def test_an_absent_operand() -> None:
    assert operands.operand("-") is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bf16", "An operand is a type and a shape"),
        ("bf16[4096", "An operand is a type and a shape"),
        ("bf16(4,4)", "An operand is a type and a shape"),
        ("[4,4]", "An operand is a type and a shape"),
        ("", "An operand is a type and a shape"),
        ("bf17[4]", "Did you mean 'bf16'"),
        ("str[4]", "Unknown type of an operand"),
        ("f32[4x4]", "whole numbers"),
        ("f32[4,]", "whole numbers"),
        ("f32[-1]", "whole numbers"),
        ("f32[1.5]", "whole numbers"),
        ("f32[²]", "whole numbers"),
    ],
)
def test_what_is_not_an_operand(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        operands.operand(text)


def test_parameters() -> None:
    given = ["activation=gelu", "transpose_a=true", "scale=0.5", "width=128", "bias=none", "path=a=b"]
    assert operands.parameters(given) == {
        "activation": "gelu",
        "transpose_a": True,
        "scale": 0.5,
        "width": 128,
        "bias": None,
        "path": "a=b",
    }
    for wrong in ("activation", "=gelu", ""):
        with pytest.raises(ValueError, match="key=value"):
            operands.parameters([wrong])


def test_names() -> None:
    assert operands.names(" xla, cudnn,,") == ["xla", "cudnn"]
