"""Programs made before they are needed: from disk where they are there, else compiled, several at a time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from capibara.compile.cache import ExecutableCache

if TYPE_CHECKING:
    import jax

__all__ = ["Program", "WarmupReport", "make_program", "warm_up"]


@dataclass(frozen=True)
class Program:
    """A function to compile for arguments of these shapes."""

    name: str
    """What a person is told."""
    what: str
    """What tells it from every other program of this package, shapes apart: those are part of its entry's name too."""
    build: Callable[[], Callable[..., Any]]
    args: tuple[Any, ...]
    """Arrays, or `jax.ShapeDtypeStruct`s, as trees."""
    donate: tuple[int, ...] = ()
    context: Callable[[], Any] | None = None
    """A context manager to trace in: a mesh, precision, rules."""
    devices: tuple[jax.Device, ...] | None = None
    """That it runs on, in the order of its mesh; the machine's first when None."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the compiler."""


@dataclass(frozen=True)
class WarmupReport:
    """What a warm-up did."""

    programs: int
    compiled: int
    from_disk: int
    seconds: float


def make_program(program: Program, cache: ExecutableCache | None = None) -> tuple[Any, bool]:
    """(the program ready to run, whether it was compiled now and not read from disk)."""
    if program.context is not None:
        with program.context():
            return _made(program, cache)
    return _made(program, cache)


def _made(program: Program, cache: ExecutableCache | None) -> tuple[Any, bool]:
    import jax

    name = ""
    if cache is not None:
        leaves, tree = jax.tree.flatten(program.args)
        described = [f"{leaf.dtype}{leaf.shape}{getattr(leaf, 'sharding', None)}" for leaf in leaves]
        devices = [str(device.id) for device in program.devices or ()]
        options = [f"{option}={value}" for option, value in program.options.items()]
        name = cache.name("\n".join([program.what, str(program.donate), str(tree), *described, *devices, *options]))
        ready = cache.load(name, program.devices)
        if ready is not None:
            return ready, False
    lowered = jax.jit(program.build(), donate_argnums=program.donate).lower(*program.args)
    ready = lowered.compile(compiler_options=dict(program.options) or None)
    if cache is not None:
        cache.store(name, ready)
    return ready, True


def warm_up(
    programs: Sequence[Program],
    cache: ExecutableCache | None = None,
    *,
    progress: Callable[[int, int, str], None] | None = None,
    workers: int | None = None,
) -> tuple[list[Any], WarmupReport]:
    """Every program ready to run, in order.

    Args:
      progress: called with how many are done, how many there are, and the name of the last one done.
      workers: programs made at a time; by default half of the machine's processors, 8 at most.
    """
    start = time.perf_counter()
    lock = threading.Lock()
    done = compiled = 0

    def make(program: Program) -> Any:
        nonlocal done, compiled
        ready, was_compiled = make_program(program, cache)
        with lock:
            done += 1
            compiled += was_compiled
            if progress is not None:
                progress(done, len(programs), program.name)
        return ready

    with ThreadPoolExecutor(workers or max(1, min(8, (os.cpu_count() or 2) // 2))) as pool:
        made = list(pool.map(make, programs))
    seconds = time.perf_counter() - start
    return made, WarmupReport(len(programs), compiled, len(programs) - compiled, seconds)
