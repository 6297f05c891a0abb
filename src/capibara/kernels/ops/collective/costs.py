"""The work of one device in a collective: additions, memory traffic, and what it sends over its links."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from capibara.hardware.facts import Chip
from capibara.hardware.products import fill
from capibara.kernels.core.spec import Call, CallEfficiency, Cost, nbytes


def _devices(call: Call) -> int:
    devices = call.params["devices"]
    assert isinstance(devices, int)
    return devices


def _moved(call: Call, out_bytes: float, sent: float, additions: float = 0.0) -> Cost:
    x = call.need("x")
    dtype = np.dtype(x.dtype).name
    return Cost(vector_flops=additions, bytes=nbytes(x) + out_bytes, dtype=dtype, link_bytes=sent)


def all_reduce(call: Call) -> Cost:
    x, n = call.need("x"), _devices(call)
    sent = 2 * (n - 1) / n * nbytes(x)
    return _moved(call, nbytes(x), sent, (n - 1) / n * math.prod(x.shape))


def reduce_scatter(call: Call) -> Cost:
    x, n = call.need("x"), _devices(call)
    return _moved(call, nbytes(x) / n, (n - 1) / n * nbytes(x), (n - 1) / n * math.prod(x.shape))


def all_gather(call: Call) -> Cost:
    x, n = call.need("x"), _devices(call)
    return _moved(call, n * nbytes(x), (n - 1) * nbytes(x))


def all_to_all(call: Call) -> Cost:
    x, n = call.need("x"), _devices(call)
    return _moved(call, nbytes(x), (n - 1) / n * nbytes(x))


def permute(call: Call) -> Cost:
    return _moved(call, nbytes(call.need("x")), nbytes(call.need("x")))


def matmul_efficiency(call: Call, chip: Chip, *, gathered: bool) -> CallEfficiency:
    """Of the product: what travels meanwhile is the links' to count."""
    x, w = call.need("x"), call.need("w")
    rows = x.shape[-2] * (_devices(call) if gathered else 1)
    filled = fill(chip, (math.prod(x.shape[:-2]), rows, w.shape[-1], x.shape[-1]))
    return CallEfficiency(filled=filled, source="predicted: tiles of the chip's matrix units")


def _matmul(call: Call, rows: int, sent: float) -> Cost:
    """`rows` are all that are multiplied here."""
    x, w = call.need("x"), call.need("w")
    dtype = jnp.promote_types(x.dtype, w.dtype)
    batch = math.prod(x.shape[:-2])
    flops = 2.0 * batch * rows * x.shape[-1] * w.shape[-1]
    moved = batch * rows * (x.shape[-1] + w.shape[-1]) * dtype.itemsize + nbytes(w)
    return Cost(matrix_flops=flops, bytes=moved, dtype=dtype.name, link_bytes=sent)


def all_gather_matmul(call: Call) -> Cost:
    x, n = call.need("x"), _devices(call)
    return _matmul(call, n * x.shape[-2], (n - 1) * nbytes(x))


def matmul_reduce_scatter(call: Call) -> Cost:
    x, w, n = call.need("x"), call.need("w"), _devices(call)
    out = math.prod(x.shape[:-1]) * w.shape[-1] * jnp.promote_types(x.dtype, w.dtype).itemsize
    return _matmul(call, x.shape[-2], (n - 1) / n * out)
