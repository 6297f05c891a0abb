"""Tiny models and runs of the trainer's loop that tests share."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from capibara.models.config import ModularModelConfig
from capibara.models.modular import ModularCapibaraModel
from capibara.models.preset import OptimizerSettings, TrainSettings
from capibara.train.data.wrapped import wrap_dataset
from capibara.train.logs import MetricsLog
from capibara.train.loop import Loop, LoopOptions, Result
from capibara.train.trainable import ModelTrainable

VOCAB = 64
LENGTH = 16

DENSE = """
[model]
hidden = 32
layers = 4
vocab = 64
max_length = 64
[model.blocks.attention]
heads = 8
kv_heads = 8
[model.blocks.mlp]
ffn = 64
"""

MOE = """
[model]
hidden = 32
layers = 2
vocab = 64
max_length = 64
pattern = "attention+moe"
[model.blocks.attention]
heads = 4
kv_heads = 2
[model.blocks.moe]
experts = 8
top_k = 2
ffn = 32
"""


@functools.lru_cache(maxsize=8)
def _config(text: str, folder: Path) -> ModularModelConfig:
    file = folder / "tiny.toml"
    file.write_text(text)
    return ModularModelConfig.from_toml(str(file))


def tiny_model(folder: Path, text: str = DENSE, precision: str = "float32") -> ModularCapibaraModel:
    return ModularCapibaraModel(_config(text, folder), precision=precision)


def packed_batches(count: int, rows: int, length: int = LENGTH, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Batches as packed documents are: two to a row, and padding at the end of some, so that rows weigh differently."""
    draw = np.random.default_rng(seed)
    first = length // 3
    found = []
    for _ in range(count):
        ids = draw.integers(0, VOCAB, (rows, length + 1)).astype(np.int32)
        segments = np.ones((rows, length), np.int32)
        segments[:, first:] = 2
        segments[0, -4:] = 0
        segments[rows // 2, -9:] = 0
        positions = np.concatenate([np.arange(first), np.arange(length - first)]).astype(np.int32)
        found.append(
            {
                "inputs": ids[:, :-1],
                "targets": ids[:, 1:],
                "segment_ids": segments,
                "positions": np.tile(positions, (rows, 1)),
                "mask": (segments != 0).astype(np.int32),
            }
        )
    return found


def run_loop(
    model: Any,
    batches: list[dict[str, np.ndarray]],
    axes: Mapping[str, int] | None = None,
    *,
    optimizer: OptimizerSettings | None = None,
    settings: Mapping[str, Any] | None = None,
    folder: Path | None = None,
    **options: Any,
) -> tuple[Loop, Result]:
    """The loop over these batches on a mesh of the first devices; plain gradient descent, so that parameters differ by
    what gradients do and no more."""
    axes = axes or {"data": 1}
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    rows, length = batches[0]["inputs"].shape
    precision = model.precision
    train = TrainSettings(
        **{
            "steps": 10, "batch_size": rows, "sequence_length": length, "precision": precision, "remat": "none",
            "accumulate": 1, **(settings or {}),
        }
    )  # fmt: skip
    optimizer = optimizer or OptimizerSettings(name="sgd", learning_rate=1e-2, warmup_steps=0, clip=0.0)
    loop = Loop(
        ModelTrainable(model, precision, train.z_loss),
        train,
        optimizer,
        LoopOptions(axes=axes, devices=devices, **options),
        folder=folder,
    )
    loop.prepare(batches[0])
    with MetricsLog(None) as log:
        result = loop.run(wrap_dataset(batches), until=len(batches), log=log)
    return loop, result
