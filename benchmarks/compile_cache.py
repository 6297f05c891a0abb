"""Two starts of one training command with one cache: what the second compiles, and what its first step waits for.

    python benchmarks/compile_cache.py [--preset small] [--batch-size 1] [--sequence-length 256] [--starts 3]
        [--json PATH]

The promise: the second start compiles nothing, and begins its first step within the time of tracing and two seconds.
It is made several times, each with the load of the machine beside it and the CPU seconds of the command's thread, which
others on the machine do not stretch. The clock is the command's own: what it imports before is not in it, what it
imports later (the reader of the data, the optimizer) is. Python's bytecode is kept between starts, as it is wherever
the package's folder can be written to. A CPU takes minutes for a step of the preset's own batch, so that it is small by
default; on a GPU give 16 and 2048.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
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
    kept = {"CAPIBARA_CACHE_DIR": str(folder / "cache"), "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}
    load = os.getloadavg()[0]
    ran = subprocess.run(
        [sys.executable, "-m", "capibara", "train", words.preset, "--out", str(folder / name), "--json"]
        + [word for setting in settings for word in ("--set", setting)],
        env={**{key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}, **kept},
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        raise SystemExit(ran.stderr)
    summary = json.loads(ran.stdout)
    row = {"load": load, **{key: summary[key] for key in ("first_step", "compiled", "from_disk")}}
    step = row["first_step"]
    print(
        f"{name}: {row['compiled']} compiled, {row['from_disk']} from disk; first step begun after "
        f"{step['seconds']:.1f} s ({step['cpu_seconds']:.1f} s of the thread's own), of which tracing "
        f"{step['trace_seconds']:.1f} s, compiling or reading {step['compile_seconds']:.1f} s; load {load:.1f}",
        flush=True,
    )
    return row


def over(row: dict[str, Any]) -> float:
    """Seconds beyond what was promised; negative where it was kept."""
    return row["first_step"]["seconds"] - row["first_step"]["trace_seconds"] - MARGIN_S


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--starts", type=int, default=3, help="with what the first one left")
    parser.add_argument("--json", type=Path)
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        first = started(words, Path(folder), "first start")
        second = [started(words, Path(folder), f"second start {number}") for number in range(1, words.starts + 1)]
    verdicts = [
        "met" if row["compiled"] == 0 and over(row) <= 0 else f"missed: {row['compiled']} compiled, {over(row):.1f} s"
        for row in second
    ]
    print(f"nothing compiled, and the first step within tracing and {MARGIN_S:.0f} s: {'; '.join(verdicts)}")
    if words.json:
        document = {
            "date": date.today().isoformat(),
            "device": f"{jax.devices()[0].device_kind}, {platform.machine()}, {os.cpu_count()} cores, shared",
            "jax": jax.__version__,
            "python": platform.python_version(),
            "command": f"python benchmarks/compile_cache.py --preset {words.preset} --batch-size {words.batch_size} "
            f"--sequence-length {words.sequence_length} --starts {words.starts} --json PATH",
            "verdicts": verdicts,
            "first_start": first,
            "second_starts": second,
        }
        words.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
