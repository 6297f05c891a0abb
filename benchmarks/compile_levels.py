"""What a level costs and gives on this device: seconds to compile a decoder's layer with its gradient, and to run it.

    python benchmarks/compile_levels.py [--size 4096] [--layers 4] [--json PATH]

Programs are compiled with nothing on disk, level after level, and run in turns, sample by sample. Also with
`enable_async_collective` and `memory_optimization`, and their memory by the compiler's count.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from datetime import date
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from capibara.compile.jit import TpuCompilationConfig

SAMPLES = 11
CONFIGS = {
    **{level: {"optimization_level": level} for level in ("none", "basic", "balanced", "aggressive")},
    "balanced, async collectives": {"enable_async_collective": True},
    "balanced, memory": {"memory_optimization": True},
}


def loss(params: Any, x: jax.Array) -> jax.Array:
    for weights in params:
        normed = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)
        gate, up, down = weights
        x = x + (jax.nn.silu(normed @ gate) * (normed @ up)) @ down
    return jnp.mean(jnp.square(x.astype(jnp.float32)))


def operands(size: int, layers: int) -> tuple[Any, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3 * layers)
    shapes = [(size, 4 * size), (size, 4 * size), (4 * size, size)] * layers
    drawn = [
        jax.random.normal(key, shape, jnp.bfloat16) / shape[0] ** 0.5 for key, shape in zip(keys, shapes, strict=True)
    ]
    params = [tuple(drawn[at : at + 3]) for at in range(0, len(drawn), 3)]
    return params, jax.random.normal(jax.random.key(1), (size, size), jnp.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096, help="of a token, and the number of tokens")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--json", type=Path)
    words = parser.parse_args()
    params, x = operands(words.size, words.layers)
    rows: dict[str, dict[str, Any]] = {}
    programs = {}
    for name, keywords in CONFIGS.items():
        options = TpuCompilationConfig(**keywords).options()  # type: ignore[arg-type]
        jax.clear_caches()
        inner = jax.checkpoint(loss) if keywords.get("memory_optimization") else loss
        lowered = jax.jit(jax.grad(inner)).lower(params, x)
        start = time.perf_counter()
        programs[name] = lowered.compile(compiler_options=options or None)
        rows[name] = {
            "options": options,
            "compile_s": time.perf_counter() - start,
            "temporary_bytes": programs[name].memory_analysis().temp_size_in_bytes,
        }
        jax.block_until_ready(programs[name](params, x))
    samples: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(SAMPLES):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(params, x))
            samples[name].append(time.perf_counter() - start)
    for name, row in rows.items():
        row["run_ms"] = 1e3 * statistics.median(samples[name])
        print(
            f"{name:28} compile {row['compile_s']:7.2f} s   run {row['run_ms']:9.2f} ms   "
            f"temporaries {row['temporary_bytes'] / 2**20:9.1f} MiB   {row['options']}"
        )
    if words.json:
        device = jax.devices()[0]
        document = {
            "date": date.today().isoformat(),
            "device": f"{device.device_kind}, {platform.machine()}",
            "jax": jax.__version__,
            "python": platform.python_version(),
            "command": f"python benchmarks/compile_levels.py --size {words.size} --layers {words.layers} --json PATH",
            "rows": rows,
        }
        words.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
