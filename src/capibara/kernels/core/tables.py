"""Tuned choices as data: shipped tables for each chip and op, and the user's own cache on top.

A table is JSON: one entry a call that was measured, naming the fastest implementation, its config and the
time. A call finds its own entry, or the nearest one whose every dimension is within a factor of two; of the shipped
ones that are near only the config, made for the call (`Implementation.for_call`): on shapes between them another
implementation was often the faster. A cache that cannot be read is set aside with a warning, and rebuilt by the next
`tune`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capibara.kernels.core.spec import Call, Config, describe
from capibara.lru import LRU

if TYPE_CHECKING:
    from capibara.kernels.core.op import Op

FORMAT = 2
# What implementations were called in tables of format 1.
_FORMER_NAMES = {
    "mosaic_gpu": "hopper",
    "mosaic_gpu_long": "hopper_long",
    "mosaic_gpu_pairs": "hopper_pairs",
    "winograd4_gpu": "hopper",
    "winograd2": "xla_winograd2",
    "winograd4": "xla_winograd4",
    "winograd6": "xla_winograd6",
    "xla_chunked": "xla",
    "composed": "xla",
    "matmul": "xla_matmul",
    "packed": "xla_packed",
    "direct": "xla_direct",
    "fft": "xla_fft",
    "ring": "xla_ring",
    "ring_two_way": "xla_ring_two_way",
}
SHIPPED = Path(__file__).parents[1] / "tuned"

_loaded: LRU[tuple[str, str], list[Entry]] = LRU(1024)
_generation = 0


@dataclasses.dataclass(frozen=True)
class Entry:
    """One implementation's measured best for one call."""

    operands: tuple[str, ...]  # "bf16[4096,4096]", "-" for an absent one
    params: Mapping[str, Any]  # those that differ from the op's defaults
    implementation: str
    config: Mapping[str, Any] | None
    seconds: float
    evidence: str  # device, versions and date of the measurement
    source: str = "shipped"

    def as_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "source"}


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What a table says about a call."""

    implementation: str
    config: Config
    why: str
    exact: bool
    """Of this very call, not of a near one."""


def generation() -> int:
    """Grows whenever a table changes, so that decisions taken from an older one are taken again."""
    return _generation


def forget() -> None:
    """Drop what was read from disk; the next lookup reads again."""
    global _generation
    _loaded.clear()
    _generation += 1


def cache_directory() -> Path:
    """Where the user's tables live: $CAPIBARA_CACHE_DIR, else the platform's cache folder."""
    chosen = os.environ.get("CAPIBARA_CACHE_DIR")
    if chosen:
        return Path(chosen) / "tuned"
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "capibara" / "tuned"


def slug(device_kind: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", device_kind.lower()).strip("_")


def find(call: Call, accepting: Sequence[str], *, to_configure: bool = False) -> Tuned | None:
    """The table's choice among the implementations that accept this call; None when no entry speaks for it. What runs
    finds its config in shipped entries of near calls too (`to_configure`)."""
    operands, params = tuple(map(describe, call.args)), _jsonable(call.tuning_key)
    kin = call.op.exact(_shapes(call.op, operands))
    near: list[tuple[float, Entry]] = []
    for entry in entries(call.target.device_kind, call.op.name):
        if entry.implementation in accepting and _jsonable(entry.params) == params:
            distance = _distance(entry.operands, operands)
            speaks = distance == 0 or entry.source == "user's" or to_configure
            if distance is not None and speaks and call.op.exact(_shapes(call.op, entry.operands)) == kin:
                near.append((distance, entry))
    # The nearest call speaks; of two as near the user's own; of one call's implementations the fastest.
    for distance, entry in sorted(near, key=lambda pair: (pair[0], pair[1].source != "user's", pair[1].seconds)):
        impl = call.op.implementations[entry.implementation]
        config: Config = None
        if entry.config is not None and impl.config_type is not None:
            try:
                config = impl.config_type(**entry.config)
            except (TypeError, ValueError):
                continue  # an entry written for other config fields has nothing to say
        exact = "this call" if distance == 0 else f"the near case {' '.join(entry.operands)}"
        measured = f"{entry.seconds * 1e6:.1f} µs; {entry.evidence}"
        why = f"the {entry.source} table measured it fastest for {exact} ({measured})"
        return Tuned(entry.implementation, config, why, exact=distance == 0)
    return None


def has_own(call: Call, evidence: str) -> bool:
    """Whether the user's own table has an answer to this very call, with `evidence` in what it says of itself."""
    operands, params = tuple(map(describe, call.args)), _jsonable(call.tuning_key)
    return any(
        entry.source == "user's" and entry.operands == operands and _jsonable(entry.params) == params
        for entry in entries(call.target.device_kind, call.op.name)
        if evidence in entry.evidence
    )


def table_path(root: Path, device_kind: str, op: str) -> Path:
    return root / slug(device_kind) / f"{op}.json"


def store(call: Call, entry: Entry, path: Path | None = None) -> Path:
    """Write one entry into the user's cache (or the table at `path`), replacing this implementation's for the call.

    A reader never sees half a file, and of two processes that store at once neither loses its entry.
    """
    global _generation
    path = path or table_path(cache_directory(), call.target.device_kind, call.op.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _writing(path):
        kept = [
            e
            for e in _read(path, "user's")
            if (e.operands, e.implementation, _jsonable(e.params))
            != (entry.operands, entry.implementation, _jsonable(entry.params))
        ]
        write(path, call.op.name, call.target.device_kind, [*kept, entry])
    _loaded.pop((call.target.device_kind, call.op.name))
    _generation += 1
    return path


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Holds other writers off. The folder is locked, since the table's own file is replaced."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def write(path: Path, op: str, device_kind: str, rows: Sequence[Entry]) -> None:
    document = {
        "format": FORMAT,
        "op": op,
        "device_kind": device_kind,
        "entries": [
            e.as_dict() for e in sorted(rows, key=lambda e: (e.operands, sorted(map(str, e.params.items())), e.seconds))
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            json.dump(document, out, indent=1, ensure_ascii=False)
            out.write("\n")
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def entries(device_kind: str, op: str) -> list[Entry]:
    """Everything tuned for an op on a chip, the user's own first."""
    key = (device_kind, op)
    rows = _loaded.get(key)
    if rows is None:
        mine = _read(table_path(cache_directory(), device_kind, op), "user's")
        rows = _loaded[key] = mine + _read(table_path(SHIPPED, device_kind, op), "shipped")
    return rows


def _read(path: Path, source: str) -> list[Entry]:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return []
    try:
        document = json.loads(raw.decode("utf-8"))
        if document["format"] not in (1, FORMAT):
            raise ValueError(f"format {document['format']}, this version reads 1 and {FORMAT}")
        renamed = _FORMER_NAMES if document["format"] == 1 else {}
        return [
            Entry(
                operands=tuple(e["operands"]),
                params=dict(e["params"]),
                implementation=renamed.get(e["implementation"], str(e["implementation"])),
                config=None if e["config"] is None else dict(e["config"]),
                seconds=float(e["seconds"]),
                evidence=str(e["evidence"]),
                source=source,
            )
            for e in document["entries"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        told = f"The {source} tuning table {path} cannot be read ({type(error).__name__}: {error})"
        if source == "shipped":  # part of the installation: not ours to move
            warnings.warn(f"{told}. Dispatch goes on by rule; reinstall capibara to mend it.", stacklevel=2)
        else:
            aside = path.with_suffix(".corrupt")
            os.replace(path, aside)
            warnings.warn(
                f"{told}. It was moved to {aside.name}; dispatch goes on by rule, and "
                f"`capibara kernels tune` writes a new one.",
                stacklevel=2,
            )
        return []


_OPERAND = re.compile(r"^(?P<dtype>\w+)\[(?P<dims>[\d,]*)\]$")


def _shapes(op: Op, operands: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """The shapes of the operands that are present, by name."""
    found = {name: _OPERAND.match(text) for name, text in zip(op.operands, operands, strict=False)}
    return {name: tuple(map(int, m["dims"].split(","))) if m["dims"] else () for name, m in found.items() if m}


def _distance(ours: tuple[str, ...], theirs: tuple[str, ...]) -> float | None:
    """The largest ratio (in powers of two) between two calls' dimensions; None beyond 2x, or other types."""
    if len(ours) != len(theirs):
        return None
    worst = 0.0
    for left, right in zip(ours, theirs, strict=True):
        if left == right:
            continue
        a, b = _OPERAND.match(left), _OPERAND.match(right)
        if a is None or b is None or a["dtype"] != b["dtype"]:
            return None
        left_dims, right_dims = (m["dims"].split(",") if m["dims"] else [] for m in (a, b))
        if len(left_dims) != len(right_dims):
            return None
        for x, y in zip(left_dims, right_dims, strict=True):
            if int(x) == 0 or int(y) == 0:
                return None
            worst = max(worst, abs(math.log2(int(x) / int(y))))
    return worst if worst <= 1 else None


def _jsonable(params: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(dict(params), sort_keys=True, default=str))
