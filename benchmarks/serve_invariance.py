"""Whether `batch_invariant` holds on this machine's device, and what it costs.

    python benchmarks/serve_invariance.py --preset llama-1b --out invariance.json
    python benchmarks/serve_invariance.py --preset dev --prompt 24 --new 8 --requests 4 --max-batch-tokens 64

Requests run together, one by one, and with prompts cut into other pieces; the tokens and the log-probabilities of the
20 likeliest are compared bit for bit, with `batch_invariant` and without it. Beside the count of requests that differ
stand tokens per second of one request alone and of all together. The command fails where the bits differ with it on.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any


def _run(engine: Any, prompts: list[tuple[int, ...]], new: int) -> tuple[list[Any], float]:
    """Each request's tokens with log-probabilities, and new tokens per second of all."""
    from capibara.serve import Request, SamplingParams

    asked = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, logprobs=20)
    bits: dict[str, list[Any]] = {str(number): [] for number in range(len(prompts))}
    for number, prompt in enumerate(prompts):
        engine.add(Request(str(number), prompt, asked))
    start = time.perf_counter()
    while engine.has_work():
        for output in engine.step():
            bits[output.id] += output.logprobs or ()
    return list(bits.values()), new * len(prompts) / (time.perf_counter() - start)


def _measured(asked: argparse.Namespace, invariant: bool) -> dict[str, Any]:
    import numpy as np

    from capibara.models import ModularCapibaraModel, load_preset
    from capibara.serve import Engine, EngineConfig

    model = ModularCapibaraModel(load_preset(asked.preset).model, precision="bfloat16")
    draw = np.random.default_rng(0)
    lengths = draw.integers(max(1, asked.prompt // 4), asked.prompt + 1, asked.requests)
    prompts = [tuple(draw.integers(0, model.config.vocab, length).tolist()) for length in lengths]

    def engine(**changes: Any) -> Any:
        config = EngineConfig(
            max_sequences=asked.requests,
            max_batch_tokens=asked.max_batch_tokens,
            max_length=asked.prompt + asked.new,
            prefix_sharing=False,
            batch_invariant=invariant,
            cache_folder=asked.programs,
            **changes,
        )
        return Engine(model, config=config)

    whole = engine()
    _run(whole, prompts, asked.new)  # makes the programs; of those for one alone the first request pays
    together, rate_together = _run(whole, prompts, asked.new)
    alone = [_run(whole, [prompt], asked.new) for prompt in prompts]
    whole.close()
    cut = engine(prefill_chunk=max(1, asked.prompt // 7))
    pieces, _ = _run(cut, prompts, asked.new)
    cut.close()
    return {
        "batch_invariant": invariant,
        "requests": asked.requests,
        "differ_alone": sum(bits[0] != other for (bits, _), other in zip(alone, together, strict=True)),
        "differ_in_other_pieces": sum(bits != other for bits, other in zip(pieces, together, strict=True)),
        "tokens_per_second_together": rate_together,
        "tokens_per_second_alone": max(rate for _, rate in alone),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="llama-1b")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the longest prompt")
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--max-batch-tokens", type=int, default=256)
    parser.add_argument("--programs", type=Path, help="a folder for compiled programs")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    import jax

    rows = [_measured(asked, invariant) for invariant in (True, False)]
    for row in rows:
        print(json.dumps(row))
    if asked.out is not None:
        where = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "machine": platform.machine()}
        command = " ".join(["python", *sys.argv])
        kept = {"date": time.strftime("%Y-%m-%d"), "command": command, **where, "rows": rows}
        asked.out.write_text(json.dumps(kept, indent=1) + "\n")
    if rows[0]["differ_alone"] or rows[0]["differ_in_other_pieces"]:
        sys.exit("With batch_invariant the bits differ: it does not hold on this device.")


if __name__ == "__main__":
    main()
