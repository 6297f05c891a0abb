"""Hosts that are not there are named; here a host is a process that listens at a port of its own."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from capibara.observe.health.slice_hosts import hosts_of_environment, missing_hosts

LISTENS = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def workers() -> Iterator[list[tuple[subprocess.Popen[str], str]]]:
    started = [
        subprocess.Popen(
            [sys.executable, "-S", "-c", LISTENS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    try:
        yield [(one, f"127.0.0.1:{int(one.stdout.readline())}") for one in started if one.stdout is not None]
    finally:
        for one in started:
            one.kill()
            one.communicate()


@pytest.mark.quick
def test_a_worker_that_was_killed_is_named(workers: list[tuple[subprocess.Popen[str], str]]) -> None:
    names = [name for _, name in workers]
    hosts = hosts_of_environment({"TPU_WORKER_HOSTNAMES": ",".join(names)})
    assert hosts == names
    assert missing_hosts(hosts) == []
    workers[1][0].kill()
    workers[1][0].wait()
    [found] = missing_hosts(hosts, deadline_s=0.5)
    assert found.subject == f"host {names[1]}"
    assert "number 1 of 3" in found.text
    assert "nothing listens at port" in found.text


@pytest.mark.quick
def test_a_name_that_is_not_known_and_a_host_that_is_up_without_a_port() -> None:
    [found] = missing_hosts(["127.0.0.1", "no-such-host.invalid"])  # refused at port 22, or taken: it is up
    assert found.evidence["host"] == "no-such-host.invalid"
    assert "its name is not known" in found.text


@pytest.mark.quick
def test_a_host_that_takes_no_connection_is_waited_for_as_long_as_the_deadline_says() -> None:
    # Its queue of one is full, and the kernel answers no more: as a host that is gone.
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for one in (first, second):
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        time.sleep(0.05)
        began = time.monotonic()
        [found] = missing_hosts([f"127.0.0.1:{full.getsockname()[1]}"], deadline_s=0.3)
        assert 0.2 < time.monotonic() - began < 30
    assert "no answer within 0.3 s" in found.text


@pytest.mark.quick
def test_the_first_process_is_asked_for_by_the_others_only() -> None:
    told = {"CAPIBARA_COORDINATOR": "worker-0:8476", "CAPIBARA_PROCESS_COUNT": "2"}
    assert hosts_of_environment(told | {"CAPIBARA_PROCESS_ID": "1"}) == ["worker-0:8476"]
    assert hosts_of_environment(told | {"CAPIBARA_PROCESS_ID": "0"}) == []
    assert hosts_of_environment({}) == []


@pytest.mark.quick
@pytest.mark.parametrize("host", ["worker:", ":80", "worker:99999", "worker:http"])
def test_bad_input(host: str) -> None:
    with pytest.raises(ValueError, match=r"A host is NAME or NAME:PORT"):
        missing_hosts([host])


@pytest.mark.quick
def test_addresses_with_colons() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert missing_hosts([f"[127.0.0.1]:{server.getsockname()[1]}"]) == []
    assert [one.subject for one in missing_hosts(["2001:db8::1"], deadline_s=0.2)] == ["host 2001:db8::1"]
