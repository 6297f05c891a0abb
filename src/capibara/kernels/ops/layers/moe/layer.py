"""moe_layer: router, dispatch, gated experts, combine, with what the training loop wants to know."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from capibara.errors import rule_error, unknown_name
from capibara.kernels.core.operands import as_array
from capibara.kernels.core.spec import describe
from capibara.kernels.ops.layers.grouped.api import grouped_gated_gemm, grouped_gemm
from capibara.kernels.ops.layers.moe.dispatch import combine, dispatch, dispatch_to_buffers
from capibara.kernels.ops.layers.router.api import route
from capibara.kernels.ops.layers.router.losses import load_balancing_loss, z_loss

Params = Mapping[str, jax.Array]
NEEDED = ("router", "gate", "up", "down")


class MoeMetrics(NamedTuple):
    """The two losses, not yet weighted; the tokens that chose each expert; how many choices found no room."""

    load_balancing_loss: Float[Array, ""]
    z_loss: Float[Array, ""]
    counts: Int[Array, " experts"]
    dropped: Int[Array, ""]


def init_moe(
    key: jax.Array, width: int, hidden: int, num_experts: int, dtype: Any = jnp.float32
) -> dict[str, jax.Array]:
    """Random parameters of `moe_layer`: normal, with variance one over the inputs of each product.

    The router is float32 whatever `dtype`: its product is small, and which expert is best hangs on its last bits.

    >>> {name: x.shape for name, x in init_moe(jax.random.key(0), 8, 16, 4).items()}
    {'router': (8, 4), 'gate': (4, 8, 16), 'up': (4, 8, 16), 'down': (4, 16, 8)}
    """
    for name, size in (("width", width), ("hidden", hidden), ("num_experts", num_experts)):
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
            raise rule_error(f"{name} is 1 or more, a whole number", repr(size), "pass a positive size")
    shapes = {
        "router": (width, num_experts),
        "gate": (num_experts, width, hidden),
        "up": (num_experts, width, hidden),
        "down": (num_experts, hidden, width),
    }

    def drawn(name: str, key: jax.Array) -> jax.Array:
        shape = shapes[name]
        made = jax.random.normal(key, shape, jnp.float32) * shape[-2] ** -0.5
        return made if name == "router" else made.astype(dtype)

    return {name: drawn(name, k) for name, k in zip(NEEDED, jax.random.split(key, len(NEEDED)), strict=True)}


def moe_layer(
    params: Params,
    x: Float[Array, "*tokens width"],
    *,
    top_k: int,
    activation: str = "silu",
    gate: str = "softmax",
    normalize: bool = True,
    scale: float = 1.0,
    capacity_factor: float | None = None,
    keep: str = "order",
    jitter: float = 0.0,
    key: jax.Array | None = None,
) -> tuple[Float[Array, "*tokens width"], MoeMetrics]:
    """(y, metrics): each token through its `top_k` experts, each down(activation(gate(x)) · up(x)), added by weight.

    The router's product gives float32; the experts run in x's type, to which their weights are converted, and the
    weighted sum is in float32. The losses are returned and not added to anything: the caller weights them.

    Args:
      params: "router" [width, experts], "gate" and "up" [experts, width, hidden], "down" [experts, hidden, width];
        and, to balance without a loss, "bias" [experts], which is updated by `update_bias` and has no gradient.
      x: [..., width].
      top_k, gate, normalize, scale: see `route`.
      activation: see `grouped_gated_gemm`.
      capacity_factor: None drops nothing. A number gives every expert a buffer of that many even shares, and choices
        past it are dropped: the shapes are the same at any balance.
      keep: what an expert keeps when its buffer overflows, see `dispatch_to_buffers`; for a capacity factor only.
      jitter: noise on the router's input, each number times one drawn from [1 - jitter, 1 + jitter); needs `key`.
      key: a JAX key for the jitter.

    >>> params = init_moe(jax.random.key(0), width=8, hidden=16, num_experts=4)
    >>> y, metrics = moe_layer(params, jnp.ones((2, 3, 8)), top_k=2)
    >>> y.shape, int(metrics.counts.sum()), int(metrics.dropped)
    ((2, 3, 8), 12, 0)
    """
    x = as_array("moe_layer", "x", x)
    params = checked_params(params, x)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    experts = params["router"].shape[-1]
    logits = router_logits(params["router"], with_jitter(rows, jitter, key))
    routing = route(
        logits, top_k=top_k, gate=gate, normalize=normalize, scale=scale, bias=params.get("bias"), return_counts=True
    )
    assert routing.counts is not None
    dropped = jnp.int32(0)
    if capacity_factor is None:
        if keep != "order":
            raise rule_error("keep is for a capacity factor", f"keep={keep!r} and none", "pass capacity_factor too")
        sent, sizes, permutation = dispatch(rows, routing, experts)
        made = run_experts(params, sent, sizes, activation)
    else:
        buffers, _, permutation, dropped = dispatch_to_buffers(
            rows, routing, experts, capacity_factor=capacity_factor, keep=keep
        )
        # Every buffer counts as full: its empty rows are zeros, and give zeros.
        full = jnp.full(experts, buffers.shape[1], jnp.int32)
        made = run_experts(params, buffers.reshape(experts * buffers.shape[1], rows.shape[1]), full, activation)
    y = combine(made, routing, permutation).reshape(x.shape)
    return y, metrics_of(logits, routing.counts, gate, dropped)


def checked_params(params: Any, x: Any) -> dict[str, jax.Array]:
    """The parameters as arrays (lists of numbers are made such), or an error about names and shapes."""
    if not isinstance(params, Mapping):
        raise rule_error(
            f"The parameters are a mapping of {', '.join(NEEDED)} to arrays",
            f"a {type(params).__name__}",
            "make them with init_moe",
        )
    for name in NEEDED:
        if name not in params:
            raise rule_error(f"The parameters are {', '.join(NEEDED)}", f"no {name!r}", "make them with init_moe")
    for name in params:
        if name not in (*NEEDED, "bias"):
            raise unknown_name("parameter of a mixture of experts", name, (*NEEDED, "bias"))
    params = {
        name: as_array("A mixture of experts", f"params[{name!r}]", given, optional=name == "bias")
        for name, given in params.items()
    }
    if params["router"].ndim != 2 or params["gate"].ndim != 3:
        given = f"router {describe(params['router'])} and gate {describe(params['gate'])}"
        raise rule_error("The router is [width, experts] and the gate [experts, width, hidden]", given, "reshape them")
    width, experts = params["router"].shape
    hidden = params["gate"].shape[2]
    shapes = {"gate": (experts, width, hidden), "up": (experts, width, hidden), "down": (experts, hidden, width)}
    for name, shape in shapes.items():
        if params[name].shape != shape:
            given = f"{describe(params[name])} with a router of {describe(params['router'])}"
            raise rule_error(f"{name} is {shape}", given, "make the parameters with init_moe")
    if x.ndim < 1 or x.shape[-1] != width or not jnp.issubdtype(x.dtype, jnp.floating):
        raise rule_error(f"x is a float array [..., {width}]", describe(x), "check the router's first axis")
    return params


def with_jitter(x: jax.Array, jitter: float, key: Any) -> jax.Array:
    """What the router sees of x."""
    if not 0 <= jitter < 1:
        raise rule_error("The jitter is from 0 to below 1", repr(jitter), "pass e.g. 0.01")
    if (jitter > 0) != (key is not None):
        given = f"jitter={jitter} and {'a key' if key is not None else 'no key'}"
        raise rule_error("The jitter and its key come together", given, "pass jitter above 0 and key, or neither")
    if key is None:
        return x
    return x * jax.random.uniform(key, x.shape, jnp.float32, 1 - jitter, 1 + jitter).astype(x.dtype)


def router_logits(router: jax.Array, x: jax.Array) -> jax.Array:
    """Float32 or wider."""
    return jnp.dot(x, router, preferred_element_type=jnp.promote_types(jnp.float32, x.dtype))


def run_experts(
    params: Params, rows: jax.Array, sizes: jax.Array, activation: str, padded_rows: bool = False
) -> jax.Array:
    """Rows sorted by expert through their experts."""
    gate, up, down = (params[name].astype(rows.dtype) for name in ("gate", "up", "down"))
    hidden = grouped_gated_gemm(rows, gate, up, sizes, activation=activation, padded_rows=padded_rows)
    return grouped_gemm(hidden, down, sizes, padded_rows=padded_rows)


def metrics_of(logits: jax.Array, counts: jax.Array, gate: str, dropped: jax.Array) -> MoeMetrics:
    return MoeMetrics(load_balancing_loss(logits, counts, gate=gate), z_loss(logits), counts, dropped)
