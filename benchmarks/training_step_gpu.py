"""The whole training step of a 1.14B decoder, with this library's ops and without, in one run on one GPU.

    python benchmarks/training_step_gpu.py --out step.json
    python benchmarks/training_step_gpu.py --forms 'plain;all' --profile   # and the kernels that take the time
    python benchmarks/training_step_gpu.py --unrolled --forms 'models;models fp8;models fp8 delayed;models fp8 cublas'

The peer is the decoder of benchmarks/plain_llama.py: float32 weights and AdamW, bfloat16 products, layers in one scan.
A form says which of its parts go by `capibara.kernels`; the others are jax.numpy, and attention then is cuDNN's by
jax.nn. The form "models" is the library's own decoder of that shape, `capibara.models.decoder`, and the same optimizer.
"fp8" has its products in fp8: where XLA chooses between cuBLASLt's kernels and Triton's by timing them, "cublas" leaves
it the former alone, as the trainer does for fp8. "apart" has the activation of an mlp in a pass of its own, where
"models" has it inside of its products (`capibara.kernels.gated_mlp`). "unmerged" keeps XLA from making one product of
those of keys and values, whose halves are then copied apart. "unjoined" has the gradients of queries, keys and values
by products of their own, where "models" has them together. `against_models` is the rate over that of "models".
Forms take turns, round after round, so that what the machine does beside them falls on all. A chip that is held up by
its power, as an H200 is here, is faster for the first steps: --steps 10 or more shows what a run has.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from capibara.kernels import attention, cross_entropy, gated_activation, rms_norm, rope
from capibara.models import ModularModelConfig, decoder
from capibara.models.blocks import mlp, spec
from capibara.precision import Fp8Settings

_spec = importlib.util.spec_from_file_location("plain_llama", Path(__file__).with_name("plain_llama.py"))
assert _spec is not None
assert _spec.loader is not None
llama: Any = importlib.util.module_from_spec(_spec)
sys.modules["plain_llama"] = llama  # where its dataclass looks for its module
_spec.loader.exec_module(llama)

FORMS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "plain, bf16 logits": ("bf16 logits",),
    "attention": ("attention",),
    "attention+norm": ("attention", "norm"),
    "attention+loss": ("attention", "loss"),
    "attention+mlp": ("attention", "mlp"),
    "attention+rope": ("attention", "rope"),
    "all": ("attention", "norm", "rope", "mlp", "loss"),
    "models": ("models",),
    "models apart": ("models", "apart"),
    "models apart unmerged": ("models", "apart", "unmerged"),
    "models cublas": ("models", "cublas"),
    "models unmerged": ("models", "unmerged"),
    "models unjoined": ("models", "unjoined"),
    "models fp8": ("models", "fp8"),
    "models fp8 cublas": ("models", "fp8", "cublas"),
    "models fp8 delayed": ("models", "fp8", "delayed", "cublas"),
    "models fp8 block": ("models", "fp8", "block"),
}

OPTIONS: dict[str, tuple[str, Any]] = {
    "cublas": ("xla_gpu_enable_triton_gemm", False),
    "unmerged": ("xla_gpu_dot_merger_threshold_mb", 0),
}


def block(config: Any, ours: frozenset[str], x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    """One layer, with the parts named in `ours` by this library."""
    w = {name: weight if name.startswith("norm") else weight.astype(x.dtype) for name, weight in w.items()}

    def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
        if "norm" in ours:
            return rms_norm(x, weight, eps=config.epsilon)
        return llama.rms_norm(x, weight, config.epsilon)

    y = norm(x, w["norm_attention"])
    q, k, v = (jnp.einsum("bth,hnd->btnd", y, w[name]) for name in ("query", "key", "value"))
    if "rope" in ours:
        q, k = (rope(z, base=config.rope_base, layout="bthd") for z in (q, k))
    else:
        q, k = (llama.rotate(z, config.rope_base) for z in (q, k))
    if "attention" in ours:
        mixed = attention(q, k, v, causal=True, layout="bthd")
    else:
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    x = x + jnp.einsum("btnd,ndh->bth", mixed, w["out"])
    y = norm(x, w["norm_mlp"])
    gate, up = y @ w["gate"], y @ w["up"]
    wide = gated_activation(gate, up, kind="silu") if "mlp" in ours else jax.nn.silu(gate) * up
    return x + wide @ w["down"]


def loss(config: Any, ours: frozenset[str], params: dict[str, Any], batch: dict[str, jax.Array]) -> jax.Array:
    x = params["embed"].astype(jnp.bfloat16)[batch["inputs"]]
    layer = functools.partial(block, config, ours)
    if "unrolled" in ours:
        for i in range(config.layers):
            x = layer(x, {name: stacked[i] for name, stacked in params["layers"].items()})
    else:
        x, _ = jax.lax.scan(lambda carry, w: (layer(carry, w), None), x, params["layers"])
    x = llama.rms_norm(x, params["norm"], config.epsilon)
    head = params["unembed"].astype(x.dtype)
    if "loss" in ours:
        return cross_entropy(x, head, batch["targets"])
    if "bf16 logits" in ours:  # their gradient is bfloat16 then, and so are its products
        scores = (x @ head).astype(jnp.float32)
    else:
        scores = jnp.einsum("bth,hv->btv", x, head, preferred_element_type=jnp.float32)
    chosen = jnp.take_along_axis(scores, batch["targets"][..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(scores, axis=-1) - chosen)


def model_of(config: Any) -> ModularModelConfig:
    """The library's decoder of the peer's shape."""
    attention = {"heads": config.heads, "kv_heads": config.kv_heads, "rope_base": config.rope_base}
    blocks = {"attention": attention, "mlp": {"ffn": config.ffn}}
    return ModularModelConfig(
        hidden=config.hidden, layers=config.layers, vocab=config.vocab, blocks=blocks, norm_eps=config.epsilon
    )


def fp8_of(ours: Any) -> Fp8Settings | None:
    if "fp8" not in ours:
        return None
    return Fp8Settings(
        scaling="delayed" if "delayed" in ours else "current", scales="block" if "block" in ours else "tensor"
    )


def state_shapes(config: Any, ours: Any, shapes: Any) -> Any:
    """What the step keeps: the optimizer's, and what fp8 products are scaled by where that is the last steps."""
    fp8 = fp8_of(ours)
    return llama.state_shapes(shapes), None if fp8 is None else decoder.fp8_history_shapes(model_of(config), fp8)


def compiled_step(config: Any, ours: frozenset[str], batch: Any) -> Any:
    def value_of(params_and_history: Any, batch: Any) -> jax.Array:
        params, history = params_and_history
        if "models" in ours:
            unroll = "unrolled" in ours or 1
            fp8 = fp8_of(ours)
            return decoder.loss(model_of(config), params, batch, unroll=unroll, fp8=fp8, fp8_history=history)[0]
        return loss(config, ours, params, batch)

    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        moments, history = state
        value, (grads, seen) = jax.value_and_grad(value_of)((params, history), batch)
        params, moments = llama.adamw(params, grads, moments)
        if history is not None:  # the gradient of a history is this step's part of it
            history = jax.tree.map(lambda h, s: jnp.concatenate([s[..., :1], h[..., :-1]], -1), history, seen)
        return params, (moments, history), value

    shapes = decoder.param_shapes(model_of(config)) if "models" in ours else llama.param_shapes(config)
    with contextlib.ExitStack() as stack:
        if "apart" in ours:
            stack.enter_context(mock.patch.object(mlp, "has_kernels", return_value=False))
        if "unjoined" in ours:
            stack.enter_context(mock.patch.object(spec, "_joins_gradients", return_value=False))
        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(shapes, state_shapes(config, ours, shapes), batch)
    return lowered.compile(compiler_options=dict(option for word, option in OPTIONS.items() if word in ours))


def fp8_calls(compiled: Any) -> int:
    """Products that are one call of cuBLASLt's fp8 kernels; those that Triton won are not among them."""
    return (compiled.as_text() or "").count('custom_call_target="__cublas$lt$matmul$f8"')


def profiled(run: Callable[[], Any]) -> dict[str, Any]:
    """One step's kernels: name, milliseconds, launches, and what of the time after them the device was idle.

    The dearest come first. `window_ms` is from the first kernel's start to the last one's end, `idle_ms` what of it no
    kernel of any stream ran in.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        (file,) = Path(folder).rglob("*.xplane.pb")
        events = [
            (event.start_ns, event.start_ns + event.duration_ns, event.name)
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes
            if "GPU" in plane.name
            for line in plane.lines
            if "Stream" in line.name
            for event in line.events
        ]
    spent: Counter[str] = Counter()
    idle: Counter[str] = Counter()
    count: Counter[str] = Counter()
    reached, last = 0.0, ""
    for start, end, name in sorted(events):
        if last and start > reached:
            idle[last] += (start - reached) / 1e6
        if end > reached:
            reached, last = end, name
        spent[name] += (end - start) / 1e6
        count[name] += 1
    return {
        "window_ms": (reached - min(start for start, _, _ in events)) / 1e6,
        "idle_ms": idle.total(),
        "launches": count.total(),
        "kernels": [
            {"name": name, "ms": total, "launches": count[name], "idle_after_ms": idle[name]}
            for name, total in spent.most_common(60)
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1b", choices=llama.SHAPES)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--forms", default=";".join(FORMS), help="apart by ;")
    parser.add_argument("--unrolled", action="store_true", help="layers one after another instead of a scan")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5, help="in each round")
    parser.add_argument("--profile", action="store_true", help="the kernels of one step of each form")
    parser.add_argument("--out", help="write the rows as JSON")
    asked = parser.parse_args()
    config = llama.SHAPES[asked.shape]
    ids = jax.random.randint(jax.random.key(1), (asked.batch, asked.sequence + 1), 0, config.vocab)
    batch = {"inputs": ids[:, :-1], "targets": ids[:, 1:]}
    init = jax.jit(functools.partial(llama.init, config))
    init_of_models = jax.jit(functools.partial(decoder.init, model_of(config)))

    def fresh(form: str) -> tuple[Any, Any]:
        params = (init_of_models if "models" in FORMS[form] else init)(jax.random.key(0))
        shapes = state_shapes(config, FORMS[form], params)
        return params, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    forms = asked.forms.split(";")
    steps, rows = {}, {}
    for form in forms:
        start = time.perf_counter()
        steps[form] = compiled_step(config, frozenset(FORMS[form]) | ({"unrolled"} if asked.unrolled else set()), batch)
        stats = steps[form].memory_analysis()
        rows[form] = {
            "form": form,
            "compile_s": time.perf_counter() - start,
            "temporaries_gib": stats.temp_size_in_bytes / 2**30,
            "fp8_calls": fp8_calls(steps[form]),
            "seconds": [],
        }
        made = f"{rows[form]['fp8_calls']} products by cuBLASLt in fp8"
        print(f"{form}: compiled in {rows[form]['compile_s']:.1f} s, {made}", flush=True)
    for _ in range(asked.rounds):
        for form in forms:
            params, state = fresh(form)
            params, state, value = jax.block_until_ready(steps[form](params, state, batch))
            rows[form]["first_loss"] = float(value)
            for _ in range(asked.steps):
                start = time.perf_counter()
                params, state, value = jax.block_until_ready(steps[form](params, state, batch))
                rows[form]["seconds"].append(time.perf_counter() - start)
            rows[form]["last_loss"] = float(value)
            if asked.profile and "kernels" not in rows[form]:
                rows[form] |= profiled(functools.partial(steps[form], params, state, batch))
            del params, state
    tokens = asked.batch * asked.sequence
    for row in rows.values():
        row["ms"] = statistics.median(row.pop("seconds")) * 1e3
    for row in rows.values():
        row["tokens_per_second"] = tokens / row["ms"] * 1e3
        for peer in ("plain", "models"):
            row[f"against_{peer}"] = rows[peer]["ms"] / row["ms"] if peer in rows else None
        print(
            f"{row['form']:18s} {row['ms']:7.1f} ms {row['tokens_per_second']:9,.0f} tokens/s "
            f"{row['against_plain'] or float('nan'):.3f} of plain's, {row['against_models'] or float('nan'):.3f} of "
            f"models', temporaries {row['temporaries_gib']:.1f} GiB, "
            f"loss {row['first_loss']:.4f} -> {row['last_loss']:.4f}"
        )
    if asked.out:
        document = {
            "date": time.strftime("%Y-%m-%d"),
            "device": jax.devices()[0].device_kind,
            "versions": {"jax": jax.__version__, "python": platform.python_version()},
            "command": " ".join(["python", *sys.argv]),
            "rows": list(rows.values()),
        }
        Path(asked.out).write_text(json.dumps(document, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
