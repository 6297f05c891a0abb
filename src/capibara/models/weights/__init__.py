"""Weights in and out in the Hugging Face layout: config.json and safetensors, a file here for each family.

`from_hf` is a model, `load_hf` its config and parameters, straight onto a mesh; `save_hf` writes a folder;
`config_from_hf` and `config_to_hf` are the shape alone. Importing this package does not import jax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.models.weights.folder import is_hf as is_hf
    from capibara.models.weights.folder import read_config as read_config
    from capibara.models.weights.hf_config import FAMILIES as FAMILIES
    from capibara.models.weights.hf_config import config_from_hf as config_from_hf
    from capibara.models.weights.hf_config import config_to_hf as config_to_hf
    from capibara.models.weights.load import load_hf as load_hf
    from capibara.models.weights.model import from_hf as from_hf
    from capibara.models.weights.save import save_hf as save_hf

__all__, __getattr__, __dir__ = exports(
    __name__,
    {
        "folder": "is_hf read_config",
        "hf_config": "FAMILIES config_from_hf config_to_hf",
        "load": "load_hf",
        "model": "from_hf",
        "save": "save_hf",
    },
)
