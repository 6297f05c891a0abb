"""On what grounds an implementation goes before another where no tuned entry speaks.

*measured*: it was timed on this chip, in one run with the others. *predicted*: the chip's compiler gave figures for it
and for XLA's form of the same work, and nothing ran. *untimed*: neither, on this chip.

What stands behind the words is a table a chip, `kernels/evidence/<chip>.json`: rows of operands, parameters and
microseconds by implementation, each naming its place in benchmarks/results. tools/measured_evidence.py makes them of
runs, tools/predicted_evidence.py of what `capibara kernels compile` says.

The order is one rule, `order`: as they were added to the op, but what evidence or an author's `ahead_of` speaks for
moves forward; and those whose times a model knows (`times`) stand by their times.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from capibara import hardware
from capibara.kernels.core import tables
from capibara.kernels.core.spec import Call, Implementation, describe
from capibara.kernels.core.times import Estimate
from capibara.kernels.core.trusting import Level

__all__ = ["LEAST_GAIN", "SHIPPED", "Evidence", "Order", "of", "order", "params_key"]

SHIPPED = Path(__file__).parents[1] / "evidence"
# A prediction decides where it says at least this much: what a bound leaves out is some per cent.
LEAST_GAIN = 1.1
# Times by models that are no farther apart say nothing: half of what they are fitted to is 2 to 6 % off.
LEVEL = 0.03
# Sizes of operands this many doublings away, all axes together, are another call: the op's worst row speaks for it.
_FAR = 10.0


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What speaks for an implementation of one call."""

    kind: Literal["measured", "predicted", "untimed"]
    gain: float | None
    """How many times as fast as what it was compared with; None where nothing says."""
    source: str
    beside: str = "XLA's form"
    measured_on: str | None = None
    """The chip that it was timed on, where that is another than the call's."""
    most: float | None = None
    """Where no case is near: the most that any of them gained, of which `gain` is then the least."""

    @property
    def decides(self) -> bool:
        """Whether it is a prediction of enough gain to be acted on where predictions are trusted."""
        return self.kind == "predicted" and self.gain is not None and self.gain >= LEAST_GAIN

    def __str__(self) -> str:
        most = "" if self.most is None else f" to {self.most:.2g}"
        gain = "" if self.gain is None else f"{self.gain:.2g}{most} times as fast as {self.beside}"
        if self.measured_on is not None:
            return f"untimed here (measured on {self.measured_on}: {gain}, {self.source})"
        return " ".join(filter(None, (self.kind, gain, f"({self.source})")))


@dataclasses.dataclass(frozen=True)
class Order:
    """The implementations of a call's op, the one to take first; and on what grounds."""

    names: tuple[str, ...]
    grounds: Mapping[str, Evidence]
    """Of those that are for one platform alone."""
    passed: Mapping[str, tuple[str, ...]]
    """Which others an implementation was moved before."""
    by_time: tuple[str, ...] = ()
    """Those that stand as their times by a model are, the fastest first, or one that is level with it."""


def order(call: Call, level: Level, times: Mapping[str, Estimate] | None = None) -> Order:
    """Which implementation goes first, of all that the op has, whether or not they accept.

    They stand as they were added: XLA's forms, kernels, the reference. What was measured ahead of another goes before
    it: by `ahead_of` where an implementation has a rule, else by the rows that are nearest to the call. Where `level`
    says so, what is predicted ahead by LEAST_GAIN goes first of all. Where `times` has two or more that `level` lets
    decide, those share out the places that they have among themselves, the fastest first; what is LEVEL with it as it
    stands.
    """
    implementations = call.op.implementations
    names = list(implementations)
    passed: dict[str, tuple[str, ...]] = {}
    everywhere = [name for name, impl in implementations.items() if len(impl.platforms) > 1]
    grounds = {name: of(call, impl) for name, impl in implementations.items() if name not in everywhere}
    for name, impl in implementations.items():
        if impl.ahead_of is not None:
            before = tuple(impl.ahead_of(call) if callable(impl.ahead_of) else impl.ahead_of)
        else:
            before = tuple(everywhere) if name in grounds and _measured_ahead(grounds[name]) else ()
        places = [names.index(other) for other in before if other in implementations and other != name]
        if places and min(places) < names.index(name):
            passed[name] = before
            names.insert(min(places), names.pop(names.index(name)))
    if level == "predicted":
        best_last = sorted((found.gain or 0.0, name) for name, found in grounds.items() if found.decides)
        for _, name in best_last:
            passed[name] = tuple(everywhere)
            names.insert(0, names.pop(names.index(name)))
    known = {name: found.seconds for name, found in (times or {}).items() if found.decides(level)}
    level_with = min(known.values(), default=0.0) * (1 + LEVEL)
    as_they_stand = {name: names.index(name) if known[name] <= level_with else len(names) for name in known}
    by_time = tuple(sorted(known, key=lambda name: (as_they_stand[name], known[name]))) if len(known) > 1 else ()
    for place, name in zip(sorted(map(names.index, by_time)), by_time, strict=True):
        names[place] = name
    return Order(tuple(names), grounds, passed, by_time)


def _measured_ahead(found: Evidence) -> bool:
    return (found.kind == "measured" or found.measured_on is not None) and (found.gain or 0.0) >= 1.0


def of(call: Call, implementation: Implementation) -> Evidence:
    """What speaks for this implementation of this call, where no tuned entry does."""
    if call.target.platform not in implementation.platforms:
        return Evidence("untimed", None, f"it is for {' and '.join(implementation.platforms)}")
    measured_on, rows = None, _table(tables.slug(call.target.device_kind)).rows.get((call.op.name, implementation.name))
    if not rows:
        measured_on, rows = _measured_elsewhere(call, implementation.name)
    if not rows:
        return Evidence("untimed", None, "neither run beside another nor compared with XLA's form for this chip")
    beyond = implementation.beyond_evidence(call)
    if beyond is not None:
        return Evidence("untimed", None, beyond)
    row, far = _nearest(call, rows)
    told, most = "", None
    if far > _FAR:  # the least that was gained anywhere decides, and the most is told beside it
        gained = [(row.gain(implementation.name)[0], row) for row in rows]
        row, most = min(gained, key=lambda pair: pair[0])[1], max(gain for gain, _ in gained)
        told = f"{len(rows)} cases, none near; the least: "
    gain, beside = row.gain(implementation.name)
    if row.kind == "predicted":
        return Evidence("predicted", gain, f"{told}as compiled for {' '.join(row.operands)}; not run", most=most)
    source = f"{told}{' '.join(row.operands)}: {row.source}"
    return Evidence("untimed" if measured_on else "measured", gain, source, beside, measured_on, most)


def _measured_elsewhere(call: Call, name: str) -> tuple[str | None, tuple[_Row, ...]]:
    """Another GPU's runs, where this one has none; one of the same architecture first. TPUs have compilers to ask."""
    if call.target.platform != "gpu":
        return None, ()
    here = hardware.chip_for(call.target.device_kind)
    others = [table for table in _gpus() if (call.op.name, name) in table.rows]
    others.sort(key=lambda table: here is None or table.architecture != here.architecture)
    return (others[0].device_kind, others[0].rows[call.op.name, name]) if others else (None, ())


@functools.lru_cache(maxsize=1)
def _gpus() -> tuple[_Table, ...]:
    tables_of_all = (_table(path.stem) for path in sorted(SHIPPED.glob("*.json")))
    return tuple(table for table in tables_of_all if table.platform == "gpu")


@dataclasses.dataclass(frozen=True)
class _Row:
    kind: Literal["measured", "predicted"]
    operands: tuple[str, ...]
    params: str
    us: Mapping[str, float]
    """Microseconds by implementation; a peer's under its own name."""
    source: str

    def gain(self, name: str) -> tuple[float, str]:
        """How many times as fast as XLA's form, or as the fastest other that was timed, and which that is."""
        others = {other: us for other, us in self.us.items() if other != name}
        beside = "xla" if "xla" in others else min(others, key=lambda other: others[other])
        return others[beside] / self.us[name], beside


@dataclasses.dataclass(frozen=True)
class _Table:
    platform: str
    architecture: str
    device_kind: str
    rows: Mapping[tuple[str, str], tuple[_Row, ...]]


@functools.lru_cache(maxsize=64)
def _table(chip: str) -> _Table:
    path = SHIPPED / f"{chip}.json"
    if not path.exists():
        return _Table("", "", "", {})
    document = json.loads(path.read_text(encoding="utf-8"))
    made: dict[tuple[str, str], list[_Row]] = {}
    for op, rows in document["ops"].items():
        for row in rows:
            origin = document["sources"][row["source"]]
            source = f"{origin['file']}, row {row['row']}{', ' + row['passes'] if 'passes' in row else ''}"
            read = _Row(origin["kind"], tuple(row["operands"]), row["params"], row["us"], source)
            for name in row["us"]:
                if len(row["us"]) > 1:
                    made.setdefault((op, name), []).append(read)
    which = hardware.chip(document["chip"])
    rows_of = {key: tuple(found) for key, found in made.items()}
    return _Table(which.platform, which.architecture, document["device_kind"], rows_of)


def _nearest(call: Call, rows: Sequence[_Row]) -> tuple[_Row, float]:
    """The row nearest to the call, and how far it is: doublings of sizes; without end for another type."""
    operands, params = tuple(map(describe, call.args)), params_key(call)
    found = [(_distance(row.operands, operands) + (0.0 if row.params == params else 1.0), row) for row in rows]
    far, row = min(found, key=lambda pair: pair[0])
    return row, far


def params_key(call: Call) -> str:
    return json.dumps({k: str(v) for k, v in call.tuning_key.items()}, sort_keys=True)


@functools.lru_cache(maxsize=4096)
def _read(operand: str) -> tuple[str, tuple[int, ...]] | None:
    """Type and sizes of an operand as tables write it; None for an absent one."""
    if operand == "-":
        return None
    dtype, _, dims = operand.rstrip("]").partition("[")
    return dtype, tuple(int(size) for size in dims.split(",") if size)


def _distance(left: Sequence[str], right: Sequence[str]) -> float:
    if len(left) != len(right):  # of a time before the op had one of its operands
        return math.inf
    total = 0.0
    for here, there in zip(left, right, strict=True):
        if here == there:
            continue
        a, b = _read(here), _read(there)
        if a is None or b is None:  # an operand that only one of the calls has, such as a weight
            total += 1.0
        elif a[0] != b[0] or len(a[1]) != len(b[1]) or 0 in a[1] + b[1]:
            return math.inf
        else:
            total += sum(abs(math.log2(x / y)) for x, y in zip(a[1], b[1], strict=True))
    return total
