"""Leaky integrate-and-fire neurons: a leaky sum that fires, and a surrogate for the derivative that firing has not."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from capibara.errors import rule_error, unknown_name
from capibara.kernels.core.operands import as_array
from capibara.kernels.core.spec import describe
from capibara.kernels.core.varying import vary_alike
from capibara.kernels.ops.scan.parallel.api import parallel_scan
from capibara.kernels.ops.scan.recurrence.api import linear_recurrence
from capibara.kernels.ops.scan.recurrence.layout import read_flag

RESETS = ("subtract", "zero", "none")

# Each is 1 at the threshold and falls off around it, the faster the larger the slope; with its usual slope.
_SURROGATES: dict[str, tuple[Callable[[Any, float], Any], float]] = {
    "fast_sigmoid": (lambda above, slope: 1 / jnp.square(1 + slope * jnp.abs(above)), 25.0),
    "atan": (lambda above, slope: 1 / (1 + jnp.square(math.pi / 2 * slope * above)), 2.0),
    "triangle": (lambda above, slope: jnp.maximum(0, 1 - slope * jnp.abs(above)), 1.0),
}


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def spike(above: Any, surrogate: str, slope: float) -> jax.Array:
    """1 where `above` is more than zero, else 0; its derivative is the surrogate's.

    >>> spike(jnp.array([-0.1, 0.0, 0.1]), "triangle", 1.0).tolist()
    [0.0, 0.0, 1.0]
    >>> round(float(jax.grad(spike)(0.25, "triangle", 1.0)), 2)
    0.75
    """
    if surrogate not in _SURROGATES:
        raise unknown_name("surrogate of spike", surrogate, _SURROGATES)
    return jnp.asarray(above > 0, jnp.result_type(above))


@spike.defjvp
def _spike_jvp(surrogate: str, slope: float, primals: Any, tangents: Any) -> Any:
    ((above,), (tangent,)) = primals, tangents
    return spike(above, surrogate, slope), _SURROGATES[surrogate][0](above, slope) * tangent


_OverTime: TypeAlias = Float[Array, "*batch time neurons"]


@overload
def lif_neurons(
    current: Array, *, decay: Any = None, tau: Any = None, threshold: float = 1.0, reset: str = "subtract",
    surrogate: str = "fast_sigmoid", slope: float | None = None, initial_state: Array | None = None,
    return_state: Literal[False] = False, num_segments: int | None = None, use_checkpointing: bool = True,
    implementation: str | None = None,
) -> Array: ...  # fmt: skip


@overload
def lif_neurons(
    current: Array, *, decay: Any = None, tau: Any = None, threshold: float = 1.0, reset: str = "subtract",
    surrogate: str = "fast_sigmoid", slope: float | None = None, initial_state: Array | None = None,
    return_state: Literal[True], num_segments: int | None = None, use_checkpointing: bool = True,
    implementation: str | None = None,
) -> tuple[Array, Array, Array]: ...  # fmt: skip


@overload
def lif_neurons(
    current: Array, *, decay: Any = None, tau: Any = None, threshold: float = 1.0, reset: str = "subtract",
    surrogate: str = "fast_sigmoid", slope: float | None = None, initial_state: Array | None = None, return_state: bool,
    num_segments: int | None = None, use_checkpointing: bool = True, implementation: str | None = None,
) -> Array | tuple[Array, Array, Array]: ...  # fmt: skip


def lif_neurons(
    current: Float[Array, "*batch time neurons"],
    *,
    decay: Any = None,
    tau: Any = None,
    threshold: float = 1.0,
    reset: str = "subtract",
    surrogate: str = "fast_sigmoid",
    slope: float | None = None,
    initial_state: Float[Array, "*batch neurons"] | None = None,
    return_state: bool = False,
    num_segments: int | None = None,
    use_checkpointing: bool = True,
    implementation: str | None = None,
) -> _OverTime | tuple[_OverTime, _OverTime, Float[Array, "*batch neurons"]]:
    """The spikes of leaky integrate-and-fire neurons: v = decay * v + current, and 1 where v is above the threshold.

    The membrane potential v is float32; spikes have the type of `current`. Gradients flow to current, decay or tau, and
    initial_state, through the spikes and through the reset, by the surrogate. Without a reset, ask for
    implementation="reference" for forward-mode derivatives.

    Without a reset v is a linear recurrence and all steps run at once; with one they follow one another in one loop,
    whose backward pass keeps a checkpoint a segment.

    Args:
      current: [..., time, neurons].
      decay: what is left of v after a step, a number or one a neuron. Either this or tau.
      tau: the time constant in steps, above 0: decay = exp(-1 / tau). Under `jit` its sign cannot be checked.
      reset: after a spike, "subtract" the threshold, set v to "zero", or "none".
      surrogate: the derivative of a spike by u = v - threshold: "fast_sigmoid" 1 / (1 + slope |u|)², "atan"
        1 / (1 + (π/2 slope u)²), "triangle" max(0, 1 - slope |u|).
      slope: above 0; by default 25 for fast_sigmoid, 2 for atan, 1 for triangle.
      initial_state: v before the first step, [..., neurons]; zero by default.
      return_state: return (spikes, v at each step before its reset, v after the last reset): the last goes on as
        `initial_state`.
      num_segments, use_checkpointing: of the loop, as in `parallel_scan`; only with a reset.
      implementation: of `linear_recurrence`; only without a reset.

    >>> lif_neurons(jnp.full((1, 5, 1), 0.75), decay=1.0)[0, :, 0].tolist()
    [0.0, 1.0, 1.0, 0.0, 1.0]
    """
    current = as_array("lif_neurons", "current", current)
    if current.ndim < 2 or not jnp.issubdtype(current.dtype, jnp.floating):
        raise rule_error("current is [..., time, neurons] of floats", describe(current), "give it these axes")
    if reset not in RESETS:
        raise unknown_name("reset of lif_neurons", reset, RESETS)
    if surrogate not in _SURROGATES:
        raise unknown_name("surrogate of lif_neurons", surrogate, _SURROGATES)
    steepness = _SURROGATES[surrogate][1] if slope is None else _number("slope", slope)
    if not steepness > 0:
        raise rule_error("slope is above zero", repr(slope), "leave it out for the surrogate's usual one")
    return_state = read_flag("return_state", return_state)
    use_checkpointing = read_flag("use_checkpointing", use_checkpointing)
    start_shape = (*current.shape[:-2], current.shape[-1])
    if initial_state is None:
        start = jnp.zeros(start_shape, jnp.float32)
    else:
        start = _real("initial_state", initial_state)
        if start.shape != start_shape:
            raise rule_error(
                f"initial_state is current's shape without time, {start_shape}", describe(start), "broadcast it"
            )
    level = _real("threshold", threshold)
    # The last axes of v, or ones: it must not make v larger.
    if level.ndim > len(start_shape) or jnp.broadcast_shapes(level.shape, start_shape) != start_shape:
        raise rule_error("threshold is one number", describe(level), "pass a number, or one a neuron")
    # Inside shard_map a loop's state varies over the mesh axes that any of these does, from the start.
    wide, start, leak, level = vary_alike(
        (current.astype(jnp.float32), start, _leak(decay, tau, current.shape[-1]), level)
    )

    def fires(v: Any) -> Any:
        return spike(v - level, surrogate, steepness)

    if reset == "none":
        if num_segments is not None or not use_checkpointing:
            given = f"num_segments={num_segments}, use_checkpointing={use_checkpointing} with reset='none'"
            raise rule_error("Segments and checkpoints are for neurons that reset", given, "leave them out")
        scale = jnp.broadcast_to(leak, wide.shape)
        membrane = linear_recurrence(scale, wide, start, axis=wide.ndim - 2, implementation=implementation)
        spikes, final = fires(membrane), membrane[..., -1, :] if current.shape[-2] else start
    else:
        if implementation is not None:
            raise rule_error(
                "implementation is of the linear recurrence, which neurons are without a reset",
                f"implementation={implementation!r} with reset={reset!r}",
                "leave it out",
            )

        def step(v: Any, drive: Any) -> tuple[Any, Any]:
            v = leak * v + drive
            fired = fires(v)
            after = v - level * fired if reset == "subtract" else v * (1 - fired)
            return after, (fired, v)

        final, (spikes, membrane) = parallel_scan(
            step, start, jnp.moveaxis(wide, -2, 0), num_segments, use_checkpointing, path="sequential"
        )
        spikes, membrane = (jnp.moveaxis(x, 0, -2) for x in (spikes, membrane))
    spikes = spikes.astype(current.dtype)
    return (spikes, membrane, final) if return_state else spikes


def _leak(decay: Any, tau: Any, neurons: int) -> Any:
    if (decay is None) == (tau is None):
        given = "neither" if decay is None else "both"
        raise rule_error("The leak is given as decay, or as tau", given, "pass one of them, e.g. decay=0.9")
    name, given = ("decay", decay) if tau is None else ("tau", tau)
    made = _real(name, given)
    if made.shape not in ((), (1,), (neurons,)):
        raise rule_error(f"{name} is one number, or one a neuron ({neurons})", describe(made), "check its axes")
    if tau is None:
        return made
    if not isinstance(made, jax.core.Tracer) and not np.all(np.asarray(made) > 0):
        raise rule_error("tau is above zero", repr(tau), "pass the steps after which 1/e of v is left")
    return jnp.exp(-1 / made)


def _real(name: str, given: Any) -> Any:
    """An argument in float32. The type is checked before it is converted: a complex number would lose a part."""
    made = as_array("lif_neurons", name, given)
    if not (jnp.issubdtype(made.dtype, jnp.floating) or jnp.issubdtype(made.dtype, jnp.integer)):
        raise rule_error(f"{name} is of real numbers", describe(made), "convert it with .real, or .astype(...)")
    return made.astype(jnp.float32)


def _number(name: str, given: Any) -> float:
    try:
        return float(given)
    except (TypeError, ValueError) as error:  # also what is traced
        raise rule_error(f"{name} is a number, known when traced", repr(given), "pass a Python number") from error
