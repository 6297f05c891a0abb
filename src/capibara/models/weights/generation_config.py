"""generation_config.json: the tokens that end a model's text, and how its makers would have it sampled."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from capibara.errors import rule_error
from capibara.models.weights.folder import GENERATION_CONFIG, read_config, read_json

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["GenerationDefaults", "read_generation_config"]

_BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0, 1_000_000),
    "top_k": (-1, 2**31 - 1),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (1e-6, 1_000_000),
}
"""The keys that are read, those that vLLM takes as a request's defaults, and what they may be."""


@dataclass(frozen=True)
class GenerationDefaults:
    """What a model's makers say of its output."""

    eos_ids: tuple[int, ...] = ()
    """Tokens that end a text, beside the tokenizer's own."""
    sampling: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """temperature, top_k, top_p, min_p and repetition_penalty, where the file has them: for requests that say nothing
    of them."""


def read_generation_config(folder: str | Path, vocab: int) -> GenerationDefaults:
    """Of a folder's generation_config.json. Without one the end of text is config.json's, as transformers has it.

    `do_sample` is not read, as vLLM does not read it: a file that says no more than that leaves the temperature at 1.
    """
    file = Path(folder) / GENERATION_CONFIG
    values = read_json(file, GENERATION_CONFIG) if file.is_file() else {}
    sampling = {name: _number(file, name, values[name]) for name in _BOUNDS if values.get(name) is not None}
    if "top_k" in sampling:
        sampling["top_k"] = max(0, int(sampling["top_k"]))  # -1 is none, too
    source, said = file, values.get("eos_token_id")
    if not file.is_file():
        source, said = Path(folder) / "config.json", read_config(folder).get("eos_token_id")
    return GenerationDefaults(_ids(source, said, vocab), MappingProxyType(sampling))


def _number(file: Path, name: str, value: Any) -> float:
    low, high = _BOUNDS[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise rule_error(f"{name} of {GENERATION_CONFIG} is from {low} to {high}", f"{value!r} in {file}", "mend it")
    return value


def _ids(file: Path, said: Any, vocab: int) -> tuple[int, ...]:
    ids = [] if said is None else said if isinstance(said, list) else [said]
    wrong = [id for id in ids if isinstance(id, bool) or not isinstance(id, int) or not 0 <= id < vocab]
    if wrong:
        raise rule_error(
            f"eos_token_id is a token id or a list of them, from 0 to {vocab - 1}", f"{wrong[0]!r} in {file}", "mend it"
        )
    return tuple(dict.fromkeys(ids))
