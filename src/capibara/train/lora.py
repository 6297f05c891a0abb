"""LoRA: low-rank changes of a model's products are trained, and the weights themselves stay as they are.

A weight W gets two factors, `down` [inputs, rank] and `up` [rank, outputs], and counts as W + alpha / rank · down · up;
`up` starts at zero. The factors lie in the weight's own block beside it (`blocks.spec.product` adds them), so that a
layer's factors are stacked, scanned and laid out with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from capibara.errors import rule_error, unknown_name
from capibara.models import decoder
from capibara.models.blocks import spec
from capibara.models.blocks.spec import LORA_DOWN, LORA_SCALE, LORA_UP, Weight
from capibara.models.config import ModularModelConfig
from capibara.models.modular import ModularCapibaraModel
from capibara.parallel.trainer_step import Loss, WithHistory, compute_dtype
from capibara.precision import Fp8Settings
from capibara.train.config import LoraSettings
from capibara.train.trainable import ModelTrainable

__all__ = ["LoraTrainable", "adapter_weights", "merged"]


def _targets(model: ModularModelConfig, lora: LoraSettings) -> Iterator[tuple[int, str, str, int, Weight]]:
    """(layer of the pattern, its block's slot, weight's name, how many of its axes are inputs, the weight)."""
    tree = decoder.weights(model)
    found = False
    names: set[str] = set()
    for number, (blocks, layer) in enumerate(zip(model.period, tree["layers"], strict=True)):
        for place, block in enumerate(blocks):
            # By name: jax hands dicts back in the order of their keys, not of the pattern.
            slot, products = decoder.slot_of(blocks, place), model.blocks[block].products()
            names.update(products)
            for name, inputs in products.items():
                if name in lora.targets:
                    found = True
                    yield number, slot, name, inputs, layer[slot][name]
    for target in lora.targets:
        # The default names all usual ones, and a model may be without some of them.
        if target not in names and (not found or target not in LoraSettings.targets):
            raise unknown_name("target of lora", target, sorted(names))


def adapter_weights(model: ModularModelConfig, lora: LoraSettings) -> list[dict[str, Any]]:
    """The factors as a tree of `Weight`, like `layers` of the decoder's."""
    if lora.rank < 1:
        raise rule_error("lora.rank is 1 or more", lora.rank, "use lora.rank=8, or 0 to train the weights")
    layers: list[dict[str, Any]] = [{} for _ in model.period]
    for number, slot, name, inputs, weight in _targets(model, lora):
        stack, wide, out = weight.shape[0], weight.shape[1 : 1 + inputs], weight.shape[1 + inputs :]
        axes = weight.axes
        block = layers[number].setdefault(slot, {})
        block[name + LORA_DOWN] = Weight((stack, *wide, lora.rank), (*axes[: 1 + inputs], None), fan_in=math.prod(wide))
        block[name + LORA_UP] = Weight((stack, lora.rank, *out), (axes[0], None, *axes[1 + inputs :]), "zeros")
    return layers


def _joined(params: Mapping[str, Any], adapters: list[dict[str, Any]]) -> dict[str, Any]:
    """The decoder's tree with the factors in their blocks."""
    layers = [
        {slot: {**block, **extra.get(slot, {})} for slot, block in layer.items()}
        for layer, extra in zip(params["layers"], adapters, strict=True)
    ]
    return {**params, "layers": layers}


def _with_scales(params: Mapping[str, Any], model: ModularModelConfig, lora: LoraSettings) -> dict[str, Any]:
    scales: list[dict[str, Any]] = [{} for _ in model.period]
    for number, slot, name, _, weight in _targets(model, lora):
        scale = jnp.full(weight.shape[:1], lora.alpha / lora.rank, jnp.float32)
        scales[number].setdefault(slot, {})[name + LORA_SCALE] = scale
    return _joined(params, scales)


def merged(model: ModularModelConfig, params: Any, adapters: Any, lora: LoraSettings) -> Any:
    """The weights with their changes added, in the weights' own type: a model like any other."""
    layers = [{slot: dict(block) for slot, block in layer.items()} for layer in params["layers"]]
    for number, slot, name, _, _ in _targets(model, lora):
        block, extra = layers[number][slot], adapters[number][slot]
        down, up = (extra[name + part].astype(jnp.float32) for part in (LORA_DOWN, LORA_UP))
        change = jax.vmap(lambda a, b: jnp.tensordot(a, b, 1))(down, up) * (lora.alpha / lora.rank)
        block[name] = (block[name].astype(jnp.float32) + change).astype(block[name].dtype)
    return {**params, "layers": layers}


class LoraTrainable(ModelTrainable):
    """A model whose factors are trained. Its own weights are held in the compute type, and are in no checkpoint."""

    def __init__(
        self,
        model: ModularCapibaraModel,
        lora: LoraSettings,
        precision: str = "mixed",
        z_loss: float = 0.0,
        load: Callable[[Any], Any] | None = None,
        fp8: Fp8Settings | None = None,
    ) -> None:
        super().__init__(model, precision, z_loss, load, fp8)
        self.lora = lora
        self._mesh: Any = None

    def shapes(self) -> Any:
        return spec.shapes(adapter_weights(self.model.config, self.lora), jnp.float32)

    def init(self, key: jax.Array) -> Any:
        return spec.initial(adapter_weights(self.model.config, self.lora), key, jnp.float32)

    def starting_params(self, mesh: Any = None) -> Any:
        return None  # factors are drawn anew

    def frozen_shapes(self) -> Any:
        """The weights that stay, with the scales of their changes."""
        config = self.model.config
        shapes = decoder.param_shapes(config, compute_dtype(self.precision))
        return jax.eval_shape(lambda params: _with_scales(params, config, self.lora), shapes)

    def frozen(self, mesh: Any = None) -> Any:
        """Those weights, as they are."""
        self._mesh = mesh
        loaded = super().starting_params(mesh)
        if loaded is None:
            raise rule_error(
                "LoRA changes a model that has weights",
                "a model without",
                "start from a Hugging Face folder or a trained model, or train all weights (lora.rank = 0)",
            )
        dtype = compute_dtype(self.precision)
        weights = decoder.weights(self.model.config)
        narrow = jax.tree.map(
            lambda w, x: jnp.asarray(x, w.dtype(dtype)), weights, loaded, is_leaf=lambda w: isinstance(w, Weight)
        )
        if self._load is not None:
            self.model._params = None  # read again when the changes are added; until then one copy is enough
        return _with_scales(narrow, self.model.config, self.lora)

    def loss(self, unroll: int | bool = 1) -> Loss:
        whole = super().loss(unroll)

        def run(pair: Any, batch: Any, key: Any) -> Any:
            if isinstance(pair, WithHistory):
                adapters, frozen = pair.params
                return whole(WithHistory(_joined(frozen, adapters), pair.history), batch, key)
            adapters, frozen = pair
            return whole(_joined(frozen, adapters), batch, key)

        return run

    def publish(self, params: Any) -> None:
        """The model's weights become those with the changes added, read again where the run has them: no device holds
        more of a model than it did while it trained."""
        base = jax.tree.map(jnp.asarray, super().starting_params(self._mesh))
        places = jax.tree.map(lambda x: x.sharding, base)
        mesh = getattr(jax.tree.leaves(places)[0], "mesh", None)
        whole = jax.tree.leaves(places)[0] if mesh is None else NamedSharding(mesh, PartitionSpec())
        # What was read for this alone gives its memory to the sums.
        donated = () if self._load is None else (0,)
        add = jax.jit(
            lambda base, factors: merged(self.model.config, base, factors, self.lora),
            out_shardings=places,
            donate_argnums=donated,
        )
        super().publish(add(base, jax.device_put(params, whole)))
