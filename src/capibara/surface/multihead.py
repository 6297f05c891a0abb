"""Multi-head self-attention as one function of its input: one product for queries, keys and values, attention,
and one product back, both with their bias added inside the product.

The columns of the first product are ordered by key head: the query heads that share it, then the key, then the value.
Cut into equal parts, as a mesh cuts the columns, each part holds whole heads with the keys and values they need, so
nothing moves between devices until the output's sum.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from capibara.errors import rule_error, say_once, unknown_name
from capibara.kernels.core.spec import describe
from capibara.kernels.ops.attention import inputs
from capibara.kernels.ops.linalg.gemm.api import gemm
from capibara.surface.draws import Draws
from capibara.surface.flash import flash_attention

Params = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Heads:
    """How a width is cut into heads: of queries, of keys and values, and how wide they are."""

    count: int
    kv_count: int
    dim: int

    @property
    def groups(self) -> int:
        """Query heads for each key head."""
        return self.count // self.kv_count

    @property
    def columns(self) -> int:
        """Of the fused projection: queries, keys and values."""
        return (self.count + 2 * self.kv_count) * self.dim


def heads_of(width: int, num_heads: Any, num_kv_heads: Any = None, head_dim: Any = None) -> Heads:
    """The checked heads; keys have as many as queries, and a head is width / num_heads wide, unless said."""
    count = _positive("num_heads", num_heads)
    kv_count = count if num_kv_heads is None else _positive("num_kv_heads", num_kv_heads)
    if count % kv_count:
        raise rule_error(
            "num_heads is a multiple of num_kv_heads", f"{count} and {kv_count}", "use a divisor of num_heads"
        )
    if head_dim is None and width % count:
        raise rule_error(
            "num_heads divides the width, unless head_dim is given",
            f"num_heads={count} and a width of {width}",
            "change num_heads, or pass head_dim",
        )
    return Heads(count, kv_count, width // count if head_dim is None else _positive("head_dim", head_dim))


def _positive(name: str, x: Any) -> int:
    if isinstance(x, bool) or not isinstance(x, int | np.integer) or x < 1:
        raise rule_error(f"{name} is a positive whole number", repr(x), f"pass {name}=8")
    return int(x)


def init_multihead_attention(
    rng: Any,
    width: int,
    num_heads: int,
    *,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    use_bias: bool = True,
    dtype: Any = jnp.float32,
) -> Params:
    """Parameters of `multihead_attention`: normal with variance 1 / inputs, biases zero.

    `{"qkv": [width, columns], "out": [heads · head_dim, width]}`, and with `use_bias` "qkv_bias" and "out_bias".

    >>> made = init_multihead_attention(jax.random.key(0), 64, 8, num_kv_heads=2)
    >>> {name: x.shape for name, x in made.items()}
    {'qkv': (64, 96), 'out': (64, 64), 'qkv_bias': (96,), 'out_bias': (64,)}
    """
    heads = heads_of(_positive("width", width), num_heads, num_kv_heads, head_dim)
    shapes = _shapes(width, heads, use_bias)
    keys = dict(zip(("qkv", "out"), jax.random.split(rng), strict=True))

    def drawn(name: str, shape: tuple[int, ...]) -> jax.Array:
        if name not in keys:
            return jnp.zeros(shape, dtype)
        return (jax.random.normal(keys[name], shape, jnp.float32) / math.sqrt(shape[0])).astype(dtype)

    return {name: drawn(name, shape) for name, shape in shapes.items()}


def _shapes(width: int, heads: Heads, use_bias: bool) -> dict[str, tuple[int, ...]]:
    made: dict[str, tuple[int, ...]] = {"qkv": (width, heads.columns), "out": (heads.count * heads.dim, width)}
    return made | ({"qkv_bias": (heads.columns,), "out_bias": (width,)} if use_bias else {})


def pack_qkv(query: Any, key: Any, value: Any, num_heads: int, num_kv_heads: int | None = None) -> jax.Array:
    """Three projections, [width, heads · head_dim] each (or their biases), as the one that is used here.

    >>> q, kv = jnp.ones((64, 64)), jnp.ones((64, 16))
    >>> pack_qkv(q, kv, kv, 8, 2).shape
    (64, 96)
    """
    q, k, v = (inputs.array(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    heads = heads_of(q.shape[-1], num_heads, num_kv_heads)
    wanted = (*q.shape[:-1], heads.kv_count * heads.dim)
    for name, x in (("key", k), ("value", v)):
        if x.shape != wanted:
            raise rule_error(
                f"The {name}'s projection has {heads.kv_count} heads of {heads.dim}, here {list(wanted)}",
                describe(x),
                "check num_heads and num_kv_heads",
            )
    lead = q.shape[:-1]
    parts = (
        q.reshape(*lead, heads.kv_count, heads.groups, heads.dim),
        k.reshape(*lead, heads.kv_count, 1, heads.dim),
        v.reshape(*lead, heads.kv_count, 1, heads.dim),
    )
    return jnp.concatenate(parts, axis=-2).reshape(*lead, heads.columns)


def multihead_attention(
    params: Mapping[str, Any],
    x: Float[Array, "B T width"],
    num_heads: int,
    *,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    use_bias: bool = True,
    dropout_rate: float = 0.0,
    rng: Any = None,
    precision: str | None = None,
    **options: Any,
) -> Float[Array, "B T width"]:
    """Project, attend, project back.

    Args:
      params: from `init_multihead_attention`, or packed by `pack_qkv`.
      num_kv_heads: fewer keys than queries (grouped-query attention).
      use_bias: whether params hold biases; the two must agree.
      dropout_rate, rng: of the attention's probabilities; 0 for inference.
      precision: a policy ("bfloat16", "float32", "mixed", "fp8") or jax's name, for both products and the attention.
      options: attention's other arguments: causal, window, mask, bias, segment_ids, scale, softcap, block_size,
        implementation and so on.
    """
    x = _input(x)
    batch, length, width = x.shape
    heads = heads_of(width, num_heads, num_kv_heads, head_dim)
    held = _checked(params, _shapes(width, heads, use_bias), use_bias)
    for name in ("layout", "return_lse"):
        if name in options:
            raise rule_error(f"{name} is not an argument of multi-head attention", options[name], "leave it out")

    qkv = gemm(x, held["qkv"], bias=held.get("qkv_bias"), precision=precision)
    by_head = qkv.reshape(batch, length, heads.kv_count, heads.groups + 2, heads.dim)
    query = by_head[:, :, :, : heads.groups].reshape(batch, length, heads.count, heads.dim)
    key, value = by_head[:, :, :, heads.groups], by_head[:, :, :, heads.groups + 1]
    mixed = flash_attention(
        query, key, value, layout="bthd", dropout_rate=dropout_rate, dropout_key=rng, precision=precision, **options
    )
    joined = mixed.reshape(batch, length, heads.count * heads.dim)
    return gemm(joined, held["out"], bias=held.get("out_bias"), precision=precision)


def self_attention(
    draws: Draws,
    x: Any,
    num_heads: int,
    *,
    use_bias: bool,
    dropout_rate: float,
    params: Mapping[str, Any] | None,
    rng: Any,
    training: bool,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    **options: Any,
) -> jax.Array:
    """`multihead_attention` for an object that has keys of its own, and makes the parameters it is not given."""
    x = _input(x)
    heads: dict[str, Any] = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "use_bias": use_bias}
    rate = inputs.static_float("dropout_rate", dropout_rate)
    if not 0 <= rate < 1:
        raise rule_error("The dropout rate is in [0, 1)", repr(rate), "pass the fraction to drop, e.g. 0.1")
    for_params, for_dropout = (None, None) if rng is None else jax.random.split(rng)
    if params is None:
        say_once(
            UserWarning,
            None,
            "fused_multihead_attention was called without params and made random ones. To train them or to load "
            "others, make them with init_multihead_attention(key, width, num_heads, ...) and pass params=.",
            stacklevel=3,
        )
        key = draws.fixed() if for_params is None else for_params
        params = init_multihead_attention(key, x.shape[-1], num_heads, dtype=x.dtype, **heads)
    drops = training and rate > 0
    if drops and for_dropout is None:
        for_dropout = draws.next()
    return multihead_attention(
        params,
        x,
        num_heads,
        dropout_rate=rate if drops else 0.0,
        rng=for_dropout if drops else None,
        **heads,
        **options,
    )


def _input(x: Any) -> jax.Array:
    x = inputs.array("x", x)
    if x is None or x.ndim != 3:
        raise rule_error("x is [batch, length, width]", describe(x), "add the batch axis with x[None]")
    return x


def _checked(params: Any, shapes: dict[str, tuple[int, ...]], use_bias: bool) -> dict[str, jax.Array]:
    if not isinstance(params, Mapping):
        raise rule_error(
            f"params is a mapping of {', '.join(shapes)}", type(params).__name__, "use init_multihead_attention(...)"
        )
    for name in params:
        if name not in shapes:
            if name in ("qkv_bias", "out_bias"):
                raise rule_error("With use_bias=False there are no biases", f"params with {name!r}", "use_bias=True")
            raise unknown_name("parameter of multi-head attention", name, shapes)
    for name, shape in shapes.items():
        if name not in params:
            fix = "pass use_bias=False" if name.endswith("_bias") else "use init_multihead_attention(...)"
            raise rule_error(f"params hold {', '.join(shapes)} (use_bias={use_bias})", f"no {name!r}", fix)
        found = inputs.array(name, params[name])
        if found.shape != shape:
            raise rule_error(
                f"{name!r} is {list(shape)} for this width and these heads",
                describe(found),
                "check num_heads and num_kv_heads",
            )
    return {name: inputs.array(name, params[name]) for name in shapes}
