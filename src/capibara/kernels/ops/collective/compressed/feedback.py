"""Error feedback: what a compressed all-reduce did not send is kept, and sent with the next.

Without it a number that is small beside its block's largest is rounded to nothing at every step, and never arrives.
With it every number arrives in the end: the sum of all that was delivered differs from the sum of all gradients by what
is still kept, which stays below a step of the code, or two.

The state is a tree like the gradients, in float32, with one row a device in front: as a global array it is
[devices, *shape], sharded over the axes of the all-reduce, and inside shard_map each device has its own [1, *shape]. It
is a part of the training state: keep it in checkpoints. Row i also holds what was lost when device i rounded its share
of the sum: added to the device's next gradient, it is in the next sum.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from capibara.errors import rule_error
from capibara.kernels.core.spec import describe
from capibara.kernels.ops.collective.axes import Tree


def feedback_state(tree: Tree, devices: int = 1) -> Tree:
    """Nothing kept yet: zeros for gradients like `tree` on so many devices.

    Inside shard_map, where a device has its own row, leave `devices` at 1.

    >>> feedback_state({"w": jnp.ones((3, 4), jnp.bfloat16)}, devices=8)["w"].shape
    (8, 3, 4)
    """
    _check_devices(devices)
    return jax.tree.map(lambda x: jnp.zeros((devices, *jnp.shape(x)), jnp.float32), tree)


def redistribute(state: Tree, devices: int) -> Tree:
    """A state, restored from a checkpoint, for another number of devices: each has an equal part of all that is kept.

    >>> kept = redistribute({"w": jnp.array([[1.0], [2.0], [3.0], [6.0]])}, devices=2)
    >>> kept["w"].tolist()
    [[6.0], [6.0]]
    """
    _check_devices(devices)

    def spread(kept: Any) -> jax.Array:
        if not jnp.ndim(kept):
            raise rule_error("A state has a leading axis of one row a device", repr(kept), "pass feedback_state's")
        total = jnp.asarray(kept).sum(0, keepdims=True)
        return jnp.broadcast_to(total / devices, (devices, *total.shape[1:]))

    return jax.tree.map(spread, state)


def check_state(state: Any, tree: Any) -> None:
    """One row for this device, for every leaf of the gradients."""
    given: Any = jax.tree.structure(state)
    wanted: Any = jax.tree.structure(tree)
    if given != wanted:
        raise rule_error(
            f"The state is a tree like the gradients, {wanted}", given, "make it with feedback_state(gradients)"
        )
    for kept, leaf in zip(jax.tree.leaves(state), jax.tree.leaves(tree), strict=True):
        array = hasattr(kept, "dtype") and hasattr(kept, "shape")
        if not array or kept.shape != (1, *jnp.shape(leaf)) or kept.dtype != jnp.float32:
            raise rule_error(
                f"Inside shard_map the state of a leaf {jnp.shape(leaf)} is float32 of shape {(1, *jnp.shape(leaf))}",
                describe(kept) if array else repr(kept),
                "make it with feedback_state(gradients, devices) and split its first axis over the all-reduce's axes",
            )


def error_bound(block_maxima: Any, *, unbiased: bool = False) -> float:
    """The largest error of an element of the compressed sum, from the largest magnitude of its block on each device.

    Device i's own codes are off by at most half a step, a_i / 254; the sum of what they mean is at most A = a_1 + … +
    a_n, and encoding it is off by at most A / 254. Together A / 127; twice that where rounding is at random. The
    float32 arithmetic around it adds up to 2^-15 of each step, and n · 2^-24 of A for the sum itself. A mean has
    an nth of it.

    >>> round(error_bound([1.0, 2.0, 1.0]), 4)
    0.0315
    """
    maxima = [float(a) for a in block_maxima]
    if not maxima or min(maxima) < 0:
        raise rule_error("block_maxima has a magnitude for each device", maxima, "pass each device's abs(x).max()")
    # A step is never below the smallest normal float32, and subnormal numbers, a step at most, count as zeros.
    steps = [max(a / 127, 2.0**-126) for a in (*maxima, math.fsum(maxima))]
    share = (1.0 if unbiased else 0.5) + 2.0**-15
    return math.fsum(steps) * share + len(maxima) * 2.0**-24 * math.fsum(maxima) + (len(maxima) + 1) * 2.0**-126


def _check_devices(devices: Any) -> None:
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise rule_error("devices is a positive whole number", repr(devices), "pass how many devices the axes have")
