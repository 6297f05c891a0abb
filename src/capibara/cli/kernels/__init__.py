"""`capibara kernels`: what the ops are, which implementation a call takes and why, how fast, and tuning."""

from __future__ import annotations

import typer

from capibara.cli.kernels import bench, compile, explain, list_, tune

app = typer.Typer(no_args_is_help=True, help="The kernels: list, explain, bench, tune and compile them.")
app.command(name="list")(list_.list_)
app.command(name="explain")(explain.explain)
app.command(name="bench")(bench.bench)
app.command(name="tune")(tune.tune)
app.command(name="compile")(compile.compile_)
