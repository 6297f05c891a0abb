"""Why a case failed, from what jax and the TPU compiler throw."""

from __future__ import annotations

import re
import sys
from typing import NamedTuple

from capibara.compile.report import ErrorKind

__all__ = ["OverLimit", "asked_bytes", "classify", "over_limit", "thrown_by_compilers", "useful_lines"]

# Tracing runs the caller's code, so anything that a mistake in it raises is a failed case, not a failed tool.
_PYTHON_ERRORS: tuple[type[BaseException], ...] = (
    ValueError,
    TypeError,
    RuntimeError,  # NotImplementedError and jax.errors.JaxRuntimeError are RuntimeErrors
    ArithmeticError,
    LookupError,
    AttributeError,
    AssertionError,
    NameError,
    ImportError,
)

# Compiler errors that derive from Exception alone. Whoever raised one has imported its module, so they are
# looked up among the loaded modules, which costs nothing and works when a release moves one away.
_COMPILER_ERRORS = (
    ("jax.experimental.pallas.tpu", "LoweringException"),
    ("jax._src.pallas.mosaic.error_handling", "MosaicError"),
    ("jax._src.pallas.mosaic_gpu.lowering", "LoweringError"),
    ("jax._src.pallas.triton.lowering", "LoweringError"),
    ("jax.experimental.mosaic.gpu.fragmented_array", "UnsupportedTransferError"),
    ("jax.experimental.mosaic.gpu.fragmented_array", "TransferPlanDerivationError"),
    ("jax._src.core", "ShardingTypeError"),
    ("jaxlib.mlir.ir", "MLIRError"),
)


def thrown_by_compilers() -> tuple[type[BaseException], ...]:
    """What to catch around tracing, lowering and compiling. Call it in the `except` clause itself."""
    found = [getattr(sys.modules.get(module), name, None) for module, name in _COMPILER_ERRORS]
    return (*_PYTHON_ERRORS, *(error for error in found if isinstance(error, type)))


_KINDS: tuple[tuple[ErrorKind, re.Pattern[str]], ...] = (
    ("vmem_oom", re.compile(r"VmemOom|memory space vmem|would exceed memory.*space\s*=\s*vmem", re.I | re.S)),
    ("smem_oom", re.compile(r"SmemOom|memory space smem|would exceed memory.*space\s*=\s*smem", re.I | re.S)),
    ("hbm_oom", re.compile(r"HbmOom|memory space hbm|exceeds available HBM|Exceeded hbm capacity", re.I)),
    ("lowering", re.compile(r"Mosaic|Pallas|MLIR|failed to legalize|Unimplemented primitive|E2\d\d\d:")),
)


def classify(text: str, *, lowering: bool) -> ErrorKind:
    """The kind of an error from its text; `lowering` says that it came up before the compiler was called."""
    for kind, pattern in _KINDS:
        if pattern.search(text):
            return kind
    return "lowering" if lowering else "other"


class OverLimit(NamedTuple):
    """How much a program asked of a memory, and how much there was."""

    used_bytes: int
    limit_bytes: int


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)\s*([KMGT]?)(?:i?B|\b)"
_OVER = (
    re.compile(rf"allocation with size {_SIZE} and limit {_SIZE}", re.I),
    re.compile(rf"Used {_SIZE} of {_SIZE}", re.I),
    re.compile(rf"memory required for HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)", re.I),
    re.compile(r"Allocation \(size=([\d.]+)()\) would exceed memory \(size=([\d.]+)()\)", re.I),
)


def over_limit(text: str) -> OverLimit | None:
    """The two sizes in an out-of-memory message, when it names them."""
    for pattern in _OVER:
        if found := pattern.search(text):
            used, used_unit, limit, limit_unit = found.groups()
            return OverLimit(_bytes(used, used_unit), _bytes(limit, limit_unit))
    return None


_ASKED = re.compile(rf"(?:allocating|to allocate|to reserve) {_SIZE}", re.I)


def asked_bytes(text: str) -> int | None:
    """What an allocator was asked for when it had no more, where its message says it.

    >>> asked_bytes("RESOURCE_EXHAUSTED: Out of memory allocating 4096 bytes.")
    4096
    >>> asked_bytes("RESOURCE_EXHAUSTED: Attempting to allocate 1.50G. That was not possible.")
    1610612736
    """
    found = _ASKED.search(text)
    return None if found is None else _bytes(*found.groups())


def _bytes(number: str, unit: str) -> int:
    return round(float(number.rstrip(".")) * _UNITS[unit.upper()])


_NOISE = re.compile(
    r"^(Traceback \(most recent|-{8,}$|={8,}$|\^+$|jax\.errors\.SimplifiedTraceback|The stack trace below)"
)


def useful_lines(text: str, *, limit: int = 12, width: int = 800) -> str:
    """The first lines that say something; Mosaic errors carry the whole module behind them."""
    lines = [line.rstrip() for line in text.splitlines()]
    kept = [line for line in lines if line.strip() and not _NOISE.match(line.strip())]
    shown = [line if len(line) <= width else line[: width - 1] + "…" for line in kept[:limit]]
    if len(kept) > limit:
        shown.append(f"… and {len(kept) - limit} more lines")
    return "\n".join(shown)
