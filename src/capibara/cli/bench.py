"""`capibara bench serve`: a server under load, as clients see it."""

from __future__ import annotations

import asyncio
import contextlib
import json as json_module
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from capibara.cli import output
from capibara.errors import CapibaraError, rule_error

app = typer.Typer(no_args_is_help=True, help="Measure what runs.")


@app.callback()
def bench() -> None:
    """Measure what runs."""


@app.command(name="serve")
def serve(
    server: Annotated[
        str, typer.Argument(metavar="ADDRESS|MODEL", help="http://host:port, or a model to serve for the time of it.")
    ],
    options: Annotated[
        list[str] | None, typer.Argument(metavar="-- OPTIONS", help="Of `capibara serve`, where a model is named.")
    ] = None,
    requests: Annotated[
        int, typer.Option(min=1, metavar="N", help="In all; beyond 1,000 the trace starts anew.")
    ] = 200,
    rate: Annotated[
        float | None, typer.Option(metavar="R", help="Requests a second, by chance: a Poisson process. By default 4.")
    ] = None,
    users: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Instead: so many that ask again after each answer.")
    ] = None,
    target_latency_ms: Annotated[
        float | None, typer.Option(min=0.0, metavar="X", help="Mean gap between the tokens of a good answer.")
    ] = None,
    target_first_ms: Annotated[
        float | None, typer.Option(min=0.0, metavar="X", help="Time to the first token of a good answer.")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Of several that are served; the first.")] = None,
    context: Annotated[
        int | None, typer.Option(min=4, metavar="N", help="To scale the trace to; the model's own, where it tells it.")
    ] = None,
    vocab: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Prompts are of ids below it; the model's own, else 1000.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(metavar="K", help="Else $CAPIBARA_API_KEY.")] = None,
    seed: Annotated[int, typer.Option(help="Of arrivals and prompts.")] = 0,
    timeout_s: Annotated[float, typer.Option(min=0.1, metavar="S", help="For one answer.")] = 600.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Ask a server for completions of a fixed trace of lengths, and tell what its clients saw.

    Any server with OpenAI's interface will do. For example: capibara bench serve http://127.0.0.1:8000 --rate 8
    """
    from capibara.serve.installed import check_installed

    check_installed("capibara bench serve")
    from capibara.serve.load.client import Address
    from capibara.serve.load.report import chart, summary
    from capibara.serve.load.run import Load, find_target, run_load

    load = Load(requests, 4.0 if rate is None and users is None else rate, users, seed, timeout_s)
    key = api_key or os.environ.get("CAPIBARA_API_KEY") or None

    async def measured(address: str) -> tuple[Any, list[Any], float]:
        target = await find_target(Address.parse(address, key), model, context, vocab)
        with output.progress(quiet=json) as bar:
            task = bar.add_task(f"{target.model} at {address}", total=requests)
            records, began = await run_load(target, load, lambda done: bar.update(task, completed=done))
        return target, records, began

    with _address(server, options or []) as address:
        target, records, began = asyncio.run(measured(address))
    figures = {
        "model": target.model,
        "address": address,
        "context": target.context,
        "tokens_counted_by": "the server" if target.counts_tokens else "events",
        "rate": load.rate,
        "users": load.users,
        "seed": seed,
        **summary(records, began, target_latency_ms=target_latency_ms, target_first_ms=target_first_ms),
    }
    failed = len(records) == sum(figures["failed"].values())
    if json:
        output.show_json({**figures, "command": output.command_line()})
    else:
        _show(figures)
        output.show_page(lambda color, unicode: chart(records, began, unicode=unicode))
    if failed:
        raise CapibaraError(f"No request was answered: {next(record.error for record in records)}")


def _show(figures: dict[str, Any]) -> None:
    how = f"{figures['rate']:g} requests/s by chance" if figures["rate"] else f"{figures['users']} users"
    typer.echo(f"{figures['model']} at {figures['address']}: {figures['requests']} requests, {how}")
    table = output.table(
        "", "mean", "p50", "p90", "p95", "p99", "max", right=("mean", "p50", "p90", "p95", "p99", "max")
    )
    for name, title in (
        ("first_token_ms", "first token, ms"),
        ("inter_token_ms", "between tokens, ms"),
        ("between_events_ms", "between events, ms"),
        ("whole_answer_ms", "whole answer, ms"),
        ("prompt_tokens", "prompt tokens"),
        ("output_tokens", "output tokens"),
    ):
        spread = figures[name] or {}
        columns = ("mean", "p50", "p90", "p95", "p99", "max")
        output.add_row(table, title, *(output.figure(spread.get(column)) for column in columns))
    output.console().print(table)
    failed = ", ".join(f"{count} with {status}" for status, count in figures["failed"].items())
    typer.echo(
        f"{figures['answered']} answered in {figures['seconds']:.3g} s"
        + (f" (failed: {failed})" if failed else "")
        + ": "
        f"{output.figure(figures['requests_per_second'])} requests/s, "
        f"{output.figure(figures['prompt_tokens_per_second'])} prompt and "
        f"{output.figure(figures['output_tokens_per_second'])} output tokens/s, "
        f"at most {figures['most_at_a_time']} at a time"
    )
    if goodput := figures.get("goodput"):
        typer.echo(
            f"goodput: {output.percent(goodput['share'])} of the requests, "
            f"{output.figure(goodput['requests_per_second'])} requests/s, "
            f"{output.figure(goodput['output_tokens_per_second'])} output tokens/s within the target"
        )


@contextlib.contextmanager
def _address(server: str, options: list[str]) -> Iterator[str]:
    """The server that was named; or one of this model, for as long as it takes."""
    if server.startswith(("http://", "https://")):
        if options:
            raise rule_error("Options after -- are of the server that is started", " ".join(options), "name a model")
        yield server
        return
    command = [sys.executable, "-m", "capibara", "serve", server, "--port", "0", "--json", "--log-level", "warning"]
    command += options
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.rstrip().endswith("}"):  # an error is a document of many lines, where it is one at all
            rest = line + process.stdout.read()
            said = json_module.loads(rest)["error"]["message"] if rest else "see above"
            raise CapibaraError(f"capibara serve {server} ended with code {process.wait()}: {said}")
        yield json_module.loads(line)["address"]
    finally:
        process.terminate()
        process.wait()
