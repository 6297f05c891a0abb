"""Two starts of one training command with one cache: what the second compiles, and what its first step waits for.

    python benchmarks/compile_cache.py [--preset small] [--batch-size 1] [--sequence-length 256] [--starts 3]
        [--first-step-only] [--json PATH]

The promise: the second start compiles nothing, and begins its first step within the time of tracing and two seconds.
It is made several times, each with the load of the machine beside it, and beside each time of the wall clock the CPU
seconds of the command's thread, which others on the machine do not stretch: in all, and in tracing. The clock is the
command's own: what it imports before is not in it, what it imports later (the reader of the data, the optimizer) is.
Python's bytecode is kept between starts, as it is wherever the package's folder can be written to. The package must not
change between starts: programs with its kernels are known by its source. A CPU takes minutes for a step of the preset's
own batch, so that it is small by default; on a GPU give 16 and 2048.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from datetime import date
from pathlib import Path
from typing import Any

import jax

MARGIN_S = 2.0


def started(words: argparse.Namespace, folder: Path, name: str) -> dict[str, Any]:
    settings = (
        "train.steps=2",
        f"train.batch_size={words.batch_size}",
        f"train.sequence_length={words.sequence_length}",
    )
    words_of_child = ["--child", words.preset, str(folder / name), *(["--first-step-only"] * words.first_step_only)]
    kept = {"CAPIBARA_CACHE_DIR": str(folder / "cache"), "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}
    load = os.getloadavg()[0]
    ran = subprocess.run(
        [sys.executable, __file__, *words_of_child, *settings],
        env={**{key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}, **kept},
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        raise SystemExit(ran.stderr)
    summary = json.loads(ran.stdout)
    row = {"load": load, **{key: summary[key] for key in ("first_step", "compiled", "from_disk") if key in summary}}
    step = row["first_step"]
    row.setdefault("compiled", step["compiled"])
    row.setdefault("from_disk", step["from_disk"])
    print(
        f"{name}: {row['compiled']} compiled, {row['from_disk']} from disk; first step begun after "
        f"{step['seconds']:.1f} s ({step['cpu_seconds']:.1f} of the CPU), of which tracing "
        f"{step['trace_seconds']:.1f} s ({step['trace_cpu_seconds']:.1f} of the CPU), "
        f"compiling or reading {step['compile_seconds']:.1f} s; load {load:.1f}",
        flush=True,
    )
    return row


def over(row: dict[str, Any], kind: str = "seconds") -> float:
    """Seconds beyond what was promised, of the wall clock or "cpu_seconds"; negative where it was kept."""
    return row["first_step"][kind] - row["first_step"][f"trace_{kind}"] - MARGIN_S


def child(preset: str, out: str, settings: list[str], first_step_only: bool) -> None:
    """The command in this process, with the CPU seconds that its thread traces for."""
    from jax._src import dispatch

    from capibara.cli import train as command

    here, spent = threading.get_ident(), [0.0]
    open_spans: list[float] = []
    spans: Any = dispatch.LogElapsedTimeContextManager  # around each tracing, lowering and compiling; they nest
    enter, leave, begun = spans.__enter__, spans.__exit__, command._begun

    def entered(self: Any) -> Any:
        if threading.get_ident() == here:
            open_spans.append(time.thread_time())
        return enter(self)

    def left(self: Any, *error: Any) -> Any:
        if threading.get_ident() == here:
            started = open_spans.pop()
            if not open_spans and "backend_compile" not in str(self.event):
                spent[0] += time.thread_time() - started
        return leave(self, *error)

    def told(*args: Any) -> dict[str, Any]:
        row = {**begun(*args), "trace_cpu_seconds": spent[0]}
        if first_step_only:
            print(json.dumps({"first_step": row}), flush=True)
            os._exit(0)
        return row

    spans.__enter__, spans.__exit__, command._begun = entered, left, told
    command.train(preset, settings, Path(out), resume=False, processes=1, devices=None, json=True)


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        preset, out, *rest = sys.argv[2:]
        child(preset, out, [word for word in rest if not word.startswith("--")], "--first-step-only" in rest)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--starts", type=int, default=3, help="with what the first one left")
    parser.add_argument("--first-step-only", action="store_true", help="end each start there, to save time")
    parser.add_argument("--json", type=Path)
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        first = started(words, Path(folder), "first start")
        second = [started(words, Path(folder), f"second start {number}") for number in range(1, words.starts + 1)]
    verdicts = {
        kind: [
            "met" if row["compiled"] == 0 and over(row, kind) <= 0
            else f"missed: {row['compiled']} compiled, {over(row, kind):.1f} s over"
            for row in second
        ]
        for kind in ("seconds", "cpu_seconds")
    }  # fmt: skip
    for kind, said in verdicts.items():
        print(f"nothing compiled, and the first step within tracing and {MARGIN_S:.0f} s, by {kind}: {'; '.join(said)}")
    if words.json:
        document = {
            "date": date.today().isoformat(),
            "device": f"{jax.devices()[0].device_kind}, {platform.machine()}, {os.cpu_count()} cores",
            "jax": jax.__version__,
            "python": platform.python_version(),
            "command": f"python benchmarks/compile_cache.py --preset {words.preset} --batch-size {words.batch_size} "
            f"--sequence-length {words.sequence_length} --starts {words.starts}"
            f"{' --first-step-only' * words.first_step_only} --json PATH",
            "verdicts": verdicts,
            "first_start": first,
            "second_starts": second,
        }
        words.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
