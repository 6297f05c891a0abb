"""`TpuDistributedTrainer`: a model on a mesh, trained on any iterable of batches."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from capibara.checkpoints.store import Checkpoints
from capibara.errors import rule_error, say_once
from capibara.mesh.choices import AXES
from capibara.mesh.mesh import MeshConfig
from capibara.models.modular import ModularCapibaraModel
from capibara.models.preset import OptimizerSettings, TrainSettings
from capibara.plan.search.space import PARAMETERS
from capibara.train.data.wrapped import wrap_dataset
from capibara.train.logs import MetricsLog
from capibara.train.loop import Loop, LoopOptions, Result
from capibara.train.placing import rows_and_length
from capibara.train.trainable import as_trainable

__all__ = ["TpuDistributedTrainer"]

_log = logging.getLogger(__name__)
_ENDLESS = 2**62

_SAID_ELSEWHERE = {
    "steps": "the dataset and epochs= say how many",
    "batch_size": "the dataset's batches have it",
    "sequence_length": "the dataset's batches have it",
    "precision": "pass precision=",
    "accumulate": "pass gradient_accumulation_steps=",
    "remat": "pass use_gradient_checkpointing= or activation_offloading=",
    "eval_every": "evaluate by a loss of your own, or train with `capibara train`",
    "eval_batches": "evaluate by a loss of your own, or train with `capibara train`",
}
"""Of `TrainSettings`, what the trainer does not read there."""


@dataclass(frozen=True)
class _Call:
    """A call of `train`, counted from 0, and the step that it began after."""

    number: int
    began: int


def _check_settings(settings: TrainSettings | None, precision: str, overlapped: bool) -> None:
    if settings is None:
        return
    usual = TrainSettings()
    for name, fix in _SAID_ELSEWHERE.items():
        value = getattr(settings, name)
        if value != getattr(usual, name) and not (name == "precision" and value == precision):
            raise rule_error(f"A trainer's settings leave {name} to its other arguments", f"{name}={value!r}", fix)
    if overlapped and settings.communication not in ("automatic", "overlapped"):
        raise rule_error(
            "Gradients are summed in one way",
            f'async_gradient_communication=True and settings.communication="{settings.communication}"',
            "leave one of them out",
        )


class TpuDistributedTrainer:
    """Trains a model over a mesh. Each flag changes the compiled program.

    Args:
      model: a `ModularCapibaraModel`; an NNX or Equinox module, with `loss`; or (loss, params).
      mesh: of axes among pipeline, data, expert, sequence, model (`create_training_mesh`); None lets the planner
        choose one over the devices that are attached.
      gradient_accumulation_steps: microbatches of a step, one after another, whose gradients are averaged by the
        targets of each that count.
      use_gradient_checkpointing: keep of a layer only what enters it, and compute the rest again.
      async_gradient_communication: sum the gradients over the data axis in buckets that do not wait for each other,
        beside the backward pass; off, one bucket after another. Where parameters are cut over the data axis, or other
        axes than data are used, the compiler places the sums and this is said once.
      activation_offloading: keep what enters a layer in the host's memory until the backward pass; implies
        checkpointing.
      optimizer_sharding: cut the optimizer's state over the data axis (and, where the planner finds that better, the
        parameters); off, every device has all of it.
      loss: `loss(module, batch)` of a module that is not a capibara model.
      precision: "mixed", "bfloat16", "float32" or "fp8"; the model's own by default. `settings.fp8` says how fp8
        products are scaled, else the model's own `fp8`.
      optimizer: an `OptimizerSettings`; AdamW by default.
      settings: a `TrainSettings` for the rest: z_loss, seed, skip_nonfinite, unroll, deterministic, communication,
        checkpoint_every. What the other arguments and the dataset say (precision, steps, batch, accumulation,
        recomputation) is refused there.
      checkpoint_folder: keep checkpoints there every `settings.checkpoint_every` steps, and go on from the last. A
        program that is started again makes the same calls of `train`: those that were done are passed over, and the
        one that was not goes on.
      tell: gets lines of text about the run.
    """

    def __init__(
        self,
        model: Any,
        mesh: Mesh | MeshConfig | None = None,
        gradient_accumulation_steps: int = 1,
        use_gradient_checkpointing: bool = False,
        async_gradient_communication: bool = False,
        activation_offloading: bool = False,
        optimizer_sharding: bool = False,
        *,
        loss: Callable[..., Any] | None = None,
        precision: str | None = None,
        optimizer: OptimizerSettings | None = None,
        settings: TrainSettings | None = None,
        checkpoint_folder: str | Path | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        if (
            isinstance(gradient_accumulation_steps, bool)
            or not isinstance(gradient_accumulation_steps, int)
            or gradient_accumulation_steps < 1
        ):
            raise rule_error(
                "gradient_accumulation_steps is a whole number from 1 up", repr(gradient_accumulation_steps), "use 1"
            )
        self.model = model
        self.mesh = mesh.build() if isinstance(mesh, MeshConfig) else mesh
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.use_gradient_checkpointing = use_gradient_checkpointing
        self.async_gradient_communication = async_gradient_communication
        self.activation_offloading = activation_offloading
        self.optimizer_sharding = optimizer_sharding
        chosen = precision or getattr(model, "precision", None) or "mixed"
        _check_settings(settings, chosen, async_gradient_communication)
        given = settings or TrainSettings()
        fp8 = given.fp8
        if chosen == "fp8" and given.precision != "fp8":
            fp8 = getattr(model, "fp8", None) or fp8
        self.settings = dataclasses.replace(given, precision=chosen, fp8=fp8)
        self.trainable = as_trainable(
            model, loss=loss, precision=chosen, z_loss=self.settings.z_loss, fp8=self.settings.fp8
        )
        self.optimizer = optimizer
        self.checkpoint_folder = None if checkpoint_folder is None else Path(checkpoint_folder)
        self.tell = tell
        self.loop: Loop | None = None
        self._calls = 0
        """Of `train`, that came to their end."""
        self._reached = _Call(0, 0)
        """The call that the state is of."""
        self._is_capibara = isinstance(model, ModularCapibaraModel)

    # What came of it.

    @property
    def params(self) -> Any:
        """The weights after the last step."""
        return self._trained().params

    @property
    def state(self) -> Any:
        """What the step keeps beside the weights: the optimizer's state, the step's number, skipped steps."""
        return self._trained().state

    def _trained(self) -> Loop:
        if self.loop is None:
            raise rule_error("A trainer has a state once it trains", "none yet", "call train(dataset)")
        return self.loop

    # Training.

    def train(self, dataset: Iterable[Any], epochs: int = 1) -> Result:
        """Go through the dataset so many times. A batch is a dict of "inputs" and "targets", or bare token ids.

        In a program of several processes each passes the same batches and reads its part of them. Whoever listens (a
        recovery manager, an autoscaler) is told of every step. The trained weights are in `model.params`, and a second
        call goes on from them.
        """
        if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
            raise rule_error("epochs is a whole number from 1 up", repr(epochs), "use epochs=1")
        batches = wrap_dataset(dataset, epochs=epochs, tokens=self._is_capibara)
        steps = batches.steps(epochs)
        with contextlib.ExitStack() as stack:
            keep = None
            if self.checkpoint_folder is not None:
                keep = stack.enter_context(Checkpoints(self.checkpoint_folder))
            kept = None
            if self.loop is None:
                first = batches.peek()
                loop = self._loop(first, steps, keep)
                with loop.autopsy():
                    kept = loop.prepare(first)
                self._reached = _Call(**(kept or {}).get("call", {"number": 0, "began": 0}))
                self.loop = loop
            if self._calls < self._reached.number:
                if self.tell is not None:
                    self.tell(f"call {self._calls + 1} of train was done before step {self.loop.step} was saved")
                self._calls += 1
                self.trainable.publish(self.loop.params)
                return Result(self.loop.step, {})
            if kept is not None:
                batches.restore(kept["data"])
            else:
                self._reached = _Call(self._calls, self.loop.step)
            # Batches of files never end by themselves.
            limit = _ENDLESS if steps is None else self._reached.began + steps
            self.loop.checkpoints = keep
            self.loop.beside = {"call": dataclasses.asdict(self._reached)}
            log = stack.enter_context(MetricsLog(None, tell=self.tell))
            try:
                with self.loop.autopsy():
                    result = self.loop.run(batches, until=limit, log=log)
                self._calls += 1
                return result
            finally:
                # After an error too: the step has taken over the memory of what was published before.
                self.trainable.publish(self.loop.params)

    def _loop(self, first: Any, steps: int | None, keep: Checkpoints | None) -> Loop:
        axes = None if self.mesh is None else self._axes()
        optimizer = self.optimizer or OptimizerSettings(
            schedule="constant" if steps is None else "cosine", warmup_steps=min(100, (steps or 1000) // 10)
        )
        communication, parameters = self._communication(axes or {})
        settings = dataclasses.replace(
            self.settings,
            steps=steps or 2**31 - 1,
            batch_size=rows_and_length(first)[0],
            accumulate=self.gradient_accumulation_steps,
            remat="full" if self.use_gradient_checkpointing or self.activation_offloading else "none",
        )
        options = LoopOptions(
            axes=axes,
            devices=None if self.mesh is None else list(self.mesh.devices.flat),
            parameters=parameters,
            communication=communication,
            offload_activations=self.activation_offloading,
        )
        return Loop(
            self.trainable,
            settings,
            optimizer,
            options,
            folder=self.checkpoint_folder,
            checkpoints=keep,
            tell=self.tell,
        )

    def _axes(self) -> dict[str, int]:
        assert self.mesh is not None
        sizes = dict(self.mesh.shape)
        unknown = [name for name, size in sizes.items() if name not in AXES and size > 1]
        if unknown:
            raise rule_error(
                f"A training mesh has axes among {', '.join(AXES)}", ", ".join(unknown), "use create_training_mesh"
            )
        return {name: size for name, size in sizes.items() if name in AXES}

    def _communication(self, axes: dict[str, int]) -> tuple[str, tuple[str, ...]]:
        """How gradients are summed, and what may be cut over the data axis."""
        parameters = PARAMETERS[1:] if self.optimizer_sharding else PARAMETERS[:1]
        if self.settings.communication != "automatic":
            return self.settings.communication, parameters
        if axes.get("data", 1) == 1:
            return "automatic", parameters
        if any(size > 1 for name, size in axes.items() if name != "data"):
            if self.async_gradient_communication:
                say_once(
                    _log,
                    "async_gradient_communication",
                    "async_gradient_communication: on a mesh with other axes than data the compiler places the sums of "
                    "gradients, beside the backward pass where it can",
                )
            return "automatic", parameters
        kept = tuple(word for word in parameters if word != "full")
        return ("overlapped" if self.async_gradient_communication else "sequential"), kept
