"""A wrong call of attention says the rule, what arrived and the fix."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from capibara.errors import UnknownNameError
from capibara.kernels.ops.attention import api
from capibara.kernels.ops.attention.api import ATTENTION, ATTENTION_GRAD

attention = functools.partial(api.attention, layout="bhtd")


def _q(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.zeros(shape or (2, 4, 6, 8), dtype)


def _kv(*shape: int) -> jax.Array:
    return jnp.zeros(shape or (2, 2, 5, 8))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "three axes": ({"query": _q(4, 6, 8)}, "four axes"),
    "value shape": ({"value": _kv(2, 2, 4, 8)}, "one shape"),
    "batch": ({"query": _q(3, 4, 6, 8)}, "batch"),
    "head_dim": ({"query": _q(2, 4, 6, 16)}, "head_dim"),
    "heads": ({"query": _q(2, 3, 6, 8)}, "multiple"),
    "types": ({"query": _q(dtype=jnp.bfloat16)}, "one type"),
    "integers": ({"query": _q(dtype=jnp.int32)}, "float32"),
    "not an array": ({"query": "words"}, "arrays"),
    "window of 0": ({"window": 0}, "1 key or more"),
    "window below 0": ({"window": (-1, 0)}, "window"),
    "window of three": ({"window": (1, 2, 3)}, "two parts"),
    "window of a fraction": ({"window": 1.5}, "whole number"),
    "offset": ({"query_offset": 0.5}, "whole number"),
    "mask shape": ({"mask": jnp.ones((2, 4, 6, 4), bool)}, "mask is"),
    "mask type": ({"mask": jnp.ones((1, 1, 6, 5))}, "boolean"),
    "bias shape": ({"bias": jnp.ones((3, 1, 6, 5))}, "bias is"),
    "bias type": ({"bias": jnp.ones((1, 1, 6, 5), bool)}, "float"),
    "block grid": ({"block_mask": jnp.ones((1, 1, 3, 2), bool), "block_size": (2, 2)}, r"\[2\|1, 4\|1, 3, 3\]"),
    "block size missing": ({"block_mask": jnp.ones((1, 1, 3, 3), bool)}, "come together"),
    "block size alone": ({"block_size": 2}, "come together"),
    "block size of 0": ({"block_mask": jnp.ones((1, 1, 3, 3), bool), "block_size": (0, 2)}, "1 or more"),
    "block type": ({"block_mask": jnp.ones((1, 1, 3, 3)), "block_size": 2}, "boolean"),
    "two sparsities": (
        {"block_mask": jnp.ones((1, 1, 3, 3), bool), "block_size": 2, "mask_fn": lambda i, j: i >= j},
        "block mask or by a mask function",
    ),
    "mask_fn type": ({"mask_fn": lambda i, j: i - j}, "returns booleans"),
    "segment length": ({"segment_ids": jnp.zeros((2, 5), int), "key_segment_ids": jnp.zeros((2, 5), int)}, "length"),
    "segments of queries alone": ({"segment_ids": jnp.zeros((2, 6), int)}, "key_segment_ids"),
    "segments of keys alone": ({"key_segment_ids": jnp.zeros((2, 5), int)}, "segment_ids"),
    "segment type": ({"segment_ids": _q(2, 6), "key_segment_ids": _q(2, 5)}, "integers"),
    "dropout of 1": ({"dropout_rate": 1.0, "dropout_key": jax.random.key(0)}, r"\[0, 1\)"),
    "dropout below 0": ({"dropout_rate": -0.1}, r"\[0, 1\)"),
    "dropout without a key": ({"dropout_rate": 0.1}, "dropout_key"),
    "scale": ({"scale": float("nan")}, "finite"),
    "softcap": ({"softcap": 0.0}, "above 0"),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_words(name: str) -> None:
    changed, says = BAD[name]
    call = {"query": _q(), "key": _kv(), "value": _kv(), **changed}
    with pytest.raises(ValueError, match=says) as caught:
        attention(**call)
    assert "Got " in str(caught.value)
    assert "Fix: " in str(caught.value)


@pytest.mark.parametrize(("changed", "says"), [({"layout": "htd"}, "bthd"), ({"implementation": "xl"}, "xla")])
def test_unknown_names_list_the_choices(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(UnknownNameError, match=says):
        attention(_q(), _kv(), _kv(), **changed)


def test_traced_settings_are_refused_in_words() -> None:
    for name in ("query_offset", "scale", "dropout_rate", "window"):
        with pytest.raises(ValueError, match="known before tracing"):
            jax.jit(lambda x, name=name: attention(_q(), _kv(), _kv(), **{name: x}))(1)


def test_the_gradient_op_checks_what_the_forward_pass_returned() -> None:
    q, kv, nothing = _q(), _kv(), (None,) * 6
    with pytest.raises(ValueError, match="lse"):
        ATTENTION_GRAD(q, kv, kv, *nothing, q, _q(2, 4, 5), q)
    with pytest.raises(ValueError, match="out has"):
        ATTENTION_GRAD(q, kv, kv, *nothing, kv, _q(2, 4, 6), q)


def test_cost_counts_the_live_pairs_exactly() -> None:
    q, kv = jax.ShapeDtypeStruct((2, 4, 6, 8), jnp.float32), jax.ShapeDtypeStruct((2, 2, 6, 8), jnp.float32)
    for params, pairs in (
        ({}, 36),
        ({"causal": True}, 21),
        ({"causal": True, "q_offset": 1}, 26),
        ({"causal": True, "q_offset": -2}, 10),
        ({"causal": True, "window": (1, 0)}, 11),
        ({"window": (0, 1)}, 11),
    ):
        assert ATTENTION.cost(ATTENTION.call(q, kv, kv, **params)).flops == 4 * 2 * 4 * 8 * pairs
