"""What a program that the TPU compiler made does, by the roofline of its chip: for plans to be held against.

Every instruction of `compiled.as_text()`, as often as its loop runs, takes the longer of its matrix products and of the
bytes that it moves between the chip's main memory and elsewhere (arrays that the compiler keeps in faster memories are
marked and count nothing), at the shares of the peaks that the chip's row has. Exchanges go by the slice's links. This
is no measurement: it knows what the compiler chose, and the model's own rates. What it leaves out: the work of kernels
of this library other than grouped products (`unread`), and that copies and exchanges run beside products.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from capibara.cost.links import exchange, wire
from capibara.hardware.topology import Slice
from capibara.mesh.mesh import MeshConfig
from capibara.program import hlo_collectives as hlo

_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](\{[^}]*\})?")
_ELSEWHERE = re.compile(r"S\([1-9]\)")
_NOTHING = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota", "partition-id",
            "opt-barrier", "dynamic-update-slice")  # fmt: skip
_KERNEL = re.compile(r"(ragged-dot-none|capibara_grouped_gemm)")
_NOT_WORK = ("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "ragged-dot-metadata")


@dataclass
class Work:
    """Of one chip."""

    flops: float = 0.0
    bytes: float = 0.0
    compute_seconds: float = 0.0
    link_seconds: float = 0.0
    sent: dict[str, float] = field(default_factory=dict)
    """Kind of exchange and axes -> bytes, counted as in `Collective`."""
    unread: Counter[str] = field(default_factory=Counter)
    """Kernels whose work is not known here, and how often they run."""


def work_of(text: str, mesh: MeshConfig, where: Slice) -> Work:
    """What a compiled program does on each chip of a mesh on this slice."""
    bodies, entry = hlo._computations(text)
    found = Work()
    reached, chip = where.chip.efficiency, where.chip
    for flops, moved, times in _instructions(entry, bodies, 1, found):
        products = flops / chip.product_flops("bfloat16") / reached.matrix.mid
        memory = moved / chip.hbm_bandwidth / reached.memory.mid
        found.flops += times * flops
        found.bytes += times * moved
        found.compute_seconds += times * (max(products, memory) + reached.launch_seconds)
    wiring = wire(mesh, where, 1, reached.hop_seconds)
    for one in hlo.collectives_in(text, mesh.axes):
        what = f"{one.kind} {' '.join(one.axes) or 'unknown axes'}"
        found.sent[what] = found.sent.get(what, 0.0) + one.bytes
        if one.axes:
            found.link_seconds += exchange(wiring, one.kind, one.axes, one.bytes).seconds / reached.links.mid
    return found


def _instructions(name: str, bodies: dict, times: int, found: Work) -> list[tuple[float, float, int]]:
    """(flops, bytes, how often) of each instruction that does something."""
    made = []
    shapes = dict(bodies.get(name, ()))
    for label, rest in bodies.get(name, ()):
        call = hlo._CALL.search(rest)
        op = "" if call is None else call.group(1)
        kind, result = op.removesuffix("-start"), "" if call is None else rest[: call.start()]
        if not op or op in _NOTHING or op.endswith("-done") or kind in hlo._KINDS:
            continue
        if op == "while":
            trips = hlo._trips(rest, shapes, bodies) or 1
            body = re.search(r"body=%?([\w.\-]+)", rest)
            assert body is not None
            made += _instructions(body.group(1), bodies, times * trips, found)
        elif op in ("call", "conditional", "async-start"):
            for inner in hlo._CALLED.findall(rest):
                made += _instructions(inner, bodies, times, found)
        elif op in ("copy-start", "slice-start"):  # its operand, its result, and a number
            source, made_of = _ARRAY.findall(result)[:2]
            size = sum(hlo._size(f"{made_of[0]}[{made_of[1]}]"))
            made.append((0.0, size * sum(not _ELSEWHERE.search(one[2]) for one in (source, made_of)), times))
        elif op == "fusion":
            inner = hlo._CALLED.findall(rest)[0]
            made.append((_products(inner, bodies), _fused_bytes(rest, result, inner, shapes, bodies), times))
        elif op == "custom-call":
            if any(word in rest or word in label for word in _NOT_WORK):
                continue
            if not _KERNEL.search(label):
                found.unread[re.sub(r"\.\d+$", "", label)] += times
            made.append((_grouped(label, rest), _in_memory(result) + _operand_bytes(rest, shapes), times))
        elif "[]" not in result.split("{")[0]:  # what counts a loop is done beside
            flops = _product(rest, shapes) if op in ("convolution", "dot") else 0.0
            moved = 2 * _in_memory(result) if "slice" in op else _in_memory(result) + _operand_bytes(rest, shapes)
            made.append((flops, moved, times))
    return made


def _in_memory(text: str) -> float:
    """Bytes of the arrays of a type that lie in the chip's main memory."""
    arrays = (one for one in _ARRAY.findall(text) if not _ELSEWHERE.search(one[2]))
    return sum(sum(hlo._size(f"{dtype}[{dims}]")) for dtype, dims, _ in arrays)


def _result(text: str) -> str:
    call = hlo._CALL.search(text)
    return text if call is None else text[: call.start()]


def _operand_bytes(rest: str, shapes: dict[str, str]) -> float:
    return sum(_in_memory(_result(shapes.get(name, ""))) for name in hlo._operands(rest))


def _lengths(text: str) -> list[int]:
    found = _ARRAY.search(text)
    return [] if found is None else [int(one) for one in found.group(2).split(",") if one]


def _product(rest: str, shapes: dict[str, str]) -> float:
    """Of b products: b m k, b k n and b m n multiplied are b times the square of b m n k.

    A batch is written as a window with holes; what has none is taken for one product.
    """
    if "feature_group_count" in rest:  # a filter for each feature, which is no work for the matrix units
        return 0.0
    sizes = [math.prod(_lengths(text)) for text in (rest, *(shapes[one] for one in hlo._operands(rest)[:2]))]
    batch = re.search(r"window=\{size=(\d+) stride=\d+ lhs_dilate=\1\}", rest)
    return 2 * math.sqrt(math.prod(sizes) / (int(batch.group(1)) if batch else 1))


def _products(name: str, bodies: dict) -> float:
    total, shapes = 0.0, dict(bodies[name])
    for _, rest in bodies[name]:
        call = hlo._CALL.search(rest)
        if call is not None and call.group(1) in ("convolution", "dot"):
            total += _product(rest, shapes)
        elif call is not None and call.group(1) == "fusion":
            total += sum(_products(inner, bodies) for inner in hlo._CALLED.findall(rest))
    return total


def _grouped(label: str, rest: str) -> float:
    """Of a grouped product, whose last two operands are its rows [m, k] and matrices, or two sets of rows."""
    given = re.search(r"operand_layout_constraints=\{(.*?)\}, (?:front|meta)", rest)
    if not _KERNEL.search(label) or given is None:
        return 0.0
    left, right = [_lengths(f"{dtype}[{dims}]") for dtype, dims, _ in _ARRAY.findall(given.group(1))][-2:]
    columns = right[1] if len(right) == 2 else _lengths(rest)[-1]
    return 2.0 * left[0] * left[1] * columns


def _fused_bytes(rest: str, result: str, inner: str, shapes: dict[str, str], bodies: dict) -> float:
    """Operands, of which slices are read in part, and results, of which updates in place are written in part."""
    inside = dict(bodies[inner])
    users: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for name, text in bodies[inner]:
        for one in hlo._operands(text):
            users[one].append((name, text))

    def part_of(name: str) -> float | None:
        """Bytes that are read of an array where only slices of it are; None where all of it is."""
        total = 0.0
        for user, text in users[name]:
            if re.search(r" (dynamic-slice|slice|gather)\(", text):
                total += sum(hlo._size(_result(text)))
            elif " bitcast(" in text and (part := part_of(user)) is not None:
                total += part
            elif not (" dynamic-update-slice(" in text and hlo._operands(text)[0] == name):
                return None
        return total

    operands, total = hlo._operands(rest), 0.0
    for name, text in bodies[inner]:
        number = re.search(r" parameter\((\d+)\)", text)
        if number is not None and int(number.group(1)) < len(operands):
            whole = _in_memory(_result(shapes.get(operands[int(number.group(1))], "")))
            part = part_of(name)
            total += whole if part is None else min(whole, part)
    written = _in_memory(result)
    for text in inside.values():
        if " dynamic-update-slice(" in text:
            whole = sum(hlo._size(_result(text)))
            part = sum(hlo._size(_result(inside.get(hlo._operands(text)[1], ""))))
            written -= whole - part if whole <= written else 0.0
    return total + written
