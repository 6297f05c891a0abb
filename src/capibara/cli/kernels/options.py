"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from capibara.kernels.core.op import Op
    from capibara.kernels.core.spec import Case

OpName = Annotated[str | None, typer.Argument(metavar="[OP]", help="An op; all of them by default.")]
CaseNames = Annotated[
    list[str] | None, typer.Option("--case", metavar="NAME", help="One of the op's cases; may be repeated.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
On = Annotated[
    str | None,
    typer.Option("--on", metavar="CHIP", help="Decide as on this chip: v4, v5e, h200, cpu, ... Nothing runs."),
]


def _import(modules: list[str] | None) -> list[str]:
    from capibara.kernels.core import outside

    # What a user's module prints is not the command's answer, and would break --json.
    with redirect_stdout(sys.stderr):
        for name in modules or []:
            outside.import_ops(name)
    return modules or []


Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="MODULE",
        help="A module or FILE.py that registers ops of your own; may be repeated.",
        callback=_import,
    ),
]


def ops_of(name: str | None) -> list[Op]:
    from capibara.kernels.core import op as ops

    return [ops.lookup(name)] if name is not None else list(ops.registry().values())


def cases_of(op: Op, wanted: list[str] | None, tag: str) -> list[Case]:
    """The cases asked for by name, else those with the tag."""
    if wanted:
        return [op.case(name) for name in wanted]
    return [case for case in op.cases if tag in case.tags]


def target_of(on: str | None) -> AbstractContextManager[Any]:
    """The dispatch target that `--on` names; the attached chip without it."""
    from capibara import hardware
    from capibara.kernels.core import context

    if on is None:
        return nullcontext(context.current_target())
    if on.strip().lower() in ("cpu", "host"):  # the chip table would measure it
        return context.target("cpu")
    chip = hardware.chip(on)
    return context.target(chip.platform, chip.device_kinds[0])
