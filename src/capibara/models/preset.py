"""Presets: a model, and how it is trained, in one TOML file that `plan`, `train`, `generate` and `serve` read.

Sections: `[model]` and its blocks, `[tpu]`, `[train]`, `[optimizer]`, `[mesh]`, and those that their own rooms check:
`[data]`, `[checkpoint]`, `[log]`, `[lora]`, `[scaling]`. How a file is found, and what is laid over it, is in
`preset_files`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from capibara import toml_tables
from capibara.errors import rule_error, unknown_name
from capibara.models.config import ModularModelConfig, model_of
from capibara.models.preset_files import FOLDER, load_table, name_of, preset_names
from capibara.precision import Fp8Settings
from capibara.toml_tables import Table

__all__ = [
    "FOLDER",
    "MeshSettings",
    "OptimizerSettings",
    "Preset",
    "TrainSettings",
    "load_preset",
    "load_table",
    "preset_names",
    "preset_of",
]

PRECISIONS = ("mixed", "bfloat16", "float32", "fp8")
REMAT = ("auto", "none", "dots", "full")
SCHEDULES = ("cosine", "linear", "constant", "wsd")


@dataclass(frozen=True)
class TrainSettings:
    """One run of training."""

    steps: int = 1000
    batch_size: int = 8
    """Sequences of one step, over all chips."""
    sequence_length: int = 2048
    seed: int = 0
    precision: str = "mixed"
    """ "mixed": products in bfloat16 on float32 weights. "bfloat16": weights and moments too, rounded by chance so
    that small changes add up. "float32". "fp8": as "mixed", with the products of attention and of the mlp in fp8."""
    fp8: Fp8Settings = field(default_factory=Fp8Settings)
    """How the operands of those are scaled."""
    accumulate: int = 0
    """Microbatches of a step, one after another; 0 lets the planner choose."""
    remat: str = "auto"
    """What the backward pass computes again: "auto" lets the planner choose."""
    communication: str = "automatic"
    """How gradients are summed over the data axis: where the compiler puts the sums, or by hand in buckets, on a mesh
    of that axis alone: "overlapped", "sequential", or "compressed" to int8 with what was rounded off sent later."""
    unroll: int = 0
    """Repeats of the pattern written out in the loop's body: 0 chooses by platform, -1 writes all of them out."""
    z_loss: float = 0.0
    checkpoint_every: int = 1000
    eval_every: int = 0
    """Steps between evaluations on the held-out part; 0 evaluates at the end alone."""
    eval_batches: int = 16
    skip_nonfinite: int = 10
    """Steps in a row whose loss or gradient is not finite that are skipped before training stops."""
    deterministic: bool = False
    """The same bits run to run on a GPU too, at some cost."""

    def __post_init__(self) -> None:
        for name, least in {
            "steps": 1, "batch_size": 1, "sequence_length": 1, "seed": 0, "accumulate": 0, "checkpoint_every": 0,
            "eval_every": 0, "eval_batches": 1, "skip_nonfinite": 0, "unroll": -1,
        }.items():  # fmt: skip
            if getattr(self, name) < least:
                raise rule_error(f"train.{name} is {least} or more", getattr(self, name), f"use {name} = {least}")
        if self.precision not in PRECISIONS:
            raise unknown_name("train.precision", self.precision, PRECISIONS)
        if self.precision != "fp8" and self.fp8 != Fp8Settings():
            raise rule_error(
                'train.fp8 is for precision = "fp8"', f'precision = "{self.precision}"', "leave one of them out"
            )
        if self.remat not in REMAT:
            raise unknown_name("train.remat", self.remat, REMAT)
        from capibara.parallel.trainer_step import COMMUNICATION

        if self.communication not in COMMUNICATION:
            raise unknown_name("train.communication", self.communication, COMMUNICATION)
        if self.accumulate and self.batch_size % self.accumulate:
            raise rule_error(
                "train.accumulate divides train.batch_size",
                f"{self.accumulate} and {self.batch_size}",
                "use one of " + ", ".join(str(n) for n in range(1, self.batch_size + 1) if self.batch_size % n == 0),
            )

    @property
    def fp8_products(self) -> Fp8Settings | None:
        """How fp8 products are scaled; None where there are none."""
        return self.fp8 if self.precision == "fp8" else None

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.batch_size * self.sequence_length


@dataclass(frozen=True)
class OptimizerSettings:
    """What turns gradients into changes."""

    name: str = "adamw"
    learning_rate: float = 3e-4
    schedule: str = "cosine"
    """After the warm-up: down to `final` of the rate by a cosine, by a line, not at all, or by a line over the last
    fifth ("wsd")."""
    warmup_steps: int = 100
    final: float = 0.1
    weight_decay: float = 0.1
    b1: float = 0.9
    """Of "adamw", "lion" and "muon", and the momentum of "sgd"."""
    b2: float = 0.95
    """Of "adamw", "lion" and "muon"."""
    eps: float = 1e-8
    """Of "adamw" and "muon"."""
    clip: float = 1.0
    """The largest norm of all gradients together; 0 clips nothing."""

    def __post_init__(self) -> None:
        from capibara.parallel.optimizers import check_decays

        check_decays(self.name, b1=self.b1, b2=self.b2, eps=self.eps)
        if self.schedule not in SCHEDULES:
            raise unknown_name("optimizer.schedule", self.schedule, SCHEDULES)
        for name in ("learning_rate", "eps"):
            if not getattr(self, name) > 0:
                raise rule_error(f"optimizer.{name} is above 0", getattr(self, name), f"use {name} = 3e-4")
        for name in ("warmup_steps", "weight_decay", "clip", "final"):
            if getattr(self, name) < 0:
                raise rule_error(f"optimizer.{name} is 0 or more", getattr(self, name), f"use {name} = 0")
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise rule_error(f"optimizer.{name} is from 0 to below 1", getattr(self, name), f"use {name} = 0.9")


@dataclass(frozen=True)
class MeshSettings:
    """Sizes of the mesh's axes. With all at 0 the planner chooses them for the devices that are there."""

    data: int = 0
    model: int = 0
    pipeline: int = 0
    expert: int = 0
    sequence: int = 0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) < 0:
                raise rule_error(f"mesh.{name} is 0 or more", getattr(self, name), f"use mesh.{name} = 1")

    @property
    def axes(self) -> dict[str, int] | None:
        """The axes that were named, of one where they are 0; None where none was."""
        sizes = {name: getattr(self, name) for name in self.__dataclass_fields__}
        if not any(sizes.values()):
            return None
        return {name: size for name, size in sizes.items() if size} | {
            name: 1 for name in ("data", "model") if not sizes[name]
        }


@dataclass(frozen=True)
class Preset:
    """A whole file."""

    model: ModularModelConfig
    train: TrainSettings = field(default_factory=TrainSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    mesh: MeshSettings = field(default_factory=MeshSettings)
    table: Table = field(default_factory=lambda: Table({}), repr=False, compare=False)
    """All sections as they were read, for the rooms that check theirs."""
    name: str = ""


def load_preset(
    name_or_path: str | Path, overrides: Iterable[str] = (), environment: Mapping[str, str] | None = None
) -> Preset:
    """A shipped preset by its name, or a TOML file by its path, with overrides ("train.batch_size=16").

    Examples:
        >>> load_preset("llama-7b").model.parameters
        6738415616
        >>> load_preset("llama-7b", ["train.batch_size=16"]).train.tokens
        32768
    """
    return preset_of(load_table(name_or_path, overrides, environment), name_of(name_or_path))


def preset_of(table: Table, name: str = "") -> Preset:
    """The preset that a table describes."""
    model = model_of(table, name)
    return Preset(
        model,
        toml_tables.build(TrainSettings, table, "train"),
        toml_tables.build(OptimizerSettings, table, "optimizer"),
        toml_tables.build(MeshSettings, table, "mesh"),
        table,
        model.name,
    )
