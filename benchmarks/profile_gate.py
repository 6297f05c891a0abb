"""How often `capibara profile --against` catches one operation that was made slower, and how often it is quiet.

    python benchmarks/profile_gate.py --out gate.json              # on a GPU: a tenth more work in one operation
    python benchmarks/profile_gate.py --cpu --out gate.json        # on a CPU: half as much again; about ten minutes
    python benchmarks/profile_gate.py --cpu --bases 1 --pairs 1    # that it runs
    python benchmarks/profile_gate.py --one-process --bases 2 --pairs 10 --seconds 90    # on a GPU, in little time

Every base and every comparison is a process of its own: several bases, and against each of them runs of the same
program, in turn with runs of one in which one operation of five has more work, a product or a pass over an array. Each
comparison has the load of the machine beside it.

Most of such a process is starting it, and compiling the program anew in every repeat. With --one-process all are taken
in this one, by the same code, with compiled programs kept in a folder: seconds a comparison, but processes that chose
other kernels for equal programs are not among what it sees. With --seconds no comparison is begun after so many; what
was done is told.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import jax

SLOWED = ("head", "exponentials")

PROGRAM = """
import sys
import jax
import jax.numpy as jnp

size, head, rows, steps = map(int, sys.argv[1:])
x = jnp.ones((size, size))
w = jnp.ones((size, head))
wide = jnp.ones((rows, 1024))


@jax.jit
def step(x, w, wide):
    with jax.named_scope("body"):
        y = x @ x
    with jax.named_scope("query"):
        query = y @ x
    with jax.named_scope("head"):
        head = y @ w
    with jax.named_scope("exponentials"):
        total = jnp.sum(jnp.exp(wide) * jnp.tanh(wide), axis=1)
    with jax.named_scope("order"):
        order = jnp.sort(x[:64], axis=1)
    return query, head, total, order


for _ in range(steps):
    result = step(x, w, wide)
jax.block_until_ready(result)
"""


def _in_a_process(script: Path, numbers: list[str], options: list[str]) -> tuple[int, Any]:
    command = [sys.executable, "-m", "capibara", "profile", str(script), *numbers, "--json", *options]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return ended.returncode, json.loads(ended.stdout)


def _here(script: Path, numbers: list[str], options: list[str]) -> tuple[int, Any]:
    """The same command in this process."""
    from typer.testing import CliRunner

    from capibara.cli.main import app

    ended = CliRunner().invoke(app, ["profile", str(script), *numbers, "--json", *options])
    return ended.exit_code, json.loads(ended.stdout)


def gate(
    tiny: bool, bases: int, pairs: int, repeats: int = 8, *, one_process: bool = False, seconds: float = math.inf
) -> dict[str, Any]:
    """Quiet and caught, of so many pairs against each of so many bases; `tiny` is for a CPU."""
    begun = time.monotonic()
    # On a GPU a tenth more is again a multiple of 128: of other sizes a product takes longer than its work does.
    size, rows, steps = (512, 1000, 30) if tiny else (5120, 64000, 50)
    more = 1.5 if tiny else 1.1
    comparisons = []
    with tempfile.TemporaryDirectory() as folder:
        script, base = Path(folder) / "steps.py", Path(folder) / "base.json"
        script.write_text(PROGRAM, encoding="utf-8")
        if one_process:
            from capibara.cli.profile import _without_command_buffers
            from capibara.compile import persistent_cache

            _without_command_buffers()  # before anything asks jax for its devices
            persistent_cache(Path(folder) / "programs")

        def run(slowed: str, *options: str) -> tuple[int, Any]:
            head = int(size * more) if slowed == "head" else size
            long = int(rows * more) if slowed == "exponentials" else rows
            numbers = [str(one) for one in (size, head, long, steps)]
            return (_here if one_process else _in_a_process)(script, numbers, list(options))

        for _ in range(bases):
            if time.monotonic() - begun >= seconds:
                break
            base.write_text(json.dumps(run("", "--repeats", str(repeats))[1]), encoding="utf-8")
            for number in range(pairs):
                for slowed in ("", SLOWED[number % len(SLOWED)]):
                    if time.monotonic() - begun >= seconds:
                        break
                    code, document = run(slowed, "--against", str(base))
                    told = document["against"]
                    comparisons.append(
                        {"slowed": slowed, "exit_code": code, "load": os.getloadavg()[0], "pace": told["pace"],
                         "judged": told["judged"], "new": told["new"],
                         "ratios": _ratios(base, document),
                         "named": [(one["op"], one["slower_by"]) for one in told["slower"]]}
                    )  # fmt: skip
                    print(json.dumps(comparisons[-1]), file=sys.stderr, flush=True)
    equal = [one for one in comparisons if not one["slowed"]]
    slow = [one for one in comparisons if one["slowed"]]
    loads = [one["load"] for one in comparisons] or [os.getloadavg()[0]]
    return {
        "slowed_by": more - 1,
        "repeats": repeats,
        "bases": bases,
        "one_process": one_process,
        "seconds": time.monotonic() - begun,
        "equal": len(equal),
        "quiet": sum(one["exit_code"] == 0 for one in equal),
        "slowed": len(slow),
        "caught_and_named": sum(any(one["slowed"] in op for op, _ in one["named"]) for one in slow),
        "caught_and_nothing_else_named": sum(
            len(one["named"]) == 1 and one["slowed"] in one["named"][0][0] for one in slow
        ),
        "load": [min(loads), max(loads)],
        "processors": os.cpu_count(),
        "promise": "all quiet, all caught",
        "comparisons": comparisons,
    }


def _ratios(base: Path, document: Any) -> dict[str, float]:
    """How many times as long as in the base each operation took, by the medians: what the verdict was made of."""
    old, new = (
        {row["op"]: statistics.median(row["seconds"]) for row in one["profile"]["op_times"]}
        for one in (json.loads(base.read_text(encoding="utf-8")), document)
    )
    return {op: round(new[op] / old[op], 3) for op in new if old.get(op)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="sizes for a CPU, and half as much again, not a tenth")
    parser.add_argument("--bases", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=5, help="an equal run and a slowed one against each base")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--one-process", action="store_true", help="no process a comparison; programs compiled once")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no comparison after so many")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    told = gate(
        asked.cpu, asked.bases, asked.pairs, asked.repeats, one_process=asked.one_process, seconds=asked.seconds
    )
    found = {
        "date": date.today().isoformat(),
        "device": jax.devices()[0].device_kind,  # after the gate: the command sets flags before jax starts
        "jax": jax.__version__,
        "python": platform.python_version(),
        "command": " ".join(["python", "benchmarks/profile_gate.py", *sys.argv[1:]]),
        **told,
    }
    text = json.dumps(found, indent=1)
    print(text)
    if asked.out is not None:
        asked.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
