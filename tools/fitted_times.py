"""Fit the models of times of a chip to the runs that benchmarks/results has of it.

    python tools/fitted_times.py [--replay]

Every call that an implementation was timed at is a row: of the runs that tools/measured_evidence.py reads, of the tuned
tables, and of `capibara kernels bench --models`. Terms are the op's (`Op.times`); coefficients are the non-negative
ones with the least sum of relative errors. A row of both passes is of the backward pass by what is left when the
forward pass is taken off: as the same run timed it, else by its model.

Left out are the draws of models that are held back, and the rows that an earlier run held back; `--replay` says what
dispatch would lose there, before and after: the time of the fastest that was timed over that of the choice.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from measured_evidence import (
    BOTH,
    CHIP,
    LATTICE,
    READERS,
    RESULTS,
    SHAPES,
    changed,
    operand,
    side_by_side,
    values,
    without_fill,
)
from scipy.optimize import nnls

from capibara import hardware
from capibara.kernels import lookup, target
from capibara.kernels.core import evidence, tables, times
from capibara.kernels.core.spec import Call, describe
from capibara.kernels.core.times import SHIPPED
from capibara.kernels.lab.lattice.measure import HOST_SHOWS_US

OPS = ("attention", "attention_grad", "norm", "norm_grad")
FORWARD = {"attention_grad": "attention", "norm_grad": "norm"}
UNTUNED = "2026-11-16-h200-untuned-shapes.json"
# By the device's clock alone: passes over memory, a few microseconds long, of which the host's clock has a launch of
# another length; and attention's gradient, of which the host's had cuDNN up to 15 % slower than the device's has since.
BY_DEVICE = ("norm", "norm_grad", "attention_grad")
OF_DEVICE = 8
# Since this file the programs of our attention go over its tiles in another order: of earlier files its forward times
# still say what to take off a time of both passes, and nothing more.
WALKS = "2026-11-17-h200-attention-walks.json"
BEFORE_WALKS = ("58844c0",)  # commits of the lattice's runs
# A run whose programs did not take turns on the device's clock: what was timed first had a chip that had rested.
RESTED = ("815b60d1",)
# Fewer calls than this a coefficient say too little.
CALLS_A_TERM = 1.5
# A model that is farther off in the median says nothing. XLA's of a norm's gradient is, by 13 %: with it the rows it is
# fitted to would lose 9 % of the fastest at the most in place of 22, and one that the rules have right would lose 9 %.
MOST_ERROR = 0.1
# Errors count by their size, not by their squares, from this one on: some runs were disturbed.
NOISE = 0.03
ROUNDS = 20
DIGITS = 6


@dataclasses.dataclass(frozen=True)
class Row:
    """One call, and how long each implementation took, in microseconds."""

    call: Call
    us: Mapping[str, float]
    held_back: bool
    file: str
    both: bool = False
    device: bool = False
    """By the device's clock."""


def rows() -> Iterator[Row]:
    """Of every source, in the order of their age."""
    # As it was read before our attention kernel changed, for cuDNN's times.
    for file, read in {**READERS, UNTUNED: side_by_side}.items():
        if file in (SHAPES, LATTICE):  # read below
            continue
        document = json.loads((RESULTS / file).read_text(encoding="utf-8"))
        for found in read(document):
            if found.op in OPS and found.op not in BY_DEVICE:
                call = lookup(found.op).call(*map(operand, found.operands), **found.params)
                kept = document["rows"][found.row].get("set") == "held back"
                kept = document["rows"][found.row].get("held_back", kept)
                ours = {name: us for name, us in found.us.items() if name in call.op.implementations}
                us = {name: us for name, us in ours.items() if file != UNTUNED or not _superseded(call, name)}
                if changed(found.op, found.operands, found.params):
                    us.pop("hopper", None)
                if found.passes != BOTH:
                    us = without_fill(found.op, call.args[0], us, "")
                yield Row(call, us, kept, file, found.passes == BOTH)
    for op in OPS:
        calls: dict[tuple[str, ...], dict[str, float]] = {}
        params: dict[tuple[str, ...], Mapping[str, Any]] = {}
        for entry in tables._read(
            tables.table_path(tables.SHIPPED, hardware.chip(CHIP).device_kinds[0], op), "shipped"
        ):
            key = (*entry.operands, json.dumps(entry.params, sort_keys=True))
            calls.setdefault(key, {})[entry.implementation] = 1e6 * entry.seconds
            params[key] = entry.params
        for key, us in calls.items():
            call = lookup(op).call(*map(operand, key[:-1]), **params[key])
            if changed(op, key[:-1], params[key]):
                us = {name: us for name, us in us.items() if name != "hopper"}
            yield Row(call, without_fill(op, call.args[0], us, ""), False, "tuned")
    for file in (LATTICE, SHAPES):
        yield from _lattice(file)


def apart(found: Sequence[Row]) -> list[Row]:
    """Rows of a shape that a run held back are held back, whichever run they are of."""
    shapes = {_forward(row.call) for row in found if row.held_back}
    return [dataclasses.replace(row, held_back=_forward(row.call) in shapes) for row in found]


def _superseded(call: Call, name: str) -> bool:
    """Our attention padded copies of such heads and lengths, and does no longer: the earlier runs are of another
    kernel."""
    if not call.op.name.startswith("attention") or name != "hopper":
        return False
    q = call.need("q").shape
    return q[-1] not in (64, 128, 256) or q[2] % 8 != 0


def _lattice(name: str) -> Iterator[Row]:
    path = RESULTS / name
    if not path.exists():
        return
    document = json.loads(path.read_text(encoding="utf-8"))
    for row in document["rows"]:
        if "failed" in row or row["op"] not in OPS or _host_shows(row):
            continue
        both = row["direction"] != "forward"
        of = row["op"] + "_grad" * both
        if of in BY_DEVICE and (row.get("clock") != "device" or _returned_twice(row)):
            continue
        commit = document["runs"][row["run"]]["commit"]
        if commit in RESTED:
            continue
        file = f"{name} at {commit}" if commit in BEFORE_WALKS else name
        us = {name: min(row["microseconds"][name]) for name in row["ours"] if row["right"].get(name)}
        taken = us.pop("dispatch", None)
        us |= {} if taken is None else dict.fromkeys(row["same_as_dispatch"], taken)
        op, operands, params = row["op"], row["operands"], values(row["params"])
        if both:
            (last,) = [d for d in row["decisions"] if d["op"] == of][:1] or [None]
            if last is None:
                continue
            op, operands, params = last["op"], last["operands"], values(last["params"])
        call = lookup(op).call(*map(operand, operands), **params)
        names = [name for name in us if name in call.op.implementations]
        if changed(op, operands, params, commit):
            names = [name for name in names if name != "hopper"]
        if both and op == "attention_grad" and commit in BEFORE_WALKS:  # whose forward part no model knows any more
            names = [name for name in names if name != "hopper"]
        us = {name: us[name] for name in names}
        if not both:
            us = without_fill(op, call.args[0], us, document["runs"][row["run"]]["date"])
        yield Row(call, us, row["held_back"], file, both, row.get("clock") == "device")


def _host_shows(row: Mapping[str, Any]) -> bool:
    """A short program by the host's clock: what the host takes is in it."""
    shortest = min(min(us) for us in row["microseconds"].values())
    return row.get("clock", "host") == "host" and row["calls_a_program"] * shortest < HOST_SHOWS_US


def _returned_twice(row: Mapping[str, Any]) -> bool:
    """A norm's gradient by x and by what is added to it is one array: a program that returns both makes a copy."""
    return row["direction"] != "forward" and row["operands"][-1] != "-"


def current(found: Sequence[Row]) -> list[Row]:
    """Without the times of kernels that have changed."""
    kept = (WALKS, LATTICE, SHAPES, "tuned")

    def us(row: Row) -> Mapping[str, float]:
        former = row.call.op.name == "attention" and row.file not in kept
        return {name: us for name, us in row.us.items() if not (former and name == "hopper")}

    return [dataclasses.replace(row, us=us(row)) for row in found]


def by_one_clock(found: Sequence[Row]) -> list[Row]:
    """Of attention's forward pass in heads of a width that the device's clock timed so often, those times alone: by the
    host's, in runs of before, programs were up to 15 % slower, and cuDNN's more than ours."""
    of_device = Counter(row.call.need("q").shape[-1] for row in found if row.call.op.name == "attention" and row.device)

    def counts(row: Row) -> bool:
        if row.call.op.name != "attention" or row.device:
            return True
        return of_device[row.call.need("q").shape[-1]] < OF_DEVICE

    return [row for row in found if counts(row)]


def alone(found: Sequence[Row], fits: Mapping[tuple[str, str], Any]) -> list[Row]:
    """Rows of one pass: of those of both, what the forward pass leaves."""
    forward = {(row.file, *_forward(row.call)): row for row in found if row.call.op.name in FORWARD.values()}
    made = []
    for row in found:
        if not row.both:
            made.append(row)
            continue
        before = forward.get((row.file, *_forward(row.call)))
        us = {}
        for name, both in row.us.items():
            timed = None if before is None else before.us.get(name)
            first = timed or _modelled(row.call, name, fits)
            if first is not None and first < 0.7 * both:
                us[name] = both - first
        made.append(dataclasses.replace(row, us=us))
    return made


def _forward(call: Call) -> tuple[str, ...]:
    """What a forward pass and the backward pass of the same call have alike."""
    kind = {k: v for k, v in call.params.items() if k in ("causal", "window", "kind")}
    names = ("q", "k") if call.op.name.startswith("attention") else ("x",)
    family = call.op.name.removesuffix("_grad")
    return (family, *(describe(call[name]) for name in names), str(sorted(kind.items())))


def _modelled(call: Call, name: str, fits: Mapping[tuple[str, str], Any]) -> float | None:
    op = lookup(FORWARD[call.op.name])
    fit = fits.get((op.name, name))
    if fit is None:
        return None
    params = {k: v for k, v in call.params.items() if k in op.params}
    operands = [call[each] if each in call.op.operands else None for each in op.operands]
    terms = op.times(op.call(*operands, **params), name)
    if terms is None or not set(fit["words"]).issuperset(terms.words):
        return None
    return sum(fit["microseconds"][term] * amount for term, amount in terms.terms.items())


def fit(found: Sequence[Row], op: str, name: str) -> dict[str, Any] | None:
    """Coefficients, and what they were made of; None where the rows are too few, or say too little."""
    calls: dict[str, tuple[Any, list[float]]] = {}
    for row in found:
        if row.call.op.name == op and name in row.us and not row.held_back:
            terms = row.call.op.times(row.call, name)
            if terms is not None:
                calls.setdefault(str(row.call), (terms, []))[1].append(row.us[name])
    names = sorted({term for terms, _ in calls.values() for term in terms.terms})
    if not calls or len(calls) < CALLS_A_TERM * len(names):
        return None
    # Of several runs of a call the least: what disturbs a run makes it longer.
    us = np.array([min(times) for _, times in calls.values()])
    amounts = np.array([[terms.terms.get(term, 0.0) for term in names] for terms, _ in calls.values()])
    relative = amounts / us[:, None]
    coefficients = _coefficients(relative)
    # Of each call by the others: what the model is worth at a call that it has not seen.
    errors = [relative[i] @ _coefficients(np.delete(relative, i, 0)) - 1 for i in range(len(us))]
    error = float(np.median(np.abs(errors)))
    if error > MOST_ERROR:
        print(f"{op} {name}: {100 * error:.0f} % off in the median, left out")
        return None
    sizes = {
        size: [min(values), max(values)]
        for size in next(iter(calls.values()))[0].sizes
        for values in [[terms.sizes[size] for terms, _ in calls.values()]]
    }
    return {
        "microseconds": {term: _rounded(c) for term, c in zip(names, coefficients, strict=True)}, "sizes": sizes,
        "words": sorted({word for terms, _ in calls.values() for word in terms.words}), "calls": len(calls),
        "error": _rounded(error),
    }  # fmt: skip


def _coefficients(relative: Any) -> Any:
    """The non-negative ones whose sums are nearest to 1."""
    weights = np.ones(len(relative))
    for _ in range(ROUNDS):
        found, _ = nnls(weights[:, None] * relative, weights)
        weights = np.maximum(np.abs(relative @ found - 1), NOISE) ** -0.5
    return found


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def table() -> tuple[dict[str, Any], list[Row]]:
    chip = hardware.chip(CHIP)
    with target(chip.platform, chip.device_kinds[0]):
        found = apart(list(rows()))
        fits: dict[tuple[str, str], Any] = {}
        for op in sorted(OPS, key=lambda op: op in FORWARD):
            single = alone(found, fits) if op in FORWARD else by_one_clock(current(found))
            for name in lookup(op).implementations:
                made = fit(single, op, name)
                if made is not None:
                    fits[op, name] = made
        single = by_one_clock(current(alone(found, fits)))
    ops = {op: {name: made for (of, name), made in fits.items() if of == op} for op in OPS}
    files = sorted({row.file for row in found})
    return {"chip": chip.name, "device_kind": chip.device_kinds[0], "files": files, "ops": ops}, single


def losses(found: Sequence[Row]) -> dict[tuple[str, bool], list[tuple[float, float, Row]]]:
    """By op, fitted or held back: the fastest time over the choice's, without and with the models that are shipped."""
    chip = hardware.chip(CHIP)
    made: dict[tuple[str, bool], list[tuple[float, float, Row]]] = {}
    with target(chip.platform, chip.device_kinds[0]):
        for row in found:
            names = [name for name in row.us if row.call.op.implementations[name].refusal(row.call) is None]
            if len(names) < 2:
                continue
            ratios = []
            for known in ({}, times.estimates(row.call, names)):
                order = evidence.order(row.call, "measured", known)
                chosen = next(name for name in order.names if name in names)
                ratios.append(min(row.us[name] for name in names) / row.us[chosen])
            made.setdefault((row.call.op.name, row.held_back), []).append((ratios[0], ratios[1], row))
    return made


def told(made: Mapping[tuple[str, bool], Sequence[tuple[float, float, Row]]]) -> Iterator[str]:
    """The rows that are behind with the models, and a line an op."""
    for (op, apart), pairs in made.items():
        for before, after, row in pairs:
            if after < 0.95:
                us = ", ".join(f"{name} {us:.1f}" for name, us in row.us.items())
                yield f"  {row.call}: {before:.2f}, then {after:.2f} ({us}; {row.file})"
        means = [
            f"mean {statistics.geometric_mean(r):.3f}, worst {min(r):.2f}"
            for r in zip(*((b, a) for b, a, _ in pairs), strict=True)
        ]
        yield f"{op}, {'held back' if apart else 'fitted'}: {len(pairs)} rows, before {means[0]}; after {means[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replay", action="store_true", help="say what dispatch loses, with and without the models")
    asked = parser.parse_args()
    made, found = table()
    SHIPPED.mkdir(exist_ok=True)
    path = SHIPPED / f"{tables.slug(made['device_kind'])}.json"
    path.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    times.forget()
    for op, fits in made["ops"].items():
        for name, fitted in fits.items():
            print(f"{op} {name}: {fitted['calls']} calls, {100 * fitted['error']:.1f} % off in the median")
    if asked.replay:
        print("\n".join(told(losses(found))))


if __name__ == "__main__":
    main()
