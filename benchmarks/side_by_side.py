"""What benchmarks of several ops share: rows of programs that are timed beside each other, and the table they make.

A row times what dispatch takes and its peers, interleaved, and holds the figure against the aim. Rates count each
operand and result once, and the operations that the result needs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import fcntl
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from attention_gpu import timed

from capibara.kernels import explain
from capibara.kernels.lab.bench import versions
from capibara.kernels.lab.tuning import failures


@dataclasses.dataclass
class Row:
    """One thing to time: `programs` by name, ours first, all on the same arrays.

    With `calls`, a program is that many calls, each on arrays of its own: where a call takes the device less time than
    it takes the host to launch, one call alone would time the host.
    """

    part: str
    what: str
    draw: Callable[[], Sequence[Any]]
    programs: dict[str, Callable[..., Any]]
    work: float  # bytes or operations
    unit: str  # "GB/s", "TFLOP/s" or "ms"
    aim: str = ""
    check: Callable[[Sequence[Any], dict[str, Any]], dict[str, Any]] | None = None
    calls: int = 1
    ours: tuple[str, ...] = ("dispatch",)
    """The programs that are no peers."""
    jobs: dict[str, Any] = dataclasses.field(default_factory=dict)


def taken(row: Row, structs: Sequence[Any]) -> str:
    found = explain(row.programs["dispatch"], *structs).selections
    # A scan's plan stands among the ops that it runs.
    names = [f"{s.call.op.name}:{s.implementation}" if hasattr(s, "call") else f"scan:{s.path}" for s in found]
    return "+".join(dict.fromkeys(names))


def repeated(fn: Callable[..., Any], calls: int) -> Callable[..., Any]:
    if calls == 1:
        return fn

    def many(*arrays: Any) -> Any:
        each = len(arrays) // calls
        return [fn(*arrays[i * each : (i + 1) * each]) for i in range(calls)]

    return many


def prepare(pool: ThreadPoolExecutor, row: Row, structs: Sequence[Any]) -> None:
    for who, fn in row.programs.items():
        try:
            row.jobs[who] = pool.submit(jax.jit(repeated(fn, row.calls)).lower(*structs * row.calls).compile)
        except failures() as failure:
            row.jobs[who] = failure


def measure(row: Row, structs: Sequence[Any]) -> dict[str, Any]:
    arrays, ready, notes, outs = list(row.draw()), {}, {}, {}
    # Copies: a program is not to see that its calls are on the same arrays.
    arrays += [jax.numpy.array(x, copy=True) for _ in range(row.calls - 1) for x in arrays]
    for who, job in row.jobs.items():
        try:
            if not isinstance(job, Future):
                raise job
            ready[who] = job.result()
            outs[who] = jax.block_until_ready(ready[who](*arrays))
        except failures() as failure:
            notes[who] = str(failure).splitlines()[0][:200]
            ready.pop(who, None)
    found = row.check(arrays, outs) if row.check and "dispatch" in outs else {}
    outs.clear()
    seconds = {who: s / row.calls for who, s in timed(ready, arrays).items()}
    scale = {"GB/s": 1e9, "TFLOP/s": 1e12}.get(row.unit)
    figures = {who: s * 1e3 if scale is None else row.work / s / scale for who, s in seconds.items()}
    peers = [s for who, s in seconds.items() if who not in row.ours]
    memory = {who: fn.memory_analysis().temp_size_in_bytes for who, fn in ready.items()}
    result = {
        "part": row.part, "what": row.what, "aim": row.aim, "calls_a_program": row.calls,
        "dispatch_takes": taken(row, structs), "unit": row.unit, "figures": figures,
        "microseconds": {who: s * 1e6 for who, s in seconds.items()},
        "times_as_fast_as_best_peer": {who: min(peers) / s for who, s in seconds.items()} if peers else {},
        "temporary_bytes": memory, "notes": notes, **found,
    }  # fmt: skip
    shown = "  ".join(
        f"{who} {figures[who]:.4g} ({min(peers) / seconds[who]:.2f}x, {memory[who] / 2**20:.0f} MiB)"
        for who in figures
        if peers
    )
    print(f"{row.what:58} {row.unit:8} {shown}  aim {row.aim or '-'}  {found or ''} {notes or ''}", flush=True)
    return result


@contextlib.contextmanager
def turn(lock: str | None, alone: bool) -> Iterator[None]:
    """Among the runs that were given the same file: alone on the device, or beside others that compile."""
    if lock is None:
        yield
        return
    with open(lock, "w", encoding="utf-8") as held:
        fcntl.flock(held, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


def main(description: str | None, parts: Mapping[str, Callable[[bool], list[Row]]]) -> None:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--only", help="parts, separated by commas")
    parser.add_argument("--lock", help="a file: runs that share it compile side by side and take turns on the device")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to see that it runs")
    options = parser.parse_args()
    chosen = options.only.split(",") if options.only else list(parts)
    document: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "versions": versions(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "rows": [],
    }
    with ThreadPoolExecutor(14) as pool:
        rows = [row for name in chosen for row in parts[name](options.small)]
        shapes = [[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in jax.eval_shape(row.draw)] for row in rows]
        with turn(options.lock, alone=False):
            for row, structs in zip(rows, shapes, strict=True):
                prepare(pool, row, structs)
            # Everything compiles while nothing is timed.
            for row in rows:
                for job in row.jobs.values():
                    if isinstance(job, Future):
                        job.exception()
        for row, structs in zip(rows, shapes, strict=True):
            with turn(options.lock, alone=True):
                document["rows"].append(measure(row, structs))
            if options.json:
                with open(options.json, "w", encoding="utf-8") as out:
                    json.dump(document, out, indent=1)
