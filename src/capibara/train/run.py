"""One training run in a folder: what `capibara train` does.

DIR/config.toml      everything the run was told
DIR/run.json         what it knew while it ran: devices, layout, kernels, predictions; an entry a process
DIR/metrics.jsonl    a line a step
DIR/checkpoints/     and the data's position in each
DIR/merged/          of a LoRA run, the model with its changes added, as a Hugging Face folder
DIR/autopsy.json     of a run that ran out of memory: what lay there, what was predicted, what would fit
DIR/recordings/      of each process its last events, sensors and stacks; crash.json is all of them at the last crash
DIR/goodput.jsonl, DIR/heartbeats/, DIR/report.html
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from capibara import toml_tables
from capibara.checkpoints.policy import Keep
from capibara.checkpoints.store import Checkpoints
from capibara.errors import rule_error
from capibara.models.modular import ModularCapibaraModel
from capibara.models.tokenizer import Tokenizer, load_tokenizer
from capibara.observe.crash_story import keep_crash
from capibara.observe.goodput import Goodput, GoodputReport
from capibara.observe.monitor import TpuRealTimeMonitor
from capibara.observe.recorder import Recorder
from capibara.parallel.trainer_step import param_dtype
from capibara.plan.place import place
from capibara.processes import gather, process_count, process_index
from capibara.train.config import RunConfig
from capibara.train.data.batches import RowBatches, open_batches
from capibara.train.logs import MetricsLog
from capibara.train.loop import Loop, LoopOptions, Preempted, Result
from capibara.train.lora import LoraTrainable
from capibara.train.preemption import Preemption
from capibara.train.report.facts import begin_life, end_life, host_peak_bytes, peak_bytes
from capibara.train.report.sample import sample_entry
from capibara.train.teaching import teach_plan
from capibara.train.trainable import ModelTrainable
from capibara.train.watchdog import Watchdog

__all__ = ["Trained", "train"]

logger = logging.getLogger(__name__)

_TOKENISE_SECONDS = 24 * 3600.0
"""What making tokens of all text may take, once, whatever log.hang_seconds is."""


@dataclass
class Trained:
    """A finished run."""

    model: ModularCapibaraModel
    result: Result
    loop: Loop
    goodput: GoodputReport | None
    folder: Path | None


def train(
    config: RunConfig,
    folder: str | Path | None = None,
    *,
    resume: bool = False,
    devices: Any = None,
    tell: Callable[[str], None] | None = None,
    on_step: Callable[[int, Mapping[str, Any]], None] | None = None,
) -> Trained:
    """Train as the config says, in this folder; with `resume` go on from its last checkpoint.

    A folder that has a run already is not written over: it is resumed, or another folder is named. One whose run never
    came to its first step, for want of its data for one, is free again.
    """
    preset = config.preset
    settings = preset.train
    out = None if folder is None else _local(folder)
    model = ModularCapibaraModel(
        preset.model, precision=settings.precision, seed=settings.seed, fp8=settings.fp8_products
    )
    _check(config)
    with contextlib.ExitStack() as stack:
        claim = checkpoints = recorder = watchdog = goodput = None
        if out is not None:
            claim = stack.enter_context(_Claim(out, config, resume))
            checkpoint = config.checkpoint
            checkpoints = stack.enter_context(
                Checkpoints(
                    out / "checkpoints",
                    keep=Keep(last=checkpoint.keep, every=checkpoint.keep_every or None),
                    emergency_folder=checkpoint.emergency_folder or None,
                    emergency_every=checkpoint.emergency_every or None,
                )
            )
            stack.push(functools.partial(_crashed, out))
            recorder = stack.enter_context(Recorder(out / "recordings", process_index(), process_count()))
            if config.log.sensor_seconds:
                stack.enter_context(TpuRealTimeMonitor(1000 * config.log.sensor_seconds, recorder=recorder))
            if process_index() == 0:
                goodput = stack.enter_context(Goodput(out / "goodput.jsonl"))
            if config.log.hang_seconds:
                watchdog = stack.enter_context(_watchdog(out, config, recorder))
        preemption = stack.enter_context(Preemption())
        loop = Loop(
            _trainable(config, model),
            settings,
            preset.optimizer,
            LoopOptions(
                axes=preset.mesh.axes,
                devices=devices,
                communication=settings.communication,
                load_threshold=config.scaling.load_threshold,
            ),
            folder=out,
            checkpoints=checkpoints,
            watchdog=watchdog,
            recorder=recorder,
            goodput=goodput,
            tell=tell,
        )
        stack.enter_context(loop.autopsy())
        if watchdog is not None:
            watchdog.beat(0, "data", allow=max(_TOKENISE_SECONDS, watchdog.timeout))
        with _batches(config, model.tokenizer, "train") as whole:
            kept = loop.prepare(whole.peek(), restored=resume)
        # Which rows this process reads is known once the batch has been laid out.
        share = loop.share()
        batches = stack.enter_context(_batches(config, model.tokenizer, "train", share))
        if kept is not None:
            batches.restore(kept["data"])
        if out is not None and resume:
            # Only now: state and data of another config are refused above, and the folder is still the old run's.
            _write_config(out, config)
        if out is not None and process_index() == 0:
            begin_life(out, loop, preset.model.parameters)
        log = stack.enter_context(
            MetricsLog(
                out if process_index() == 0 else None,
                loop.step,
                tensorboard=config.log.tensorboard,
                every=config.log.every,
                tell=tell,
            )
        )
        evaluation = None
        if config.data.held_out_share or isinstance(config.data.held_out, str):
            evaluation = lambda: _batches(config, model.tokenizer, "eval", share)  # noqa: E731
            if watchdog is not None:
                watchdog.beat(loop.step, "data", allow=max(_TOKENISE_SECONDS, watchdog.timeout))
            with evaluation():  # so that data that cannot be read is refused now, and tokenised before the first step
                pass
        if claim is not None:
            claim.begun = True
        result = loop.run(
            batches,
            until=settings.steps,
            log=log,
            evaluation=evaluation,
            preemption=preemption,
            on_step=on_step,
            share=share,
        )
        loop.trainable.publish(loop.params)
        if out is not None and config.lora.rank:
            model.to_hf(out / "merged", overwrite=True)
        if out is not None and process_index() == 0:
            peak = peak_bytes(loop.devices)
            end_life(out, step=result.step, peak_bytes=peak, host_peak_bytes=host_peak_bytes())
            teach_plan(loop, preset.name, result.history, peak)
            held_out = evaluation is not None
            end_life(out, **sample_entry(config, model, lambda: _batches(config, model.tokenizer, "eval"), held_out))
        report = None if goodput is None else goodput.report()
    return Trained(model, result, loop, report, out)


def _trainable(config: RunConfig, model: ModularCapibaraModel) -> ModelTrainable:
    settings = config.preset.train
    if settings.deterministic and jax.default_backend() == "gpu":
        # The kernels' gradients of attention, ours and cuDNN's, add up in an order that changes from run to run.
        model.config = dataclasses.replace(model.config, attention_implementation="xla")
    load = None
    if config.weights is not None:
        folder = config.weights

        def load(mesh: Any) -> Any:
            from capibara.models.weights import load_hf

            dtype = param_dtype(settings.precision)
            return load_hf(folder, mesh=None if mesh is None or mesh.size == 1 else mesh, dtype=dtype)[1]

    if config.lora.rank:
        return LoraTrainable(model, config.lora, settings.precision, settings.z_loss, load, settings.fp8)
    return ModelTrainable(model, settings.precision, settings.z_loss, load, settings.fp8)


def _check(config: RunConfig) -> None:
    settings, model = config.preset.train, config.preset.model
    if config.log.elsewhere:
        place(config.log.elsewhere)  # the report is written last, and a run is not to end in a slice misspelt
    if settings.sequence_length > model.max_length:
        raise rule_error(
            f"train.sequence_length is at most the model's context, model.max_length = {model.max_length}",
            settings.sequence_length,
            f"use {model.max_length}, or raise model.max_length",
        )
    tokens = config.data.format == "tokens" or config.data.path.endswith((".bin", ".npy"))
    words = 0 if tokens else load_tokenizer(config.data.tokenizer).vocab_size  # ids in files are checked as they come
    if words > model.vocab:
        raise rule_error(
            f"model.vocab has room for the tokenizer's {words} tokens", model.vocab, f"use model.vocab={words}"
        )


def _local(folder: str | Path) -> Path:
    if re.match(r"[a-z][a-z0-9+.-]+:/", str(folder)):
        raise rule_error(
            "A run's folder is a folder of this machine, where its metrics are written line by line",
            folder,
            "mount the bucket, as `capibara launch --bucket` does, and name the folder there",
        )
    return Path(folder)


class _Claim:
    """A folder is this run's from here on, by its config.toml; and nobody's where the run never began."""

    def __init__(self, out: Path, config: RunConfig, resume: bool) -> None:
        self.out, self.config, self.resume = out, config, resume
        self.begun = False
        self._wrote = False

    def __enter__(self) -> _Claim:
        file = self.out / "config.toml"
        if process_index() == 0 and self.resume:
            # A process that is killed writes nothing at its end. The others have not gone on in their recordings yet.
            _keep_crash(self.out)
        # Process 0 looks before it writes; the others' own look might come after that.
        there = gather("run/claim", file.exists() if process_index() == 0 else False)[0]
        if there and not self.resume:
            raise rule_error(
                "A run has a folder of its own",
                f"{self.out}, which has one",
                "go on with it by --resume, or name another folder by --out",
            )
        if self.resume and not there and (self.out / "checkpoints").exists():
            raise rule_error("A run's folder has its config.toml", f"{self.out} without", "name the folder of a run")
        if not there:
            _write_config(self.out, self.config)
            self._wrote = process_index() == 0
        return self

    def __exit__(self, *error: object) -> None:
        if self._wrote and not self.begun:
            (self.out / "config.toml").unlink(missing_ok=True)


def _crashed(
    out: Path, kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
) -> None:
    """Leave one file that tells of the end, unless it was in order."""
    if error is not None and not isinstance(error, Preempted):
        _keep_crash(out)


def _keep_crash(out: Path) -> None:
    try:
        keep_crash(out / "recordings")
    except Exception:  # a full disk, or files that are none: they lie there, and the run's own error counts
        logger.exception("the story of the crash could not be written; the recordings are in %s", out / "recordings")


def _write_config(out: Path, config: RunConfig) -> None:
    if process_index() == 0:
        out.mkdir(parents=True, exist_ok=True)
        draft = out / "config.draft"
        draft.write_text(toml_tables.to_toml(config.as_tables()), encoding="utf-8")
        draft.replace(out / "config.toml")


def _batches(config: RunConfig, tokenizer: Tokenizer, split: str, share: tuple[int, int] = (0, 1)) -> RowBatches:
    settings = config.preset.train
    return open_batches(
        config.data,
        tokenizer=tokenizer,
        batch_size=settings.batch_size,
        sequence_length=settings.sequence_length,
        seed=settings.seed,
        split=split,
        process_index=share[0],
        process_count=share[1],
    )


def _watchdog(out: Path, config: RunConfig, recorder: Recorder) -> Watchdog:
    return Watchdog(out / "heartbeats", config.log.hang_seconds, process_index(), process_count(), recorder=recorder)
