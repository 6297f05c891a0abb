"""`ModularModelConfig`: patterns, counts, overrides, and TOML there and back."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tests.models.models import MODELS

from capibara.models.blocks import Attention, Mlp
from capibara.models.config import ModularModelConfig, TpuSettings
from capibara.models.preset import load_preset, preset_names

DENSE: dict[str, Any] = {"attention": {"heads": 2}, "mlp": {"ffn": 8}}


def _model(**keys: Any) -> ModularModelConfig:
    return ModularModelConfig(**{"hidden": 8, "layers": 12, "vocab": 16, "blocks": DENSE, **keys})


A, B = ("attention", "mlp"), ("mlp",)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("pattern", "period"),
    [
        ("attention+mlp", (A,)),
        ("3 mlp : 1 attention+mlp", (B, B, B, A)),
        ("mlp:attention+mlp", (B, A)),
        ("  2 mlp,attention+mlp ", (B, B, A)),
        (("mlp", "2 attention+mlp"), (B, A, A)),
        (["mlp", "attention+mlp"], (B, A)),
        ("mlp+mlp", (("mlp", "mlp"),)),
    ],
)
def test_a_pattern_is_gone_through_until_all_layers_are_there(pattern: Any, period: Any) -> None:
    model = _model(pattern=pattern)
    assert model.period == period
    assert model.repeats == 12 // len(period)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"pattern": "mlp++mlp"}, "Unknown block in the pattern|A pattern is layers"),
        ({"pattern": "0 mlp"}, "A pattern is layers apart by ':'"),
        ({"pattern": ""}, "A pattern is layers apart by ':'"),
        ({"pattern": ()}, "A pattern has a layer or more"),
        ({"pattern": "mlp :"}, "A pattern is layers apart by ':'"),
        ({"pattern": "attention+mpl"}, "Unknown block in the pattern 'attention.mpl' 'mpl'. Did you mean 'mlp'"),
        ({"pattern": "5 mlp"}, "a whole number of times. Got 12 layers and a pattern of 5. Fix: use layers = 10"),
        ({"layers": 2, "pattern": "5 mlp"}, "use layers = 5"),
        ({"hidden": 0}, "hidden of a model is a whole number from 1 up"),
        ({"vocab": 1.5}, "vocab of a model is a whole number"),
        ({"max_length": True}, "max_length of a model is a whole number"),
        ({"norm": "batch"}, "Choices: 'rms', 'layer'"),
        ({"norm_eps": 0.0}, "norm_eps"),
        ({"softcap": 0.0}, "softcap"),
        ({"blocks": {}}, "A model has blocks"),
        ({"blocks": {"mpl": {"ffn": 8}}, "pattern": "mpl"}, "Unknown kind of blocks.mpl 'mpl'. Did you mean 'mlp'"),
        (
            {"blocks": {**DENSE, "mlp": {"ffn": 8, "activate": "gelu"}}},
            "key of blocks.mlp 'activate'. Did you mean 'activation'",
        ),
        ({"blocks": {**DENSE, "mlp": 8}}, "blocks.mlp is a table of keys"),
    ],
)
def test_bad_keys(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        _model(**keys)


def test_blocks_are_taken_as_objects_too() -> None:
    assert _model(blocks={"attention": Attention(heads=2), "mlp": Mlp(ffn=8)}).blocks == _model().blocks


@pytest.mark.quick
def test_overrides_lie_over_the_blocks_keys() -> None:
    model = _model().with_overrides(layers=2, blocks={"attention": {"window": 4}, "wide": {"kind": "mlp", "ffn": 32}})
    assert model.blocks["attention"] == Attention(heads=2, window=4)
    assert model.blocks["wide"] == Mlp(ffn=32)
    assert model.blocks["mlp"] == Mlp(ffn=8)
    assert model.with_overrides(blocks={"mlp": Mlp(ffn=9)}).blocks["mlp"] == Mlp(ffn=9)
    assert model.with_overrides(blocks={"mlp": {"kind": "vq", "codes": 4}}).blocks["mlp"].codes == 4
    assert _model().with_overrides(pattern="mlp").period == (B,)
    with pytest.raises(TypeError):
        _model().with_overrides(width=3)


def test_toml_there_and_back(tmp_path: Path) -> None:
    tpu = TpuSettings(mesh_shape=(2, 2), memory_limit_gb=10.0, optimized=False)
    models = {**MODELS, **{name: load_preset(name).model for name in preset_names()}, "tpu": _model(tpu=tpu)}
    for name, model in models.items():
        file = tmp_path / "model.toml"
        text = model.to_toml(file)
        assert file.read_text(encoding="utf-8") == text
        back = ModularModelConfig.from_toml(file)
        # A file's name is its own, where the model has none.
        assert dataclasses.replace(back, name=model.name) == dataclasses.replace(model, pattern=back.pattern), name
        assert back.period == model.period
        assert back.to_toml() == text


def test_from_toml_takes_overrides() -> None:
    model = ModularModelConfig.from_toml("dev", layers=2, blocks={"attention": {"window": 9}})
    assert (model.layers, model.blocks["attention"].window, model.blocks["attention"].heads) == (2, 9, 4)


def test_counts_of_a_model_that_can_be_counted_by_hand() -> None:
    model = _model(layers=2, norm="layer")
    attention, mlp, norm = 4 * 8 * 8, 3 * 8 * 8, 16
    assert model.parameters == 2 * (attention + norm + mlp + norm) + norm + 2 * 16 * 8
    assert model.active_parameters == model.parameters
    # All but the table that is looked up is multiplied; scores and values of half of 10 keys.
    beside = 2 * 4 * 8 * (10 / 2)
    assert model.flops_per_token(10, training=False) == 2 * (model.parameters - 16 * 8) + beside
    assert model.flops_per_token(10) == 3 * model.flops_per_token(10, training=False)
    tied = _model(layers=2, norm="layer", tied=True)
    assert tied.parameters == model.parameters - 16 * 8
    assert tied.flops_per_token(10) == model.flops_per_token(10)
