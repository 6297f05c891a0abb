"""How often `capibara profile --against` catches one operation that was made slower, and how often it is quiet.

    python benchmarks/profile_gate.py --out gate.json              # on a GPU: a tenth more work in one operation
    python benchmarks/profile_gate.py --cpu --out gate.json        # on a CPU: half as much again; about ten minutes
    python benchmarks/profile_gate.py --cpu --bases 1 --pairs 1    # that it runs

Every base and every comparison is a process of its own: several bases, and against each of them runs of the same
program, in turn with runs of one in which one operation of five has more work, a product or a pass over an array. Each
comparison has the load of the machine beside it.
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


def gate(tiny: bool, bases: int, pairs: int, repeats: int = 8) -> dict[str, Any]:
    """Quiet and caught, of so many pairs against each of so many bases; `tiny` is for a CPU."""
    size, rows, steps = (512, 1000, 30) if tiny else (4096, 32768, 50)
    more = 1.5 if tiny else 1.1
    comparisons = []
    with tempfile.TemporaryDirectory() as folder:
        script, base = Path(folder) / "steps.py", Path(folder) / "base.json"
        script.write_text(PROGRAM, encoding="utf-8")

        def run(slowed: str, *options: str) -> tuple[int, Any]:
            head = int(size * more) if slowed == "head" else size
            long = int(rows * more) if slowed == "exponentials" else rows
            numbers = [str(one) for one in (size, head, long, steps)]
            command = [sys.executable, "-m", "capibara", "profile", str(script), *numbers, "--json", *options]
            ended = subprocess.run(command, capture_output=True, text=True, check=False)
            return ended.returncode, json.loads(ended.stdout)

        for _ in range(bases):
            base.write_text(json.dumps(run("", "--repeats", str(repeats))[1]), encoding="utf-8")
            for number in range(pairs):
                for slowed in ("", SLOWED[number % len(SLOWED)]):
                    code, document = run(slowed, "--against", str(base))
                    told = document["against"]
                    comparisons.append(
                        {"slowed": slowed, "exit_code": code, "load": os.getloadavg()[0], "pace": told["pace"],
                         "named": [(one["op"], one["slower_by"]) for one in told["slower"]]}
                    )  # fmt: skip
                    print(json.dumps(comparisons[-1]), file=sys.stderr, flush=True)
    equal = [one for one in comparisons if not one["slowed"]]
    slow = [one for one in comparisons if one["slowed"]]
    loads = [one["load"] for one in comparisons]
    return {
        "slowed_by": more - 1,
        "repeats": repeats,
        "bases": bases,
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="sizes for a CPU, and half as much again, not a tenth")
    parser.add_argument("--bases", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=5, help="an equal run and a slowed one against each base")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    found = {
        "date": date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "command": " ".join(["python", "benchmarks/profile_gate.py", *sys.argv[1:]]),
        **gate(asked.cpu, asked.bases, asked.pairs, asked.repeats),
    }
    text = json.dumps(found, indent=1)
    print(text)
    if asked.out is not None:
        asked.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
