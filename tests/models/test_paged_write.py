"""Steps of serving on Hopper that turn and write queries and keys in one pass: which, and the same numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels import explain, target, trust
from capibara.kernels.ops.attention.paged_write.api import paged_write
from capibara.models import decoder
from capibara.models.blocks import attention
from capibara.models.blocks.spec import LORA_DOWN, LORA_SCALE, LORA_UP, PagedBatch
from capibara.models.config import ModularModelConfig
from capibara.serve.weights import prepared

BF16, FLOAT32 = jnp.dtype("bfloat16"), jnp.dtype("float32")
PAGE_SIZE = 16


def _model(**changes: Any) -> ModularModelConfig:
    block = {"heads": 4, "head_dim": 64, "kv_heads": 4, **changes}
    return ModularModelConfig(
        hidden=128, vocab=64, layers=2, max_length=64, blocks={"attention": block, "mlp": {"ffn": 128}}
    )


def _step(
    model: ModularModelConfig, positions: list[int], *, dtype: Any = BF16, cache_dtype: Any = None, joint: bool = True
) -> tuple[Any, Any]:
    """A step of one token a sequence as a function of the parameters, and those. A position of -1 is padding."""
    params = prepared(model, decoder.init(model, jax.random.key(0)), dtype, joint=joint)
    at = jnp.asarray(positions, jnp.int32)
    rows = jnp.arange(at.size, dtype=jnp.int32)
    # Of each sequence's pages the first is there: later tokens have no place.
    table = jnp.stack((rows, jnp.full_like(rows, 2**30)), axis=1)
    batch = PagedBatch(at, rows, table, at + 1, None, rows)
    cache = decoder.new_paged_cache(model, at.size, PAGE_SIZE, at.size, cache_dtype or dtype)
    return lambda params: decoder.paged(model, params, rows % model.vocab, cache, batch, dtype=dtype), params


def _calls(model: ModularModelConfig, change: Any = None, **options: Any) -> list[str]:
    """Who takes `paged_write`, in a step that is traced for an H200: of layers that are alike, one's."""
    step, params = _step(model, [3, 0], **options)
    with target("gpu", "NVIDIA H200"):
        found = explain(step, params if change is None else change(params)).selections
    return [s.implementation for s in found if s.call.op.name == "paged_write"]


def test_a_layer_is_one_pass() -> None:
    assert _calls(_model()) == ["hopper"]
    assert _calls(_model(rotary_dim=64, rope_base=500.0, head_dim=128)) == ["hopper"]
    assert _calls(_model(rope_scaling={"type": "linear", "factor": 2.0})) == ["hopper"]


def _with_adapter(params: Any) -> Any:
    """A low-rank change of every layer's queries."""

    def changed(layer: Any) -> Any:
        own = {"query" + LORA_DOWN: jnp.ones((128, 4)), "query" + LORA_UP: jnp.ones((4, 4, 64))}
        return {**layer, "attention": {**layer["attention"], **own, "query" + LORA_SCALE: jnp.ones(())}}

    return {**params, "layers": [changed(layer) for layer in params["layers"]]}


@pytest.mark.spread(3)
@pytest.mark.parametrize(
    ("block", "options"),
    [
        ({"bias": True}, {}),
        ({"qk_norm": True}, {}),
        ({"heads": 6, "kv_heads": 3}, {}),
        ({}, {"dtype": FLOAT32}),
        ({}, {"cache_dtype": jnp.dtype("int8")}),
        ({}, {"cache_dtype": FLOAT32}),
        ({}, {"joint": False}),
        ({}, {"change": _with_adapter}),
    ],
    ids=["bias", "norms", "three-heads", "float32", "8-bit-cache", "wide-cache", "apart-as-on-a-mesh", "adapter"],
)
def test_what_a_kernel_does_not_do_is_written_out(block: Any, options: Any) -> None:
    with trust("predicted"):  # where most would be taken
        assert _calls(_model(**block), **options) == []


@pytest.mark.spread(4)
@pytest.mark.parametrize("block", [{}, {"rotary_dim": 16, "rope_scaling": {"type": "linear", "factor": 2.0}}])
@pytest.mark.parametrize("positions", [[5], [-1], [15, 0, -1, 16, 3], [40]], ids=str)
def test_the_numbers_are_those_of_the_steps_written_out(
    block: Any, positions: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The op's own XLA form in the kernel's place: every operand is where it belongs."""
    step, params = _step(_model(**block), positions, dtype=FLOAT32)
    states, cache = step(params)
    taken = []

    def noted(*operands: Any, **options: Any) -> Any:
        taken.append(options)
        return paged_write(*operands, **options)

    monkeypatch.setattr(attention, "has_kernel", lambda *_, **__: True)
    monkeypatch.setattr(attention, "paged_write", noted)
    found, pools = step(params)
    # Of layers that are alike. One token's last layer is not: nothing follows that it could leave something to.
    assert len(taken) == (2 if len(positions) == 1 else 1)
    there = np.asarray(positions) >= 0
    np.testing.assert_allclose(np.asarray(found)[there], np.asarray(states)[there], rtol=0, atol=2e-5)
    for one, other in zip(jax.tree.leaves(pools), jax.tree.leaves(cache), strict=True):
        # The spare page, the last, is nobody's.
        np.testing.assert_allclose(np.asarray(one)[:-1], np.asarray(other)[:-1], rtol=0, atol=2e-5)
