"""`capibara tour`: what is attached, every op against its reference, and kernels without their chips."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capibara.cli import failures, output
from capibara.cli.failures import Code
from capibara.cli.kernels.options import Imports, Json

if TYPE_CHECKING:
    from rich.console import Console

    from capibara.kernels.core.op import Op
    from capibara.kernels.core.spec import Case, Implementation
    from capibara.kernels.lab.check import Check

# One call of a case on a host CPU; larger ones are for `capibara kernels bench`.
HOST_CALL_SECONDS = 0.03
# An emulated kernel walks its grid in Python.
SMALL_FLOPS = 3e7
EMULATED_CASES = 3
SAMPLES = 3
# What collectives run over: devices that XLA makes of a host CPU. Their cases take up to eight.
VIRTUAL_DEVICES = 8

OPS, EMULATED, LOWERED = "ops", "emulated", "lowered"
# Until which part of the tour's time a section goes on; every op is run once however long that takes, and what comes
# after it has a part of its own all the same.
UNTIL = {OPS: 0.5, EMULATED: 0.8, LOWERED: 1.0}
AT_LEAST = 0.1


class _Clock:
    """The tour's time, shared out: a section goes on until its part of the whole is over."""

    def __init__(self, seconds: float) -> None:
        self._start, self._seconds = time.perf_counter(), seconds
        self._starts: dict[str, float] = {}

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self._start

    def within(self, section: str) -> bool:
        inside = self.elapsed - self._starts.setdefault(section, self.elapsed)
        return self.elapsed < UNTIL[section] * self._seconds or inside < AT_LEAST * self._seconds


@dataclasses.dataclass(frozen=True)
class _Row:
    """One thing that was tried."""

    section: str
    op: str
    case: str
    implementation: str
    ok: bool
    note: str = ""
    """What is wrong, or which chip it was lowered for."""
    error: float | None = None
    tolerance: float | None = None
    seconds: float | None = None
    launch_bound: bool = False
    flops_per_second: float | None = None
    limit_seconds: float | None = None
    fraction_of_limit: float | None = None
    why: str = ""


@dataclasses.dataclass
class _Section:
    """What a section tried, and what it left out, by reason."""

    name: str
    rows: list[_Row] = dataclasses.field(default_factory=list)
    left: dict[str, int] = dataclasses.field(default_factory=dict)

    def leave(self, reason: str, count: int) -> None:
        if count:
            self.left[reason] = self.left.get(reason, 0) + count


FOR_TIME = "time"
FOR_SIZE = "size"


def tour(
    seconds: Annotated[
        float, typer.Option(min=1, help="Roughly how long it may take; every op is run once all the same.")
    ] = 80.0,
    modules: Imports = None,
    json: Json = False,
) -> None:
    """What is attached, every op against its reference, and the TPU kernels emulated and lowered."""
    clock = _Clock(seconds)
    made_devices = _make_virtual_devices()
    machine = _machine()
    screen = None if json else output.console()
    if screen is not None:
        _show_machine(screen, machine, made_devices)
    sections = []
    for run, show in ((_run_ops, _show_ops), (_emulate, _show_emulated), (_lower, _show_lowered)):
        with output.progress(quiet=json) as bar:
            task = bar.add_task("", total=None)

            def tell(done: int, total: int, text: str, bar: Any = bar, task: Any = task) -> None:
                bar.update(task, completed=done, total=total, description=text)

            sections.append(run(clock, tell))
        if screen is not None:
            show(screen, sections[-1])
    wrong = [f"{_named(row)}: {row.note}" for section in sections for row in section.rows if not row.ok]
    problem = failures.error(Code.FAILED, f"{len(wrong)} do not match: {'; '.join(wrong)}") if wrong else {}
    if screen is None:
        document = {
            "command": output.command_line(),
            **machine,
            "seconds": clock.elapsed,
            "checks": [dataclasses.asdict(row) for section in sections for row in section.rows],
            "left_out": {section.name: section.left for section in sections},
        }
        output.show_json({**document, **problem})
    else:
        _show_end(screen, clock, sections, wrong)
    if problem:
        raise typer.Exit(Code.FAILED)


def _named(row: _Row) -> str:
    how = {OPS: "", EMULATED: ", emulated", LOWERED: ", lowered"}[row.section]
    return f"{row.op} {row.case} on {row.implementation}{how}"


def _make_virtual_devices() -> bool:
    """Whether this process's CPU is several devices by our doing; it is not once jax has looked at it."""
    import jax

    try:
        jax.config.update("jax_num_cpu_devices", VIRTUAL_DEVICES)
    except RuntimeError:  # jax has started: the devices are what they are
        return False
    return True


def _machine() -> dict[str, Any]:
    from capibara import hardware
    from capibara.compile import tpu_compiler
    from capibara.kernels.core.op import registry
    from capibara.kernels.lab.bench import versions

    families: dict[str, dict[str, list[str]]] = {}
    for op in registry().values():
        families.setdefault(op.family, {})[op.name] = list(op.implementations)
    return {
        "attached": hardware.summary(),
        "versions": versions(),
        "tpu_compiler": str(tpu_compiler()),
        "ops": families,
    }


def _show_machine(screen: Console, machine: dict[str, Any], made_devices: bool) -> None:
    from capibara import hardware

    on_host = made_devices and hardware.default().platform == "cpu"
    own = " (made of it by this tour, for collectives)" if on_host else ""
    screen.print(f"Attached: {machine['attached']}{own}", markup=False)
    screen.print("Versions: " + ", ".join(f"{k} {v}" for k, v in machine["versions"].items()), markup=False)
    screen.print(f"TPU compiler: {machine['tpu_compiler']}", markup=False, soft_wrap=True)
    for family, ops in machine["ops"].items():
        screen.print(f"{family}: {', '.join(ops)}", markup=False)


Tell = Callable[[int, int, str], None]


def _run_ops(clock: _Clock, tell: Tell) -> _Section:
    """Each op by dispatch's own choice, against the reference and the roofline: one case each, then others."""
    from capibara.kernels.core.op import registry
    from capibara.kernels.lab import bench

    made = _Section(OPS)
    groups = []
    for op in registry().values():
        if op.mesh_axes is None:
            first = _first_case(op)
            kept, _ = bench.affordable(op, [case for case in op.cases if case is not first], HOST_CALL_SECONDS)
            cases = [first, *kept] if first is not None else []
        else:
            cases = [case for case in op.cases if "test" in case.tags]
        made.leave(FOR_SIZE, len(op.cases) - len(cases))
        groups.append([(op, case) for case in cases])
    items = list(_in_turns(groups))
    each_op_once = sum(bool(group) for group in groups)
    for index, (op, case) in enumerate(items):
        if index >= each_op_once and not clock.within(OPS):
            made.leave(FOR_TIME, len(items) - index)
            break
        tell(index, len(items), f"{op.name} {case.name}")
        if op.mesh_axes is None:
            made.rows.append(_benched(op, case))
            continue
        row, lacking = _over_mesh(op, case)
        if row is not None:
            made.rows.append(row)
        else:
            made.leave(lacking, 1)
    return made


def _first_case(op: Op) -> Case | None:
    """The largest of the small cases that are meant to break a kernel; where there is none, the smallest of all."""
    if not op.cases:
        return None
    small = _small_cases(op)
    return max(small, key=lambda case: _work(op, case)) if small else min(op.cases, key=lambda case: _work(op, case))


def _work(op: Op, case: Case) -> float:
    from capibara.kernels.core.op import call_of

    cost = op.cost(call_of(op, case.args(), case.params))
    return max(cost.flops, cost.bytes)


def _small_cases(op: Op) -> list[Case]:
    return [case for case in op.cases if "test" in case.tags and _work(op, case) <= SMALL_FLOPS]


def _benched(op: Op, case: Case) -> _Row:
    from capibara.kernels.lab import bench

    (row,) = bench.bench(op, [case], (), samples=SAMPLES)
    verdict, timing = row.ours.check, row.ours.timing
    assert verdict is not None  # bench checks what it times
    assert timing is not None
    return _Row(
        OPS,
        op.name,
        case.name,
        row.ours.name,
        verdict.ok,
        "" if verdict.ok else verdict.why,
        verdict.error,
        verdict.tolerance,
        seconds=timing.seconds,
        launch_bound=timing.launch_bound,
        flops_per_second=row.cost.flops / timing.seconds,
        limit_seconds=row.limit_seconds,
        fraction_of_limit=row.fraction(row.ours),
        why=row.why,
    )


def _over_mesh(op: Op, case: Case) -> tuple[_Row | None, str]:
    """An op that runs over mesh axes, on a mesh of the attached devices or of this host's; None with what it lacks."""
    import jax

    from capibara.kernels.lab.over_mesh import check_over

    wanted = int(case.params["devices"])  # type: ignore[call-overload]
    devices = next((found for found in (jax.devices(), jax.devices("cpu")) if len(found) >= wanted), None)
    if devices is None:
        return None, f"want of {wanted} devices"
    chosen, verdict = check_over(op, case, devices[:wanted])
    why = f"on {wanted} {devices[0].platform} devices: {chosen.why}"
    return _checked(OPS, op, case, chosen.implementation, verdict, why), ""


def _checked(section: str, op: Op, case: Case, implementation: str, verdict: Check, why: str = "") -> _Row:
    note = "" if verdict.ok else verdict.why
    return _Row(
        section, op.name, case.name, implementation, verdict.ok, note, verdict.error, verdict.tolerance, why=why
    )


def _figures(row: _Row, wide: bool) -> str:
    if row.error is None or row.tolerance is None:
        return "FAILS"
    return output.error(row.error, row.tolerance, ok=row.ok, wide=wide)


def _show_ops(screen: Console, section: _Section) -> None:
    from capibara.kernels.lab.timing import format_seconds

    wide = screen.width >= output.WIDE
    error = output.error_column(wide)
    right = (error, "time", "reaches", "limit", "of limit") if wide else (error, "time")
    last = ("why",) if wide else ()
    made = output.table(
        "op", "case", "runs on", *right, *last,
        title="Every op against its reference", right=right, whole=("op", *right),
    )  # fmt: skip
    why: dict[str, int] = {}
    for row in section.rows:
        time_ = output.MISSING if row.seconds is None else format_seconds(row.seconds) + "*" * row.launch_bound
        limit = output.MISSING if row.limit_seconds is None else format_seconds(row.limit_seconds)
        more = (output.rate(row.flops_per_second), limit, output.percent(row.fraction_of_limit)) if wide else ()
        number = (f"({why.setdefault(row.why, len(why) + 1)})",) if wide else ()
        output.add_row(made, row.op, row.case, row.implementation, _figures(row, wide), time_, *more, *number)
    screen.print(made)
    for text, place in why.items():
        screen.print(f"({place}) {text}", markup=False)
    meaning = f"limit: {_limit_source()}" if wide else output.ERROR_MEANS
    screen.print(f"{meaning}; * is bound by the launch.\n", markup=False)


def _limit_source() -> str:
    from capibara import hardware

    first = hardware.default()
    chip = first.chip
    if chip is None:
        return f"not known for {first.device_kind}"
    if chip.measured:
        return (
            f"this host as numpy reaches it now, {output.rate(chip.peak_flops('float32'))} in float32 and "
            f"{chip.hbm_bandwidth / 1e9:.0f} GB/s"
        )
    return f"the roofline of {chip.name} as published"


def _emulate(clock: _Clock, tell: Tell) -> _Section:
    """TPU kernels on this host, with the chip's memories emulated: they start as NaN and have hard bounds."""
    import jax

    from capibara.kernels.core import context
    from capibara.kernels.core.op import call_of, registry
    from capibara.kernels.lab.check import check
    from capibara.kernels.lab.tuning import failures as run_failures
    from capibara.kernels.lab.tuning import first_line

    host = jax.devices("cpu")[0]
    made = _Section(EMULATED)
    with jax.default_device(host), context.target("cpu"), context.interpret("machine"):
        groups: list[list[tuple[Op, Case, Implementation]]] = []
        for op in registry().values():
            for impl in op.implementations.values():
                if impl.kernel and "tpu" in impl.platforms:
                    if op.mesh_axes is not None:
                        made.leave("their mesh of TPUs", 1)
                        continue
                    calls = [(case, call_of(op, case.args(), case.params)) for case in _small_cases(op)]
                    taken = [case for case, call in calls if impl.refusal(call) is None]
                    groups.append([(op, case, impl) for case in taken[:EMULATED_CASES]])
        items = list(_in_turns(groups))
        for index, (op, case, impl) in enumerate(items):
            if index and not clock.within(EMULATED):
                made.leave(FOR_TIME, len(items) - index)
                break
            tell(index, len(items), f"{op.name} {case.name}, emulated")
            try:
                verdict = check(op, case.arrays(), case.params, impl.name)
                made.rows.append(_checked(EMULATED, op, case, impl.name, verdict))
            except run_failures() as error:
                made.rows.append(_Row(EMULATED, op.name, case.name, impl.name, False, first_line(error)))
    return made


def _show_emulated(screen: Console, section: _Section) -> None:
    wide = screen.width >= output.WIDE
    error = output.error_column(wide)
    made = output.table("op", "case", "kernel", error, title="TPU kernels, emulated on this host", right=(error,))
    for row in section.rows:
        output.add_row(made, row.op, row.case, row.implementation, _figures(row, wide))
    screen.print(made)


def _lower(clock: _Clock, tell: Tell) -> _Section:
    """Kernels of chips that are not here, lowered: all that happens before the chip's own compiler."""
    from capibara import hardware
    from capibara.compile import lower_for
    from capibara.compile.kernels import implementation_program
    from capibara.kernels.core import context
    from capibara.kernels.core.op import registry

    chips: tuple[tuple[str, str, Any], ...] = (("tpu", "tpu_v4", "tpu"), ("gpu", "h200", "cuda"))
    groups: list[list[tuple[Op, Case, Implementation, str, Any]]] = []
    for op in registry().values():
        for tag, name, platform in chips:
            kind = hardware.chip(name).device_kinds[0]
            for impl in op.implementations.values():
                if impl.kernel and tag in impl.platforms:
                    cases = [case for case in op.cases if tag in case.tags]
                    with context.target(tag, kind) as target:
                        calls = [op.call(*case.args(), target=target, **dict(case.params)) for case in cases]
                        kept = [c for c, call in zip(cases, calls, strict=True) if impl.refusal(call) is None]
                    groups.append([(op, case, impl, kind, platform) for case in kept])
    made = _Section(LOWERED)
    items = list(_in_turns(groups))
    for index, (op, case, impl, kind, platform) in enumerate(items):
        if index and not clock.within(LOWERED):
            made.leave(FOR_TIME, len(items) - index)
            break
        tell(index, len(items), f"{op.name} {case.name} for {kind}")
        fn, args = implementation_program(op, case, impl.name, None, kind)
        result = lower_for(fn, args, platform)
        note = f"for {kind}" if result.ok else f"it does not lower for {kind}: {result.error}"
        made.rows.append(_Row(LOWERED, op.name, case.name, impl.name, result.ok, note))
    return made


def _show_lowered(screen: Console, section: _Section) -> None:
    counts: dict[tuple[str, str], list[int]] = {}
    for row in section.rows:
        count = counts.setdefault((row.op, row.implementation), [0, 0])
        count[0] += row.ok
        count[1] += 1
    made = output.table("op", "kernel", "lowers", title="Kernels lowered for chips that are not here")
    for (op, implementation), (good, total) in counts.items():
        output.add_row(made, op, implementation, f"{good} of {total} cases")
    screen.print(made)


def _in_turns(groups: Sequence[Sequence[Any]]) -> Iterator[Any]:
    """The first of each group, then the second of each, so that a tour cut short has seen every op."""
    for index in range(max(map(len, groups), default=0)):
        for group in groups:
            if index < len(group):
                yield group[index]


def _show_end(screen: Console, clock: _Clock, sections: list[_Section], wrong: list[str]) -> None:
    from capibara.kernels.core.op import registry

    for text in wrong:
        screen.print(f"WRONG: {text}", markup=False)
    verdict = "all match" if not wrong else f"{len(wrong)} do NOT match"
    seen = {row.op for row in sections[0].rows}
    ops = registry()
    screen.print(
        f"{len(seen)} of {len(ops)} ops, {sum(len(one.rows) for one in sections)} checks in {clock.elapsed:.0f} s: "
        f"{verdict}.",
        markup=False,
    )
    if missing := [name for name in ops if name not in seen]:
        screen.print(f"Not run: {', '.join(missing)}.", markup=False)
    titles = {OPS: "more cases of the ops", EMULATED: "emulated kernels", LOWERED: "lowered kernels"}
    for section in sections:
        if section.left:
            counts = ", ".join(f"{count} for {reason}" for reason, count in section.left.items())
            screen.print(f"Left out, {titles[section.name]}: {counts}.", markup=False)
    _show_next(screen)


def _show_next(screen: Console) -> None:
    lines: list[tuple[str, str]] = [
        ("capibara tour --seconds 600", "more cases of each op, all TPU kernels emulated"),
        ("capibara kernels list", "which implementation takes how many cases here"),
        (
            "capibara kernels explain gemm bf16[4096,4096] bf16[4096,4096] --on v4",
            "what would run on another chip, and why",
        ),
        ("capibara kernels bench gemm", "speed beside XLA, measured in the same run"),
        ("capibara kernels tune gemm", "measure the candidates on this chip and keep the fastest"),
        ("capibara kernels compile --for v4-32", "the TPU compiler's verdict; needs libtpu, no TPU"),
    ]
    screen.print("\nNext:", markup=False)
    for command, meaning in lines:
        screen.print(f"  {meaning}:\n    {command}", markup=False, soft_wrap=True)
