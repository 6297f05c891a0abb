"""Schedule lengths and memory from a libtpu dump.

Three files a kernel are read when they are there, each by a function that returns nothing rather than guess:
`schedule-analysis_final_bundles` (totals), `final_bundles` (the instructions, and the totals again when the
first is missing) and `final_hlo-static-per-bundle-utilization` (issue slots). The formats are libtpu's own
and undocumented: every pattern is a constant at the top.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from capibara.compile.dump import DumpFile, by_program, dump_files
from capibara.compile.report import RUNTIME_KIND, KernelSchedule

__all__ = ["instruction_counts", "schedule_lengths", "slot_counts", "vmem_allocated"]

_ANALYSIS = "schedule-analysis_final_bundles"
_BUNDLES = "final_bundles"
_UTILIZATION = ("final_hlo-static-per-bundle-utilization", "pre-delay_hlo-static-per-bundle-utilization")
# Listings that declare the kernel's memory, the latest pass first: spill slots appear only late.
_DECLARATIONS = ("final_bundles", "post-delay-converter", "post-ra", "packed-bundles-post-ra", "original")

_TOTAL = re.compile(r"(?<!\w)total\s+(?:scheduled\s+)?bundles\s*[:=]\s*(\d+)", re.I)
_EMPTY = re.compile(r"^\s*empty\s+(?:scheduled\s+)?bundles\s*[:=]\s*(\d+)", re.I | re.M)
_OPCODE = re.compile(r"\[opcode\]\s*([\d.]+)\s+(?:scheduled\s+)?bundles\s*\([^)]*\)\s*:\s*([\w-]+)", re.I)
# `0x1f   :  { ... }`, with marks of loop depth and of branch targets between the address and the brace.
_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|\d+)\b\s*(?:[A-Z]+\s*)?:[^{\n]*\{", re.M | re.I)
_COMMENT = re.compile(r"/\*.*?\*/", re.S)
_INSTRUCTION = re.compile(r"%[\w.$-]+\s*=\s*([a-z][a-z0-9_]*)")
_ALLOCATION = re.compile(
    r"#(allocation[\w.-]*)\s*\[[^\]\n]*?shape\s*=\s*'[^']*'[^\]\n]*?space\s*=\s*(\w+)[^\]\n]*?size\s*=\s*(0x[0-9a-f]+|\d+)",
    re.I,
)
_UNKNOWN_SIZE = 0xFFFFFFFFFFFFFFFF
_RUNTIME_PROGRAM = re.compile(r"^(TLP\b|<.*>$|late-(initialization|finalization)|_?late_)")


def schedule_lengths(dump_dir: Path | str, *, ignore: Iterable[Path] = ()) -> list[KernelSchedule]:
    """One schedule for every program in the dump, in the order libtpu compiled them.

    Args:
      dump_dir: what `--xla_jf_dump_to` named.
      ignore: files to leave out: those that were there before the compilation of interest.
    """
    programs = by_program(dump_files(dump_dir, ignore=ignore))
    return [_schedule(name, passes) for name, passes in programs.items()]


def _schedule(name: str, passes: Mapping[str, DumpFile]) -> KernelSchedule:
    analysis, listing = _text(passes, _ANALYSIS), _COMMENT.sub(" ", _text(passes, _BUNDLES))
    total = _first_int(_TOTAL, analysis)
    if total is None:
        total = len(_BUNDLE.findall(listing)) or None
    slots: Mapping[str, int] = {}
    for label in _UTILIZATION:
        slots = slots or slot_counts(_text(passes, label))
    vmem = None
    for label in _DECLARATIONS:
        if vmem is None:
            vmem = vmem_allocated(_text(passes, label))
    return KernelSchedule(
        name=name,
        bundles=total,
        empty_bundles=_first_int(_EMPTY, analysis),
        kind=_kind(name, analysis),
        slots=slots,
        ops=instruction_counts(listing),
        vmem_bytes=vmem,
    )


def _kind(name: str, analysis: str) -> str | None:
    if _RUNTIME_PROGRAM.match(name):
        return RUNTIME_KIND
    weights: Counter[str] = Counter()
    for bundles, opcode in _OPCODE.findall(analysis):
        weights[opcode] += round(float(bundles) * 100)
    # Inside a fusion the rows name the fused operations; only a Pallas kernel names itself.
    return "custom-call" if weights and weights.most_common(1)[0][0] == "custom-call" else None


def instruction_counts(listing: str) -> dict[str, int]:
    """Instructions of a `final_bundles` listing by mnemonic, most frequent first."""
    code = _COMMENT.sub(" ", listing)
    start = _BUNDLE.search(code)
    counts = Counter(_INSTRUCTION.findall(code, start.start())) if start else Counter()
    return dict(counts.most_common())


def slot_counts(table: str) -> dict[str, int]:
    """Issue slots used, by unit: the columns of a per-bundle utilization table, added up."""
    head, mark, body = table.partition("== UTILIZATION")
    names = next((line for line in head.splitlines() if re.match(r"\s*[A-Z][\w:]*\s*,", line)), "")
    if not mark or not names:
        return {}
    units = [unit.strip() for unit in names.split(",")]
    totals = [0] * len(units)
    for line in body.splitlines():
        cells = line.split()
        if len(cells) == len(units) and all(cell.isdigit() for cell in cells):
            totals = [total + int(cell) for total, cell in zip(totals, cells, strict=True)]
    return dict(zip(units, totals, strict=True)) if any(totals) else {}


def vmem_allocated(listing: str) -> int | None:
    """Bytes of VMEM that a listing declares, each allocation once; None when one has no size."""
    sizes: dict[str, int] = {}
    for name, space, size in _ALLOCATION.findall(listing):
        if space.lower() == "vmem":
            sizes[name] = int(size, 0)
    if not sizes or _UNKNOWN_SIZE in sizes.values():
        return None
    return sum(sizes.values())


def _text(passes: Mapping[str, DumpFile], label: str) -> str:
    return passes[label].path.read_text(encoding="utf-8", errors="replace") if label in passes else ""


def _first_int(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return int(found[1]) if found else None
