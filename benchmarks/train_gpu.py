"""`capibara train` itself on one GPU, beside a hand-written step, plain JAX and Hugging Face under torch.compile.

    python benchmarks/train_gpu.py --out train.json                       # the 1.14B Llama shape, B8 T2048, AdamW
    python benchmarks/train_gpu.py --forms 'capibara;plain' --rounds 2

Each form is a process of its own, one after another, round after round, so that none shares the GPU. All train on the
same batches, of ids as frequent as words are (the n-th as 1 / (n + 2.7)): how often an id comes decides how long the
embedding's gradient takes. `capibara` is the command as a user runs it: data read and packed as a stream (so that
attention is over whole rows, as the others' is), every step logged, checkpoints on; its figure is the median of
metrics.jsonl. `models` is the library's decoder, `hand` a step written by hand around our attention and loss, `plain`
is jax.numpy and cuDNN's attention: all unrolled, without data or logs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BATCH, LENGTH = 8, 2048
FORMS = ("capibara", "models", "hand", "plain", "hf")
VOCAB = 32000


def _write_ids(file: Path, steps: int) -> None:
    import numpy as np

    chances = 1 / (np.arange(VOCAB) + 2.7)
    ids = np.random.default_rng(0).choice(VOCAB, BATCH * (LENGTH + 1) * (steps + 8), p=chances / chances.sum())
    np.save(file, ids.astype(np.int32))
    words = {"type": "WordLevel", "vocab": {f"w{number}": number for number in range(VOCAB)}, "unk_token": "w0"}
    tokenizer = {"version": "1.0", "added_tokens": [], "model": words}
    file.with_name("tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")


def _batches(file: Path, steps: int) -> Any:
    """[steps, batch, length + 1] of the ids that every form reads."""
    import numpy as np

    return np.load(file)[: steps * BATCH * (LENGTH + 1)].reshape(steps, BATCH, LENGTH + 1)


def _capibara(precision: str, steps: int, ids: Path) -> dict[str, Any]:
    from capibara.train.logs import read_metrics

    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "train.steps": steps,
            "train.precision": precision,
            "train.batch_size": BATCH,
            "train.sequence_length": LENGTH,
            "train.checkpoint_every": steps,
            "train.eval_batches": 1,
            "data.path": str(ids),
            "model.tokenizer": str(ids.with_name("tokenizer.json")),
            "data.pack": "stream",
            "data.shuffle": "false",
            "log.every": 1000,
        }
        command = [sys.executable, "-m", "capibara", "train", "gpu", "--out", f"{folder}/run"]
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        rows = [row for row in read_metrics(f"{folder}/run/metrics.jsonl") if "loss" in row]
        run = Path(folder, "run", "run.json")
        kept = json.loads(run.read_text(encoding="utf-8")) if run.exists() else {}
    seconds = [row["seconds"] for row in rows[5:]]
    return {"seconds": seconds, "first_loss": rows[0]["loss"], "last_loss": rows[-1]["loss"], "run": kept}


def _by_hand(form: str, precision: str, steps: int, ids: Path) -> dict[str, Any]:
    """In this process: the step of training_step_gpu.py, unrolled."""
    import functools

    import jax
    import jax.numpy as jnp

    sys.path.insert(0, str(HERE))
    import training_step_gpu as bench

    llama = bench.llama
    config = llama.SHAPES["1b"]
    model = bench.model_of(config)
    if form == "models" and precision == "bfloat16":
        raise SystemExit("the form models is of float32 weights: leave --precision out")
    parts = frozenset({"attention", "loss"} if form == "hand" else ()) | {"unrolled"}
    dtype = jnp.bfloat16 if precision == "bfloat16" else jnp.float32
    shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, dtype), llama.param_shapes(config))

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(functools.partial(bench.loss, config, parts))(params, batch)
        params, state = llama.adamw(params, gradients, state)
        params, state = jax.tree.map(lambda x: x if x.dtype == jnp.int32 else x.astype(dtype), (params, state))
        return params, state, value

    batches = [
        {"inputs": jnp.asarray(rows[:, :-1]), "targets": jnp.asarray(rows[:, 1:])} for rows in _batches(ids, steps)
    ]
    if form == "models":  # the library's own decoder
        words = frozenset({"models", "unrolled"})
        compiled, init = bench.compiled_step(config, words, batches[0]), functools.partial(bench.decoder.init, model)
        state_shapes = bench.state_shapes(config, words, jax.eval_shape(init, jax.random.key(0)))
    else:
        state_shapes, init = llama.state_shapes(shapes), functools.partial(llama.init, config)
        compiled = jax.jit(step, donate_argnums=(0, 1)).lower(shapes, state_shapes, batches[0]).compile()
    params = jax.jit(lambda key: jax.tree.map(lambda x: x.astype(dtype), init(key)))(jax.random.key(0))
    state = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), state_shapes)
    seconds, losses = [], []
    for batch in batches:
        start = time.perf_counter()
        params, state, value = compiled(params, state, batch)
        losses.append(float(value))
        seconds.append(time.perf_counter() - start)
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 2**30
    return {"seconds": seconds[5:], "first_loss": losses[0], "last_loss": losses[-1], "peak_gib": peak}


def _hugging_face(precision: str, steps: int, ids: Path) -> dict[str, Any]:
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=2048, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=8,
        intermediate_size=8192, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    torch.set_float32_matmul_precision("high")
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    model = transformers.LlamaForCausalLM(config).to("cuda", dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    compiled = torch.compile(model)
    # It shifts the labels itself.
    batches = [torch.tensor(rows[:, :-1], dtype=torch.long, device="cuda") for rows in _batches(ids, steps)]
    seconds, losses = [], []
    for batch in batches:
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16, enabled=precision != "bfloat16"):
            loss = compiled(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30
    return {"seconds": seconds[5:], "first_loss": losses[0], "last_loss": losses[-1], "peak_gib": peak}


def run_form(form: str, precision: str, steps: int, ids: Path) -> dict[str, Any]:
    if form == "capibara":
        return _capibara(precision, steps, ids)
    return _hugging_face(precision, steps, ids) if form == "hf" else _by_hand(form, precision, steps, ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", default=";".join(FORMS), help="apart by ;")
    parser.add_argument(
        "--precision",
        default="mixed",
        choices=("mixed", "bfloat16", "fp8"),
        help="fp8 is capibara's; others train in mixed",
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", help="write the rows as JSON")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--ids", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.only:
        print(json.dumps(run_form(asked.only, asked.precision, asked.steps, Path(asked.ids))))
        return
    forms = asked.forms.split(";")
    rows: dict[str, list[dict[str, Any]]] = {form: [] for form in forms}
    # A second round finds its programs compiled.
    environment = {"JAX_COMPILATION_CACHE_DIR": tempfile.mkdtemp(), **os.environ}
    ids = Path(tempfile.mkdtemp(), "ids.npy")
    _write_ids(ids, asked.steps)
    for _ in range(asked.rounds):
        for form in forms:
            start = time.perf_counter()
            command = [sys.executable, __file__, "--only", form, "--precision", asked.precision, "--ids", str(ids)]
            done = subprocess.run(
                [*command, "--steps", str(asked.steps)], capture_output=True, text=True, env=environment, check=False
            )
            if done.returncode:
                print(f"{form}: failed\n{done.stderr[-1500:]}", flush=True)
                continue
            rows[form].append(json.loads(done.stdout.splitlines()[-1]))
            median = statistics.median(rows[form][-1]["seconds"])
            took = time.perf_counter() - start
            print(f"{form}: {median * 1e3:.1f} ms, {BATCH * LENGTH / median:,.0f} tokens/s ({took:.0f} s)", flush=True)
    table = []
    for form, results in rows.items():
        seconds = [second for result in results for second in result.pop("seconds")]
        if seconds:
            ms = statistics.median(seconds) * 1e3
            table.append({"form": form, "ms": ms, "tokens_per_second": BATCH * LENGTH / ms * 1e3, "rounds": results})
    for row in table:
        for other in table:
            row[f"over_{other['form']}"] = other["ms"] / row["ms"]
        print({key: round(value, 3) for key, value in row.items() if isinstance(value, float)})
    if asked.out:
        import jax

        document = {
            "date": time.strftime("%Y-%m-%d"),
            "device": jax.devices()[0].device_kind,
            "versions": {"jax": jax.__version__, "python": platform.python_version()},
            "command": " ".join(["python", *sys.argv]),
            "precision": asked.precision,
            "rows": table,
        }
        Path(asked.out).write_text(json.dumps(document, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
