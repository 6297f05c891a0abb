"""The op behind `fft_convolve`: planes through a spectrum and back."""

from __future__ import annotations

from typing import Any

from capibara.kernels.core.op import Op, register
from capibara.kernels.core.spec import Case, Implementation
from capibara.kernels.ops.fft.filter import composed, hopper, rules
from capibara.kernels.ops.fft.filter.reference import reference
from capibara.kernels.ops.fft.rules import by_products


def _case(name: str, pairs: int, channels: int, time: int, n: int, tags: set[str], **params: Any) -> Case:
    signal, spectrum = (pairs, channels, time), (channels, n)
    return Case(name, (signal, signal, spectrum, spectrum), "float32", params, frozenset(tags))


FFT_FILTER = Op(
    "fft_filter",
    family="fft",
    reference=reference,
    operands=("re", "im", "h_re", "h_im"),
    params=rules.PARAMS,
    check=rules.check,
    cost=rules.cost,
    efficiency=lambda call, chip: by_products(call.need("h_re").shape[-1:]),
    tolerance=rules.tolerance,
    batch=rules.batch,
    partition=rules.PARTITION,
    cases=(
        _case("16k", 4, 768, 16384, 32768, {"bench", "gpu"}, precision="bfloat16"),
        _case("odd", 2, 3, 7, 12, {"test"}, conjugate=True),
        _case("hopper-16k", 1, 2, 8192, 16384, {"gpu"}, precision="bfloat16"),
        _case("shardable", 8, 8, 5, 8, {"shard"}),
    ),
)
FFT_FILTER.implement(
    composed.IMPLEMENTATION,
    hopper.IMPLEMENTATION,
    Implementation("reference", reference),
)
register(FFT_FILTER)
