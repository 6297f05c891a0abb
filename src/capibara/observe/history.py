"""The last figures of a monitor, in arrays of a fixed size."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np

from capibara.errors import rule_error, say_once

__all__ = ["History"]

_log = logging.getLogger("capibara.observe")


class History:
    """A ring of samples: a row a sample, a column a series, NaN where a series had no figure.

    A series is known by a source and a metric. Its column is made when it first comes, up to `most_series`; further
    ones are left out, and that is said once.

    Examples:
        >>> history = History(capacity=2)
        >>> for moment in range(3):
        ...     history.append(float(moment), {("tpu:0", "utilization"): moment / 10})
        >>> times, values = history.series("tpu:0", "utilization")
        >>> times.tolist(), values.tolist()
        ([1.0, 2.0], [0.1, 0.2])
    """

    def __init__(self, capacity: int, most_series: int = 1024) -> None:
        if capacity < 1:
            raise rule_error("A history keeps at least one sample", f"{capacity}", "leave it out for 6000")
        self.capacity = capacity
        self._most = most_series
        self._count = 0
        self._times = np.full(capacity, np.nan)
        self._values = np.full((capacity, 8), np.nan)
        self._columns: dict[tuple[str, str], int] = {}

    def __len__(self) -> int:
        return min(self._count, self.capacity)

    @property
    def nbytes(self) -> int:
        return self._times.nbytes + self._values.nbytes

    def append(self, time: float, figures: Mapping[tuple[str, str], float]) -> None:
        """One sample: (source, metric) -> value."""
        row = self._count % self.capacity
        self._times[row] = time
        self._values[row] = np.nan
        for key, value in figures.items():
            column = self._columns.get(key)
            if column is None:
                column = self._new_column(key)
                if column is None:
                    continue
            self._values[row, column] = value
        self._count += 1

    def _new_column(self, key: tuple[str, str]) -> int | None:
        column = len(self._columns)
        if column >= self._most:
            say_once(_log, self._most, "more than %d series: the rest have no history", self._most)
            return None
        if column >= self._values.shape[1]:
            wider = np.full((self.capacity, min(2 * self._values.shape[1], self._most)), np.nan)
            wider[:, : self._values.shape[1]] = self._values
            self._values = wider
        self._columns[key] = column
        return column

    def keys(self) -> list[tuple[str, str]]:
        """The series that there are: (source, metric)."""
        return list(self._columns)

    def series(self, source: str, metric: str, last: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Times and values of one series, oldest first; of the last so many samples, or of all."""
        size = len(self) if last is None else min(last, len(self))
        rows = np.arange(self._count - size, self._count) % self.capacity
        column = self._columns.get((source, metric))
        values = np.full(size, np.nan) if column is None else self._values[rows, column]
        return self._times[rows], values
