"""Compiling for chips that are named and not attached, with the chip's own compiler, in this process."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capibara.compile.availability import chip_compiler
from capibara.compile.dump import dump_files
from capibara.compile.environment import dump_dir_in
from capibara.compile.failures import classify, over_limit, thrown_by_compilers, useful_lines
from capibara.compile.hlo import HloKernel, hlo_kernels
from capibara.compile.lower import custom_calls_in, jitted, lower_for
from capibara.compile.report import RUNTIME_KIND, CompileReport, KernelSchedule
from capibara.compile.schedule import schedule_lengths
from capibara.errors import rule_error
from capibara.hardware.topology import abstract_devices, place

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh

__all__ = ["compile_for", "lower_only", "topology_mesh"]


def compile_for(
    fn: Callable[..., Any],
    args: Sequence[Any],
    slice_name: str,
    *,
    name: str | None = None,
    dump_dir: Path | str | None = None,
    vmem_static_bytes: int | None = None,
) -> CompileReport:
    """Compiles `fn(*args)` for a slice such as "v4-32", or GPUs such as "h200", and reads back what the compiler says.

    Arguments without a sharding go to the slice's first chip; those that have one (over `topology_mesh`) keep
    it. Without the chip's compiler the case is lowered and the report says so. A case that fails gives a report, not
    an exception.

    Args:
      fn: a function of arrays, static keywords already bound; a jitted one keeps its options.
      args: `jax.ShapeDtypeStruct`s, or trees of them.
      slice_name: a place that `capibara.hardware.topology` knows.
      name: what the report is called; the function's name by default.
      dump_dir: where libtpu dumps in this process. Taken from LIBTPU_INIT_ARGS by default, which must have
        been set before libtpu was loaded (`capibara.compile.environment`); without it there are no schedules.
      vmem_static_bytes: the caller's own account of its VMEM, reported where the compiler gives none.
    """
    name = name or _name_of(fn)
    platform, vmem_limit = place(slice_name).chip.platform, _vmem_of_slice(slice_name)
    compiler = chip_compiler(platform)
    if not compiler.available:
        only = lower_only(
            fn, args, name=name, why=str(compiler), vmem_static_bytes=vmem_static_bytes, platform=platform
        )
        return dataclasses.replace(only, slice_name=slice_name, vmem_limit_bytes=vmem_limit)

    dump = Path(dump_dir) if dump_dir is not None else dump_dir_in(os.environ)
    before = {file.path for file in dump_files(dump)} if dump else set()
    report = CompileReport(
        name=name,
        ok=False,
        evidence=f"compiled by {compiler.named} for {slice_name}; predicted, not run on a chip",
        slice_name=slice_name,
        vmem_limit_bytes=vmem_limit,
        vmem_bytes=vmem_static_bytes,
        vmem_source=None if vmem_static_bytes is None else "caller",
    )
    start = time.perf_counter()
    lowering = False
    try:
        devices = _devices(slice_name)
        start = time.perf_counter()  # loading libtpu is not this case's doing
        lowering = True
        lowered = _lower_on(devices[0], fn, args)
        custom_calls = custom_calls_in(lowered.as_text())
        lowering = False
        compiled = lowered.compile()
    except thrown_by_compilers() as error:
        if lowering:
            evidence = f"not compiled: failed in lowering for {slice_name}"
        else:
            evidence = f"refused by {compiler.named} for {slice_name}"
        report = dataclasses.replace(report, evidence=evidence, seconds=time.perf_counter() - start)
        return _failed(report, f"{type(error).__name__}: {error}", lowering=lowering)
    report = dataclasses.replace(
        report,
        ok=True,
        compiled=True,
        seconds=time.perf_counter() - start,
        custom_calls=custom_calls,
        **_memory(compiled),
        **_cost(compiled),
    )
    schedules = schedule_lengths(dump, ignore=before) if dump else []
    return _with_kernels(report, schedules, hlo_kernels(_optimized_hlo(compiled)))


def lower_only(
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    name: str | None = None,
    why: str = "no slice was named.",
    vmem_static_bytes: int | None = None,
    platform: str = "tpu",
) -> CompileReport:
    """The report of a case that is lowered for TPU, or GPU, and not compiled; `why` is a sentence."""
    result = lower_for(fn, args, "cuda" if platform == "gpu" else "tpu")
    return CompileReport(
        name=name or _name_of(fn),
        ok=result.ok,
        evidence=f"lowered only: {why}" if result.ok else f"failed in lowering: {why}",
        error_kind=result.error_kind,
        error=result.error,
        seconds=result.seconds,
        custom_calls=result.custom_calls,
        vmem_bytes=vmem_static_bytes,
        vmem_source=None if vmem_static_bytes is None else "caller",
    )


def topology_mesh(slice_name: str | None, axes: Mapping[str, int]) -> Mesh | AbstractMesh:
    """A mesh over the chips of a slice that is not attached, to shard arguments over.

    Without a slice name the mesh has no devices, which is all that lowering needs. Axis sizes must multiply
    to the number of chips.
    """
    from jax.sharding import AbstractMesh, AxisType, Mesh

    names, sizes = tuple(axes), tuple(axes.values())
    kinds = (AxisType.Auto,) * len(names)
    if slice_name is None or not chip_compiler(place(slice_name).chip.platform).available:
        return AbstractMesh(sizes, names, axis_types=kinds)
    devices = _devices(slice_name)
    if math.prod(sizes) != len(devices):
        raise rule_error(
            f"The axes of a mesh over {slice_name} must multiply to its {len(devices)} devices",
            f"{dict(axes)} = {math.prod(sizes)}",
            f"choose sizes whose product is {len(devices)}",
        )
    from jax.experimental import mesh_utils

    # Chips are arranged so that mesh axes follow the links; an axis may take part of a link axis.
    grid = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return Mesh(grid, names, axis_types=kinds)


def _name_of(fn: Callable[..., Any]) -> str:
    fn = getattr(fn, "func", fn)  # what a functools.partial wraps
    return str(getattr(fn, "__name__", type(fn).__name__))


def _devices(slice_name: str) -> list[Any]:
    return list(abstract_devices(slice_name))


def _vmem_of_slice(slice_name: str) -> int | None:
    from capibara.hardware.chips import chip

    return chip(place(slice_name).chip).vmem_bytes


def _lower_on(device: Any, fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    """`fn` traced and lowered for `device`, or for where its arguments are."""
    import jax
    from jax.sharding import SingleDeviceSharding

    home = SingleDeviceSharding(device)

    def at_home(leaf: Any) -> Any:
        if getattr(leaf, "sharding", None) is not None or not hasattr(leaf, "shape"):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=home)

    if not jax.tree.leaves(args):  # nothing that could carry the device in
        return jax.jit(fn, out_shardings=home).lower(*args)
    return jitted(fn).lower(*jax.tree.map(at_home, tuple(args)))


def _failed(report: CompileReport, text: str, *, lowering: bool) -> CompileReport:
    kind = classify(text, lowering=lowering)
    report = dataclasses.replace(report, error_kind=kind, error=useful_lines(text))
    sizes = over_limit(text) if kind in ("vmem_oom", "hbm_oom") else None
    if sizes and kind == "vmem_oom":
        report = dataclasses.replace(
            report,
            vmem_bytes=sizes.used_bytes,
            vmem_source="compiler",
            vmem_scoped_limit_bytes=sizes.limit_bytes,
        )
    return report


def _memory(compiled: Any) -> dict[str, Any]:
    """Sizes from `memory_analysis()`, which releases and back ends answer differently or not at all."""
    try:
        stats = compiled.memory_analysis()
    except (NotImplementedError, RuntimeError):
        stats = None
    return {
        "hbm_argument_bytes": _size(stats, "argument_size_in_bytes"),
        "hbm_output_bytes": _size(stats, "output_size_in_bytes"),
        "hbm_temp_bytes": _size(stats, "temp_size_in_bytes"),
        "code_bytes": _size(stats, "generated_code_size_in_bytes"),
    }


def _cost(compiled: Any) -> dict[str, Any]:
    try:
        answer = compiled.cost_analysis()
    except (NotImplementedError, RuntimeError):
        answer = None
    if isinstance(answer, (list, tuple)):
        answer = answer[0] if answer else None
    costs = answer if isinstance(answer, Mapping) else {}
    return {"flops": _figure(costs.get("flops")), "bytes_accessed": _figure(costs.get("bytes accessed"))}


def _size(stats: Any, field: str) -> int | None:
    value = getattr(stats, field, None)
    return int(value) if isinstance(value, int) and value >= 0 else None


def _figure(value: Any) -> float | None:
    # XLA answers -1 where it has no estimate.
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) and value >= 0 else None


def _optimized_hlo(compiled: Any) -> str:
    try:
        return compiled.as_text() or ""
    except (NotImplementedError, RuntimeError):
        return ""


def _with_kernels(
    report: CompileReport, schedules: Sequence[KernelSchedule], used: Sequence[HloKernel]
) -> CompileReport:
    """Joins the dump's schedules with the HLO's account of VMEM, which is the compiler's own total."""
    by_name = {kernel.name: kernel for kernel in used}
    kernels = []
    for schedule in schedules:
        if kernel := by_name.pop(schedule.name, None):
            kind = kernel.opcode or schedule.kind
            schedule = dataclasses.replace(schedule, kind=kind, vmem_bytes=kernel.vmem_bytes)
        kernels.append(schedule)
    # Kernels without a schedule: nothing was dumped, or the compiler reused another kernel's code.
    for kernel in by_name.values():
        kernels.append(KernelSchedule(kernel.name, kind=kernel.opcode, vmem_bytes=kernel.vmem_bytes))

    own = [kernel for kernel in kernels if kernel.kind != RUNTIME_KIND]
    lengths = [kernel.bundles for kernel in own if kernel.bundles is not None]
    vmem = [kernel.vmem_bytes for kernel in own if kernel.vmem_bytes is not None]
    report = dataclasses.replace(report, kernels=tuple(kernels), bundles=sum(lengths) if lengths else None)
    if not vmem:
        return report
    largest = max(used, key=lambda kernel: kernel.vmem_bytes, default=None)
    return dataclasses.replace(
        report,
        vmem_bytes=max(vmem),
        vmem_source="compiler",
        vmem_scoped_limit_bytes=largest.vmem_limit_bytes if largest else None,
    )
