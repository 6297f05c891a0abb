"""between_attentions itself: what it computes, and what it refuses. Each implementation: tests/kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from jaxtyping import jaxtyped

from capibara.errors import UnknownNameError, parts_of
from capibara.kernels import between_attentions, few_rows
from capibara.kernels.ops.layers.between_attentions.api import BETWEEN_ATTENTIONS, new_board
from capibara.kernels.ops.layers.between_attentions.rules import OPTIONAL

checked = jaxtyped(typechecker=beartype)(between_attentions)
BF16 = jnp.dtype("bfloat16")
SHAPES = {
    "x": (1, 8), "residual": (1, 4), "out_weight": (4, 8), "scale": (4,), "up_weight": (12, 4), "down_weight": (4, 6),
    "next_scale": (4,), "next_weight": (10, 4),
}  # fmt: skip
INT8 = {
    **{name: jnp.ones(SHAPES[name], jnp.int8) for name in SHAPES if name.endswith("weight")},
    **{f"{name}_scale": jnp.ones(SHAPES[name][0]) for name in SHAPES if name.endswith("weight")},
}


def _given(seed: int = 0) -> dict[str, jax.Array]:
    draw = np.random.default_rng(seed)
    return {name: jnp.asarray(draw.standard_normal(shape, np.float32)) for name, shape in SHAPES.items()}


@pytest.mark.quick
def test_the_xla_form_has_the_bits_of_its_steps() -> None:
    given = _given()
    total, normal = few_rows(given["x"], given["out_weight"], given["residual"], given["scale"], eps=1e-2)
    gated = few_rows(normal, given["up_weight"], gate="gelu")
    total, normal = few_rows(gated, given["down_weight"], total, given["next_scale"], eps=1e-2)
    found = checked(**given, gate="gelu", eps=1e-2, out_parts=2)
    np.testing.assert_array_equal(found[0], total)
    np.testing.assert_array_equal(found[1], few_rows(normal, given["next_weight"], out_parts=2))
    last = checked(**{**given, "next_weight": None}, gate="gelu", eps=1e-2)
    np.testing.assert_array_equal(last[1], normal)


@pytest.mark.quick
def test_a_board_that_is_given_comes_back() -> None:
    board = new_board(4, 6)
    assert len(checked(**_given())) == 2
    *_, after = checked(**_given(), board=board)
    np.testing.assert_array_equal(after, board)


@pytest.mark.quick
@pytest.mark.parametrize("name", [name for name in SHAPES if name not in OPTIONAL])
def test_what_is_needed(name: str) -> None:
    operands = [{**_given(), name: None}.get(operand) for operand in BETWEEN_ATTENTIONS.operands]
    with pytest.raises(ValueError, match=f"between_attentions needs {name}. Got .* Fix: pass it"):
        BETWEEN_ATTENTIONS(*operands)


@pytest.mark.quick(cases=4)
@pytest.mark.parametrize("name", [*SHAPES, *(name for name in INT8 if name.endswith("scale")), "board"])
def test_axes(name: str) -> None:
    axes = 2 if name in SHAPES and len(SHAPES[name]) == 2 else 1
    with pytest.raises(ValueError, match=rf"{name} has {axes} axes. Got .*\[1,1,1\]. Fix: reshape"):
        between_attentions(**{**_given(), **INT8, name: jnp.ones((1, 1, 1))})


@pytest.mark.quick(cases=4)
@pytest.mark.parametrize("name", [*SHAPES, *(name for name in INT8 if name.endswith("scale"))])
def test_shapes(name: str) -> None:
    """An axis of x, of the residual and of down_weight says how long others are: those do not fit then."""
    given: dict[str, Any] = {**_given(), **INT8}
    *before, axis = given[name].shape
    given[name] = jnp.ones((*before, axis + 1), given[name].dtype)
    blamed = {"x": "out_weight", "residual": "out_weight", "down_weight": "up_weight"}.get(name, name)
    with pytest.raises(ValueError, match=rf"{blamed} is \[.*Fix: weights are held by output") as caught:
        between_attentions(**given)
    said = parts_of(caught.value)
    assert said is not None
    assert f"[{','.join(map(str, given[blamed].shape))}]" in said["got"]


@pytest.mark.quick(cases="all")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": jnp.ones((1, 8), jnp.int32)}, r"x is of bfloat16.*Got i32\[1,8\].*astype"),
        ({"residual": jnp.ones((2, 4))}, r"residual is \[1, 4\] beside x \[1, 8\].*Got f32\[2,4\]"),
        ({"residual": jnp.ones((1, 4), BF16)}, r"have one type.*Got f32\[1,8\] bf16\[1,4\].*astype"),
        ({"up_weight": jnp.ones((12, 4), BF16)}, "have one type, or the weights are all of int8"),
        ({**INT8, "down_weight": jnp.ones((4, 6))}, "have one type, or the weights are all of int8"),
        ({**INT8, "next_weight_scale": None}, "Got next_weight without next_weight_scale.*pass next_weight_scale"),
        ({**INT8, "next_weight": None}, r"next_weight_scale is \[0\]"),
        ({"up_weight_scale": jnp.ones(12)}, "no other has. Got up_weight with up_weight_scale"),
        ({"board": jnp.ones(8)}, r"A board is of int32. Got f32\[8\]. Fix: make one with new_board"),
        ({"eps": 0.0}, "eps is a finite float above 0. Got 0.0. Fix: pass a small positive float"),
        ({"eps": float("inf")}, "eps is a finite float above 0. Got inf"),
        ({"out_parts": 3}, "out_parts divides the inputs. Got 3 of 4. Fix: use 2"),
        ({"out_parts": 0}, "out_parts divides the inputs. Got 0 of 4"),
        ({"out_parts": 2.0}, "out_parts divides the inputs. Got 2.0 of 4"),
        ({"out_parts": 2, "next_weight": None}, "out_parts is of the last product. Got no next_weight. Fix: leave"),
    ],
)
def test_bad_calls_say_what_is_wrong(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        between_attentions(**{**_given(), **change})


@pytest.mark.quick
def test_an_unknown_gate_is_told_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"gate of between_attentions 'sil'. Did you mean 'silu'"):
        between_attentions(**_given(), gate="sil")
