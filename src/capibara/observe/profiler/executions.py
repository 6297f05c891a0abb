"""Which compiled programs run, and how often, whoever jitted them and whenever.

jax runs a jitted call in one of two ways, and both are listened to where jax lets others listen:

- in C++, when the same call was made before. jax calls a *post hook* after each (`jax.config.jax_debug_nans` is made
  of it). It is a setting of jax's, like any other of its configuration, and is put back on leaving.
- in Python, at a first call and for programs with side effects. jax tells a listener of test events that it is about
  to. The slot for that listener is a variable of a module of jax: the one place in this library where something is
  assigned into another module. It has no other door, it is put back on leaving, and whoever listened before is told
  still.

Nothing of the program is wrapped, traced again or compiled again: its executable is looked up in jax's own caches.

jax lets a thread have a post hook of its own, and leaves it with none after `jax.debug_nans`, which some of jax's own
functions use. So that setting, too, is listened to while a profile is taken. Another thread that came by none before
goes uncounted where jax runs its calls in C++, until it traces something; a trace has its rows all the same, and the
profile says so.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax._src import api, config, pjit, util, xla_bridge
from jax._src.array import ArrayImpl
from jax._src.interpreters import mlir
from jax._src.named_sharding import UnspecifiedValue

from capibara.lru import LRU
from capibara.observe.profiler.queues import Queues, last_ready, still_computed
from capibara.program.hlo_work import HloWork, hlo_work

__all__ = ["Executions", "ProgramRuns"]

_BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"
_COMPILING = "/jax/core/compile/"
# So many executables are held until the end; the work of more is read at once, and they are let go.
_HELD = 256
_BATCH = 16


@dataclass
class ProgramRuns:
    """One compiled program, and how often it ran."""

    name: str
    """As jax calls it: "jit_step"."""
    runs: int
    devices: int
    """That one run takes part on."""
    work: HloWork
    """Of one run on one device."""
    program_id: int
    """Which the rows of a trace carry."""
    peak_bytes: float
    """Of one device: arguments, results and temporaries, by the compiler."""


@dataclass
class _Held:
    executable: Any
    runs: int = 0


class Executions:
    """Counts programs between `start` and `stop`.

    Args:
        before_first_call: Called once, in the thread that makes it, before the first call that jax runs in Python: of a
            process in which nothing has run yet, before anything does.
    """

    def __init__(self, before_first_call: Callable[[], None] | None = None) -> None:
        self._before_first_call = before_first_call
        self.compilations: Counter[str] = Counter()
        """Function, with the file and line that it is at where jax knows -> how many programs were compiled for it."""
        self.host_arguments = 0
        """Calls that were handed an array of the host."""
        self.problems: Counter[str] = Counter()
        """What kept a call from being counted, and how many calls."""
        self.first_call: float | None = None
        """When the first program had been handed to a device, by `time.perf_counter`."""
        self.queues = Queues()
        self._compiling: list[tuple[float, float]] = []
        self._waited_for: list[tuple[float, float]] = []
        self._held: dict[int, _Held] = {}
        self._read: list[ProgramRuns] = []
        self._by_result: LRU[Any, tuple[Any, int]] = LRU(4096)
        self._by_signature: LRU[Any, int] = LRU(4096)
        self._last_results: dict[Any, Any] = {}
        self._lock = threading.RLock()
        self._own = threading.local()
        self._settings: list[tuple[Any, Any, Any]] = []
        self._global_before: Any = None
        self._local_before: Any = None
        self._started = self._stopped = False
        self._listener_before: Any = None

    def start(self) -> None:
        """Begin to listen."""
        hook = api._post_hook_state
        self._global_before, self._local_before = hook.get_global(), hook.get_local()
        self._listener_before = util.test_event_listener
        self._started = True
        for setting in (config.debug_nans, config.debug_infs):
            of_all, of_thread = setting._update_global_hook, setting._update_thread_local_hook
            self._settings.append((setting, of_all, of_thread))
            setting._add_hooks(
                functools.partial(self._hook_changes, of_all), functools.partial(self._own_hook_changes, of_thread)
            )
        jax.monitoring.register_event_duration_secs_listener(self._compiled)
        util.test_event_listener = self._event
        hook.set_global(self._called)
        self._listen_here()

    def stop(self) -> None:
        """Listen no longer; jax is as it was. A second time it does nothing."""
        if not self._started or self._stopped:
            return
        self._stopped = True
        for setting, of_all, of_thread in self._settings:
            setting._add_hooks(of_all, of_thread)
        hook = api._post_hook_state
        hook.set_global(self._global_before)
        hook.set_local(self._local_before)
        util.test_event_listener = self._listener_before
        jax.monitoring.unregister_event_duration_listener(self._compiled)

    def wait(self) -> float:
        """Until what was started is done: every array there is, and whatever else a device has in its queue.

        On a CPU, which has no queue, a program may outlive this whose first call's result was dropped at once.

        Returns when it was done, by `time.perf_counter`: what it takes to find out is not the program's.
        """
        left = time.perf_counter()
        if not xla_bridge.backends_are_initialized():
            return left
        ready = last_ready(left, [*self._last_results.values(), *jax.live_arrays()])
        self._last_results.clear()
        return self.queues.emptied(ready)

    def compiling_spans(self) -> list[tuple[float, float]]:
        """When jax traced, lowered or compiled, by `time.perf_counter`; they may overlap."""
        return list(self._compiling)

    def waited_for(self) -> list[tuple[float, float]]:
        """Of them, those at whose end no device was seen to be at work still: it had to wait for the program."""
        return list(self._waited_for)

    def programs(self) -> list[ProgramRuns]:
        """Every program that ran. Reading their work takes a moment, and is done once."""
        with self._lock:
            for key in list(self._held):
                self._read_work(key)
            merged: dict[Any, ProgramRuns] = {}
            for program in self._read:
                same = merged.setdefault((program.name, program.program_id), program)
                if same is not program:
                    same.runs += program.runs
            self._read = list(merged.values())
            return list(self._read)

    # What jax calls.

    def _called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """After a call that jax ran in C++."""
        # The call has handed its program over; which one it was is looked up while the device runs it.
        handed_over = time.perf_counter() if self.first_call is None else 0.0
        before = getattr(self._own, "hook_before", self._global_before)
        if self._stopped:  # in another thread than the one that stopped it
            api._post_hook_state.set_local(before)
        if before is not None:
            before(function, args, kwargs, result)
        if self._stopped:
            return
        if getattr(self._own, "asking", False):
            return
        try:
            leaf = _first_leaf(result)
            self._count(self._program_of(function, args, kwargs, leaf))
            if self.first_call is None:
                self.first_call = handed_over
            self._note_arguments(args, kwargs)
            if leaf is not None:
                self._last_results[threading.get_ident()] = leaf
        except Exception as problem:  # noqa: BLE001 - the program goes on; the profile says what is missing from it
            self.problems[f"{type(problem).__name__}: {problem}"[:200]] += 1

    def _event(self, name: str, *args: Any) -> None:
        """Before a call that jax runs in Python."""
        if self._listener_before is not None:
            self._listener_before(name, *args)
        if name not in ("jit_cpp_cache_miss", "stages_compiled_call") or getattr(self._own, "asking", False):
            return
        with self._lock:
            first, self._before_first_call = self._before_first_call, None
        if first is not None:
            first()
        caller = sys._getframe(2).f_locals
        try:
            if name == "stages_compiled_call":
                executable = caller["args"][0].executable
            else:
                executable = self._lowered(caller, caller["args"])
            self._count(self._hold(executable))
            if self.first_call is None:
                self.first_call = time.perf_counter()  # compiled, and about to run
            self._note_arguments(caller["args"], {})
        except Exception as problem:  # noqa: BLE001 - as above
            self.problems[f"{type(problem).__name__}: {problem}"[:200]] += 1
            return
        self._listen_here()

    def _listen_here(self) -> None:
        """Where this thread has a hook of its own, be it none: listen, and call that."""
        own = api._post_hook_state.get_local()
        if (own is None or callable(own)) and own != self._called:
            self._own.hook_before = own
            api._post_hook_state.set_local(self._called)

    def _hook_changes(self, update: Any, value: Any) -> None:
        """jax's hook of all threads follows a setting."""
        update(value)
        if not self._stopped:
            self._global_before = api._post_hook_state.get_global()
            api._post_hook_state.set_global(self._called)

    def _own_hook_changes(self, update: Any, value: Any) -> None:
        """jax's hook of this thread follows a setting."""
        update(value)
        if not self._stopped:
            self._listen_here()

    def _compiled(self, event: str, duration_secs: float, **labels: str | int) -> None:
        if not event.startswith(_COMPILING) or getattr(self._own, "looking_up", False):
            return
        now = time.perf_counter()
        self._compiling.append((now - duration_secs, now))
        with contextlib.suppress(RuntimeError):  # deleted by another thread since it was looked at
            if not any(still_computed(array) for array in list(self._last_results.values())):
                self._waited_for.append(self._compiling[-1])
        if event == _BACKEND_COMPILE:
            self.compilations[getattr(self._own, "source", None) or str(labels.get("fun_name", "?"))] += 1

    # Which program a call runs.

    def _count(self, key: int) -> None:
        with self._lock:
            self._held[key].runs += 1
            if len(self._held) > _HELD:
                self._read_work(next(iter(self._held)))

    def _hold(self, executable: Any) -> int:
        loaded = executable.xla_executable
        key = id(loaded)
        with self._lock:
            if key not in self._held:
                self._held[key] = _Held(loaded)
        return key

    def _program_of(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], leaf: Any) -> int:
        # Every result of one entry of jax's cache has the same type and sharding, the objects themselves; they tell
        # entries apart at a tenth of what looking at all arguments takes. But for shardings that the user gave: other
        # entries may have those too.
        known: Any = None
        if leaf is not None:
            described = (leaf.aval, leaf.sharding)
            known = (function, id(described[0]), id(described[1]))
            kept = self._by_result.get(known)
            if kept is not None and kept[1] in self._held:
                return kept[1]
        inside = _closure(function)
        if "self" in inside:  # jax.stages.Compiled
            return self._hold(inside["self"])
        if "jaxpr" in inside:  # a jit inside of a transformation: jax makes a new function for every call
            signature: Any = (id(inside["jaxpr"]), *map(_kind_of, inside["args"]))
            kept = self._by_result.get(signature)
            if kept is None or kept[1] not in self._held:
                kept = (inside["jaxpr"], self._hold(self._lowered(inside, inside["args"])))
                self._by_result[signature] = kept
            return kept[1]
        signature = _signature(function, args, kwargs)
        key = self._by_signature.get(signature)
        if key is None or key not in self._held:
            key = self._hold(self._looked_up(function, args, kwargs))
            self._by_signature[signature] = key
        if known is not None and not _own_out_shardings(function):
            self._by_result[known] = (described, key)
        return key

    def _looked_up(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._own.asking = self._own.looking_up = True
        try:
            # Both steps are answered by jax's caches: the call has just run.
            return function.lower(*args, **kwargs).compile()._executable
        finally:
            self._own.asking = self._own.looking_up = False

    def _lowered(self, params: dict[str, Any], args: tuple[Any, ...]) -> Any:
        """The executable of a call that jax is about to make: compiled now, it is in jax's cache for the call."""
        names = (
            *("jaxpr", "in_shardings", "out_shardings", "in_layouts", "out_layouts", "donated_invars", "ctx_mesh"),
            *("name", "keep_unused", "inline", "compiler_options_kvs"),
        )
        jaxpr = params["jaxpr"]
        about = getattr(getattr(jaxpr, "jaxpr", jaxpr), "debug_info", None)
        self._own.asking, self._own.source = True, getattr(about, "func_src_info", None)
        try:
            return pjit._resolve_and_lower(
                [pjit.convert_to_metaty(arg) for arg in args],
                **{name: params[name] for name in names},
                lowering_platforms=None,
                lowering_parameters=mlir.LoweringParameters(),
                pgle_profiler=None,
            ).compile()
        finally:
            self._own.asking, self._own.source = False, None

    def _read_work(self, key: int) -> None:
        held = self._held.pop(key)
        module = held.executable.hlo_modules()[0]
        stats = held.executable.get_compiled_memory_stats()
        text = module.to_string()
        size = ("argument", "output", "temp")
        self._read.append(
            ProgramRuns(
                name=module.name,
                runs=held.runs,
                devices=len(held.executable.local_devices()),
                work=hlo_work(text),
                program_id=_module_id(module.as_serialized_hlo_module_proto()),
                peak_bytes=sum(getattr(stats, f"{part}_size_in_bytes") for part in size) - stats.alias_size_in_bytes,
            )
        )

    def _note_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for arg in (*args, *kwargs.values()):
            # A batch is an array or a small dict of them; a large one is weights, and looking at each would take time.
            small = type(arg) is dict and len(arg) <= _BATCH
            if type(arg) is np.ndarray or (small and any(type(x) is np.ndarray for x in arg.values())):
                self.host_arguments += 1
                return


def _first_leaf(result: Any) -> Any:
    """One array of a result. Every call comes by here: all leaves are looked at only where the first is none."""
    inner = result
    while type(inner) is not ArrayImpl:
        if type(inner) in (tuple, list) and inner:
            inner = inner[0]
        elif type(inner) is dict and inner:
            inner = next(iter(inner.values()))
        else:
            return next((leaf for leaf in jax.tree.leaves(result) if type(leaf) is ArrayImpl), None)
    return inner


def _own_out_shardings(function: Any) -> bool:
    return any(not isinstance(leaf, UnspecifiedValue) for leaf in function._jit_info.out_shardings_leaves)


def _closure(function: Any) -> dict[str, Any]:
    miss = function._cache_miss
    cells = miss.__closure__ or ()
    return dict(zip(miss.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))


def _kind_of(leaf: Any) -> Any:
    """What of an argument a compiled program depends on."""
    aval = getattr(leaf, "aval", None)
    if aval is not None:
        return aval, getattr(leaf, "sharding", None), getattr(leaf, "committed", None)
    if hasattr(leaf, "shape"):
        return leaf.shape, leaf.dtype
    return type(leaf)


def _signature(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    info = function._jit_info
    static = [args[i] for i in info.static_argnums if -len(args) <= i < len(args)]
    static += [(name, kwargs[name]) for name in info.static_argnames if name in kwargs]
    leaves, tree = jax.tree.flatten((args, kwargs))
    return function, tree, tuple(map(_kind_of, leaves)), tuple(static), config.trace_context()


def _module_id(proto: bytes) -> int:
    """The number of a compiled module, by which traces name it: field 5 of its protocol buffer; 0 without."""
    place, size = 0, len(proto)

    def varint() -> int:
        nonlocal place
        shift = value = 0
        while True:
            byte = proto[place]
            place += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while place < size:
        tag = varint()
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value = varint()
            if number == 5:
                return value
        elif wire == 2:
            length = varint()
            place += length
        else:
            place += 8 if wire == 1 else 4
    return 0
