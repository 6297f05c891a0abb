"""`capibara monitor`: the accelerators, the machine, and runs, servers and processes, on the terminal or on a page."""

from __future__ import annotations

import shlex
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capibara.cli import output

if TYPE_CHECKING:
    from rich.console import Group

    from capibara.observe.monitor import TpuRealTimeMonitor
    from capibara.observe.notify import Callback


def monitor(
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="[WHAT]...", help="Runs' folders, servers' addresses, processes' numbers."),
    ] = None,
    interval_ms: Annotated[float, typer.Option(min=10, metavar="MS", help="From one sample to the next.")] = 1000.0,
    alert: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A threshold, as memory_usage=0.9; several may be given."),
    ] = None,
    sustain_s: Annotated[
        float, typer.Option(min=0.0, metavar="S", help="How long beyond it before there is an alert.")
    ] = 0.0,
    webhook: Annotated[list[str] | None, typer.Option(metavar="URL", help="Alerts are posted there.")] = None,
    on_alert: Annotated[
        list[str] | None, typer.Option(metavar="COMMAND", help="Run at each alert; it gets JSON on its input.")
    ] = None,
    web: Annotated[bool, typer.Option("--web", help="A page with the figures, and /metrics for Prometheus.")] = False,
    host: Annotated[str, typer.Option(metavar="H", help="Address that the page is at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="P", help="0 takes a free one.")] = 8430,
    token: Annotated[
        str | None,
        typer.Option(metavar="T", envvar="CAPIBARA_MONITOR_TOKEN", help="What viewers of the page have to know."),
    ] = None,
    region: Annotated[str | None, typer.Option(metavar="R", help="Of prices; the first for the chip.")] = None,
    price_kind: Annotated[
        str, typer.Option(metavar="KIND", help="on_demand, spot, committed_1y or committed_3y.")
    ] = "on_demand",
    pricing: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prices of your own (TOML).", exists=True, dir_okay=False)
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="One sample, and end.")] = False,
    json: Annotated[bool, typer.Option("--json", help="A line of JSON a sample.")] = False,
) -> None:
    """Watch accelerators and the host, and training runs, servers or processes, until Ctrl-C.

    For example: capibara monitor runs/dev --alert memory_usage=0.9 --alert since_step=120
    """
    from capibara.errors import rule_error
    from capibara.observe.monitor import TpuRealTimeMonitor
    from capibara.observe.sensors.found import default_sensors

    if web and once:
        raise rule_error("--once shows one sample, and --web goes on", "both", "leave one out")
    watching = TpuRealTimeMonitor(
        interval_ms,
        _thresholds(alert or []),
        sensors=default_sensors(own_process=False),
        watch=what or (),
        callbacks=_callbacks(webhook or [], on_alert or [], log=web),
        sustain_s=sustain_s,
        region=region,
        price_kind=price_kind,
        pricing=pricing,
    )
    if once:
        _once(watching, json)
        return
    ended = _Ended()
    before = {number: signal.signal(number, ended) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        if web:
            _serve(watching, host, port, token, ended, json)
        else:
            _follow(watching, ended, json)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Ended:
    """Whether a signal has come. No event: its lock may be this thread's own when the signal comes, and then nothing
    would ever go on."""

    told = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.told = True


def _thresholds(texts: list[str]) -> dict[str, float]:
    from capibara.errors import rule_error

    thresholds: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            thresholds[name] = float(value)
        except ValueError as error:
            raise rule_error("A threshold is NAME=VALUE", repr(text), "write --alert memory_usage=0.9") from error
    return thresholds


def _callbacks(urls: list[str], commands: list[str], *, log: bool) -> list[Callback]:
    """`log`: on standard error, where nothing else on the terminal shows alerts."""
    from capibara.errors import rule_error
    from capibara.observe.notify import command, log_alerts, webhook

    told: list[Callback] = [log_alerts()] if log else []
    told += [webhook(url) for url in urls]
    for text in commands:
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise rule_error(
                "A command is written as on a shell's line", f"{text!r} ({error})", "close its quotes"
            ) from error
        told.append(command(words))
    return told


def _once(watching: TpuRealTimeMonitor, json: bool) -> None:
    # Work is counted between two samples.
    with watching:
        watching.wait_for_sample(1, 2 * watching.interval_s + 2.0)
        now = watching.get_current_metrics()
    if json:
        output.show_json_line(now)
    else:
        output.console().print(_picture(now))


def _follow(watching: TpuRealTimeMonitor, ended: _Ended, json: bool) -> None:
    from rich.live import Live

    console = output.console()
    with watching:
        seen = 0
        if json or not sys.stdout.isatty():
            while not ended.told:
                count = watching.wait_for_sample(seen, 0.2)
                if count > seen:
                    now = watching.get_current_metrics()
                    if json:
                        output.show_json_line(now)
                        sys.stdout.flush()
                    else:
                        console.print(_picture(now))
                seen = count
            return
        with Live(_picture(watching.get_current_metrics()), console=console, auto_refresh=False) as live:
            while not ended.told:
                seen = watching.wait_for_sample(seen, 0.2)
                live.update(_picture(watching.get_current_metrics()), refresh=True)
                time.sleep(0.2)


def _serve(watching: TpuRealTimeMonitor, host: str, port: int, token: str | None, ended: _Ended, json: bool) -> None:
    from capibara.observe.web.server import MonitorServer

    with MonitorServer(watching, host, port, token) as server, watching:
        if json:
            output.show_json_line({"address": server.address, "metrics": f"{server.address}/metrics"})
        else:
            needs = "; open it with ?token=" if token else ""
            typer.echo(f"capibara: the monitor is at {server.address}{needs}")
        sys.stdout.flush()
        while not ended.told:
            time.sleep(0.2)


_FIGURES = {
    "step": ("step", lambda v: f"{v:,.0f}"),
    "loss": ("loss", lambda v: f"{v:.4f}"),
    "step_time": ("step time", lambda v: f"{v * 1e3:.1f} ms"),
    "tokens_per_second": ("tokens/s", lambda v: f"{v:,.0f}"),
    "mfu": ("MFU", lambda v: f"{v:.1%}"),
    "since_step": ("since the last step", lambda v: f"{v:.1f} s"),
    "goodput": ("goodput", lambda v: f"{v:.1%}"),
    "requests_running": ("requests running", lambda v: f"{v:.0f}"),
    "requests_waiting": ("requests waiting", lambda v: f"{v:.0f}"),
    "kv_cache_usage": ("KV cache", lambda v: f"{v:.1%}"),
    "joules_per_token": ("joules a token", lambda v: f"{v:.3g}"),
    "dollars_per_token": ("dollars a million tokens", lambda v: f"{v * 1e6:.3g}"),
}


def _picture(now: dict[str, Any]) -> Group:
    """A table of devices, one of each run and server, the alerts, and the sensors that are not well."""
    from rich.console import Group
    from rich.text import Text

    def figure(told: dict[str, Any], name: str, form: str) -> str:
        return output.MISSING if told.get(name) is None else format(told[name], form)

    devices = output.table(
        "device", "chip", "busy", "memory", "of", "°C", "W", right=("busy", "memory", "of", "°C", "W")
    )
    runs = output.table("watched", "figure", "value", right=("value",))
    for source, told in now["sources"].items():
        if told["kind"] in ("train", "serve"):
            for name, (words, show) in _FIGURES.items():
                if name in told:
                    output.add_row(runs, source, words, show(told[name]))
            continue
        output.add_row(
            devices,
            source,
            told["chip"] or output.MISSING,
            figure(told, "utilization", ".0%"),
            figure(told, "memory_usage", ".0%"),
            output.size(told.get("memory_total")),
            figure(told, "temperature", ".0f"),
            figure(told, "power", ".0f"),
        )
    parts: list[Any] = [devices]
    if runs.row_count:
        parts.append(runs)
    parts += [Text(f"alert: {alert['text']}", style="bold red") for alert in now["alerts"]]
    for name, sensor in now["sensors"].items():
        if sensor["state"] != "ok" or sensor["text"]:
            parts.append(Text(f"sensor {name}: {sensor['state']}: {sensor['text']}", style="yellow"))
    return Group(*parts)
