"""Presets: a model's shape and its batch, in a few lines of TOML."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

from capibara.errors import rule_error, unknown_name

__all__ = ["FOLDER", "Preset", "load_preset", "preset_names"]

FOLDER = Path(__file__).parents[1] / "config" / "configs_toml"
ATTENTION = ("fused", "plain")
_WHOLE = ("hidden", "layers", "heads", "kv_heads", "ffn", "vocab", "batch", "sequence")


@dataclasses.dataclass(frozen=True)
class Preset:
    """The shape of a decoder and of a step of its training."""

    hidden: int
    layers: int
    heads: int
    ffn: int
    vocab: int = 32000
    kv_heads: int = 0
    """Heads of keys and values; as many as there are heads when 0."""
    batch: int = 8
    """Sequences of one step, over all chips."""
    sequence: int = 2048
    optimizer: str = "adamw"
    attention: str = "fused"
    """ "fused" is `capibara.kernels.attention`; "plain" builds the table of scores."""
    name: str = ""

    def __post_init__(self) -> None:
        if self.kv_heads == 0:
            object.__setattr__(self, "kv_heads", self.heads)
        for key in _WHOLE:
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise rule_error(
                    f"{key} of a preset is a whole number from 1 up", repr(value), f"use {key} = 1 or more"
                )
        for whole, part in (("hidden", "heads"), ("heads", "kv_heads")):
            if getattr(self, whole) % getattr(self, part):
                raise rule_error(
                    f"{part} must divide {whole}",
                    f"{whole} = {getattr(self, whole)}, {part} = {getattr(self, part)}",
                    f"use {part} = {_nearest_divisor(getattr(self, whole), getattr(self, part))}",
                )
        if self.head_dim % 2:
            raise rule_error(
                "A head is an even number wide, for its rotary pairs",
                f"hidden {self.hidden} over {self.heads} heads is {self.head_dim}",
                "change hidden or heads",
            )
        if self.attention not in ATTENTION:
            raise unknown_name("attention of a preset", self.attention, ATTENTION)

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.batch * self.sequence

    @property
    def parameters(self) -> int:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.ffn + 2 * self.hidden
        return self.layers * layer + 2 * self.vocab * self.hidden + self.hidden


def _nearest_divisor(whole: int, wanted: int) -> int:
    divisors = [number for number in range(1, whole + 1) if whole % number == 0]
    return min(divisors, key=lambda number: (abs(number - wanted), number))


def preset_names() -> list[str]:
    """The presets that ship with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_preset(name_or_path: str | Path, **overrides: Any) -> Preset:
    """A shipped preset by its name, or a TOML file by its path; `overrides` that are not None replace its keys.

    Examples:
        >>> load_preset("llama-7b").parameters
        6738415616
        >>> load_preset("llama-7b", batch=16).tokens
        32768
    """
    text = str(name_or_path)
    file = Path(text)
    if not file.suffix:
        if text not in preset_names():
            raise unknown_name("preset", text, preset_names())
        file = FOLDER / f"{text}.toml"
    elif not file.is_file():
        raise rule_error(
            "A preset is a TOML file or a shipped name",
            f"{text!r}, which is not there",
            f"name a file, or one of {', '.join(preset_names())}",
        )
    try:
        keys = tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise rule_error("A preset is TOML", f"{file}: {error}", "mend that line") from error
    keys |= {key: value for key, value in overrides.items() if value is not None}
    known = {field.name: field for field in dataclasses.fields(Preset)}
    for key in keys:
        if key not in known:
            raise unknown_name(f"key of preset {file.name}", key, known)
    missing = [key for key, field in known.items() if field.default is dataclasses.MISSING and key not in keys]
    if missing:
        raise rule_error(f"A preset names {', '.join(missing)}", f"{file} without", f"add {missing[0]} = ...")
    return Preset(**{"name": file.stem, **keys})
