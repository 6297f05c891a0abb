"""How fast each pair of a head's numbers turns, and the ways to slow them for contexts longer than were trained on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from capibara.errors import rule_error, unknown_name

# Each kind of scaling, with the numbers it needs and their usual values (None: no usual value).
SCALINGS: Mapping[str, Mapping[str, float | None]] = {
    "linear": {"factor": None},
    "ntk": {"factor": None},
    "yarn": {
        "factor": None,
        "original_length": None,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": math.nan,  # not a number: 0.1 ln(factor) + 1
    },
    "llama3": {"factor": None, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_length": None},
}


def frequencies(dim: int, base: float = 10000.0, scaling: Mapping[str, Any] | None = None) -> tuple[np.ndarray, float]:
    """The angle a pair turns by at each position, float64 [dim / 2], and what the rotated vector is multiplied by."""
    if dim < 2 or dim % 2:
        raise rule_error(
            "rope turns pairs, so what it turns of a head (head_dim, or rotary_dim of it) is even and 2 or more",
            dim,
            "check the head_dim, or pass an even rotary_dim to leave the rest of the head as it is",
        )
    if not base > 1:
        raise rule_error("The base of rope is above 1", base, "pass base=10000.0")
    plain = base ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if scaling is None:
        return plain, 1.0
    kind, given = scaling_numbers(scaling)
    factor = given["factor"]
    if kind == "linear":
        return plain / factor, 1.0
    if kind == "ntk":
        # The base is stretched so that the slowest pair turns `factor` times slower and the fastest as before.
        stretched = base * factor ** (dim / max(dim - 2, 1))
        return stretched ** (-np.arange(0, dim, 2, dtype=np.float64) / dim), 1.0
    if kind == "llama3":
        return _by_wavelength(plain, given), 1.0
    return _yarn(plain, dim, base, given)


def scaling_numbers(scaling: Mapping[str, Any]) -> tuple[str, dict[str, float]]:
    """The kind and its numbers, defaults filled in; other libraries' spellings of the keys are understood."""
    spelled = {"rope_type": "type", "original_max_position_embeddings": "original_length"}
    asked = {spelled.get(name, name): value for name, value in scaling.items()}
    kind = asked.pop("type", None)
    if kind not in SCALINGS:
        raise unknown_name("rope scaling type", kind, SCALINGS)
    known = SCALINGS[kind]
    for name in asked:
        if name not in known:
            raise unknown_name(f"key of {kind} rope scaling", name, ("type", *known))
    merged = {**known, **asked}
    for name, value in merged.items():
        if value is None:
            raise rule_error(f"{kind} rope scaling needs {name!r}", dict(scaling), f"add {name!r}: a number")
    if not merged["factor"] >= 1:
        raise rule_error("A rope scaling factor is 1 or more", merged["factor"], "pass how many times longer")
    return kind, {name: float(value) for name, value in merged.items()}


def _by_wavelength(plain: np.ndarray, given: Mapping[str, float]) -> np.ndarray:
    """Llama 3: slow pairs are slowed by the factor, fast ones left, and those between are blended."""
    low, high = given["low_freq_factor"], given["high_freq_factor"]
    turns = given["original_length"] * plain / (2 * np.pi)  # in the original context
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return plain * (kept + (1 - kept) / given["factor"])


def _yarn(plain: np.ndarray, dim: int, base: float, given: Mapping[str, float]) -> tuple[np.ndarray, float]:
    """YaRN: blended by the number of turns in the original context, over whole pair numbers, and a temperature."""
    length, factor = given["original_length"], given["factor"]

    def pair(turns: float) -> float:
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    first = max(math.floor(pair(given["beta_fast"])), 0)
    last = min(math.ceil(pair(given["beta_slow"])), dim - 1)
    slowed = np.clip((np.arange(dim // 2) - first) / max(last - first, 0.001), 0, 1)
    temperature = given["attention_factor"]
    if math.isnan(temperature):
        temperature = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return plain * (1 - slowed) + plain / factor * slowed, temperature
