"""What a kernel's first call waits for before it runs: tracing, lowering, compiling, by pass, with no chip attached.

    python benchmarks/first_calls.py [--for h200] [--op NAME ...] [--case NAME] [--pass forward] [--all-cases]
        [--second] [--beside CHECKOUT] [--json PATH]

Every row is a process of its own, whose imports are not counted: one op, one case, forward or gradient, by the
implementation that dispatch takes on the chip; on a TPU inside `trust("predicted")`. The case is the one of most work
that runs on a kernel, of each implementation; `--all-cases` takes every case tagged "bench" or
the chip's platform. Seconds are of the wall and of the processor, children (ptxas) included. For a GPU the compiler is
XLA's with ptxas, which times no kernels against one another where no GPU is; an attached one adds that, where XLA's own
products are in the program.

`--beside` measures every row in another checkout of this library too, right before, so that the two columns see the
same machine. `--second` adds a second process, which finds the first's program in the cache on disk: it traces and
lowers again, and reads the program in place of compiling it.

The promise: 5 s forward, 8 s with the gradient, of the processor.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

FORWARD_S, GRADIENT_S = 5.0, 8.0
PARTS = ("trace", "lower", "compile")
TAGS = {"gpu": ("bench", "gpu"), "tpu": ("tpu",)}


def clocks() -> dict[str, float]:
    """Seconds of the wall, of processors, this process's and its children's, and of its children's alone."""
    own, children = (
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )
    return {"wall_s": time.perf_counter(), "cpu_s": own + children, "ptxas_s": children}


def timed(fn: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    start = clocks()
    made = fn()
    return made, {name: round(now - start[name], 3) for name, now in clocks().items()}


def jobs(place: str, names: Sequence[str], case: str | None, every: bool) -> list[dict[str, str]]:
    """The rows to measure: op, case and pass."""
    from capibara import hardware
    from capibara.hardware.topology import place as placed
    from capibara.kernels.core import context, dispatch
    from capibara.kernels.core.op import lookup, registry
    from capibara.kernels.core.trusting import trust

    chip = hardware.chip(placed(place).chip)
    ops = [lookup(name) for name in names] if names else list(registry().values())
    rows = []
    for op in ops:
        if op.mesh_axes is not None:
            continue
        chosen: dict[Any, tuple[float, str]] = {}
        for listed in op.cases:
            if case not in (None, listed.name) or not set(TAGS[chip.platform]) & set(listed.tags):
                continue
            with trust("predicted"), context.target(chip.platform, chip.device_kinds[0]) as target:
                call = op.call(*listed.args(), target=target, **dict(listed.params))
                taken = op.implementations[dispatch.select(call).implementation]
            own = taken.kernel and chip.platform in taken.platforms and len(taken.platforms) == 1
            if not own and op.name not in COMPOSED:
                continue
            if op.name in COMPOSED and listed.name != COMPOSED[op.name][0]:
                continue
            kind = listed.name if every else taken.name
            work = op.cost(call).flops
            if kind not in chosen or work > chosen[kind][0]:
                chosen[kind] = (work, listed.name)
        for _, name in chosen.values():
            rows.append({"op": op.name, "case": name, "pass": "forward"})
            if differentiable(op, name):
                rows.append({"op": op.name, "case": name, "pass": "gradient"})
    return rows


def differentiable(op: Any, case: str) -> bool:
    """Whether the op brings a gradient, and makes numbers that have one."""
    import jax
    import jax.numpy as jnp

    call = op.call(*op.case(case).args(), **dict(op.case(case).params))
    made = jax.eval_shape(functools.partial(op.reference, **call.specified), *call.args)
    floating = any(jnp.issubdtype(x.dtype, jnp.inexact) for x in jax.tree.leaves(made))
    return floating and (op.gradient is not None or op.name in COMPOSED)


# Ops without a kernel of their own that run on others' kernels: the case, and the parameters that make it so.
COMPOSED: dict[str, tuple[str, dict[str, Any]]] = {"long_conv": ("16k", {"precision": "bfloat16"})}


def program(op_name: str, case_name: str, which: str) -> tuple[Callable[..., Any], Any]:
    """The op on its case as a user calls it, or its gradient by every floating operand."""
    import jax
    import jax.numpy as jnp

    from capibara.kernels.core import dispatch
    from capibara.kernels.core.op import lookup

    op = lookup(op_name)
    case = op.case(case_name)
    params = {**case.params, **COMPOSED.get(op_name, ("", {}))[1]}
    operands = case.args()
    present = [i for i, x in enumerate(operands) if x is not None]

    def forward(*arrays: Any) -> Any:
        full = list(operands)
        for i, x in zip(present, arrays, strict=True):
            full[i] = x
        return dispatch.run(op, tuple(full), params)

    args: list[Any] = [operands[i] for i in present]
    if which == "forward":
        return forward, args
    by = [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def floating(made: Any) -> list[Any]:
        return [x for x in jax.tree.leaves(made) if jnp.issubdtype(x.dtype, jnp.inexact)]

    # Cotangents are operands: of constant ones XLA would compute the whole backward pass while it compiles.
    call = op.call(*operands, **params)
    cotangents = floating(jax.eval_shape(functools.partial(op.reference, **call.specified), *operands))

    def gradient(*arrays: Any) -> Any:
        operands, given = list(arrays[: len(args)]), arrays[len(args) :]

        def of(*differentiated: Any) -> Any:
            for i, x in zip(by, differentiated, strict=True):
                operands[i] = x
            return floating(forward(*operands))

        out, pull = jax.vjp(of, *(arrays[i] for i in by))
        return out, pull(list(given))

    return gradient, [*args, *cotangents]


def measure(row: dict[str, str], place: str) -> dict[str, Any]:
    import jax
    from jax.sharding import SingleDeviceSharding

    from capibara import hardware
    from capibara.compile import count_compilations
    from capibara.compile.lower import custom_calls_in
    from capibara.hardware.topology import abstract_devices
    from capibara.hardware.topology import place as placed
    from capibara.kernels.core import context, dispatch
    from capibara.kernels.core.trusting import trust

    chip = hardware.chip(placed(place).chip)
    home = SingleDeviceSharding(abstract_devices(place)[0])
    fn, args = program(row["op"], row["case"], row["pass"])
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=home) for x in args]
    seconds = {}
    # Around the whole trace: backward passes are dispatched after the function has returned.
    target = context.target(chip.platform, chip.device_kinds[0])
    with trust("predicted"), target, dispatch.recording() as decided:
        traced, seconds["trace"] = timed(lambda: jax.jit(fn).trace(*args))
    lowered, seconds["lower"] = timed(traced.lower)
    text = lowered.as_text()
    with count_compilations() as counts:
        _, seconds["compile"] = timed(lowered.compile)
    runs = dict.fromkeys(f"{s.call.op.name}: {s.implementation}" for s in decided if hasattr(s, "call"))
    return {
        **row,
        "runs": list(runs),
        "custom_calls": list(custom_calls_in(text)),
        "module_bytes": len(text),
        "from_disk": counts.from_disk,
        **seconds,
        **{clock: round(sum(seconds[part][clock] for part in PARTS), 3) for clock in ("wall_s", "cpu_s")},
    }


def in_process(
    row: dict[str, str], place: str, cache: Path | None = None, source: Path | None = None
) -> dict[str, Any]:
    env = dict(os.environ)
    if source is not None:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(source), env.get("PYTHONPATH"))))
    env.pop("JAX_COMPILATION_CACHE_DIR", None)
    if cache is not None:
        env |= {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    ran = subprocess.run(
        [sys.executable, __file__, "--for", place, "--row", json.dumps(row)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        return {**row, "error": ran.stderr.strip().splitlines()[-1] if ran.stderr.strip() else str(ran.returncode)}
    return dict(json.loads(ran.stdout.splitlines()[-1]))


def promised(row: dict[str, Any]) -> float:
    return GRADIENT_S if row["pass"] == "gradient" or row["op"].endswith("_grad") else FORWARD_S


def told(*columns: dict[str, Any]) -> str:
    """A line of the table: the last measurement by its parts, and the seconds of those before it."""
    row = columns[-1]
    name = f"{row['op']:24}{row['pass']:10}{row['case'][:22]:24}"
    if "error" in row:
        return f"{name}{row['error'][:80]}"
    earlier = "".join(f"{column.get('cpu_s', float('nan')):9.2f}" for column in columns[:-1])
    parts = "".join(f"{row[part]['cpu_s']:9.2f}" for part in PARTS)
    over = "  over" if row["cpu_s"] > promised(row) else ""
    return f"{name}{earlier}{parts}{row['cpu_s']:9.2f}{row['wall_s']:9.2f}{over}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--for", dest="place", default="h200")
    parser.add_argument("--op", action="append", default=[])
    parser.add_argument("--case")
    parser.add_argument("--pass", dest="which", choices=("forward", "gradient"))
    parser.add_argument("--all-cases", action="store_true")
    parser.add_argument("--second", action="store_true", help="measure a second process of every row, too")
    parser.add_argument("--beside", type=Path, help="another checkout, measured row by row before this one")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.row:
        print(json.dumps(measure(json.loads(words.row), words.place)))
        return
    import jax

    wanted = [r for r in jobs(words.place, words.op, words.case, words.all_cases) if words.which in (None, r["pass"])]
    before = f"{'before':>9}" if words.beside else ""
    print(f"{'op':24}{'pass':10}{'case':24}{before}" + "".join(f"{x:>9}" for x in (*PARTS, "cpu s", "wall s")))
    measured: dict[str, list[dict[str, Any]]] = {"before": [], "after": [], "second_process": []}
    for row in wanted:
        if words.beside:
            measured["before"].append(in_process(row, words.place, source=words.beside / "src"))
        with tempfile.TemporaryDirectory() as folder:
            cache = Path(folder) if words.second else None
            measured["after"].append(in_process(row, words.place, cache))
            if words.second:
                measured["second_process"].append(in_process(row, words.place, cache))
        print(told(*measured["before"][-1:], measured["after"][-1]), flush=True)
        if words.json:
            words.json.write_text(json.dumps(document(words, measured, jax.__version__), indent=1) + "\n", "utf-8")


def document(words: argparse.Namespace, measured: dict[str, list[dict[str, Any]]], version: str) -> dict[str, Any]:
    options = [f"--for {words.place}", *(f"--op {name}" for name in words.op), *(["--second"] if words.second else [])]
    options += ["--beside CHECKOUT"] if words.beside else []
    return {
        "date": date.today().isoformat(),
        "device": f"compiled for {words.place}, not run, on {platform.machine()}, {os.cpu_count()} cores shared "
        f"with other work, load average {os.getloadavg()[0]:.0f}",
        "jax": version,
        "python": platform.python_version(),
        "command": f"python benchmarks/first_calls.py {' '.join(options)} --json PATH",
        "promise": {"forward_cpu_s": FORWARD_S, "gradient_cpu_s": GRADIENT_S},
        "rows": {name: rows for name, rows in measured.items() if rows},
    }


if __name__ == "__main__":
    main()
