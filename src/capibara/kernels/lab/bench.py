"""What dispatch takes, beside its peers, in one run.

For every case the implementation that dispatch chooses and those it is held against are checked against the
reference and then timed with their samples interleaved. A peer is another implementation of the op, or a
function that the op names in `op.peers`: what a user would write without this library.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import platform
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from capibara import __version__, hardware
from capibara.errors import unknown_name
from capibara.hardware import Chip
from capibara.kernels.core import dispatch
from capibara.kernels.core.explanation import explain
from capibara.kernels.core.op import Op, call_of, lookup
from capibara.kernels.core.spec import Call, Case, Config, Cost
from capibara.kernels.lab import check as checks
from capibara.kernels.lab import timing
from capibara.kernels.lab.timing import Timing
from capibara.kernels.lab.tuning import failures, first_line

DEFAULT_PEERS = ("xla",)
# Cases whose one call is predicted to take longer than this on a host CPU are left to accelerators.
HOST_CALL_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class Measured:
    """One program on one case; `timing` is None where it could not be measured, and `note` says why."""

    name: str
    timing: Timing | None = None
    config: Config = None
    check: checks.Check | None = None
    note: str = ""
    external: bool = False
    """Not an implementation of the op: what a user would write without this library."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "config": None if self.config is None else dataclasses.asdict(self.config),
            "timing": None if self.timing is None else self.timing.as_dict(),
            "error": None if self.check is None else self.check.finite_error,
            "tolerance": None if self.check is None else self.check.tolerance,
            "ok": None if self.check is None else self.check.ok,
            "note": self.note,
        }


@dataclasses.dataclass(frozen=True)
class Row:
    """One case: what dispatch chose and why, its time, and its peers' beside it."""

    op: str
    case: str
    signature: str
    direction: str
    why: str
    cost: Cost
    limit_seconds: float | None
    """The least time the chip needs for this work; None where its rates are not known."""
    ours: Measured
    peers: tuple[Measured, ...]

    @property
    def ok(self) -> bool:
        """Dispatch's choice ran, and every implementation of the op that ran is right.

        A peer from outside that rounds more often is shown with its error; that is no fault of the op's.
        """
        ran = [m.check for m in (self.ours, *self.peers) if m.check is not None and not m.external]
        return self.ours.timing is not None and all(check.ok for check in ran)

    def tflops(self, one: Measured) -> float | None:
        return None if one.timing is None else self.cost.flops / one.timing.seconds / 1e12

    def gigabytes(self, one: Measured) -> float | None:
        """GB/s, counting every operand once."""
        return None if one.timing is None else self.cost.bytes / one.timing.seconds / 1e9

    def fraction(self, one: Measured) -> float | None:
        """Of the chip's limit: 1.0 would be the roofline."""
        if one.timing is None or self.limit_seconds is None:
            return None
        return self.limit_seconds / one.timing.seconds

    def speedup(self, peer: Measured) -> float | None:
        """How many times as fast as the peer dispatch's choice is."""
        if peer.timing is None or self.ours.timing is None:
            return None
        return peer.timing.seconds / self.ours.timing.seconds

    def as_dict(self) -> dict[str, Any]:
        def shown(one: Measured) -> dict[str, Any]:
            figures = {
                "tflops": self.tflops(one),
                "gigabytes_per_second": self.gigabytes(one),
                "fraction_of_limit": self.fraction(one),
            }
            return {**one.as_dict(), **figures}

        return {
            "op": self.op,
            "case": self.case,
            "call": self.signature,
            "direction": self.direction,
            "why": self.why,
            "flops": self.cost.flops,
            "bytes": self.cost.bytes,
            "limit_seconds": self.limit_seconds,
            "ok": self.ok,
            "ours": shown(self.ours),
            "peers": [{**shown(peer), "ours_is_times_as_fast": self.speedup(peer)} for peer in self.peers],
        }


def bench(
    op: Op | str,
    cases: Iterable[Case | str] | None = None,
    against: Sequence[str] = DEFAULT_PEERS,
    *,
    grad: bool = False,
    samples: int = timing.SAMPLES,
    sample_seconds: float | None = None,
    on_progress: Callable[[str], None] | None = None,
    seed: int = 0,
) -> list[Row]:
    """Measure dispatch's choice and its peers on each case, on the attached chip.

    Args:
      op: an op or its name.
      cases: cases or their names; by default those tagged "bench".
      against: names of the op's implementations or of its `peers`.
      grad: time the forward and backward pass together.
      on_progress: called with the case's name before each.
    """
    op = lookup(op) if isinstance(op, str) else op
    if cases is not None:
        op.must_run_alone("A benchmark")
    chosen = [op.case(c) if isinstance(c, str) else c for c in (cases if cases is not None else bench_cases(op))]
    for name in against:
        if name not in peer_names(op):
            raise unknown_name(f"implementation or peer of {op.name}", name, peer_names(op))
    rows = []
    for case in chosen:
        if on_progress is not None:
            on_progress(case.name)
        rows.append(_row(op, case, against, grad, samples, sample_seconds, seed))
    return rows


def bench_cases(op: Op) -> list[Case]:
    return [case for case in op.cases if "bench" in case.tags]


def peer_names(op: Op) -> list[str]:
    return [*op.implementations, *op.peers]


def affordable(op: Op, cases: Sequence[Case], seconds: float = HOST_CALL_SECONDS) -> tuple[list[Case], list[Case]]:
    """The cases fit for the attached chip (any accelerator; small ones on a host CPU), and the others."""
    if hardware.default().platform != "cpu":
        return list(cases), []
    host = hardware.chip("cpu")
    kept: list[Case] = []
    left: list[Case] = []
    for case in cases:
        work = op.cost(call_of(op, case.args(), case.params))
        predicted = max(work.flops / host.peak_flops("float32"), work.bytes / host.hbm_bandwidth)
        (kept if predicted <= seconds else left).append(case)
    return kept, left


def limit_seconds(call: Call, cost: Cost) -> float | None:
    """The least time the call's chip needs for the work; None for a chip outside the table."""
    chip = hardware.chip_for(call.target.device_kind)
    if chip is None:
        return None
    dtype = rate_dtype(call, cost, chip)
    products = 0.0 if dtype is None else cost.matrix_flops / chip.peak_flops(dtype)
    return max(products, cost.vector_flops / chip.vector_flops, cost.bytes / chip.hbm_bandwidth)


def rate_dtype(call: Call, cost: Cost, chip: Chip) -> str | None:
    """Which of the chip's peak rates bounds the products.

    A float32 product at default precision is rounded to the matrix units' own type on the way in, so its
    bound is that type's rate; only the highest precision is held to the float32 rate.
    """
    config: Any = jax.config  # its attributes are made at run time
    asked = call.params.get("precision") or config.jax_default_matmul_precision
    if cost.dtype == "float32" and asked not in ("highest", "float32"):
        faster = {"gpu": "tfloat32", "tpu": "bfloat16"}.get(call.target.platform)
        if faster is not None and chip.supports(faster):
            return faster
    return cost.dtype if chip.supports(cost.dtype) else None


def gradient_cost(call: Call, cost: Cost) -> Cost:
    """Forward and backward together: three times the operations, as for any product, and the bytes of both
    passes.

    The backward pass reads the operands and the output's cotangent, and writes a gradient for every operand.
    """
    operands = sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in call.args if x is not None)
    return Cost(
        matrix_flops=3 * cost.matrix_flops,
        vector_flops=3 * cost.vector_flops,
        bytes=2 * cost.bytes + operands,
        dtype=cost.dtype,
    )


def _row(
    op: Op,
    case: Case,
    against: Sequence[str],
    grad: bool,
    samples: int,
    sample_seconds: float | None,
    seed: int,
) -> Row:
    arrays = case.arrays(seed)
    call = call_of(op, arrays, case.params)
    selection = dispatch.select(call)
    wanted = checks.expected(op, arrays, case.params, grad=grad)
    inputs = (checks.cotangents(op, arrays, case.params), *arrays) if grad else arrays

    # Nothing is asked for by name: under differentiation dispatch chooses each pass by itself.
    default = jax.jit(lambda *arrays: dispatch.run(op, arrays, case.params))
    ours = _chosen(checks.with_gradient(default) if grad else default, inputs)
    programs: dict[str, Callable[..., Any]] = {ours: default}
    notes: dict[str, str] = {}
    for name in against:
        if name == ours:
            notes[name] = "it is what dispatch chose"
            continue
        made, note = _peer(op, case, call, name, grad)
        if made is not None:
            programs[name] = made
        notes[name] = note
    programs = {name: jax.jit(checks.with_gradient(fn)) if grad else fn for name, fn in programs.items()}

    verdicts: dict[str, checks.Check] = {}
    for name, fn in list(programs.items()):
        try:
            verdicts[name] = checks.check_output(jax.block_until_ready(fn(*inputs)), wanted)
        except failures() as error:
            if name == ours:
                raise  # dispatch chose what does not run: a fault of the library, not a row of a table
            notes[name] = first_line(error)
            del programs[name]
    # As they are: a peer of several programs, jitted as one, would be fused into another peer.
    times = timing.compare(programs, *inputs, samples=samples, sample_seconds=sample_seconds, jit=False)

    def measured(name: str, config: Config = None) -> Measured:
        external = name in op.peers
        return Measured(name, times.get(name), config, verdicts.get(name), notes.get(name, ""), external)

    cost = op.cost(call)
    if grad:
        cost = gradient_cost(call, cost)
    return Row(
        op=op.name,
        case=case.name,
        signature=call.signature,
        direction="forward+backward" if grad else "forward",
        why=selection.why,
        cost=cost,
        limit_seconds=limit_seconds(call, cost),
        ours=dataclasses.replace(measured(ours, selection.config), note=""),
        peers=tuple(measured(name) for name in against),
    )


def _chosen(program: Callable[..., Any], inputs: Sequence[Any]) -> str:
    """What dispatch takes for each op that the program calls: one name, or several joined by a plus."""
    found = explain(program, *inputs).selections
    return "+".join(dict.fromkeys(selection.implementation for selection in found))


def _implementation(op: Op, params: Mapping[str, Hashable], name: str, config: Config) -> Callable[..., Any]:
    return jax.jit(lambda *arrays: op(*arrays, implementation=name, config=config, **params))


def _peer(op: Op, case: Case, call: Call, name: str, grad: bool) -> tuple[Callable[..., Any] | None, str]:
    """A peer's program for this case, or why there is none."""
    if name in op.implementations:
        why = op.implementations[name].refusal(call)
        return (None, why) if why is not None else (_implementation(op, case.params, name, None), "")
    try:
        made = op.peers[name](case)
    except failures() as error:
        return None, first_line(error)
    if made is None:
        return None, "it does not apply to this case"
    if grad and not hasattr(made, "lower"):
        return None, "it is several programs, and differentiating them together would fuse them"
    return made, ""


def document(rows: Sequence[Row], command: str = "") -> dict[str, Any]:
    """The rows with what is needed to read them later: device, versions, date and the command."""
    first = hardware.default()
    return {
        "device": {"kind": first.device_kind, "platform": first.platform, "attached": hardware.summary()},
        "versions": versions(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "rows": [row.as_dict() for row in rows],
    }


def versions() -> dict[str, str]:
    """What the figures depend on: this library, jax, its compilers' packages, Python and the machine."""
    found = {"capibara": __version__, "python": platform.python_version(), "machine": platform.machine()}
    packages = (
        "jax",
        "jaxlib",
        "numpy",
        "libtpu",
        "jax-cuda13-plugin",
        "jax-cuda12-plugin",
        "nvidia-cudnn-cu13",
    )
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
