"""An op's TPU kernels over its cases, by the real TPU compiler where it is installed, by lowering elsewhere.

Each case is compiled three times: our kernel with the config that dispatch would take, the stock kernel that
jax ships for the same work where the op names one (`op.stock_tpu`), and XLA's own program. What was compiled
and not run is called predicted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from capibara.compile.pool import CompileJob, compile_many
from capibara.compile.report import CompileReport, KernelSchedule
from capibara.hardware import Chip
from capibara.hardware.topology import place

if TYPE_CHECKING:
    from capibara.kernels.core.op import Op
    from capibara.kernels.core.spec import Call, Case, Implementation

__all__ = ["KernelRow", "cases_for", "compile_kernels", "kernels_for", "program", "stock"]

_PROGRAM = f"{__name__}:program"
_STOCK = f"{__name__}:stock"
XLA = "xla"


def program(
    op: str,
    case: str,
    implementation: str,
    config: Mapping[str, Any] | None = None,
    device_kind: str = "TPU v4",
    mesh: Any = None,
    imports: Sequence[str] = (),
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A job's target: one implementation of an op on one of its cases, as (function, argument shapes).

    `mesh` is for an op that runs over mesh axes; without one it has as many devices as the case says. `imports` names
    the modules and files that register ops from outside of the library.
    """
    found = _lookup(op, imports)
    impl = found.implementation(implementation)
    made = None if config is None or impl.config_type is None else impl.config_type(**config)
    chosen = found.case(case)
    if mesh is not None:
        chosen = _case_over(found, chosen, mesh.size)
    return implementation_program(found, chosen, implementation, made, device_kind, mesh)


def _lookup(op: str, imports: Sequence[str]) -> Op:
    from capibara.kernels.core import outside
    from capibara.kernels.core.op import lookup

    for name in imports:
        outside.import_ops(name)
    return lookup(op)


def stock(op: str, case: str, imports: Sequence[str] = ()) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A job's target: the kernel that jax ships for the same work."""
    found = _lookup(op, imports)
    made = _stock_program(found, found.case(case))
    if made is None:
        raise ValueError(f"{op} names no stock TPU kernel for the case {case!r}.")
    return made


def implementation_program(
    op: Op, case: Case, implementation: str, config: Any = None, device_kind: str = "TPU v4", mesh: Any = None
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function of the operands that are present, dispatched for `device_kind` while it is traced.

    For an op that runs over mesh axes, it is of a whole mesh's operands, with one row a device.
    """
    from capibara import hardware
    from capibara.kernels.core import context, dispatch

    chip = hardware.chip(device_kind)
    operands = case.args()

    def fn(*present: Any) -> Any:
        given = iter(present)
        arrays = tuple(None if x is None else next(given) for x in operands)
        with context.target(chip.platform, device_kind):
            # One chip's program: there is no mesh to split it over.
            return dispatch.run(op, arrays, dict(case.params), implementation=implementation, config=config, local=True)

    args = tuple(x for x in operands if x is not None)
    return (fn, args) if op.mesh_axes is None else _over_mesh(op, case, fn, args, mesh)


def _over_mesh(
    op: Op, case: Case, fn: Callable[..., Any], args: tuple[Any, ...], mesh: Any
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """`fn` on every device of the mesh, as a function of operands with a leading axis of one row a device."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from capibara.compile.aot import topology_mesh
    from capibara.kernels.ops.collective.over_mesh import each_device

    assert op.mesh_axes is not None
    if mesh is None:
        mesh = topology_mesh(None, op.mesh_axes(op.call(*case.args(), target=None, **dict(case.params))))
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    stacked = tuple(jax.ShapeDtypeStruct((mesh.size, *x.shape), x.dtype, sharding=sharding) for x in args)
    return each_device(fn, mesh), stacked


def _case_over(op: Op, case: Case, devices: int) -> Case:
    """The case of an op over mesh axes, on so many devices; of any other op, as it is."""
    if op.mesh_axes is None:
        return case
    return dataclasses.replace(case, params={**case.params, "devices": devices})


@dataclasses.dataclass(frozen=True)
class KernelRow:
    """One kernel on one case, beside the stock kernel and XLA's program for the same work."""

    op: str
    case: str
    implementation: str
    config: Any
    ours: CompileReport | None
    """None when the implementation refuses the case; `note` says why."""
    stock: CompileReport | None
    xla: CompileReport | None
    note: str = ""
    steps: int | None = None
    """Grid steps of our kernel; None where it is not a single Pallas call."""
    matrix_cycles: float | None = None
    """Cycles of one core that the matrix units need at the least for one grid step of our kernel."""
    stock_matrix_cycles: float | None = None

    @property
    def ok(self) -> bool:
        return self.ours is None or self.ours.ok

    @property
    def name(self) -> str:
        return f"{self.op} {self.case}"

    def as_dict(self) -> dict[str, Any]:
        def shown(report: CompileReport | None) -> dict[str, Any] | None:
            return None if report is None else report.as_dict()

        return {
            "op": self.op,
            "case": self.case,
            "implementation": self.implementation,
            "config": None if self.config is None else dataclasses.asdict(self.config),
            "ok": self.ok,
            "note": self.note,
            "grid_steps": self.steps,
            "matrix_cycles_a_step": self.matrix_cycles,
            "stock_matrix_cycles_a_step": self.stock_matrix_cycles,
            "bundles_a_step": body_bundles(self.ours),
            "stock_bundles_a_step": body_bundles(self.stock),
            "ours": shown(self.ours),
            "stock": shown(self.stock),
            "xla": shown(self.xla),
        }


def body_bundles(report: CompileReport | None) -> int | None:
    """Schedule length of a program's one Pallas kernel, which is that of one grid step."""
    if report is None:
        return None
    bodies: list[KernelSchedule] = [k for k in report.kernels if k.kind == "custom-call"]
    return bodies[0].bundles if len(bodies) == 1 else None


def kernels_for(op: Op, platform: str) -> list[Implementation]:
    return [impl for impl in op.implementations.values() if impl.kernel and platform in impl.platforms]


def cases_for(op: Op, platform: str) -> list[Case]:
    return [case for case in op.cases if platform in case.tags]


def compile_kernels(
    ops: Sequence[Op],
    slice_name: str,
    *,
    cases: Sequence[str] | None = None,
    peers: bool = True,
    workers: int | None = None,
    timeout_s: float = 600.0,
    on_result: Callable[[int, int, CompileReport], None] | None = None,
) -> list[KernelRow]:
    """Compile every kernel of `ops` over its cases for one chip of the slice, collectives for all of them.

    Args:
      cases: names of cases; by default those tagged with the chip's platform.
      peers: compile jax's own TPU kernel and XLA's program too.
      on_result: called with (done, total, report) as each program is done.
    """
    from capibara import hardware

    wanted = place(slice_name)
    chip = hardware.chip(wanted.chip)
    drafts = [draft for op in ops for draft in _drafts(op, cases, chip, peers, wanted.devices)]
    jobs: dict[str, CompileJob] = {}
    for draft in drafts:
        jobs.update(draft.jobs)
    names, done = list(jobs), 0

    def tell(index: int, report: CompileReport) -> None:
        nonlocal done
        done += 1
        if on_result is not None:
            on_result(done, len(names), report)

    reports = compile_many(list(jobs.values()), slice_name, workers=workers, timeout_s=timeout_s, on_result=tell)
    by_name = dict(zip(names, reports, strict=True))
    return [draft.row(by_name) for draft in drafts]


@dataclasses.dataclass(frozen=True)
class _Draft:
    """A row before its reports are there."""

    op: str
    case: str
    implementation: str
    config: Any
    note: str
    jobs: Mapping[str, CompileJob]
    names: Mapping[str, str | None]
    steps: int | None
    matrix_cycles: float | None
    stock_matrix_cycles: float | None

    def row(self, reports: Mapping[str, CompileReport]) -> KernelRow:
        def of(column: str) -> CompileReport | None:
            name = self.names.get(column)
            return None if name is None else reports[name]

        return KernelRow(
            op=self.op,
            case=self.case,
            implementation=self.implementation,
            config=self.config,
            ours=of("ours"),
            stock=of("stock"),
            xla=of("xla"),
            note=self.note,
            steps=self.steps,
            matrix_cycles=self.matrix_cycles,
            stock_matrix_cycles=self.stock_matrix_cycles,
        )


def _drafts(op: Op, wanted: Sequence[str] | None, chip: Chip, peers: bool, devices: int = 1) -> Iterator[_Draft]:
    from capibara.kernels.core import context, outside, tables

    kind = chip.device_kinds[0]
    chosen = cases_for(op, chip.platform) if wanted is None else [op.case(name) for name in wanted]
    for impl in kernels_for(op, chip.platform):
        for listed in chosen:
            case = _case_over(op, listed, devices)
            with context.target(chip.platform, kind) as target:
                call = op.call(*case.args(), target=target, **dict(case.params))
                mesh = None if op.mesh_axes is None else op.mesh_axes(call)
                refusal = impl.refusal(call)
                tuned = None if refusal is not None else tables.find(call, [impl.name])
                if refusal is not None:
                    config = None
                else:
                    config = tuned.config if tuned is not None else impl.default_config(call)
            jobs: dict[str, CompileJob] = {}
            names: dict[str, str | None] = {}
            steps = cycles = stock_cycles = None
            if refusal is None:
                fn, args = implementation_program(op, case, impl.name, config, kind)
                if chip.platform == "tpu":
                    steps = grid_steps(fn, args)
                    cycles = _matrix_cycles(call, chip, steps)
                names["ours"] = name = f"{op.name}/{case.name}/{impl.name}"
                plain = None if config is None else dataclasses.asdict(config)
                jobs[name] = _job(name, op, case, impl.name, plain, kind, mesh)
            if peers:
                if chip.platform == "tpu" and (stock_made := _stock_program(op, case)) is not None:
                    stock_cycles = _matrix_cycles(call, chip, grid_steps(*stock_made))
                    names["stock"] = name = f"{op.name}/{case.name}/stock"
                    given = {"op": op.name, "case": case.name, "imports": list(outside.imported())}
                    jobs[name] = CompileJob(_STOCK, given, name)
                if XLA in op.implementations and op.implementations[XLA].refusal(call) is None:
                    names["xla"] = name = f"{op.name}/{case.name}/xla"
                    jobs[name] = _job(name, op, case, XLA, None, kind, mesh)
            yield _Draft(op.name, case.name, impl.name, config, refusal or "", jobs, names, steps, cycles, stock_cycles)


def _job(
    name: str,
    op: Op,
    case: Case,
    implementation: str,
    config: Mapping[str, Any] | None,
    kind: str,
    mesh: Mapping[str, int] | None,
) -> CompileJob:
    from capibara.kernels.core import outside

    given = {
        "op": op.name,
        "case": case.name,
        "implementation": implementation,
        "config": config,
        "device_kind": kind,
        "imports": list(outside.imported()),
    }
    return CompileJob(_PROGRAM, given, name, mesh)


def _stock_program(op: Op, case: Case) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    return None if op.stock_tpu is None else op.stock_tpu(case)


def grid_steps(fn: Callable[..., Any], args: Sequence[Any]) -> int | None:
    """Steps of the program's one Pallas grid; None when it has none, several, or one made at run time."""
    import jax

    grids = list(_pallas_grids(jax.make_jaxpr(fn)(*args).jaxpr))
    if len(grids) != 1 or not all(isinstance(axis, int) for axis in grids[0]):
        return None
    return math.prod(grids[0])


def _pallas_grids(jaxpr: Any) -> Iterator[tuple[Any, ...]]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield tuple(equation.params["grid_mapping"].grid)
            continue
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)  # closed ones hold the open one
                if hasattr(inner, "eqns"):
                    yield from _pallas_grids(inner)


def _matrix_cycles(call: Call, chip: Chip, steps: int | None) -> float | None:
    """The call's flops shared over the steps, at the matrix units' rate in the type they run in."""
    from capibara.kernels.lab.bench import rate_dtype

    if not steps or chip.matrix_flops_per_cycle is None:
        return None
    cost = call.op.cost(call)
    dtype = rate_dtype(call, cost, chip)
    if dtype is None:
        return None
    slower = chip.peak_flops("bfloat16") / chip.peak_flops(dtype)
    return cost.flops / steps / chip.matrix_flops_per_cycle * slower
