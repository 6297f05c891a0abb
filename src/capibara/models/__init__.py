"""The decoder and its blocks, the presets that shape it, tokenizers, weights in and out, the vector-quantizing layer.

Importing this package does not import jax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.models.config import ModularModelConfig as ModularModelConfig
    from capibara.models.modular import ModularCapibaraModel as ModularCapibaraModel
    from capibara.models.preset import Preset as Preset
    from capibara.models.preset import load_preset as load_preset
    from capibara.models.preset import preset_names as preset_names
    from capibara.models.restored import from_checkpoint as from_checkpoint
    from capibara.models.restored import load_model as load_model
    from capibara.models.tokenizer import ByteTokenizer as ByteTokenizer
    from capibara.models.tokenizer import HuggingFaceTokenizer as HuggingFaceTokenizer
    from capibara.models.tokenizer import Tokenizer as Tokenizer
    from capibara.models.tokenizer import load_tokenizer as load_tokenizer
    from capibara.models.vqbit.layer import VQbitLayer as VQbitLayer
    from capibara.models.vqbit.state import VQbitState as VQbitState
    from capibara.models.weights.model import from_hf as from_hf

__all__, __getattr__, __dir__ = exports(
    __name__,
    {
        "config": "ModularModelConfig",
        "modular": "ModularCapibaraModel",
        "preset": "Preset load_preset preset_names",
        "restored": "from_checkpoint load_model",
        "tokenizer": "ByteTokenizer HuggingFaceTokenizer Tokenizer load_tokenizer",
        "vqbit.layer": "VQbitLayer",
        "vqbit.state": "VQbitState",
        "weights.model": "from_hf",
    },
)
