"""Out of memory: what lay there, which function made it, what was predicted, and the nearest change that fits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import jax

from capibara.compile.failures import asked_bytes, classify, over_limit, thrown_by_compilers, useful_lines
from capibara.hardware.facts import GiB
from capibara.memory.limits import MemoryLimitError
from capibara.memory.live import bytes_by_device, live_arrays, looking, used_bytes
from capibara.memory.offload import is_host_copy
from capibara.memory.profile import Frame, made_by, read_profile

if TYPE_CHECKING:
    from capibara.hardware.topology import Slice
    from capibara.plan.result import Plan

__all__ = ["Autopsy", "BuffersMade", "DeviceUse", "Prediction", "autopsy", "autopsy_of", "examine", "is_out_of_memory"]

_LISTED = 10
_PLAN_SECONDS = 10.0
_SMALLER = 0.95
"""Of what a layout that ran out is predicted to take, the most that another is let take: the model is no finer."""
_MEMORY = re.compile(r"RESOURCE_EXHAUSTED.*?(memory|allocat|hbm)", re.I | re.S)


@dataclass(frozen=True)
class BuffersMade:
    """Live buffers that one place of the program made, alike on each of these devices."""

    devices: tuple[str, ...]
    count: int
    """Of one device."""
    bytes: int
    """Of all of them, on one device."""
    arrays: tuple[str, ...]
    """Types and shapes of the live arrays of that size; empty where none has it, as a program's own buffers."""
    made_by: Frame | None
    """The innermost Python function outside of jax."""
    called_from: Frame | None
    """The innermost one of the user's own: outside of this library and of what is installed."""

    def __str__(self) -> str:
        what = " or ".join(self.arrays) or "buffers"
        number = f"{self.count} x " if self.count > 1 else ""
        by = "" if self.made_by is None else f", made by {self.made_by}"
        call = self.called_from
        via = "" if call is None or call == self.made_by else f", called from {call}"
        on = self.devices[0] if len(self.devices) == 1 else f"each of {len(self.devices)} devices"
        return f"{_gib(self.bytes)}  {number}{what} on {on}{by}{via}"


@dataclass(frozen=True)
class DeviceUse:
    """Bytes of one device."""

    device: str
    used: int
    limit: int | None


@dataclass(frozen=True)
class Prediction:
    """What the planner says of the program, of one chip."""

    of: str
    on: str
    total: float
    arguments: float
    temporaries: float
    limit: float
    largest: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Autopsy:
    """What was found when memory had run out."""

    error: str
    asked_bytes: int | None
    """What could not be allocated, where the error says it."""
    devices: tuple[DeviceUse, ...]
    """The fullest first."""
    buffers: tuple[BuffersMade, ...]
    """The largest first."""
    prediction: Prediction | None = None
    nearest_change: str | None = None
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"Out of memory: {self.error}"]
        if self.asked_bytes is not None:
            lines.append(f"asked for: {_gib(self.asked_bytes)}")
        for one in self.devices[:2]:
            limit = "" if one.limit is None else f" of {_gib(one.limit)}"
            lines.append(f"in use on {one.device}: {_gib(one.used)}{limit}")
        if len(self.devices) > 2:
            lines.append(f"and no more on {len(self.devices) - 2} other devices")
        lines.append("largest live buffers:" if self.buffers else "no live buffers")
        lines += [f"  {one}" for one in self.buffers]
        if self.prediction is not None:
            it = self.prediction
            lines.append(
                f"predicted for {it.of} on {it.on}: {_gib(it.total)} of {_gib(it.limit)} "
                f"({_gib(it.arguments)} arguments, {_gib(it.temporaries)} temporaries)"
            )
            lines += [f"  {_gib(size)}  {name}" for name, size in it.largest]
        if self.nearest_change is not None:
            lines.append(f"nearest change that fits: {self.nearest_change}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device's memory ran out, at run time or in its compiler, or a limit of this room refused.

    >>> import jax
    >>> is_out_of_memory(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes."))
    True
    >>> is_out_of_memory(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Error opening a bucket: quota"))
    False
    """
    if isinstance(error, MemoryLimitError):
        return True
    text = str(error)
    # A kernel's fast memory is the kernel's own affair: nothing that lives on the device would make room in it.
    fast = classify(text, lowering=False) in ("vmem_oom", "smem_oom")
    return isinstance(error, RuntimeError | ValueError) and not fast and _MEMORY.match(text.lstrip()) is not None


def autopsy_of(error: BaseException | None) -> Autopsy | None:
    """What `autopsy` found of this error; None where it is another."""
    return getattr(error, "autopsy", None)


@contextmanager
def autopsy(
    program: Any = None,
    args: Sequence[Any] | None = None,
    on: str | Slice | None = None,
    *,
    plan: Callable[[float | None], Plan] | None = None,
    tell: Callable[[Autopsy], None] | None = None,
    **plan_options: Any,
) -> Iterator[None]:
    """An out-of-memory error that comes up inside says what lay in memory then, and goes on as it is.

    The report is a note of the error, which Python prints under it, and `autopsy_of(error)`. With the program it also
    has the planner's prediction, and the nearest change that fits. The error is jax's: a RuntimeError, or a ValueError
    where a jitted function has run before.

    Args:
      program, args, on: as `capibara.plan.plan` takes them; `on` is the attached chips by default.
      plan: in their place, a function from a limit in GiB (None: the chip's own) to a plan.
      tell: called with the report before the error goes on.
      plan_options: more of `capibara.plan.plan`, `train=True` for one.

    Examples:
        >>> import jax.numpy as jnp
        >>> try:
        ...     with autopsy():
        ...         jnp.ones((1 << 46,), "float32")
        ... except (RuntimeError, ValueError) as error:
        ...     print(autopsy_of(error).asked_bytes)
        281474976710656
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        asked = plan
        if asked is None and program is not None:
            asked = _planner(program, args, on, plan_options)
        if is_out_of_memory(error) and (autopsy_of(error) is None or asked is not None):
            found = examine(error, asked)
            error.autopsy = found  # type: ignore[union-attr]
            error.add_note(str(found))
            if tell is not None:
                tell(found)
        raise


def _planner(
    program: Any, args: Sequence[Any] | None, on: str | Slice | None, options: dict[str, Any]
) -> Callable[[float | None], Plan]:
    def planned(limit_gb: float | None) -> Plan:
        from capibara.plan.api import plan

        where = on if on is not None else _attached_slice()
        return plan(program, args, where, memory_limit_gb=limit_gb, **{"time_limit": _PLAN_SECONDS, **options})

    return planned


def _attached_slice() -> Slice:
    from capibara.errors import rule_error
    from capibara.hardware.chips import chip_for
    from capibara.hardware.devices import slice_attached
    from capibara.hardware.topology import Slice

    found = slice_attached()
    if found is not None:
        return found
    devices = jax.devices()
    chip = None if devices[0].platform == "cpu" else chip_for(devices[0].device_kind)
    if chip is None:
        raise rule_error(
            "A plan is for a chip of the table", devices[0].device_kind, 'name one: autopsy(..., on="h200")'
        )
    return Slice(f"{chip.name}x{len(devices)}", chip, (len(devices),))


def examine(error: BaseException, plan: Callable[[float | None], Plan] | None = None) -> Autopsy:
    """What lies in memory now, with the error's own figures; `plan` as in `autopsy`."""
    text = str(error)
    notes: list[str] = []
    asked = asked_bytes(text)
    if asked is None and (compiled := over_limit(text)) is not None:
        asked = compiled.used_bytes
    devices = _devices()
    found = Autopsy(useful_lines(text, limit=1, width=300), asked, devices, _buffers(notes))
    if plan is None:
        return Autopsy(found.error, asked, devices, found.buffers, notes=tuple(notes))
    try:
        prediction, change = _predicted(found, plan)
        if change is None:
            notes.append("nothing that the planner tries is predicted to take less")
    except thrown_by_compilers() as failed:  # the error that is reported on is the one that matters
        notes.append(f"no prediction: {type(failed).__name__}: {useful_lines(str(failed), limit=1, width=300)}")
        prediction = change = None
    return Autopsy(found.error, asked, devices, found.buffers, prediction, change, tuple(notes))


def _devices() -> tuple[DeviceUse, ...]:
    from capibara.hardware.devices import attached

    limits = {one.index: one.memory_limit_bytes for one in attached()}
    found = [DeviceUse(str(device), used, limits.get(device.id)) for device, used in used_bytes().items()]
    return tuple(sorted(found, key=lambda one: -one.used))


def _buffers(notes: list[str]) -> tuple[BuffersMade, ...]:
    """The largest, by the profile; by the live arrays alone where jax has no profile of them."""
    with looking():
        shapes: dict[int, dict[str, None]] = {}
        parts = []
        for array in live_arrays():
            by_device = bytes_by_device(array.shape, array.dtype, array.sharding)
            said = f"{array.dtype.name}[{','.join(map(str, array.shape))}]"
            parts += [(size, str(device), said) for device, size in by_device.items()]
            for size in by_device.values():
                shapes.setdefault(size, {})[said] = None
    try:
        samples = read_profile(jax.profiler.device_memory_profile())
    except (RuntimeError, ValueError) as failed:
        notes.append(f"who made the buffers is not known: {useful_lines(str(failed), limit=1, width=300)}")
        parts.sort(reverse=True)
        return tuple(BuffersMade((device,), 1, size, (said,), None, None) for size, device, said in parts[:_LISTED])
    # Calls on one line are samples of their own: those that made buffers of one size are put together.
    together: dict[Any, tuple[int, int]] = {}
    for one in samples:
        # The profile has what lies in the host's memory too, under the device whose programs see it.
        if one.bytes and not any(map(is_host_copy, one.stack)):
            key = (one.device, one.stack, one.bytes / max(one.count, 1))
            count, size = together.get(key, (0, 0))
            together[key] = (count + one.count, size + one.bytes)
    alike: dict[Any, list[str]] = {}
    for (device, stack, _), (count, size) in together.items():
        alike.setdefault((count, size, stack), []).append(device)
    return tuple(
        BuffersMade(tuple(sorted(on)), count, size, tuple(shapes.get(size // max(count, 1), ())), *made_by(stack))
        for (count, size, stack), on in sorted(alike.items(), key=lambda item: -item[0][1])[:_LISTED]
    )


def _predicted(found: Autopsy, plan: Callable[[float | None], Plan]) -> tuple[Prediction | None, str | None]:
    made = plan(None)
    best = made.best
    if best is None:
        return None, made.changes[0].what if made.changes else None
    memory = best.estimate.memory
    prediction = Prediction(
        of=f"{made.name or 'the program'} ({best.layout.name})",
        on=made.where.name,
        total=memory.total,
        arguments=memory.arguments,
        temporaries=memory.temporaries,
        limit=memory.limit,
        largest=memory.largest[:5],
    )
    if not made.fits:
        return prediction, _change(made)
    # By the model it fits. Either other arrays took the room, or the model is low: then another layout has to be
    # predicted well below this one.
    fullest = found.devices[0]
    limit = min(memory.limit, fullest.limit or memory.limit)
    beside = fullest.used - memory.arguments
    if beside > 0 and memory.total <= limit < memory.total + beside:
        return prediction, f"let go of {_gib(beside)} of other arrays: the program itself is predicted to fit"
    need = max(fullest.used + (found.asked_bytes or 0), limit)
    tighter = min(limit * memory.total / need, _SMALLER * memory.total)
    return prediction, _change(plan(tighter / GiB))


def _change(made: Plan) -> str | None:
    if made.fits and made.best is not None:
        return f"{made.best.layout.name}, predicted at {_gib(made.best.bytes)} on {made.where.name}"
    if not made.changes:
        return None
    change = made.changes[0]
    on = "" if change.on in change.what else f" on {change.on}"
    return f"{change.what}{on}, predicted at {_gib(change.bytes)} a chip"


def _gib(count: float) -> str:
    if count >= GiB / 100:
        return f"{count / GiB:.2f} GiB"
    return f"{count / 2**20:.2f} MiB" if count >= 2**20 / 100 else f"{count:.0f} bytes"
