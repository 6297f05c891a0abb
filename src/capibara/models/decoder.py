"""The decoder that a preset describes: a Llama shape in plain JAX, as the loss that a training step is built around.

Weights are float32, products bfloat16 with float32 sums, layers are one scan. Arrays are named by logical axes, so that
a layout's rules put them on a mesh.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from capibara.kernels.ops.attention import attention
from capibara.mesh import with_sharding_constraint

if TYPE_CHECKING:
    from capibara.models.preset import Preset

__all__ = ["batch_shapes", "make_loss", "param_shapes"]

ROPE_BASE = 10000.0
EPSILON = 1e-5
_NORMS = ("before_attention", "before_mlp")


def param_shapes(preset: Preset) -> dict[str, Any]:
    """Every weight's shape; a layer's weights are stacked along a leading axis."""
    wide, heads, kv, ffn, each = preset.hidden, preset.heads, preset.kv_heads, preset.ffn, preset.head_dim
    layer = {
        "before_attention": (wide,),
        "query": (wide, heads, each),
        "key": (wide, kv, each),
        "value": (wide, kv, each),
        "out": (heads, each, wide),
        "before_mlp": (wide,),
        "gate": (wide, ffn),
        "up": (wide, ffn),
        "down": (ffn, wide),
    }

    def weight(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    return {
        "embed": weight(preset.vocab, wide),
        "layers": {name: weight(preset.layers, *shape) for name, shape in layer.items()},
        "norm": weight(wide),
        "unembed": weight(wide, preset.vocab),
    }


def batch_shapes(preset: Preset) -> dict[str, Any]:
    ids = jax.ShapeDtypeStruct((preset.batch, preset.sequence), jnp.int32)
    return {"inputs": ids, "targets": ids}


def make_loss(preset: Preset) -> Any:
    """`loss(params, batch)`: the mean cross-entropy of the next token."""

    def loss(params: dict[str, Any], batch: dict[str, jax.Array]) -> jax.Array:
        x = params["embed"].astype(jnp.bfloat16)[batch["inputs"]]
        x = with_sharding_constraint(x, ("batch", "sequence", None))
        x, _ = jax.lax.scan(lambda carry, w: (_layer(preset, carry, w), None), x, params["layers"])
        x = _norm(x, params["norm"])
        scores = jnp.einsum("bth,hv->btv", x, params["unembed"].astype(x.dtype), preferred_element_type=jnp.float32)
        scores = with_sharding_constraint(scores, ("batch", "sequence", "vocab"))
        chosen = jnp.take_along_axis(scores, batch["targets"][..., None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(scores, axis=-1) - chosen)

    return loss


def _layer(preset: Preset, x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
    w = {name: one if name in _NORMS else one.astype(x.dtype) for name, one in weights.items()}
    heads = ("batch", "sequence", "heads", None)

    y = _norm(x, w["before_attention"])
    q, k, v = (
        with_sharding_constraint(jnp.einsum("bth,hnd->btnd", y, w[name]), heads) for name in ("query", "key", "value")
    )
    q, k = _rotated(q), _rotated(k)
    if preset.attention == "fused":
        mixed = attention(q, k, v, causal=True)
    else:
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + jnp.einsum("btnd,ndh->bth", with_sharding_constraint(mixed, heads), w["out"])
    x = with_sharding_constraint(x, ("batch", "sequence", None))

    y = _norm(x, w["before_mlp"])
    inner = with_sharding_constraint(jax.nn.silu(y @ w["gate"]) * (y @ w["up"]), ("batch", "sequence", "mlp"))
    return with_sharding_constraint(x + inner @ w["down"], ("batch", "sequence", None))


def _norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + EPSILON)
    return (wide * scale * weight).astype(x.dtype)


def _rotated(x: jax.Array) -> jax.Array:
    """Rotary positions; the two halves of a head are one pair of coordinates, and angles are float32."""
    half = x.shape[-1] // 2
    frequencies = ROPE_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = (jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequencies)[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
