"""The work of a compiled program, instruction by instruction, with how often each runs.

XLA's own `cost_analysis` counts the body of a loop once and a library call as nothing. Here a loop's body counts as
often as the compiler knows it to run, and the products, convolutions and attention of the vendors' libraries are
counted by their shapes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from capibara.program.hlo_collectives import KINDS as _COLLECTIVES
from capibara.program.hlo_text import BRANCHES, CALL, CALLED, arrays, computations, operands, trips

__all__ = ["HloOp", "HloWork", "Product", "hlo_work"]

# One operation for each number of the result; the transcendental ones too, as one.
_ELEMENTWISE = frozenset(
    (
        *("add", "subtract", "multiply", "divide", "remainder", "maximum", "minimum", "power", "negate", "abs", "sign"),
        *("floor", "ceil", "sqrt", "rsqrt", "cbrt", "exponential", "exponential-minus-one", "log", "log-plus-one"),
        *("logistic", "tanh", "tan", "sine", "cosine", "erf", "clamp", "round-nearest-afz", "round-nearest-even"),
    )
)
_FLOATS = ("f", "bf", "c")
# Instructions that name or regroup arrays and move nothing.
_FREE = frozenset(
    (
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"),
        *("opt-barrier", "domain", "add-dependency"),
    )
)
_HOST = frozenset(("infeed", "outfeed", "send", "send-done", "recv", "recv-done"))
_CALLBACKS = ("callback", "MoveToHost", "MoveToDevice")
_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "f64": "float64", "s8": "int8", "u8": "int8"}
_FMHA_PRODUCTS = {False: 2, True: 5}  # of a forward and of a backward pass of attention


@dataclass(frozen=True)
class Product:
    """One matrix product of an instruction: rows, columns and the length that is summed over."""

    batch: int
    m: int
    n: int
    k: int
    dtype: str
    """Of its operands, as XLA writes it: "f32", "bf16"."""

    @property
    def flops(self) -> float:
        """A multiplication and an addition are two."""
        return 2.0 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True)
class HloOp:
    """One instruction that the compiled program schedules; figures are those of one run of it on one device."""

    name: str
    opcode: str
    kind: str
    """ "product", "convolution", "attention", "collective", "host", "copy", "kernel" (a custom call) or "vector"."""
    times: int
    """How often one run of the program runs it."""
    matrix_flops: float
    vector_flops: float
    bytes: float
    dtype: str
    """Which of the chip's rates its products run at: "float32", "bfloat16"."""
    source: str
    """What it is in the user's program: jax's name stack."""
    products: tuple[Product, ...] = ()
    written_dtype: str = ""
    """The narrowest type of a product's operands as the program has it; the compiler may have widened it."""
    kernel: str = ""
    """What a GPU calls it, where the compiler wrote it itself; instructions that do the same share one."""

    @property
    def flops(self) -> float:
        """Of the matrix and the vector units together."""
        return self.matrix_flops + self.vector_flops


@dataclass(frozen=True)
class HloWork:
    """A compiled program's work on one device, for one run of it."""

    module: str
    ops: tuple[HloOp, ...]
    loops_of_unknown_length: int
    """Their bodies are counted once."""
    uncounted: tuple[str, ...]
    """Targets of the custom calls whose work nobody states: they count as no operations."""

    @property
    def flops(self) -> float:
        """All operations of a run."""
        return sum(op.flops * op.times for op in self.ops)

    @property
    def matrix_flops(self) -> float:
        """Those of matrix products and convolutions."""
        return sum(op.matrix_flops * op.times for op in self.ops)

    @property
    def bytes(self) -> float:
        """Read and written: every instruction's operands and results."""
        return sum(op.bytes * op.times for op in self.ops)


def hlo_work(hlo_text: str) -> HloWork:
    """What one run of a compiled program (`compiled.as_text()`) does on one device.

    Examples:
        >>> import jax
        >>> def scanned(x):
        ...     return jax.lax.scan(lambda c, _: (c @ c, None), x, length=5)[0]
        >>> text = jax.jit(scanned).lower(jax.ShapeDtypeStruct((32, 32), "float32")).compile().as_text()
        >>> hlo_work(text).matrix_flops == 5 * 2 * 32**3
        True
    """
    bodies, entry = computations(hlo_text)
    module = re.match(r"HloModule ([\w.\-]+)", hlo_text)
    reader = _Reader(bodies)
    ops = tuple(reader.ops(entry, 1))
    return HloWork(module.group(1) if module else "", ops, reader.unknown_loops, tuple(sorted(reader.uncounted)))


class _Work:
    """Operations of one instruction, added up over what it calls."""

    def __init__(self) -> None:
        self.products: list[Product] = []
        self.matrix = self.vector = 0.0
        self.dtype = ""
        self.kind = ""

    def product(self, product: Product, kind: str = "product") -> None:
        self.products.append(product)
        self.multiply(product.flops, product.dtype, kind)

    def multiply(self, flops: float, dtype: str, kind: str) -> None:
        self.matrix += flops
        self.dtype, self.kind = dtype, kind


class _Reader:
    def __init__(self, bodies: dict[str, list[tuple[str, str]]]) -> None:
        self.bodies = bodies
        self.shapes = {name: dict(body) for name, body in bodies.items()}
        self.unknown_loops = 0
        self.uncounted: set[str] = set()

    def ops(self, computation: str, times: int) -> Iterator[HloOp]:
        """The instructions of a computation, and those of the loops and branches that it enters."""
        shapes = self.shapes.get(computation, {})
        for name, rest in self.bodies.get(computation, ()):
            call = CALL.search(rest)
            opcode = call.group(1) if call else ""
            if opcode in _FREE or (opcode.endswith("-done") and opcode not in _HOST):
                continue
            if opcode == "while":
                known = trips(rest, shapes, self.bodies)
                self.unknown_loops += known is None
                body = re.search(r"body=%?([\w.\-]+)", rest)
                if body:
                    yield from self.ops(body.group(1), times * (1 if known is None else known))
                continue
            if opcode == "call":
                for called in CALLED.findall(rest):
                    yield from self.ops(called, times)
                continue
            if opcode == "conditional":
                branches = [list(self.ops(branch, times)) for branch in _branches(rest)]
                # Which is taken only the data know; the most that may run is counted.
                yield from max(branches, key=lambda ops: sum(op.flops + op.bytes for op in ops), default=[])
                continue
            yield self._op(name, opcode, rest, shapes, times)

    def _op(self, name: str, opcode: str, rest: str, shapes: dict[str, str], times: int) -> HloOp:
        work = _Work()
        self._count(opcode, rest, shapes, work)
        target = _quoted(rest, "custom_call_target")
        kind = work.kind
        if opcode.removesuffix("-start") in _COLLECTIVES:
            kind = "collective"
        elif opcode in _HOST or any(word in target for word in _CALLBACKS):
            kind = "host"
        elif not kind:
            kind = "kernel" if opcode == "custom-call" else "copy" if _copies(opcode, work) else "vector"
        moved = self._bytes(opcode, rest, shapes)
        stated = _stated_cost(rest)
        if opcode == "custom-call" and stated:
            work.matrix, moved, work.dtype = stated["flops"], stated["bytes_accessed"], _first_dtype(rest, shapes)
        elif kind == "kernel" and target:
            self.uncounted.add(target)
        written = self._written_dtype(rest, shapes) if work.products else ""
        return HloOp(
            name, opcode, kind, times, work.matrix, work.vector, moved,
            dtype=_DTYPES.get(work.dtype, work.dtype or "float32"),
            source=_quoted(rest, "op_name"),
            products=tuple(work.products),
            written_dtype=_DTYPES.get(written, written),
            kernel=re.sub(r"\W", "_", _quoted(rest, "deduplicated_name") or name) if opcode == "fusion" else "",
        )  # fmt: skip

    def _written_dtype(self, rest: str, shapes: dict[str, str]) -> str:
        """The type that a product's operands had before the compiler widened them, as it does on a CPU."""
        narrowest = (math.inf, "")
        for name in operands(rest):
            found = arrays(_type_of(self._before_widening(name, shapes)))
            if found and math.prod(found[0][1]) > 1:
                narrowest = min(narrowest, (found[0][2] / math.prod(found[0][1]), found[0][0]))
        return narrowest[1]

    def _before_widening(self, name: str, shapes: dict[str, str]) -> str:
        rest = shapes.get(name, "")
        call = CALL.search(rest)
        body = [CALL.search(line) for called in CALLED.findall(rest) for _, line in self.bodies.get(called, ())]
        inside = {found.group(1) for found in body if found}
        converts = call is not None and (
            call.group(1) == "convert" or (call.group(1) == "fusion" and inside == {"parameter", "convert"})
        )
        read = operands(rest)
        return shapes.get(read[0], "") if converts and read else rest

    def _count(self, opcode: str, rest: str, shapes: dict[str, str], work: _Work) -> None:
        result = arrays(_type_of(rest))
        size = math.prod(result[0][1]) if result else 0
        if opcode == "dot":
            work.product(_dot(rest, shapes))
        elif opcode == "convolution":
            _convolution(rest, shapes, work)
        elif opcode == "custom-call":
            _library_call(rest, shapes, work)
        elif opcode in ("fusion", "call", "map", "async-start"):
            for called in CALLED.findall(rest):
                self._inside(called, work, size if opcode == "map" else 1)
        elif opcode in ("reduce", "reduce-window", "scatter", "select-and-scatter", "all-reduce", "reduce-scatter"):
            self._reduction(opcode, rest, shapes, work)
        elif opcode == "fft":
            lengths = [int(one) for one in (_braced(rest, "fft_length") or "1").split(",")]
            work.vector += 5.0 * size * sum(math.log2(max(one, 1)) for one in lengths)
        elif opcode == "triangular-solve":
            a, b = _shape(operands(rest)[0], shapes), _shape(operands(rest)[1], shapes)
            work.multiply(float(a[-1]) * math.prod(b), result[0][0], "product")
        elif opcode == "cholesky" and result:
            work.multiply(size * result[0][1][-1] / 3, result[0][0], "product")
        elif opcode in _ELEMENTWISE and result and result[0][0].startswith(_FLOATS):
            work.vector += size

    def _inside(self, computation: str, work: _Work, again: int = 1) -> None:
        shapes = self.shapes.get(computation, {})
        before = work.vector
        for _, rest in self.bodies.get(computation, ()):
            call = CALL.search(rest)
            if call:
                self._count(call.group(1), rest, shapes, work)
        work.vector = before + (work.vector - before) * again

    def _reduction(self, opcode: str, rest: str, shapes: dict[str, str], work: _Work) -> None:
        read = operands(rest)
        if opcode == "reduce-window":
            window = re.search(r"window=\{size=([\dx]+)", rest)
            per_number = math.prod(int(one) for one in window.group(1).split("x")) if window else 1
            numbers = math.prod(arrays(_type_of(rest))[0][1]) * per_number
        elif opcode == "scatter":
            numbers = math.prod(_shape(read[-1], shapes)) if read else 0
        else:
            numbers = math.prod(_shape(read[0], shapes)) if read else 0
        combined = re.search(r"to_apply=%?([\w.\-]+)", rest)
        if combined:
            self._inside(combined.group(1), work, numbers)

    def _bytes(self, opcode: str, rest: str, shapes: dict[str, str]) -> float:
        """Operands read and results written; the slice of what is sliced, the part of what is updated in place."""
        read = operands(rest)
        written = sum(size for _, _, size in arrays(_type_of(rest)))
        if opcode in ("dynamic-slice", "slice", "gather"):
            return 2 * written
        if opcode in ("dynamic-update-slice", "scatter"):
            return 2 * _size(read[1 if opcode == "dynamic-update-slice" else -1], shapes) if len(read) > 1 else written
        if opcode == "fusion":
            called = CALLED.findall(rest)
            if called:
                return self._fusion_bytes(called[0], written)
        if opcode.endswith("-start"):  # it returns its operands beside its results
            return written
        return written + sum(_size(name, shapes) for name in read)

    def _fusion_bytes(self, computation: str, written: float) -> float:
        body = self.bodies.get(computation, [])
        shapes = self.shapes.get(computation, {})
        users: dict[str, list[tuple[str, str, int]]] = {}
        for name, rest in body:
            call = CALL.search(rest)
            for place, operand in enumerate(operands(rest)):
                users.setdefault(operand, []).append((call.group(1) if call else "", name, place))
        moved = 0.0
        updated = 0.0
        for name, rest in body:
            if " parameter(" not in rest:
                continue
            uses = users.get(name, [])
            if uses and all(opcode in ("dynamic-slice", "slice", "gather") and place == 0 for opcode, _, place in uses):
                moved += sum(_size(user, shapes) for _, user, _ in uses)
            elif uses and all(opcode == "dynamic-update-slice" and place == 0 for opcode, _, place in uses):
                updated += _size(name, shapes)
                for _, user, _ in uses:
                    moved += 2 * _size(operands(shapes[user])[1], shapes)
            else:
                moved += _size(name, shapes)
        return moved + max(written - updated, 0.0)


def _type_of(rest: str) -> str:
    call = CALL.search(rest)
    return rest[: call.start()] if call else rest


def _shape(name: str, shapes: dict[str, str]) -> tuple[int, ...]:
    found = arrays(_type_of(shapes.get(name, "")))
    return found[0][1] if found else ()


def _size(name: str, shapes: dict[str, str]) -> float:
    return sum(size for _, _, size in arrays(_type_of(shapes.get(name, ""))))


def _dtype(name: str, shapes: dict[str, str]) -> str:
    found = arrays(_type_of(shapes.get(name, "")))
    return found[0][0] if found else ""


def _first_dtype(rest: str, shapes: dict[str, str]) -> str:
    read = operands(rest)
    return _dtype(read[0], shapes) if read else ""


def _copies(opcode: str, work: _Work) -> bool:
    return opcode in ("copy", "copy-start", "transpose", "reshape", "broadcast", "concatenate") and not work.vector


def _quoted(rest: str, key: str) -> str:
    found = re.search(rf'{key}="([^"]*)"', rest)
    return found.group(1) if found else ""


def _braced(rest: str, key: str) -> str:
    found = re.search(rf"{key}=\{{([\d,]*)\}}", rest)
    return found.group(1) if found else ""


def _branches(rest: str) -> list[str]:
    listed = BRANCHES.search(rest)
    if listed:
        return [one.strip().lstrip("%") for one in listed.group(1).split(",")]
    return re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", rest)


def _dot(rest: str, shapes: dict[str, str]) -> Product:
    left, right = (_shape(name, shapes) for name in operands(rest)[:2])
    summed, batched = (_numbers(_braced(rest, f"lhs_{word}_dims")) for word in ("contracting", "batch"))
    other, other_batched = (_numbers(_braced(rest, f"rhs_{word}_dims")) for word in ("contracting", "batch"))
    return _product(left, right, summed, batched, other, other_batched, _first_dtype(rest, shapes))


def _product(
    left: tuple[int, ...], right: tuple[int, ...], summed: list[int], batched: list[int], other: list[int],
    other_batched: list[int], dtype: str,
) -> Product:  # fmt: skip
    return Product(
        math.prod(left[d] for d in batched),
        math.prod(size for d, size in enumerate(left) if d not in (*summed, *batched)),
        math.prod(size for d, size in enumerate(right) if d not in (*other, *other_batched)),
        math.prod(left[d] for d in summed),
        dtype,
    )


def _numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",") if one]


def _convolution(rest: str, shapes: dict[str, str], work: _Work) -> None:
    read = operands(rest)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", rest)
    result = arrays(_type_of(rest))
    if not labels or len(read) < 2 or not result:
        return
    target = _quoted(rest, "custom_call_target")
    # Which array is the convolution's kernel, and which has one number for each sum, by the pass that it is of.
    if "BackwardFilter" in target:
        kernel, sums = result[0][1], math.prod(_shape(read[1], shapes))
    elif "BackwardInput" in target:
        kernel, sums = _shape(read[1], shapes), math.prod(_shape(read[0], shapes))
    else:
        kernel, sums = _shape(read[1], shapes), math.prod(result[0][1])
    taps = math.prod(kernel) / max(kernel[labels.group(2).index("o")], 1)
    spread = re.search(r"lhs_dilate=([\dx]+)", rest)
    if spread:  # of a spread-out input most taps meet the zeros in between
        taps = taps / math.prod(int(one) for one in spread.group(1).split("x"))
    work.multiply(2.0 * sums * taps, _dtype(read[0], shapes), "convolution")


def _library_call(rest: str, shapes: dict[str, str], work: _Work) -> None:
    """A vendor's library, by what its configuration says of the shapes."""
    target = _quoted(rest, "custom_call_target")
    if "cublas" in target:
        config = _config(rest).get("gemm_backend_config", {})
        numbers = config.get("dot_dimension_numbers", {})
        sides = [
            [int(one) for one in numbers.get(f"{side}_{word}_dimensions", ())]
            for side in ("lhs", "rhs")
            for word in ("contracting", "batch")
        ]
        left, right = (_shape(name, shapes) for name in operands(rest)[:2])
        if numbers:
            work.product(_product(left, right, sides[0], sides[1], sides[2], sides[3], _first_dtype(rest, shapes)))
    elif "cudnn$conv" in target:
        _convolution(rest, shapes, work)
    elif "cudnn$fmha" in target:
        config = _config(rest).get("cudnn_fmha_backend_config", {})
        scores = [int(one) for one in config.get("intermediate_tensor_shape", {}).get("dimensions", ())]
        query = _shape(operands(rest)[0], shapes)
        if scores and query:
            depth = math.prod(query) / max(math.prod(scores[:-1]), 1)
            kept = 0.5 if config.get("mask_type") in ("CAUSAL", "PADDING_CAUSAL") else 1.0
            passes = _FMHA_PRODUCTS["Backward" in target]
            work.multiply(2.0 * passes * kept * math.prod(scores) * depth, _first_dtype(rest, shapes), "attention")


def _config(rest: str) -> dict[str, Any]:
    place = rest.find("backend_config={")
    if place < 0:
        return {}
    try:
        return json.JSONDecoder().raw_decode(rest, place + len("backend_config="))[0]
    except ValueError:  # other backends write other things there
        return {}


def _stated_cost(rest: str) -> dict[str, float] | None:
    """What a Pallas kernel for TPU says of itself: `cost_estimate=`."""
    found = re.search(r'"cost_estimate":\s*(\{[^}]*\})', rest)
    if not found:
        return None
    stated = {key: float(value) for key, value in json.loads(found.group(1)).items()}
    return {"flops": stated.get("flops", 0.0), "bytes_accessed": stated.get("bytes_accessed", 0.0)}
