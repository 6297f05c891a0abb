"""TARGET: what to plan, named on a command line.

A preset (its name or a TOML file), a Hugging Face config.json or folder, or `file.py:function`.

A recipe holds what was named, as plain values, so that another process can build the same job again.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capibara import user_file
from capibara.errors import CapibaraError, rule_error, unknown_name, unsaid
from capibara.models.preset import OptimizerSettings, Preset, TrainSettings, load_preset, preset_names
from capibara.models.weights.folder import is_hf, read_config

if TYPE_CHECKING:
    from capibara.parallel.job import Job

__all__ = ["Recipe", "TargetError", "load_job", "preset_job"]

# Of a Hugging Face model, whose config.json says nothing of its training.
_HF_BATCH, _HF_LENGTH = 8, 2048
_SHAPES_KEYS = ("args", "roles", "donate", "tokens")


class TargetError(CapibaraError, ValueError):
    """A target that cannot be loaded or traced; its own error is in the text and behind it."""


@dataclass(frozen=True)
class Recipe:
    """What was asked to be planned."""

    target: str
    train: bool = False
    """The function is `loss(params, batch)`, and the step is built around it."""
    shapes: str = "shapes"
    """The function of the same file that returns the arguments."""
    optimizer: str | None = None
    batch: int | None = None
    sequence: int | None = None
    remat: str | None = None
    accumulate: int | None = None

    @property
    def is_preset(self) -> bool:
        return ":" not in self.target and not self.target.endswith(".py")

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def load_job(recipe: Recipe) -> Job:
    """The job that a recipe describes.

    Examples:
        >>> load_job(Recipe("llama-1b")).tokens
        16384
    """
    return _preset_job(recipe) if recipe.is_preset else _file_job(recipe)


def _knobs(recipe: Recipe) -> dict[str, tuple[Any, ...]]:
    chosen = {"remat": recipe.remat, "accumulate": recipe.accumulate}
    return {name: (value,) for name, value in chosen.items() if value is not None}


def _preset_job(recipe: Recipe) -> Job:
    if recipe.target not in preset_names() and is_hf(recipe.target):
        return preset_job(_hf_preset(recipe), knobs=_knobs(recipe))
    asked = {
        "train.batch_size": recipe.batch,
        "train.sequence_length": recipe.sequence,
        "optimizer.name": recipe.optimizer,
    }
    preset = load_preset(recipe.target, [f"{key}={value}" for key, value in asked.items() if value is not None])
    return preset_job(preset, knobs=_knobs(recipe))


def _hf_preset(recipe: Recipe) -> Preset:
    """The model of a config.json, to be trained with the rows and the length that were asked for."""
    from capibara.models.weights.hf_config import config_from_hf

    model = config_from_hf(read_config(recipe.target))
    length = recipe.sequence or min(_HF_LENGTH, model.max_length)
    if length > model.max_length:
        raise rule_error(
            f"The model was made for {model.max_length} tokens",
            f"--sequence {length}",
            f"use {model.max_length} or less",
        )
    place = Path(recipe.target).resolve()
    return Preset(
        model,
        TrainSettings(batch_size=recipe.batch or _HF_BATCH, sequence_length=length),
        OptimizerSettings(name=recipe.optimizer or OptimizerSettings.name),
        name=place.name if place.is_dir() else place.parent.name or place.stem,
    )


def preset_job(preset: Preset, knobs: Mapping[str, tuple[Any, ...]] | None = None) -> Job:
    """The job of training a preset."""
    import jax.numpy as jnp

    from capibara.models import decoder
    from capibara.parallel.optimizers import planned_optimizer
    from capibara.parallel.training_step import training_job

    train = preset.train
    narrow = train.precision == "bfloat16"
    chosen = {"remat": train.remat, "accumulate": train.accumulate}
    named = {name: (value,) for name, value in chosen.items() if value not in ("auto", 0)}
    with unsaid():  # it is looked at here for its shapes alone, and not for the chip that it is planned on
        return training_job(
            decoder.make_loss(
                preset.model,
                z_loss=train.z_loss,
                dtype=jnp.float32 if train.precision == "float32" else jnp.bfloat16,
                fp8=train.fp8_products,
            ),
            decoder.param_shapes(preset.model, jnp.bfloat16 if narrow else jnp.float32),
            decoder.batch_shapes(train.batch_size, train.sequence_length),
            optimizer=planned_optimizer(preset.optimizer.name, preset.optimizer.b1),
            tokens=train.tokens,
            mixed=not narrow,
            knobs={**named, **(knobs or {})},
            name=preset.name,
        )


def _file_job(recipe: Recipe) -> Job:
    file, _, name = recipe.target.partition(":")
    if not name:
        raise rule_error(
            "A program to plan is written file.py:function", repr(recipe.target), f"use {file}:NAME_OF_THE_FUNCTION"
        )
    module = user_file.load(Path(file), "plan_target", TargetError)
    fn = _function(module, name, file)
    given = _arguments(_function(module, recipe.shapes, file), recipe)
    args = tuple(given["args"])
    # Traced here, where the program's own mistake can be shown as such.
    _traces(fn, args, recipe)
    if recipe.train:
        return _training(fn, args, given, recipe)
    for key in ("optimizer", "remat", "accumulate"):
        if getattr(recipe, key) is not None:
            raise rule_error(f"--{key} turns a training step", "a plain function", "add --train, or leave it out")
    from capibara.parallel.job import program_job

    return program_job(
        fn,
        args,
        roles=given.get("roles"),
        donate=tuple(given.get("donate", ())),
        tokens=given.get("tokens"),
        name=name,
    )


def _training(fn: Callable[..., Any], args: tuple[Any, ...], given: dict[str, Any], recipe: Recipe) -> Job:
    from capibara.parallel.training_step import training_job

    if len(args) != 2:
        raise rule_error(
            "With --train the function is loss(params, batch)",
            f"{recipe.shapes}() of {recipe.target} gives {len(args)} arguments",
            "return (params, batch)",
        )
    for key in ("roles", "donate"):
        if key in given:
            raise rule_error(f"With --train the step sets {key} itself", f"{key} = {given[key]!r}", "leave it out")
    return training_job(
        fn,
        *args,
        optimizer=recipe.optimizer or "adamw",
        tokens=given.get("tokens"),
        knobs=_knobs(recipe),
        name=recipe.target.partition(":")[2],
    )


def _function(module: Any, name: str, file: str) -> Callable[..., Any]:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        own = [
            one
            for one, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not one.startswith("_")
        ]
        raise unknown_name(f"function of {file}", name, own)
    return found


def _must_be_given(parameter: inspect.Parameter) -> bool:
    free = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not free


def _arguments(shapes: Callable[..., Any], recipe: Recipe) -> dict[str, Any]:
    asked = {key: getattr(recipe, key) for key in ("batch", "sequence") if getattr(recipe, key) is not None}
    takes = inspect.signature(shapes).parameters
    for key in asked:
        if key not in takes:
            raise rule_error(
                f"--{key} is passed to {recipe.shapes}({key}=...)",
                f"a function of ({', '.join(takes)})",
                f"give it a parameter {key}, or leave --{key} out",
            )
    missing = [name for name, one in takes.items() if name not in asked and _must_be_given(one)]
    if missing:
        fix = " ".join(f"--{name} N" for name in missing if name in ("batch", "sequence"))
        raise rule_error(
            f"{recipe.shapes}() is called with --batch and --sequence, where they are given, and nothing else",
            f"{recipe.shapes}({', '.join(takes)}) without {', '.join(missing)}",
            f"give {fix}" if fix else "give its parameters defaults",
        )
    try:
        made = shapes(**asked)
    except Exception as error:
        raise TargetError(f"{recipe.shapes}() of {recipe.target} failed. {type(error).__name__}: {error}") from error
    if isinstance(made, dict) and "args" in made:
        for key in made:
            if key not in _SHAPES_KEYS:
                raise unknown_name(f"key of what {recipe.shapes}() returns", key, _SHAPES_KEYS)
    elif isinstance(made, tuple | list):
        made = {"args": tuple(made)}
    else:
        raise rule_error(
            f"{recipe.shapes}() returns the tuple of arguments, or a dict with {', '.join(_SHAPES_KEYS)}",
            type(made).__name__,
            "return (params, batch)",
        )
    return made


def _traces(fn: Callable[..., Any], args: tuple[Any, ...], recipe: Recipe) -> None:
    import inspect

    import jax

    try:
        jax.eval_shape(fn, *args)
    except Exception as error:
        odd = ", ".join(dict.fromkeys(type(one).__name__ for one in jax.tree.leaves(args) if not hasattr(one, "shape")))
        fix = f"\nThe arguments have {odd}: bind what is no array with functools.partial, and plan that." if odd else ""
        try:
            inspect.signature(fn).bind(*args)
        except (TypeError, ValueError):
            fix += (
                f"\nIt is called with what {recipe.shapes}() returns, {len(args)} argument{'s' * (len(args) != 1)}: "
                f"name the function that fits them, or another for the shapes with --shapes."
            )
        raise TargetError(f"{recipe.target} does not trace. {type(error).__name__}: {error}{fix}") from error
