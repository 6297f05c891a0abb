"""Models from where they were kept: a run's folder, a Hugging Face folder, or a preset with random weights."""

from __future__ import annotations

from pathlib import Path

import jax

from capibara.checkpoints.store import Checkpoints
from capibara.errors import rule_error, unknown_name
from capibara.models import decoder
from capibara.models.modular import ModularCapibaraModel
from capibara.models.preset import load_preset, preset_names
from capibara.parallel.trainer_step import compute_dtype, param_dtype

__all__ = ["from_checkpoint", "load_model"]

_PRECISIONS = ("float32", "bfloat16")


def from_checkpoint(folder: str | Path, step: int | None = None) -> ModularCapibaraModel:
    """The model of a training run's folder, with the weights of its last good checkpoint, or of this step."""
    run = Path(folder)
    if run.name == "checkpoints" and (run.parent / "config.toml").is_file():
        run = run.parent
    if not (run / "config.toml").is_file():
        raise rule_error(
            "A training run's folder has its config.toml",
            f"{folder} without",
            "name what --out of `capibara train` was",
        )
    preset = load_preset(run / "config.toml", environment={})
    if rank := preset.table.values.get("lora", {}).get("rank", 0):
        return _merged(run, rank, step)
    train = preset.train
    model = ModularCapibaraModel(preset.model, precision=train.precision, seed=train.seed, fp8=train.fp8_products)
    data = preset.table.values.get("data", {})
    model.prompt_bos = bool(data.get("add_bos", True))
    shapes = decoder.param_shapes(preset.model, param_dtype(preset.train.precision))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=here), shapes)
    with Checkpoints(run / "checkpoints") as checkpoints:
        model.params = checkpoints.restore({"params": target}, step, partial=True).state["params"]
    return model


def _merged(run: Path, rank: int, step: int | None) -> ModularCapibaraModel:
    """The model that a LoRA run wrote at its end, its changes added to the weights that it started from."""
    from capibara.models.weights import from_hf

    folder = run / "merged"
    if step is not None or not (folder / "config.json").is_file():
        raise rule_error(
            "A LoRA run has its whole model in merged/ once it is done, and the factors alone in its checkpoints",
            f"{run} with factors of rank {rank} and " + ("no merged/" if step is None else f"step {step} asked for"),
            "finish it with capibara train --resume",
        )
    return from_hf(folder)


def load_model(name: str | Path, precision: str | None = None) -> tuple[ModularCapibaraModel, str]:
    """The model that a command was given, to write with, and in words where it is from.

    Args:
      precision: what it computes in, "float32" or "bfloat16"; its own when None.
    """
    if precision not in (None, *_PRECISIONS):
        raise unknown_name("precision to write in", precision, _PRECISIONS)
    model, origin = _kept(name)
    if precision is not None and compute_dtype(precision) != compute_dtype(model.precision):
        model.precision = precision
        origin = f"{origin}, computed in {precision}"
    return model, origin


def _kept(name: str | Path) -> tuple[ModularCapibaraModel, str]:
    """As it was trained or published."""
    folder = Path(name)
    if (folder / "config.toml").is_file():
        return from_checkpoint(folder), f"the run in {folder}"
    if (folder / "config.json").is_file():
        from capibara.models.weights import from_hf

        return from_hf(folder), f"the weights in {folder}"
    if folder.is_dir():
        raise rule_error(
            "A model's folder has a config.toml (a training run) or a config.json (Hugging Face)",
            f"{folder} with neither",
            f"name such a folder, or one of {', '.join(preset_names())}",
        )
    preset = load_preset(name)
    train = preset.train
    model = ModularCapibaraModel(preset.model, precision=train.precision, seed=train.seed, fp8=train.fp8_products)
    return model, f"preset {name}, with random weights: it writes noise"
