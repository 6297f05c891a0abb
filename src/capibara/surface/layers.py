"""Norms, activations and routing by the choices of a kernel object: how much is optimised, fused, in what precision.

| optimization_level | a layer runs as |
|---|---|
| "none" | the reference, operation by operation |
| "basic" | plain XLA |
| "balanced" | what dispatch picks |
| "aggressive" | what dispatch picks after the shape was tuned, at its first sight and outside of traces |

`enable_xla_fusion=False` puts a barrier on either side of a layer. A layer has no transposed operands, so the object's
`memory_layout_optimization` has nothing to do here.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from capibara import precision as precisions
from capibara.errors import rule_error, say_once
from capibara.kernels.core import tables
from capibara.kernels.core.operands import no_array
from capibara.kernels.core.spec import describe
from capibara.kernels.ops.layers.activation.api import activation
from capibara.kernels.ops.layers.norm.api import layer_norm
from capibara.kernels.ops.layers.router.api import route
from capibara.kernels.ops.layers.router.losses import expert_counts, load_balancing_loss
from capibara.kernels.ops.linalg.gemm.api import gemm
from capibara.kernels.ops.linalg.placement import on_their_device
from capibara.kernels.ops.linalg.rounding import rounded
from capibara.surface.draws import Draws
from capibara.surface.products import LEVELS, Settings, tune_once

logger = logging.getLogger("capibara.kernels")


@dataclasses.dataclass(frozen=True)
class How:
    """What of a call is not an array."""

    body: Callable[..., Any]  # of the arrays by name, and this
    precision: str
    implementation: str | None
    fuse: bool
    options: tuple[tuple[str, Hashable], ...] = ()

    @property
    def policy(self) -> precisions.Policy:
        return precisions.policy(self.precision)


def how(settings: Settings, body: Callable[..., Any], precision: str | None, **options: Hashable) -> How:
    """The settings' choices for one call; a `precision` goes before the settings' own."""
    name = precisions.policy(precision or settings.precision).name
    implementation = LEVELS[settings.optimization_level]
    return How(body, name, implementation, settings.enable_xla_fusion, tuple(sorted(options.items())))


def run(settings: Settings, how: How, arrays: dict[str, Any], donate: str | None = None) -> Any:
    """Tune where the level says so, then run: as one program, or operation by operation.

    `donate` names the array whose memory the result may take; it is gone afterwards.
    """
    if settings.optimization_level == "aggressive" and how.implementation is None:
        names = tuple(arrays)
        tune_once(how, lambda *xs: _run(dict(zip(names, xs, strict=True)), how), tuple(arrays.values()))
    if donate is None and not settings.compiled:
        return _run(arrays, how)
    with on_their_device(arrays.values()):
        if donate is None:
            return _compiled(arrays, how=how, tuned=tables.generation())
        given_up = {donate: arrays[donate]}
        kept = {name: x for name, x in arrays.items() if name != donate}
        return _in_place(given_up, kept, how=how, tuned=tables.generation())


# `tuned` is part of jit's key: a choice that was traced before a table changed is made again.
@functools.partial(jax.jit, static_argnames=("how", "tuned"))
def _compiled(arrays: dict[str, Any], *, how: How, tuned: int) -> Any:
    return _run(arrays, how)


@functools.partial(jax.jit, static_argnames=("how", "tuned"), donate_argnums=0)
def _in_place(given_up: dict[str, Any], kept: dict[str, Any], *, how: How, tuned: int) -> Any:
    return _run({**given_up, **kept}, how)


def _run(arrays: dict[str, Any], how: How) -> Any:
    if how.fuse:
        return how.body(arrays, how, **dict(how.options))
    keys = {name: x for name, x in arrays.items() if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)}
    rest = jax.lax.optimization_barrier({name: x for name, x in arrays.items() if name not in keys})
    return jax.lax.optimization_barrier(how.body({**rest, **keys}, how, **dict(how.options)))


def array(name: str, x: Any) -> jax.Array:
    """A JAX array, or an error that names the argument."""
    if isinstance(x, jax.Array):
        return x
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError) as error:  # None is the latter
        raise no_array(f"{name} is an array", name, x) from error


def number(name: str, x: Any) -> float:
    """A Python float of any single number that is known now, so that it can be part of jit's key."""
    if isinstance(x, jax.core.Tracer):
        raise rule_error(f"{name} is known before tracing", x, "pass a Python float (static under jit)")
    try:
        if x is None:  # NumPy reads it as nan
            raise TypeError("None")
        return float(x if isinstance(x, int | float | np.number) else np.asarray(x, np.float64).item())
    except (TypeError, ValueError) as error:
        raise rule_error(f"{name} is a number", repr(x), "pass a Python float") from error


def present(**named: Any) -> dict[str, jax.Array]:
    return {name: array(name, x) for name, x in named.items() if x is not None}


def normalise(
    settings: Settings,
    input_tensor: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    memory_efficient: bool = True,
    precision: str | None = None,
) -> jax.Array:
    """Layer norm of the last axis. The rows are rounded by the policy; weight and bias keep their own type.

    `memory_efficient`: the gradient keeps the rows and two numbers for each, and makes the rest again. Otherwise the
    specification runs, whose derivative is JAX's own and keeps the intermediates in float32.
    """
    made = how(settings, _normalised, precision, eps=number("eps", eps), lean=bool(memory_efficient))
    if not memory_efficient:
        made = dataclasses.replace(made, implementation="reference")
    arrays = {"input_tensor": array("input_tensor", input_tensor), **present(weight=weight, bias=bias)}
    return run(settings, made, arrays)


def _normalised(arrays: dict[str, Any], how: How, *, eps: float, lean: bool) -> jax.Array:
    norm: Callable[..., Any] = functools.partial(layer_norm, eps=eps, implementation=how.implementation)
    if lean and how.implementation == "reference":
        norm = jax.checkpoint(norm)  # plain JAX keeps little only if it is told to
    x = how.policy.cast_to_compute(arrays["input_tensor"])
    return how.policy.cast_to_output(norm(x, arrays.get("weight"), arrays.get("bias")))


def gelu_dropout(
    settings: Settings,
    draws: Draws,
    input_tensor: Any,
    dropout_rate: Any = 0.0,
    training: bool = True,
    inplace: bool = False,
    rng: Any = None,
    approximate: bool = False,
    precision: str | None = None,
) -> jax.Array:
    """gelu and dropout in one pass; a dropout without a key draws the object's next one.

    `inplace`: the result takes the input's memory where that can be, else it is said once why not.
    """
    x = array("input_tensor", input_tensor)
    if isinstance(dropout_rate, jax.core.Tracer):
        raise rule_error("dropout_rate is known before tracing", dropout_rate, "pass a Python float (static under jit)")
    if not isinstance(dropout_rate, int | float | np.number) or not 0 <= dropout_rate < 1:
        raise rule_error("The dropout rate is a number from 0 to below 1", repr(dropout_rate), "pass e.g. 0.1")
    rate = float(dropout_rate) if training else 0.0
    if rate and rng is None:
        rng = draws.next()
    arrays = {"input_tensor": x, **({"rng": array("rng", rng)} if rate else {})}
    made = how(settings, _gelu_dropped, precision, rate=rate, kind="gelu_tanh" if approximate else "gelu")
    donate = None
    if inplace:
        reason = _not_in_place(settings, input_tensor, made.policy)
        if reason is None:
            donate = "input_tensor"
        else:
            text = "fused_gelu_dropout(inplace=True): the result has memory of its own, since %s"
            say_once(logger, reason, text, reason)
    return run(settings, made, arrays, donate)


def _gelu_dropped(arrays: dict[str, Any], how: How, *, rate: float, kind: str) -> jax.Array:
    x = how.policy.cast_to_compute(arrays["input_tensor"])
    made = activation(x, kind=kind, dropout_rate=rate, key=arrays.get("rng"), implementation=how.implementation)
    return how.policy.cast_to_output(made)


def _not_in_place(settings: Settings, x: Any, policy: precisions.Policy) -> str | None:
    """Why the result cannot take the input's memory; None when it can."""
    if isinstance(x, jax.core.Tracer):
        return "inside of jit and grad that is for the surrounding program: jax.jit(..., donate_argnums=...)"
    if not isinstance(x, jax.Array):
        return "a NumPy array has no memory on the device"
    if settings.optimization_level == "none":
        return "optimization_level='none' runs operation by operation"
    if policy.output_dtype != x.dtype.name:
        return f"precision={policy.name!r} gives {policy.output_dtype} and the input is {x.dtype.name}"
    return None


class TokenRouting(NamedTuple):
    """Each token's experts, best first; with load balancing, each expert's tokens and the loss to add."""

    weights: Float[Array, "*tokens top_k"]
    indices: Int[Array, "*tokens top_k"]
    counts: Int[Array, " experts"] | None = None
    load_balancing_loss: Float[Array, ""] | None = None


def route_tokens(
    settings: Settings,
    draws: Draws,
    tokens: Any,
    num_experts: int,
    top_k: int = 2,
    load_balancing: bool = True,
    precision: str | None = None,
    router: Any = None,
    gate: str = "softmax",
    normalize: bool = True,
    scale: float = 1.0,
) -> TokenRouting:
    """The experts of each token: of logits [..., num_experts], or of tokens [..., width] by a router's weights."""
    x = array("tokens", tokens)
    if x.ndim == 0 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise rule_error("tokens are floats: logits [..., num_experts], or [..., width]", describe(x), "embed them")
    if isinstance(num_experts, bool) or not isinstance(num_experts, int | np.integer) or num_experts < 1:
        raise rule_error("num_experts is a whole number, 1 or more", repr(num_experts), "pass e.g. 32")
    width, shape = x.shape[-1], (x.shape[-1], int(num_experts))
    if router is not None:
        router = array("router", router)
        if router.shape != shape:
            raise rule_error(f"The router is [width, num_experts], {shape}", describe(router), "check num_experts")
    elif width != num_experts:
        say_once(
            UserWarning,
            None,
            "moe_routing_kernel was given tokens and no router, and drew random router weights from the object's seed. "
            "To train them or to load others, pass router=[width, num_experts]; or pass logits [..., num_experts] as "
            "tokens.",
            stacklevel=4,
        )
        router = jax.random.normal(draws.fixed(), shape, jnp.float32) * width**-0.5
    if isinstance(top_k, bool) or not isinstance(top_k, int | np.integer):
        raise rule_error("top_k is a whole number", repr(top_k), "pass e.g. 2")
    options = {"top_k": int(top_k), "gate": gate, "normalize": bool(normalize), "scale": number("scale", scale)}
    made = how(settings, _routed, precision, balanced=bool(load_balancing), **options)
    weights, indices, *rest = run(settings, made, {"tokens": x, **present(router=router)})
    return TokenRouting(weights, indices, *rest)


def _routed(arrays: dict[str, Any], how: How, *, balanced: bool, gate: str, **options: Any) -> tuple[Any, ...]:
    x = arrays["tokens"]
    if "router" in arrays:
        # The logits stay float32: which expert is best hangs on their last bits.
        rows = x.reshape(-1, x.shape[-1])
        a, b, precision, out = rounded(rows, arrays["router"], how.precision, "float32")
        logits = gemm(a, b, precision=precision, out_dtype=out, implementation=how.implementation)
        logits = logits.reshape(*x.shape[:-1], logits.shape[-1])
    else:
        logits = how.policy.cast_to_compute(x)
    weights, indices, _ = route(logits, gate=gate, implementation=how.implementation, **options)
    made = (how.policy.cast_to_output(weights), indices)
    if not balanced:
        return made
    counts = expert_counts(indices, logits.shape[-1])
    return (*made, counts, load_balancing_loss(logits, counts, gate=gate))
