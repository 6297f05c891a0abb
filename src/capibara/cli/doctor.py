"""`capibara doctor`: whether this machine and its slice are well; or what happened to a run, from its recordings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capibara.cli import failures, output
from capibara.cli.failures import Code
from capibara.cli.simulated import simulate_devices
from capibara.errors import CapibaraError, rule_error

if TYPE_CHECKING:
    from capibara.observe.health.report import HealthReport


def doctor(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="A run's folder, a recording in it or its crash.json: what happened."),
    ] = None,
    hosts: Annotated[
        str | None, typer.Option(metavar="A,B", help="Hosts that have to be there; NAME or NAME:PORT.")
    ] = None,
    expected_devices: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="How many devices there should be.")
    ] = None,
    max_temperature: Annotated[float, typer.Option(metavar="C", help="Degrees that are still normal.")] = 85.0,
    memory_share: Annotated[float, typer.Option(metavar="S", help="Of the free memory, that is tested.")] = 0.25,
    deadline_s: Annotated[float, typer.Option(metavar="S", help="For one step on a device.")] = 120.0,
    host_deadline_s: Annotated[
        float, typer.Option(metavar="S", help="For hosts to answer; more where workers start one after the other.")
    ] = 3.0,
    devices: Annotated[int | None, typer.Option(min=1, metavar="N", help="Simulate so many devices of a CPU.")] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Of a run: write all of its story into one file.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check chips, memory, links, sensors, the host and the hosts of the slice; exit code 1 when something is wrong.

    For example: capibara doctor; capibara doctor --hosts worker-0,worker-1; capibara doctor runs/dev
    """
    if file is not None:
        for name, value in (("--hosts", hosts), ("--expected-devices", expected_devices), ("--devices", devices)):
            if value is not None:
                raise rule_error(f"{name} is for a machine", f"it beside {str(file)!r}", "leave one of them out")
        _tell_story(file, save, json)
        return
    if save is not None:
        raise rule_error("--save is for a run's story", "it without a run", "name the run's folder before it")
    from capibara.observe.health.diagnostics import TpuDiagnostics
    from capibara.observe.health.slice_hosts import hosts_of_environment
    from capibara.processes import PROCESS_COUNT

    processes = int(os.environ.get(PROCESS_COUNT, "1"))
    simulate_devices(devices, processes)
    asked = hosts_of_environment() if hosts is None else [name.strip() for name in hosts.split(",") if name.strip()]
    if processes > 1:
        _join(asked, host_deadline_s, deadline_s)
    report = TpuDiagnostics(
        hosts=asked,
        expected_devices=expected_devices,
        max_temperature=max_temperature,
        memory_share=memory_share,
        deadline_s=deadline_s,
        host_deadline_s=host_deadline_s,
    ).run_full_health_check()
    _show(report, json)
    if not report.healthy:
        raise typer.Exit(Code.FAILED)


def _join(hosts: list[str], host_deadline_s: float, deadline_s: float) -> None:
    """Meet the program's other processes, unless a host of theirs is missing, which the report then says."""
    from capibara.observe.health.slice_hosts import missing_hosts
    from capibara.processes import join_from_environment

    if not missing_hosts(hosts, host_deadline_s):
        try:
            join_from_environment(deadline_s)
        except RuntimeError as error:
            raise CapibaraError(
                f"The processes of this program did not meet within {deadline_s:g} s: {error}"
            ) from error


def _tell_story(file: Path, save: Path | None, json: bool) -> None:
    from capibara.observe.crash_story import read_crash_story

    story = read_crash_story(file)
    if save is not None:
        if save.suffix != ".json":
            raise rule_error("A story is saved as a .json file", str(save), f"write {save.name}.json")
        story.save(save)
    well = story.ended_in_order
    if json:
        problem = {} if well else failures.error(Code.FAILED, "; ".join(story.missing) or "The run was cut off.")
        output.show_json({"command": output.command_line(), **story.as_dict(), **problem})
    else:
        typer.echo(str(story))
    if not well:
        raise typer.Exit(Code.FAILED)


_CHECKS = {
    "all_chips_online": "every chip there, and multiplying rightly",
    "memory_healthy": "memory keeps what is written",
    "interconnect_ok": "links and sums along every axis",
    "temperature_normal": "temperature",
    "clock_normal": "clock under load",
    "host_ok": "the host's limits",
}


def _show(report: HealthReport, json: bool) -> None:
    if json:
        wrong = [one for one in report.findings if one.serious]
        told = {"command": output.command_line(), **report.as_dict()}
        if wrong:
            told |= failures.error(Code.FAILED, "; ".join(one.text for one in wrong), fix=wrong[0].fix)
        output.show_json(told)
        return
    made = output.table("check", "found", "measured")
    for name, words in _CHECKS.items():
        output.add_row(made, words, _answer(report[name]), _measured(name, report.details))
    screen = output.console()
    screen.print(made)
    for one in report.findings:
        screen.print(f"{'WRONG' if one.serious else 'advice'}: {one}", markup=False, soft_wrap=True)
    for what, why in report.details["not_run"].items():
        screen.print(f"not run: {what}: {why}", markup=False, soft_wrap=True)
    if report.healthy:
        screen.print("Nothing is wrong.", markup=False)


def _answer(value: bool | None) -> str:
    return "not measured" if value is None else "well" if value else "WRONG"


def _measured(name: str, details: Any) -> str:
    if name == "all_chips_online":
        return f"{len(details.get('devices', []))} devices"
    if name == "memory_healthy" and details.get("memory_bytes"):
        return f"{output.size(min(details['memory_bytes'].values()))} of each"
    if name == "interconnect_ok" and details.get("axes"):
        each = (f"{axis}: {told['bytes_per_second'] / 1e9:.3g} GB/s" for axis, told in details["axes"].items())
        return f"{len(details['links'])} links; {', '.join(each)}"
    readings = details.get("readings", {}).values()
    if name == "temperature_normal":
        degrees = [told["temperature"] for told in readings if "temperature" in told]
        return f"{max(degrees):.0f} °C at most" if degrees else "no sensor tells it"
    if name == "clock_normal":
        clocks = [told["clock"] for told in readings if "clock" in told]
        return f"{min(clocks) / 1e6:.0f} MHz at least" if clocks else "no sensor tells it"
    return f"{len(details['hosts'])} other hosts asked" if name == "host_ok" and details["hosts"] else output.MISSING
