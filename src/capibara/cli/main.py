"""`capibara`: the application, its global options, and how an error is shown."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from capibara._version import __version__
from capibara.cli import kernels, plan, tour
from capibara.errors import CapibaraError


class _Application(TyperGroup):
    """Shows a mistake as one line on standard error and exit code 2; `--debug` shows where it came from."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (ValueError, CapibaraError) as error:
            if ctx.params.get("debug"):
                raise
            typer.echo(f"capibara: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(2) from error


app = typer.Typer(
    name="capibara",
    cls=_Application,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(kernels.app, name="kernels")
app.command(name="plan")(plan.plan)
app.command(name="tour")(tour.tour)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"capibara {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """A JAX toolkit for TPU pods that is written and tested on a GPU or a laptop."""


if __name__ == "__main__":
    app()
