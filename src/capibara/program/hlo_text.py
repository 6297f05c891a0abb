"""Reading a compiled program's text (`compiled.as_text()`): its computations, its loops, the sizes of its arrays."""

from __future__ import annotations

import math
import re

__all__ = ["BRANCHES", "CALL", "CALLED", "array_bytes", "arrays", "computations", "operands", "trips"]

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
CALL = re.compile(r"([a-z][a-z\-]*)\(")
"""An instruction's opcode, before its operands."""
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")
CALLED = re.compile(r"(?:to_apply|calls|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_BITS = {"pred": 8, "s4": 4, "u4": 4, "s2": 2, "u2": 2, "c64": 64, "c128": 128, "bf16": 16, "token": 0, "opaque": 0}


def computations(text: str) -> tuple[dict[str, list[tuple[str, str]]], str]:
    """The instructions of each computation, as a name and the rest of its line, in order; and the entry's name."""
    bodies: dict[str, list[tuple[str, str]]] = {}
    current, entry = "", ""
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header and "=" not in line.split("(")[0]:
            current = header.group(2)
            bodies[current] = []
            entry = current if header.group(1) else entry
            continue
        instruction = _INSTRUCTION.match(line)
        if instruction and current:
            bodies[current].append((instruction.group(1), instruction.group(2)))
    return bodies, entry


def trips(rest: str, shapes: dict[str, str], bodies: dict[str, list[tuple[str, str]]]) -> int | None:
    """How often a while runs: as the compiler notes it, or by its counter, where that starts and ends at constants."""
    noted = _TRIPS.search(rest)
    if noted:
        return int(noted.group(1))
    condition, body = (re.search(rf"{word}=%?([\w.\-]+)", rest) for word in ("condition", "body"))
    start = re.search(r"while\(%?([\w.\-]+)\)", rest)
    if not (condition and body and start):
        return None
    inside = dict(bodies.get(condition.group(1), ()))
    compared = next((operands(text) for text in inside.values() if " compare(" in text and "direction=LT" in text), [])
    if len(compared) != 2:
        return None
    place = re.search(r"get-tuple-element\(.*index=(\d+)", inside.get(compared[0], ""))
    end = _constant(inside.get(compared[1], ""))
    if place is None or end is None:
        return None
    index = int(place.group(1))
    before = operands(shapes.get(start.group(1), ""))
    first = _constant(shapes.get(before[index], "")) if index < len(before) else None
    # The tuple may be copied on its way here; loops that jax and the partitioner make count from 0.
    return -(-(end - (first or 0)) // _stride(bodies.get(body.group(1), []), index))


def _stride(body: list[tuple[str, str]], index: int) -> int:
    """By how much a trip moves the counter: more than 1 where the compiler has unrolled the loop."""
    inside = dict(body)
    made = operands(body[-1][1]) if body else []
    added = inside.get(made[index], "") if index < len(made) else ""
    constants = [_constant(inside.get(name, "")) for name in operands(added)] if " add(" in added else []
    return max((one for one in constants if one), default=1)


def operands(text: str) -> list[str]:
    """Names of the arrays that an instruction reads."""
    call = CALL.search(text)
    return re.findall(r"%([\w.\-]+)", text[call.end() : text.find(")", call.end())]) if call else []


def _constant(text: str) -> int | None:
    found = re.search(r" constant\((-?\d+)\)", text)
    return int(found.group(1)) if found else None


def arrays(text: str) -> list[tuple[str, tuple[int, ...], float]]:
    """Element type, dimensions and bytes of every array that a type names; a tuple has several."""
    found = []
    for dtype, dims in _ARRAY.findall(text):
        bits = _BITS.get(dtype)
        if bits is None:
            digits = re.search(r"\d+", dtype)
            bits = 8 if dtype.startswith("f8") or digits is None else int(digits.group())
        lengths = tuple(int(one.removeprefix("<=")) for one in dims.split(",") if one)
        found.append((dtype, lengths, math.prod(lengths) * bits / 8))
    return found


def array_bytes(text: str) -> float:
    """Bytes of every array that a type names, together."""
    return sum(size for _, _, size in arrays(text))
