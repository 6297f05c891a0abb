"""`Checkpoints`: the saves of one run, written in the background by Orbax, whole or not at all, and kept by policy.

A save is a folder `step_00001000` below the run's: Orbax's files, readable by Orbax alone too, and last the manifest
(`manifest.py`), which makes it a checkpoint. A step that is saved a second time, after going back, gets a folder of
its own (`step_00001000.1`), so that nothing good is ever overwritten; the newest is the one that was saved last.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from capibara.checkpoints import arrays
from capibara.checkpoints import manifest as manifests
from capibara.checkpoints.catalogue import Catalogue, Saved
from capibara.checkpoints.emergency import EmergencyCopies
from capibara.checkpoints.leaves import changed, check_target, describe, named_leaves
from capibara.checkpoints.manifest import Manifest
from capibara.checkpoints.policy import Keep
from capibara.checkpoints.storage import Alert, is_local, storage_path, storage_reason
from capibara.errors import CheckpointError, rule_error
from capibara.processes import gather, process_count, process_index

__all__ = ["Checkpoints", "Restored"]

logger = logging.getLogger(__name__)

_ALERTS = 256


@dataclass(frozen=True)
class Restored:
    """A state that came back, and whence."""

    step: int
    state: Any
    extra: dict[str, Any]
    source: str
    """The folder or the file."""
    emergency: bool = False
    """From the local emergency copy, not from the checkpoints' folder."""


class Checkpoints:
    """Saves and restores of a run's state; a context manager that waits for what is pending.

    Every process of the program makes one and calls it alike; files common to all are written by process 0.

    Args:
      folder: of the run's checkpoints; `gs://` and `s3://` go to the drivers of Orbax and etils as they are.
      keep: which checkpoints stay. An old one goes when a newer one is on the disk with its checksums.
      every: `after_step` saves at multiples of it.
      emergency_folder: local to each machine (/dev/shm, a local disk) for copies between the saves.
      emergency_every: `after_step` copies at multiples of it.
      verify: read and compare every file before a restore.
      on_alert: called with each `Alert`, from the thread that has it.
      timeout: seconds that a save, or processes waiting for each other, may take.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, Checkpoints(folder) as checkpoints:
        ...     alerts = checkpoints.save(7, {"w": jnp.arange(4.0)}, {"batches_read": 7})
        ...     restored = checkpoints.restore({"w": jax.ShapeDtypeStruct((4,), "float32")})
        >>> restored.step, restored.extra, restored.state["w"].tolist()
        (7, {'batches_read': 7}, [0.0, 1.0, 2.0, 3.0])
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: Keep | None = None,
        every: int | None = None,
        emergency_folder: str | os.PathLike[str] | None = None,
        emergency_every: int | None = None,
        verify: bool = True,
        on_alert: Callable[[Alert], None] | None = None,
        timeout: float = 1200.0,
    ) -> None:
        for name, value in (("every", every), ("emergency_every", emergency_every)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise rule_error(f"{name} is a whole number of steps from 1 up", repr(value), "leave it out for never")
        if (emergency_folder is None) != (emergency_every is None):
            raise rule_error(
                "emergency_folder and emergency_every come together",
                f"emergency_folder={emergency_folder!r}, emergency_every={emergency_every!r}",
                "give both or neither",
            )
        self.folder = storage_path(folder)
        self._catalogue = Catalogue(self.folder)
        self.keep = keep or Keep()
        self.every = every
        self.emergency_every = emergency_every
        self.emergency = None if emergency_folder is None else EmergencyCopies(emergency_folder, timeout=timeout)
        self.verify = verify
        self.timeout = timeout
        self.alerts: deque[Alert] = deque(maxlen=_ALERTS)
        self._on_alert = on_alert
        self._untold: list[Alert] = []
        self._orbax: Any = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._serial: int | None = None
        self._names: set[str] = set()
        self._rejected: set[str] = set()

    # What is there.

    def steps(self) -> list[int]:
        """Steps with a finished save, the one saved last at the end. Their files are not read, but a save that a
        restore of this object found damaged is none: its step is to be saved again.

        It is process 0's view, which every process gets: what each of them would see could differ by a moment.
        """
        self._settle()
        mine: list[int] = []
        if process_index() == 0:
            saved = reversed(self._catalogue.saved()[0])
            mine = [entry.step for entry in saved if entry.name not in self._rejected]
        return list(gather("checkpoints/steps", mine, self.timeout)[0])

    def latest(self) -> int | None:
        """The step saved last; None where there is none. Emergency copies are not counted."""
        steps = self.steps()
        return steps[-1] if steps else None

    def _open(self) -> int:
        """Read the folder once, before this object writes: how many saves there were, and which names are taken."""
        if self._serial is None:
            saved, _ = self._catalogue.saved()
            # Names are counted on from here by every process alike, so that all of them must have read the same.
            views = gather("checkpoints/open", [max((s.serial for s in saved), default=0), self._catalogue.entries()])
            self._serial = max(serial for serial, _ in views)
            self._names = {name for _, names in views for name in names}
        return self._serial

    def _new_name(self, step: int) -> str:
        name = base = f"step_{step:08d}"
        attempt = 0
        while name in self._names:
            attempt += 1
            name = f"{base}.{attempt}"
        self._names.add(name)
        return name

    # Saving.

    def after_step(
        self,
        step: int,
        state: Any,
        extra: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> tuple[Alert, ...]:
        """Save, or copy, when this step is due; a callable `extra` is asked only then."""
        save = self.every is not None and step % self.every == 0
        copy = self.emergency_every is not None and step % self.emergency_every == 0
        if not (save or copy):
            return ()
        position = extra() if callable(extra) else extra
        return self.save(step, state, position, metrics) if save else self.emergency_copy(step, state, position)

    def save(
        self,
        step: int,
        state: Any,
        extra: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        *,
        block: bool = False,
    ) -> tuple[Alert, ...]:
        """Copy the state to the host, and write it in the background. The state may be donated afterwards.

        A storage that does not take it (a full disk, a folder without permission) is an alert, not an error: what was
        saved before stays, what is there of this save is removed, and training goes on.

        Args:
          state: a pytree of arrays, random keys among them.
          extra: what else the run needs to go on, as JSON: the data's position, the config, the layout. Process 0's
            is kept.
          metrics: of this step, for `Keep(best=...)`.
          block: wait until it is on the disk.

        Returns:
          The alerts since the last call, of this and of earlier saves.

        Raises:
          The error of an earlier save that was not the storage's.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise rule_error("A step is a whole number from 0 up", repr(step), "pass int(step)")
        extra_json, metrics = _json(extra or {}), {name: float(value) for name, value in (metrics or {}).items()}
        leaves = named_leaves(state)
        described = {name: describe(name, leaf) for name, leaf in leaves.items()}
        if not leaves:
            raise rule_error("A state has leaves", "an empty tree", "pass the arrays to save")
        self._settle()
        serial = self._open() + 1
        self._serial = serial
        name = self._new_name(step)
        made = Manifest(step, serial, described, extra_json, metrics, time.time(), _versions())
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            arrays.save(self._checkpointer(), self.folder / name, leaves, described)
        except Exception as error:
            if not self._storage_failed(step, name, error):
                raise
            return self._told()
        self._thread = threading.Thread(target=self._finish, args=(name, made), name="capibara-checkpoint")
        self._thread.start()
        if block:
            return self.wait()
        return self._told()

    def _checkpointer(self) -> Any:
        if self._orbax is None:
            self._orbax = arrays.checkpointer(self.timeout)
        return self._orbax

    def _finish(self, name: str, made: Manifest) -> None:
        """In the background: wait for Orbax, take the checksums, commit, and let older ones go."""
        try:
            self._orbax.wait_until_finished()
            if process_index() == 0:
                folder, local = self.folder / name, is_local(self.folder)
                files = manifests.checksums(folder, sync=local)
                manifests.write(folder, replace(made, files=files), local)
                self._catalogue.prune(self.keep, self._rejected)
        except Exception as error:  # noqa: BLE001  (kept, and raised by the next call)
            try:
                if not self._storage_failed(made.step, name, error):
                    self._error = error
            except Exception as second:  # noqa: BLE001
                second.__context__ = error
                self._error = second

    def _storage_failed(self, step: int, name: str, error: BaseException) -> bool:
        """Clear away a save that failed; whether it was the storage's fault, and so is told as an alert."""
        self._orbax = None  # its next save would begin in the state that this one left
        reason = storage_reason(error)
        cleared = ""
        if process_index() == 0:
            try:
                self._catalogue.clear(name)
            except OSError as second:
                cleared = f"; what was written of it could not be removed: {second}"
        if reason is None:
            return False
        text = (
            f"the checkpoint of step {step} could not be written to {self.folder}: {reason}; earlier checkpoints are "
            f"as they were, and training goes on{cleared}"
        )
        self._alert(Alert("checkpoint", step, text))
        return True

    def _alert(self, alert: Alert) -> None:
        logger.warning("%s", alert.text)
        with self._lock:
            self.alerts.append(alert)
            self._untold.append(alert)
        if self._on_alert is not None:
            self._on_alert(alert)

    def _told(self) -> tuple[Alert, ...]:
        with self._lock:
            alerts, self._untold = tuple(self._untold), []
        return alerts

    def emergency_copy(self, step: int, state: Any, extra: Mapping[str, Any] | None = None) -> tuple[Alert, ...]:
        """Copy this process's part of the state into the local folder; written in the background."""
        if self.emergency is None:
            raise rule_error("Emergency copies have a folder", "none", "pass emergency_folder and emergency_every")
        for text in self.emergency.failures():
            self._alert(Alert("emergency", step, text))
        self.emergency.copy(step, state, _json(extra or {}), after=self._open())
        return self._told()

    def wait(self) -> tuple[Alert, ...]:
        """Wait for pending saves and copies; alerts since the last call. Raises what a save raised."""
        self._settle()
        return self._told()

    def _settle(self) -> None:
        """Wait for what is being written; its alerts stay to be told."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self.emergency is not None:
            self.emergency.wait()
            for text in self.emergency.failures():
                self._alert(Alert("emergency", -1, text))
        error, self._error = self._error, None
        if error is not None:
            raise error

    def pending(self) -> bool:
        """Whether a save is still being written."""
        return self._thread is not None and self._thread.is_alive()

    # Restoring.

    def restore(
        self, target: Any, step: int | None = None, *, partial: bool = False, renewed: Sequence[str] = ()
    ) -> Restored:
        """The state as it was, laid out as the target says: on any mesh, any number of devices.

        Without a step it is the newest: the emergency copy where that is newer and every process has it whole, else
        the checkpoint saved last. One that is damaged is passed over with a warning that says what is wrong with it.

        Args:
          target: a pytree of `jax.ShapeDtypeStruct` with shardings, or of arrays.
          step: this step and no other; if it is damaged that is an error.
          partial: the target has some of the leaves only (the parameters without the optimizer's state).
          renewed: names of leaves, or of what they are under ("state/unsent"), that a run can begin anew: where one was
            saved in another shape, or not at all, the state that comes back has None in its place.

        Raises:
          CheckpointError: there is no good one; `.damaged` says what is wrong with each.
          ValueError: the target's leaves are not those that were saved; each is named.
        """
        self._settle()
        leaves = named_leaves(target)
        wanted = {name: describe(name, leaf) for name, leaf in leaves.items()}
        chosen, damaged = self._choose(step)
        if step is None and self.emergency is not None:
            newer_than = (chosen.serial, chosen.step) if chosen is not None else (-1, -1)
            copy = self.emergency.restore(leaves, wanted, newer_than, partial, renewed)
            if copy is not None:
                self._warn(damaged, f"the emergency copy of step {copy.step}")
                return Restored(copy.step, _rebuilt(target, copy.arrays), copy.extra, str(copy.source), True)
        if chosen is None:
            raise _none_good(self.folder, step, damaged)
        if self.emergency is not None:
            for text in self.emergency.failures():
                self._alert(Alert("emergency", chosen.step, text))
        self._warn(damaged, f"step {chosen.step}")
        where = f"{self.folder / chosen.name}"
        new = changed(chosen.manifest.leaves, wanted, renewed)
        saved, wanted, leaves = (
            {name: leaf for name, leaf in tree.items() if name not in new}
            for tree in (chosen.manifest.leaves, wanted, leaves)
        )
        check_target(saved, wanted, where, partial)
        state = arrays.read(self._checkpointer(), self.folder / chosen.name, leaves, chosen.manifest.leaves)
        return Restored(chosen.step, _rebuilt(target, state), dict(chosen.manifest.extra), where)

    def restore_latest(self, target: Any, *, renewed: Sequence[str] = ()) -> Restored | None:
        """`restore(target, renewed=renewed)`, or None in a run that has saved nothing yet.

        Saves that are all damaged are an error. A run that was killed in its first save has saved nothing: one folder,
        whose manifest was still to come.
        """
        try:
            return self.restore(target, renewed=renewed)
        except CheckpointError as error:
            if len(error.damaged) > 1 or any("did not finish" not in text for text in error.damaged.values()):
                raise
            self._warn(error.damaged, "the beginning of the run")
            return None

    def _choose(self, step: int | None) -> tuple[Saved | None, dict[str, str]]:
        """The checkpoint to take, and what is wrong with those that would have come before it.

        Process 0 reads and the others take its word: every file is read once, and all take the same.
        """
        answer: Any = None
        if process_index() == 0:
            answer = self._catalogue.choose(step, self.verify)
        name, damaged = gather("checkpoints/choose", answer, self.timeout)[0]
        return (None if name is None else self._catalogue.read(name)), damaged

    def _warn(self, damaged: Mapping[str, str], instead: str) -> None:
        new = {name: text for name, text in damaged.items() if name not in self._rejected}
        if new and process_index() == 0:
            told = "; ".join(f"{name}: {text}" for name, text in new.items())
            warnings.warn(
                f"In {self.folder} a checkpoint is damaged or unfinished, and {instead} is restored instead. {told}",
                RuntimeWarning,
                stacklevel=3,
            )
        self._rejected |= new.keys()

    # The end.

    def close(self) -> None:
        """Wait for what is pending and let the threads go."""
        try:
            self._settle()
        finally:
            if self._orbax is not None:
                self._orbax.close()
                self._orbax = None
            if self.emergency is not None:
                self.emergency.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as pending:
            if error is None:
                raise
            # The error that ends the block is the first to know; this one is told beside it.
            error.add_note(f"and a pending checkpoint failed: {pending!r}")


def _json(extra: Mapping[str, Any]) -> dict[str, Any]:
    """A copy as JSON gives it back: what is written later is what it was at the call."""
    try:
        return dict(json.loads(json.dumps(dict(extra))))
    except (TypeError, ValueError) as error:
        raise rule_error(
            "`extra` holds what JSON can hold", f"{error}", "make it numbers, strings, lists and dicts"
        ) from error


def _versions() -> dict[str, str]:
    import platform
    from importlib.metadata import version

    from capibara._version import __version__

    packages = ("jax", "jaxlib", "orbax-checkpoint", "numpy")
    counts = {"processes": str(process_count())}
    return (
        {"capibara": __version__, "python": platform.python_version()}
        | {name: version(name) for name in packages}
        | counts
    )


def _rebuilt(target: Any, arrays: Mapping[str, Any]) -> Any:
    import jax

    return jax.tree.unflatten(jax.tree.structure(target), [arrays.get(name) for name in named_leaves(target)])


def _none_good(folder: Any, step: int | None, damaged: Mapping[str, str]) -> CheckpointError:
    what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    told = "; ".join(f"{name}: {text}" for name, text in damaged.items())
    return CheckpointError(f"There is {what} to restore in {folder}" + (f". {told}" if told else ""), dict(damaged))
