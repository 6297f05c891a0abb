"""`capibara kernels bench`: what dispatch takes beside its peers, in one run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from capibara.cli import failures, operands, output
from capibara.cli.failures import Code
from capibara.cli.kernels import lattice
from capibara.cli.kernels.options import CaseNames, Imports, Json, OpName, cases_of, ops_of
from capibara.errors import rule_error, unknown_name

if TYPE_CHECKING:
    from rich.console import Console

    from capibara.kernels.core.op import Op
    from capibara.kernels.core.spec import Case
    from capibara.kernels.lab.bench import Measured, Row

# A host is slow and shared: fewer samples there, so that a bench of every op stays within minutes.
HOST_SAMPLES = 5


def bench(
    op: OpName = None,
    case: CaseNames = None,
    against: Annotated[
        str, typer.Option(metavar="NAMES", help="Implementations or peers of the op, separated by commas.")
    ] = "xla",
    grad: Annotated[bool, typer.Option("--grad", help="Time the forward and backward pass together.")] = False,
    samples: Annotated[int | None, typer.Option(min=1, help="Samples of each program.")] = None,
    models: Annotated[
        bool, typer.Option("--models", help="Every op at drawn shapes of published models, beside all its peers.")
    ] = False,
    minutes: Annotated[float, typer.Option(min=0.1, help="With --models: how long the run may take.")] = 15.0,
    seed: Annotated[int, typer.Option(min=0, help="With --models: other seeds draw other models and sizes.")] = 0,
    family: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="With --models: only this family; may be repeated.")
    ] = None,
    skip: Annotated[
        int, typer.Option(min=0, help="With --models: begin after so many draws, where a run before ended.")
    ] = 0,
    results: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --models: add the rows to this JSON file.")
    ] = None,
    commit: Annotated[
        str | None, typer.Option(help="With --models: which source this is, where it is no git checkout.")
    ] = None,
    modules: Imports = None,
    json: Json = False,
) -> None:
    """Time what dispatch takes beside its peers, and hold both against the reference and the roofline."""
    if models:
        if op is not None or case:
            raise rule_error(
                "--models draws the cases of every op", f"{op or '--case'}", "leave it out, or name a --family"
            )
        lattice.bench_models(minutes, seed, family, skip, results, commit, json)
        return
    from capibara import hardware
    from capibara.kernels.lab import bench as benches
    from capibara.kernels.lab import timing

    chosen, peers = ops_of(op), operands.names(against)
    known = [name for one in chosen for name in benches.peer_names(one)]
    for name in peers:
        if name not in known:
            raise unknown_name("implementation or peer", name, dict.fromkeys(known))
    on_host = hardware.default().platform == "cpu"
    rounds = samples or (HOST_SAMPLES if on_host else timing.SAMPLES)

    rows: list[Row] = []
    left: list[tuple[Op, Case]] = []
    with output.progress(quiet=json) as bar:
        for one in chosen:
            kept = cases_of(one, case, "bench")
            if not case:
                kept, skipped = benches.affordable(one, kept)
                left += [(one, skip) for skip in skipped]
            task = bar.add_task(one.name, total=len(kept))
            mine = [name for name in peers if name in benches.peer_names(one)]
            for item in kept:
                bar.update(task, description=f"{one.name} {item.name}")
                rows += benches.bench(one, [item], mine, grad=grad, samples=rounds)
                bar.advance(task)
    wrong = [f"{row.op} {row.case}" for row in rows if not row.ok]
    problem = failures.error(Code.FAILED, f"Wrong results: {', '.join(wrong)}.") if wrong else {}
    if json:
        output.show_json(
            {
                **benches.document(rows, command=output.command_line()),
                "left_out": [{"op": one.name, "case": skip.name} for one, skip in left],
                **problem,
            }
        )
    else:
        screen = output.console()
        show(screen, rows, peers)
        _show_left_out(screen, left)
    if problem:
        raise typer.Exit(Code.FAILED)


def show(screen: Console, rows: Sequence[Row], peers: Sequence[str]) -> None:
    """The table of rows; below it why each was chosen, and what is missing or wrong."""
    from capibara import hardware
    from capibara.kernels.lab.timing import format_seconds

    wide = screen.width >= output.WIDE
    error = output.error_column(wide)
    columns = ["time", "±", "rate", "GB/s", "of limit", error] if wide else ["time", error]
    ratios = [f"vs {name}" for name in peers]
    direction = rows[0].direction if rows else "forward"
    made = output.table(
        "op / case", "runs on", *columns, *ratios, "why",
        title=f"{hardware.summary()}, {direction}", right=(*columns, *ratios), whole=(*columns, *ratios),
    )  # fmt: skip
    why: dict[str, int] = {}
    missing: dict[str, list[str]] = {}
    wrong: list[str] = []
    for row in rows:
        ours = row.ours
        assert ours.timing is not None  # a choice of dispatch that does not run raises
        rates = (
            f"{50 * ours.timing.spread:.1f} %",
            output.rate(row.cost.flops / ours.timing.seconds),
            output.figure(row.gigabytes(ours)),
            output.percent(row.fraction(ours)),
        )
        output.add_row(
            made,
            f"{row.op} {row.case}",
            ours.name,
            format_seconds(ours.timing.seconds) + ("*" if ours.timing.launch_bound else ""),
            *(rates if wide else ()),
            _verdict(ours, wide),
            *(_ratio(row, name) for name in peers),
            f"({why.setdefault(row.why, len(why) + 1)})",
        )
        for one in (ours, *row.peers):
            if one.check is not None and not one.check.ok:
                wrong.append(f"WRONG: {row.op} {row.case} on {one.name}: {one.check.why}")
            elif one.timing is None and one.note:
                missing.setdefault(f"no {one.name}: {one.note}", []).append(f"{row.op} {row.case}")
    screen.print(made)
    notes = [f"({number}) {text}" for text, number in why.items()]
    notes += wrong
    notes += [f"{text} ({', '.join(cases)})" for text, cases in missing.items()]
    if any(row.ours.timing is not None and row.ours.timing.launch_bound for row in rows):
        notes.append("* the launch takes longer than the kernel: the time is the host's.")
    if not wide:
        notes.append(f"{output.ERROR_MEANS}; rates and their limits are in wider tables and in --json.")
    notes.append("vs: how many times as fast as that peer, and its time, in the same run; = is the same program.")
    for note in notes:
        screen.print(note, markup=False)


def _verdict(one: Measured, wide: bool) -> str:
    if one.check is None:
        return output.MISSING
    return output.error(one.check.error, one.check.tolerance, ok=one.check.ok, wide=wide)


def _ratio(row: Row, name: str) -> str:
    from capibara.kernels.lab.timing import format_seconds

    peer = next((peer for peer in row.peers if peer.name == name), None)
    ratio = None if peer is None else row.speedup(peer)
    if peer is None or peer.timing is None or ratio is None:
        return output.MISSING
    return "=" if name == row.ours.name else f"{ratio:.2f}x {format_seconds(peer.timing.seconds)}"


def _show_left_out(screen: Console, left: Sequence[tuple[Op, Case]]) -> None:
    if not left:
        return
    by_op: dict[str, list[str]] = {}
    for op, case in left:
        by_op.setdefault(op.name, []).append(case.name)
    for name, cases in by_op.items():
        screen.print(f"Left out as too large for this CPU: {name}: {', '.join(cases)}.", markup=False)
    first, names = next(iter(by_op.items()))
    screen.print(
        f"They run on an accelerator, or here with: capibara kernels bench {first} --case {names[0]}",
        markup=False,
    )
