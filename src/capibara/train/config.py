"""`RunConfig`: everything a training run is told, from a preset, a TOML file or a Hugging Face folder."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from capibara import toml_tables
from capibara.errors import rule_error
from capibara.models.config import ModularModelConfig
from capibara.models.preset import Preset, load_preset, preset_of
from capibara.models.preset_files import overridden
from capibara.toml_tables import Table
from capibara.train.data.config import DataConfig

__all__ = ["CheckpointSettings", "LogSettings", "LoraSettings", "RunConfig", "ScalingSettings", "load_run"]


@dataclass(frozen=True)
class CheckpointSettings:
    """What is kept of a run, and where beside its folder. How often is `train.checkpoint_every`."""

    keep: int = 2
    keep_every: int = 0
    """Steps that are multiples of it stay for ever; 0 keeps none for that."""
    emergency_every: int = 0
    """Steps between copies on this machine; 0 makes none."""
    emergency_folder: str = ""
    """Local to each machine: /dev/shm, a local disk."""

    def __post_init__(self) -> None:
        if bool(self.emergency_every) != bool(self.emergency_folder):
            raise rule_error(
                "checkpoint.emergency_every and checkpoint.emergency_folder come together",
                f"{self.emergency_every} and {self.emergency_folder!r}",
                "set both or neither",
            )
        if self.keep < 1:
            raise rule_error("checkpoint.keep is 1 or more", self.keep, "use keep = 2")


@dataclass(frozen=True)
class LogSettings:
    """What a run tells."""

    every: int = 10
    """Steps between lines on the terminal; metrics.jsonl has every step."""
    tensorboard: bool = False
    hang_seconds: float = 600.0
    """No progress for so long: every process's stacks are written down and it is ended; 0 never."""
    sensor_seconds: float = 1.0
    """Seconds between samples of the machine's sensors, the last 600 of which the flight recorder keeps; 0 takes
    none."""
    elsewhere: str = "v4-32"
    """The slice that the report at the end plans the run's tokens for and prices them on; "" plans nothing."""

    def __post_init__(self) -> None:
        if self.sensor_seconds != 0 and not 0.01 <= self.sensor_seconds < math.inf:
            raise rule_error("log.sensor_seconds is 0.01 or more, or 0 for none", self.sensor_seconds, "use 1")


@dataclass(frozen=True)
class ScalingSettings:
    """When work is divided anew."""

    load_threshold: float = 1.5
    """At a checkpoint, where the busiest device of the experts' axis has done so many times its even part since the
    last one, experts are placed anew."""

    def __post_init__(self) -> None:
        if self.load_threshold < 1:
            raise rule_error("scaling.load_threshold is 1 or more times an even part", self.load_threshold, "use 1.5")


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank changes of the products in place of the weights themselves."""

    rank: int = 0
    """0 trains the weights."""
    alpha: float = 16.0
    """The change is alpha / rank times the product of the two factors."""
    targets: tuple[str, ...] = ("query", "key", "value", "out", "gate", "up", "down")
    """Names of the weights that get one."""


@dataclass(frozen=True)
class RunConfig:
    """A preset with the sections that training alone reads."""

    preset: Preset
    data: DataConfig
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    log: LogSettings = field(default_factory=LogSettings)
    lora: LoraSettings = field(default_factory=LoraSettings)
    scaling: ScalingSettings = field(default_factory=ScalingSettings)
    weights: Path | None = None
    """A Hugging Face folder whose weights training starts from."""

    def as_tables(self) -> dict[str, Any]:
        """All sections in plain values, as they are written into the run's folder."""
        preset = self.preset
        return {
            **preset.model.as_tables(),
            "train": toml_tables.plain(preset.train),
            "optimizer": toml_tables.plain(preset.optimizer),
            "mesh": toml_tables.plain(preset.mesh),
            "data": toml_tables.plain(self.data),
            "checkpoint": toml_tables.plain(self.checkpoint),
            "log": toml_tables.plain(self.log),
            "lora": toml_tables.plain(self.lora),
            "scaling": toml_tables.plain(self.scaling),
        }


def load_run(
    config: str | Path, overrides: Iterable[str] = (), environment: Mapping[str, str] | None = None
) -> RunConfig:
    """The run of a preset's name, a TOML file, or a Hugging Face model folder, with overrides on top.

    >>> load_run("dev", ["train.steps=3"]).preset.train.steps
    3
    """
    folder = Path(config)
    if (folder / "config.json").is_file():
        table = overridden(Table(_of_hf(folder).as_tables()), overrides, environment)
        preset, weights = preset_of(table, folder.name), folder
    else:
        preset, weights = load_preset(config, overrides, environment), None
        table = preset.table
    if "path" not in table.values.get("data", {}):
        raise rule_error(
            "Training needs data", f"no data.path in {config}", "add [data] path = ..., or --set data.path=FILE"
        )
    preset = _with_one_tokenizer(preset, table)
    keys = {**table.values["data"], "tokenizer": preset.model.tokenizer}
    data = toml_tables.build(DataConfig, toml_tables.Table({"data": keys}, table.places), "data")
    return RunConfig(
        preset,
        data,
        toml_tables.build(CheckpointSettings, table, "checkpoint"),
        toml_tables.build(LogSettings, table, "log"),
        toml_tables.build(LoraSettings, table, "lora"),
        toml_tables.build(ScalingSettings, table, "scaling"),
        weights,
    )


def _with_one_tokenizer(preset: Preset, table: Table) -> Preset:
    """The data's tokenizer is the model's: what it is trained on by one it could not write by another."""
    asked, own = (table.values.get(section, {}).get("tokenizer") for section in ("data", "model"))
    if asked is None or asked == own:
        return preset
    if own is not None:
        raise rule_error(
            "A model and its data have one tokenizer",
            f"model.tokenizer = {own!r}, data.tokenizer = {asked!r}",
            "set model.tokenizer alone",
        )
    return replace(preset, model=replace(preset.model, tokenizer=asked))


def _of_hf(folder: Path) -> ModularModelConfig:
    from capibara.models.weights import config_from_hf, read_config

    model = config_from_hf(read_config(folder))
    has_tokenizer = (folder / "tokenizer.json").is_file()
    return replace(model, tokenizer=str(folder.absolute())) if has_tokenizer else model
