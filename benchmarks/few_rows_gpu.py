"""The products of a decoding step on a GPU: `few_rows` by its kernel, in several cuts, beside XLA's form, in one run.

    python benchmarks/few_rows_gpu.py --out few_rows.json               # both models, at 1, 32, 8 and 64 rows
    python benchmarks/few_rows_gpu.py --weights int8 --rows 1,32 --models 1b --seconds 85 --out few_rows_int8.json
    python benchmarks/few_rows_gpu.py --rows 1,32 --models 1b --seconds 85 --out few_rows.json
    python benchmarks/few_rows_gpu.py --products qkv,gated --configs 2
    JAX_PLATFORMS=cpu python benchmarks/few_rows_gpu.py --tiny

A row is one product of a model's layer, or its head, at so many rows of x, with a weight of 16 bits or of 8 with a
scale an output; XLA's form has the same weights. No rule or cut is chosen by the 8b model's rows: they are held back,
to say what happens at sizes that nobody looked at. A program has it sixteen times, each with a weight of its own, so
that no weight is still in a cache when it is read. Times are microseconds a product:

    busy_us       the sum of its kernels' times, by the profiler; `microseconds` has XLA's and the best cut's
    span_us       from the first kernel's start to the last one's end, programs queued back to back: with the gaps
    wall_us       the host's clock over queued programs, the median of five
    bandwidth_us  what reading the rows and the weight and writing a result would take at 4.2 TB/s

`error` is the largest difference from the reference in float32, over the largest value; above the op's tolerance a
result is called wrong, and its time is not taken for the best. Cuts are the one that the kernel's rule takes first, the
one that it takes where predictions are trusted, two with more or fewer splits, and the rule's others. Products that no
time is left for are listed as skipped. `--tiny` tries the script on any machine: on a CPU XLA's form alone runs,
without the device's times, and its figures are of no use.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from capibara.kernels import trust
from capibara.kernels.core.spec import Call, Case
from capibara.kernels.lab.bench import versions
from capibara.kernels.lab.tuning import failures
from capibara.kernels.ops.layers.few_rows.api import FEW_ROWS, few_rows
from capibara.kernels.ops.layers.few_rows.hopper.forward import (
    RESERVED,
    WeightStreamConfig,
    candidates,
    program_bytes,
)
from capibara.kernels.ops.layers.few_rows.reference import reference
from capibara.kernels.ops.layers.few_rows.rules import out_dtype_of, sizes
from capibara.kernels.pallas.hopper import SMEM_BYTES

MODELS = ("1b", "8b")
PRODUCTS = ("qkv", "out", "gated", "down", "head")
WEIGHT_TYPES = ("bf16", "int8")
WEIGHTS = 16  # of a program, each its own
ROUNDS, QUEUED = 5, 8  # of the host's clock: how often, and programs at a time
PROFILED = 4  # programs under the profiler
PAUSE_S = 0.004  # between two forms under the profiler
GAP_NS = 1e6  # what is as long as this without a kernel is such a pause
BANDWIDTH = 4.2e12  # bytes a second, for bandwidth_us; the published peak of an H200 is 4.8e12
A_PRODUCT_S = 4  # a product is not begun with less time left
TINY = 16  # times smaller along the weight's axes


class Form(NamedTuple):
    """One way to compute a product: XLA's, where there is no config."""

    config: WeightStreamConfig | None
    program: Any
    error: float


class Event(NamedTuple):
    """A kernel on the device, in nanoseconds."""

    start: float
    duration: float
    name: str


def case_of(model: str, product: str, weights: str, rows: int, *, tiny: bool) -> Case:
    """The op's own case of that product, at so many rows."""
    kind = f"{model}-int8-{product}" if weights == "int8" else f"{model}-{product}"
    known = FEW_ROWS.case(f"llama-{kind}-32")
    (_, inner), (held, _), residual, _, of_outputs = known.shapes
    outputs = None if residual is None else residual[1]
    if tiny:
        inner, held, outputs = inner // TINY, held // TINY, outputs and outputs // TINY
    added = (None, None) if outputs is None else ((rows, outputs), (outputs,))
    shapes = (rows, inner), (held, inner), *added, None if of_outputs is None else (held,)
    name = f"{'tiny' if tiny else 'llama'}-{kind}-{rows}"
    return Case(name, shapes, known.dtype, known.params, dtypes=known.dtypes)


def draw_weights(case: Case) -> list[jax.Array]:
    (held, inner), dtype = case.shapes[1], case.args()[1].dtype

    @jax.jit
    def drawn(key: jax.Array) -> jax.Array:
        if dtype == jnp.int8:
            return jax.random.randint(key, (held, inner), -127, 128, jnp.int8)
        return (jax.random.normal(key, (held, inner), dtype) * inner**-0.5).astype(dtype)

    return [drawn(key) for key in jax.random.split(jax.random.key(0), WEIGHTS)]


def draw_operands(case: Case, weights: Sequence[jax.Array]) -> list[tuple[jax.Array | None, ...]]:
    """Those of every call of a program: x and the weight, and what is added, the norm's scale and the outputs' scales
    where there are."""
    (x, (_, inner), residual, scale, of_outputs), dtype = case.shapes, case.dtype
    made = []
    for number, weight in enumerate(weights):
        first, second, third = jax.random.split(jax.random.key(1 + number), 3)
        made.append((
            jax.random.normal(first, x, dtype),
            weight,
            None if residual is None else jax.random.normal(second, residual, dtype),
            None if scale is None else jnp.full(scale, 1.25, dtype),
            None if of_outputs is None else jax.random.uniform(third, of_outputs, minval=0.5) / (73 * inner**0.5),
        ))  # fmt: skip
    return made


def cuts(call: Call, most: int) -> list[WeightStreamConfig]:
    """The one that the rule takes first, the one that it takes where predictions are trusted, two with other splits,
    then the rule's others, those most like the first one first."""
    ruled = list(candidates(call))
    first, n = ruled[0], sizes(call)
    with trust("predicted"):
        predicted = candidates(call)[0]
    others = []
    if call.params["gate"] is None:
        tiles, dtype = n.outputs // 64, call.need("weight").dtype
        for splits in (1, 2, 3, 4, 6, 8):
            if splits == first.splits or not 60 <= tiles * splits < 400:
                continue
            rings = [WeightStreamConfig(64, first.depth, stages, splits, first.sharers) for stages in range(16, 1, -1)]
            taken = [program_bytes(c, n.rows, gated=False, weight_dtype=dtype) for c in rings]
            others += [c for c, used in zip(rings, taken, strict=True) if used <= SMEM_BYTES + RESERVED][:1]
    alike = [config for config in ruled if (config.outputs, config.depth) == (first.outputs, first.depth)]
    return list(dict.fromkeys([first, predicted, *others[:2], *alike, *ruled]))[:most]


def build(config: WeightStreamConfig | None, case: Case, given: Sequence[tuple[jax.Array | None, ...]]) -> Any:
    """A compiled program of one product after another, by the kernel cut so, or by XLA."""
    by: dict[str, Any] = {"implementation": "xla"} if config is None else {"implementation": "hopper", "config": config}

    @jax.jit
    def product(*operands: Any) -> Any:
        return few_rows(*operands, **case.params, **by)

    def products(given: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [product(*operands) for operands in given]

    return jax.jit(products).lower(given).compile()


def error_of(got: Any, wanted: Any) -> float:
    """The largest difference over the largest value, of all results; not a number where one of them is none."""
    found = []
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        exact = np.asarray(other, np.float64)
        found.append(np.abs(np.asarray(one, np.float64) - exact).max() / np.abs(exact).max())
    return float(np.max(found))


def wall_times(forms: Sequence[Form], given: Any) -> list[float]:
    """Microseconds a product by the host's clock, the forms in turn."""
    seconds: list[list[float]] = [[] for _ in forms]
    for _ in range(ROUNDS):
        for form, found in zip(forms, seconds, strict=True):
            jax.block_until_ready(form.program(given))
            start = time.perf_counter()
            for _ in range(QUEUED):
                out = form.program(given)
            jax.block_until_ready(out)
            found.append(time.perf_counter() - start)
    return [statistics.median(found) / QUEUED / WEIGHTS * 1e6 for found in seconds]


def device_events(folder: str) -> list[list[Event]]:
    """Kernels on the device's streams in the order of their starts, cut where nothing ran for as long as a pause."""
    events = sorted(
        Event(event.start_ns, event.duration_ns, event.name)
        for file in Path(folder).rglob("*.xplane.pb")
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes
        if "GPU" in plane.name
        for line in plane.lines
        if "Stream" in line.name
        for event in line.events
    )
    runs: list[list[Event]] = []
    end = -math.inf
    for event in events:
        if event.start - end > GAP_NS:
            runs.append([])
        runs[-1].append(event)
        end = max(end, event.start + event.duration)
    return runs


def device_times(forms: Sequence[Form], given: Any) -> list[dict[str, Any]]:
    """What the profiler says of each form; nothing where its record cannot be told apart by forms."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for form in forms:
                time.sleep(PAUSE_S)
                for _ in range(PROFILED):
                    out = form.program(given)
                jax.block_until_ready(out)
            time.sleep(PAUSE_S)
        runs = device_events(folder)
    if len(runs) != len(forms):
        print(f"  {len(runs)} runs in the profile of {len(forms)} forms: the device's times are left out", flush=True)
        return [{} for _ in forms]
    found = []
    for events in runs:
        calls = PROFILED * WEIGHTS
        kernels: dict[str, float] = collections.defaultdict(float)
        for event in events:
            kernels[event.name[:60]] += event.duration / 1e3 / calls
        longest = sorted(kernels, key=lambda name: -kernels[name])[:6]
        end = max(event.start + event.duration for event in events)
        found.append({
            "busy_us": sum(event.duration for event in events) / 1e3 / calls,
            "span_us": (end - events[0].start) / 1e3 / calls,
            "kernels": {name: kernels[name] for name in longest},
            "launches": len(events) / calls,
        })  # fmt: skip
    return found


def measure(pool: ThreadPoolExecutor, case: Case, weights: Sequence[jax.Array], most: int) -> dict[str, Any]:
    given = draw_operands(case, weights)
    call = FEW_ROWS.call(*given[0], **case.params)
    on_gpu = jax.default_backend() == "gpu"
    configs = [None, *(cuts(call, most) if on_gpu else [])]
    jobs = [pool.submit(build, config, case, given) for config in configs]
    wide = [None if operand is None else operand.astype(jnp.float32) for operand in given[-1]]
    wanted = reference(*wide, **case.params)
    forms, rows = [], []
    for config, job in zip(configs, jobs, strict=True):
        try:
            program = job.result()
            forms.append(Form(config, program, error_of(program(given)[-1], wanted)))
        except failures() as failure:
            text = str(failure)[:300]
            print(f"  FAILED {case.name} {config or 'xla'}: {type(failure).__name__}: {text}", flush=True)
            rows.append({"config": str(config) if config else "xla", "failed": text})
    tolerance, n = FEW_ROWS.tolerance(call), sizes(call)
    moved = sum(call.need(name).size * call.need(name).dtype.itemsize for name in ("x", "weight"))
    moved += n.rows * n.outputs * out_dtype_of(call).itemsize
    least = moved / BANDWIDTH * 1e6
    print(f"{case.name}: a weight of {weights[0].nbytes / 1e6:.1f} MB, {least:.1f} us at 4.2 TB/s", flush=True)
    walls = wall_times(forms, given)
    devices = device_times(forms, given) if on_gpu else [{} for _ in forms]
    best: dict[str, float] = {}
    for form, wall, device in zip(forms, walls, devices, strict=True):
        right = form.error <= tolerance  # not where it is no number
        row = {"config": str(form.config) if form.config else "xla", "wall_us": wall, **device, "right": right}
        rows.append(row | {"error": form.error if math.isfinite(form.error) else None})
        if right and device:
            who = "hopper" if form.config else "xla"
            best[who] = min(best.get(who, math.inf), device["busy_us"])
        show(form, rows[-1])
    return {
        "case": case.name,
        "bandwidth_us": least,
        "tolerance": tolerance,
        "microseconds": best,
        "cuts": [row for row in rows if row["config"] != "xla"],
        "xla": next(row for row in rows if row["config"] == "xla"),
    }


def show(form: Form, row: dict[str, Any]) -> None:
    c = form.config
    what = "xla" if c is None else f"{c.outputs}x{c.depth} by {c.sharers}, {c.stages} stages, {c.splits} splits"
    device = f"busy {row['busy_us']:6.2f} span {row['span_us']:6.2f} " if "busy_us" in row else ""
    kernels = " + ".join(f"{us:.2f} {name[:24]}" for name, us in row.get("kernels", {}).items())
    wrong = "" if row["right"] else " WRONG"
    print(f"  {what:30} {device}wall {row['wall_us']:6.2f}  error {form.error:.4f}{wrong}  {kernels}", flush=True)


def main() -> None:
    start = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,32,8,64", help="numbers of rows of x, separated by commas")
    parser.add_argument("--models", default=",".join(MODELS), help="of these, separated by commas")
    parser.add_argument("--products", default=",".join(PRODUCTS), help="of these, separated by commas")
    parser.add_argument("--weights", default=",".join(WEIGHT_TYPES), help="of these, separated by commas")
    parser.add_argument("--configs", type=int, default=5, help="cuts of the kernel, at most, for each product")
    parser.add_argument("--seconds", type=float, default=55, help="of the whole run: later products are skipped")
    parser.add_argument("--out", help="write the figures here")
    parser.add_argument("--tiny", action="store_true", help="weights of a few thousand numbers, to see that it runs")
    options = parser.parse_args()
    numbers = [int(rows) for rows in options.rows.split(",")]
    models, products, types = options.models.split(","), options.products.split(","), options.weights.split(",")
    for name, asked, known in (
        ("--models", models, MODELS), ("--products", products, PRODUCTS), ("--weights", types, WEIGHT_TYPES),
    ):  # fmt: skip
        if not set(asked) <= set(known):
            parser.error(f"{name} are of {', '.join(known)}, not {', '.join(asked)}")
    document: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "versions": versions(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "rows": [],
        "skipped": [],
    }
    with ThreadPoolExecutor(12) as pool:
        for model, product, weight_type in itertools.product(models, products, types):
            weights: list[jax.Array] = []
            for rows in numbers:
                case = case_of(model, product, weight_type, rows, tiny=options.tiny)
                if options.seconds - (time.perf_counter() - start) < A_PRODUCT_S:
                    document["skipped"].append(case.name)
                else:
                    weights = weights or draw_weights(case)
                    document["rows"].append(measure(pool, case, weights, options.configs))
                if options.out:
                    Path(options.out).write_text(json.dumps(document, indent=1), encoding="utf-8")
    skipped = ", ".join(document["skipped"]) or "nothing"
    print(f"skipped for time: {skipped}; {time.perf_counter() - start:.0f} seconds")


if __name__ == "__main__":
    main()
