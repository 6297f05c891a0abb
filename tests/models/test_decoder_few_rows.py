"""Steps of decoding on Hopper, whose products are calls of few_rows: which, how many, and the same numbers."""

from __future__ import annotations

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels import explain, target, trust
from capibara.kernels.ops.layers.between_attentions.api import between_attentions
from capibara.kernels.ops.layers.few_rows import api
from capibara.kernels.ops.layers.few_rows.api import few_rows
from capibara.kernels.ops.layers.summed_row import api as summed_row_api
from capibara.kernels.ops.layers.summed_row.api import summed_row
from capibara.models import decoder
from capibara.models.blocks import attention, spec
from capibara.models.blocks.spec import LORA_DOWN, LORA_SCALE, LORA_UP, PagedBatch
from capibara.models.config import ModularModelConfig
from capibara.serve.weights import prepared

BF16 = jnp.dtype("bfloat16")
LAYERS = 2


def _model(**changes: Any) -> ModularModelConfig:
    blocks = {
        "attention": {"heads": 2, "head_dim": 64, "kv_heads": 1, **changes.pop("attention", {})},
        "mlp": {"ffn": 256, **changes.pop("mlp", {})},
    }
    return ModularModelConfig(
        hidden=128,
        vocab=changes.pop("vocab", 64),
        layers=changes.pop("layers", LAYERS),
        max_length=16,
        blocks=blocks,
        **changes,
    )


def _step(model: ModularModelConfig, tokens: int, dtype: Any = BF16, int8: bool = False) -> tuple[Any, Any]:
    """A step of one token a sequence as a function of the parameters, and those."""
    params = prepared(model, decoder.init(model, jax.random.key(0)), dtype, int8=int8)
    rows = jnp.arange(tokens, dtype=jnp.int32)
    batch = PagedBatch(jnp.zeros_like(rows), rows, rows[:, None], jnp.ones_like(rows), None, rows)
    cache = decoder.new_paged_cache(model, tokens, 16, tokens, dtype)
    return lambda params: decoder.paged(model, params, rows % model.vocab, cache, batch, dtype=dtype)[0], params


def _calls(model: ModularModelConfig, tokens: int, change: Any = None, **options: Any) -> collections.Counter[str]:
    """Calls of few_rows by what they do, in a step that is traced for an H200: of layers that are alike, one's."""
    step, params = _step(model, tokens, **options)
    with target("gpu", "NVIDIA H200"):
        found = explain(step, params if change is None else change(params)).selections
    calls = [s for s in found if s.call.op.name in ("few_rows", "summed_row", "between_attentions")]
    # Of one small weight's parts XLA's form is faster.
    assert all(s.implementation == "hopper" for s in calls if _kind(s.call) != "parts")
    return collections.Counter(_kind(s.call) for s in calls)


def _kind(call: Any) -> str:
    if call.op.name == "between_attentions":
        return "between" if call["next_weight"] is not None else "last"
    if call.op.name == "summed_row":
        return "summed"
    if call.params["out_parts"]:
        return "parts"
    return "gated" if call.params["gate"] else "plain" if call["residual"] is None else "normed"


def test_a_layer_is_three_products_each_with_what_follows_it() -> None:
    """Of many rows queries, keys and values are one more."""
    for int8 in (False, True):
        assert _calls(_model(), 8, int8=int8) == {"plain": 1, "normed": 2, "gated": 1}
        assert _calls(_model(), 65, int8=int8) == {}


_WHOLE_HEADS = {"attention": {"heads": 4, "head_dim": 64, "kv_heads": 4}}


def test_one_row_goes_from_attention_to_attention_in_one_call() -> None:
    """Where a kernel writes what the next layer projects: not of one head, and the last layer has none after it."""
    with trust("predicted"):  # layers as small as these were not timed
        assert _calls(_model(**_WHOLE_HEADS), 1) == {"between": 1, "last": 1}
        # Of 8 bits a piece of a weight is 256 inputs deep, and what is projected next has 128.
        assert _calls(_model(**_WHOLE_HEADS), 1, int8=True) == {"parts": 2, "summed": 2, "last": 1}
        assert _calls(_model(), 1) == {"parts": 1, "summed": 1, "normed": 1, "last": 1}
    assert not {"between", "last"} & set(_calls(_model(**_WHOLE_HEADS), 1))


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the kernel of `between_attentions` refuses: a layer too wide for it, for one."""
    monkeypatch.setattr(decoder, "kernel_parts", lambda *_, **__: None)


@pytest.mark.usefixtures("apart")
def test_one_row_is_left_in_parts_for_who_adds_them_up() -> None:
    """The gate does, and queries, keys and values where a kernel writes them: not of one head. Both kinds of layers are
    traced, the last and those before it; plain products of one row are XLA's."""
    assert _calls(_model(), 1) == {"parts": 2, "summed": 2, "normed": 2}
    assert _calls(_model(**_WHOLE_HEADS), 1) == {"parts": 3, "summed": 3, "normed": 1}
    assert _calls(_model(**_WHOLE_HEADS), 1, int8=True) == {"parts": 3, "summed": 3, "normed": 1}


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        ({"norm": "layer"}, {"gated": 2}),
        ({"mlp": {"bias": True}}, {"normed": 2}),
        ({"mlp": {"activation": "gelu"}}, {"normed": 4}),
        ({"attention": {**_WHOLE_HEADS["attention"], "out_bias": True}}, {"gated": 2, "normed": 2}),
        ({"attention": {**_WHOLE_HEADS["attention"], "bias": True}}, {"parts": 2, "summed": 2, "normed": 2}),
    ],
    ids=["layer-norm", "mlp-bias", "no-gate", "out-bias", "bias"],
)
def test_one_row_is_added_up_at_once_where_who_follows_does_not(model: Any, wanted: dict[str, int]) -> None:
    assert _calls(_model(**model), 1) == wanted


@pytest.mark.parametrize("int8", [False, True])
def test_the_numbers_of_parts_are_those_of_the_steps_written_out(int8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA's forms in the kernels' places: what is left is added up by who takes it, once."""
    step, params = _step(_model(layers=3, **_WHOLE_HEADS), 1, jnp.dtype("float32"), int8=int8)
    written_out = np.asarray(step(params))
    taken = []

    def noted(parts: Any, *operands: Any, **options: Any) -> Any:
        taken.append((parts.shape[0], options["gate"], options["out_parts"]))
        return summed_row(parts, *operands, **options)

    monkeypatch.setattr(attention, "has_kernel", lambda *_, **__: True)
    monkeypatch.setattr(spec, "parts_to_leave", lambda x, weight: 4)
    monkeypatch.setattr(summed_row_api, "parts_to_leave", lambda *_: 2)
    monkeypatch.setattr(summed_row_api, "has_kernel", lambda *_, **__: True)
    monkeypatch.setattr(summed_row_api, "summed_row", noted)
    np.testing.assert_allclose(np.asarray(step(params)), written_out, rtol=0, atol=2e-5)
    # Layers are of three kinds: the first is given no parts, the last leaves none.
    assert taken == [(4, "silu", None)] + [(4, None, 2), (4, "silu", None)] * 2


@pytest.mark.parametrize("int8", [False, True])
def test_the_numbers_between_attentions_are_those_of_the_steps_written_out(
    int8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA's form in the kernel's place: of a model of three layers two hand on what the next one projects."""
    step, params = _step(_model(layers=3, **_WHOLE_HEADS), 1, jnp.dtype("float32"), int8=int8)
    written_out = np.asarray(step(params))
    taken = []

    def noted(*operands: Any, **options: Any) -> Any:
        taken.append((operands[7] is not None, options["out_parts"]))
        return between_attentions(*operands, **options)

    monkeypatch.setattr(attention, "has_kernel", lambda *_, **__: True)
    monkeypatch.setattr(decoder, "kernel_parts", lambda *_, **__: 4)
    monkeypatch.setattr(decoder, "between_attentions", noted)
    np.testing.assert_allclose(np.asarray(step(params)), written_out, rtol=0, atol=2e-5)
    # Layers are of three kinds: the first is given x, those after it what was projected, and none follows the last.
    assert taken == [(True, 4), (True, 4), (False, None)]


@pytest.mark.parametrize(
    ("rows", "int8", "trusted", "by"),
    [
        (1, True, "measured", 1),
        (8, True, "measured", 1),
        (8, False, "measured", 0),
        (8, False, "predicted", 1),
        (1, False, "predicted", 0),
        (65, True, "predicted", 0),
    ],
)
def test_the_head_is_one_more(rows: int, int8: bool, trusted: str, by: int) -> None:
    model = _model(vocab=128)
    params = prepared(model, decoder.init(model, jax.random.key(0)), BF16, int8=int8)
    with target("gpu", "NVIDIA H200"), trust(trusted):
        found = explain(lambda x, params: decoder.logits(model, params, x), jnp.ones((rows, 128), BF16), params)
    calls = [s for s in found.selections if s.call.op.name == "few_rows"]
    assert [s.implementation for s in calls] == ["hopper"] * by
    assert all(s.call.params["out_dtype"] == "float32" for s in calls)


def _with_adapter(params: Any) -> Any:
    """A low-rank change of the first layer's `down` and `up`."""
    first, *others = params["layers"]
    mlp = {**first["mlp"]}
    for name, inputs, outputs in (("down", 256, 128), ("up", 128, 256)):
        mlp |= {name + LORA_DOWN: jnp.ones((inputs, 4)), name + LORA_UP: jnp.ones((4, outputs))}
        mlp[name + LORA_SCALE] = jnp.ones(4)
    return {**params, "layers": [{**first, "mlp": mlp}, *others]}


@pytest.mark.parametrize(
    ("model", "options", "wanted"),
    [
        ({}, {"tokens": 65}, {}),
        ({}, {"dtype": jnp.dtype("float32")}, {}),
        ({"norm": "layer"}, {}, {"plain": 3, "gated": 1}),
        ({"mlp": {"bias": True}}, {}, {"plain": 3, "normed": 1}),
        ({"attention": {"out_bias": True}}, {}, {"plain": 2, "normed": 1, "gated": 1}),
        # Layers that are alike are traced once: here there are two kinds.
        ({}, {"change": _with_adapter}, {"plain": 2 + 2, "normed": 2 * 2 - 1, "gated": 2 - 1}),
    ],
    ids=["rows", "float32", "layer-norm", "mlp-bias", "out-bias", "adapter"],
)
def test_what_a_kernel_does_not_do_is_written_out(model: Any, options: Any, wanted: dict[str, int]) -> None:
    assert _calls(_model(**model), **{"tokens": 8, **options}) == wanted


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("int8", [False, True])
def test_the_numbers_are_those_of_the_steps_written_out(norm: str, int8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The op's own XLA form in the kernel's place: every operand is where it belongs."""
    model = _model(norm=norm)
    states, params = _step(model, 8, jnp.dtype("float32"), int8=int8)

    def step(params: Any) -> Any:
        return decoder.logits(model, params, states(params))

    written_out = np.asarray(step(params))
    taken = []

    def noted(*operands: Any, **options: Any) -> Any:
        taken.append(options)
        return few_rows(*operands, **options)

    for room in (spec, decoder):
        monkeypatch.setattr(room, "has_kernel", lambda *_, **__: True)
        monkeypatch.setattr(room, "few_rows", noted)
    np.testing.assert_allclose(np.asarray(step(params)), written_out, rtol=0, atol=2e-5)
    assert len(taken) == 4 + 1  # of a layer, for all are alike and traced once; and the head


@pytest.mark.quick
def test_whether_there_is_a_kernel_is_asked_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    def has(rows: int) -> bool:
        return api.has_kernel(jnp.zeros((rows, 128), BF16), jnp.zeros((512, 128), BF16), gate="silu")

    with caplog.at_level("INFO", "capibara"):
        assert not has(8)
        with target("gpu", "NVIDIA H200"):
            assert has(8)
            assert not has(65)
    assert not [record for record in caplog.records if record.name.startswith("capibara")]
