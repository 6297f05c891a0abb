"""What share of its published peaks a chip reaches: the one table of factors that the cost model multiplies by.

Each factor is (low, mid, high) with where it comes from. "measured" was run on that chip by this project
(benchmarks/results, benchmarks/README has the machine); "predicted" was not: it is published by others, read from the
compiler's schedules, or assumed, and says which. A user's own runs correct what follows from it:
`capibara.cost.calibration`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from capibara.hardware.facts import Chip, MiB

__all__ = ["Efficiency", "Factor", "efficiency_of", "what_is_predicted"]


@dataclass(frozen=True)
class Factor:
    """A share of a peak, as a range."""

    low: float
    mid: float
    high: float
    source: str
    measured: bool = False


@dataclass(frozen=True)
class Efficiency:
    """The factors of one chip."""

    chip: str
    matrix: Factor
    """Of the matrix peak, after sizes were padded to the units (`roofline.fill`)."""
    memory: Factor
    """Of the memory's bandwidth, for what XLA writes."""
    kernel_memory: Factor
    """The same for this library's own kernels."""
    attention: tuple[tuple[int, float, float], ...]
    """(head size, forward, backward): share of the matrix peak that long sequences reach."""
    attention_tile_seconds: tuple[float, float]
    """What one block of 128 queries costs beside its products, forward and backward."""
    vector_flops: float
    """Peak of the vector units, flops a second."""
    links: Factor
    """Of the links' bandwidth."""
    hop_seconds: float
    """Latency of one hop between neighbours."""
    launch_seconds: float
    """What starting one pass costs."""
    reserved_bytes: float
    """What a program takes beside its buffers: its code, and scratch of the collectives."""
    overlap: float = 0.85
    """Share of an exchange that can hide behind products which does. Assumed: the first gather of a loop and the last
    reduction have nothing beside them, and both take memory bandwidth from the products."""
    host_bandwidth: float = 16e9
    """Bytes a second between the host's memory and one chip. Predicted: PCIe 3 x16; 5 x16 for Hopper."""
    wide_rows: tuple[float, float] = (math.inf, 1.0)
    """Longest row that a norm keeps on the chip, and the share of the bandwidth that longer ones reach."""
    memory_margin: float = 0.05
    """Share by which predicted bytes may be too low."""
    vector: Factor = Factor(0.35, 0.6, 0.9, "predicted: how well compilers pack vector units; assumed")


# Two machines were measured: 796 and 758 TFLOP/s at 8192 and 4096 cubed in one, 679 and 663 in the other (its power
# limit). The middle is within 10 % of both.
_H200_MATRIX = Factor(0.66, 0.74, 0.81, "measured: GEMM of 4096 and 8192 on two H200 machines, 2026-11", measured=True)
# 3.3 TB/s for x + 1 by XLA, 3.5 for a batched product that writes its result, of 4.8.
_H200_MEMORY = Factor(0.62, 0.70, 0.76, "measured: x + 1 over 4 GiB by XLA on an H200, 2026-11", measured=True)
# Norms forward 3.26 to 3.53 TB/s, backward 3.4 to 3.7, activation with dropout 3.9.
_H200_KERNELS = Factor(0.62, 0.72, 0.82, "measured: h200-layers.json, norms and activations, 2026-11-15", measured=True)
# h200-attention.json, 2026-11-15: what 8k to 32k approach, as a share of 989 TFLOP/s.
_H200_ATTENTION = ((64, 0.51, 0.475), (128, 0.612, 0.495), (256, 0.645, 0.42))

_H200 = Efficiency(
    chip="h200",
    matrix=_H200_MATRIX,
    memory=_H200_MEMORY,
    kernel_memory=_H200_KERNELS,
    attention=_H200_ATTENTION,
    # Measured: 2048 blocks on 132 units take 36 µs longer than the products alone, backward 149 µs.
    attention_tile_seconds=(2.3e-6, 9.6e-6),
    # 132 units x 128 lanes x 2 at 1.98 GHz.
    vector_flops=66.9e12,
    links=Factor(0.6, 0.8, 0.9, "predicted: bus bandwidth that NCCL's own tests publish for NVLink 4"),
    hop_seconds=5e-6,
    # Kernels inside one program, back to back: a decode GEMM of 35 µs at full bandwidth takes 38.7.
    launch_seconds=3e-6,
    # The CUDA context is outside the allocator; cuBLAS and cuDNN keep a workspace inside it.
    reserved_bytes=64 * MiB,
    host_bandwidth=50e9,
    # h200-layers.json, 2026-11-15: 32768 wide forward 2.08 TB/s, 16384 and 32768 wide backward 2.05 to 2.17.
    wide_rows=(16384, 0.44),
)

# MaxText publishes 56.7 % (22B) and 58.9 % (52B) of the peak in model flops on v4, layers recomputed in the backward
# pass. With this factor the model says 56 % for a decoder of 20B on 64 chips with plain attention, all else predicted.
# A Pallas product of 512 cubed schedules 2441 cycles where the units need 2048: 0.84; XLA's large ones do better.
_V4_MATRIX = Factor(0.75, 0.88, 0.97, "predicted: MaxText's published MFU on v4, and compiled schedules")
_TPU_MEMORY = Factor(0.7, 0.85, 0.95, "predicted: streaming bandwidth of TPUs as published by others; not run by us")
# Stock flash attention schedules 2602 cycles for 1024 of products in a block of 512 x 512; backward 6557 for 3584.
_V4_ATTENTION = ((64, 0.25, 0.3), (128, 0.42, 0.5), (256, 0.55, 0.55))
_TPU_LINKS = Factor(0.7, 0.88, 1.0, "predicted: ring collectives on ICI as published by others; not run by us")


def _tpu(chip: Chip, matrix: Factor, attention: tuple[tuple[int, float, float], ...]) -> Efficiency:
    # 128 lanes x 16 arithmetic units a core (Jouppi et al., ISCA 2023, for v4); later ones have twice as many.
    units = 128 * 16 * (1 if chip.name in ("tpu_v2", "tpu_v3", "tpu_v4") else 2)
    clock = chip.clock_hz or 1.5e9
    return Efficiency(
        chip=chip.name,
        matrix=matrix,
        memory=_TPU_MEMORY,
        kernel_memory=_TPU_MEMORY,
        attention=attention,
        attention_tile_seconds=(0.5e-6, 1e-6),
        vector_flops=units * clock * chip.cores_per_chip,
        links=_TPU_LINKS,
        hop_seconds=1e-6,
        # One program, no launches: the cost of filling and draining a fused loop's pipeline.
        launch_seconds=1e-6,
        # Code of training steps compiled for v4: 28 to 58 MiB, 37 in the mean. The compiler's peak is without it.
        reserved_bytes=40 * MiB,
        # Over 64 training steps compiled for v4 (1B to 70B, 2026-11-15) the prediction is 0.91 to 1.08 of the
        # compiler's peak; those below 0.93 hold replicated parameters, of which the compiler keeps copies.
        memory_margin=0.08,
    )


def _gpu(chip: Chip) -> Efficiency:
    measured = chip.name == "h200"
    if measured:
        return _H200
    note = "predicted: the factors measured on an H200"
    return replace(
        _H200,
        chip=chip.name,
        matrix=replace(_H200_MATRIX, source=note, measured=False),
        memory=replace(_H200_MEMORY, low=0.65, mid=0.8, high=0.9, source=note, measured=False),
        kernel_memory=replace(_H200_KERNELS, low=0.65, mid=0.82, high=0.92, source=note, measured=False),
        vector_flops=chip.flops.get("float32", 19.5e12),
        host_bandwidth=25e9 if chip.name.startswith("a100") else 50e9,
        wide_rows=(math.inf, 1.0),
    )


def _cpu(chip: Chip) -> Efficiency:
    # The host's figures in the chips table are measured rates already, so most of them is what programs get.
    told = Factor(0.3, 0.6, 1.0, "predicted: the host's own short measurement; XLA's CPU code varies")
    return Efficiency(
        chip=chip.name,
        matrix=told,
        memory=told,
        kernel_memory=told,
        attention=((128, 0.3, 0.3),),
        attention_tile_seconds=(5e-6, 10e-6),
        vector_flops=chip.flops.get("float32", 5e10) / 4,
        links=told,
        hop_seconds=20e-6,
        launch_seconds=5e-6,
        reserved_bytes=0.0,
    )


def what_is_predicted(table: Efficiency) -> str:
    """In words, which factors were measured on this chip and which were not."""
    factors = {"products": table.matrix, "memory": table.memory, "links": table.links}
    measured = [name for name, factor in factors.items() if factor.measured]
    predicted = [
        f"{name} ({factor.source.removeprefix('predicted: ')})"
        for name, factor in factors.items()
        if not factor.measured
    ]
    told = f"Measured on {table.chip}: {', '.join(measured)}. " if measured else ""
    return f"{told}Predicted, not measured on {table.chip}: {'; '.join(predicted)}."


@functools.lru_cache(maxsize=256)
def efficiency_of(chip: Chip) -> Efficiency:
    """The factors of a chip."""
    if chip.platform == "gpu":
        return _gpu(chip)
    if chip.platform == "tpu":
        return _tpu(chip, _V4_MATRIX, _V4_ATTENTION)
    return _cpu(chip)
