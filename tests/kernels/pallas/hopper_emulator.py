"""Runs the Hopper attention kernels on the CPU, forward and backward, for their arithmetic and synchronisation.

Not for their layouts, but for where the swizzle begins of what registers are stored to and loaded from. Each warpgroup
is a thread and every operation is carried out at once, by numpy: single operations of JAX would each be compiled first.
Only copies out of shared memory are put off until they are waited for. Barriers count arrivals and phases as the
hardware does; a wait that never ends, or that could mistake one phase for another, fails. Shared memory starts as NaN,
and what is in a union lies over each other as it does on the chip. Copies by TMA fill with zeros past the end when they
read and drop what lies past it when they write, except along an axis that is a single tile, which its descriptor does
not have; other loads and stores must stay inside.

Programs run one after another, in the order of the grid, or all at once: see `emulated`, and board_emulator.py for
those that wait for one another.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.ref import AbstractRef

from capibara.kernels.ops.attention.hopper import (
    backward,
    backward_divided,
    backward_loops,
    backward_steps,
    forward,
    masking,
    panels,
)
from capibara.kernels.pallas import hopper, overlap, prng

PATIENCE = 60.0  # seconds until a barrier counts as stuck; compilation of single operations is slow at first
LATE = 0.02  # seconds that a warpgroup starts after another at most, where all programs run at once
_here = threading.local()
_adding = threading.Lock()
_held: tuple[tuple[int, ...], ...] | None = None
KERNELS = (forward, backward, backward_steps, backward_loops, backward_divided, masking, panels)


class _Shim:
    """A module with some of its names replaced."""

    def __init__(self, module: Any, **names: Any) -> None:
        self.__dict__.update(names, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Divided:
    """One module to the warpgroups of a kernel, another to the work around it, which is XLA's and stays JAX."""

    def __init__(self, inside: Any, outside: Any) -> None:
        self._inside, self._outside = inside, outside

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inside if hasattr(_here, "program") else self._outside, name)


class Ref:
    """A part of an array: for each axis of the array an int, or (start, size). Shared memory may be tiled, or not.

    Reads and writes may run past the ends of the array when they `clip`: by "rows" or by "tiles", as TMA copies them.
    """

    def __init__(
        self, array: np.ndarray, part: tuple[Any, ...] | None = None, tiled: bool = True, swizzled: bool = True
    ) -> None:
        self.array, self.tiled, self.swizzled = array, tiled, swizzled
        self.part = part if part is not None else tuple((0, n) for n in array.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(p[1] for p in self.part if isinstance(p, tuple))

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    @property
    def first_byte(self) -> int:
        """Where the part begins in the array."""
        starts = [p[0] if isinstance(p, tuple) else p for p in self.part]
        return int(np.dot(starts, self.array.strides))

    @property
    def begins_a_swizzle(self) -> bool:
        """Whether it is no matrix in shared memory, or begins where the pattern of the widest swizzle does.

        What is not tiled is swizzled too: as it says, or as layout inference takes it (JAX from 0.11 on), but for
        kernels that are lowered without inference. Registers are stored and loaded in a pattern that begins with the
        part; TMA's is of the address, from any row on.
        """
        return self.tiled or not self.swizzled or len(self.shape) < 2 or self.first_byte % hopper.SMEM_ALIGNMENT == 0

    @property
    def at(self) -> Any:
        return _At(self)

    def narrow(self, index: Any) -> Ref:
        index = index if isinstance(index, tuple) else (index,)
        index = () if index == (...,) else index
        given = iter(index)
        part: list[Any] = []
        for p in self.part:
            if not isinstance(p, tuple):
                part.append(p)
                continue
            i = next(given, slice(None))
            if isinstance(i, slice):
                start, stop, _ = i.indices(p[1])
                part.append((p[0] + start, stop - start))
            elif isinstance(i, pl.Slice):
                part.append((p[0] + int(i.start), i.size))
            else:
                assert 0 <= int(i) < p[1], f"index {int(i)} of {p[1]}"
                part.append(p[0] + int(i))
        return Ref(self.array, tuple(part), self.tiled, self.swizzled)

    def _inside(self, clip: str | None) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The index into the array, and into the part, of what lies inside the array."""
        source, target = [], []
        for p, n in zip(self.part, self.array.shape, strict=True):
            if not isinstance(p, tuple):
                source.append(p)
                continue
            start, size = p
            inside = start >= 0 and start + size <= n
            assert inside or clip, f"{start}:{start + size} of {n}, and nothing clips it"
            # By tiles, an axis of a single one has no place in a TMA descriptor.
            assert inside or clip == "rows" or size != n, f"{start}:{start + size} of a single tile"
            first, last = min(max(start, 0), n), min(max(start + size, 0), n)
            source.append(slice(first, last))
            target.append(slice(first - start, last - start))
        return tuple(source), tuple(target)

    def read(self, clip: str | None = None) -> np.ndarray:
        assert not _is_of_before(self.array) or _here.awaited, "read before the kernel before is done"
        source, target = self._inside(clip)
        made = np.zeros(self.shape, self.dtype)
        made[target] = self.array[source]
        return made

    def transpose(self, axes: tuple[int, ...]) -> Ref:
        return _Transposed(self, axes)

    def write(self, value: Any, clip: str | None = None) -> None:
        value = np.asarray(value)
        assert value.shape == self.shape, (value.shape, self.shape)
        assert value.dtype == self.dtype, (value.dtype, self.dtype)
        assert not _is_of_before(self.array) or _here.program.awaited, "written before the kernel before is done"
        source, target = self._inside(clip)
        self.array[source] = value[target]

    def load(self) -> np.ndarray:
        assert self.begins_a_swizzle, f"loaded from byte {self.first_byte} on, inside the pattern of a swizzle"
        return self.read()

    def store(self, value: Any) -> None:
        assert self.begins_a_swizzle, f"stored from byte {self.first_byte} on, inside the pattern of a swizzle"
        self.write(value)

    def __getitem__(self, index: Any) -> Any:
        return self.narrow(index).load()[()]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.narrow(index).store(value)


def _is_of_before(array: np.ndarray) -> bool:
    """Whether a kernel that was started early has to wait before it touches this."""
    return hasattr(_here, "program") and id(array) in _here.program.grid.of_before


def _await_previous() -> None:
    time.sleep(LATE)  # so that who does not wait is sooner
    _here.awaited = _here.program.awaited = True


@contextlib.contextmanager
def started_early(*held: tuple[int, ...]) -> Iterator[None]:
    """Kernels inside are started before the one before them is done; arrays of these shapes were there long before.

    Other arrays are read by warpgroups that awaited it, and written by programs that did, which all do.
    """
    global _held
    before, _held = _held, held
    try:
        with overlap.overlapping():
            yield
    finally:
        _held = before


class _Transposed(Ref):
    """A part of an array with its axes in another order: read and written as a whole."""

    def __init__(self, ref: Ref, axes: tuple[int, ...]) -> None:
        super().__init__(ref.array, ref.part, ref.tiled, ref.swizzled)
        self.ref, self.axes = ref, axes

    def read(self, clip: str | None = None) -> np.ndarray:
        return self.ref.read(clip).transpose(self.axes)

    def write(self, value: Any, clip: str | None = None) -> None:
        self.ref.write(np.transpose(value, np.argsort(self.axes)), clip)

    def __setitem__(self, index: Any, value: Any) -> None:
        assert index is ..., "a transposed reference is written as a whole"
        self.write(value)


class _At:
    def __init__(self, ref: Any) -> None:
        self.ref = ref

    def __getitem__(self, index: Any) -> Any:
        return self.ref.narrow(index)


class _Barrier:
    """One barrier of a warpgroup program: phases complete after `arrivals`."""

    def __init__(self, arrivals: int) -> None:
        self.arrivals, self.count, self.phase = arrivals, 0, 0
        self.waited: dict[int, int] = {}
        self.changed = threading.Condition()

    def arrive(self) -> None:
        with self.changed:
            self.count += 1
            if self.count == self.arrivals:
                self.count, self.phase = 0, self.phase + 1
                self.changed.notify_all()

    def wait(self) -> None:
        me = _here.warpgroup
        with self.changed:
            wanted = self.waited.get(me, 0) + 1
            until = time.monotonic() + PATIENCE
            while self.phase < wanted:
                if _here.program.failed:
                    raise RuntimeError("another warpgroup failed")
                assert time.monotonic() < until, "a barrier was never completed: the warpgroups wait for each other"
                self.changed.wait(0.05)
            # The hardware knows a phase by its parity alone.
            assert self.phase == wanted, f"a wait for phase {wanted} came when {self.phase} had completed"
            self.waited[me] = wanted


class _Barriers:
    def __init__(self, made: list[_Barrier], index: int | None = None) -> None:
        self.made, self.index = made, index

    @property
    def at(self) -> Any:
        return _At(self)

    def narrow(self, index: Any) -> _Barriers:
        return _Barriers(self.made, int(index))

    @property
    def one(self) -> _Barrier:
        assert self.index is not None or len(self.made) == 1
        return self.made[self.index or 0]


class _Accumulator:
    def __init__(self, value: Any) -> None:
        self.value = value

    @property
    def at(self) -> Any:
        return _At(self)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    def narrow(self, index: Any) -> _AccumulatorPart:
        return _AccumulatorPart(self, index)

    def __getitem__(self, index: Any) -> Any:
        return self.value

    def __setitem__(self, index: Any, value: Any) -> None:
        assert value.shape == self.value.shape
        self.value = value


class _AccumulatorPart:
    """Columns of an accumulator."""

    def __init__(self, whole: _Accumulator, index: Any) -> None:
        self.whole, self.index = whole, index

    @property
    def value(self) -> Any:
        return self.whole.value[self.index]

    @value.setter
    def value(self, value: Any) -> None:
        made = np.array(self.whole.value)
        made[self.index] = value
        self.whole.value = made


class _Grid:
    """What programs share that run at the same time. `swizzles`: layouts are inferred, those of shared memory too."""

    def __init__(self, swizzles: bool = True, sizes: dict[str, int] | None = None) -> None:
        self.swizzles, self.sizes = swizzles, sizes or {}
        self.failed: list[Exception] = []
        self.lock = threading.Lock()
        self.draw = random.Random(0)
        self.leaving: list[Callable[[], None]] = []
        """Stores to global memory that others may not see yet. When the kernel has ended they do."""
        self.of_before: set[int] = set()
        """Arrays that the kernel before may not be done with, where this one was started early."""


class _Program:
    """One program of the grid: what its warpgroups share."""

    def __init__(self, place: dict[str, int], grid: _Grid) -> None:
        self.place, self.grid, self.failed = place, grid, grid.failed
        self.scratch: tuple[Any, Any] | None = None
        self.lock = threading.Lock()
        self.turns = [_Barrier(1), _Barrier(1)]
        self.awaited = False
        """Whether one of its warpgroups awaited the kernel before."""


def wait_until(there: Callable[[], bool], what: str) -> None:
    """By a warpgroup: look again and again."""
    until = time.monotonic() + PATIENCE
    while not there():
        if _here.program.failed:
            raise RuntimeError("another warpgroup failed")
        assert time.monotonic() < until, f"{what}: the programs wait for each other"
        time.sleep(0.001)


def _value(x: Any) -> np.ndarray:
    return np.asarray(x.read() if isinstance(x, Ref) else x, np.float32)


def _wgmma(acc: _Accumulator, left: Any, right: Any) -> None:
    assert (acc.value.dtype == np.int32) == (left.dtype == right.dtype == np.int8)
    left, right, made = _value(left), _value(right), np.array(acc.value)
    # In cubes of 64: a larger product would be shared between threads, which on a busy machine wait for each other
    # for longer than it takes.
    rows, columns, inner = (range(0, n, 64) for n in (*made.shape, left.shape[1]))
    for i, j, k in itertools.product(rows, columns, inner):
        cube = left[i : i + 64, k : k + 64] @ right[k : k + 64, j : j + 64]
        made[i : i + 64, j : j + 64] += cube.astype(made.dtype, copy=False)  # 64 products of 8 bits are exact
    acc.value = made


class _Smem:
    """An array in shared memory, to be made: `tiled`, or not. Tiles of one row are as good as none."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, transforms: Any = ()) -> None:
        self.shape, self.dtype = shape, jnp.dtype(dtype)
        self.tiled = any(isinstance(t, plgpu.TilingTransform) and t.tiling[0] > 1 for t in transforms)
        self.transformed = bool(transforms)

    @property
    def size(self) -> int:
        """In bytes, up to where another array may begin."""
        return masking.round_up(math.prod(self.shape) * self.dtype.itemsize, hopper.SMEM_ALIGNMENT)

    def __call__(self) -> Ref:
        floating = jnp.issubdtype(self.dtype, jnp.floating)
        made = np.full(self.shape, np.nan if floating else 77, self.dtype)
        return Ref(made, tiled=self.tiled, swizzled=self.transformed or _here.program.grid.swizzles)

    def inside(self, memory: np.ndarray, first: int) -> Ref:
        held = memory[first : first + math.prod(self.shape) * self.dtype.itemsize]
        return Ref(held.view(self.dtype).reshape(self.shape), tiled=self.tiled)


def _union(*groups: Any) -> Callable[[], Any]:
    """Groups of arrays over the same bytes, one array after another in each. They begin as NaN, as any float.

    In which order a part's numbers lie is not emulated: what one writes, another of its shape may read.
    """

    def make() -> Any:
        size = max(sum(spec.size for spec in jax.tree.leaves(group)) for group in groups)
        memory = np.full(size, 0xFF, np.uint8)

        def placed(group: Any) -> Any:
            specs, kind = jax.tree.flatten(group)
            firsts = itertools.accumulate((spec.size for spec in specs), initial=0)
            return kind.unflatten(spec.inside(memory, first) for spec, first in zip(specs, firsts, strict=False))

        return tuple(map(placed, groups))

    return make


def _barrier(num_arrivals: int = 1, num_barriers: int = 1) -> Callable[[], Any]:
    return lambda: _Barriers([_Barrier(num_arrivals) for _ in range(num_barriers)])


def _run_scoped(body: Callable[..., Any], *specs: Any, collective_axes: Any = None, **named: Any) -> Any:
    program = _here.program
    # Accumulators are a warpgroup's own; a program of one warpgroup has shared memory without an axis, too.
    if collective_axes is None and all(isinstance(spec, _Accumulator) for spec in [*specs, *named.values()]):
        own, own_named = jax.tree.map(lambda spec: _Accumulator(spec.value), (specs, named))
        return body(*own, **own_named)
    with program.lock:
        if program.scratch is None:
            program.scratch = jax.tree.map(lambda make: make(), (specs, named))
    made, made_named = program.scratch
    return body(*made, **made_named)


def _run_state(body: Callable[..., Any]) -> Callable[..., Any]:
    def run(state: Any) -> Any:
        # What is no accumulator is a value that the body may replace.
        refs = jax.tree.map(lambda one: one if isinstance(one, _Accumulator) else _Accumulator(one), state)
        body(refs)
        return jax.tree.map(lambda one: one.value, refs)

    return run


class _AccumulatorType:
    def __call__(self, shape: tuple[int, ...], dtype: Any) -> _Accumulator:
        return _Accumulator(np.zeros(shape, dtype))

    def init(self, value: Any) -> _Accumulator:
        return _Accumulator(value)


def _to_smem(source: Ref, target: Ref, barrier: _Barriers) -> None:
    target.write(source.read(clip="tiles" if target.tiled else "rows"))
    barrier.one.arrive()


def _to_gmem(source: Ref, target: Ref, reduction_op: str | None = None) -> None:
    assert reduction_op in (None, "add")
    assert source.tiled or len(source.shape) < 2 or source.first_byte % 128 == 0, "TMA copies from multiples of 128"
    assert reduction_op or source.tiled or source.swizzled or _ends_like_a_plain_copy(target), (
        f"{target.part} of {target.array.shape}: a plain copy ends with the array, not with its axis"
    )
    _here.leaving.append((source, target, reduction_op))


def _ends_like_a_plain_copy(target: Ref) -> bool:
    """Whether what lies past the end of an axis is dropped: of one run of memory JAX makes a copy without a descriptor,
    which is cut off where the whole array ends."""
    parts = [p if isinstance(p, tuple) else (p, 1) for p in target.part]
    run, one_run = 1, True
    for (_, size), step in zip(reversed(parts), reversed(target.array.strides), strict=True):
        one_run &= size == 1 or step == run * target.array.itemsize
        run *= size
    past = any(first + size > n for (first, size), n in zip(parts, target.array.shape, strict=True))
    last = target.first_byte // target.array.itemsize + run >= target.array.size
    return not (one_run and past) or last


def _wait_to_gmem(under_way: int, wait_read_only: bool = False) -> None:
    """No more than the last `under_way` copies of this warpgroup may still read shared memory; the others read it now.

    So they are as late as they may be, and what was written before they had left goes out with them.
    """
    del wait_read_only  # what a copy has read is also written here
    while len(_here.leaving) > under_way:
        _leave(*_here.leaving.pop(0))


def _leave(source: Ref, target: Ref, reduction_op: str | None) -> None:
    value = source.read()
    # One number a row leaves without a descriptor.
    clip = None if len(source.shape) == 1 else "tiles" if source.tiled else "rows"
    if reduction_op == "add":
        with _adding:
            target.write(target.read(clip) + value, clip)
    else:
        target.write(value, clip)


def _loop(first: Any, end: Any) -> Callable[[Callable[..., None]], None]:
    def run(body: Callable[..., None]) -> None:
        for i in range(int(first), int(end)):
            body(np.int32(i))

    return run


def _nd_loop(shape: tuple[int, ...], *, collective_axes: str) -> Callable[[Callable[[Any], None]], None]:
    """Every so many of a count of steps, as many as there are programs."""
    (count,), program = shape, _here.program

    def run(body: Callable[[Any], None]) -> None:
        mine = range(program.place[collective_axes], count, program.grid.sizes[collective_axes])
        for turn, index in enumerate(mine):
            body(SimpleNamespace(index=(np.int32(index),), local_index=np.int32(turn)))

    return run


def _row_by_row(index: Any, shape: tuple[int, int], minor: int, width: int) -> tuple[Any, Any]:
    """Tiles in an order that is not the chip's, each of them once."""
    row, column = divmod(int(index), shape[1])
    return np.int32(row), np.int32(column)


def _fori_loop(first: Any, end: Any, body: Callable[..., Any], carry: Any) -> Any:
    for i in range(int(first), int(end)):
        carry = body(np.int32(i), carry)
    return carry


def _while_loop(goes_on: Callable[[Any], Any], body: Callable[[Any], Any], carry: Any) -> Any:
    while bool(goes_on(carry)):
        carry = body(carry)
    return carry


def _when(condition: Any) -> Callable[[Callable[[], None]], None]:
    return lambda body: body() if bool(condition) else None


def _iota(dtype: Any, shape: tuple[int, ...], axis: int) -> np.ndarray:
    counted = np.arange(shape[axis], dtype=dtype).reshape([-1 if i == axis else 1 for i in range(len(shape))])
    return np.broadcast_to(counted, shape)


def _broadcast_in_dim(x: Any, shape: tuple[int, ...], axes: Any) -> np.ndarray:
    placed = np.reshape(x, [np.shape(x)[axes.index(i)] if i in axes else 1 for i in range(len(shape))])
    return np.broadcast_to(placed, shape)


def _shift(x: Any, by: Any) -> Any:
    """A logical shift to the right: the sign bit is a bit like the others."""
    x = np.asarray(x)
    return (x.view(np.uint32) >> np.asarray(by).astype(np.uint32)).view(x.dtype)


def _words(x: Any, dtype: Any) -> np.ndarray:
    return np.asarray(x).astype(dtype)


def _for_numpy(original: Callable[..., Any], replaced: Callable[..., Any]) -> Callable[..., Any]:
    """Work around the kernel draws too, on arrays of JAX."""
    return lambda x, *rest: (original if isinstance(x, jax.Array) else replaced)(x, *rest)


def _axis_index(name: str) -> Any:
    return np.int32(_here.warpgroup if name == "warpgroup" else _here.program.place[name])


@contextlib.contextmanager
def as_program(**place: int) -> Iterator[None]:
    """Inside, this thread is the one warpgroup of a program: parts of a kernel may be called by themselves."""
    _here.program, _here.warpgroup, _here.leaving = _Program(place, _Grid()), 0, []
    try:
        yield
    finally:
        del _here.program, _here.warpgroup, _here.leaving


def _run_grid(
    body: Any, refs: list[Ref], grid: Any, grid_names: Any, num_threads: int, at_once: bool = False,
    swizzles: bool = True,
) -> None:  # fmt: skip
    places = [dict(zip(grid_names, place, strict=True)) for place in itertools.product(*map(range, grid))]
    for some in [places] if at_once else [[place] for place in places]:
        shared = _Grid(swizzles, dict(zip(grid_names, grid, strict=True)))
        _run_programs(body, refs, some, num_threads, LATE if at_once else 0.0, shared)


def _run_programs(
    body: Any, refs: list[Ref], places: list[dict[str, int]], num_threads: int, late: float, grid: _Grid
) -> None:
    """At the same time, in no order."""
    if _held is not None:
        grid.of_before = {id(ref.array) for ref in refs if ref.array.shape not in _held}
    programs = [_Program(place, grid) for place in places]

    def warpgroup(program: _Program, index: int, late: float) -> None:
        _here.program, _here.warpgroup, _here.leaving, _here.awaited = program, index, [], False
        time.sleep(late)
        try:
            with np.errstate(all="ignore"):  # NaN, infinity and wrapping integers are among what is tested
                body(*refs)
            assert not _here.leaving, "the program ended before its copies had left shared memory"
        except Exception as error:  # noqa: BLE001 (raised again below, when the others have stopped)
            grid.failed.append(error)

    threads = [
        threading.Thread(target=warpgroup, args=(program, index, grid.draw.uniform(0, late)))
        for program in programs
        for index in range(num_threads)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if grid.failed:
        raise grid.failed[0]
    for store in grid.leaving:
        store()
    for program in programs:
        assert program.awaited or _held is None, "a program that does not await the kernel before it"
        for waits, turn in enumerate(program.turns):
            assert turn.phase == turn.waited.get(waits, 0), "a turn was given that nobody waited for"


def _kernel(
    body: Any, *, out_type: Any, grid: Any, grid_names: Any, num_threads: int = 1, compiler_params: Any = None,
    **_: Any,
) -> Callable[..., Any]:  # fmt: skip
    swizzles = getattr(compiler_params, "lowering_semantics", None) != hopper.LANE

    def host(*arrays: Any) -> list[np.ndarray]:
        inputs = [Ref(np.asarray(x)) for x in arrays]
        # What the kernel does not write must not look like a result.
        outs = [Ref(np.full(x.shape, np.nan, x.dtype)) for x in out_types]
        _run_grid(body, [*inputs, *outs], grid, grid_names, num_threads, swizzles=swizzles)
        return [ref.array for ref in outs]

    out_types, several = jax.tree.flatten(out_type)
    # A call of its own, so that the work around the kernel may be compiled as a whole.
    return lambda *arrays: jax.tree.unflatten(several, jax.pure_callback(host, out_types, *arrays))


def _mesh_kernel(body: Any, *, out_type: Any, mesh: Any, at_once: bool = False, **_: Any) -> Callable[..., Any]:
    """pl.kernel, whose last operands are references that the kernel adds into or writes parts of."""

    def call(*given: Any) -> list[Any]:
        written = [x for x in given if isinstance(jax.typeof(x), AbstractRef)]
        arrays = given[: len(given) - len(written)]
        before = [ref[...] for ref in written]

        def host(*arrays: Any) -> list[np.ndarray]:
            first = len(arrays) - len(written)
            inputs, kept = [Ref(np.asarray(x)) for x in arrays[:first]], [Ref(np.array(x)) for x in arrays[first:]]
            outs = [Ref(np.full(x.shape, np.nan, x.dtype)) for x in out_type]
            _run_grid(body, [*inputs, *kept, *outs], mesh.grid, mesh.grid_names, mesh.num_threads, at_once)
            return [ref.array for ref in (*kept, *outs)]

        made = jax.pure_callback(host, [*map(jax.typeof, before), *out_type], *arrays, *before)
        for ref, after in zip(written, made, strict=False):
            ref[...] = after
        return made[len(written) :]

    return call


def _nothing(*_: Any, **__: Any) -> None:
    """Registers and fences: every operation here is done when it returns."""


@contextlib.contextmanager
def emulated(*kernels: ModuleType, at_once: bool = False) -> Iterator[None]:
    """Inside, a function that is traced with a Hopper kernel of these modules in it runs the kernel here.

    Without any, those of attention. With `at_once` all programs of a kernel (`pl.kernel`) run at the same time, and
    their warpgroups start in any order.
    """
    gpu = _Shim(
        plgpu, SMEM=_Smem, Barrier=_barrier, WGMMAAccumulatorRef=_AccumulatorType(), wgmma=_wgmma,
        barrier_arrive=lambda b: b.one.arrive(), barrier_wait=lambda b: b.one.wait(), copy_gmem_to_smem=_to_smem,
        copy_smem_to_gmem=_to_gmem, commit_smem=_nothing,
        RefUnion=_union,
        set_max_registers=_nothing, wait_smem_to_gmem=_wait_to_gmem, layout_cast=lambda x, layout: x,
        load=lambda ref, *_, **__: ref.load(), store=lambda ref, value, optimized: ref.store(value),
        griddepcontrol_wait=_await_previous, griddepcontrol_launch_dependents=_nothing,
        wgmma_wait=_nothing, wgmma_accumulator_load=lambda ref, wait_n: ref.value,
        broadcasted_iota=lambda dtype, shape, axis, layout: _iota(dtype, shape, axis),
        nd_loop=_nd_loop, planar_snake=_row_by_row,
    )  # fmt: skip
    cpu_pl = _Shim(
        pl, run_scoped=_run_scoped, run_state=_run_state, loop=_loop, when=_when, multiple_of=lambda x, by: x
    )  # fmt: skip
    cpu_lax = _Shim(
        lax, axis_index=_axis_index, fori_loop=_fori_loop, while_loop=_while_loop,
        optimization_barrier=lambda x: x, max=max, min=min,
        # Toward zero, as the hardware divides; every divisor here is positive.
        div=lambda x, y: np.int32(int(x / y)), rem=lambda x, y: np.int32(x - int(x / y) * y),
        clamp=lambda low, x, high: min(max(x, low), high), shift_right_logical=_shift,
        abs=np.abs, broadcast_in_dim=_broadcast_in_dim, rsqrt=lambda x: 1 / np.sqrt(x),
    )  # fmt: skip
    cpu_jnp = _Shim(np, bfloat16=jnp.bfloat16)
    shims = {
        "plgpu": _Divided(gpu, _Shim(plgpu, kernel=_kernel)),
        "pl": _Divided(cpu_pl, _Shim(pl, kernel=functools.partial(_mesh_kernel, at_once=at_once))),
        "lax": _Divided(cpu_lax, lax),
        "jnp": _Divided(cpu_jnp, jnp),
    }
    changes = [
        (module, name, shim) for module in kernels or KERNELS for name, shim in shims.items() if hasattr(module, name)
    ]
    changes += [
        (hopper, "plgpu", shims["plgpu"]),
        (hopper, "pl", shims["pl"]),
        (overlap, "plgpu", shims["plgpu"]),
        (overlap, "can_overlap", lambda: True),
        (hopper, "give_turn", lambda: _here.program.turns[1 - _here.warpgroup].arrive()),
        (hopper, "await_turn", lambda: _here.program.turns[_here.warpgroup].wait()),
        (hopper, "hidden_zero", lambda step, stage: np.int32(0)),
        (hopper, "kept_before_wait", _nothing),
        (hopper, "reciprocal", lambda x, layout: 1 / x),
    ]
    changes += [(prng, "_shift", _for_numpy(prng._shift, _shift)), (prng, "_words", _for_numpy(prng._words, _words))]
    before = [getattr(module, name) for module, name, _ in changes]
    for module, name, shim in changes:
        setattr(module, name, shim)
    try:
        yield
    finally:
        for (module, name, _), original in zip(changes, before, strict=True):
            setattr(module, name, original)
