"""The engine on one GPU, beside Hugging Face with a static cache and with its continuous batching.

    python benchmarks/serve_gpu.py --out serve.json                     # the 1.14B Llama shape, 512 prompt + 128 new
    python benchmarks/serve_gpu.py --forms 'capibara;hf_static' --batches 1,32
    python benchmarks/serve_gpu.py --forms 'capibara;capibara_int8'     # predicted beside measured at three batches
    python benchmarks/serve_gpu.py --forms latency --target 5           # inter-token times from 1 to 200 users
    python benchmarks/serve_gpu.py --forms 'kernels;kernels_int8' --batches 1,32,256 # what a decoding step is made of
    JAX_PLATFORMS=cpu python benchmarks/serve_gpu.py --preset dev --prompt 32 --new 8 --batches 1,2 \\
        --repeats 1 --max-batch-tokens 64

Each form is a process of its own, one after another, so that none shares the GPU. Tokens per second are new tokens over
the whole time, prompts included; `decode` leaves prompts out. Every form draws the likeliest token and ends after 128.
Each batch is run `--repeats` times after one that warms it up, and the best is kept, of every form alike.

Beside what the engine does stands what `capibara.serve.prediction` says of the same batch on `--predict-on`, from the
engine's own programs and without a GPU. The last line on a laptop tries the script; its figures are of no use.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FORMS = ("capibara", "capibara_int8", "hf_static", "hf_batch")
PREDICTED = {"capibara": None, "capibara_int8": "int8"}
"""The engine's forms, and how each holds its weights."""


def _best(run: Any, batch: int, repeats: int) -> dict[str, float]:
    """Of so many runs after one that warms up; told at once, so that a form that is cut off has what it had."""
    run(batch)
    rows = [run(batch) for _ in range(repeats)]
    best = max(rows, key=lambda row: row["tokens_per_second"])
    print(json.dumps({"batch": batch, "row": best}), flush=True)
    return best


def _engine(asked: argparse.Namespace, **changes: Any) -> Any:
    from capibara.models import ModularCapibaraModel, load_preset
    from capibara.serve import Engine, EngineConfig

    model = ModularCapibaraModel(load_preset(asked.preset).model, precision="bfloat16")
    config = {**_settings(asked), "cache_folder": asked.programs}
    return Engine(model, config=EngineConfig(**{**config, **changes}))


def _settings(asked: argparse.Namespace) -> dict[str, Any]:
    most = max(asked.batches)
    return {
        "max_sequences": most, "max_batch_tokens": max(asked.max_batch_tokens, most),
        "max_length": asked.prompt + 2 * asked.new, "prefix_sharing": False,
        "overlap": {"on": True, "off": False, None: None}[asked.overlap],
    }  # fmt: skip


def _predicted(asked: argparse.Namespace, weights: str | None) -> dict[str, Any]:
    """The same batches by the engine's own scheduler and programs, in predicted time."""
    from capibara.models import load_preset
    from capibara.plan.place import place
    from capibara.serve import EngineConfig
    from capibara.serve.cache_size import cache_size
    from capibara.serve.load.trace import Lengths
    from capibara.serve.prediction.served import ServedModel
    from capibara.serve.prediction.simulation import SimulatedEngine, Traffic, all_at_once
    from capibara.serve.prediction.step_times import StepTimes

    where = place(asked.predict_on)
    served = ServedModel(asked.preset, load_preset(asked.preset).model, "bfloat16")
    config = EngineConfig(**_settings(asked), weights=weights)
    length = min(asked.prompt + 2 * asked.new, served.config.max_length)
    size = cache_size(
        served.config, config, max_length=length, dtype="bfloat16", weight_bytes=0,
        device_bytes=where.chip.capacity_bytes,
    )  # fmt: skip
    times = StepTimes(served, config, where, pages=size.pages, max_length=length)
    traffic = Traffic([Lengths(asked.prompt, asked.new)])
    rows = {}
    for batch in asked.batches:
        outcome = all_at_once(SimulatedEngine(times, size), traffic, batch)
        seconds = batch * asked.new / outcome.output_tokens_per_second
        rows[str(batch)] = {"tokens_per_second": outcome.output_tokens_per_second, "seconds": seconds}
    return {"on": where.name, "batches": rows}


def _capibara(asked: argparse.Namespace, **changes: Any) -> dict[str, Any]:
    import numpy as np

    from capibara.serve import Request, SamplingParams

    start = time.perf_counter()
    engine = _engine(asked, **changes)
    vocab = engine.model.config.vocab
    sampling = SamplingParams(max_tokens=asked.new, temperature=0, ignore_eos=True)
    made = engine.warm_up()
    ready = time.perf_counter() - start
    draw = np.random.default_rng(0)

    def run(batch: int) -> dict[str, float]:
        for number in range(batch):
            engine.add(
                Request(str(number), tuple(draw.integers(0, min(vocab, 30000), asked.prompt).tolist()), sampling)
            )
        start, first, seen, at_first = time.perf_counter(), None, 0, 0
        while engine.has_work():
            seen += sum(len(output.tokens) for output in engine.step())
            scheduler = engine.scheduler
            if first is None and not scheduler.waiting and all(s.generated for s in scheduler.running):
                first, at_first = time.perf_counter(), seen
        end = time.perf_counter()
        assert seen == batch * asked.new
        row = {"tokens_per_second": seen / (end - start), "seconds": end - start}
        if first is not None and end > first:
            row["decode_tokens_per_second"] = (seen - at_first) / (end - first)
        return row

    rows = {str(batch): _best(run, batch, asked.repeats) for batch in asked.batches}
    return {
        "batches": rows,
        "ready_seconds": ready,
        "programs": made.programs,
        "compiled": made.compiled,
        "compiled_while_running": engine.stats().compilations - made.compiled,
        "cache": str(engine.cache_size),
    }


def _kernels(asked: argparse.Namespace, **changes: Any) -> dict[str, Any]:
    """The kernels of the middle half of each batch's run, by the profiler's trace: decoding, and no prompts."""
    import tempfile

    import jax
    import numpy as np

    from capibara.serve import Request, SamplingParams

    engine = _engine(asked, **changes)
    engine.warm_up(forms=("greedy",))
    draw = np.random.default_rng(0)
    sampling = SamplingParams(max_tokens=asked.new, temperature=0, ignore_eos=True)

    def run(batch: int) -> None:
        for number in range(batch):
            prompt = draw.integers(0, min(engine.model.config.vocab, 30000), asked.prompt)
            engine.add(Request(str(number), tuple(prompt.tolist()), sampling))
        while engine.has_work():
            engine.step()

    batches = {}
    for batch in asked.batches:
        run(batch)
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                run(batch)
            (file,) = Path(folder).rglob("*.xplane.pb")
            planes = jax.profiler.ProfileData.from_file(str(file)).planes
            lines = [line for plane in planes if "/device:GPU" in plane.name for line in plane.lines]
            events = sorted(
                (event.start_ns, event.duration_ns, event.name)
                for line in lines
                if line.name.startswith("Stream")
                for event in line.events
            )
        events = events[len(events) // 4 : 3 * len(events) // 4]
        if not events:
            print("no rows of a GPU in the trace", file=sys.stderr)
            continue
        names: dict[str, list[float]] = {}
        for _, nanoseconds, name in events:
            names.setdefault(name, []).append(1e-3 * nanoseconds)
        last = events[-1]
        batches[str(batch)] = {
            "span_ms": 1e-6 * (last[0] + last[1] - events[0][0]),
            "busy_ms": 1e-6 * sum(event[1] for event in events),
            "kernels": [
                {"name": name, "count": len(us), "us": sum(us) / len(us)}
                for name, us in sorted(names.items(), key=lambda item: -sum(item[1]))[:24]
            ],
        }
    return {"of_kernels": batches}


def _hf_model(asked: argparse.Namespace) -> Any:
    """The preset's shape as Hugging Face has it, with weights drawn by chance."""
    import torch
    import transformers

    from capibara.models import load_preset

    model = load_preset(asked.preset).model
    attention, mlp = model.blocks["attention"], model.blocks["mlp"]
    config = transformers.LlamaConfig(
        vocab_size=model.vocab, hidden_size=model.hidden, num_hidden_layers=model.layers,
        num_attention_heads=attention.heads, num_key_value_heads=attention.kv_heads, intermediate_size=mlp.ffn,
        max_position_embeddings=model.max_length, eos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()


def _hf_static(asked: argparse.Namespace) -> dict[str, Any]:
    import torch

    model = _hf_model(asked)

    def run(batch: int) -> dict[str, float]:
        ids = torch.randint(0, min(30000, model.config.vocab_size), (batch, asked.prompt), device="cuda")
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=asked.new, min_new_tokens=asked.new,
                do_sample=False, cache_implementation="static", pad_token_id=0,
            )  # fmt: skip
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        assert out.shape[1] == asked.prompt + asked.new
        return {"tokens_per_second": batch * asked.new / seconds, "seconds": seconds}

    return {"batches": {str(batch): _best(run, batch, asked.repeats) for batch in asked.batches}}


def _hf_batch(asked: argparse.Namespace) -> dict[str, Any]:
    import torch
    from transformers import GenerationConfig

    model = _hf_model(asked)
    generation = GenerationConfig(max_new_tokens=asked.new, do_sample=False, eos_token_id=-1, pad_token_id=0)

    def run(batch: int) -> dict[str, float]:
        inputs = [torch.randint(0, min(30000, model.config.vocab_size), (asked.prompt,)).tolist() for _ in range(batch)]
        torch.cuda.synchronize()
        start = time.perf_counter()
        # Its cache and its CUDA graphs are made by the run that warms up, and kept: they are no part of a batch's time.
        out = model.generate_batch(
            inputs=inputs, generation_config=generation, progress_bar=False, persistent_manager=True
        )
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        seen = sum(len(one.generated_tokens) for one in out.values())
        # It gives what it has where something went wrong.
        assert seen == batch * asked.new, f"{seen} tokens of {batch * asked.new}: {[one.error for one in out.values()]}"
        return {"tokens_per_second": seen / seconds, "seconds": seconds}

    rows = {}
    for batch in asked.batches:
        rows[str(batch)] = _best(run, batch, asked.repeats)
        model.destroy_cached_continuous_batching_manager()  # the next batch's cache is of another size
    return {"batches": rows}


def _lacking(form: str) -> str:
    """What a form needs and this machine has not; empty where it has all."""
    if not form.startswith("hf_"):
        return ""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        return f"left out: pip install {' '.join(missing)}"
    import torch

    return "" if torch.cuda.is_available() else "left out: torch sees no CUDA GPU"


FIXED = ((64, 256), (96, 384), (128, 384), (128, 512), (192, 384), (256, 1024))
"""Settings that the controller is held against: sequences that run, tokens of prompts in a step."""


def _latency(asked: argparse.Namespace) -> dict[str, Any]:
    """Users who ask again as soon as they are answered, for the fixed trace of lengths: so many seconds for each number
    of them with the target kept to, and with the most of them for each fixed setting."""
    from capibara.serve.latency import LatencyController, choose_steps
    from capibara.serve.load.trace import fixed_trace, scaled

    engine = _engine(asked, max_length=asked.longest, max_sequences=256, max_batch_tokens=2048, memory_share=0.8)
    begin = time.perf_counter()
    choose_steps(engine, asked.target)
    made = engine.warm_up(forms=("greedy",))
    warm = time.perf_counter() - begin
    trace = scaled(fixed_trace(), engine.max_length)
    controller = LatencyController(engine, asked.target)
    report = controller.calibrate()
    calibrated = {str(shape): 1e3 * known.base for shape, known in controller._times.items()}
    rows = [_users(asked, engine, trace, users, controller) for users in asked.users]
    engine.on_step = None
    steps, fixed = engine.runner.shapes.decode_steps, []
    for sequences, prompts in FIXED if asked.fixed else ():
        for engine.decode_steps in dict.fromkeys((1, steps)):
            engine.limits.max_sequences = sequences
            engine.limits.prefill_tokens = engine.limits.prefill_chunk = prompts
            setting = {"sequences": sequences, "prompt_tokens": prompts, "steps": engine.decode_steps}
            fixed.append({**setting, **_users(asked, engine, trace, max(asked.users))})
    within = [row["tokens_per_second"] for row in fixed if row["p95_ms"] <= asked.target]
    return {
        "target_ms": asked.target, "possible": report.possible, "best_ms": report.best_ms, "rows": rows,
        "impossible": str(dataclasses.replace(report, target_ms=1.0, possible=report.best_ms <= 1.0)), "fixed": fixed,
        "of_best_fixed": rows[-1]["tokens_per_second"] / max(within) if within else None,
        "programs": made.programs, "warm_up_seconds": warm, "calibrated_ms_without_keys": calibrated,
    }  # fmt: skip


def _users(asked: argparse.Namespace, engine: Any, trace: Any, users: int, controller: Any = None) -> dict[str, float]:
    import numpy as np

    from capibara.serve import Request, SamplingParams

    draw, vocab = np.random.default_rng(users), engine.model.config.vocab
    numbers = itertools.count()
    gaps: list[float] = []
    firsts: list[float] = []
    running: list[int] = []
    last: dict[str, float] = {}
    began: dict[str, float] = {}

    def ask() -> None:
        number = next(numbers)
        lengths = trace[number % len(trace)]
        tokens = tuple(draw.integers(0, min(vocab, 30000), lengths.prompt).tolist())
        sampling = SamplingParams(max_tokens=lengths.output, temperature=0, ignore_eos=True)
        engine.add(Request(str(number), tokens, sampling))
        began[str(number)] = time.perf_counter()

    for _ in range(users):
        ask()
    start, seen = time.perf_counter(), 0
    settled = start + asked.seconds / 3  # who came first all begin together: they are not what is measured
    while (now := time.perf_counter()) - start < asked.seconds:
        if controller is not None:
            controller.adjust()
        outputs = engine.step()
        now = time.perf_counter()
        if controller is not None:
            controller.saw(outputs, now)
        counted = now >= settled
        running += [engine.stats().running] * counted
        for output in outputs:
            if output.tokens:
                seen += len(output.tokens) * counted
                if output.id in last:
                    gaps += [now - last[output.id], *[0.0] * (len(output.tokens) - 1)] * counted
                else:
                    firsts += [now - began[output.id]] * counted
                last[output.id] = now
            if output.finish_reason is not None:
                ask()
    seconds = time.perf_counter() - settled
    for id in list(began):
        engine.cancel(id)
    while engine.has_work():
        engine.step()
    row = {
        "users": users,
        "p50_ms": 1e3 * float(np.percentile(gaps, 50)),
        "p95_ms": 1e3 * float(np.percentile(gaps, 95)),
        "first_token_p50_ms": 1e3 * float(np.percentile(firsts, 50)) if firsts else float("nan"),
        "first_token_p95_ms": 1e3 * float(np.percentile(firsts, 95)) if firsts else float("nan"),
        "running": float(np.mean(running)),
        "tokens_per_second": seen / seconds,
    }
    print(row, file=sys.stderr, flush=True)
    return row


def run_form(form: str, asked: argparse.Namespace) -> dict[str, Any]:
    if asked.trust and not form.startswith("hf_"):
        from capibara.kernels import trust

        trust(asked.trust)
    if form == "capibara":
        return _capibara(asked)
    if form == "capibara_int8":
        return _capibara(asked, weights="int8")
    if form in ("kernels", "kernels_int8"):
        return _kernels(asked, weights="int8" if form == "kernels_int8" else None)
    if form == "latency":
        return _latency(asked)
    if form.startswith("predicted:"):
        return _predicted(asked, PREDICTED[form.removeprefix("predicted:")])
    return _hf_static(asked) if form == "hf_static" else _hf_batch(asked)


def _device(form: str) -> str:
    """Asked for by the form's own process: who asks for a GPU holds its memory."""
    if form.startswith("hf_"):
        import torch

        return str(torch.cuda.get_device_name())
    import jax

    return str(jax.devices()[0].device_kind)


def _in_a_process(form: str, seconds: float | None, **environment: str) -> dict[str, Any] | None:
    command = [sys.executable, __file__, *sys.argv[1:], "--only", form]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, **environment}, check=False, timeout=seconds
        )
    except subprocess.TimeoutExpired as late:
        print(f"{form}: had not ended after {seconds:g} s", flush=True)
        told = [json.loads(line) for line in (late.output or b"").decode().splitlines() if line.startswith('{"batch"')]
        return {"batches": {str(one["batch"]): one["row"] for one in told}, "cut_off": True} if told else None
    if done.returncode:
        print(f"{form}: failed\n{done.stderr[-1500:]}", flush=True)
        return None
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def _show(form: str, found: dict[str, Any]) -> None:
    predicted = (found.get("predicted") or {}).get("batches", {})
    for batch, row in found.get("batches", {}).items():
        line = f"{form} at {batch}: {row['tokens_per_second']:,.0f} tokens/s"
        if batch in predicted:
            expected = predicted[batch]["tokens_per_second"]
            off = expected / row["tokens_per_second"] - 1
            line += f"; predicted on {found['predicted']['on']} {expected:,.0f} ({100 * off:+.0f} %)"
        print(line, flush=True)
    for batch, row in found.get("of_kernels", {}).items():
        print(f"{form} at {batch}: busy {row['busy_ms']:.2f} of {row['span_ms']:.2f} ms", flush=True)
        for of in row["kernels"]:
            print(f"  {of['count']:6} x {of['us']:8.2f} us  {of['name']}", flush=True)
    for row in (*found.get("rows", ()), *found.get("fixed", ())):
        print(form, {key: round(value, 2) for key, value in row.items()}, flush=True)
    if "of_best_fixed" in found:
        print(form, "of the best fixed setting:", found["of_best_fixed"], "|", found["impossible"], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", default=";".join(FORMS), help="apart by ;")
    parser.add_argument("--batches", default="1,32,256")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--max-batch-tokens", type=int, default=8192, help="of one step of the engine")
    parser.add_argument("--trust", choices=("measured", "predicted"), help="which evidence the engine's kernels go by")
    parser.add_argument("--overlap", choices=("on", "off"), help="of kernels; by the engine's own rule if left out")
    parser.add_argument("--predict-on", default="h200", help="the chip that is predicted for; empty predicts nothing")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--preset", default="llama-1b")
    parser.add_argument("--programs", help="a folder where compiled programs are kept from run to run")
    parser.add_argument("--target", type=float, default=5.0, help="of the form latency, in ms")
    parser.add_argument("--longest", type=int, default=9216, help="of the form latency")
    parser.add_argument("--users", default="1,16,64,200", help="of the form latency, one number after another")
    parser.add_argument("--seconds", type=float, default=9.0, help="of the form latency, for each number of users")
    parser.add_argument(
        "--no-fixed", dest="fixed", action="store_false", help="of latency: no fixed settings beside it"
    )
    parser.add_argument("--form-seconds", type=float, help="a form that takes longer is cut off; by default none is")
    parser.add_argument("--out", type=Path, help="write the rows as JSON, after every form anew")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    asked.batches = [int(batch) for batch in asked.batches.split(",")]
    asked.users = [int(users) for users in asked.users.split(",")]
    if asked.only:
        print(json.dumps({**run_form(asked.only, asked), "device": _device(asked.only)}))
        return
    rows: dict[str, Any] = {}
    for form in asked.forms.split(";"):
        if lacking := _lacking(form):
            print(f"{form}: {lacking}", flush=True)
            continue
        found = _in_a_process(form, asked.form_seconds)
        if found is None:
            continue
        rows[form] = found
        if form in PREDICTED and asked.predict_on:
            # Nothing of it runs on the GPU, whose memory the next form wants whole.
            rows[form]["predicted"] = _in_a_process(f"predicted:{form}", None, JAX_PLATFORMS="cpu")
        _show(form, rows[form])
        if asked.out is not None:
            document = {
                "date": time.strftime("%Y-%m-%d"),
                "device": next((form["device"] for form in rows.values() if "device" in form), None),
                "versions": {"jax": importlib.metadata.version("jax"), "python": platform.python_version()},
                "command": " ".join(["python", *sys.argv]),
                "prompt": asked.prompt,
                "new": asked.new,
                "forms": rows,
            }
            asked.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
