"""A SkyPilot task: the program on a TPU slice or on machines with GPUs of a cloud, as a file for `sky jobs launch`.

Fields by docs.skypilot.co, "SkyPilot YAML", "Cloud TPU" and "Distributed Multi-Node Jobs". A TPU slice is one node of
SkyPilot's, whatever its number of hosts: it runs setup and run on every host and counts them in SKYPILOT_NUM_NODES.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from capibara.errors import rule_error
from capibara.fleet.bucket import MOUNT, check_bucket
from capibara.fleet.tpu_hosts import COORDINATOR_PORT, slice_of_hosts
from capibara.processes import COORDINATOR, PROCESS_COUNT, PROCESS_ID
from capibara.train.exit_codes import PREEMPTED

__all__ = ["SkyMachines", "sky_machines", "sky_task"]

_GPUS = re.compile(r"(?!v\d|tpu)[A-Za-z][\w.-]*:(\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class SkyMachines:
    """What runs a task, in SkyPilot's words."""

    accelerators: str
    nodes: int
    hosts: int
    """Machines, and so processes; a node is one machine or a whole slice."""
    extra: str
    """Of this distribution, for such machines."""
    infra: str | None = None


def sky_machines(on: str, processes: int | None = None) -> SkyMachines:
    """The machines that a slice's name ("v4-64") or GPUs ("H100:8", with so many processes) stand for."""
    if gpus := _GPUS.fullmatch(on):
        if int(gpus[1]) < 1:
            raise rule_error("A machine has a GPU at least", repr(on), "write H100:8")
        return SkyMachines(on, processes or 1, processes or 1, "cuda")
    wanted = slice_of_hosts(on, processes)
    if wanted.accelerator_type is None or not wanted.accelerator_type.startswith("v"):
        raise rule_error(
            "SkyPilot knows TPU slices of v2 to v6e by the size in their name",
            str(wanted),
            "name a slice such as v4-64, or use --engine jobset",
        )
    return SkyMachines(f"tpu-{wanted.accelerator_type}", 1, wanted.hosts, "tpu", "gcp")


def sky_task(
    command: Sequence[str],
    on: str,
    *,
    name: str = "capibara",
    processes: int | None = None,
    max_restarts: int = 3,
    spot: bool = False,
    setup: str | None = None,
    bucket: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The task as data.

    Args:
      command: of each process, in words.
      on: a TPU slice ("v4-64"), or GPUs of a machine ("H100:8").
      processes: machines, for GPUs; a slice has its own number.
      max_restarts: after errors. After a preemption, exit code 42 or a machine that is taken away, always.
      setup: a shell line that installs what the command needs; by default the checkout that is the working folder.
      bucket: "gs://name" or "s3://name", which every host has as /bucket.
      environment: variables for every process.
    """
    machines = sky_machines(on, processes)
    task: dict[str, Any] = {
        "name": name,
        "workdir": ".",
        "num_nodes": machines.nodes,
        "resources": {
            **({} if machines.infra is None else {"infra": machines.infra}),
            "accelerators": machines.accelerators,
            "use_spot": spot,
            "job_recovery": {"max_restarts_on_errors": max_restarts, "recover_on_exit_codes": [PREEMPTED]},
        },
    }
    if bucket is not None:
        check_bucket(bucket, ("gs", "s3"))
        task["file_mounts"] = {MOUNT: {"source": bucket.rstrip("/"), "mode": "MOUNT"}}
    if environment:
        task["envs"] = dict(environment)
    task["setup"] = (setup or f"pip install '.[train,{machines.extra}]'") + "\n"
    task["run"] = _run(command, machines.hosts)
    return task


def _run(command: Sequence[str], hosts: int) -> str:
    """On every host. A start after a recovery is like the first, so that training is told to resume in any case."""
    words = list(command)
    if words[:2] == ["capibara", "train"] and "--resume" not in words:
        words.append("--resume")
    return "\n".join(
        (
            f'if [ "$SKYPILOT_NUM_NODES" -ne {hosts} ]; then',
            f'  echo "this task is for {hosts} hosts, and SkyPilot counts $SKYPILOT_NUM_NODES" >&2',
            "  exit 2",
            "fi",
            f'export {PROCESS_ID}="$SKYPILOT_NODE_RANK"',
            f'export {PROCESS_COUNT}="$SKYPILOT_NUM_NODES"',
            f'export {COORDINATOR}="$(echo "$SKYPILOT_NODE_IPS" | head -n 1):{COORDINATOR_PORT}"',
            f"exec {shlex.join(words)}",
            "",
        )
    )
