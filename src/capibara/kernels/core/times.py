"""How long implementations take at a call: for each a model that was fitted to runs of a chip.

A model is a sum of terms, which the op names (`Op.times`), each times a coefficient. Coefficients are data, a file a
chip, `kernels/times/<chip>.json`: tools/fitted_times.py makes it of benchmarks/results, and leaves out the models that
are held back. What they say of a call inside the range of the runs is *measured*, outside of it *predicted*; on another
chip of the architecture *untimed*. Of a call with a word that no run had, a model says nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from capibara import hardware
from capibara.kernels.core import tables
from capibara.kernels.core.spec import Call, TimeTerms
from capibara.kernels.core.trusting import Level

__all__ = ["SHIPPED", "Estimate", "Model", "estimates", "forget"]

SHIPPED = Path(__file__).parents[1] / "times"


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a model says of one implementation at one call."""

    seconds: float
    kind: Literal["measured", "predicted", "untimed"]
    source: str

    def decides(self, level: Level) -> bool:
        """Whether dispatch goes by it: beyond what was run it is a prediction, for those who trust them."""
        return self.kind != "predicted" or level == "predicted"

    def __str__(self) -> str:
        return f"{self.seconds * 1e6:.3g} µs"


@dataclasses.dataclass(frozen=True)
class Model:
    """Coefficients of one implementation, and the runs that they were fitted to."""

    microseconds: Mapping[str, float]
    """Of a term's unit."""
    sizes: Mapping[str, tuple[float, float]]
    """The least and the most that was run."""
    words: frozenset[str]
    calls: int
    error: float
    """Relative, of which half of the calls have less, each by a fit to the others."""

    def seconds(self, found: TimeTerms) -> float:
        return 1e-6 * sum(self.microseconds[name] * amount for name, amount in found.terms.items())

    def outside(self, found: TimeTerms) -> str | None:
        """Which size lies outside of the runs; None inside."""
        for name, size in found.sizes.items():
            least, most = self.sizes[name]
            if not least <= size <= most:
                return f"{name} {size:g} is outside of {least:g} to {most:g}"
        return None


def estimates(call: Call, names: Iterable[str]) -> dict[str, Estimate]:
    """What is known of the named implementations' times at a call; those of which nothing is are left out."""
    kind = call.target.device_kind
    here = _models(tables.slug(kind))
    measured_on = None
    if not here:
        measured_on, here = _of_architecture(kind)
    found = {}
    for name in names:
        model, terms = here.get((call.op.name, name)), call.op.times(call, name)
        if model is None or terms is None or not model.words.issuperset(terms.words):
            continue
        outside = model.outside(terms)
        source = f"fitted to {model.calls} calls, half of them within {100 * model.error:.0f} %"
        if outside is not None:
            found[name] = Estimate(model.seconds(terms), "predicted", f"{source}; {outside}")
        elif measured_on is not None:
            found[name] = Estimate(model.seconds(terms), "untimed", f"on {measured_on} {source}")
        else:
            found[name] = Estimate(model.seconds(terms), "measured", source)
    return found


def forget() -> None:
    """Drop what was read from disk; the next call reads again."""
    _document.cache_clear()
    _models.cache_clear()


def _of_architecture(device_kind: str) -> tuple[str | None, Mapping[tuple[str, str], Model]]:
    """Another chip's models, where this one has none."""
    chip = hardware.chip_for(device_kind)
    for path in sorted(SHIPPED.glob("*.json")) if chip is not None else ():
        document = _document(path.stem)
        other = hardware.chip(document["chip"])
        if chip is not None and other.platform == chip.platform and other.architecture == chip.architecture:
            return document["device_kind"], _models(path.stem)
    return None, {}


@functools.lru_cache(maxsize=64)
def _document(chip: str) -> Any:
    path = SHIPPED / f"{chip}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"ops": {}}


@functools.lru_cache(maxsize=64)
def _models(chip: str) -> Mapping[tuple[str, str], Model]:
    return {
        (op, name): Model(
            row["microseconds"], {size: (least, most) for size, (least, most) in row["sizes"].items()},
            frozenset(row["words"]), row["calls"], row["error"],
        )
        for op, by_name in _document(chip)["ops"].items()
        for name, row in by_name.items()
    }  # fmt: skip
