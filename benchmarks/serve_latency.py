"""Keeping a latency on paper: the engine's controller beside every fixed setting of a grid, in predicted time.

    python benchmarks/serve_latency.py --users 16,64,200 --targets 3,5,10 --json FILE
    python benchmarks/serve_latency.py --preset llama-7b --users 48 --targets 12,25

Users ask for what the fixed trace of lengths has, one request after another. A fixed setting lets so many sequences
run, takes so much of prompts a step, and draws one token or several in a program; of those whose 95th percentile
between tokens is within the target, the one with most tokens a second is what the controller is held against. The
engine is `capibara.serve.prediction`'s: its own scheduler and controller over predicted step times, so that nothing
here was measured on a chip; `benchmarks/serve_gpu.py --forms latency` measures it there.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import platform
import sys
from pathlib import Path
from typing import Any

SEQUENCES = (16, 32, 64, 96, 128, 192, 256)
PROMPTS = (64, 128, 256, 384, 512, 1024)
STEPS = (1, 8)


def _rounded(outcome: Any) -> dict[str, Any]:
    return {name: round(value, 2) for name, value in dataclasses.asdict(outcome).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama-1b")
    parser.add_argument("--on", default="h200")
    parser.add_argument("--users", default="16,64,200")
    parser.add_argument("--targets", default="3,5,10", help="in ms")
    parser.add_argument("--context", type=int, default=9216)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()

    import jax

    from capibara.models import load_preset
    from capibara.plan.place import place
    from capibara.serve import EngineConfig
    from capibara.serve.cache_size import cache_size
    from capibara.serve.load.trace import fixed_trace, scaled
    from capibara.serve.prediction.placement import prepared_shapes
    from capibara.serve.prediction.served import ServedModel
    from capibara.serve.prediction.simulation import SimulatedEngine, Traffic, steady
    from capibara.serve.prediction.step_times import StepTimes

    where = place(asked.on)
    model = dataclasses.replace(load_preset(asked.preset).model, max_length=asked.context)
    served = ServedModel(asked.preset, model, "bfloat16")
    config = EngineConfig(max_sequences=256, max_batch_tokens=2048, max_length=asked.context, prefix_sharing=False)
    weights = prepared_shapes(model, "bfloat16", joint=True, int8=False)
    size = cache_size(
        served.config, config, max_length=asked.context, dtype="bfloat16",
        weight_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights)),
        device_bytes=where.chip.capacity_bytes,
    )  # fmt: skip
    times = StepTimes(served, config, where, pages=size.pages, max_length=asked.context)
    traffic = Traffic(scaled(fixed_trace(), asked.context))
    rows = []
    for users in map(int, asked.users.split(",")):
        fixed = []
        for sequences, prompts, steps in itertools.product(SEQUENCES, PROMPTS, STEPS):
            engine = SimulatedEngine(times, size)
            engine.limits.max_sequences, engine.decode_steps = sequences, steps
            engine.limits.prefill_tokens = engine.limits.prefill_chunk = prompts
            setting = {"sequences": sequences, "prompt_tokens": prompts, "steps": steps}
            fixed.append((setting, steady(engine, traffic, users)))
            print(f"\r{users} users: {len(fixed)} fixed settings", end="", file=sys.stderr, flush=True)
        for target in map(float, asked.targets.split(",")):
            kept = steady(SimulatedEngine(times, size, target), traffic, users)
            within = [one for one in fixed if one[1].p95_ms <= target]
            best = max(within, key=lambda one: one[1].output_tokens_per_second, default=None)
            share = kept.output_tokens_per_second / best[1].output_tokens_per_second if best else None
            rows.append(
                {
                    "users": users,
                    "target_ms": target,
                    "controller": _rounded(kept),
                    "best_fixed": None if best is None else {**best[0], **_rounded(best[1])},
                    "fixed_within": len(within),
                    "of_best_fixed": share and round(share, 3),
                }
            )
            print(
                f"\r{users} users, {target:g} ms: p95 {kept.p95_ms:.2f}, {kept.running:.0f} running, "
                f"{kept.output_tokens_per_second:,.0f} tokens/s, first token {kept.first_p50_ms:,.0f} ms; "
                + (f"{share:.2f} of {best[0]}" if best and share else "no fixed setting is within"),
                flush=True,
            )
    if asked.json:
        about = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "device": f"predicted for {where.name}; computed on {platform.machine()}",
            "versions": {"jax": jax.__version__, "python": platform.python_version()},
            "command": "python benchmarks/serve_latency.py " + " ".join(sys.argv[1:]),
            "preset": asked.preset,
            "fixed_settings": len(SEQUENCES) * len(PROMPTS) * len(STEPS),
        }
        asked.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
