"""Scans and recurrences by their documented names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float

from capibara.kernels.ops import scan
from capibara.kernels.ops.scan import ScanPlan


class TpuV4ScanOps:
    """Scans of any step, and the recurrences of state-space, gated and spiking layers.

    States and sums are float32 whatever the operands are; results have the operands' own type.
    """

    def parallel_scan(
        self,
        f: Callable[[Any, Any], tuple[Any, Any]],
        init: Any,
        xs: Any = None,
        num_segments: int | None = None,
        use_checkpointing: bool = True,
        **extra: Any,
    ) -> tuple[Any, Any]:
        """(final carry, ys) as `lax.scan` gives them; in parallel over time where the step is affine in the carry.

        `extra`: length, reverse, path, implementation: see `capibara.kernels.parallel_scan`.

        >>> import jax.numpy as jnp
        >>> TpuV4ScanOps().parallel_scan(lambda h, x: (0.5 * h + x, h), 0.0, jnp.ones(3))[1].tolist()
        [0.0, 1.0, 1.5]
        """
        return scan.parallel_scan(f, init, xs, num_segments, use_checkpointing, **extra)

    def explain(
        self,
        f: Callable[[Any, Any], tuple[Any, Any]],
        init: Any,
        xs: Any = None,
        num_segments: int | None = None,
        use_checkpointing: bool = True,
        **extra: Any,
    ) -> ScanPlan:
        """What `parallel_scan` of the same arguments would run, and why, in words and as data."""
        return scan.explain_scan(f, init, xs, num_segments, use_checkpointing, **extra)

    def linear_recurrence(
        self,
        a: Float[Array, " ..."],
        b: Float[Array, " ..."],
        initial: Float[Array, " ..."] | None = None,
        **extra: Any,
    ) -> Any:
        """h_t = a_t · h_{t-1} + b_t along an axis; `extra` as in `capibara.kernels.linear_recurrence`."""
        return scan.linear_recurrence(a, b, initial, **extra)

    def selective_scan(
        self,
        x: Float[Array, "batch time channels"],
        dt: Float[Array, "batch time channels"],
        A: Float[Array, "channels states"],
        B: Float[Array, "batch time states"],
        C: Float[Array, "batch time states"],
        D: Float[Array, " channels"] | None = None,
        **extra: Any,
    ) -> Any:
        """Mamba's recurrence; `extra` as in `capibara.kernels.selective_scan`."""
        return scan.selective_scan(x, dt, A, B, C, D, **extra)

    def state_space_dual(
        self,
        x: Float[Array, "batch time heads width"],
        dt: Float[Array, "batch time heads"],
        A: Float[Array, " heads"],
        B: Float[Array, "batch time groups states"],
        C: Float[Array, "batch time groups states"],
        D: Float[Array, " heads"] | None = None,
        **extra: Any,
    ) -> Any:
        """Mamba-2's recurrence; `extra` as in `capibara.kernels.state_space_dual`."""
        return scan.state_space_dual(x, dt, A, B, C, D, **extra)

    def lif_neurons(self, current: Float[Array, "*batch time neurons"], **extra: Any) -> Any:
        """Spikes of leaky integrate-and-fire neurons; `extra` as in `capibara.kernels.lif_neurons`."""
        return scan.lif_neurons(current, **extra)
