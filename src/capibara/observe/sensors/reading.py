"""What a sensor gives: figures of one source by the names of one table, and which of them can be true."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

__all__ = ["ACCELERATORS", "METRICS", "Metric", "Reading", "Sensor", "believable"]

Kind = Literal["tpu", "gpu", "host", "process", "train", "serve"]
ACCELERATORS: tuple[Kind, ...] = ("tpu", "gpu")


@dataclass(frozen=True)
class Metric:
    """A figure that sensors may give."""

    text: str
    unit: str = ""
    """As Prometheus names units: "ratio", "bytes", "celsius", "watts", "seconds"; "" for a count."""
    most: float = math.inf
    """More than this is no true value. Every figure is at least `least`."""
    least: float = 0.0


METRICS: Mapping[str, Metric] = {
    "utilization": Metric("Share of the time that the device was at work.", "ratio", 1.0),
    "tensorcore_utilization": Metric("Share of the matrix units' operations that were used.", "ratio", 1.0),
    "memory_used": Metric("Memory in use.", "bytes"),
    "memory_total": Metric("Memory that there is.", "bytes"),
    "memory_usage": Metric("Memory in use, of what there is.", "ratio", 1.0),
    "temperature": Metric("The hottest place that tells its temperature.", "celsius", 200.0),
    "power": Metric("What the device draws.", "watts", 100_000.0),
    "clock": Metric("Of the compute units.", "hertz", 1e11),
    "step": Metric("The last step that was finished."),
    "loss": Metric("Of the last step.", least=-math.inf),
    "step_time": Metric("Of the last step; of a server, between a request's tokens.", "seconds"),
    "tokens_per_second": Metric("Tokens a second: trained on, or written by a server."),
    "mfu": Metric("The model's own operations, of the devices' peak.", "ratio", 1.0),
    "since_step": Metric("Since the last step was written down.", "seconds"),
    "goodput": Metric("Share of the run's time that went into steps that count.", "ratio", 1.0),
    "requests_running": Metric("Requests in the engine's batch."),
    "requests_waiting": Metric("Requests that wait for room in it."),
    "kv_cache_usage": Metric("Pages of the cache in use, of those that there are.", "ratio", 1.0),
    "joules_per_token": Metric("What the accelerators draw, for a token.", "joules"),
    "dollars_per_token": Metric("What the chips cost, for a token.", "dollars"),
}
"""Name -> what it is. Sensors give these and no others, so that tables, pages and alerts know what they show."""


@dataclass(frozen=True)
class Reading:
    """The figures of one source at one moment. A figure that the source does not tell is not there."""

    source: str
    """ "tpu:0", "gpu:1", "host", "pid 4711", a run's folder, a server's address."""
    kind: Kind
    values: Mapping[str, float]
    chip: str | None = None
    """The kind of chip, as jax calls it: "TPU v4", "NVIDIA H200"."""
    chips: int | None = None
    """Of a run or a server: how many chips the whole of it has, where it says so."""


class Sensor(Protocol):
    """Something that gives readings. It may raise, lie or never return: whoever asks it is prepared for that."""

    name: str
    accelerators: bool
    """Whether it is for TPUs or GPUs: where there is such a sensor, thresholds of devices are not the host's."""

    def read(self) -> Sequence[Reading]:
        """The figures now."""
        ...

    def close(self) -> None:
        """Let go of what it holds."""
        ...


@dataclass
class Believed:
    """A reading without what cannot be true."""

    reading: Reading
    refused: list[str] = field(default_factory=list)
    """In words, what was left out."""


def believable(reading: Reading) -> Believed:
    """Leave out what is no figure of the table, no finite number, negative, or more than there can be.

    A share of a little more than all, as counters that are read one after the other give, is all.
    """
    kept: dict[str, float] = {}
    refused: list[str] = []
    for name, value in reading.values.items():
        metric = METRICS.get(name)
        number = _number(value)
        if metric is None or number is None or not metric.least <= number <= metric.most * 1.05:
            refused.append(f"{name} of {reading.source} cannot be {value!r}")
            continue
        kept[name] = min(number, metric.most)
    used, total = kept.get("memory_used"), kept.get("memory_total")
    if used is not None and total is not None:
        if total <= 0 or used > 1.05 * total:
            refused.append(f"memory_used of {reading.source} cannot be {used:.0f} of {total:.0f}")
            kept = {name: value for name, value in kept.items() if not name.startswith("memory_")}
        else:
            kept.setdefault("memory_usage", min(used / total, 1.0))
    return Believed(Reading(reading.source, reading.kind, kept, reading.chip, reading.chips), refused)


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None
