"""The peer: a decoder of any Llama shape with AdamW in plain JAX, written out by hand, without `capibara.models`.

    python benchmarks/plain_llama.py --shape tiny --steps 3                  # run it on what is attached
    python benchmarks/plain_llama.py --shape 1b --batch 8 --sequence 2048    # on one H200
    capibara plan benchmarks/plain_llama.py:loss --train --on v4-64          # planned as any JAX program is

Only benchmarks, and tests that hold predictions against it, use it: the library's decoder is `capibara.models.decoder`.
It is also what was compiled for v4 and measured on an H200 (benchmarks/results), so it stays as it is. Weights are
float32, products are bfloat16 with float32 sums, layers are one scan, logits are written out. With `fused` attention is
`capibara.kernels.attention`, else jax.nn's.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import time
from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels import attention
from capibara.mesh import with_sharding_constraint

REMAT = {
    "none": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape of a decoder. Heads are `hidden // heads` wide."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int = 32000
    remat: str = "none"
    """What the backward pass keeps of a layer: everything, its matrix products, or only what enters it."""
    fused: bool = True
    """Attention by `capibara.kernels.attention`; or the plain form, which builds the table of scores."""
    rope_base: float = 10000.0
    epsilon: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def parameters(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(param_shapes(self)))


SHAPES = {
    "tiny": Config(hidden=64, layers=2, heads=4, kv_heads=2, ffn=128, vocab=256),
    "1b": Config(hidden=2048, layers=16, heads=16, kv_heads=8, ffn=8192),
    "7b": Config(hidden=4096, layers=32, heads=32, kv_heads=32, ffn=11008),
    "13b": Config(hidden=5120, layers=40, heads=40, kv_heads=40, ffn=13824),
    "70b": Config(hidden=8192, layers=80, heads=64, kv_heads=8, ffn=28672),
}


def param_shapes(config: Config) -> dict[str, Any]:
    """Every weight's shape. A layer's weights are stacked on a leading axis."""
    c, wide = config, config.head_dim
    layer = {
        "norm_attention": (c.hidden,),
        "query": (c.hidden, c.heads, wide),
        "key": (c.hidden, c.kv_heads, wide),
        "value": (c.hidden, c.kv_heads, wide),
        "out": (c.heads, wide, c.hidden),
        "norm_mlp": (c.hidden,),
        "gate": (c.hidden, c.ffn),
        "up": (c.hidden, c.ffn),
        "down": (c.ffn, c.hidden),
    }
    stacked = {name: jax.ShapeDtypeStruct((c.layers, *shape), jnp.float32) for name, shape in layer.items()}
    table = jax.ShapeDtypeStruct((c.vocab, c.hidden), jnp.float32)
    return {
        "embed": table,
        "layers": stacked,
        "norm": jax.ShapeDtypeStruct((c.hidden,), jnp.float32),
        "unembed": jax.ShapeDtypeStruct((c.hidden, c.vocab), jnp.float32),
    }


def init(config: Config, key: jax.Array) -> dict[str, Any]:
    """Weights: norms are one, the rest normal with the fan-in's deviation."""
    leaves, tree = jax.tree.flatten_with_path(param_shapes(config))

    def one(index: int, path: Any, leaf: Any) -> jax.Array:
        if "norm" in jax.tree_util.keystr(path):
            return jnp.ones(leaf.shape, leaf.dtype)
        return jax.random.normal(jax.random.fold_in(key, index), leaf.shape, leaf.dtype) * config.hidden**-0.5

    return jax.tree.unflatten(tree, [one(i, path, leaf) for i, (path, leaf) in enumerate(leaves)])


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return (wide * scale * weight).astype(x.dtype)


def rotate(x: jax.Array, base: float) -> jax.Array:
    """Rotary positions, the two halves of a head being one pair of coordinates. Angles are float32."""
    length, half = x.shape[1], x.shape[-1] // 2
    angles = jnp.arange(length, dtype=jnp.float32)[:, None] * base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def block(config: Config, x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    """One layer, [batch, sequence, hidden] to the same."""
    w = {name: weight if name.startswith("norm") else weight.astype(x.dtype) for name, weight in w.items()}
    named = functools.partial(with_sharding_constraint, names=("batch", "sequence", "heads", None))

    y = rms_norm(x, w["norm_attention"], config.epsilon)
    q = rotate(named(jnp.einsum("bth,hnd->btnd", y, w["query"])), config.rope_base)
    k = rotate(named(jnp.einsum("bth,hnd->btnd", y, w["key"])), config.rope_base)
    v = named(jnp.einsum("bth,hnd->btnd", y, w["value"]))
    if config.fused:
        mixed = attention(q, k, v, causal=True)
    else:
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + jnp.einsum("btnd,ndh->bth", named(mixed), w["out"])
    x = with_sharding_constraint(x, ("batch", "sequence", None))

    y = rms_norm(x, w["norm_mlp"], config.epsilon)
    wide = jax.nn.silu(y @ w["gate"]) * (y @ w["up"])
    wide = with_sharding_constraint(wide, ("batch", "sequence", "mlp"))
    return with_sharding_constraint(x + wide @ w["down"], ("batch", "sequence", None))


def logits(params: dict[str, Any], ids: jax.Array, config: Config) -> jax.Array:
    """[batch, sequence] token ids to [batch, sequence, vocab] float32."""
    x = params["embed"].astype(jnp.bfloat16)[ids]
    x = with_sharding_constraint(x, ("batch", "sequence", None))
    layer = functools.partial(block, config)
    if REMAT[config.remat] is not None:
        layer = jax.checkpoint(layer, policy=REMAT[config.remat])
    x, _ = jax.lax.scan(lambda carry, w: (layer(carry, w), None), x, params["layers"])
    x = rms_norm(x, params["norm"], config.epsilon)
    out = jnp.einsum("bth,hv->btv", x, params["unembed"].astype(x.dtype), preferred_element_type=jnp.float32)
    return with_sharding_constraint(out, ("batch", "sequence", "vocab"))


def loss(params: dict[str, Any], batch: dict[str, jax.Array], config: Config = SHAPES["1b"]) -> jax.Array:
    """Mean cross-entropy of the next token."""
    scores = logits(params, batch["inputs"], config)
    chosen = jnp.take_along_axis(scores, batch["targets"][..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(scores, axis=-1) - chosen)


def adamw(params: Any, grads: Any, state: Any, rate: float = 3e-4, decay: float = 0.1) -> tuple[Any, Any]:
    count = state["count"] + 1
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["first"], grads)
    second = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, state["second"], grads)
    unbias_first, unbias_second = 1 - 0.9**count, 1 - 0.95**count

    def moved(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        return p - rate * (m / unbias_first / (jnp.sqrt(v / unbias_second) + 1e-8) + decay * p)

    return jax.tree.map(moved, params, first, second), {"first": first, "second": second, "count": count}


def step(params: Any, state: Any, batch: Any, config: Config = SHAPES["1b"]) -> tuple[Any, Any, jax.Array]:
    """One step of training; give it `donate_argnums=(0, 1)`."""
    value, grads = jax.value_and_grad(loss)(params, batch, config)
    params, state = adamw(params, grads, state)
    return params, state, value


def state_shapes(params: Any) -> dict[str, Any]:
    """What `adamw` keeps, for weights given as arrays or shapes."""
    return {"first": params, "second": params, "count": jax.ShapeDtypeStruct((), jnp.int32)}


def batch_shapes(batch: int, sequence: int) -> dict[str, Any]:
    ids = jax.ShapeDtypeStruct((batch, sequence), jnp.int32)
    return {"inputs": ids, "targets": ids}


def shapes(batch: int = 8, sequence: int = 2048, config: Config = SHAPES["1b"]) -> tuple[Any, Any]:
    """The arguments of `loss`."""
    return param_shapes(config), batch_shapes(batch, sequence)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on random tokens and report the time of a step.")
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--remat", choices=REMAT, default="none")
    parser.add_argument("--measured", metavar="FILE", help="write step time and memory as JSON, for plan --measured")
    asked = parser.parse_args()
    config = dataclasses.replace(SHAPES[asked.shape], remat=asked.remat)

    params = jax.jit(functools.partial(init, config))(jax.random.key(0))
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state_shapes(params))
    ids = jax.random.randint(jax.random.key(1), (asked.batch, asked.sequence + 1), 0, config.vocab)
    batch = {"inputs": ids[:, :-1], "targets": ids[:, 1:]}
    update = (
        jax.jit(functools.partial(step, config=config), donate_argnums=(0, 1)).lower(params, state, batch).compile()
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
    print(f"{config.parameters:,} parameters, loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")
    # A CPU does not count its memory.
    peak = f", peak {stats['peak_bytes_in_use'] / 2**30:.2f} GiB" if "peak_bytes_in_use" in stats else ""
    print(f"{seconds * 1e3:.1f} ms a step, {tokens / seconds:,.0f} tokens/s{peak}")
    if asked.measured:
        with open(asked.measured, "w", encoding="utf-8") as out:
            json.dump({"step_seconds": seconds, "peak_bytes": stats.get("peak_bytes_in_use")}, out)


if __name__ == "__main__":
    main()
