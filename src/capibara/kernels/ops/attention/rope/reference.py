"""The specification of rope: each pair of a head's numbers turned by the angle of its position."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from capibara.kernels.ops.attention.rope.rules import each_head


def reference(x: jax.Array, cos: jax.Array, sin: jax.Array, *, style: str = "half", layout: str = "bthd") -> jax.Array:
    """Each pair (a, b) becomes (a cos - b sin, b cos + a sin), in float32 or wider and rounded once."""
    cos, sin = each_head(cos, sin, layout)
    wide, dim = jnp.promote_types(jnp.float32, x.dtype), 2 * cos.shape[-1]
    turned, rest = x[..., :dim].astype(wide), x[..., dim:]
    a, b = jnp.split(turned, 2, axis=-1) if style == "half" else (turned[..., ::2], turned[..., 1::2])
    pair = a * cos - b * sin, b * cos + a * sin
    joined = jnp.concatenate(pair, axis=-1) if style == "half" else jnp.stack(pair, axis=-1).reshape(turned.shape)
    return jnp.concatenate((joined.astype(x.dtype), rest), axis=-1)
