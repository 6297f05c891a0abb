"""What the host does for a step: microseconds of its time a sequence and step, with a device that answers at once.

    JAX_PLATFORMS=cpu python benchmarks/serve_host.py
    JAX_PLATFORMS=cpu python benchmarks/serve_host.py --sequences 64 --profile decode

The engine is a real one, scheduler, cache's books and detokenizer included; only the two methods that run a program are
replaced, so that dispatch is no part of it. Every step draws one token a sequence. `decode`: nothing else is done.
`mixed`: at each step a sequence ends and another takes its place, with a prompt of 64 tokens in the same step.
`target`: the same with the latency controller in the loop. Times are of the processor, the least of `--repeats` runs.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import platform
import pstats
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from capibara.models import ModularCapibaraModel
from capibara.models.config import ModularModelConfig
from capibara.serve import Engine, EngineConfig, Request, SamplingParams
from capibara.serve.latency import LatencyController

PROMPT = 64
STEPS = 20
"""Of one measurement: few, so that some are left alone by whatever else the machine does."""
FORMS = ("decode", "mixed", "target")


class _Tokens:
    """What a step drew, there at once."""

    def __init__(self, rows: int) -> None:
        self._drawn = np.full(rows, ord("a"), np.int32)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del dtype, copy
        return self._drawn

    def copy_to_host_async(self) -> None:
        pass

    def block_until_ready(self) -> None:
        pass


def engine_of(sequences: int) -> Engine:
    blocks: Any = {"attention": {"heads": 1}, "mlp": {"ffn": 8}}
    model = ModularModelConfig(hidden=8, layers=1, vocab=259, max_length=4096, blocks=blocks)
    config = EngineConfig(
        max_sequences=sequences, max_batch_tokens=2048, prefill_chunk=PROMPT, pages=sequences * 40, decode_steps=1,
        page_size=64,
    )  # fmt: skip
    engine = Engine(ModularCapibaraModel(model, precision="float32"), config=config)
    engine.runner._run = lambda shape, *_: (_Tokens(shape.rows), None)  # type: ignore[method-assign]
    engine.limits.prefill_tokens = PROMPT  # one prompt a step: they then end one by one, too
    return engine


def measured(form: str, sequences: int, repeats: int, profile: cProfile.Profile | None = None) -> float:
    """Microseconds of a sequence and step."""
    engine = engine_of(sequences)
    controller = None
    if form == "target":
        controller = LatencyController(engine, 1e3, choose_batch=False)
        controller.calibrate(repeats=1)
        engine.limits.prefill_tokens = PROMPT
    draw, numbers = np.random.default_rng(0), itertools.count()
    # A sequence has its place from its prompt's step until one step after its last token was sent.
    new = 2000 if form == "decode" else max(4, sequences - 1)

    def ask() -> None:
        prompt = tuple(draw.integers(0, 256, PROMPT).tolist())
        engine.add(Request(str(next(numbers)), prompt, SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)))

    def step(controller: LatencyController | None) -> None:
        if controller is not None:
            controller.adjust()
        outputs = engine.step()
        if controller is not None:
            controller.saw(outputs, time.perf_counter())
        for output in outputs:
            if output.finish_reason is not None:
                ask()

    for _ in range(sequences):
        ask()
    for _ in range(2 * sequences + 10):
        step(None)
    times = []
    for _ in range(repeats):
        before, drawn = time.process_time(), engine.stats().generation_tokens
        if profile is not None:
            profile.enable()
        for _ in range(STEPS):
            step(controller)
        if profile is not None:
            profile.disable()
        times.append((time.process_time() - before) / (engine.stats().generation_tokens - drawn))
    return 1e6 * min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", default="1,64,200")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--profile", choices=FORMS, help="say where the time of this form goes, in place of all")
    parser.add_argument("--out", help="write the rows as JSON")
    asked = parser.parse_args()
    sizes = [int(size) for size in asked.sequences.split(",")]
    if asked.profile:
        profile = cProfile.Profile()
        measured(asked.profile, sizes[-1], 10, profile)
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)
        return
    rows = {
        form: {str(n): round(measured(form, n, asked.repeats), 2) for n in sizes} for form in asked.forms.split(",")
    }
    document = {
        "date": time.strftime("%Y-%m-%d"),
        "device": "cpu",
        "host": f"{platform.machine()}, {jax.device_count()} device",
        "versions": {"jax": jax.__version__, "python": platform.python_version()},
        "command": " ".join(["python", *sys.argv]),
        "microseconds_a_sequence_and_step": rows,
    }
    print(json.dumps(document, indent=1))
    if asked.out:
        Path(asked.out).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
