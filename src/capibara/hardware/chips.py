"""One table of facts per chip: what a roofline, a planner and a profiler need to know.

Figures are per chip and dense (no structured sparsity), from the publications named in `Chip.source`.
A figure that nobody published is None, never a guess; what programs reach of it is in `Chip.efficiency`, which says
what was measured and what is predicted. A new chip is a row here and its prices in `capibara/prices/prices.toml`.
The host CPU is not in the table: `host` in `capibara.hardware.hosts` measures it.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from capibara.errors import unknown_name
from capibara.hardware.facts import (
    GIGA,
    TERA,
    Chip,
    Efficiency,
    Factor,
    GiB,
    KiB,
    MiB,
    SliceFamily,
    squash,
)
from capibara.hardware.hosts import host

__all__ = ["CHIPS", "chip", "chip_for"]


def _tpu_flops(bfloat16: float, **others: float) -> tuple[tuple[str, float], ...]:
    # Matrix units multiply bfloat16. A float32 product at Precision.HIGHEST is six bfloat16 passes, so
    # that rate is derived, not published; at default precision float32 operands run at the bfloat16 rate.
    return (("bfloat16", bfloat16), ("float32", bfloat16 / 6), *others.items())


_SCALING_BOOK = "jax-ml.github.io/scaling-book/tpus (one-way bandwidth of a link)"
_TPU_INFO = "jax/_src/pallas/mosaic/tpu_info.py (VMEM, matrix units)"
_F32_PASSES = "float32: derived, six bfloat16 passes (Precision.HIGHEST)"
_USABLE = "usable HBM: the limit that XLA's TPU out-of-memory message states"
_V2_V3_PAPER = "Jouppi et al., A Domain-Specific Supercomputer for Training DNNs, CACM 63(7), 2020"
_GPU_NOTE = "float32 is the vector rate, tfloat32 the matrix rate; dense, without sparsity"
_AMPERE = (
    ("bfloat16", 312 * TERA),
    ("float16", 312 * TERA),
    ("tfloat32", 156 * TERA),
    ("float32", 19.5 * TERA),
    ("float64", 19.5 * TERA),
    ("int8", 624 * TERA),
)
_HOPPER = (
    ("bfloat16", 989.4 * TERA),
    ("float16", 989.4 * TERA),
    ("tfloat32", 494.7 * TERA),
    ("float32", 66.9 * TERA),
    ("float64", 66.9 * TERA),
    ("int8", 1978.9 * TERA),
    ("float8", 1978.9 * TERA),
)
_HOPPER_PCIE = (
    ("bfloat16", 756 * TERA),
    ("float16", 756 * TERA),
    ("tfloat32", 378 * TERA),
    ("float32", 51.2 * TERA),
    ("float64", 51.2 * TERA),
    ("int8", 1513 * TERA),
    ("float8", 1513 * TERA),
)

_TPU_MEMORY = Factor(0.7, 0.85, 0.95, "predicted: streaming bandwidth of TPUs as published by others; not run by us")
_TPU_EFFICIENCY = Efficiency(
    # MaxText publishes 56.7 % (22B) and 58.9 % (52B) of the peak in model flops on v4, layers recomputed in the
    # backward pass. With this factor the model says 56 % for a decoder of 20B on 64 chips with plain attention, all
    # else predicted. A Pallas product of 512 cubed schedules 2441 cycles where the units need 2048: 0.84; XLA's large
    # ones do better.
    matrix=Factor(0.75, 0.88, 0.97, "predicted: MaxText's published MFU on v4, and compiled schedules"),
    memory=_TPU_MEMORY,
    kernel_memory=_TPU_MEMORY,
    links=Factor(0.7, 0.88, 1.0, "predicted: ring collectives on ICI as published by others; not run by us"),
    hop_seconds=1e-6,
    # One program, no launches: the cost of filling and draining a fused loop's pipeline.
    launch_seconds=1e-6,
    # Code of training steps compiled for v4: 28 to 58 MiB, 37 in the mean. The compiler's peak is without it.
    reserved_bytes=40 * MiB,
    # Over 64 training steps compiled for v4 (1B to 70B, 2026-11-15) the prediction is 0.91 to 1.08 of the
    # compiler's peak; those below 0.93 hold replicated parameters, of which the compiler keeps copies.
    memory_margin=0.08,
)
_H200_EFFICIENCY = Efficiency(
    # Two machines were measured: 796 and 758 TFLOP/s at 8192 and 4096 cubed in one, 679 and 663 in the other (its
    # power limit). The middle is within 10 % of both.
    matrix=Factor(0.66, 0.74, 0.81, "measured: GEMM of 4096 and 8192 on two H200 machines, 2026-11", measured=True),
    # 3.3 TB/s for x + 1 by XLA, 3.5 for a batched product that writes its result, of 4.8.
    memory=Factor(0.62, 0.70, 0.76, "measured: x + 1 over 4 GiB by XLA on an H200, 2026-11", measured=True),
    # Norms forward 3.26 to 3.53 TB/s, backward 3.4 to 3.7, activation with dropout 3.9.
    kernel_memory=Factor(
        0.62, 0.72, 0.82, "measured: h200-layers.json, norms and activations, 2026-11-15", measured=True
    ),
    links=Factor(0.6, 0.8, 0.9, "predicted: bus bandwidth that NCCL's own tests publish for NVLink 4"),
    hop_seconds=5e-6,
    # Kernels inside one program, back to back: a decode GEMM of 35 µs at full bandwidth takes 38.7.
    launch_seconds=3e-6,
    # The CUDA context is outside the allocator; cuBLAS and cuDNN keep a workspace inside it.
    reserved_bytes=64 * MiB,
)
_LIKE_H200 = "predicted: the factors measured on an H200"
_GPU_EFFICIENCY = replace(
    _H200_EFFICIENCY,
    matrix=replace(_H200_EFFICIENCY.matrix, source=_LIKE_H200, measured=False),
    memory=Factor(0.65, 0.8, 0.9, _LIKE_H200),
    kernel_memory=Factor(0.65, 0.82, 0.92, _LIKE_H200),
)

# 128 lanes x 16 arithmetic units a core (Jouppi et al., ISCA 2023, for v4); later ones have twice as many.
_V4_VECTOR = 128 * 16
_V5_VECTOR = 2 * _V4_VECTOR
_UNPUBLISHED_CLOCK = 1.5e9  # assumed for vector work, where no clock is published

_SMALL_3D = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_LITE_2D = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))

# 200 Gbit/s for the four chips of a TPU host, 400 Gbit/s a GPU; PCIe 3, 4 and 5.
_tpu = functools.partial(
    Chip,
    platform="tpu",
    architecture="tpu",
    lanes=128,
    host_bandwidth=16 * GIGA,
    network_bandwidth=6.25 * GIGA,
    efficiency=_TPU_EFFICIENCY,
)
_ampere = functools.partial(
    Chip,
    platform="gpu",
    architecture="ampere",
    flops_by_dtype=_AMPERE,
    vector_flops=19.5 * TERA,
    vmem_bytes=163 * KiB,
    cores_per_chip=108,
    lanes=64,
    clock_hz=1410e6,
    host_bandwidth=25 * GIGA,
    network_bandwidth=50 * GIGA,
    efficiency=_GPU_EFFICIENCY,
    source=("NVIDIA A100 Tensor Core GPU datasheet and architecture whitepaper", _GPU_NOTE),
)
_hopper = functools.partial(
    Chip,
    platform="gpu",
    architecture="hopper",
    vmem_bytes=227 * KiB,
    lanes=128,
    host_bandwidth=50 * GIGA,
    network_bandwidth=50 * GIGA,
    efficiency=_GPU_EFFICIENCY,
    source=("NVIDIA H100 Tensor Core GPU architecture whitepaper and datasheet", _GPU_NOTE),
)

CHIPS: tuple[Chip, ...] = (
    _tpu(
        name="tpu_v2",
        device_kinds=("TPU v2",),
        aliases=("v2",),
        flops_by_dtype=_tpu_flops(46 * TERA),
        vector_flops=2 * _V4_VECTOR * 700e6,
        hbm_bytes=16 * GiB,
        usable_hbm_bytes=int(2 * 7.48 * GiB),
        hbm_bandwidth=700 * GIGA,
        vmem_bytes=16 * MiB,
        cores_per_chip=2,
        devices_per_chip=2,
        mxu_shape=(128, 128),
        mxus_per_core=1,
        matrix_flops_per_cycle=32_768,
        clock_hz=700e6,
        ici_link_bandwidth=62 * GIGA,
        ici_links=4,
        torus_dims=2,
        slices=SliceFamily(
            "v2",
            libtpu_prefix="v2",
            per_chip=2,
            small=((2, 2), (4, 4), (8, 8), (8, 16), (16, 16)),
            max_chips=256,
            wrap_length=16,
        ),
        source=(
            _V2_V3_PAPER + " (496 Gbit/s a link)",
            "cloud.google.com/tpu/docs/v2",
            _USABLE,
            _TPU_INFO,
            _F32_PASSES,
        ),
    ),
    _tpu(
        name="tpu_v3",
        device_kinds=("TPU v3",),
        aliases=("v3",),
        # jax's table and the scaling book round this up to 140; 123 is the vendor's and is what the
        # clock gives: 2 cores x 65,536 flops a cycle x 940 MHz.
        flops_by_dtype=_tpu_flops(123 * TERA),
        vector_flops=2 * _V4_VECTOR * 940e6,
        hbm_bytes=32 * GiB,
        usable_hbm_bytes=int(2 * 15.48 * GiB),
        hbm_bandwidth=900 * GIGA,
        vmem_bytes=16 * MiB,
        cores_per_chip=2,
        devices_per_chip=2,
        mxu_shape=(128, 128),
        mxus_per_core=2,
        matrix_flops_per_cycle=65_536,
        clock_hz=940e6,
        ici_link_bandwidth=100 * GIGA,
        ici_links=4,
        torus_dims=2,
        slices=SliceFamily(
            "v3",
            libtpu_prefix="v3",
            per_chip=2,
            small=((2, 2), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16), (16, 32), (32, 32)),
            max_chips=1024,
            wrap_length=32,
        ),
        source=("cloud.google.com/tpu/docs/v3", _USABLE, _V2_V3_PAPER, _SCALING_BOOK, _TPU_INFO, _F32_PASSES),
    ),
    _tpu(
        name="tpu_v4",
        device_kinds=("TPU v4",),
        aliases=("v4", "v4p"),
        # The vendor lists int8 at the same 275 as bfloat16: it is widened on the way in and there are no
        # int8 matrix units, so int8 has no key here.
        flops_by_dtype=_tpu_flops(275 * TERA),
        vector_flops=2 * _V4_VECTOR * 1050e6,
        hbm_bytes=32 * GiB,
        usable_hbm_bytes=int(30.75 * GiB),
        hbm_bandwidth=1200 * GIGA,
        vmem_bytes=16 * MiB,
        cores_per_chip=2,
        mxu_shape=(128, 128),
        mxus_per_core=4,
        matrix_flops_per_cycle=131_072,
        clock_hz=1050e6,
        ici_link_bandwidth=45 * GIGA,
        ici_links=6,
        torus_dims=3,
        slices=SliceFamily(
            "v4", libtpu_prefix="v4", per_chip=2, small=_SMALL_3D, max_chips=4096, chip_config="megacore"
        ),
        source=(
            "cloud.google.com/tpu/docs/v4",
            "Jouppi et al., TPU v4: An Optically Reconfigurable Supercomputer, ISCA 2023 (clock, links)",
            _USABLE,
            _SCALING_BOOK,
            _TPU_INFO,
            _F32_PASSES,
        ),
    ),
    _tpu(
        name="tpu_v5e",
        device_kinds=("TPU v5 lite", "TPU v5e"),
        aliases=("v5e", "v5litepod", "v5lite"),
        flops_by_dtype=_tpu_flops(197 * TERA, int8=393 * TERA),
        vector_flops=_V5_VECTOR * 1500e6,
        hbm_bytes=16 * GiB,
        usable_hbm_bytes=int(15.75 * GiB),
        hbm_bandwidth=819 * GIGA,
        vmem_bytes=128 * MiB,
        cores_per_chip=1,
        mxu_shape=(128, 128),
        mxus_per_core=4,
        matrix_flops_per_cycle=131_072,
        clock_hz=1500e6,
        ici_link_bandwidth=45 * GIGA,
        ici_links=4,
        torus_dims=2,
        slices=SliceFamily(
            "v5e",
            libtpu_prefix="v5e",
            per_chip=1,
            small=_LITE_2D,
            max_chips=256,
            wrap_length=16,
            host_chips=8,
            accelerator_prefix="v5litepod",
            other_prefixes=("v5litepod",),
        ),
        source=("cloud.google.com/tpu/docs/v5e", _USABLE, _SCALING_BOOK, _TPU_INFO, _F32_PASSES),
    ),
    _tpu(
        name="tpu_v5p",
        device_kinds=("TPU v5", "TPU v5p"),
        aliases=("v5p", "v5"),
        # float8 as published: the bfloat16 rate, so it saves memory and not arithmetic.
        flops_by_dtype=_tpu_flops(459 * TERA, int8=918 * TERA, float8=459 * TERA),
        vector_flops=2 * _V5_VECTOR * 1750e6,
        # The vendor's page says 95; the runtime offers programs more than that, out of 96.
        hbm_bytes=96 * GiB,
        usable_hbm_bytes=int(95.74 * GiB),
        hbm_bandwidth=2765 * GIGA,
        vmem_bytes=64 * MiB,
        cores_per_chip=2,
        mxu_shape=(128, 128),
        mxus_per_core=4,
        matrix_flops_per_cycle=131_072,
        clock_hz=1750e6,
        ici_link_bandwidth=90 * GIGA,
        ici_links=6,
        torus_dims=3,
        slices=SliceFamily(
            "v5p",
            libtpu_prefix="v5",
            per_chip=2,
            small=_SMALL_3D,
            max_chips=6144,
            chip_config="megacore",
            other_prefixes=("v5",),
        ),
        source=("cloud.google.com/tpu/docs/v5p", _USABLE, _SCALING_BOOK, _TPU_INFO, _F32_PASSES),
    ),
    _tpu(
        name="tpu_v6e",
        device_kinds=("TPU v6 lite", "TPU v6e"),
        aliases=("v6e", "v6lite", "trillium"),
        flops_by_dtype=_tpu_flops(918 * TERA, int8=1836 * TERA, float8=918 * TERA),
        vector_flops=_V5_VECTOR * _UNPUBLISHED_CLOCK,
        hbm_bytes=32 * GiB,
        usable_hbm_bytes=int(31.25 * GiB),
        hbm_bandwidth=1640 * GIGA,
        vmem_bytes=128 * MiB,
        cores_per_chip=1,
        mxu_shape=(256, 256),
        mxus_per_core=2,
        ici_link_bandwidth=90 * GIGA,
        ici_links=4,
        torus_dims=2,
        slices=SliceFamily(
            "v6e", libtpu_prefix="v6e", per_chip=1, small=_LITE_2D, max_chips=256, wrap_length=16, host_chips=8
        ),
        source=(
            "cloud.google.com/tpu/docs/v6e",
            "docs.cloud.google.com/tpu/docs/tpu7x (table of generations)",
            _USABLE,
            _SCALING_BOOK,
            _TPU_INFO,
            _F32_PASSES,
        ),
    ),
    _tpu(
        name="tpu_7x",
        device_kinds=("TPU7x",),
        aliases=("7x", "v7x", "ironwood"),
        flops_by_dtype=_tpu_flops(2307 * TERA, float8=4614 * TERA),
        vector_flops=2 * _V5_VECTOR * _UNPUBLISHED_CLOCK,
        hbm_bytes=192 * GiB,
        hbm_bandwidth=7380 * GIGA,
        vmem_bytes=64 * MiB,
        cores_per_chip=2,
        devices_per_chip=2,
        mxu_shape=(256, 256),
        mxus_per_core=2,
        ici_link_bandwidth=90 * GIGA,
        ici_links=6,
        torus_dims=3,
        slices=SliceFamily(
            "tpu7x",
            libtpu_prefix="tpu7x",
            per_chip=2,
            small=_SMALL_3D,
            max_chips=9216,
            other_prefixes=("7x", "v7x"),
        ),
        source=("docs.cloud.google.com/tpu/docs/tpu7x", _SCALING_BOOK, _TPU_INFO, _F32_PASSES),
    ),
    _ampere(
        name="a100_40gb",
        device_kinds=("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
        hbm_bytes=40 * GiB,
        hbm_bandwidth=1555 * GIGA,
        ici_link_bandwidth=300 * GIGA,
    ),
    _ampere(
        name="a100_80gb",
        device_kinds=("NVIDIA A100-SXM4-80GB",),
        aliases=("a100",),
        hbm_bytes=80 * GiB,
        hbm_bandwidth=2039 * GIGA,
        ici_link_bandwidth=300 * GIGA,
    ),
    _ampere(
        name="a100_pcie_80gb",
        device_kinds=("NVIDIA A100 80GB PCIe",),
        hbm_bytes=80 * GiB,
        hbm_bandwidth=1935 * GIGA,
    ),
    _hopper(
        name="h100_sxm",
        device_kinds=("NVIDIA H100 80GB HBM3",),
        aliases=("h100",),
        flops_by_dtype=_HOPPER,
        vector_flops=66.9 * TERA,
        hbm_bytes=80 * GiB,
        hbm_bandwidth=3350 * GIGA,
        cores_per_chip=132,
        clock_hz=1830e6,
        ici_link_bandwidth=450 * GIGA,
    ),
    _hopper(
        name="h100_pcie",
        device_kinds=("NVIDIA H100 PCIe",),
        flops_by_dtype=_HOPPER_PCIE,
        vector_flops=51.2 * TERA,
        hbm_bytes=80 * GiB,
        hbm_bandwidth=2000 * GIGA,
        cores_per_chip=114,
        clock_hz=1755e6,
        ici_link_bandwidth=300 * GIGA,
    ),
    _hopper(
        name="h200",
        device_kinds=("NVIDIA H200",),
        aliases=("h200_sxm",),
        flops_by_dtype=_HOPPER,
        vector_flops=66.9 * TERA,
        hbm_bytes=141 * GiB,
        usable_hbm_bytes=139 * GiB,
        hbm_bandwidth=4800 * GIGA,
        cores_per_chip=132,
        clock_hz=1830e6,
        ici_link_bandwidth=450 * GIGA,
        efficiency=_H200_EFFICIENCY,
        source=(
            "NVIDIA H200 Tensor Core GPU datasheet (the H100's compute, HBM3e)",
            "usable HBM: what the machine that this project measured on has for data",
            _GPU_NOTE,
        ),
    ),
)


def chip(name_or_kind: str | Chip) -> Chip:
    """The chip by any of its names: "v4", "tpu_v4", "TPU v4", "h200", "NVIDIA H200", "cpu" (measured)."""
    if isinstance(name_or_kind, Chip):
        return name_or_kind
    if name_or_kind.strip().lower() in ("cpu", "host"):
        return host()
    word = squash(name_or_kind)
    for one in CHIPS:
        if word in one.spellings:
            return one
    raise unknown_name("chip", name_or_kind, [*(one.name for one in CHIPS), "cpu"])


def chip_for(device_kind: str) -> Chip | None:
    """The chip that jax calls `device_kind`, or None for one that is not in the table."""
    kind = device_kind.lower()
    if kind == "cpu":
        return host()
    return next((one for one in CHIPS if kind in (known.lower() for known in one.device_kinds)), None)
