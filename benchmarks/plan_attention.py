"""Predicted bytes a chip against the TPU compiler's, for training steps whose attention builds the table of scores.

    python benchmarks/plan_attention.py                     # predicted bytes, in seconds
    python benchmarks/plan_attention.py --compile           # and the TPU compiler's (libtpu on x86-64 Linux, no TPU)
    python benchmarks/plan_attention.py --only decoder --compile --json FILE

Plain JAX programs that know nothing of this library, each with AdamW, all chips of the slice on one data axis and
everything sharded over it, as `capibara plan FILE.py:loss --train --mesh data=N` lays them out.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from capibara.compile.availability import tpu_compiler
from capibara.cost.result import Estimate
from capibara.hardware.topology import slice_by_name
from capibara.kernels.lab.bench import versions
from capibara.mesh import with_sharding_constraint
from capibara.mesh.layout import Layout
from capibara.parallel.job import Job
from capibara.parallel.training_step import training_job
from capibara.plan.compiled import compile_layout
from capibara.plan.search.evaluation import PaperModel
from capibara.plan.search.space import Point, Space

GiB = 2**30


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a transformer, and how it is to be trained."""

    hidden: int = 1024
    layers: int = 8
    heads: int = 16
    kv_heads: int = 16
    ffn: int = 4096
    vocab: int = 32000
    rows: int = 4
    length: int = 8192
    remat: str = "none"
    dtype: str = "bfloat16"
    constrained: bool = True
    """Whether the program says that its activations are split by rows."""
    slice: str = "v4-8"

    @property
    def wide(self) -> int:
        return self.hidden // self.heads


def _weights(shape: Shape, **extra: tuple[int, ...]) -> dict[str, Any]:
    """A layer's weights, stacked on a leading axis."""
    s = shape
    layer = {
        "norm_attention": (s.hidden,),
        "query": (s.hidden, s.heads, s.wide),
        "key": (s.hidden, s.kv_heads, s.wide),
        "value": (s.hidden, s.kv_heads, s.wide),
        "out": (s.heads, s.wide, s.hidden),
        "norm_mlp": (s.hidden,),
        "up": (s.hidden, s.ffn),
        "down": (s.ffn, s.hidden),
        **extra,
    }
    return {name: jax.ShapeDtypeStruct((s.layers, *one), jnp.float32) for name, one in layer.items()}


def _tokens(shape: Shape) -> dict[str, Any]:
    ids = jax.ShapeDtypeStruct((shape.rows, shape.length), jnp.int32)
    return {"inputs": ids, "targets": ids}


def _norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)
    return (wide * scale * weight).astype(x.dtype)


def _cross_entropy(scores: jax.Array, targets: jax.Array) -> jax.Array:
    chosen = jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(scores, axis=-1) - chosen)


def _block(
    attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array], x: jax.Array, w: dict[str, jax.Array]
) -> jax.Array:
    """One layer around any attention of [batch, sequence, heads, wide]."""
    w = {name: weight if name.startswith("norm") else weight.astype(x.dtype) for name, weight in w.items()}
    y = _norm(x, w["norm_attention"])
    q, k, v = (jnp.einsum("bth,hnd->btnd", y, w[name]) for name in ("query", "key", "value"))
    x = x + jnp.einsum("btnd,ndh->bth", attend(q, k, v), w["out"])
    return x + jax.nn.gelu(_norm(x, w["norm_mlp"]) @ w["up"]) @ w["down"]


def _decoder_loss(attend: Callable[..., jax.Array], shape: Shape, params: Any, batch: Any) -> jax.Array:
    x = params["embed"].astype(shape.dtype)[batch["inputs"]]
    if shape.constrained:
        x = with_sharding_constraint(x, ("batch", None, None))
    x, _ = jax.lax.scan(lambda carry, w: (_block(attend, carry, w), None), x, params["layers"])
    x = _norm(x, params["norm"])
    scores = jnp.einsum("bth,hv->btv", x, params["unembed"].astype(x.dtype), preferred_element_type=jnp.float32)
    return _cross_entropy(scores, batch["targets"])


def _decoder_params(shape: Shape) -> dict[str, Any]:
    return {
        "embed": jax.ShapeDtypeStruct((shape.vocab, shape.hidden), jnp.float32),
        "layers": _weights(shape),
        "norm": jax.ShapeDtypeStruct((shape.hidden,), jnp.float32),
        "unembed": jax.ShapeDtypeStruct((shape.hidden, shape.vocab), jnp.float32),
    }


def decoder(shape: Shape) -> tuple[Callable[..., Any], Any, Any]:
    """A decoder with `jax.nn.dot_product_attention`."""
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    return functools.partial(_decoder_loss, attend, shape), _decoder_params(shape), _tokens(shape)


def einsum_decoder(shape: Shape) -> tuple[Callable[..., Any], Any, Any]:
    """The same with softmax between two einsums, in float32."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.einsum("btnd,bsnd->bnts", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
        seen = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))
        share = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        return jnp.einsum("bnts,bsnd->btnd", share.astype(v.dtype), v)

    return functools.partial(_decoder_loss, attend, shape), _decoder_params(shape), _tokens(shape)


def flat_decoder(shape: Shape) -> tuple[Callable[..., Any], Any, Any]:
    """Weights as plain matrices, heads by reshape, rotary positions, a gated feed-forward: as most decoders are."""
    s, wide = shape, shape.wide
    sizes = {
        "norm_attention": (s.hidden,),
        "query": (s.hidden, s.heads * wide),
        "key": (s.hidden, s.kv_heads * wide),
        "value": (s.hidden, s.kv_heads * wide),
        "out": (s.heads * wide, s.hidden),
        "norm_mlp": (s.hidden,),
        "gate": (s.hidden, s.ffn),
        "up": (s.hidden, s.ffn),
        "down": (s.ffn, s.hidden),
    }
    layers = {name: jax.ShapeDtypeStruct((s.layers, *one), jnp.float32) for name, one in sizes.items()}
    params = {**_decoder_params(shape), "layers": layers}

    def rotated(x: jax.Array) -> jax.Array:
        half = x.shape[-1] // 2
        angles = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(half) / half)
        cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
        first, second = x[..., :half], x[..., half:]
        turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return turned.astype(x.dtype)

    def block(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        w = {name: weight if name.startswith("norm") else weight.astype(x.dtype) for name, weight in w.items()}
        rows, length, _ = x.shape
        y = _norm(x, w["norm_attention"])
        q = rotated((y @ w["query"]).reshape(rows, length, s.heads, wide))
        k = rotated((y @ w["key"]).reshape(rows, length, s.kv_heads, wide))
        v = (y @ w["value"]).reshape(rows, length, s.kv_heads, wide)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(rows, length, -1)
        x = x + mixed @ w["out"]
        y = _norm(x, w["norm_mlp"])
        return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"], None

    def loss(params: Any, batch: Any) -> jax.Array:
        x = with_sharding_constraint(params["embed"].astype(s.dtype)[batch["inputs"]], ("batch", None, None))
        x, _ = jax.lax.scan(block, x, params["layers"])
        scores = (_norm(x, params["norm"]) @ params["unembed"].astype(x.dtype)).astype(jnp.float32)
        return _cross_entropy(scores, batch["targets"])

    return loss, params, _tokens(shape)


def encoder_decoder(shape: Shape) -> tuple[Callable[..., Any], Any, Any]:
    """An encoder of `length` and a decoder of half of it that looks at all of the encoder's states, by einsum."""
    s, half = shape, shape.length // 2
    encoder = _weights(s)
    cross = {
        "norm_cross": (s.hidden,),
        "cross_query": (s.hidden, s.heads, s.wide),
        "cross_key": (s.hidden, s.heads, s.wide),
        "cross_value": (s.hidden, s.heads, s.wide),
        "cross_out": (s.heads, s.wide, s.hidden),
    }
    params = {**_decoder_params(s), "encoder": encoder, "layers": _weights(s, **cross)}

    def mixed(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool) -> jax.Array:
        scores = jnp.einsum("btnd,bsnd->bnts", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
        if causal:
            scores = jnp.where(jnp.arange(q.shape[1])[:, None] >= jnp.arange(k.shape[1]), scores, -1e9)
        return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(scores).astype(v.dtype), v)

    def encode(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        return _block(functools.partial(mixed, causal=False), x, w), None

    def decode(seen: jax.Array, x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        y = _norm(x, w["norm_cross"])
        q = jnp.einsum("bth,hnd->btnd", y, w["cross_query"].astype(x.dtype))
        k, v = (jnp.einsum("bth,hnd->btnd", seen, w[one].astype(x.dtype)) for one in ("cross_key", "cross_value"))
        x = x + jnp.einsum("btnd,ndh->bth", mixed(q, k, v, False), w["cross_out"].astype(x.dtype))
        own = {name: weight for name, weight in w.items() if "cross" not in name}
        return _block(functools.partial(mixed, causal=True), x, own), None

    def loss(params: Any, batch: Any) -> jax.Array:
        table = params["embed"].astype(s.dtype)
        seen, x = (with_sharding_constraint(table[batch[one]], ("batch", None, None)) for one in ("source", "inputs"))
        seen, _ = jax.lax.scan(encode, seen, params["encoder"])
        x, _ = jax.lax.scan(functools.partial(decode, seen), x, params["layers"])
        scores = (_norm(x, params["norm"]) @ params["unembed"].astype(x.dtype)).astype(jnp.float32)
        return _cross_entropy(scores, batch["targets"])

    ids = jax.ShapeDtypeStruct((s.rows, half), jnp.int32)
    return loss, params, {"source": jax.ShapeDtypeStruct((s.rows, s.length), jnp.int32), "inputs": ids, "targets": ids}


def vision(shape: Shape) -> tuple[Callable[..., Any], Any, Any]:
    """A vision transformer in float32: softmax(q k) v by einsum, layers in a Python loop, one class a row."""
    s, patch = shape, 768
    params = {
        "patches": jax.ShapeDtypeStruct((patch, s.hidden), jnp.float32),
        "positions": jax.ShapeDtypeStruct((s.length, s.hidden), jnp.float32),
        "layers": _weights(s),
        "norm": jax.ShapeDtypeStruct((s.hidden,), jnp.float32),
        "head": jax.ShapeDtypeStruct((s.hidden, s.vocab), jnp.float32),
    }

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        share = jax.nn.softmax(jnp.einsum("btnd,bsnd->bnts", q, k) / q.shape[-1] ** 0.5)
        return jnp.einsum("bnts,bsnd->btnd", share, v)

    def loss(params: Any, batch: Any) -> jax.Array:
        x = with_sharding_constraint(batch["images"] @ params["patches"], ("batch", None, None)) + params["positions"]
        for layer in range(s.layers):
            one = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["layers"])
            x = _block(attend, x, one)
        return _cross_entropy(jnp.mean(_norm(x, params["norm"]), axis=1) @ params["head"], batch["labels"])

    batch = {
        "images": jax.ShapeDtypeStruct((s.rows, s.length, patch), jnp.float32),
        "labels": jax.ShapeDtypeStruct((s.rows,), jnp.int32),
    }
    return loss, params, batch


def capped_decoder(shape: Shape) -> tuple[Callable[..., Any], Any, Any]:
    """Grouped queries, a sliding window, and scores that a tanh keeps small."""
    window, cap = 2048, 50.0

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        rows, length, heads, wide = q.shape
        q = q.reshape(rows, length, k.shape[2], heads // k.shape[2], wide) * wide**-0.5
        scores = jnp.einsum("btkgd,bskd->bkgts", q, k, preferred_element_type=jnp.float32)
        scores = cap * jnp.tanh(scores / cap)
        apart = jnp.arange(length)[:, None] - jnp.arange(length)
        scores = jnp.where((apart >= 0) & (apart < window), scores, -2.3e38)
        share = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        return jnp.einsum("bkgts,bskd->btkgd", share, v).reshape(rows, length, heads, wide)

    return functools.partial(_decoder_loss, attend, shape), _decoder_params(shape), _tokens(shape)


def one_key_decoder(shape: Shape) -> tuple[Callable[..., Any], Any, Any]:
    """One key and value head for all queries, each layer under the program's own `jax.checkpoint`, in a Python loop."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.einsum("btnd,bsd->bnts", q, k[:, :, 0]) * q.shape[-1] ** -0.5
        seen = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))
        share = jax.nn.softmax(jnp.where(seen, scores.astype(jnp.float32), -1e30), axis=-1)
        return jnp.einsum("bnts,bsd->btnd", share.astype(q.dtype), v[:, :, 0])

    block = jax.checkpoint(functools.partial(_block, attend))

    def loss(params: Any, batch: Any) -> jax.Array:
        x = with_sharding_constraint(params["embed"].astype(shape.dtype)[batch["inputs"]], ("batch", None, None))
        for layer in range(shape.layers):
            x = block(x, jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["layers"]))
        scores = (_norm(x, params["norm"]) @ params["unembed"].astype(x.dtype)).astype(jnp.float32)
        return _cross_entropy(scores, batch["targets"])

    return loss, _decoder_params(shape), _tokens(shape)


def dropping_encoder(shape: Shape) -> tuple[Callable[..., Any], Any, Any]:
    """An encoder with a learned bias for each head and distance, and dropout of the softmax, as BERT's have."""
    s = shape
    params = {**_decoder_params(s), "bias": jax.ShapeDtypeStruct((s.heads, 2 * s.length), jnp.float32)}

    def attend(bias: jax.Array, key: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.einsum("btnd,bsnd->bnts", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
        apart = jnp.arange(q.shape[1])[:, None] - jnp.arange(q.shape[1]) + s.length
        share = jax.nn.softmax(scores + bias[:, apart], axis=-1)
        kept = jax.random.bernoulli(key, 0.9, share.shape)
        return jnp.einsum("bnts,bsnd->btnd", jnp.where(kept, share / 0.9, 0.0).astype(v.dtype), v)

    def loss(params: Any, batch: Any) -> jax.Array:
        x = with_sharding_constraint(params["embed"].astype(s.dtype)[batch["inputs"]], ("batch", None, None))

        def one(carry: jax.Array, given: Any) -> tuple[jax.Array, None]:
            w, number = given
            key = jax.random.fold_in(jax.random.key(0), number)
            return _block(functools.partial(attend, params["bias"], key), carry, w), None

        x, _ = jax.lax.scan(one, x, (params["layers"], jnp.arange(s.layers)))
        scores = (_norm(x, params["norm"]) @ params["unembed"].astype(x.dtype)).astype(jnp.float32)
        return _cross_entropy(scores, batch["targets"])

    return loss, params, _tokens(shape)


def latents(shape: Shape) -> tuple[Callable[..., Any], Any, Any]:
    """A quarter as many learned latents as tokens look at all tokens, in every layer; softmax in bfloat16."""
    s = shape
    params = {**_decoder_params(s), "latents": jax.ShapeDtypeStruct((s.length // 4, s.hidden), jnp.float32)}

    def layer(tokens: jax.Array, x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        w = {name: weight if name.startswith("norm") else weight.astype(x.dtype) for name, weight in w.items()}
        q = jnp.einsum("bth,hnd->bntd", _norm(x, w["norm_attention"]), w["query"])
        k, v = (jnp.einsum("bsh,hnd->bnsd", tokens, w[name]) for name in ("key", "value"))
        share = jax.nn.softmax(jnp.einsum("bntd,bnsd->bnts", q, k) * s.wide**-0.5, axis=-1)
        x = x + jnp.einsum("bntd,ndh->bth", jnp.einsum("bnts,bnsd->bntd", share, v), w["out"])
        return x + jax.nn.gelu(_norm(x, w["norm_mlp"]) @ w["up"]) @ w["down"], None

    def loss(params: Any, batch: Any) -> jax.Array:
        tokens = with_sharding_constraint(params["embed"].astype(s.dtype)[batch["inputs"]], ("batch", None, None))
        start = jnp.broadcast_to(params["latents"].astype(s.dtype), (s.rows, s.length // 4, s.hidden))
        x = with_sharding_constraint(start, ("batch", None, None))
        x, _ = jax.lax.scan(functools.partial(layer, tokens), x, params["layers"])
        scores = (jnp.mean(_norm(x, params["norm"]), axis=1) @ params["unembed"].astype(x.dtype)).astype(jnp.float32)
        return _cross_entropy(scores, batch["targets"][:, 0])

    return loss, params, _tokens(shape)


def bucketed_encoder(shape: Shape) -> tuple[Callable[..., Any], Any, Any]:
    """An encoder with one learned bias for each head and bucket of distances, as T5's have, that all layers share."""
    s, buckets = shape, 32
    params = {**_decoder_params(s), "bias": jax.ShapeDtypeStruct((buckets, s.heads), jnp.float32)}

    def attend(bias: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.einsum("btnd,bsnd->bnts", q, k, preferred_element_type=jnp.float32) + bias
        return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(scores, axis=-1).astype(v.dtype), v)

    def loss(params: Any, batch: Any) -> jax.Array:
        x = with_sharding_constraint(params["embed"].astype(s.dtype)[batch["inputs"]], ("batch", None, None))
        apart = jnp.abs(jnp.arange(s.length)[:, None] - jnp.arange(s.length))
        bucket = jnp.minimum(jnp.log2(1.0 + apart) * 2, buckets - 1).astype(jnp.int32)
        bias = jnp.transpose(params["bias"][bucket], (2, 0, 1))
        x, _ = jax.lax.scan(lambda c, w: (_block(functools.partial(attend, bias), c, w), None), x, params["layers"])
        scores = (_norm(x, params["norm"]) @ params["unembed"].astype(x.dtype)).astype(jnp.float32)
        return _cross_entropy(scores, batch["targets"])

    return loss, params, _tokens(shape)


def differing_decoder(shape: Shape) -> tuple[Callable[..., Any], Any, Any]:
    """Each head is the difference of two softmaxes, of its queries' and keys' two halves."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        seen = jnp.arange(q.shape[1])[:, None] >= jnp.arange(k.shape[1])

        def share(q: jax.Array, k: jax.Array) -> jax.Array:
            scores = jnp.einsum("btnd,bsnd->bnts", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
            return jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)

        half = q.shape[-1] // 2
        both = share(q[..., :half], k[..., :half]) - 0.5 * share(q[..., half:], k[..., half:])
        return jnp.einsum("bnts,bsnd->btnd", both.astype(v.dtype), v)

    return functools.partial(_decoder_loss, attend, shape), _decoder_params(shape), _tokens(shape)


Make = Callable[[Shape], tuple[Callable[..., Any], Any, Any]]
# Each with its sizes. The rules for tables were written on the first list.
MENDED_ON: dict[str, tuple[Make, Shape]] = {
    "decoder 8k": (decoder, Shape(remat="full")),
    "decoder 16k": (decoder, Shape(length=16384, remat="full")),
    "decoder 8k, nothing constrained": (decoder, Shape(remat="full", constrained=False)),
    "decoder 8k, 4 key heads": (decoder, Shape(kv_heads=4, remat="full")),
    "decoder 8k, 8 heads": (decoder, Shape(heads=8, kv_heads=8, remat="full")),
    "decoder 8k, dots": (decoder, Shape(remat="dots")),
    "decoder 8k, 2 layers, nothing recomputed": (decoder, Shape(layers=2, heads=8, kv_heads=8)),
    "einsum decoder 8k": (einsum_decoder, Shape(remat="full")),
    "flat decoder 8k": (flat_decoder, Shape(hidden=2048, ffn=5632, layers=4, remat="full")),
    "flat decoder 16k": (flat_decoder, Shape(hidden=2048, ffn=5632, layers=4, length=16384, remat="full")),
}
# Held back the first time, and mended after: that a table is kept as its product wrote it was learnt from the first
# four, which take less than was predicted, and how rows are looked up from the last, which takes twice as much.
MENDED_AFTER: dict[str, tuple[Make, Shape]] = {
    "encoder-decoder": (encoder_decoder, Shape(hidden=768, heads=12, kv_heads=12, ffn=3072, layers=6, remat="full")),
    "vision, float32": (
        vision,
        Shape(hidden=768, heads=12, kv_heads=12, ffn=3072, layers=4, vocab=1000, rows=8, length=4096, dtype="float32"),
    ),
    "window and soft cap": (capped_decoder, Shape(hidden=2048, kv_heads=4, ffn=8192, layers=4, remat="full")),
    "one key head, checkpointed": (one_key_decoder, Shape(kv_heads=1, layers=4)),
    "bias and dropout": (
        dropping_encoder,
        Shape(hidden=768, heads=12, kv_heads=12, ffn=3072, layers=4, rows=8, length=4096, remat="full"),
    ),
}
# Compiled when all rules were written, and used for none.
HELD_BACK: dict[str, tuple[Make, Shape]] = {
    "latents": (latents, Shape(layers=4, rows=8, length=16384, remat="full")),
    "bias by bucket": (bucketed_encoder, Shape(heads=8, kv_heads=8, layers=4, length=4096, remat="full")),
    "difference of two": (differing_decoder, Shape(hidden=1024, heads=8, kv_heads=8, layers=4, remat="full")),
}
PROGRAMS = {**MENDED_ON, **MENDED_AFTER, **HELD_BACK}


def job_of(name: str) -> tuple[Job, Shape]:
    """One of the programs as a job."""
    make, shape = PROGRAMS[name]
    loss, params, batch = make(shape)
    return training_job(loss, params, batch, knobs={"remat": (shape.remat,), "accumulate": (1,)}, name=name), shape


def layout_of(job: Job, shape: Shape) -> tuple[Layout, Estimate]:
    """Everything over one data axis, and what the planner's model says of it."""
    where = slice_by_name(shape.slice)
    cost = PaperModel(job, where)
    space = Space(cost.anatomy(), where.chips, job.knobs)
    point = Point((("data", where.chips),), (), "full", (("remat", shape.remat), ("accumulate", 1)))
    layout = space.layout(point)
    return layout, cost.estimate(layout)


def verdict_of(estimate: Estimate) -> str:
    """As the report says it of one layout."""
    memory = estimate.memory
    return "fits" if memory.fits else "may not fit" if memory.may_fit else "does not fit"


def row_of(name: str, compile: bool) -> dict[str, Any]:
    """One line of the table; without the compiler's figures where it was not asked."""
    job, shape = job_of(name)
    layout, estimate = layout_of(job, shape)
    memory = estimate.memory
    row = {
        "program": name,
        "rules": "held back" if name in HELD_BACK else "mended after" if name in MENDED_AFTER else "mended on",
        "slice": shape.slice,
        "layout": layout.name,
        "predicted": memory.total,
        "most": memory.most,
        "limit": memory.limit,
        "verdict": verdict_of(estimate),
    }
    if not compile:
        return row
    said = compile_layout(job, layout, shape.slice)
    if said.error is not None and said.error_kind != "hbm_oom":
        raise RuntimeError(f"{name}: {said.error}")
    key = "compiled" if said.error is None else "refused_at"
    return {**row, key: said.total_bytes, "compile_s": round(said.seconds, 1)}


def _line(row: dict[str, Any]) -> str:
    text = f"{row['program']:42} {row['predicted'] / GiB:6.2f} to {row['most'] / GiB:6.2f} GiB  {row['verdict']:13}"
    for key, word in (("compiled", ""), ("refused_at", " refused")):
        if row.get(key):
            text += f"  compiler {row[key] / GiB:6.2f}{word}, predicted / compiler {row['predicted'] / row[key]:.2f}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="programs whose name has this in it")
    parser.add_argument("--compile", action="store_true", help="ask the TPU compiler too, minutes a program")
    parser.add_argument("--json", metavar="FILE", help="write the rows there, in place of rows of the same names")
    asked = parser.parse_args()
    file = None if asked.json is None else Path(asked.json)
    kept = json.loads(file.read_text(encoding="utf-8"))["rows"] if file is not None and file.exists() else []
    rows = {row["program"]: row for row in kept}
    for name in PROGRAMS:
        if asked.only not in name:
            continue
        rows[name] = row_of(name, asked.compile)
        print(_line(rows[name]), flush=True)
        if file is not None:
            document = {
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "versions": {**versions(), "libtpu": tpu_compiler().version},
                "compiled": asked.compile,
                "command": "python benchmarks/plan_attention.py --compile --json FILE",
                "notes": [
                    "bytes are a chip's: predicted and most are the ends of the planner's range; compiled is "
                    "memory_analysis().peak_memory_in_bytes; refused_at is the size in the out-of-memory message",
                    "rules: which programs the memory rules were mended on, which were held back the first time and "
                    "led to the last mending, and which were held back from all",
                    "predicted, not run on a chip",
                ],
                "rows": [rows[one] for one in PROGRAMS if one in rows],
            }
            file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
