"""How a command ends when it does not end well: the exit codes, one line for a mistake, and its form under --json."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import typer
from typer.core import TyperGroup

from capibara.cli import output
from capibara.errors import CapibaraError, parts_of


class Code(IntEnum):
    """What a command's exit code says."""

    OK = 0
    FAILED = 1
    BAD_INPUT = 2
    DOES_NOT_FIT = 3
    ONLY_LOWERED = 4
    PREEMPTED = 42
    HUNG = 43
    INTERRUPTED = 130  # by the shells' custom: 128 and the signal's number


CODES = (
    "Exit codes: 0 all is well; 1 it failed: a wrong result, a program that does not compile; 2 bad input; 3 it does "
    "not fit; 4 no answer: lowered only, for want of a compiler, or not comparable; 42 preempted and saved; 43 "
    "no progress, its stacks written down. With --json a failure is JSON as well, under the key error."
)


def error(code: Code, message: str, *, kind: str | None = None, **parts: str | None) -> dict[str, Any]:
    """A failure as commands print it under --json: `rule`, `got` and `fix` are null where nobody knows them."""
    named = {"rule": None, "got": None, "fix": None, **parts}
    found = {"kind": kind or code.name.lower(), "message": message, **named, "exit_code": int(code)}
    return {"error": found}


def json_asked(arguments: Sequence[str]) -> bool:
    """Whether --json is among the options, which end at `--`. Asked before they are read: reading them may fail."""
    words = list(arguments)
    return "--json" in (words[: words.index("--")] if "--" in words else words)


# Of click, which typer imports in some versions and contains in others.
_ClickException: type[Any] = next(one for one in typer.BadParameter.__mro__ if one.__name__ == "ClickException")


class Application(TyperGroup):
    """Shows a mistake as one line on standard error, or as JSON on standard output; `--debug` shows where it arose."""

    as_json = False

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        self.as_json = standalone_mode and json_asked(sys.argv[1:] if args is None else args)
        alone = standalone_mode and not self.as_json  # alone, it would print usage errors and exit by itself
        try:
            code = super().main(args, prog_name, complete_var, alone, windows_expand_args, **extra)
        except _ClickException as mistake:
            if not self.as_json:
                raise
            command = getattr(getattr(mistake, "ctx", None), "command_path", "capibara")
            output.show_json(error(Code.BAD_INPUT, mistake.format_message(), kind="usage", fix=f"see {command} --help"))
            code = Code.BAD_INPUT
        except Exception as unforeseen:
            if self.as_json:
                kind = "bad_input" if isinstance(unforeseen, ValueError) else "internal"
                text = f"{type(unforeseen).__name__}: {unforeseen}"
                output.show_json(error(Code.FAILED, text, kind=kind, **parts_of(unforeseen)))
            raise  # Python shows the traceback on standard error, and exits with 1
        if not self.as_json:
            return code
        if code == Code.INTERRUPTED:
            output.show_json(error(Code.INTERRUPTED, "Interrupted."))
        sys.exit(code)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (ValueError, CapibaraError) as mistake:
            if ctx.params.get("debug"):
                raise
            code = Code.BAD_INPUT if isinstance(mistake, ValueError) else Code.FAILED
            text = " ".join(str(mistake).split())
            if self.as_json:
                output.show_json(error(code, text, **parts_of(mistake)))
            else:
                typer.echo(f"capibara: {text}", err=True)
            raise typer.Exit(code) from mistake
        except ImportError as broken:
            from capibara.jax import diagnostics  # it answers where jax does not load

            found = diagnostics.check_installation()
            if found.jax_native_available or ctx.params.get("debug"):
                raise
            text = " ".join(str(found.error_message).split())
            fix = found.missing[0].command if found.missing else "reinstall jax and jaxlib"
            if self.as_json:
                output.show_json(error(Code.FAILED, text, kind="installation", fix=fix))
            else:
                typer.echo(f"capibara: {text}. Fix: {fix}", err=True)
            raise typer.Exit(Code.FAILED) from broken
