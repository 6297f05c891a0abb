"""What one compilation says about itself: plain data, so that it crosses process borders as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

__all__ = ["RUNTIME_KIND", "CompileReport", "ErrorKind", "KernelSchedule"]

ErrorKind = Literal["vmem_oom", "smem_oom", "hbm_oom", "lowering", "target", "timeout", "crash", "other"]

RUNTIME_KIND = "runtime"
"""Kind of the start-up and shut-down programs that libtpu puts around every module."""


@dataclasses.dataclass(frozen=True)
class KernelSchedule:
    """The compiler's schedule of one kernel body. What the dump did not say is None or empty.

    Attributes:
      name: the program's name in the dump, which is the HLO instruction's.
      bundles: length of the schedule; one bundle issues in one cycle of one core. Loops are counted once:
        this is the length of the body as written, not a running time.
      empty_bundles: how many of them issue nothing (waiting on a latency).
      kind: the HLO opcode it came from ("custom-call" is a Pallas kernel, "fusion" is XLA's), or "runtime".
      slots: issue slots used over the whole body, by unit (MXU, VALU, VLOAD, VSTORE:SPILL, ...).
      ops: instructions by mnemonic (vld, vst, vmatmul, ...).
      vmem_bytes: VMEM that the body allocates.
    """

    name: str
    bundles: int | None = None
    empty_bundles: int | None = None
    kind: str | None = None
    slots: Mapping[str, int] = dataclasses.field(default_factory=dict)
    ops: Mapping[str, int] = dataclasses.field(default_factory=dict)
    vmem_bytes: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return {**_shallow(self), "slots": dict(self.slots), "ops": dict(self.ops)}


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """One case, lowered or compiled. None means that nothing told us, never zero.

    Attributes:
      ok: the case lowered, and compiled where a compiler was there.
      compiled: the TPU compiler ran to the end; False with ok=True means lowered only.
      evidence: in words, what stands behind the figures.
      hbm_argument_bytes, hbm_output_bytes, hbm_temp_bytes: on one chip.
      code_bytes: size of the generated program.
      flops, bytes_accessed: the compiler's own estimate for one chip; it does not see inside Pallas kernels.
      vmem_bytes: the largest use by one kernel; for a case that ran out, what it asked for.
      vmem_source: "compiler" or "caller" (see `vmem_static_bytes` of a job).
      vmem_limit_bytes: VMEM of one core, from the chip table.
      vmem_scoped_limit_bytes: what the compiler let that kernel have.
      bundles: schedule lengths of all kernels but libtpu's own, added up.
    """

    name: str
    ok: bool
    evidence: str
    slice_name: str | None = None
    compiled: bool = False
    error_kind: ErrorKind | None = None
    error: str | None = None
    seconds: float | None = None
    hbm_argument_bytes: int | None = None
    hbm_output_bytes: int | None = None
    hbm_temp_bytes: int | None = None
    code_bytes: int | None = None
    flops: float | None = None
    bytes_accessed: float | None = None
    vmem_bytes: int | None = None
    vmem_source: Literal["compiler", "caller"] | None = None
    vmem_limit_bytes: int | None = None
    vmem_scoped_limit_bytes: int | None = None
    bundles: int | None = None
    custom_calls: tuple[str, ...] = ()
    kernels: tuple[KernelSchedule, ...] = ()

    def kernel(self, name: str) -> KernelSchedule | None:
        """The schedule of the kernel called `name`, with or without the number that XLA appends."""
        for schedule in self.kernels:
            if name in (schedule.name, schedule.name.rpartition(".")[0]):
                return schedule
        return None

    def as_dict(self) -> dict[str, Any]:
        kernels = [kernel.as_dict() for kernel in self.kernels]
        return {**_shallow(self), "custom_calls": list(self.custom_calls), "kernels": kernels}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CompileReport:
        fields = dict(data)
        fields["custom_calls"] = tuple(fields.get("custom_calls", ()))
        fields["kernels"] = tuple(KernelSchedule(**kernel) for kernel in fields.get("kernels", ()))
        return cls(**fields)


def _shallow(instance: Any) -> dict[str, Any]:
    return {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}
