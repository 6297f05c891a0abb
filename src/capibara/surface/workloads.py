"""What the kernels of a kernel object are timed on: a size for accelerators, and one that a laptop does at once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from capibara import hardware
from capibara import precision as precisions
from capibara.errors import rule_error, unknown_name
from capibara.kernels.core.spec import standard_normal
from capibara.surface.figures import seconds_of, work_of

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Workload:
    """Array arguments by keyword, a list being several; and the other arguments."""

    large: Mapping[str, Shape | list[Shape]]
    small: Mapping[str, Shape | list[Shape]]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    draws: bool = False  # takes a key


WORKLOADS = {
    "flash_attention": Workload(
        dict.fromkeys(("query", "key", "value"), (4, 16, 4096, 128)),
        dict.fromkeys(("query", "key", "value"), (1, 2, 256, 64)),
        {"causal": True},
    ),
    "optimized_matmul": Workload(
        dict.fromkeys(("a", "b"), (8192, 8192)),
        dict.fromkeys(("a", "b"), (256, 256)),
    ),
    "einsum_optimize": Workload(
        {"operands": [(4, 16, 4096, 128), (4, 16, 4096, 128)]},
        {"operands": [(1, 2, 256, 64), (1, 2, 256, 64)]},
        {"equation": "bhnd,bhkd->bhnk"},
    ),
    "batch_operations": Workload(
        {"inputs": [(4096, 4096), (2, 1024, 4096), (512, 4096)]},
        {"inputs": [(128, 256), (2, 64, 256), (16, 256)]},
        {"operation_type": "layer_norm"},
    ),
    "moe_routing_kernel": Workload(
        {"tokens": (16384, 4096), "router": (4096, 32)},
        {"tokens": (512, 128), "router": (128, 32)},
        {"num_experts": 32, "top_k": 4},
    ),
    "fast_layer_norm": Workload(
        {"input_tensor": (16384, 4096), "weight": (4096,), "bias": (4096,)},
        {"input_tensor": (512, 256), "weight": (256,), "bias": (256,)},
    ),
    "fused_gelu_dropout": Workload(
        {"input_tensor": (16384, 16384)},
        {"input_tensor": (512, 256)},
        {"dropout_rate": 0.1, "training": True},
        draws=True,
    ),
}


def benchmark(kernels: Any, precision: str, names: Iterable[str] | None = None) -> dict[str, dict[str, float]]:
    """{name: throughput in TFLOP/s, latency_ms, memory_efficiency} of these methods of `kernels`, measured now.

    memory_efficiency is the least that the work must move (every operand read once, every result written once) over
    the time, as a fraction of the chip's bandwidth: near 1 for what only moves memory, small for products. nan for a
    chip whose bandwidth is not known.
    """
    if isinstance(names, str):
        raise rule_error("benchmark_kernels takes a list of names", repr(names), f"pass [{names!r}]")
    chosen = list(WORKLOADS if names is None else names)
    for name in chosen:
        if name not in WORKLOADS:
            raise unknown_name("kernel", name, WORKLOADS)
    dtype = precisions.policy(precision).compute_dtype
    device = hardware.default()
    chip = device.chip
    found = {}
    for name in chosen:
        workload = WORKLOADS[name]
        shapes = workload.small if device.platform == "cpu" else workload.large
        method = getattr(kernels, name)
        arrays = {key: _drawn(shape, dtype) for key, shape in shapes.items()}
        if workload.draws:
            arrays["rng"] = jax.random.key(0)
        options = dict(workload.options)
        seconds = seconds_of(lambda method=method, options=options, **given: method(**given, **options), **arrays)
        work = work_of(method, **arrays, **options)
        found[name] = {
            "throughput": work.flops / seconds / 1e12,
            "latency_ms": seconds * 1e3,
            "memory_efficiency": math.nan if chip is None else work.bytes / seconds / chip.hbm_bandwidth,
        }
    return found


def _drawn(shape: Shape | list[Shape], dtype: str) -> Any:
    if isinstance(shape, list):
        return [standard_normal(one, dtype, (0, i)) for i, one in enumerate(shape)]
    return standard_normal(shape, dtype, (0,))
