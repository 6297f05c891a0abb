"""A model object from a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from capibara.axes import Rules
from capibara.models.modular import ModularCapibaraModel
from capibara.models.weights.generation_config import read_generation_config
from capibara.models.weights.load import load_hf

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from capibara.mesh import MeshConfig

__all__ = ["from_hf"]


def from_hf(
    folder: str | Path,
    *,
    mesh: Mesh | MeshConfig | None = None,
    dtype: Any = None,
    rules: Rules | None = None,
    precision: str | None = None,
) -> ModularCapibaraModel:
    """The model of a Hugging Face folder, its weights streamed onto the mesh or the default device.

    `folder`, `mesh`, `dtype` and `rules` are those of `load_hf`. `precision` is "bfloat16" by default where the weights
    are, and "mixed" elsewhere. What its generation_config.json says is in `model.generation`.
    """
    config, params = load_hf(folder, mesh=mesh, dtype=dtype, rules=rules)
    if precision is None:
        precision = "bfloat16" if params["embed"].dtype == jnp.bfloat16 else "mixed"
    model = ModularCapibaraModel(config, params=params, precision=precision)
    model.generation = read_generation_config(folder, config.vocab)
    return model
