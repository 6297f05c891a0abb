"""`capibara tour`: what is attached, every op against its reference, and kernels without their chips."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from capibara.cli import output

if TYPE_CHECKING:
    from rich.console import Console

    from capibara.kernels.op import Case, Implementation, Op

# One call of a case on a host CPU; larger ones are for `capibara kernels bench`.
HOST_CALL_SECONDS = 0.03
# An emulated kernel walks its grid in Python.
EMULATED_FLOPS = 3e7
EMULATED_CASES = 3
SAMPLES = 3


class _Clock:
    """The tour's time, shared out: a section goes on until its part of the whole is over."""

    def __init__(self, seconds: float) -> None:
        self._start, self._seconds = time.perf_counter(), seconds

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self._start

    def within(self, part: float) -> bool:
        return self.elapsed < part * self._seconds


class _Section(NamedTuple):
    done: int
    wrong: list[str]
    left: int


def tour(
    seconds: Annotated[float, typer.Option(min=1, help="Roughly how long it may take.")] = 50.0,
) -> None:
    """What is attached, every op against its reference, and the TPU kernels emulated and lowered."""
    clock = _Clock(seconds)
    screen = output.console()
    _show_machine(screen)
    sections = [_run_ops(screen, clock), _emulate(screen, clock), _lower(screen, clock)]
    wrong = [text for section in sections for text in section.wrong]
    left = sum(section.left for section in sections)
    done = sum(section.done for section in sections)
    for text in wrong:
        screen.print(f"WRONG: {text}", markup=False)
    verdict = "all match" if not wrong else f"{len(wrong)} do NOT match"
    rest = f"; {left} left out for time, size or number of devices" if left else ""
    screen.print(f"{done} checks in {clock.elapsed:.0f} s: {verdict}{rest}.\n", markup=False)
    _show_next(screen)
    if wrong:
        raise typer.Exit(1)


def _show_machine(screen: Console) -> None:
    from capibara import hardware
    from capibara.compile import tpu_compiler
    from capibara.kernels.bench import versions
    from capibara.kernels.op import registry

    screen.print(f"Attached: {hardware.summary()}", markup=False)
    screen.print("Versions: " + ", ".join(f"{k} {v}" for k, v in versions().items()), markup=False)
    screen.print(f"TPU compiler: {tpu_compiler()}", markup=False, soft_wrap=True)
    families: dict[str, list[str]] = {}
    for op in registry().values():
        families.setdefault(op.family, []).append(f"{op.name} ({', '.join(op.implementations)})")
    for family, ops in families.items():
        screen.print(f"{family}: {'; '.join(ops)}", markup=False, soft_wrap=True)


def _run_ops(screen: Console, clock: _Clock) -> _Section:
    """Each op's cases by dispatch's own choice, against the reference and the roofline."""
    from capibara.kernels import bench
    from capibara.kernels.op import registry
    from capibara.kernels.timing import format_seconds

    todo, left = [], 0
    for op in registry().values():
        if op.mesh_axes is not None:  # it takes several devices
            left += len(op.cases)
            continue
        kept, skipped = bench.affordable(op, op.cases, HOST_CALL_SECONDS)
        left += len(skipped)
        todo.append([(op, case) for case in kept])
    right = ("error / tolerance", "time", "reaches", "limit", "of limit")
    made = output.table("op / case", "runs on", *right, "why", title="Every op against its reference", right=right)
    wrong: list[str] = []
    why: dict[str, int] = {}
    done = 0
    items = list(_in_turns(todo))
    with output.progress() as bar:
        task = bar.add_task("", total=len(items))
        for index, (op, case) in enumerate(items):
            # Half of the time at most: the rest is for the kernels that are not for this chip.
            if index and not clock.within(0.5):
                left += len(items) - index
                break
            bar.update(task, description=f"{op.name} {case.name}", completed=index)
            (row,) = bench.bench(op, [case], (), samples=SAMPLES)
            verdict, timing = row.ours.check, row.ours.timing
            assert verdict is not None  # bench checks what it times
            assert timing is not None
            done += 1
            if not verdict.ok:
                wrong.append(f"{op.name} {case.name} on {row.ours.name}: {verdict.why}")
            number = why.setdefault(row.why, len(why) + 1)
            output.add_row(
                made,
                f"{op.name} {case.name}",
                row.ours.name,
                f"{verdict.error:.1e} / {verdict.tolerance:.1e}" + ("" if verdict.ok else " WRONG"),
                format_seconds(timing.seconds) + ("*" if timing.launch_bound else ""),
                output.rate(row.cost.flops / timing.seconds),
                output.MISSING if row.limit_seconds is None else format_seconds(row.limit_seconds),
                output.percent(row.fraction(row.ours)),
                f"({number})",
            )
    screen.print(made)
    for text, number in why.items():
        screen.print(f"({number}) {text}", markup=False)
    screen.print(f"limit: {_limit_source()}; * is bound by the launch.\n", markup=False)
    return _Section(done, wrong, left)


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


def _emulate(screen: Console, clock: _Clock) -> _Section:
    """TPU kernels on this host, with the chip's memories emulated: they start as NaN and have hard bounds."""
    import jax

    from capibara.kernels import context
    from capibara.kernels.check import call_of, check
    from capibara.kernels.op import registry
    from capibara.kernels.tuning import failures, first_line

    host = jax.devices("cpu")[0]
    todo: list[list[tuple[Op, Case, Implementation]]] = []
    with jax.default_device(host), context.target("cpu"), context.interpret("machine"):
        for op in registry().values():
            for impl in op.implementations.values():
                if impl.kernel and "tpu" in impl.platforms and op.mesh_axes is None:
                    calls = [(case, call_of(op, case.args(), case.params)) for case in _hostile(op)]
                    taken = [case for case, call in calls if impl.refusal(call) is None]
                    todo.append([(op, case, impl) for case in taken[:EMULATED_CASES]])
        made = output.table(
            "op / case", "kernel", "error / tolerance", title="TPU kernels, emulated on this host",
            right=("error / tolerance",),
        )  # fmt: skip
        wrong: list[str] = []
        done = left = 0
        items = list(_in_turns(todo))
        with output.progress() as bar:
            task = bar.add_task("", total=len(items))
            for index, (op, case, impl) in enumerate(items):
                if index and not clock.within(0.75):
                    left = len(items) - index
                    break
                bar.update(task, description=f"{op.name} {case.name}, emulated", completed=index)
                done += 1
                try:
                    verdict = check(op, case.arrays(), case.params, impl.name)
                except failures() as error:
                    wrong.append(f"{op.name} {case.name} on {impl.name}, emulated: {first_line(error)}")
                    output.add_row(made, f"{op.name} {case.name}", impl.name, "FAILS")
                    continue
                if not verdict.ok:
                    wrong.append(f"{op.name} {case.name} on {impl.name}, emulated: {verdict.why}")
                mark = "" if verdict.ok else " WRONG"
                figures = f"{verdict.error:.1e} / {verdict.tolerance:.1e}{mark}"
                output.add_row(made, f"{op.name} {case.name}", impl.name, figures)
    screen.print(made)
    return _Section(done, wrong, left)


def _hostile(op: Op) -> list[Case]:
    """Cases meant to break a kernel, small enough to emulate."""
    from capibara.kernels.check import call_of

    found = [case for case in op.cases if "test" in case.tags]
    work = {case.name: op.cost(call_of(op, case.args(), case.params)).flops for case in found}
    return [case for case in found if work[case.name] <= EMULATED_FLOPS]


def _lower(screen: Console, clock: _Clock) -> _Section:
    """Kernels of chips that are not here, lowered: all that happens before the chip's own compiler."""
    from capibara import hardware
    from capibara.compile import lower_for
    from capibara.compile.kernels import implementation_program
    from capibara.kernels import context
    from capibara.kernels.op import registry

    chips: tuple[tuple[str, str, Any], ...] = (("tpu", "tpu_v4", "tpu"), ("gpu", "h200", "cuda"))
    todo: list[list[tuple[Op, Case, Implementation, str, Any]]] = []
    for op in registry().values():
        for tag, name, platform in chips:
            kind = hardware.chip(name).device_kinds[0]
            for impl in op.implementations.values():
                if impl.kernel and tag in impl.platforms:
                    cases = [case for case in op.cases if tag in case.tags]
                    with context.target(tag, kind) as target:
                        calls = [op.call(*case.args(), target=target, **dict(case.params)) for case in cases]
                        kept = [c for c, call in zip(cases, calls, strict=True) if impl.refusal(call) is None]
                    todo.append([(op, case, impl, kind, platform) for case in kept])
    counts: dict[tuple[str, str, str], list[int]] = {}
    wrong: list[str] = []
    done = left = 0
    items = list(_in_turns(todo))
    with output.progress() as bar:
        task = bar.add_task("", total=len(items))
        for index, (op, case, impl, kind, platform) in enumerate(items):
            if index and not clock.within(1.0):
                left = len(items) - index
                break
            bar.update(task, description=f"{op.name} {case.name} for {kind}", completed=index)
            fn, args = implementation_program(op, case, impl.name, None, kind)
            result = lower_for(fn, args, platform)
            done += 1
            count = counts.setdefault((op.name, impl.name, kind), [0, 0])
            count[0] += result.ok
            count[1] += 1
            if not result.ok:
                wrong.append(f"{op.name} {case.name} does not lower for {kind}: {result.error}")
    made = output.table("op", "kernel", "for", "lowers", title="Kernels lowered for chips that are not here")
    for (op_name, impl_name, kind), (good, total) in counts.items():
        output.add_row(made, op_name, impl_name, kind, f"{good} of {total} cases")
    screen.print(made)
    return _Section(done, wrong, left)


def _in_turns(groups: Sequence[Sequence[Any]]) -> Iterator[Any]:
    """The first of each group, then the second of each, so that a tour cut short has seen every op."""
    for index in range(max(map(len, groups), default=0)):
        for group in groups:
            if index < len(group):
                yield group[index]


def _show_next(screen: Console) -> None:
    lines: list[tuple[str, str]] = [
        ("capibara kernels list", "which implementation takes how many cases here"),
        (
            "capibara kernels explain gemm bf16[4096,4096] bf16[4096,4096] --on v4",
            "what would run on another chip, and why",
        ),
        ("capibara kernels bench gemm", "speed beside XLA, measured in the same run"),
        ("capibara kernels tune gemm", "measure the candidates on this chip and keep the fastest"),
        ("capibara kernels compile --for v4-32", "the TPU compiler's verdict; needs libtpu, no TPU"),
    ]
    screen.print("Next:", markup=False)
    for command, meaning in lines:
        screen.print(f"  {meaning}:\n    {command}", markup=False, soft_wrap=True)
