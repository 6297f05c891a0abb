"""The fixed trace of lengths that servers are measured with."""

from __future__ import annotations

import csv
import importlib.resources
from collections.abc import Sequence
from dataclasses import dataclass

from capibara.errors import rule_error

__all__ = ["Lengths", "fixed_trace", "scaled"]


@dataclass(frozen=True)
class Lengths:
    """Tokens of one request."""

    prompt: int
    output: int


def fixed_trace() -> list[Lengths]:
    """A thousand requests: prompts of 400 tokens in the median, 2,000 at the 95th percentile, 8,000 the longest.

    They are the quantiles of log-normal distributions in a fixed order: prompts of median 400, answers of median 128,
    95th percentile 512, and 1,024 at the most, one independent of the other. Every run that takes the first n of them
    asks for the same.
    """
    with importlib.resources.files("capibara.serve.load").joinpath("trace.csv").open(encoding="utf-8") as file:
        return [Lengths(int(row["prompt"]), int(row["output"])) for row in csv.DictReader(file)]


def scaled(trace: Sequence[Lengths], context: int) -> list[Lengths]:
    """The trace for a model of this context: where its longest would not fit, all are shortened by one factor.

    >>> scaled([Lengths(8000, 1000), Lengths(400, 100)], 900)
    [Lengths(prompt=800, output=100), Lengths(prompt=40, output=10)]
    """
    if context < 4:
        raise rule_error("A context has 4 tokens or more", context, "name the model's own")
    longest = max(lengths.prompt + lengths.output for lengths in trace)
    factor = min(context / longest, 1.0)
    return [Lengths(max(int(one.prompt * factor), 1), max(int(one.output * factor), 2)) for one in trace]
