"""Ray places the processes: an actor a worker, which starts the command on its machine and passes on what it prints.

Ray brings a program to its machines and no further: jax.distributed is initialised by the command itself, from the
three variables of `capibara.processes`, which also counts who joined. Ray's own JaxTrainer initialises it for
TPUs and GPUs only; on CPUs each of its workers trains a model of its own, and nothing says so.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from capibara.distribution import NAME
from capibara.errors import CapibaraError, rule_error, say_once
from capibara.train.exit_codes import FAILED
from capibara.train.supervisor import Exit, LocalProcess, PlaceFailed, Printer, free_port

__all__ = ["RayCluster", "cluster", "request_chips"]

logger = logging.getLogger(__name__)

_POLL_SECONDS = 1.0
_LINES_A_POLL = 1000
_QUEUED_LINES = 10_000  # then the command waits with printing: a launcher that does not read fills no memory


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise CapibaraError(
            f"The engine 'ray' needs Ray, which is not installed. It is the extra `ray` of {NAME}; in a checkout: "
            f"pip install '.[ray]'"
        ) from error
    return ray


class _Worker:
    """The actor: the command's parent on its machine."""

    def __init__(self) -> None:
        self._events: queue.Queue[tuple[bytes, bool] | Exit] = queue.Queue(_QUEUED_LINES)
        self._process: LocalProcess | None = None

    def address(self) -> str:
        import ray

        host = ray.util.get_node_ip_address()
        return f"{host}:{free_port(host)}"

    def start(
        self, number: int, start: int, command: Sequence[str], environment: Mapping[str, str], folder: str
    ) -> None:
        words = list(command)
        if words[0] == "capibara":  # the one of this interpreter, whatever the path of Ray's workers has
            words = [sys.executable, "-m", *words]
        if not os.path.isdir(folder):
            raise NotADirectoryError(f"there is no folder {folder} on {os.uname().nodename}; name one by --workdir")
        started: queue.Queue[Exception | None] = queue.Queue()

        def run() -> None:
            # In a thread that lasts as long as the command: the kernel ends it with the thread that started it.
            ends: queue.Queue[Exit] = queue.Queue()
            try:
                self._process = LocalProcess(number, start, words, environment, self, folder)
            except OSError as error:
                started.put(error)
                return
            started.put(None)
            self._process.follow(ends)
            self._events.put(ends.get())

        threading.Thread(target=run, daemon=True).start()
        error = started.get()
        if error is not None:
            raise error

    def line(self, process: int, line: bytes, error: bool) -> None:
        self._events.put((line, error))

    def events(self) -> list[tuple[bytes, bool] | Exit]:
        """What came since the last call, at the latest after a second: lines, and at last the end."""
        try:
            events = [self._events.get(timeout=_POLL_SECONDS)]
        except queue.Empty:
            return []
        with suppress(queue.Empty):
            while len(events) < _LINES_A_POLL:
                events.append(self._events.get_nowait())
        return events

    def signal(self, number: int) -> None:
        if self._process is not None:
            self._process.signal(number)


class _RayProcess:
    """A process of the program as the launcher sees it."""

    def __init__(self, number: int, start: int, actor: Any, printer: Printer) -> None:
        self.number, self.start = number, start
        self._actor, self._printer, self._began = actor, printer, time.monotonic()
        # A signal's handler may not wait for a lock of Ray's that the thread it interrupted has. This queue has none.
        self._signals: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        threading.Thread(target=self._send, daemon=True).start()

    def signal(self, number: int) -> None:
        self._signals.put(number)

    def _send(self) -> None:
        ray = _ray()
        while (number := self._signals.get()) is not None:
            with suppress(ray.exceptions.RayError):  # it is gone; `follow` says so
                ray.get(self._actor.signal.remote(number))

    def follow(self, ends: queue.Queue[Exit]) -> None:
        ray = _ray()
        try:
            while True:
                for event in ray.get(self._actor.events.remote()):
                    if isinstance(event, Exit):
                        ends.put(event)
                        return
                    self._printer.line(self.number, *event)
        except ray.exceptions.RayError as error:
            self._printer.say(f"worker {self.number} is lost: {_first_line(error)}")
            ends.put(Exit(self.number, FAILED, self.start, time.monotonic() - self._began))
        finally:
            self._signals.put(None)


class RayCluster:
    """Where a supervisor's processes run: one actor each, with its share of the machines.

    The shares are reserved once, all or none (a placement group), and kept over restarts; actors are new at each
    start, since a machine may have gone with the old ones.

    Args:
      resources: of each worker: {"CPU": 1, "GPU": 0, "TPU": 4}.
      folder: the command's working folder on every machine.
      wait_seconds: for the resources; a cluster that grows may need minutes.
    """

    def __init__(self, resources: Mapping[str, float], folder: str, wait_seconds: float = 600.0) -> None:
        self._resources = {name: share for name, share in resources.items() if share}
        self._folder, self._wait_seconds = folder, wait_seconds
        self._group: Any = None
        self._actors: list[Any] = []

    def open(self, processes: int, stop: threading.Event) -> str:
        ray = _ray()
        try:
            if self._group is None:
                self._group = ray.util.placement_group([self._resources] * processes, strategy="PACK")
            self._wait(ray, processes, stop)
            strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
            worker = ray.remote(_Worker)
            self._actors = [
                worker.options(
                    num_cpus=self._resources.get("CPU", 0),
                    num_gpus=self._resources.get("GPU", 0),
                    resources={name: share for name, share in self._resources.items() if name not in ("CPU", "GPU")},
                    max_concurrency=4,  # events, signals and the rest do not wait for each other
                    scheduling_strategy=strategy(self._group, placement_group_bundle_index=number),
                ).remote()
                for number in range(processes)
            ]
            return str(ray.get(self._actors[0].address.remote()))
        except ray.exceptions.RayError as error:
            raise PlaceFailed(f"Ray did not start the workers: {_first_line(error)}") from error

    def _wait(self, ray: Any, processes: int, stop: threading.Event) -> None:
        """Until the resources are there. In pieces of a second, so that a signal ends it."""
        needed = (
            f"{processes} workers of {' and '.join(f'{share:g} {name}' for name, share in self._resources.items())}"
        )
        began = time.monotonic()
        while not self._group.wait(1):
            if stop.is_set():
                raise PlaceFailed(f"told to stop while waiting for {needed}")
            say_once(logger, id(self), "waiting for %s; the cluster has %s", needed, _totals(ray.cluster_resources()))
            if time.monotonic() - began > self._wait_seconds:
                raise PlaceFailed(
                    f"{needed} were not free within {self._wait_seconds:g} s; the cluster has "
                    f"{_totals(ray.cluster_resources())}, of which {_totals(ray.available_resources())} are free"
                )

    def start(
        self, number: int, start: int, command: Sequence[str], environment: Mapping[str, str], printer: Printer
    ) -> _RayProcess:
        ray, actor = _ray(), self._actors[number]
        try:
            ray.get(actor.start.remote(number, start, command, environment, self._folder))
        except ray.exceptions.RayTaskError as error:  # of the actor's own code
            raise PlaceFailed(f"worker {number} did not start: {error.cause}") from error
        except ray.exceptions.RayError as error:
            raise PlaceFailed(f"worker {number} did not start: {_first_line(error)}") from error
        return _RayProcess(number, start, actor, printer)

    def close(self) -> None:
        ray = _ray()
        # What the commands started and left behind. A machine that is gone does not answer.
        killed = [actor.signal.remote(signal.SIGKILL) for actor in self._actors]
        if killed:
            ray.wait(killed, num_returns=len(killed), timeout=5)
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []

    def release(self) -> None:
        """Give the resources back, at the end."""
        if self._group is not None:
            _ray().util.remove_placement_group(self._group)
            self._group = None


@contextmanager
def cluster(
    processes: int, resources: Mapping[str, float], *, address: str | None = None, folder: str | None = None
) -> Iterator[RayCluster]:
    """A `RayCluster` on a cluster that is there, or on one of this machine alone, which ends with it.

    Args:
      address: "auto" or host:port; without it RAY_ADDRESS, and without that a new cluster here.
    """
    ray = _ray()
    address = address or os.environ.get("RAY_ADDRESS")
    before = signal.getsignal(signal.SIGTERM)  # Ray takes it, and does not give it back
    try:
        if address is None:
            ray.init("local", include_dashboard=False, log_to_driver=False, logging_level="WARNING")
        else:
            ray.init(address, log_to_driver=False, logging_level="WARNING")
    except (ConnectionError, RuntimeError) as error:
        where = address or "this machine"
        raise CapibaraError(f"Ray does not start on, or is not reached at {where}: {_first_line(error)}") from error
    workers = RayCluster(resources, folder or os.getcwd())
    try:
        if address is None:
            _check_it_fits(processes, resources, ray.cluster_resources())
        yield workers
    finally:
        workers.release()
        ray.shutdown()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _check_it_fits(processes: int, resources: Mapping[str, float], there: Mapping[str, float]) -> None:
    """A machine of its own does not grow: what it lacks, no wait brings."""
    for name, share in resources.items():
        if share * processes > there.get(name, 0):
            raise rule_error(
                "The workers' resources are those of the machine at most",
                f"{processes} workers of {share:g} {name} each, and {there.get(name, 0):g} {name}",
                f"lower --processes or --{name.lower()}s, or name a cluster by --address",
            )


def _totals(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU", "TPU"))


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no more is known').splitlines()[0]}"


def request_chips(chips: int, *, chips_per_host: int = 4, resource: str = "TPU") -> None:
    """Ask the cluster's autoscaler for hosts with so many chips together, in place of what was asked before.

    Made for `TpuAutoScaler(on_change=request_chips)`, in a program that has joined a cluster. Ray grows to it at once,
    and lets hosts go that nobody uses when it is less.

    Args:
      chips: how many; 0 asks for none.
      chips_per_host: of one machine: 4 on v4.
      resource: what Ray calls them.
    """
    for name, value, least in (("chips", chips, 0), ("chips_per_host", chips_per_host, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise rule_error(f"{name} is a whole number from {least} up", repr(value), f"use {max(least, 4)}")
    ray = _ray()
    if not ray.is_initialized():
        raise rule_error("A program asks the cluster that it has joined", "none", 'call ray.init("auto") before')
    from ray.autoscaler.sdk import request_resources

    hosts = [chips_per_host] * (chips // chips_per_host) + [chips % chips_per_host] * (chips % chips_per_host > 0)
    request_resources(bundles=[{resource: float(count)} for count in hosts])
