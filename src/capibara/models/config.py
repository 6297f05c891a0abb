"""`ModularModelConfig`: a decoder composed of blocks, in a few lines of TOML.

    [model]
    hidden = 2048
    layers = 16
    vocab = 32000
    pattern = "3 ssm+mlp : 1 attention+moe"

    [model.blocks.attention]
    heads = 16

A layer is blocks joined by "+", each a residual branch with a norm before it. The pattern lists layers, with a count
before one that repeats, and is gone through again until all layers are there. `[model.blocks.NAME]` sets a block up;
`kind` says what it is where its name does not, so that a model may have two kinds of attention.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capibara import toml_tables
from capibara.errors import rule_error, unknown_name
from capibara.models.preset_files import load_table, name_of
from capibara.toml_tables import Table

if TYPE_CHECKING:
    from capibara.models.blocks.spec import Block

__all__ = ["ModularModelConfig", "TpuSettings", "model_of"]

NORMS = ("rms", "layer")
_LAYER = re.compile(r"^(?:(\d+)\s+)?([A-Za-z0-9_+\-]+)$")


@dataclass(frozen=True)
class TpuSettings:
    """What a model is meant to run on, where it is meant for TPUs."""

    mesh_shape: tuple[int, ...] = (4, 8)
    memory_limit_gb: float = 30.75
    """HBM of a chip that programs may use, GiB."""
    optimized: bool = True
    """Trace inside of the optimisation context, where kernels run by predicted evidence too."""


@dataclass(frozen=True)
class ModularModelConfig:
    """The shape of a decoder. Frozen; `dataclasses.replace` and `with_overrides` make others."""

    hidden: int
    layers: int
    vocab: int
    blocks: Mapping[str, Any]
    """Name -> its block's keys as a table, or the block."""
    pattern: str | tuple[str, ...] = "attention+mlp"
    max_length: int = 2048
    """Tokens of context that the model is made for."""
    tied: bool = False
    """The embedding's table is the head's too."""
    norm: str = "rms"
    norm_eps: float = 1e-5
    embed_scale: float = 1.0
    """Embeddings are multiplied by this."""
    softcap: float | None = None
    """Of the logits."""
    attention_implementation: str | None = None
    """Force one of `capibara.kernels.attention`'s; by default the fastest that takes the call."""
    tokenizer: str = "bytes"
    """ "bytes", a tokenizer.json or a folder with one."""
    name: str = ""
    huggingface: str = ""
    """Where it came from a Hugging Face config.json: that, as JSON text, so that what it says beyond the shape can be
    written back."""
    tpu: TpuSettings | None = None

    def __post_init__(self) -> None:
        for key in ("hidden", "layers", "vocab", "max_length"):
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise rule_error(f"{key} of a model is a whole number from 1 up", repr(value), f"use {key} = 1 or more")
        if self.norm not in NORMS:
            raise unknown_name("norm", self.norm, NORMS)
        for key in ("norm_eps", "softcap"):
            value = getattr(self, key)
            if value is not None and not value > 0:
                raise rule_error(f"{key} of a model is above 0", value, f"leave {key} out")
        object.__setattr__(self, "blocks", _blocks(self.blocks))
        period = self.period  # checks the pattern
        for layer in period:
            for name in layer:
                if name not in self.blocks:
                    raise unknown_name(f"block in the pattern {self.pattern!r}", name, self.blocks)
        if self.layers % len(period):
            raise rule_error(
                "The pattern is gone through a whole number of times",
                f"{self.layers} layers and a pattern of {len(period)}",
                f"use layers = {max(1, round(self.layers / len(period))) * len(period)}",
            )
        for name, block in self.blocks.items():
            block.check(self, f"blocks.{name}")

    @functools.cached_property
    def period(self) -> tuple[tuple[str, ...], ...]:
        """The layers that repeat, each as the names of its blocks.

        >>> dense = {"attention": {"heads": 2}, "mlp": {"ffn": 8}}
        >>> ModularModelConfig(hidden=8, layers=4, vocab=16, blocks=dense).period
        (('attention', 'mlp'),)
        """
        parts = re.split(r"[:,]", self.pattern) if isinstance(self.pattern, str) else list(self.pattern)
        layers: list[tuple[str, ...]] = []
        for part in parts:
            match = _LAYER.match(part.strip())
            if match is None or int(match[1] or 1) < 1:
                raise rule_error(
                    "A pattern is layers apart by ':', each blocks joined by '+' with a count before it",
                    repr(self.pattern),
                    'write e.g. "3 ssm+mlp : 1 attention+mlp"',
                )
            layers += [tuple(match[2].split("+"))] * int(match[1] or 1)
        if not layers:
            raise rule_error("A pattern has a layer or more", repr(self.pattern), 'write e.g. "attention+mlp"')
        return tuple(layers)

    @property
    def repeats(self) -> int:
        """How often the pattern is gone through."""
        return self.layers // len(self.period)

    @property
    def residual_gain(self) -> float:
        """How much smaller a product starts that is added to the residual: their sum then starts like one of them."""
        return 1 / math.sqrt(self.repeats * sum(len(layer) for layer in self.period))

    @property
    def parameters(self) -> int:
        """How many numbers are trained."""
        return self._count(lambda block: sum(math.prod(w.shape) for w in block.weights(self).values()))

    @property
    def active_parameters(self) -> int:
        """Of them, those that one token meets."""
        return self._count(lambda block: block.active_parameters(self))

    def _count(self, of_block: Any) -> int:
        norm = self.hidden * (2 if self.norm == "layer" else 1)
        layers = sum(of_block(self.blocks[name]) + norm for layer in self.period for name in layer)
        return self.repeats * layers + (1 if self.tied else 2) * self.vocab * self.hidden + norm

    def flops_per_token(self, length: int, *, training: bool = True) -> float:
        """Operations a token: 6 for each active parameter of a product (2 without a backward pass), and attention.

        The embedding's look-up is no product; a tied table still is the head's.
        """
        products = self.active_parameters - (0 if self.tied else self.vocab * self.hidden)
        beside = sum(self.blocks[name].flops_per_token(self, length) for layer in self.period for name in layer)
        return (3 if training else 1) * (2.0 * products + self.repeats * beside)

    def with_overrides(self, **changes: Any) -> ModularModelConfig:
        """Another config with these keys; `blocks` lays its tables over the present ones."""
        if "blocks" in changes:
            changes["blocks"] = {**self.blocks, **{n: self._over(n, keys) for n, keys in changes["blocks"].items()}}
        return dataclasses.replace(self, **changes)

    def _over(self, name: str, keys: Any) -> Any:
        """Keys laid over those of the block of this name; a block, and keys of another kind, stand for themselves."""
        block = self.blocks.get(name)
        if block is None or not isinstance(keys, Mapping) or keys.get("kind", _kind(block)) != _kind(block):
            return keys
        return {**toml_tables.plain(block), "kind": _kind(block), **keys}

    @classmethod
    def from_toml(cls, path: str | Path, **overrides: Any) -> ModularModelConfig:
        """The model of a shipped preset, by its name or its documented path from any directory, or of a TOML file.

        >>> ModularModelConfig.from_toml("llama-7b").parameters
        6738415616
        """
        model = model_of(load_table(path), name_of(path))
        return model.with_overrides(**overrides) if overrides else model

    def to_toml(self, path: str | Path | None = None) -> str:
        """The config as TOML that `from_toml` reads; written to `path` too where one is given."""
        text = toml_tables.to_toml(self.as_tables())
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def as_tables(self) -> dict[str, Any]:
        """{"model": ..., "tpu": ...} in plain values."""
        model = toml_tables.plain(self)
        tpu = model.pop("tpu")
        model["blocks"] = {
            name: {"kind": _kind(block), **toml_tables.plain(block)} for name, block in self.blocks.items()
        }
        return {"model": model} | ({} if tpu == "none" else {"tpu": tpu})


def model_of(table: Table, name: str = "") -> ModularModelConfig:
    """The model that the sections [model] and [tpu] describe."""
    values = table.values.get("model")
    if not isinstance(values, Mapping):
        raise rule_error(
            "A preset has a [model]", values or "none", 'add [model], or build on a preset: base = "small"'
        )
    values = {"name": name, **values}
    if isinstance(values.get("blocks"), Mapping):
        # Here and not by the class, which does not know where a key was written.
        values["blocks"] = {
            name: _block(name, keys, table, f"model.blocks.{name}") for name, keys in values["blocks"].items()
        }
    if "tpu" in table.values:
        values["tpu"] = toml_tables.build(TpuSettings, table, "tpu")
    return toml_tables.build(ModularModelConfig, Table({"model": values}, table.places), "model")


def _blocks(tables: Any) -> Mapping[str, Block]:
    if not isinstance(tables, Mapping) or not tables:
        raise rule_error("A model has blocks", repr(tables), "write [model.blocks.attention] and its keys")
    return {name: _block(name, keys, Table({"blocks": tables}), f"blocks.{name}") for name, keys in tables.items()}


def _block(name: str, keys: Any, table: Table, path: str) -> Block:
    """The block of a table, whose keys stand at `path` of a larger one; a block is taken as it is."""
    from capibara.models.blocks import KINDS
    from capibara.models.blocks.spec import Block

    if isinstance(keys, Block):
        return keys
    kind = keys.get("kind", name) if isinstance(keys, Mapping) else name
    if kind not in KINDS:
        where = table.place(f"{path}.kind")
        raise unknown_name(f"kind of {path}{f' at {where}' if where else ''}", kind, KINDS)
    if isinstance(keys, Mapping):
        keys = {key: value for key, value in keys.items() if key != "kind"}
    return toml_tables.build_part(KINDS[kind], keys, table, path)


def _kind(block: Any) -> str:
    from capibara.models.blocks import KINDS

    return next(kind for kind, one in KINDS.items() if type(block) is one)
