"""Reading a compiled program's text (`compiled.as_text()`): its computations, its loops, the sizes of its arrays."""

from __future__ import annotations

import math
import re

__all__ = ["BRANCHES", "CALL", "CALLED", "array_bytes", "arrays", "computations", "operands", "trips"]

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
CALL = re.compile(r"([a-z][a-z\-]*)\(")
"""An instruction's opcode, before its operands."""
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")
CALLED = re.compile(r"(?:to_apply|calls|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_BITS = {"pred": 8, "s4": 4, "u4": 4, "s2": 2, "u2": 2, "c64": 64, "c128": 128, "bf16": 16, "token": 0, "opaque": 0}


def computations(text: str) -> tuple[dict[str, list[tuple[str, str]]], str]:
    """The instructions of each computation, as a name and the rest of its line, in order and its result last; and the
    entry's name."""
    bodies: dict[str, list[tuple[str, str]]] = {}
    results: dict[str, tuple[str, str]] = {}
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
            one = (instruction.group(2), instruction.group(3))
            bodies[current].append(one)
            if instruction.group(1):
                results[current] = one
    for name, result in results.items():  # in the order of a schedule it may be anywhere
        bodies[name].remove(result)
        bodies[name].append(result)
    return bodies, entry


def trips(rest: str, shapes: dict[str, str], bodies: dict[str, list[tuple[str, str]]]) -> int | None:
    """How often a while runs: as the compiler notes it, or by its counter, where that starts, steps and ends at
    constants and nothing else ends the loop; None where it is neither."""
    noted = _TRIPS.search(rest)
    if noted:
        return int(noted.group(1))
    condition, body = (re.search(rf"{word}=%?([\w.\-]+)", rest) for word in ("condition", "body"))
    start = re.search(r"while\(%?([\w.\-]+)\)", rest)
    if not (condition and body and start):
        return None
    # The last instruction of a computation is its result: a comparison that is one of two conditions is not.
    ended = bodies.get(condition.group(1), [])
    inside, compared = dict(ended), ended[-1][1] if ended else ""
    if " compare(" not in compared or "direction=LT" not in compared:
        return None
    counter, limit = (_uncopied(name, inside) for name in operands(compared))
    index, end = _element(counter), _constant(limit)
    before = operands(_uncopied(start.group(1), shapes))
    if index is None or end is None or index >= len(before):
        return None
    first = _constant(_uncopied(before[index], shapes))
    stride = _stride(bodies.get(body.group(1), []), index)
    return None if first is None or stride is None else max(-(-(end - first) // stride), 0)


def _stride(body: list[tuple[str, str]], index: int) -> int | None:
    """By how much a trip moves the counter: more than 1 where the compiler has unrolled the loop."""
    inside = dict(body)
    made = operands(body[-1][1]) if body else []
    added = _uncopied(made[index], inside) if index < len(made) else ""
    parts = [_uncopied(name, inside) for name in operands(added)] if " add(" in added else []
    steps = [_constant(part) for part in parts if _element(part) != index]
    return steps[0] if len(parts) == 2 and len(steps) == 1 and (steps[0] or 0) > 0 else None


def _uncopied(name: str, inside: dict[str, str]) -> str:
    """The instruction that made an array, before it was copied on its way."""
    rest = inside.get(name, "")
    while " copy(" in rest and operands(rest) and operands(rest)[0] in inside:
        rest = inside[operands(rest)[0]]
    return rest


def _element(text: str) -> int | None:
    found = re.search(r"get-tuple-element\(.*index=(\d+)", text)
    return int(found.group(1)) if found else None


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
