"""LoRA adapters beside one model's weights: each request names the one that answers, and all of them share a step.

The factors of all adapters lie side by side, down [inputs, ranks] and up [ranks, outputs], and a token's own are picked
by a row of scales that is zero at every other adapter's ranks: two products for a batch of any mixture, at the price of
all ranks together for each token.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.errors import rule_error
from capibara.models import decoder
from capibara.models.blocks import spec
from capibara.models.blocks.spec import LORA_DOWN, LORA_SCALE, LORA_UP

if TYPE_CHECKING:
    from capibara.models.config import ModularModelConfig

__all__ = ["LoraAdapter", "with_adapters"]


@dataclass(frozen=True)
class LoraAdapter:
    """Low-rank changes of a model's weights, as a LoRA run trains them."""

    factors: list[dict[str, Any]]
    """A layer of the model's pattern each: block -> weight's name with `_lora_down`, `_lora_up` -> stacked factors."""
    alpha: float
    """A weight W counts as W + alpha / rank · down · up."""

    @classmethod
    def from_run(cls, folder: str | Path, step: int | None = None) -> LoraAdapter:
        """The factors of a LoRA run's last good checkpoint, or of this step."""
        from capibara.checkpoints.store import Checkpoints
        from capibara.models.preset import load_preset
        from capibara.train.config import LoraSettings
        from capibara.train.lora import adapter_weights

        run = Path(folder)
        if not (run / "config.toml").is_file():
            raise rule_error(
                "An adapter's folder is a LoRA run's, with its config.toml", f"{run} without", "name the run's --out"
            )
        preset = load_preset(run / "config.toml", environment={})
        table = preset.table.values.get("lora", {})
        if not table.get("rank"):
            raise rule_error(
                "An adapter's run trained LoRA factors", f"{run} with lora.rank = 0", "serve it as a model"
            )
        lora = LoraSettings(**{**table, "targets": tuple(table.get("targets", LoraSettings.targets))})
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shapes = spec.shapes(adapter_weights(preset.model, lora), jnp.float32)
        target = jax.tree.map(lambda leaf: leaf.update(sharding=here), shapes)
        with Checkpoints(run / "checkpoints") as checkpoints:
            factors = checkpoints.restore({"params": target}, step, partial=True).state["params"]
        return cls(factors, lora.alpha)


_PEFT_BEYOND = {"use_dora": False, "bias": "none", "fan_in_fan_out": False, "rank_pattern": {}, "alpha_pattern": {}}
"""Keys of PEFT's adapter_config.json that must say this, or nothing: what they change otherwise is not done here."""


def _from_peft(folder: Path, model: ModularModelConfig) -> LoraAdapter:
    """An adapter as PEFT saves it: adapter_config.json and adapter_model.safetensors."""
    from capibara.models.weights.family import places
    from capibara.models.weights.hf_config import family_of
    from capibara.models.weights.tensor_file import TensorFile

    said = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    if said.get("peft_type") != "LORA":
        raise rule_error("An adapter of PEFT is of type LORA", repr(said.get("peft_type")), "use a LoRA adapter")
    for key, plain in _PEFT_BEYOND.items():
        if said.get(key) not in (plain, None, False, {}):
            raise rule_error(f"An adapter's {key} is {plain!r}", repr(said[key]), "merge it into the model's weights")
    rank, tensors = int(said["r"]), dict(TensorFile(folder / "adapter_model.safetensors").entries)
    shapes = _factor_shapes(model)
    factors: list[dict[str, Any]] = [{} for _ in shapes]
    for place in places(model, family_of(model)):
        stem = "base_model.model." + place.name.removesuffix(".weight")
        down, up = (tensors.pop(f"{stem}.lora_{which}.weight", None) for which in "AB")
        if down is None or up is None:
            continue
        _, position, slot, weight = place.path
        assert isinstance(position, int)
        assert isinstance(slot, str)
        made = factors[position].setdefault(slot, {})
        for key, tensor in ((f"{weight}{LORA_DOWN}", down), (f"{weight}{LORA_UP}", up)):
            if key not in shapes[position].get(slot, {}):
                raise rule_error("An adapter changes weights of products", place.name, "leave it out of target_modules")
            stack, *shape = shapes[position][slot][key]
            shape[-1 if key.endswith(LORA_DOWN) else 0] = rank
            # Layers that it leaves alone have zeros.
            whole = made.setdefault(key, np.zeros((stack, *shape), np.float32))
            whole[place.index[0]] = tensor.view().astype(np.float32).T.reshape(shape)
    if tensors:
        raise rule_error("An adapter's tensors are of the model's own weights", ", ".join(sorted(tensors)[:3]),
                         "use one that was trained from this model")  # fmt: skip
    alpha = float(said["lora_alpha"])
    return LoraAdapter(factors, alpha * math.sqrt(rank) if said.get("use_rslora") else alpha)


def _factor_shapes(model: ModularModelConfig) -> list[dict[str, Any]]:
    """Of factors of rank 1 of every weight that can have some."""
    layers: list[dict[str, Any]] = []
    for names, layer in zip(model.period, decoder.weights(model)["layers"], strict=True):
        made: dict[str, Any] = {}
        for number, name in enumerate(names):
            slot = decoder.slot_of(names, number)
            for weight, inputs in model.blocks[name].products().items():
                stack, *shape = layer[slot][weight].shape
                block = made.setdefault(slot, {})
                block[weight + LORA_DOWN] = (stack, *shape[:inputs], 1)
                block[weight + LORA_UP] = (stack, 1, *shape[inputs:])
        layers.append(made)
    return layers


def _read(name: str, adapter: Any, model: ModularModelConfig) -> LoraAdapter:
    if isinstance(adapter, LoraAdapter):
        return adapter
    if isinstance(adapter, str | Path):
        folder = Path(adapter)
        return _from_peft(folder, model) if (folder / "adapter_config.json").is_file() else LoraAdapter.from_run(folder)
    raise rule_error(
        "An adapter is a LoraAdapter, or the folder of a LoRA run or of one that PEFT saved",
        f"{name}: {type(adapter).__name__}",
        "use LoraAdapter(factors, alpha)",
    )


def with_adapters(model: ModularModelConfig, params: Any, adapters: Mapping[str, Any], dtype: Any) -> Any:
    """Parameters as `weights.prepared` gives them, with the factors of all adapters in their blocks.

    An adapter's number is its place in `adapters`; `_lora_scale` of a weight is [adapters, ranks].
    """
    if not adapters:
        return params
    every = [_read(name, adapter, model) for name, adapter in adapters.items()]
    for name, adapter in zip(adapters, every, strict=True):
        _check(model, name, adapter)
    period, layers = len(model.period), []
    for number, layer in enumerate(params["layers"]):
        place, repeat = number % period, number // period
        own = {slot: dict(block) for slot, block in layer.items()}
        for slot, block in own.items():
            parts = [adapter.factors[place].get(slot, {}) for adapter in every]
            weights = sorted({key.removesuffix(LORA_DOWN) for part in parts for key in part if key.endswith(LORA_DOWN)})
            for weight in weights:
                block |= _side_by_side(weight, parts, [adapter.alpha for adapter in every], repeat, dtype)
        layers.append(own)
    return {**params, "layers": layers}


def _side_by_side(
    weight: str, parts: list[Mapping[str, Any]], alphas: list[float], repeat: int, dtype: Any
) -> dict[str, jax.Array]:
    down, up, ranks = [], [], []
    for part in parts:
        has = weight + LORA_DOWN in part
        ranks.append(part[weight + LORA_DOWN].shape[-1] if has else 0)
        if has:
            down.append(jnp.asarray(part[weight + LORA_DOWN][repeat], dtype))
            up.append(jnp.asarray(part[weight + LORA_UP][repeat], dtype))
    owner = jnp.repeat(jnp.arange(len(ranks)), jnp.array(ranks), total_repeat_length=sum(ranks))
    scale = jnp.array([alpha / max(rank, 1) for alpha, rank in zip(alphas, ranks, strict=True)], jnp.float32)
    scales = jnp.where(jnp.arange(len(ranks))[:, None] == owner, scale[:, None], 0)
    return {
        weight + LORA_DOWN: jnp.concatenate(down, axis=-1),
        weight + LORA_UP: jnp.concatenate(up, axis=0),
        weight + LORA_SCALE: scales,
    }


def _check(model: ModularModelConfig, name: str, adapter: LoraAdapter) -> None:
    known = _factor_shapes(model)
    if len(adapter.factors) != len(known):
        raise rule_error(
            f"An adapter has factors for the {len(known)} layer(s) of the model's pattern",
            f"{name} with {len(adapter.factors)}",
            "use one that was trained from this model",
        )
    for want, have in zip(known, adapter.factors, strict=True):
        for slot, block in have.items():
            for key, leaf in block.items():
                axis = -1 if key.endswith(LORA_DOWN) else 1
                shape = want.get(slot, {}).get(key)
                got = list(leaf.shape)
                got[axis] = 1
                if shape is None or list(shape) != got:
                    raise rule_error(
                        "An adapter's factors are of the model's own weights",
                        f"{name}: {slot}.{key} {list(leaf.shape)}"
                        + ("" if shape is None else f" for {list(shape)} and a rank"),
                        "use one that was trained from this model",
                    )
