"""A matrix whose rows may lie on several devices: what is summed over the rows is summed over them too."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.core.varying import vary_like

AxisName = str | tuple[str, ...] | None


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """a @ b at full precision: TF32 or bfloat16 passes would drown the small singular values."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a matrix: on one device, spread by XLA's partitioner, or over `axis_name` inside shard_map."""

    axis_name: AxisName = None

    def summed(self, x: Any) -> Any:
        return x if self.axis_name is None else jax.lax.psum(x, self.axis_name)

    def largest(self, x: Any) -> Any:
        return x if self.axis_name is None else jax.lax.pmax(x, self.axis_name)

    def count(self, local: int) -> int:
        """The rows on all devices, of which each has `local`."""
        return local if self.axis_name is None else local * jax.lax.axis_size(self.axis_name)

    def indices(self, local: int) -> jax.Array:
        """The place of this device's rows in the whole matrix."""
        here = jnp.arange(local, dtype=jnp.uint32)
        if self.axis_name is None:
            return here
        return here + jnp.uint32(local) * jax.lax.axis_index(self.axis_name).astype(jnp.uint32)

    def spread(self, y: jax.Array, like: jax.Array) -> jax.Array:
        """What every device has whole as one part each of n: y / sqrt(n), so that the parts' norm is that of y."""
        return y if self.axis_name is None else vary_like(y / self.count(1) ** 0.5, like)

    def gathered(self, y: jax.Array) -> jax.Array:
        """The transpose of `spread`, and its inverse for parts that are equal."""
        return y if self.axis_name is None else jax.lax.psum(y, self.axis_name) / self.count(1) ** 0.5

    def inner(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """aᵀ b, summed over all rows."""
        return self.summed(product(a.T, b))


WHOLE = Rows()
