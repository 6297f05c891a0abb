"""A model's shape from a Hugging Face config.json, and back.

What a config.json says beyond the shape (token ids, the version that wrote it, anyone's own keys) rides along in
`ModularModelConfig.huggingface`, as JSON text, and is written back as it was.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from capibara.errors import rule_error, unknown_name
from capibara.models.config import ModularModelConfig
from capibara.models.weights.family import Family
from capibara.models.weights.keys import Keys
from capibara.models.weights.llama import LLAMA
from capibara.models.weights.mistral import MISTRAL
from capibara.models.weights.mixtral import MIXTRAL
from capibara.models.weights.qwen2 import QWEN2
from capibara.models.weights.qwen2_moe import QWEN2_MOE
from capibara.models.weights.qwen3 import QWEN3
from capibara.models.weights.qwen3_moe import QWEN3_MOE

__all__ = ["FAMILIES", "config_from_hf", "config_to_hf", "family_of", "origin", "with_origin"]

FAMILIES: Mapping[str, Family] = {
    family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN2_MOE, QWEN3_MOE)
}
"""By model_type. Where a model did not come from a config.json, the first that says the same is taken."""

_ROPE = ("rope_theta", "rope_scaling")


def config_from_hf(config: Mapping[str, Any]) -> ModularModelConfig:
    """The model that a config.json describes.

    Every key that changes its numbers is understood, or refused by name.

    >>> model = config_from_hf({
    ...     "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
    ...     "num_hidden_layers": 32, "num_attention_heads": 32})
    >>> model.parameters, model.pattern
    (6738415616, 'attention+mlp')
    """
    family = _named_family(config)
    keys = Keys(config, family.model_type)
    arguments = family.read(keys)
    keys.check_rest()
    return ModularModelConfig(**arguments, huggingface=json.dumps({"config": dict(config)}))


def _named_family(config: Mapping[str, Any]) -> Family:
    architectures = config.get("architectures") or []
    model_type = config.get("model_type")
    known = {family.architecture: family for family in FAMILIES.values()}
    if not isinstance(architectures, list) or len(architectures) > 1:
        raise rule_error("architectures of config.json names one", repr(architectures), f"use one of {list(known)}")
    if architectures and architectures[0] not in known:
        raise unknown_name("architecture of config.json", architectures[0], known)
    if architectures:
        family = known[architectures[0]]
        if model_type not in (None, family.model_type):
            raise rule_error(
                f"{family.architecture} is of the model_type {family.model_type}", repr(model_type), "mend config.json"
            )
        return family
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise unknown_name("model_type of config.json", model_type, FAMILIES)
    return FAMILIES[model_type]


def origin(model: ModularModelConfig) -> dict[str, Any]:
    """What the model came from: {"config": its config.json, "tensors": types and tensors that were not as usual}."""
    return {"config": None, "tensors": {}} | (json.loads(model.huggingface) if model.huggingface else {})


def with_origin(model: ModularModelConfig, **facts: Any) -> ModularModelConfig:
    """The same model with these facts about where it came from."""
    return dataclasses.replace(model, huggingface=json.dumps({**origin(model), **facts}))


def family_of(model: ModularModelConfig) -> Family:
    """The family that a model is written as: the one it came from, or the first whose config.json says the same."""
    config = origin(model)["config"]
    if config is not None:
        return _named_family(config)
    odd = _beyond_every_family(model)
    if odd:
        raise rule_error(
            f"The Hugging Face families here are {', '.join(FAMILIES)}, none of which has every part of this model",
            odd,
            "keep it in capibara's own checkpoints",
        )
    reasons = {}
    for family in FAMILIES.values():
        try:
            same = config_from_hf({"model_type": family.model_type, **family.write(model)})
        except ValueError as error:
            reasons[family.model_type] = str(error)
            continue
        difference = _difference(model, same)
        if difference is None:
            return family
        reasons[family.model_type] = difference
    raise rule_error(
        f"The Hugging Face families here are {', '.join(FAMILIES)}; a model is written as one that has all its parts",
        "; ".join(f"{name}: {reason}" for name, reason in reasons.items()),
        "keep it in capibara's own checkpoints",
    )


def config_to_hf(model: ModularModelConfig) -> dict[str, Any]:
    """The config.json of a model.

    One that came from a config.json gets that back, with what was changed since.

    >>> made = {"model_type": "qwen2", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "extra": "kept",
    ...         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    >>> config_to_hf(config_from_hf(made)) == made
    True
    """
    family = family_of(model)
    before = origin(model)["config"]
    if before is None:
        return {"architectures": [family.architecture], "model_type": family.model_type, **family.write(model)}
    unchanged = config_from_hf(before)
    if _difference(model, unchanged) is None and model.max_length == unchanged.max_length:
        return dict(before)
    old, new = family.write(unchanged), family.write(model)
    changed = {key: value for key, value in new.items() if key not in old or old[key] != value}
    merged = {**before, **changed}
    if any(key in changed for key in _ROPE):
        merged |= {key: new[key] for key in _ROPE}
        merged.pop("rope_parameters", None)
    difference = _difference(model, config_from_hf(merged))
    if difference is not None:
        raise rule_error(
            f"The model came from a {family.model_type}, and what it has become can be written as one",
            difference,
            'set huggingface = "" in its config to write it as another family',
        )
    return merged


def _beyond_every_family(model: ModularModelConfig) -> str | None:
    """The first part of a model that no family has."""
    from capibara.models.weights.layers import pairs

    if model.norm != "rms":
        return f"norm = {model.norm!r}"
    if model.embed_scale != 1:
        return f"embed_scale = {model.embed_scale}"
    if model.softcap is not None:
        return f"softcap = {model.softcap}"
    for mixer, _ in pairs(model):
        for name in ("softcap", "scale"):
            if getattr(mixer, name) is not None:
                return f"{name} = {getattr(mixer, name)} of attention"
        if mixer.rotary_dim not in (0, mixer.width(model)):
            return f"rotary_dim = {mixer.rotary_dim} of attention"
    return None


def _difference(model: ModularModelConfig, other: ModularModelConfig) -> str | None:
    """In words, the first thing in which the numbers of two models would differ; None where they would not."""
    for key in ("hidden", "layers", "vocab", "tied", "norm", "norm_eps", "embed_scale", "softcap"):
        if getattr(model, key) != getattr(other, key):
            return f"{key} would be {getattr(other, key)!r}"
    for number in range(model.layers):
        here, there = ([m.blocks[name] for name in m.period[number % len(m.period)]] for m in (model, other))
        if [type(block) for block in here] != [type(block) for block in there]:
            return f"layer {number} would be {'+'.join(type(block).__name__.lower() for block in there)}"
        for block, one in zip(here, there, strict=True):
            mine, yours = _numbers(block, model), _numbers(one, other)
            for key, value in mine.items():
                if value != yours[key]:
                    return f"{key} of layer {number} would be {yours[key]!r}"
    return None


def _numbers(block: Any, model: ModularModelConfig) -> dict[str, Any]:
    """The keys of a block that change what it computes, spelled one way."""
    from capibara.kernels.ops.attention.rope_scaling import scaling_numbers
    from capibara.models.blocks import Attention

    keys = {field.name: getattr(block, field.name) for field in dataclasses.fields(block)}
    for training_alone in ("balance_loss", "z_loss", "jitter"):
        keys.pop(training_alone, None)
    if isinstance(block, Attention):
        keys["head_dim"] = block.width(model)
        keys["rotary_dim"] = block.rotary_dim or block.width(model)
        scaling = block.rope_scaling
        keys["rope_scaling"] = None if scaling is None else repr(scaling_numbers(scaling))
    return keys
