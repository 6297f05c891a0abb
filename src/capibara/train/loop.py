"""The loop of training: batches in, steps on the device, and what happens between them.

The device is never waited for: while step n runs, the metrics of step n - 1 are read, logged and checked. A step is
counted when its metrics have arrived. Checkpoints, evaluation, the guard against NaN and a request to stop are all
asked between steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from capibara.checkpoints.store import Checkpoints
from capibara.compile.persistent import stable_key
from capibara.errors import CapibaraError, rule_error
from capibara.lru import LRU
from capibara.memory.autopsy import Autopsy, autopsy
from capibara.models import step_hooks
from capibara.models.preset import OptimizerSettings, TrainSettings
from capibara.observe.goodput import Goodput
from capibara.observe.recorder import Recorder
from capibara.parallel import run as layouts_run
from capibara.parallel.optimizers import make_optimizer, schedule_named
from capibara.parallel.trainer_step import EXPERT_SHARE, FP8_HISTORY, FROZEN, UNSENT, StepOptions, counted_targets
from capibara.processes import process_count, process_index
from capibara.train import expert_placement
from capibara.train.compiled_step import CompiledStep, LoopOptions, StepMaker
from capibara.train.data.batches import Batches
from capibara.train.logs import MetricsLog
from capibara.train.placing import place, rows_and_length, share_of
from capibara.train.preemption import Preemption
from capibara.train.trainable import Trainable
from capibara.train.watchdog import Watchdog

__all__ = ["AUTOPSY", "Diverged", "Loop", "LoopOptions", "Preempted", "Result"]

AUTOPSY = "autopsy.json"
"""In a run's folder, what lay in memory when it ran out."""
_POSITIONS = 8192
"""Steps whose place in the data is remembered, for a state that goes back."""
_SLOWEST_BFLOAT16 = 0.99
"""The slowest decay of a moment that a bfloat16's 8 bits follow when rounded to the nearest."""
_COMPILE_SECONDS = 3600.0
"""What planning and compiling a large step may take, where log.hang_seconds is less: nobody waits for it in vain."""


class Diverged(CapibaraError, RuntimeError):
    """Too many steps in a row whose loss or gradient is not finite; the batch is kept for another try."""


class _Rewound(Exception):
    """The state went back to an earlier step."""


class Preempted(CapibaraError, RuntimeError):
    """The run was asked to stop, and its state is saved."""


@dataclass
class Result:
    """What a run came to."""

    step: int
    metrics: dict[str, float]
    """Of the last step."""
    eval_loss: float | None = None
    seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)
    """The numbers of each step of this process that metrics.jsonl has; the last hundred thousand."""


class Loop:
    """One run: its program, its state, its step. `prepare` compiles and restores; `run` goes on to a step."""

    def __init__(
        self,
        trainable: Trainable,
        settings: TrainSettings,
        optimizer: OptimizerSettings,
        options: LoopOptions | None = None,
        *,
        folder: Path | None = None,
        checkpoints: Checkpoints | None = None,
        watchdog: Watchdog | None = None,
        recorder: Recorder | None = None,
        goodput: Goodput | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.trainable = trainable
        self.settings = settings
        self.options = options or LoopOptions()
        self.folder = folder
        self.checkpoints = checkpoints
        self.watchdog = watchdog
        self.recorder = recorder
        self.goodput = goodput
        self.beside: dict[str, Any] = {}
        """What else a checkpoint keeps beside the state, as JSON."""
        self.tell = tell or (lambda text: None)
        rate = schedule_named(
            optimizer.schedule,
            optimizer.learning_rate,
            steps=settings.steps,
            warmup_steps=optimizer.warmup_steps,
            final=optimizer.final,
        )
        self.optimizer = make_optimizer(
            optimizer.name,
            rate,
            b1=optimizer.b1,
            b2=optimizer.b2,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            clip=optimizer.clip,
        )
        self.step_options = StepOptions(
            settings.precision, settings.seed, self.options.communication, rate, guard=settings.skip_nonfinite > 0
        )
        if settings.precision == "bfloat16" and max(optimizer.b1, optimizer.b2) > _SLOWEST_BFLOAT16:
            self.tell(
                f"optimizer.b1, b2 = {optimizer.b1}, {optimizer.b2}: a moment in bfloat16 does not move by less than "
                f"1/256 of itself; use {_SLOWEST_BFLOAT16} at the most"
            )
        self.devices = list(self.options.devices or jax.devices())
        self.step = 0
        self.params: Any = None
        self.state: Any = None
        self._maker = StepMaker(trainable, settings, self.optimizer, self.step_options, self.tell)
        self._compiled: CompiledStep | None = None
        self._evaluations: LRU[Any, Any] = LRU(8)  # programs by the shapes of their batch
        self._positions: dict[int, dict[str, Any]] = {}
        self._share = (0, 1)
        self._share_of_peak: tuple[int, float | None] | None = None

    # Making the program.

    def prepare(self, batch: Any, restored: bool = True) -> dict[str, Any] | None:
        """Lay out and compile the step for batches like this one, of all processes, and start or restore the state.

        Returns what was kept beside the state of the checkpoint that was restored; None for a new run.
        """
        self._compile(batch)
        with self._phase("initialise"):
            step = self.compiled
            frozen = self._maker.frozen(step)
            if restored and self.checkpoints is not None and (found := self._restored(self.checkpoints)) is not None:
                self.state |= frozen
                return found
            self.params = self._maker.params(step)
            self.state = self._maker.state(step, self.params) | frozen
        return None

    def _restored(self, checkpoints: Checkpoints) -> dict[str, Any] | None:
        """The newest state, if there is one."""
        params, state, _ = self.compiled.program.arguments
        trained = {name: shape for name, shape in state.items() if name != FROZEN}
        renewed = [f"state/{name}" for name in (UNSENT, EXPERT_SHARE, FP8_HISTORY)]
        found = checkpoints.restore_latest({"params": params, "state": trained}, renewed=renewed)
        if found is None:
            return None
        self.params, self.state, self.step = found.state["params"], found.state["state"], found.step
        self.tell(f"restored step {found.step} from {found.source}")
        for name in (UNSENT, EXPERT_SHARE, FP8_HISTORY):
            if all(leaf is not None for leaf in jax.tree.leaves(self.state.get(name, ()), is_leaf=lambda x: x is None)):
                continue
            self.state[name] = self.compiled.on_mesh(
                lambda shapes=trained[name]: jax.tree.map(lambda s: jax.numpy.zeros(s.shape, s.dtype), shapes),
                trained[name],
            )
            if name == UNSENT:
                self.tell(
                    "what devices had not sent of their gradients, a rounding error of one step, begins at nothing: "
                    "the checkpoint has none for a data axis of this size"
                )
            elif name == FP8_HISTORY:
                self.tell("what fp8 products are scaled by begins anew: the checkpoint has no history of this length")
        return dict(found.extra)

    def _compile(self, batch: Any) -> None:
        with self._phase("compile"):
            self._compiled = self._maker.compile(batch, self.options, self.devices)

    @property
    def compiled(self) -> CompiledStep:
        """The step; `prepare` makes it."""
        assert self._compiled is not None
        return self._compiled

    def share(self) -> tuple[int, int]:
        """(i, n): of a batch in n equal parts this process's devices read from the i-th alone."""
        return share_of(self.compiled.program.arguments[2])

    def place(self, batch: Any, share: tuple[int, int] = (0, 1)) -> Any:
        """A batch, or the part of it that `share` says, as an array over all devices, where the layout puts it."""
        return place(batch, self.compiled.program.arguments[2], share)

    def autopsy(self) -> contextlib.AbstractContextManager[None]:
        """Inside, an out-of-memory error says what lay in memory, and beside it what the planner says of the step."""
        return autopsy(plan=self._maker.replan, tell=self._out_of_memory)

    def _out_of_memory(self, found: Autopsy) -> None:
        if self.folder is not None and process_index() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(found.as_dict(), indent=1, ensure_ascii=False)
            (self.folder / AUTOPSY).write_text(text + "\n", encoding="utf-8")

    # Running it.

    def _phase(self, name: str, **step: int) -> contextlib.AbstractContextManager[Any]:
        if self.watchdog is not None:
            allow = _COMPILE_SECONDS if name == "compile" else 0.0
            self.watchdog.beat(self.step, name, allow=max(allow, self.watchdog.timeout))
        if self.recorder is not None:
            self.recorder.phase(name)
        return contextlib.nullcontext() if self.goodput is None else self.goodput.phase(name, **step)

    def run(
        self,
        batches: Batches,
        *,
        until: int,
        log: MetricsLog,
        evaluation: Callable[[], Batches] | None = None,
        preemption: Preemption | None = None,
        on_step: Callable[[int, Mapping[str, Any]], None] | None = None,
        share: tuple[int, int] = (0, 1),
    ) -> Result:
        """Go on to step `until`. `share` says which part of a batch `batches` gives (see `share`)."""
        result = Result(self.step, {})
        started = last = time.perf_counter()
        pending: tuple[int, Any, Any] | None = None
        self._share = share
        self._positions = {self.step: batches.state()}
        upcoming = self._draw(batches) if self.step < until else None
        while upcoming is not None and self.step < until:
            drawn, batch = upcoming
            with self._phase("step", step=self.step + 1):
                try:
                    metrics = step_hooks.guarded(self, functools.partial(self._one_step, batch, self.step))
                except _Rewound:
                    if pending is not None and pending[0] <= self.step:
                        self._arrived(pending, last, log, result, on_step)
                    result.history[:] = [row for row in result.history if row["step"] <= self.step]
                    log.rewind(self.step)
                    upcoming, pending = self._resumed(batches), None
                    last = time.perf_counter()
                    continue
                # The device has its next batch before it wants it; what was drawn for that is not yet trained on.
                position = self._positions[self.step] = batches.state()
                self._positions.pop(self.step - _POSITIONS, None)
                step_hooks.report(self.step, self.get_state())
                with self._phase("data_wait"):
                    upcoming = self._draw(batches) if self.step < until else None
                if pending is not None:
                    last = self._arrived(pending, last, log, result, on_step)
                pending = (self.step, metrics, drawn)
            if self._due(preemption):
                last = self._arrived(pending, last, log, result, on_step)
                pending = None
                self._between_steps(position, log, result, evaluation, preemption)
                last = time.perf_counter()
            if upcoming is not None and (wanted := step_hooks.devices_wanted(self.devices)) is not None:
                if pending is not None:
                    self._arrived(pending, last, log, result, on_step)
                pending = None
                upcoming = self._resize(wanted, upcoming[0], position)
                last = time.perf_counter()
        if pending is not None:
            self._arrived(pending, last, log, result, on_step)
        result.step = self.step
        result.seconds = time.perf_counter() - started
        # Saved before it is evaluated: an evaluation that fails costs no step.
        self.save(batches.state(), block=True)
        if self.checkpoints is not None:
            # Copies are written behind the steps: what went wrong with the last ones is told before the run is done.
            self._tell_alerts(self.checkpoints.wait())
        if evaluation is not None and (result.eval_loss is None or self.step % max(1, self.settings.eval_every)):
            result.eval_loss = self.evaluate(evaluation, log, share)
        return result

    def _one_step(self, batch: Any, after: int) -> dict[str, Any]:
        """The step after this one. A guard that runs it again from an earlier state, or elsewhere, is told so."""
        if self.step != after or (step_hooks.is_guarded() and self._moved()):
            raise _Rewound
        self.params, self.state, metrics = self.compiled.executable(self.params, self.state, batch)
        if step_hooks.is_guarded():
            # A device's error has to come up inside of the guard; and what the step gave outlives the device.
            metrics = jax.device_get(metrics)
        else:
            for value in metrics.values():
                value.copy_to_host_async()
        self.step += 1
        return dict(metrics)

    def _state_devices(self) -> set[Any]:
        return set(jax.tree.leaves(self.params)[0].sharding.device_set)

    def _moved(self) -> bool:
        """Whether the state was put on other devices than the program's."""
        return self._state_devices() != set(self.compiled.program.mesh.devices.flat)

    # A recovery manager takes the state and puts it back, on the devices that are left.

    @property
    def steps_done(self) -> int:
        return self.step

    def get_state(self) -> dict[str, Any]:
        return self._saved_state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.params, self.state = state["params"], {**self.state, **state["state"]}
        self.step = int(self.state["step"])

    def _resumed(self, batches: Batches) -> tuple[Any, Any] | None:
        """The batch after the step that the state went back to; on other devices, by another plan."""
        if self.step not in self._positions:
            raise rule_error(
                f"A run goes back at most {_POSITIONS} steps within a process",
                f"to step {self.step}",
                "keep states more often (checkpoint_frequency), or restart with --resume",
            )
        batches.restore(self._positions[self.step])
        drawn = next(batches, None)
        if drawn is None:
            return None
        if self._moved():
            self._move_to(sorted(self._state_devices(), key=lambda d: d.id), drawn)
        self.tell(f"went back to step {self.step}")
        return drawn, self.place(drawn, self._share)

    def _resize(self, devices: Sequence[Any], batch: Any, position: Mapping[str, Any]) -> tuple[Any, Any]:
        """Go on on other devices that are there, with the same batch next. The state is saved before, where checkpoints
        are kept, and goes over without a detour through them."""
        if process_count() > 1:
            raise rule_error(
                "A run of one process changes its devices while it goes on",
                f"one of {process_count()} processes",
                "stop it and start it on the other slice with --resume, as the supervisor does",
            )
        self.save(position, block=True)
        self._move_to(devices, batch)
        return batch, self.place(batch, self._share)

    def _move_to(self, devices: Sequence[Any], batch: Mapping[str, Any]) -> None:
        """Plan and compile for these devices, and lay the state out anew."""
        self.tell(f"{len(self.devices)} devices became {len(devices)}: planning anew")
        self.devices = list(devices)
        self.options = dataclasses.replace(self.options, axes=None, devices=devices)
        self._evaluations.clear()
        self._compile(batch)
        params, state, _ = self.compiled.program.arguments
        trained = {name: x for name, x in self.state.items() if name != FROZEN}
        shapes = {name: state[name] for name in trained}
        self.params, self.state = jax.tree.map(
            lambda x, s: jax.device_put(x, s.sharding), (self.params, trained), (params, shapes)
        )
        # What is frozen may have lain on the devices that are gone, and nobody kept a copy of it: it is read again.
        self.state |= self._maker.frozen(self.compiled)

    def _draw(self, batches: Batches) -> tuple[Any, Any] | None:
        """The next batch, as it was drawn and where the layout puts it; None at the end of the data."""
        drawn = next(batches, None)
        return None if drawn is None else (drawn, self.place(drawn, self._share))

    def _due(self, preemption: Preemption | None) -> bool:
        settings = self.settings
        every = (settings.checkpoint_every, settings.eval_every)
        emergency = None if self.checkpoints is None else self.checkpoints.emergency_every
        return any(n and self.step % n == 0 for n in (*every, emergency or 0)) or (
            preemption is not None and preemption.should_stop(self.step)
        )

    def _arrived(
        self,
        pending: tuple[int, Any, Any],
        last: float,
        log: MetricsLog,
        result: Result,
        on_step: Callable[[int, Mapping[str, Any]], None] | None,
    ) -> float:
        """The metrics of a step, once the device has them: logged, told, and checked."""
        step, metrics, batch = pending
        values = jax.device_get(metrics)
        now = time.perf_counter()
        seconds = now - last
        row = self._row(step, values, seconds)
        log.write(row)
        # Numbers alone: arrays of every step would be gigabytes in the end.
        result.metrics = {name: value for name, value in row.items() if isinstance(value, int | float)}
        result.history.append(result.metrics)
        del result.history[:-100_000]
        if self.recorder is not None:
            self.recorder.step(step, seconds, row["loss"])
        if on_step is not None:
            on_step(step, row)
        in_a_row = int(values.get("skipped_in_a_row", 0))
        if in_a_row and self.step_options.guard:
            self.tell(f"step {step}: loss or gradient is not finite, the step was skipped ({in_a_row} in a row)")
        if in_a_row > self.settings.skip_nonfinite:
            raise self._diverged(step, in_a_row, batch)
        return now

    def _row(self, step: int, values: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        rows, length = rows_and_length(self.compiled.program.arguments[2])
        tokens = rows * length
        rate = tokens / seconds if seconds > 0 else math.nan
        row: dict[str, Any] = {
            "step": step,
            "loss": float(values["loss"]),
            "tokens_per_second": rate,
            "mfu": self._mfu(rate, length),
            "seconds": seconds,
        }
        for name, value in values.items():
            if name == EXPERT_SHARE and name in self.state:
                # The busiest expert's part of its layer's tokens, in even parts. All of them, 128 experts in 48 layers,
                # are a line of their own at each checkpoint.
                row["expert_load_max"] = float(np.max(value)) * value.shape[-1]
            elif name not in row:
                row[name] = float(value) if value.ndim == 0 else value.tolist()
        return row

    def _mfu(self, tokens_per_second: float, length: int) -> float | None:
        """The share of the devices' peak that the model's own operations are; None where either is not known."""
        if self._share_of_peak is None or self._share_of_peak[0] != length:
            self._share_of_peak = length, self._peak_share_of_a_token(length)
        share = self._share_of_peak[1]
        return None if share is None else tokens_per_second * share

    def _peak_share_of_a_token(self, length: int) -> float | None:
        """Seconds that one token would take at the devices' peak."""
        from capibara.hardware.chips import chip_for

        flops = self.trainable.flops_per_token(length)
        found = chip_for(self.devices[0].device_kind)
        if flops is None or found is None:
            return None
        peak = found.flops.get("float32" if self.settings.precision == "float32" else "bfloat16")
        if peak is None:
            return None
        # A CPU's simulated devices are one host.
        hosts = {d.process_index for d in self.devices}
        chips = len(hosts) if found.platform == "cpu" else len(self.devices)
        return flops / (peak * chips)

    def _diverged(self, step: int, in_a_row: int, batch: Any) -> Diverged:
        kept = ""
        if self.folder is not None:
            file = self.folder / f"diverged_step_{step}_process_{process_index()}.npz"
            named = jax.tree_util.tree_leaves_with_path(batch)
            arrays = {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(x) for path, x in named}
            np.savez(file, **arrays)  # type: ignore[arg-type]  # its other keyword is allow_pickle
            kept = f"; the batch is in {file}"
        return Diverged(
            f"Loss or gradient was not finite at step {step}, {in_a_row} in a row, more than train.skip_nonfinite = "
            f"{self.settings.skip_nonfinite}{kept}. Fix: a lower optimizer.learning_rate, more warm-up, or "
            f'train.precision = "mixed"; the last checkpoint is from before'
        )

    def _between_steps(
        self,
        position: Mapping[str, Any],
        log: MetricsLog,
        result: Result,
        evaluation: Callable[[], Batches] | None,
        preemption: Preemption | None,
    ) -> None:
        settings = self.settings
        if evaluation is not None and settings.eval_every and self.step % settings.eval_every == 0:
            result.eval_loss = self.evaluate(evaluation, log, self._share)
        stop = preemption is not None and preemption.should_stop(self.step)
        due = bool(settings.checkpoint_every) and self.step % settings.checkpoint_every == 0
        if due:
            self._place_experts(log)
        if stop or due:
            self.save(position, block=stop)
        elif self.checkpoints is not None and self.step % (self.checkpoints.emergency_every or self.step + 1) == 0:
            with self._phase("checkpoint"):
                self._tell_alerts(
                    self.checkpoints.emergency_copy(self.step, self._saved_state(), self._extra(position))
                )
        if stop:
            if self.recorder is not None:
                self.recorder.close()  # asked for, and saved: that is an end in order, though an exception carries it
            raise Preempted(f"asked to stop at step {self.step}, which is saved")

    def _place_experts(self, log: MetricsLog) -> None:
        """Tell how the experts were used since the last checkpoint, and divide them anew over the devices that have
        them where some had far more to do than others.

        What was used is counted in the state, and this comes at every multiple of train.checkpoint_every and at no
        other step: a run that was stopped or killed places its experts when one that was left alone does.
        """
        if EXPERT_SHARE not in self.state:
            return
        used = np.asarray(self.state[EXPERT_SHARE], np.float64)
        share = used / np.maximum(used.sum(axis=1, keepdims=True), 1e-9)
        log.write({"step": self.step, "expert_share": share.tolist()})
        counted = self.state[EXPERT_SHARE]
        self.state |= {EXPERT_SHARE: jax.numpy.zeros_like(counted, device=counted.sharding)}
        model = getattr(getattr(self.trainable, "model", None), "config", None)
        devices = self.compiled.expert_devices
        if model is None or devices < 2:
            return
        before = expert_placement.busiest(share, devices)
        if before <= self.options.load_threshold:
            return
        slots = expert_placement.moe_slots(model)
        orders = expert_placement.new_orders(share, devices)
        after = expert_placement.busiest(np.take_along_axis(share, orders, axis=1), devices)
        with self._phase("checkpoint"):
            self.params = expert_placement.reordered(self.params, slots, orders)
            self.state |= {"optimizer": expert_placement.reordered(self.state["optimizer"], slots, orders)}
        self.tell(
            f"step {self.step}: the busiest of {devices} devices had {before:.2f} times an even part of the experts' "
            f"work; experts were placed anew, for {after:.2f} times"
        )

    def _saved_state(self) -> dict[str, Any]:
        """What is trained: weights that are frozen are where they were read from."""
        return {"params": self.params, "state": {k: v for k, v in self.state.items() if k != FROZEN}}

    def _extra(self, position: Mapping[str, Any]) -> dict[str, Any]:
        layout = self.compiled.chosen.layout.name
        return {"data": dict(position), "layout": layout, "processes": process_count(), **self.beside}

    def save(self, position: Mapping[str, Any], block: bool = False) -> None:
        """A checkpoint of this step, unless it has one; `position` is the data's state after it."""
        if self.checkpoints is None or self.step == 0 or self.checkpoints.latest() == self.step:
            return
        with self._phase("checkpoint"):
            self._tell_alerts(self.checkpoints.save(self.step, self._saved_state(), self._extra(position), block=block))

    def _tell_alerts(self, alerts: Iterable[Any]) -> None:
        for alert in alerts:
            self.tell(str(alert))
            if self.recorder is not None:
                self.recorder.alert(str(alert), self.step)

    def _loss_params(self) -> Any:
        return (self.params, self.state[FROZEN]) if FROZEN in self.state else self.params

    def _evaluation(self, batch: Any) -> Any:
        """The program that gives the loss of such a batch, and how many of its targets count."""
        shapes = tuple((x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(batch))
        program = self._evaluations.get(shapes)
        if program is None:
            loss = self.trainable.loss(1)
            jitted = jax.jit(lambda p, b: (loss(p, b, None)[1]["loss"], counted_targets(b)))
            lowered = jitted.lower(self._loss_params(), batch)
            with stable_key(lowered):
                program = self._evaluations[shapes] = lowered.compile()
        return program

    def evaluate(self, evaluation: Callable[[], Batches], log: MetricsLog, share: tuple[int, int] = (0, 1)) -> float:
        """The mean loss over the held-out part, by the targets that count."""
        total = weight = 0.0
        program = self.compiled.program
        with self._phase("evaluation"), evaluation() as batches:
            for number, batch in enumerate(batches):
                if number == self.settings.eval_batches:
                    break
                with layouts_run.surroundings(program.layout, program.mesh):
                    placed = self.place(batch, share)
                    value, counted = map(float, self._evaluation(placed)(self._loss_params(), placed))
                total, weight = total + value * counted, weight + counted
        if not weight:
            raise rule_error("Evaluation has a batch or more", "none", "use a smaller batch or more held-out data")
        mean = total / weight
        log.write({"step": self.step, "eval_loss": mean})
        return mean
