"""The feed-forward block against products in float64."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.models.blocks.single import drawn, inputs, model_with, run, sigmoid

from capibara.models.blocks.mlp import GATED, PLAIN, Mlp

_erf = np.vectorize(math.erf)
ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "silu": lambda x: x * sigmoid(x),
    "gelu": lambda x: x * (1 + _erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: np.maximum(x, 0),
}


@pytest.mark.quick
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", [*GATED, *PLAIN])
def test_against_products(activation: str, bias: bool) -> None:
    model = model_with("mlp", ffn=24, activation=activation, bias=bias)
    w, x = drawn(model), inputs()

    def product(name: str, x: np.ndarray) -> np.ndarray:
        return x @ w[name] + (w[f"{name}_bias"] if bias else 0.0)

    if activation in GATED:
        inner = ACTIVATIONS[GATED[activation]](product("gate", x)) * product("up", x)
    else:
        inner = ACTIVATIONS[PLAIN[activation]](product("up", x))
    np.testing.assert_allclose(run(model, w, x)[0], product("down", inner), atol=1e-5, rtol=1e-5)


@pytest.mark.quick
def test_its_weights() -> None:
    def shapes(**keys: Any) -> dict[str, tuple[int, ...]]:
        model = model_with("mlp", ffn=24, **keys)
        return {name: weight.shape for name, weight in model.blocks["mlp"].weights(model).items()}

    assert shapes() == {"up": (16, 24), "gate": (16, 24), "down": (24, 16)}
    assert shapes(activation="gelu", bias=True).keys() == {"up", "down", "up_bias", "down_bias"}
    assert {field.name for field in dataclasses.fields(Mlp)} == {"ffn", "activation", "bias"}


@pytest.mark.parametrize(
    ("keys", "said"), [({"ffn": 0}, "ffn of an mlp is 1 or more"), ({"ffn": 8, "activation": "swish"}, "'swiglu'")]
)
def test_bad_keys(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        model_with("mlp", **keys)
