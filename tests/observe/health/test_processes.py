"""The check in two processes of one program: what one finds all are told, and one that does not come is named."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import textwrap
from typing import IO, Any

from capibara.processes import COORDINATOR, PROCESS_COUNT, PROCESS_ID

PROGRAM = """
    import json, os, sys
    import jax
    jax.config.update("jax_num_cpu_devices", 2)
    from capibara.processes import join_from_environment
    assert join_from_environment()
    from capibara.observe.health import TpuDiagnostics, arithmetic

    mine = jax.local_devices()

    def product(a, b):
        right = arithmetic.multiply(a, b)
        return right + 1 if jax.process_index() == 1 and a.devices() == {mine[1]} else right

    def even(pairs, size):
        return size / 1e9

    def tell(report):
        print(json.dumps(report.as_dict(), default=str), flush=True)

    tell(TpuDiagnostics(hosts=[], sensors=[], product=product, measure=even).run_full_health_check())
    if jax.process_index() == 1:
        sys.stdin.read()  # it does not come to the second one
    tell(TpuDiagnostics(hosts=[], sensors=[], deadline_s=3.0, measure=even).run_full_health_check())
    os._exit(0)
"""


def _report(pipe: IO[str]) -> Any:
    """The next report; Gloo, which carries exchanges between CPU processes, prints lines of its own."""
    return json.loads(next(line for line in pipe if line.startswith("{")))


def test_what_one_finds_all_are_told_and_who_does_not_come_is_named(as_a_reader: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROGRAM)],
            env={
                **as_a_reader, "JAX_PLATFORMS": "cpu", COORDINATOR: address, PROCESS_COUNT: "2", PROCESS_ID: str(number)
            },
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for number in range(2)
    ]  # fmt: skip
    try:
        pipes = [one.stdout for one in started if one.stdout is not None]
        first = [_report(pipe) for pipe in pipes]
        alone = _report(pipes[0])
    finally:
        for one in started:
            one.kill()
            one.communicate()
    for report in first:
        [found] = report["findings"]
        assert found["check"] == "matmul"
        assert "process 1) multiplies wrongly" in found["text"]
        assert report["all_chips_online"] is False
        assert report["interconnect_ok"] is True
        assert len(report["details"]["links"]) == 4, "of the devices of both"
    assert "process 1" in [one["subject"] for one in alone["findings"] if one["check"] == "missing_process"]
    assert alone["all_chips_online"] is alone["interconnect_ok"] is False
    assert alone["details"]["not_run"]["links"] == "not every process came to the check"
