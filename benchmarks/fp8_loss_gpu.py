"""What fp8 products do to a loss: the same model trained in bfloat16 and in fp8 on the Python sources of this machine.

    python benchmarks/fp8_loss_gpu.py --out fp8_loss.json                       # 2 x 2,000 steps, minutes on an H200
    python benchmarks/fp8_loss_gpu.py --hidden 64 --layers 2 --batch 2 --length 64 --steps 20 --last 5    # on a CPU

Every *.py of this interpreter's library and site-packages is read as bytes; a twentieth of the files, by a hash of
their paths, is held back. All forms start from the same weights and see the same batches in the same order; the step is
the trainer's (`capibara.parallel.trainer_step`), its optimizer AdamW with a warm-up and a cosine. After each of the
last 100 steps the loss of a batch of what was held back is taken, the same batches for all: by the form's own products,
and by bfloat16's. What is compared is the mean of those 100.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.models import ModularModelConfig, decoder
from capibara.parallel.trainer_step import FP8_HISTORY, StepOptions, WithHistory, initial_state, step_function
from capibara.precision import Fp8Settings

FORMS: dict[str, Fp8Settings | None] = {
    "bfloat16": None,
    "fp8": Fp8Settings(),
    "fp8 delayed": Fp8Settings(scaling="delayed"),
    "fp8 block": Fp8Settings(scales="block"),
}
HELD_BACK = 20


def sources(limit: int) -> tuple[np.ndarray, np.ndarray, dict[str, int]]:
    """(bytes to train on, bytes held back, how many files and bytes), files apart by a zero byte."""
    roots = {sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")}
    files = sorted({file.resolve() for root in roots for file in Path(root).rglob("*.py")})
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    size = 0
    for file in files:
        try:
            text = file.read_bytes()
        except OSError:  # a link that leads nowhere
            continue
        if not text or size + len(text) > limit:
            continue
        size += len(text) + 1
        held = int.from_bytes(hashlib.sha256(str(file).encode()).digest()[:8], "big") % HELD_BACK == 0
        parts[held].append(text + b"\0")
    train, back = (np.frombuffer(b"".join(parts[held]), np.uint8) for held in (False, True))
    counts = {"files": len(parts[False]), "bytes": train.size, "held_files": len(parts[True]), "held_bytes": back.size}
    return train, back, counts


class Windows:
    """Batches of windows at random places, each a function of the seed and the batch's number."""

    def __init__(self, text: np.ndarray, batch: int, length: int, seed: int) -> None:
        if text.size <= length + 1:
            raise SystemExit(f"{text.size} bytes are fewer than one window of {length + 1}")
        self.text, self.batch, self.length, self.seed = text, batch, length, seed

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        starts = np.random.default_rng((self.seed, number)).integers(0, self.text.size - self.length - 1, self.batch)
        rows = np.stack([self.text[start : start + self.length + 1] for start in starts]).astype(np.int32)
        return {"inputs": rows[:, :-1], "targets": rows[:, 1:]}


class AdamW:
    """AdamW with gradients clipped to a norm of 1, and a rate by step; what `step_function` asks of an optimizer."""

    def __init__(self, steps: int, rate: float) -> None:
        self.steps, self.rate = steps, rate

    def init(self, params: Any) -> dict[str, Any]:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return {"count": jnp.int32(0), "first": zeros, "second": zeros}

    def update(self, gradients: Any, state: dict[str, Any], params: Any) -> tuple[Any, dict[str, Any]]:
        count = state["count"] + 1
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradients)))
        gradients = jax.tree.map(lambda g: g * jnp.minimum(1, 1 / norm), gradients)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["first"], gradients)
        second = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, state["second"], gradients)
        warm = max(1, self.steps // 20)
        done = jnp.clip((count - warm) / max(1, self.steps - warm), 0, 1)
        rate = self.rate * jnp.minimum(count / warm, 0.55 + 0.45 * jnp.cos(math.pi * done))

        def change(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            way = m / (1 - 0.9**count) / (jnp.sqrt(v / (1 - 0.95**count)) + 1e-8)
            return -rate * (way + (0.1 * p if p.ndim > 2 else 0))

        return jax.tree.map(change, params, first, second), {"count": count, "first": first, "second": second}


def train(form: str, model: ModularModelConfig, asked: Any, windows: Windows, back: Windows) -> dict[str, Any]:
    fp8 = FORMS[form]
    unroll = jax.default_backend() == "gpu" or 1

    def loss_in(fp8: Fp8Settings | None) -> Any:
        def loss(params: Any, batch: Any, key: Any) -> Any:
            params, history = params if isinstance(params, WithHistory) else (params, None)
            return decoder.loss(model, params, batch, unroll=unroll, fp8=fp8, fp8_history=history)

        return loss

    optimizer, options = AdamW(asked.steps, asked.rate), StepOptions("mixed" if fp8 is None else "fp8")
    history = None if fp8 is None else decoder.fp8_history_shapes(model, fp8)
    params = jax.jit(lambda key: decoder.init(model, key))(jax.random.key(asked.seed))
    state = jax.jit(lambda p: initial_state(optimizer, p, options, fp8_history=history))(params)
    started = time.perf_counter()
    step = jax.jit(step_function(loss_in(fp8), optimizer, options), donate_argnums=(0, 1))
    # As the trainer compiles it on a GPU, and the same for all forms.
    on_gpu = {"xla_gpu_enable_triton_gemm": False} if jax.default_backend() == "gpu" else None
    step = step.lower(params, state, windows[0]).compile(compiler_options=on_gpu)
    compile_s = time.perf_counter() - started
    print(f"{form}: compiled in {compile_s:.1f} s", flush=True)

    def evaluation(fp8: Fp8Settings | None) -> Any:
        run = jax.jit(lambda p, b: loss_in(fp8)(p, b, None)[1]["loss"])
        return run.lower(params, windows[0]).compile(compiler_options=on_gpu)

    plain = evaluation(None)
    evaluate = {"own": plain if fp8 is None else evaluation(fp8), "bfloat16": plain}
    losses: list[Any] = []
    held: dict[str, list[Any]] = {name: [] for name in evaluate}
    started, spent = time.perf_counter(), 0.0
    for number in range(asked.steps):
        params, state, metrics = step(params, state, windows[number])
        losses.append(metrics["loss"])
        if number + 1 == asked.steps - asked.last:
            jax.block_until_ready(metrics)
            spent = time.perf_counter() - started
        if number >= asked.steps - asked.last:
            batch = back[number - (asked.steps - asked.last)]
            for name, run in evaluate.items():
                held[name].append(run(params, batch))
        if (number + 1) % max(1, asked.steps // 20) == 0:
            took = time.perf_counter() - started
            print(f"{form}: step {number + 1}, loss {float(losses[-1]):.4f}, {took:.0f} s", flush=True)
    row = {
        "form": form,
        "compile_s": compile_s,
        "ms_a_step": spent / max(1, asked.steps - asked.last) * 1e3,
        "train_loss": float(np.mean([float(x) for x in losses[-asked.last :]])),
        "held_back_loss": float(np.mean([float(x) for x in held["own"]])),
        "held_back_loss_by_bfloat16_products": float(np.mean([float(x) for x in held["bfloat16"]])),
        "skipped_steps": int(state["skipped"]),
        "losses": [round(float(x), 5) for x in losses[:: max(1, asked.steps // 100)]],
    }
    if FP8_HISTORY in state:
        row["largest_of_history"] = max(float(leaf.max()) for leaf in jax.tree.leaves(state[FP8_HISTORY]))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", default="bfloat16;fp8", help=f"apart by ; of {'; '.join(FORMS)}")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--last", type=int, default=100, help="steps whose losses are averaged")
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rate", type=float, default=6e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bytes", type=int, default=400_000_000, help="of sources, at the most")
    parser.add_argument("--out", help="write the rows as JSON")
    asked = parser.parse_args()
    started = time.perf_counter()
    text, held, counts = sources(asked.bytes)
    print(f"{counts} in {time.perf_counter() - started:.1f} s", flush=True)
    heads = max(1, asked.hidden // 64)
    model = ModularModelConfig(
        hidden=asked.hidden,
        layers=asked.layers,
        vocab=256,
        max_length=asked.length,
        blocks={"attention": {"heads": heads}, "mlp": {"ffn": asked.hidden * 8 // 3 // 128 * 128 or 128}},
    )
    windows = Windows(text, asked.batch, asked.length, asked.seed)
    back = Windows(held, asked.batch, asked.length, asked.seed + 1)
    rows = []
    for form in asked.forms.split(";"):
        rows.append(train(form, model, asked, windows, back))
        first = rows[0]
        for name in ("train_loss", "held_back_loss", "held_back_loss_by_bfloat16_products"):
            rows[-1][f"{name}_over_{first['form']}"] = rows[-1][name] / first[name]
        print({key: value for key, value in rows[-1].items() if key != "losses"}, flush=True)
        if asked.out:  # after each form: what is cut short leaves what it has
            document = {
                "date": time.strftime("%Y-%m-%d"),
                "device": jax.devices()[0].device_kind,
                "versions": {"jax": jax.__version__, "python": platform.python_version()},
                "command": " ".join(["python", *sys.argv]),
                "parameters": model.parameters,
                "sources": counts,
                "rows": rows,
            }
            Path(asked.out).write_text(json.dumps(document, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
