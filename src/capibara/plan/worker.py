"""`python -m capibara.plan.worker`: compiles one layout in a process of its own.

The number of virtual devices and the TPU compiler's settings are fixed when jax starts, so the process that plans
cannot change its own. The request is JSON on standard input (recipe, layout, level, slice), the answer one line of
JSON on standard output.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from capibara.compile.environment import compiler_environment
from capibara.compile.failures import useful_lines
from capibara.plan.compiled import Compiled, compile_layout, partition_layout
from capibara.plan.layout_text import layout_as_dict, layout_from_dict
from capibara.plan.target import Recipe, load_job

if TYPE_CHECKING:
    from capibara.mesh.layout import Layout

__all__ = ["compile_elsewhere"]

_DEVICES = "--xla_force_host_platform_device_count"


def compile_elsewhere(
    recipe: Recipe, layout: Layout, level: str, slice_name: str, *, timeout_s: float = 1800.0
) -> Compiled:
    """The layout compiled by another process, at any level but "analytic"."""
    request = {"recipe": recipe.as_dict(), "layout": layout_as_dict(layout), "level": level, "slice": slice_name}
    command = [sys.executable, "-m", "capibara.plan.worker"]
    environment = _environment(level, layout.mesh.size)
    try:
        done = subprocess.run(
            command,
            input=json.dumps(request),
            capture_output=True,
            text=True,
            env=environment,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Compiled(level, "not compiled", error=f"still compiling after {timeout_s:.0f} s", error_kind="timeout")
    if done.returncode != 0 or not done.stdout.strip():
        # A traceback's last line says what went wrong.
        last = useful_lines("\n".join(done.stderr.strip().splitlines()[-3:]))
        text = last or f"the compiler's process ended with code {done.returncode}"
        return Compiled(level, "not compiled", error=text, error_kind="crash")
    return Compiled.from_dict(json.loads(done.stdout.strip().splitlines()[-1]))


def _environment(level: str, devices: int) -> dict[str, str]:
    environment = compiler_environment(None)
    # Another process's package path: an uninstalled checkout is found through it.
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    if level == "xla":
        kept = [flag for flag in environment.get("XLA_FLAGS", "").split() if not flag.startswith(_DEVICES)]
        environment["XLA_FLAGS"] = " ".join([*kept, f"{_DEVICES}={devices}"])
    return environment


def _answer(request: dict[str, Any]) -> Compiled:
    job, layout = load_job(Recipe(**request["recipe"])), layout_from_dict(request["layout"])
    if request["level"] == "xla":
        return partition_layout(job, layout)
    return compile_layout(job, layout, request["slice"])


def main() -> None:
    request = json.load(sys.stdin)
    # Whatever a user's file prints while it is loaded is not the answer.
    with contextlib.redirect_stdout(sys.stderr):
        answer = _answer(request)
    sys.stdout.write(json.dumps(answer.as_dict()) + "\n")


if __name__ == "__main__":
    main()
