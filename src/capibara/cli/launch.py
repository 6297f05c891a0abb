"""`capibara launch`: the same command on many workers."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from capibara.cli import failures, output
from capibara.cli.failures import Code
from capibara.errors import rule_error


def launch(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="What each worker runs.")],
    engine: Annotated[
        str, typer.Option(metavar="ENGINE", help="processes (of this machine), ray; sky, jobset (they write a file).")
    ],
    processes: Annotated[int | None, typer.Option(metavar="N", help="Workers; a TPU slice has its own number.")] = None,
    max_restarts: Annotated[
        int | None, typer.Option(metavar="N", help="Of all workers, when one failed; 3 by default.")
    ] = None,
    grace: Annotated[
        int | None, typer.Option(metavar="SECONDS", help="To save in, once told to stop; 300 by default.")
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A variable for every worker; may be repeated.")
    ] = None,
    address: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="ray: a cluster (auto, host:port); else one starts here.")
    ] = None,
    workdir: Annotated[
        str | None, typer.Option(metavar="DIR", help="ray: the workers' folder; this one by default.")
    ] = None,
    cpus: Annotated[float | None, typer.Option(metavar="N", help="ray: of each worker; 1 by default.")] = None,
    gpus: Annotated[float | None, typer.Option(metavar="N", help="ray: of each worker.")] = None,
    tpus: Annotated[float | None, typer.Option(metavar="N", help="ray: TPU chips of each worker.")] = None,
    on: Annotated[
        str | None, typer.Option(metavar="SLICE", help="sky, jobset: a TPU slice (v4-64); sky: or GPUs (H100:8).")
    ] = None,
    slices: Annotated[int | None, typer.Option(metavar="N", help="jobset: how many slices.")] = None,
    image: Annotated[str | None, typer.Option(metavar="IMAGE", help="jobset: the container's image.")] = None,
    setup: Annotated[
        str | None, typer.Option(metavar="LINE", help="sky: what installs the command; pip on this folder by default.")
    ] = None,
    spot: Annotated[bool, typer.Option("--spot", help="sky, jobset: machines that may be taken away.")] = False,
    bucket: Annotated[
        str | None, typer.Option(metavar="gs://NAME", help="sky, jobset: what every worker has as /bucket.")
    ] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="sky, jobset: of the run; capibara.")] = None,
    out: Annotated[str | None, typer.Option(metavar="FILE", help="sky, jobset: the file; NAME.ENGINE.yaml.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON; the workers' lines go to standard error.")] = False,
) -> None:
    """Run a command on many workers: they find each other by jax.distributed, and are restarted together.

    For example: capibara launch --engine ray --processes 2 -- capibara train dev
    """
    from capibara.fleet.launch import launch as run

    launched = run(
        engine,
        command,
        output=sys.stderr if json else sys.stdout,
        errors=sys.stderr,
        processes=processes,
        max_restarts=max_restarts,
        grace_seconds=grace,
        environment=_variables(env),
        address=address,
        workdir=workdir,
        cpus=cpus,
        gpus=gpus,
        tpus=tpus,
        on=on,
        slices=slices,
        image=image,
        setup=setup,
        spot=spot or None,
        bucket=bucket,
        name=name,
        out=out,
    )
    code = launched.exit_code
    if json:
        document: dict[str, Any] = {
            "engine": launched.engine,
            "processes": launched.processes,
            "starts": launched.starts,
            "file": None if launched.file is None else str(launched.file),
            "next": launched.next,
        }
        if code:
            text = f"the command ended with exit code {code}"
            failure = failures.error(Code(code) if code in set(Code) else Code.FAILED, text)
            failure["error"]["exit_code"] = code
            document |= failure
        output.show_json(document)
    elif launched.file is not None:
        typer.echo(f"{launched.file}: {launched.processes} processes. Now run: {launched.next}")
    if code:
        raise typer.Exit(code)


def _variables(settings: list[str] | None) -> dict[str, str] | None:
    if not settings:
        return None
    variables = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise rule_error("--env is NAME=VALUE", repr(setting), f"write --env {name}=VALUE")
        variables[name] = value
    return variables
