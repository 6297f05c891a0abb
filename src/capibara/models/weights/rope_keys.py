"""Rotary positions in a config.json: rope_theta and rope_scaling, or rope_parameters, which has both."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from capibara.errors import rule_error, unknown_name
from capibara.models.weights.keys import Keys

__all__ = ["read_rope", "write_rope"]

_KINDS = ("default", "linear", "llama3", "yarn")
_SHARED = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_OWN: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate",
    ),
}  # fmt: skip


def read_rope(keys: Keys, default_base: float) -> dict[str, Any]:
    """`rope_base` and `rope_scaling` of an attention block."""
    # As transformers has it: rope_scaling, where there is one, counts before rope_parameters, and a base inside of
    # either before the one beside them.
    table = keys.get("rope_scaling") or keys.get("rope_parameters") or {}
    keys.get("rope_parameters")
    base = keys.number("rope_theta", default_base)
    if not isinstance(table, Mapping):
        raise rule_error("rope_scaling of config.json is a table of keys", repr(table), "mend it")
    kind = table.get("rope_type", table.get("type", "default"))
    if kind not in _KINDS:
        raise unknown_name("rope_type of config.json", kind, _KINDS)
    for key, value in table.items():
        if key not in (*_SHARED, *_OWN[kind]):
            raise unknown_name(f"key of {kind} rope in config.json", key, (*_SHARED[:3], *_OWN[kind]))
        if key == "partial_rotary_factor" and value not in (None, 1):
            raise rule_error(
                f"A {keys.family} model turns the whole of a head",
                f"{key} = {value!r}",
                "set it to 1.0, or take it out",
            )
    return {"rope_base": float(table.get("rope_theta") or base), "rope_scaling": _scaling(keys, kind, table)}


def _scaling(keys: Keys, kind: str, table: Mapping[str, Any]) -> dict[str, Any] | None:
    if kind == "default":
        return None
    scaling: dict[str, Any] = {"type": kind}
    if kind in ("llama3", "yarn"):
        # A length beside the table counts before the one in it; without either it is the context's own.
        beside = keys.get("original_max_position_embeddings") or table.get("original_max_position_embeddings")
        scaling["original_length"] = float(beside or keys.whole("max_position_embeddings"))
    factor = table.get("factor")
    if factor is None and kind == "yarn":
        factor = keys.whole("max_position_embeddings") / scaling["original_length"]
    scaling["factor"] = factor
    for key in ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ("beta_fast", "beta_slow"):
        if table.get(key):
            scaling[key] = table[key]
    for key, value in scaling.items():
        if key != "type" and (not isinstance(value, int | float) or isinstance(value, bool)):
            raise rule_error(f"{key} of {kind} rope is a number", repr(value), "mend it in config.json")
    if kind == "yarn":
        if table.get("truncate", True) is not True:
            raise rule_error("YaRN here blends over whole pairs", "truncate = false", "there is no such model here yet")
        named = table.get("attention_factor")
        scaling["attention_factor"] = _temperature(scaling["factor"], table) if named is None else named
    return {key: value if isinstance(value, str) else float(value) for key, value in scaling.items()}


def _temperature(factor: float, table: Mapping[str, Any]) -> float:
    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    above, below = table.get("mscale"), table.get("mscale_all_dim")
    return scale(above) / scale(below) if above and below else scale(1.0)


def write_rope(base: float, scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    """rope_theta and rope_scaling, which every version of transformers reads."""
    if scaling is None:
        return {"rope_theta": base, "rope_scaling": None}
    spelled = {"type": "rope_type", "original_length": "original_max_position_embeddings"}
    table = {spelled.get(key, key): value for key, value in scaling.items()}
    length = table.get("original_max_position_embeddings")
    if length is not None and float(length).is_integer():
        table["original_max_position_embeddings"] = int(length)
    return {"rope_theta": base, "rope_scaling": table}
