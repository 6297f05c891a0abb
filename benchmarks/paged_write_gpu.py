"""What goes before paged attention in a step of serving on a GPU: `paged_write` by its kernel beside XLA's form.

    python benchmarks/paged_write_gpu.py --out paged_write.json        # 1, 8, 32 and 256 tokens, about 40 seconds
    python benchmarks/paged_write_gpu.py --tokens 1,32 --models 1b,8b
    JAX_PLATFORMS=cpu python benchmarks/paged_write_gpu.py --tiny

A program is a step of sixteen layers, each with a projection and pools of its own, which are donated; the angles are
made of the positions in it, as serving does. Times are microseconds a layer:

    busy_us   the sum of its kernels' times, by the profiler
    span_us   from the first kernel's start to the last one's end, programs queued back to back: with the gaps
    wall_us   the host's clock over queued programs, the median of five

`launches` counts kernels a layer: a number and a bit, for what is made once a step. `error` is the largest difference
from the reference in float32 over the largest value, of the queries and of both pools, which also says that no other
row was written; above the op's tolerance a result is called wrong. `--tiny` tries the script on any machine: on a CPU
XLA's form alone runs, and its figures are of no use.
"""

from __future__ import annotations

import argparse
import datetime
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
from few_rows_gpu import PAUSE_S, device_events

from capibara.kernels.lab.bench import versions
from capibara.kernels.lab.tuning import failures
from capibara.kernels.ops.attention.paged_write.api import PAGED_WRITE, paged_write
from capibara.kernels.ops.attention.paged_write.hopper.forward import HeadsConfig, candidates
from capibara.kernels.ops.attention.rope import rope_angles

MODELS = {"1b": (16, 8, 128), "8b": (32, 8, 128), "narrow": (32, 8, 64)}  # heads, kv_heads, head_dim
LAYERS = 16
PAGES, PAGE_SIZE = 520, 64
TINY_PAGES = 16
ROUNDS, QUEUED = 5, 16  # of the host's clock: how often, and programs at a time
PROFILED = 8  # programs under the profiler
A_ROW_S = 5  # a row is not begun with less time left

Pools = list[tuple[jax.Array, jax.Array]]


class Step(NamedTuple):
    """The operands of a step that stay, and those that it writes."""

    projected: list[jax.Array]
    positions: jax.Array
    page: jax.Array
    slot: jax.Array
    pools: Pools


class Form(NamedTuple):
    """One way to run a step: XLA's, where there is no config."""

    config: HeadsConfig | None
    program: Any
    error: float

    @property
    def name(self) -> str:
        return "xla" if self.config is None else f"hopper, {self.config.heads} heads a program"


def draw(model: str, tokens: int, *, tiny: bool) -> Step:
    heads, kv_heads, depth = MODELS[model]
    layers, pages = (2, TINY_PAGES) if tiny else (LAYERS, PAGES)
    keys = iter(jax.random.split(jax.random.key(0), 3 * layers))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.bfloat16)

    number = jnp.arange(tokens, dtype=jnp.int32)
    width = kv_heads * depth
    return Step(
        [normal(tokens, heads + 2 * kv_heads, depth) for _ in range(layers)],
        positions=512 + 3 * number,
        page=2 * number % (pages - 1),  # odd: all of them come before one comes again
        slot=(512 + 3 * number) % PAGE_SIZE,
        pools=[(normal(pages, PAGE_SIZE, width), normal(pages, PAGE_SIZE, width)) for _ in range(layers)],
    )


def run_step(given: Step, pools: Pools, **by: Any) -> tuple[list[jax.Array], Pools]:
    cos, sin = rope_angles(given.positions, given.projected[0].shape[-1])

    @jax.jit
    def layer(*operands: Any) -> Any:  # lowered once for all
        return paged_write(*operands, **by)

    queries: list[jax.Array] = []
    written: Pools = []
    for projected, own in zip(given.projected, pools, strict=True):
        if queries:  # a layer waits for the one before it: XLA would make one pass for the queries of all
            projected, _ = jax.lax.optimization_barrier((projected, queries[-1]))
        query, key, value = layer(projected, *own, cos, sin, given.page, given.slot)
        queries.append(query)
        written.append((key, value))
    return queries, written


def build(config: HeadsConfig | None, given: Step) -> Any:
    by: dict[str, Any] = {"implementation": "xla", "spare_page": True}
    if config is not None:
        by = {"implementation": "hopper", "config": config}

    def step(given: Step, pools: Pools) -> Any:
        return run_step(given, pools, **by)

    return jax.jit(step, donate_argnums=(1,)).lower(given._replace(pools=[]), given.pools).compile()


@jax.jit
def copied(pools: Pools) -> Pools:
    return jax.tree.map(jnp.copy, pools)


@jax.jit
def _error(found: Any, given: Step) -> jax.Array:
    """Of the last layer."""
    projected, own = given.projected[-1].astype(jnp.float32), [x.astype(jnp.float32) for x in given.pools[-1]]
    angles = rope_angles(given.positions, projected.shape[-1])
    wanted = PAGED_WRITE.reference(projected, *own, *angles, given.page, given.slot)
    queries, pools = found
    last = (queries[-1], *pools[-1])
    return jnp.stack([
        jnp.abs(one.astype(jnp.float32) - other).max() / jnp.abs(other).max()
        for one, other in zip(last, wanted, strict=True)
    ]).max()  # fmt: skip


def warm_pools(form: Form, given: Step) -> Pools:
    """Pools of the form's own, that a step has written."""
    return jax.block_until_ready(form.program(given._replace(pools=[]), copied(given.pools)))[1]


def run_queued(form: Form, given: Step, pools: Pools, times: int) -> float:
    """Seconds of so many steps, one after another on the same pools."""
    fixed = given._replace(pools=[])
    start = time.perf_counter()
    for _ in range(times):
        _, pools = form.program(fixed, pools)
    jax.block_until_ready(pools)
    return time.perf_counter() - start


def wall_times(forms: Sequence[Form], given: Step) -> list[float]:
    """Microseconds a layer by the host's clock, the forms in turn."""
    seconds: list[list[float]] = [[] for _ in forms]
    for _ in range(ROUNDS):
        for form, found in zip(forms, seconds, strict=True):
            found.append(run_queued(form, given, warm_pools(form, given), QUEUED))
    return [statistics.median(found) / QUEUED / len(given.projected) * 1e6 for found in seconds]


def device_times(forms: Sequence[Form], given: Step) -> list[dict[str, Any]]:
    """What the profiler says of each form; nothing where its record cannot be told apart by forms."""
    pools = [warm_pools(form, given) for form in forms]
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for form, own in zip(forms, pools, strict=True):
                time.sleep(PAUSE_S)
                run_queued(form, given, own, PROFILED)
            time.sleep(PAUSE_S)
        runs = device_events(folder)
    if len(runs) != len(forms):
        print(f"  {len(runs)} runs in the profile of {len(forms)} forms: the device's times are left out", flush=True)
        return [{} for _ in forms]
    found = []
    for events in runs:
        layers = PROFILED * len(given.projected)
        end = max(event.start + event.duration for event in events)
        found.append({
            "busy_us": sum(event.duration for event in events) / 1e3 / layers,
            "span_us": (end - events[0].start) / 1e3 / layers,
            "launches": len(events) / layers,
        })  # fmt: skip
    return found


def measure(pool: ThreadPoolExecutor, model: str, tokens: int, *, tiny: bool) -> dict[str, Any]:
    given = draw(model, tokens, tiny=tiny)
    on_gpu = jax.default_backend() == "gpu"
    angles = jax.ShapeDtypeStruct((tokens, MODELS[model][2] // 2), jnp.float32)
    call = PAGED_WRITE.call(given.projected[0], *given.pools[0], angles, angles, given.page, given.slot)
    configs = [None, *(candidates(call)[:3] if on_gpu else [])]
    jobs = [pool.submit(build, config, given) for config in configs]
    forms, rows = [], []
    for config, job in zip(configs, jobs, strict=True):
        try:
            program = job.result()
            found = program(given._replace(pools=[]), copied(given.pools))
            forms.append(Form(config, program, float(_error(found, given))))
        except failures() as failure:
            print(f"  FAILED {config or 'xla'}: {type(failure).__name__}: {str(failure)[:300]}", flush=True)
            rows.append({"form": str(config or "xla"), "failed": str(failure)[:300]})
    tolerance = PAGED_WRITE.tolerance(call)
    walls = wall_times(forms, given)
    devices = device_times(forms, given) if on_gpu else [{} for _ in forms]
    print(f"{model}, {tokens} tokens", flush=True)
    for form, wall, device in zip(forms, walls, devices, strict=True):
        right = form.error <= tolerance  # not where it is no number
        error = form.error if math.isfinite(form.error) else None
        rows.append({"form": form.name, "wall_us": wall, **device, "right": right, "error": error})
        figures = "  ".join(f"{name} {value:6.2f}" for name, value in rows[-1].items() if isinstance(value, float))
        print(f"  {form.name:28} {figures}{'' if right else '  WRONG'}", flush=True)
    return {"model": model, "tokens": tokens, "layers": len(given.projected), "tolerance": tolerance, "rows": rows}


def main() -> None:
    start = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1,32,8,256", help="of a step, separated by commas")
    parser.add_argument("--models", default="1b", help=f"of {', '.join(MODELS)}, separated by commas")
    parser.add_argument("--seconds", type=float, default=40, help="of the whole run: later rows are skipped")
    parser.add_argument("--out", help="write the figures here")
    parser.add_argument("--tiny", action="store_true", help="two layers of few pages, to see that it runs")
    options = parser.parse_args()
    models = options.models.split(",")
    if not set(models) <= set(MODELS):
        parser.error(f"--models are of {', '.join(MODELS)}, not {', '.join(models)}")
    document: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "versions": versions(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "rows": [],
        "skipped": [],
    }
    with ThreadPoolExecutor(4) as pool:
        for model in models:
            for tokens in map(int, options.tokens.split(",")):
                if options.seconds - (time.perf_counter() - start) < A_ROW_S:
                    document["skipped"].append(f"{model}, {tokens} tokens")
                else:
                    document["rows"].append(measure(pool, model, tokens, tiny=options.tiny))
                if options.out:
                    Path(options.out).write_text(json.dumps(document, indent=1), encoding="utf-8")
    skipped = ", ".join(document["skipped"]) or "nothing"
    print(f"skipped for time: {skipped}; {time.perf_counter() - start:.0f} seconds")


if __name__ == "__main__":
    main()
