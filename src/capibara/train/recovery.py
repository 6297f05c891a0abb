"""`TpuRecoveryManager`: a step that a device failed is done again, from a good state, on the devices that are left.

Two forms. `manager.run(step, *args)` retries the step itself. `with manager.recovery_context():` cannot run its block a
second time: there a device's error is recorded, the state restored, and the block left; whoever wrote the loop goes on.
Inside of the context `train_step` and `train` run their steps by the first form.

What is the program's own error (a wrong shape, out of memory, a NaN that was asked to stop) goes through untouched.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

from capibara.checkpoints.leaves import named_leaves, storable
from capibara.checkpoints.shards import from_pieces, host_shards
from capibara.checkpoints.store import Checkpoints
from capibara.errors import CheckpointError, rule_error, runtime_errors, runtime_status
from capibara.models import step_hooks
from capibara.models.step_hooks import StateHolder
from capibara.observe.recorder import Recorder
from capibara.processes import process_count
from capibara.train.device_errors import Attempt, TpuError, device_status, named_device
from capibara.train.devices_left import choose_devices, on_devices

__all__ = ["TpuError", "TpuRecoveryManager", "current_manager"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
_ACTIVE: ContextVar[TpuRecoveryManager | None] = ContextVar("capibara recovery manager", default=None)
_RECORDED = 256


class _Copy:
    """A state in the host's memory, and where it lay."""

    def __init__(self, state: Any, step: int) -> None:
        import jax

        self.step = step
        leaves, self.structure = jax.tree.flatten(state)
        arrays = [storable(leaf) for leaf in leaves]
        self.pieces = [host_shards(array) for array in arrays]
        self.shapes = [tuple(array.shape) for array in arrays]
        # None: it lies wherever jax puts it, as random keys and counters mostly do.
        self.shardings = [
            array.sharding if isinstance(leaf, jax.Array) and leaf.committed else None
            for leaf, array in zip(leaves, arrays, strict=True)
        ]
        self.impls = [jax.random.key_impl(leaf) if _is_key(leaf) else None for leaf in leaves]
        self.on_host = [not isinstance(leaf, jax.Array) for leaf in leaves]

    def state(self, devices: Sequence[Any]) -> Any:
        import jax
        import jax.numpy as jnp

        leaves = []
        with jax.default_device(devices[0]):
            for pieces, sharding, shape, impl, on_host in zip(
                self.pieces, self.shardings, self.shapes, self.impls, self.on_host, strict=True
            ):
                array: Any = None
                if sharding is not None:
                    array = from_pieces(shape, on_devices(sharding, devices), pieces)
                else:
                    (value,) = pieces.values()
                    array = value if on_host else jnp.array(value)
                leaves.append(array if impl is None else jax.random.wrap_key_data(array, impl=impl))
        return jax.tree.unflatten(self.structure, leaves)


class TpuRecoveryManager:
    """Recovers from device errors.

    Args:
      auto_recovery: restore and go on. Without it device errors are recorded and raised as `TpuError` at once.
      fallback_to_gpu: with no device of the platform left, go on on GPUs.
      checkpoint_frequency: keep the state after every so many steps.
      fallback_to_cpu: with no GPU either, go on on CPUs.
      max_retries: how often in a row a step is tried again; a step that is done starts the count anew.
      backoff_seconds: wait before the first retry; each further one waits twice as long.
      checkpoints: `Checkpoints`, or a folder for them; without it states are kept in the host's memory.
      recorder: the run's flight recorder, which is told of each error.
      on_restore: called with the step that the state went back to, so that a loop can rewind its data.
      on_devices_changed: called with the devices that are left, before the state is put on them.

    Examples:
        >>> manager = TpuRecoveryManager(checkpoint_frequency=10, backoff_seconds=0)
        >>> failures = iter([jax.errors.JaxRuntimeError("UNAVAILABLE: lost device 0")])
        >>> def step(x):
        ...     for failure in failures:
        ...         raise failure
        ...     return x + 1
        >>> int(manager.run(step, jnp.int32(1)))
        2
        >>> manager.errors[0].status
        'UNAVAILABLE'
    """

    def __init__(
        self,
        auto_recovery: bool = True,
        fallback_to_gpu: bool = True,
        checkpoint_frequency: int = 1000,
        *,
        fallback_to_cpu: bool = False,
        max_retries: int = 3,
        backoff_seconds: float = 1.0,
        probe_seconds: float = 30.0,
        checkpoints: Checkpoints | str | os.PathLike[str] | None = None,
        recorder: Recorder | None = None,
        on_restore: Callable[[int], None] | None = None,
        on_devices_changed: Callable[[list[Any]], None] | None = None,
    ) -> None:
        for name, value, low in (("checkpoint_frequency", checkpoint_frequency, 1), ("max_retries", max_retries, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise rule_error(f"{name} is a whole number from {low} up", repr(value), f"use {low} or more")
        if not backoff_seconds >= 0 or not probe_seconds > 0:
            raise rule_error(
                "backoff_seconds is 0 or more and probe_seconds more than 0",
                f"{backoff_seconds!r} and {probe_seconds!r}",
                "leave them out for 1 and 30",
            )
        self.auto_recovery = auto_recovery
        self.fallback_to_gpu = fallback_to_gpu
        self.fallback_to_cpu = fallback_to_cpu
        self.checkpoint_frequency = checkpoint_frequency
        self.max_retries = max_retries
        self.backoff_seconds = backoff_seconds
        self.probe_seconds = probe_seconds
        self.checkpoints = (
            checkpoints if checkpoints is None or isinstance(checkpoints, Checkpoints) else Checkpoints(checkpoints)
        )
        self.recorder = recorder
        self.on_restore = on_restore
        self.on_devices_changed = on_devices_changed
        self.errors: deque[Attempt] = deque(maxlen=_RECORDED)
        """Every device error so far, the last few hundred."""
        self.steps = 0
        """Steps reported so far; after a restore, those that the restored state has."""
        self._in_a_row: list[Attempt] = []
        self._running = False
        self._holder: StateHolder | None = None
        self._copy: _Copy | None = None
        self._saved_step: int | None = None
        self._shape: Any = None
        self._devices: list[Any] | None = None

    # The state.

    def attach(self, holder: StateHolder) -> None:
        """Whose state it is that is kept and restored. The first is kept now, before any step."""
        if holder is not self._holder:
            self._holder = holder
            self.steps = holder.steps_done
            self._keep(holder.get_state())

    def step_done(self, state: Any = None, step: int | None = None) -> None:
        """A step is done; after every `checkpoint_frequency` of them the state is kept.

        Args:
          state: after the step; without it the attached holder's.
          step: its number, where the caller counts.
        """
        self.steps = self.steps + 1 if step is None else step
        if not self._running:  # else it may fail yet, after it has reported
            self._in_a_row.clear()
        if self.steps % self.checkpoint_frequency == 0:
            if state is None and self._holder is None:
                raise rule_error("A state is kept with step_done", "none", "pass the state, or attach its holder")
            self._keep(state if state is not None or self._holder is None else self._holder.get_state())

    def _keep(self, state: Any) -> None:
        import jax

        if self.checkpoints is not None:
            for alert in self.checkpoints.save(self.steps, state):
                logger.warning("%s", alert)
            self._saved_step = self.steps
            self._shape = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None)),
                state,
            )
        else:
            self._copy = _Copy(state, self.steps)

    def last_good(self) -> tuple[Any, int] | None:
        """The last state that was kept, on the devices in use now, and its step; for a loop that restores itself."""
        import jax

        kept = self._kept(self._devices or list(jax.local_devices()))
        return None if kept is None else kept[:2]

    def _kept(self, devices: Sequence[Any]) -> tuple[Any, int, str] | None:
        """The last state that was kept, on these devices; its step; whence."""
        import jax

        if self._copy is not None:
            return self._copy.state(devices), self._copy.step, f"the copy of step {self._copy.step} in host memory"
        if self.checkpoints is None or self._saved_step is None:
            return None
        target = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=leaf.sharding and on_devices(leaf.sharding, devices)
            ),
            self._shape,
        )
        try:
            restored = self.checkpoints.restore(target)
        except CheckpointError as error:
            logger.warning("%s", error)  # the caller gives up, and tells why it came to need one
            return None
        return restored.state, restored.step, f"the checkpoint of step {restored.step}, {restored.source}"

    def _went_back_to(self, step: int) -> None:
        self.steps = step
        if self.on_restore is not None:
            self.on_restore(step)

    # Failures.

    def _record(self, error: BaseException, status: str, restored: str, devices: str, lost: Sequence[Any]) -> Attempt:
        text = str(error).strip().splitlines()[0]
        device = named_device(text) or (", ".join(map(str, lost)) or None)
        attempt = Attempt(status, text, self.steps, device, restored, devices)
        self.errors.append(attempt)
        self._in_a_row.append(attempt)
        logger.warning("a device failed: %s", attempt)
        if self.recorder is not None:
            self.recorder.alert(f"a device failed: {attempt}", self.steps)
        return attempt

    def _give_up(self, why: str, error: BaseException, status: str) -> TpuError:
        """The error to raise. Whoever catches it and goes on finds the state as it was last kept, if that can be."""
        restored, back_to = "nothing", self.steps
        lost: list[Any] = []
        if self.auto_recovery and self._holder is not None and process_count() == 1:
            left, lost = self._devices_now(self._holder.get_state())
            kept = self._kept(left) if left else None
            if kept is not None:
                self._holder.set_state(kept[0])
                _, back_to, restored = kept
        self._record(error, status, restored, "", lost)
        if restored != "nothing":
            self._went_back_to(back_to)
        attempts, self._in_a_row = self._in_a_row, []
        return TpuError(why, attempts)

    def _refusal(self) -> str:
        """Why there will be no further attempt; "" where there will."""
        if not self.auto_recovery:
            return "A device failed, and auto_recovery is off"
        if process_count() > 1:
            return (
                f"A device failed, and this is one of {process_count()} processes, which recover by being started "
                f"together from the last checkpoint (capibara's supervisor does that)"
            )
        if len(self._in_a_row) >= self.max_retries:
            return f"A device failed {len(self._in_a_row) + 1} times in a row, and max_retries is {self.max_retries}"
        return ""

    def _devices_now(self, trees: Any) -> tuple[list[Any], list[Any]]:
        """What the next attempt runs on, and which devices were lost."""
        import jax

        in_use = self._devices or _devices_of(trees) or list(jax.local_devices())
        left = choose_devices(
            in_use,
            fallback_to_gpu=self.fallback_to_gpu,
            fallback_to_cpu=self.fallback_to_cpu,
            timeout=self.probe_seconds,
        )
        lost = [device for device in in_use if device not in left]
        if lost and left:
            self._devices = left
            if self.on_devices_changed is not None:
                self.on_devices_changed(left)
        return left, lost

    # The two forms.

    def _listen(self, step: int, state: Any) -> None:
        self.step_done(state, step)

    def _guard(self, holder: StateHolder, step: Callable[[], Any]) -> Any:
        self.attach(holder)
        return self.run(step)

    def run(self, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """`step(*args, **kwargs)`, waited for; after a device error again, from a good state on the devices left.

        A state that is still whole is used as it is, and nothing is lost. Where it is not (it was donated to the step
        that failed, it lay on a device that is gone, or the error is DATA_LOSS) the last one kept takes its place: in
        the attached holder, and for an argument of the same structure.

        Raises:
          TpuError: there are no retries or no devices left; it tells every attempt.
        """
        while True:
            try:
                result = self._run_once(step, args, kwargs)
                self._in_a_row.clear()
                return result
            except runtime_errors() as error:
                status = device_status(error)
                if status is None:
                    raise
                if why := self._refusal():
                    raise self._give_up(why, error, status) from error
                args, kwargs = self._prepare_retry(error, status, args, kwargs)
            time.sleep(self.backoff_seconds * 2 ** (len(self._in_a_row) - 1))

    def _run_once(self, step: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        import jax

        before, self._running = self._running, True
        try:
            # The caller's own default stays until devices were lost.
            with nullcontext() if self._devices is None else jax.default_device(self._devices[0]):
                return jax.block_until_ready(step(*args, **kwargs))
        finally:
            self._running = before

    def _prepare_retry(
        self, error: BaseException, status: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Restore what must be; the arguments of the next attempt."""
        held = self._holder.get_state() if self._holder is not None else None
        left, lost = self._devices_now((held, args, kwargs))
        if not left:
            allowed = "GPU" * self.fallback_to_gpu + " and " * (self.fallback_to_gpu and self.fallback_to_cpu)
            allowed += "CPU" * self.fallback_to_cpu
            why = f"No device answers, and there is no fallback ({allowed or 'none'} allowed)"
            raise self._give_up(why, error, status) from error
        trusted = status != "DATA_LOSS"
        restored = "nothing, the state is whole"
        back_to: int | None = None
        if self._holder is not None:
            whole = _moved(held, left) if trusted else None
            if whole is None:
                kept = self._kept(left)
                if kept is None:
                    raise self._give_up("The state is lost, and none was kept", error, status) from error
                whole, back_to, restored = kept
            self._holder.set_state(whole)
        arguments: list[Any] = []
        for place, argument in [*enumerate(args), *kwargs.items()]:
            whole = _moved(argument, left)
            if whole is None:
                kept = self._kept(left)
                if kept is None or not _same_structure(kept[0], argument):
                    why = f"Argument {place!r} of the step was donated or lay on a device that is gone, and no state "
                    why += "like it was kept (step_done keeps states)"
                    raise self._give_up(why, error, status) from error
                whole, back_to, restored = kept
            arguments.append(whole)
        self._record(error, status, restored, _shown(left), lost)
        if back_to is not None:
            self._went_back_to(back_to)
        return tuple(arguments[: len(args)]), dict(zip(kwargs, arguments[len(args) :], strict=True))

    @contextmanager
    def recovery_context(self) -> Iterator[TpuRecoveryManager]:
        """Make this the manager that steps report to, and take up device errors of the block.

        A device error that reaches the end of the block is recorded and swallowed when `auto_recovery` is on, with the
        attached holder's state as it was last kept; a `TpuError` of a step that was retried in vain is not.
        """
        token = _ACTIVE.set(self)
        try:
            with step_hooks.listening(self._listen), step_hooks.guarding(self._guard):
                yield self
            self._in_a_row.clear()
        except runtime_errors() as error:
            status = device_status(error)
            if status is None:
                raise
            if why := self._refusal():
                raise self._give_up(why, error, status) from error
            held = self._holder.get_state() if self._holder is not None else None
            left, lost = self._devices_now(held)
            kept = self._kept(left) if left and self._holder is not None else None
            if not left or (self._holder is not None and kept is None):
                raise self._give_up("No device answers" if not left else "No state was kept", error, status) from error
            if kept is not None and self._holder is not None:
                self._holder.set_state(kept[0])
            self._record(error, status, kept[2] if kept else "nothing, no state was attached", _shown(left), lost)
            if kept is not None:
                self._went_back_to(kept[1])
        finally:
            _ACTIVE.reset(token)


def current_manager() -> TpuRecoveryManager | None:
    """The manager whose `recovery_context` this is; None outside of one."""
    return _ACTIVE.get()


def _is_key(leaf: Any) -> bool:
    import jax
    import jax.numpy as jnp

    return isinstance(leaf, jax.Array) and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _devices_of(trees: Any) -> list[Any]:
    import jax

    # By the sharding, which a donated array still has.
    arrays = [leaf for leaf in jax.tree.leaves(trees) if isinstance(leaf, jax.Array)]
    devices = {device for array in arrays for device in array.sharding.device_set}
    return sorted(devices, key=lambda device: device.id)


def _moved(tree: Any, devices: Sequence[Any]) -> Any | None:
    """The tree on these devices; None where a leaf of it cannot be read any more."""
    import jax

    leaves, structure = jax.tree.flatten(tree)
    moved = []
    for leaf in leaves:
        if not isinstance(leaf, jax.Array):
            moved.append(leaf)
            continue
        if leaf.is_deleted():
            return None
        if not leaf.committed and leaf.sharding.device_set <= set(devices):
            moved.append(leaf)
            continue
        try:
            sharding = on_devices(leaf.sharding, devices)
            moved.append(jax.block_until_ready(leaf if sharding is leaf.sharding else jax.device_put(leaf, sharding)))
        except runtime_errors() as error:
            if runtime_status(error) is None:
                raise
            return None
    return jax.tree.unflatten(structure, moved)


def _same_structure(kept: Any, argument: Any) -> bool:
    mine, theirs = named_leaves(kept), named_leaves(argument)
    return mine.keys() == theirs.keys() and all(
        getattr(mine[name], "shape", ()) == getattr(theirs[name], "shape", ()) for name in mine
    )


def _shown(devices: Sequence[Any]) -> str:
    names = [str(device) for device in devices[:4]]
    return ", ".join(names) + (f" and {len(devices) - 4} more" if len(devices) > 4 else "")
