"""One table of facts per chip: what a roofline, a planner and a profiler need to know.

Figures are per chip and dense (no structured sparsity), from the publications named in `Chip.source`.
A figure that nobody published is None, never a guess. The host CPU is not in the table: `host` in
`capibara.hardware.hosts` measures it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from capibara.errors import unknown_name
from capibara.hardware.facts import GIGA, TERA, Chip, GiB, KiB, MiB
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

CHIPS: tuple[Chip, ...] = (
    Chip(
        name="tpu_v2",
        device_kinds=("TPU v2",),
        aliases=("v2",),
        platform="tpu",
        flops_by_dtype=_tpu_flops(46 * TERA),
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
        source=(
            _V2_V3_PAPER + " (496 Gbit/s a link)",
            "cloud.google.com/tpu/docs/v2",
            _USABLE,
            _TPU_INFO,
            _F32_PASSES,
        ),
    ),
    Chip(
        name="tpu_v3",
        device_kinds=("TPU v3",),
        aliases=("v3",),
        platform="tpu",
        # jax's table and the scaling book round this up to 140; 123 is the vendor's and is what the
        # clock gives: 2 cores x 65,536 flops a cycle x 940 MHz.
        flops_by_dtype=_tpu_flops(123 * TERA),
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
        source=("cloud.google.com/tpu/docs/v3", _USABLE, _V2_V3_PAPER, _SCALING_BOOK, _TPU_INFO, _F32_PASSES),
    ),
    Chip(
        name="tpu_v4",
        device_kinds=("TPU v4",),
        aliases=("v4", "v4p"),
        platform="tpu",
        # The vendor lists int8 at the same 275 as bfloat16: it is widened on the way in and there are no
        # int8 matrix units, so int8 has no key here.
        flops_by_dtype=_tpu_flops(275 * TERA),
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
        source=(
            "cloud.google.com/tpu/docs/v4",
            "Jouppi et al., TPU v4: An Optically Reconfigurable Supercomputer, ISCA 2023 (clock, links)",
            _USABLE,
            _SCALING_BOOK,
            _TPU_INFO,
            _F32_PASSES,
        ),
    ),
    Chip(
        name="tpu_v5e",
        device_kinds=("TPU v5 lite", "TPU v5e"),
        aliases=("v5e", "v5litepod", "v5lite"),
        platform="tpu",
        flops_by_dtype=_tpu_flops(197 * TERA, int8=393 * TERA),
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
        source=("cloud.google.com/tpu/docs/v5e", _USABLE, _SCALING_BOOK, _TPU_INFO, _F32_PASSES),
    ),
    Chip(
        name="tpu_v5p",
        device_kinds=("TPU v5", "TPU v5p"),
        aliases=("v5p", "v5"),
        platform="tpu",
        # float8 as published: the bfloat16 rate, so it saves memory and not arithmetic.
        flops_by_dtype=_tpu_flops(459 * TERA, int8=918 * TERA, float8=459 * TERA),
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
        source=("cloud.google.com/tpu/docs/v5p", _USABLE, _SCALING_BOOK, _TPU_INFO, _F32_PASSES),
    ),
    Chip(
        name="tpu_v6e",
        device_kinds=("TPU v6 lite", "TPU v6e"),
        aliases=("v6e", "v6lite", "trillium"),
        platform="tpu",
        flops_by_dtype=_tpu_flops(918 * TERA, int8=1836 * TERA, float8=918 * TERA),
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
        source=(
            "cloud.google.com/tpu/docs/v6e",
            "docs.cloud.google.com/tpu/docs/tpu7x (table of generations)",
            _USABLE,
            _SCALING_BOOK,
            _TPU_INFO,
            _F32_PASSES,
        ),
    ),
    Chip(
        name="tpu_7x",
        device_kinds=("TPU7x",),
        aliases=("7x", "v7x", "ironwood"),
        platform="tpu",
        flops_by_dtype=_tpu_flops(2307 * TERA, float8=4614 * TERA),
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
        source=("docs.cloud.google.com/tpu/docs/tpu7x", _SCALING_BOOK, _TPU_INFO, _F32_PASSES),
    ),
    Chip(
        name="a100_40gb",
        device_kinds=("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
        platform="gpu",
        flops_by_dtype=_AMPERE,
        hbm_bytes=40 * GiB,
        hbm_bandwidth=1555 * GIGA,
        vmem_bytes=163 * KiB,
        cores_per_chip=108,
        clock_hz=1410e6,
        ici_link_bandwidth=300 * GIGA,
        source=("NVIDIA A100 Tensor Core GPU datasheet and architecture whitepaper", _GPU_NOTE),
    ),
    Chip(
        name="a100_80gb",
        device_kinds=("NVIDIA A100-SXM4-80GB",),
        aliases=("a100",),
        platform="gpu",
        flops_by_dtype=_AMPERE,
        hbm_bytes=80 * GiB,
        hbm_bandwidth=2039 * GIGA,
        vmem_bytes=163 * KiB,
        cores_per_chip=108,
        clock_hz=1410e6,
        ici_link_bandwidth=300 * GIGA,
        source=("NVIDIA A100 Tensor Core GPU datasheet and architecture whitepaper", _GPU_NOTE),
    ),
    Chip(
        name="a100_pcie_80gb",
        device_kinds=("NVIDIA A100 80GB PCIe",),
        platform="gpu",
        flops_by_dtype=_AMPERE,
        hbm_bytes=80 * GiB,
        hbm_bandwidth=1935 * GIGA,
        vmem_bytes=163 * KiB,
        cores_per_chip=108,
        clock_hz=1410e6,
        source=("NVIDIA A100 Tensor Core GPU datasheet and architecture whitepaper", _GPU_NOTE),
    ),
    Chip(
        name="h100_sxm",
        device_kinds=("NVIDIA H100 80GB HBM3",),
        aliases=("h100",),
        platform="gpu",
        flops_by_dtype=_HOPPER,
        hbm_bytes=80 * GiB,
        hbm_bandwidth=3350 * GIGA,
        vmem_bytes=227 * KiB,
        cores_per_chip=132,
        clock_hz=1830e6,
        ici_link_bandwidth=450 * GIGA,
        source=("NVIDIA H100 Tensor Core GPU architecture whitepaper and datasheet", _GPU_NOTE),
    ),
    Chip(
        name="h100_pcie",
        device_kinds=("NVIDIA H100 PCIe",),
        platform="gpu",
        flops_by_dtype=_HOPPER_PCIE,
        hbm_bytes=80 * GiB,
        hbm_bandwidth=2000 * GIGA,
        vmem_bytes=227 * KiB,
        cores_per_chip=114,
        clock_hz=1755e6,
        ici_link_bandwidth=300 * GIGA,
        source=("NVIDIA H100 Tensor Core GPU architecture whitepaper and datasheet", _GPU_NOTE),
    ),
    Chip(
        name="h200",
        device_kinds=("NVIDIA H200",),
        aliases=("h200_sxm",),
        platform="gpu",
        flops_by_dtype=_HOPPER,
        hbm_bytes=141 * GiB,
        usable_hbm_bytes=139 * GiB,
        hbm_bandwidth=4800 * GIGA,
        vmem_bytes=227 * KiB,
        cores_per_chip=132,
        clock_hz=1830e6,
        ici_link_bandwidth=450 * GIGA,
        source=(
            "NVIDIA H200 Tensor Core GPU datasheet (the H100's compute, HBM3e)",
            "usable HBM: what the machine that this project measured on has for data",
            _GPU_NOTE,
        ),
    ),
)


def _squash(name: str) -> str:
    """A spelling that "TPU v4", "tpu_v4", "tpu-v4" and "v4" share."""
    bare = re.sub(r"[\s_\-]+", "", name.lower())
    return re.sub(r"^(nvidia|googlecloud|google|cloud)?(tpu)?", "", bare)


def _spellings(entries: Iterable[Chip]) -> dict[str, Chip]:
    return {_squash(word): one for one in entries for word in (one.name, *one.aliases, *one.device_kinds)}


_BY_SPELLING = _spellings(CHIPS)
_BY_KIND = {kind.lower(): one for one in CHIPS for kind in one.device_kinds}


def chip(name_or_kind: str | Chip) -> Chip:
    """The chip by any of its names: "v4", "tpu_v4", "TPU v4", "h200", "NVIDIA H200", "cpu" (measured)."""
    if isinstance(name_or_kind, Chip):
        return name_or_kind
    if name_or_kind.strip().lower() in ("cpu", "host"):
        return host()
    found = _BY_SPELLING.get(_squash(name_or_kind))
    if found is None:
        raise unknown_name("chip", name_or_kind, [*(one.name for one in CHIPS), "cpu"])
    return found


def chip_for(device_kind: str) -> Chip | None:
    """The chip that jax calls `device_kind`, or None for one that is not in the table."""
    if device_kind.lower() == "cpu":
        return host()
    return _BY_KIND.get(device_kind.lower())
