"""One workload: every program compiled, checked against the reference, and timed in turns.

A program is several calls on arrays of their own, so that neither the host's launches nor the chip's cache show. The
parts are apart, since compilers search on the device and disturb what is timed there: `prepare` compiles and checks,
`Prepared.time` times and needs the device alone.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import math
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from capibara.kernels.core import dispatch
from capibara.kernels.core.spec import describe, nbytes
from capibara.kernels.lab import check as checks
from capibara.kernels.lab.lattice.workloads import Workload
from capibara.kernels.lab.tuning import failures, first_line

CALLS = 4
MOST_INPUT_BYTES = 3e9
SAMPLE_SECONDS, SAMPLES = 0.012, 5
# A peer that rounds more often than the op's tolerance allows is still what users run; one that is farther off than
# this many tolerances computes something else.
PEER_TOLERANCES = 4.0
SHORT = 0.97
# A program of JAX takes some 80 us of the host, torch's graph none: the host's clock says nothing of shorter programs.
HOST_SHOWS_US = 400.0
# Between two programs of JAX the device stands still for up to 100 us, between torch's graphs it does not; and of
# cuDNN's attention the host's clock had JAX 5 to 7 % behind torch in programs of 12 to 29 ms, where the device's had
# them level in shorter ones. So the device's own clock is read: from a profile, in which the programs come one after
# another with pauses between. A chip that has rested is up to 5 % faster than one that is held up by its power, so they
# take turns, another one first in each round.
ROUNDS, ROUND_RUNS, ROUND_SECONDS, PAUSE_SECONDS = 3, 4, 0.04, 0.02
# What cuDNN's forward attention returns straight out of a program, XLA fills first, in JAX and not
# in torch; where the program goes on with the result, as every model does, it fills nothing. So a forward pass is timed
# without that. cuDNN's own setting to zero takes less than a microsecond; of a gradient it is part of the work.
CUDNN_FORWARD, FILL, FILL_SECONDS = "sdpa", "Memset", 1.5e-6
CUDNN_BACKWARD = "bprop"
MOST_KERNELS = 6  # of a program that its row tells apart, those that took longest


def with_gradient(fn: Callable[..., Any]) -> Callable[..., Any]:
    """As check.with_gradient, the backward pass after the forward pass, as in a model, where it comes later: no program
    makes both together."""

    def both(cotangents: Sequence[Any], *arrays: Any) -> tuple[Any, Any]:
        moving = [i for i, x in enumerate(arrays) if x is not None and jax.numpy.issubdtype(x.dtype, np.inexact)]

        def of_floats(*floats: Any) -> Any:
            full = list(arrays)
            for i, x in zip(moving, floats, strict=True):
                full[i] = x
            return fn(*full)

        out, pull = jax.vjp(of_floats, *(arrays[i] for i in moving))
        leaves, tree = jax.tree.flatten(out)
        leaves, given = lax.optimization_barrier((leaves, list(cotangents)))
        return jax.tree.unflatten(tree, leaves), pull(jax.tree.unflatten(tree, given))

    return both


def repeated(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A call on each of the sets. Under a jit of its own the call is traced and lowered once for all of them."""
    once = jax.jit(fn)
    return lambda *sets: [once(*each) for each in sets]


@dataclasses.dataclass
class Program:
    """One program of a workload: ours or a peer's."""

    name: str
    ours: bool
    run: Callable[[], Any] | None = None
    each: Callable[[], Any] | None = None
    """The same kernel by kernel, where `run` is one graph."""
    wait: Callable[[Any], Any] = jax.block_until_ready
    compiled: Any = None
    error: float | None = None
    right: bool | None = None
    note: str = ""
    temporary_bytes: int | None = None
    kernels: dict[str, float] = dataclasses.field(default_factory=dict)
    """Microseconds of a call, by the device's clock, that each kernel ran in the last round."""
    taken: list[list[float]] = dataclasses.field(default_factory=list)
    """Microseconds of a call, the samples of each run."""

    def kernel_by_kernel(self) -> Any:
        """What a run gives, in a form whose kernels a profile has one by one."""
        run = self.each or self.run
        assert run is not None, "it is timed while its arrays are there"
        return run()

    @property
    def counts(self) -> bool:
        """Whether it is right, and was timed."""
        return bool(self.right) and bool(self.taken)

    def microseconds(self, run: int) -> float:
        return statistics.median(self.taken[run])


@dataclasses.dataclass
class Prepared:
    """A workload whose programs are compiled and checked."""

    workload: Workload
    seed: int
    calls: int
    programs: dict[str, Program]
    decisions: list[dict[str, Any]]
    """What dispatch chose, op by op."""
    alike: list[str]
    """Forms that are the very program that dispatch takes."""
    seconds: float
    """Of compiling and checking."""
    clock: str = "host"
    """Whose times the runs have."""
    by_host: dict[str, float] = dataclasses.field(default_factory=dict)
    """The first run's microseconds by the host's clock."""

    def time(self) -> dict[str, Any]:
        """The row: one run, and a second where dispatch's choice is behind in the first."""
        sets = _inputs(self.workload, self.calls, self.seed)
        torch_sets = _Torch(self.workload, sets)
        for name, program in self.programs.items():
            if program.compiled is not None:
                program.run = lambda compiled=program.compiled: compiled(*sets)
            elif name in self.workload.torch and program.right:
                try:
                    program.run, program.each = torch_sets.program(self.workload.torch[name])
                    program.wait = torch_sets.wait
                except RuntimeError as failure:  # no memory beside JAX's, for one
                    program.note = first_line(failure)
        running = [program for program in self.programs.values() if program.run is not None]
        _timed(running, self.calls)
        self.by_host = {program.name: program.microseconds(0) for program in running}
        self.clock = _timed_on_device(running, self.calls) or self.clock
        if self._behind(0):
            if self.clock == "host":
                _timed(running, self.calls)
            else:
                _timed_on_device(running, self.calls, again=True)
        for program in running:
            program.run = program.each = None
        torch_sets.free()
        return self._row()

    def _ratios(self, run: int) -> dict[str, float]:
        """Of dispatch's choice: to the best peer, and to the best of our own."""
        timed = [p for p in self.programs.values() if p.counts and len(p.taken) > run]
        dispatched = next((p for p in timed if p.name == "dispatch"), None)
        if dispatched is None:
            return {}
        ours = dispatched.microseconds(run)
        found = {"own_best": min(p.microseconds(run) for p in timed if p.ours) / ours}
        peers = [p.microseconds(run) for p in timed if not p.ours]
        return found | ({"best_peer": min(peers) / ours} if peers else {})

    def _behind(self, run: int) -> bool:
        return any(ratio < SHORT for ratio in self._ratios(run).values())

    def _row(self) -> dict[str, Any]:
        workload, case = self.workload, self.workload.case
        ratios = [self._ratios(run) for run in range(max((len(p.taken) for p in self.programs.values()), default=0))]
        cost = workload.cost
        # Of two runs the better one: a row is short when it is so in both.
        best = {key: max(r[key] for r in ratios) for key in ratios[0]} if ratios else {}
        return {
            "family": workload.family, "model": workload.model, "held_back": workload.held_back,
            "what": workload.what, "direction": workload.direction, "seed": self.seed, "op": workload.op.name,
            "operands": [describe(x) for x in case.args()],
            "params": {name: str(value) for name, value in sorted(case.params.items())},
            "flops": cost.flops, "bytes": cost.bytes, "calls_a_program": self.calls, "clock": self.clock,
            "decisions": self.decisions,
            "microseconds": {p.name: [p.microseconds(i) for i in range(len(p.taken))] for p in self.programs.values()
                             if p.taken},
            "host_microseconds": self.by_host if self.clock == "device" else {},
            "kernels": {p.name: p.kernels for p in self.programs.values() if p.kernels},
            "ours": [p.name for p in self.programs.values() if p.ours],
            "same_as_dispatch": self.alike,
            "right": {p.name: p.right for p in self.programs.values() if p.right is not None},
            "errors": {p.name: p.error for p in self.programs.values() if p.error is not None},
            "temporary_bytes": {p.name: p.temporary_bytes for p in self.programs.values()
                                if p.temporary_bytes is not None},
            "notes": {p.name: p.note for p in self.programs.values() if p.note},
            "against_best_peer": best.get("best_peer"), "against_own_best": best.get("own_best"),
            "compile_seconds": self.seconds,
        }  # fmt: skip


def prepare(workload: Workload, pool: ThreadPoolExecutor, seed: int = 0) -> Prepared:
    """Compile every program of a workload in `pool`, and check each against the reference."""
    start = time.perf_counter()
    calls = _calls(workload)
    sets = _inputs(workload, calls, seed)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), sets)
    wrap = with_gradient if workload.grad else (lambda fn: fn)

    programs: dict[str, Program] = {}
    jobs: dict[str, Future[Any]] = {}

    def lower(name: str, fn: Callable[..., Any], ours: bool) -> None:
        programs[name] = program = Program(name, ours)
        try:
            jobs[name] = pool.submit(jax.jit(repeated(wrap(fn))).lower(*shapes).compile)
        except failures() as failure:
            program.note = first_line(failure)

    with dispatch.recording() as decided:
        lower("dispatch", workload.ours, True)
    decisions = _decisions(decided)
    taken = {d["implementation"] for d in decisions}
    alike = []
    for form in workload.forms:
        if taken == {form}:
            alike.append(form)
        else:
            lower(form, lambda *arrays, form=form: workload.ours(*arrays, form=form), True)
    for name, fn in workload.peers.items():
        lower(f"{name} (peer)" if name in programs else name, fn, False)
    wanted = _expected(workload, sets[0])
    for name, job in jobs.items():
        program = programs[name]
        try:
            program.compiled = job.result()
            _judge(program, workload, wanted, jax.block_until_ready(program.compiled(*sets))[0])
            program.temporary_bytes = program.compiled.memory_analysis().temp_size_in_bytes
        except failures() as failure:
            program.note, program.compiled = first_line(failure), None
    torch_sets = _Torch(workload, sets)
    for name, fn in workload.torch.items():
        programs[name] = program = Program(name, False)
        try:
            _judge(program, workload, wanted, torch_sets.once(fn))
        except _torch_failures() as failure:
            program.note = first_line(failure)
    torch_sets.free()
    return Prepared(workload, seed, calls, programs, decisions, alike, time.perf_counter() - start)


def _calls(workload: Workload) -> int:
    size = sum(map(nbytes, workload.case.args())) * (2 if workload.grad else 1)
    return CALLS if CALLS * size <= MOST_INPUT_BYTES else 1


def _inputs(workload: Workload, calls: int, seed: int) -> list[tuple[Any, ...]]:
    """Arrays of each call, as `ours` takes them; with the cotangents first where there is a gradient."""
    made = []
    for call in range(calls):
        arrays = workload.case.arrays(seed + call)
        given: tuple[Any, ...] = arrays
        if workload.grad:
            # The first call's are those that the reference is given.
            given = (checks.cotangents(workload.op, arrays, workload.case.params, 1 + call), *arrays)
        made.append(workload.arrange(given))
    return jax.block_until_ready(made)


def _expected(workload: Workload, given: tuple[Any, ...]) -> checks.Expected:
    arrays = workload.arrange(given[1:] if workload.grad else given)
    return checks.expected(workload.op, arrays, workload.case.params, grad=workload.grad, host_seconds=0.0)


def _judge(program: Program, workload: Workload, wanted: checks.Expected, out: Any) -> None:
    verdict = checks.check_output(workload.arrange(out), wanted)
    program.error = verdict.finite_error
    allowed = wanted.tolerance * (1.0 if program.ours else PEER_TOLERANCES)
    program.right = verdict.error <= allowed
    if not program.right:
        program.note = verdict.why


def _decisions(decided: Sequence[Any]) -> list[dict[str, Any]]:
    """Op, operands and choice of every decision; a scan's plan, which is no selection, says its path."""
    made = []
    for choice in decided:
        if not hasattr(choice, "call"):
            continue
        entry = {
            "op": choice.call.op.name, "operands": [describe(x) for x in choice.call.args],
            "params": {k: str(v) for k, v in choice.call.tuning_key.items()},
            "implementation": choice.implementation,
            "config": None if choice.config is None else str(choice.config),
        }  # fmt: skip
        if entry not in made:
            made.append(entry)
    return made


def _timed(running: Sequence[Program], calls: int) -> None:
    """One run: the samples of all programs in turns."""

    def sample(program: Program, repeats: int) -> float:
        assert program.run is not None
        start = time.perf_counter()
        for _ in range(repeats):
            last = program.run()
        program.wait(last)
        return (time.perf_counter() - start) / repeats

    for program in running:
        sample(program, 1)  # what the first call allocates
        program.taken.append([])
    repeats = {p.name: min(1000, max(1, round(SAMPLE_SECONDS / sample(p, 2)))) for p in running}
    for turn in range(SAMPLES):
        for program in running:
            latest = program.taken[-1]
            # A program that is far behind says so in two samples.
            if turn < 2 or statistics.median(latest) * calls < 50_000:
                latest.append(sample(program, repeats[program.name]) / calls * 1e6)


def _timed_on_device(running: Sequence[Program], calls: int, again: bool = False) -> str | None:
    """The same by the device's clock: how long kernels run. In the place of the run before, or after it with `again`;
    None, and nothing changed, where the profile does not have every program."""
    if jax.default_backend() != "gpu" or not running:
        return None
    for program in running:  # nothing is allocated or loaded inside the profile
        program.wait(program.kernel_by_kernel())
    repeats = {p.name: profiled_runs(1e-6 * calls * p.microseconds(0)) for p in running}
    order = [program for turn in range(ROUNDS) for program in in_turn(running, turn)]
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for program in order:
                time.sleep(PAUSE_SECONDS)
                for _ in range(repeats[program.name]):
                    last = program.kernel_by_kernel()
                program.wait(last)
        parts = parted(_kernels(folder), len(order))
    if parts is None:
        return None
    samples: dict[str, list[float]] = {program.name: [] for program in running}
    for program, all_spans in zip(order, parts, strict=True):
        of_a_call, spans = 1e6 / repeats[program.name] / calls, without_fills(all_spans)
        samples[program.name].append(of_a_call * busy(spans))
        ran: defaultdict[str, float] = defaultdict(float)
        for span in spans:
            ran[span.name] += of_a_call * (span.stop - span.start)
        longest = sorted(ran.items(), key=lambda each: -each[1])[:MOST_KERNELS]
        program.kernels = {name: round(us, 2) for name, us in longest}
    for program in running:
        if again:
            program.taken.append(samples[program.name])
        else:
            program.taken[-1] = samples[program.name]
    return "device"


def in_turn(programs: Sequence[Any], turn: int) -> list[Any]:
    """The programs, from another one on in each of the rounds.

    >>> [in_turn("abcdef", turn) for turn in range(ROUNDS)]
    [['a', 'b', 'c', 'd', 'e', 'f'], ['c', 'd', 'e', 'f', 'a', 'b'], ['e', 'f', 'a', 'b', 'c', 'd']]
    """
    first = turn * len(programs) // ROUNDS
    return [*programs[first:], *programs[:first]]


def profiled_runs(seconds: float) -> int:
    """How often a program that takes so long runs in a round.

    >>> [profiled_runs(seconds) for seconds in (1e-4, 0.02, 2.0)]
    [4, 2, 1]
    """
    return min(ROUND_RUNS, max(1, round(ROUND_SECONDS / seconds)))


class Span(NamedTuple):
    """What the device did from `start` to `stop`, in seconds."""

    start: float
    stop: float
    name: str = ""


def _kernels(folder: str) -> list[Span]:
    (path,) = Path(folder).rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(path)).planes
    streams = [
        line for plane in planes if "GPU" in plane.name for line in plane.lines if line.name.startswith("Stream")
    ]
    return [Span(1e-9 * e.start_ns, 1e-9 * e.end_ns, e.name) for line in streams for e in line.events]


def parted(spans: Sequence[Span], count: int) -> list[list[Span]] | None:
    """The spans in so many parts, which the longest pauses are between; None where a pause is too short to be one of
    ours. What stops a program in its midst, as a profiler does now and then, is shorter.

    >>> spans = [Span(0.0, 0.1), Span(0.05, 0.2), Span(0.205, 0.3), Span(0.32, 0.4)]
    >>> [len(part) for part in parted(spans, 2)], parted(spans, 3)
    ([3, 1], None)
    """
    ordered = sorted(spans)
    # How long nothing had run when each began.
    ends = itertools.accumulate((span.stop for span in ordered), max)
    pauses = [after.start - end for end, after in zip(ends, ordered[1:], strict=False)]
    longest = sorted(range(len(pauses)), key=pauses.__getitem__, reverse=True)[: count - 1]
    if count > len(ordered) or any(pauses[place] < PAUSE_SECONDS / 2 for place in longest):
        return None
    bounds = [0, *(place + 1 for place in sorted(longest)), len(ordered)]
    return [ordered[first:end] for first, end in itertools.pairwise(bounds)]


def without_fills(spans: Sequence[Span]) -> list[Span]:
    """A program's spans, but for what XLA fills before cuDNN's forward attention.

    >>> memory, fill = Span(0.0, 1e-6, "Memset 3"), Span(0.0, 9e-6, "Memset 3")
    >>> kernels = [Span(9e-6, 5e-5, f"cudnn_sdpa_flash_{which}") for which in ("fprop", "bprop")]
    >>> [len(without_fills(all)) for all in ([memory, fill, kernels[0]], [fill, *kernels], [fill])]
    [2, 3, 1]
    """
    names = {span.name for span in spans}
    if not any(CUDNN_FORWARD in name for name in names) or any(CUDNN_BACKWARD in name for name in names):
        return list(spans)
    return [span for span in spans if not (span.name.startswith(FILL) and span.stop - span.start > FILL_SECONDS)]


def busy(spans: Sequence[Span]) -> float:
    """How long something ran.

    >>> round(busy([Span(0.0, 0.1), Span(0.05, 0.2), Span(0.205, 0.3)]), 3)
    0.295
    """
    total, until = 0.0, -math.inf
    for span in sorted(spans):
        total += max(0.0, span.stop - max(span.start, until))
        until = max(until, span.stop)
    return total


def _torch_failures() -> tuple[type[BaseException], ...]:
    """Call it in the `except` clause itself, as `failures`."""
    return (RuntimeError, ImportError, AttributeError, *failures())


class _Torch:
    """torch on the same arrays: tensors that share their memory, where torch is installed and sees the device."""

    def __init__(self, workload: Workload, sets: Sequence[tuple[Any, ...]]) -> None:
        self.workload, self.sets = workload, sets
        self.tensors: list[tuple[list[Any], list[Any]]] | None = None

    @property
    def torch(self) -> Any:
        import torch

        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        return torch

    def _tensors(self) -> list[tuple[list[Any], list[Any]]]:
        """Cotangents and operands of each call."""
        if importlib.util.find_spec("torch") is None:
            raise ImportError("torch is not installed")
        if jax.default_backend() != "gpu":
            raise ImportError("torch is a peer on a GPU")
        if self.tensors is None:
            read = self.torch.from_dlpack
            self.tensors = []
            for given in self.sets:
                flow, arrays = (given[0], given[1:]) if self.workload.grad else ([], given)
                there = [read(x) for x in arrays if x is not None]
                if self.workload.grad:
                    there = [x.detach().requires_grad_(x.is_floating_point()) for x in there]
                self.tensors.append(([read(x) for x in flow], there))
        return self.tensors

    def _call(self, fn: Callable[..., Any], flow: Sequence[Any], there: Sequence[Any]) -> Any:
        if not self.workload.grad:
            with self.torch.no_grad():
                return fn(self.torch, *there)
        out = fn(self.torch, *there)
        moving = [x for x in there if x.requires_grad]
        # The loss of a language model is a float32 number whose cotangent JAX draws in the operands' type.
        flow = [g.to(o.dtype).reshape(o.shape) for g, o in zip(flow, self._leaves(out), strict=True)]
        return out, self.torch.autograd.grad(self._leaves(out), moving, flow)

    @staticmethod
    def _leaves(out: Any) -> list[Any]:
        return list(out) if isinstance(out, tuple) else [out]

    def once(self, fn: Callable[..., Any]) -> Any:
        """What the first call returns, as arrays of JAX."""
        out = self._call(fn, *self._tensors()[0])
        self.torch.cuda.synchronize()
        return jax.tree.map(lambda x: jax.numpy.from_dlpack(x.detach().contiguous()), out)

    def program(self, fn: Callable[..., Any]) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """All calls as one CUDA graph, so that the host's launches do not show, and as they are; twice the latter where
        no graph can be made."""
        torch, tensors = self.torch, self._tensors()

        def run() -> Any:
            return [self._call(fn, *each) for each in tensors]

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(2):
                run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                kept = run()
        except RuntimeError:
            torch.cuda.synchronize()
            return run, run
        return lambda: (graph.replay(), kept), run

    def wait(self, out: Any) -> None:
        self.torch.cuda.synchronize()

    def free(self) -> None:
        if self.tensors is not None:
            self.tensors = None
            self.torch.cuda.empty_cache()
