"""`capibara`: the application, its commands and its global options."""

from __future__ import annotations

from typing import Annotated

import typer

from capibara._version import __version__
from capibara.cli import (
    bench,
    cost,
    demo,
    doctor,
    generate,
    kernels,
    launch,
    migrate,
    monitor,
    plan,
    profile,
    serve,
    tour,
    train,
)
from capibara.cli.failures import CODES, Application

app = typer.Typer(
    name="capibara",
    cls=Application,
    no_args_is_help=True,
    epilog=CODES,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(kernels.app, name="kernels")
app.add_typer(bench.app, name="bench")
app.command(name="plan")(plan.plan)
app.command(name="cost")(cost.cost)
app.command(name="profile", context_settings={"allow_extra_args": True})(profile.profile)
app.command(name="train")(train.train)
app.command(name="launch")(launch.launch)
app.command(name="generate")(generate.generate)
app.command(name="serve")(serve.serve)
app.command(name="monitor")(monitor.monitor)
app.command(name="migrate")(migrate.migrate)
app.command(name="doctor")(doctor.doctor)
app.command(name="demo")(demo.demo)
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
