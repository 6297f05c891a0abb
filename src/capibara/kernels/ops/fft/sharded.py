"""The transform of an axis that is itself sharded: four steps with exchanges between the devices.

The signal is a matrix of n1 rows of n2 numbers, its rows shared out among the devices. An exchange gives each device
whole columns to transform; after the factors another gives it whole rows of the result; and a third puts what the
second transform made in order. Each device sends and receives its own share three times.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Num

from capibara.errors import rule_error, unknown_name
from capibara.kernels.core.dispatch import run
from capibara.kernels.core.operands import as_array
from capibara.kernels.core.spec import describe
from capibara.kernels.ops.fft.api import FFT
from capibara.kernels.ops.fft.rules import NORMS, by_policy, scale_of
from capibara.kernels.ops.fft.twiddles import twiddles


def sharded_fft(
    x: Num[Array, "*B n"], *, axis_name: str, mesh: Mesh | None = None, inverse: bool = False,
    norm: str | None = None, precision: str = "float32",
) -> Array:  # fmt: skip
    """The transform of the last axis, which is sharded in equal parts, in order, over the mesh axis `axis_name`.

    Inside shard_map x is one device's part, and so is the result. With a `mesh`, x is the global array and the other
    axes are left as XLA has them. The length is a multiple of the square of the number of devices along the axis.

    Args:
      x: real or complex; the result is complex64.
      axis_name: the mesh axis that the last axis is sharded over.
      mesh: the mesh, when x is a global array; None inside shard_map.
      inverse, norm, precision: as for `ifft` and `fft`. Inside shard_map, "fp8" has a scale for each device's part.

    The gradient is there; forward-mode derivatives are not. For those gather the axis and use `fft` with
    implementation="reference".
    """
    x = as_array("sharded_fft", "x", x)
    norm = "backward" if norm is None else norm
    if not isinstance(inverse, bool | np.bool_):
        raise rule_error("inverse is True or False", f"inverse={inverse!r}", "pass one of them")
    inverse = bool(inverse)
    if norm not in NORMS:
        raise unknown_name("norm", norm, NORMS)
    if x.ndim == 0 or x.dtype in (jnp.dtype("complex128"), jnp.dtype("float64")):
        raise rule_error("sharded_fft takes [..., n] and computes in complex64", describe(x), "convert it")
    x, precision = by_policy(precision, x.astype(jnp.complex64))
    if mesh is None:
        return _local(x, axis_name=axis_name, inverse=inverse, norm=norm, precision=precision)
    if axis_name not in mesh.shape:
        raise unknown_name("mesh axis", axis_name, tuple(mesh.shape))
    _check_length(x.shape[-1], mesh.shape[axis_name])
    return _on_mesh(mesh, x.ndim, axis_name, inverse, norm, precision)(x)


@functools.lru_cache(maxsize=64)
def _on_mesh(mesh: Mesh, ndim: int, axis_name: str, inverse: bool, norm: str, precision: str) -> Any:
    """One compiled function for each kind of call on global arrays."""
    local = functools.partial(_local, axis_name=axis_name, inverse=inverse, norm=norm, precision=precision)
    spec = PartitionSpec(*(None,) * (ndim - 1), axis_name)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={axis_name}))


def _check_length(n: int, devices: int) -> None:
    if n == 0:
        raise rule_error("A transform has at least one point", "length 0", "pass one point or more")
    if n % (devices * devices):
        raise rule_error(
            "A sharded transform's length is a multiple of the square of the devices that share it",
            f"length {n} over {devices} devices",
            f"gather the axis and call fft, or share it among devices whose number's square divides {n}",
        )


def _split(n: int, devices: int) -> tuple[int, int]:
    """n1 · n2 = n, both multiples of `devices`, as near to each other as can be."""
    rest = n // devices**2
    small = max(d for d in range(1, math.isqrt(rest) + 1) if rest % d == 0)
    return devices * (rest // small), devices * small


def _local(x: jax.Array, *, axis_name: str, inverse: bool, norm: str, precision: str) -> jax.Array:
    try:
        devices = lax.axis_size(axis_name)
    except NameError as error:
        raise rule_error(
            "Without a mesh, sharded_fft is called inside shard_map over its axis", f"no axis {axis_name!r} here",
            "pass mesh= with the global array, or call it inside jax.shard_map over that axis",
        ) from error  # fmt: skip
    n = x.shape[-1] * devices
    _check_length(n, devices)
    rows, columns = _split(n, devices)
    lead = x.shape[:-1]
    x = x.reshape(-1, rows // devices, columns)
    exchange = functools.partial(lax.all_to_all, axis_name=axis_name, tiled=True)
    x = exchange(x, split_axis=2, concat_axis=1)  # [batch, rows, my columns]
    x = _transform(x.swapaxes(1, 2), inverse, precision)  # [batch, my columns, k1]
    x = x * _factors(n, rows, columns, devices, axis_name, inverse)
    x = exchange(x, split_axis=2, concat_axis=1)  # [batch, columns, my k1]
    x = _transform(x.swapaxes(1, 2), inverse, precision)  # [batch, my k1, k2]
    x = exchange(x, split_axis=2, concat_axis=1)  # [batch, k1, my k2]
    x = x.swapaxes(1, 2) * scale_of((n,), norm, inverse)
    return x.reshape(*lead, n // devices)


def _transform(x: jax.Array, inverse: bool, precision: str) -> jax.Array:
    params: dict[str, Any] = {"inverse": inverse, "precision": precision}
    if inverse:
        params["norm"] = "forward"  # no scale: it is applied once, at the end
    return lax.complex(*run(FFT, (x.real, x.imag), params))


def _factors(n: int, rows: int, columns: int, devices: int, axis_name: str, inverse: bool) -> jax.Array:
    """exp(-2πi j2·k1 / n) for this device's columns: those of its first column times those of the steps from it."""
    own = columns // devices
    first = _as_complex(twiddles(n, devices, rows, inverse, own))[lax.axis_index(axis_name)]
    return first * _as_complex(twiddles(n, own, rows, inverse))


def _as_complex(planes: Any) -> jax.Array:
    return jnp.asarray((planes[0] + 1j * planes[1]).astype("complex64"))
