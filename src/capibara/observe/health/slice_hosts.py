"""Hosts of a slice that are not there, by name, before `jax.distributed` waits for them.

A host is there when it answers: whether it takes a connection or refuses it, its kernel said so. Where a port is given,
a program has to listen at it.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence

from capibara.errors import rule_error
from capibara.observe.health.report import Finding
from capibara.processes import COORDINATOR, PROCESS_ID

__all__ = ["WORKERS", "hosts_of_environment", "missing_hosts"]

WORKERS = "TPU_WORKER_HOSTNAMES"
_SSH = 22
_AGAIN_S = 0.1


def hosts_of_environment(environment: Mapping[str, str] | None = None) -> list[str]:
    """The hosts that this process is told of: the slice's workers, and the address of the program's first process.

    >>> hosts_of_environment({"TPU_WORKER_HOSTNAMES": "worker-0,worker-1"})
    ['worker-0', 'worker-1']
    """
    environment = os.environ if environment is None else environment
    hosts = [name.strip() for name in environment.get(WORKERS, "").split(",") if name.strip()]
    coordinator = environment.get(COORDINATOR)
    # The first process is the one that listens there, and begins to when it joins.
    if coordinator and environment.get(PROCESS_ID, "0") != "0":
        hosts.append(coordinator)
    return hosts


def _address(host: str) -> tuple[str, int | None]:
    name, colon, port = host.rpartition(":")
    if not colon or (":" in name and not name.startswith("[")):  # without a port; an IPv6 address has colons
        return host.strip("[]"), None
    if not name or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise rule_error("A host is NAME or NAME:PORT", repr(host), "write worker-0 or worker-0:8476")
    return name.strip("[]"), int(port)


def _absence(name: str, port: int | None, deadline_s: float) -> str:
    """Why a host counts as not there; "" where it is."""
    until = time.monotonic() + deadline_s
    try:
        while True:
            try:
                left = max(until - time.monotonic(), 0.01)
                with socket.create_connection((name, _SSH if port is None else port), left):
                    return ""
            except ConnectionRefusedError:
                if port is None:
                    return ""
                if time.monotonic() + _AGAIN_S > until:
                    return f"it is up, and nothing listens at port {port}"
                time.sleep(_AGAIN_S)  # the program there may be about to start
    except socket.gaierror as error:
        return f"its name is not known ({error.strerror})"
    except TimeoutError:
        return f"no answer within {deadline_s:g} s"
    except OSError as error:
        return f"it cannot be reached ({error.strerror or error})"


def missing_hosts(hosts: Sequence[str], deadline_s: float = 3.0) -> list[Finding]:
    """The hosts that are not there; all are asked at once.

    Args:
      hosts: names or addresses, with or without a port.
      deadline_s: seconds that they have to answer, all of them together.

    Examples:
        >>> [finding.subject for finding in missing_hosts(["127.0.0.1", "no-such-host.invalid"])]
        ['host no-such-host.invalid']
    """
    if not deadline_s > 0:
        raise rule_error("host_deadline_s is above 0 seconds", repr(deadline_s), "leave it out for 3")
    addresses = [_address(host) for host in hosts]
    answers: dict[int, str] = {}

    def ask(place: int) -> None:
        answers[place] = _absence(*addresses[place], deadline_s)

    # Not of a pool, which would be waited for at the process's end: a resolver may take longer than anybody waits.
    threads = [threading.Thread(target=ask, args=(place,), daemon=True) for place in range(len(hosts))]
    for thread in threads:
        thread.start()
    until = time.monotonic() + deadline_s + 0.5
    for thread in threads:
        thread.join(max(until - time.monotonic(), 0.0))
    reasons = {place: answers.get(place, f"no answer within {deadline_s:g} s") for place in range(len(hosts))}
    return [
        Finding(
            "missing_host",
            f"host {host}",
            f"Host {host}, number {place} of {len(hosts)}, is missing: {reasons[place]}; jax.distributed "
            f"would wait for it",
            f"start or replace {host}, or leave it out of the hosts ({WORKERS}, {COORDINATOR}, --hosts)",
            evidence={"host": host, "reason": reasons[place]},
        )
        for place, host in enumerate(hosts)
        if reasons[place]
    ]
