"""The model that is to be served, as far as its config tells: nothing of its weights is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from capibara.models.config import ModularModelConfig
from capibara.models.preset import load_preset, preset_names
from capibara.models.weights.folder import is_hf, read_config
from capibara.models.weights.hf_config import config_from_hf

__all__ = ["ServedModel", "served_model"]


@dataclass(frozen=True)
class ServedModel:
    """A model as `capibara serve` would load it."""

    name: str
    config: ModularModelConfig
    precision: str
    """mixed, float32 or bfloat16: of the weights that are loaded, and of what is computed with them."""


def served_model(target: str | Path) -> ServedModel:
    """The model of a preset (a name or a TOML file), of a training run's folder, or of a Hugging Face config.json or
    folder.

    Examples:
        >>> served_model("llama-1b").precision
        'mixed'
    """
    folder = Path(target)
    name = str(target)
    if name not in preset_names():
        if (folder / "config.toml").is_file():
            preset = load_preset(folder / "config.toml", environment={})
            return ServedModel(folder.resolve().name, preset.model, preset.train.precision)
        if is_hf(name):
            config = read_config(name)
            kind = config.get("torch_dtype", config.get("dtype"))
            place = folder.resolve()
            return ServedModel(
                place.name if place.is_dir() else place.parent.name or place.stem,
                config_from_hf(config),
                "bfloat16" if kind == "bfloat16" else "mixed",
            )
    preset = load_preset(name)
    return ServedModel(preset.name, preset.model, preset.train.precision)
