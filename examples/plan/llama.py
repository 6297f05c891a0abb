"""A decoder of any Llama shape, of `capibara.models`: the program that `capibara plan` plans and this file measures.

    capibara plan examples/plan/llama.py:loss --train --on v4-64          # does it fit, how fast, what does it cost
    python examples/plan/llama.py --shape tiny --steps 3                  # run it on what is attached
    python examples/plan/llama.py --shape 1b --batch 8 --sequence 2048    # on one H200

Weights are float32, products are bfloat16 with float32 sums, layers are one scan. Arrays are named by logical axes
("batch", "heads", "mlp"): on a mesh, the table of rules decides where they go, and nothing here changes.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from typing import Any

import jax

from capibara.models import ModularModelConfig, decoder
from capibara.parallel.optimizers import optimizer_named
from capibara.parallel.remat import POLICIES
from capibara.parallel.training_step import training_step

TINY = ModularModelConfig(
    hidden=64, layers=2, vocab=256, blocks={"attention": {"heads": 4, "kv_heads": 2}, "mlp": {"ffn": 128}}
)
PRESETS = {"1b": "llama-1b", "7b": "llama-7b", "13b": "llama-13b", "70b": "llama-70b"}
SHAPES = {"tiny": TINY} | {name: ModularModelConfig.from_toml(preset) for name, preset in PRESETS.items()}


def loss(params: Any, batch: dict[str, jax.Array], model: ModularModelConfig = SHAPES["1b"]) -> jax.Array:
    """Mean cross-entropy of the next token."""
    return decoder.loss(model, params, batch)[0]


def step(
    params: Any, state: Any, batch: Any, model: ModularModelConfig = SHAPES["1b"], remat: str = "none"
) -> tuple[Any, Any, jax.Array]:
    """One step of training with AdamW; give it `donate_argnums=(0, 1)`."""
    return training_step(functools.partial(loss, model=model), "adamw", remat=remat)(params, state, batch)


def shapes(batch: int = 8, sequence: int = 2048, model: ModularModelConfig = SHAPES["1b"]) -> tuple[Any, Any]:
    """The arguments of `loss`."""
    return decoder.param_shapes(model), decoder.batch_shapes(batch, sequence)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on random tokens and report the time of a step.")
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--remat", choices=POLICIES, default="none")
    parser.add_argument("--measured", metavar="FILE", help="write step time and memory as JSON, for plan --measured")
    asked = parser.parse_args()
    model = SHAPES[asked.shape]

    params = jax.jit(functools.partial(decoder.init, model))(jax.random.key(0))
    state = jax.jit(optimizer_named("adamw", mixed=True)[0])(params)
    ids = jax.random.randint(jax.random.key(1), (asked.batch, asked.sequence + 1), 0, model.vocab)
    batch = {"inputs": ids[:, :-1], "targets": ids[:, 1:]}
    update = (
        jax.jit(functools.partial(step, model=model, remat=asked.remat), donate_argnums=(0, 1))
        .lower(params, state, batch)
        .compile()
    )

    times, losses = [], []
    for _ in range(asked.steps + 1):  # the first warms up
        start = time.perf_counter()
        params, state, value = jax.block_until_ready(update(params, state, batch))
        times.append(time.perf_counter() - start)
        losses.append(float(value))
    seconds = sorted(times[1:])[len(times[1:]) // 2]
    stats = jax.devices()[0].memory_stats() or {}
    tokens = asked.batch * asked.sequence
    print(f"{model.parameters:,} parameters, loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")
    # A CPU does not count its memory.
    peak = f", peak {stats['peak_bytes_in_use'] / 2**30:.2f} GiB" if "peak_bytes_in_use" in stats else ""
    print(f"{seconds * 1e3:.1f} ms a step, {tokens / seconds:,.0f} tokens/s{peak}")
    if asked.measured:
        with open(asked.measured, "w", encoding="utf-8") as out:
            json.dump({"step_seconds": seconds, "peak_bytes": stats.get("peak_bytes_in_use")}, out)


if __name__ == "__main__":
    main()
