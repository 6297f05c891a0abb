"""`optimize_sharding_strategy`: where each parameter of a model goes on a mesh that is given, and why."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, SupportsIndex

import jax
from jax.sharding import PartitionSpec

from capibara.errors import rule_error
from capibara.hardware.chips import chip
from capibara.hardware.facts import GiB
from capibara.hardware.topology import Slice, slice_for
from capibara.mesh.mesh import DEFAULT_LIMIT_GB, MeshConfig, create_tpu_mesh_config, is_positive
from capibara.parallel.job import Job, item_bytes
from capibara.plan.search.plans import Ranked, bytes_in_words
from capibara.plan.search.search import search
from capibara.plan.sharding.by_parameters import ProductsModel, parameter_job, shaped

__all__ = ["ShardingStrategy", "optimize_sharding_strategy"]

# What a mesh is meant for -> what to plan for, where the caller does not say.
_TARGETS = {"inference": "latency", "training": "throughput", "balanced": "throughput"}


@dataclass(frozen=True)
class ShardingStrategy:
    """Where each parameter and the input go on a mesh, what that costs, and why. Costs are predicted."""

    specs: Any
    """Like the parameters, a PartitionSpec for each."""
    input_spec: PartitionSpec
    bytes_per_chip: float
    """Parameters, and for training gradients, optimizer state and activations."""
    step_seconds: float
    why: Mapping[str, str]
    """Parameter's path -> why it lies so."""
    mesh: MeshConfig
    target: str
    name: str
    """The layout in words."""
    choices: Mapping[str, Any]
    """What the step has to do for it ("remat", "accumulate"), where a loss was given."""
    notes: tuple[str, ...] = ()
    moment_specs: Any = None
    """Like the parameters: where what the optimizer keeps for each lies; None where it keeps nothing."""

    def explain(self) -> str:
        """All of it, a line a parameter."""
        lines = [
            f"{self.name}, for {self.target}",
            f"predicted: {self.bytes_per_chip / GiB:.2f} GiB a chip, {self.step_seconds * 1e3:.3g} ms a step",
            f"input: {self.input_spec}",
            *(f"{path}: {words}" for path, words in self.why.items()),
            *self.notes,
        ]
        return "\n".join(lines)


def optimize_sharding_strategy(
    model_params: Any,
    input_shape: Sequence[int],
    mesh_shape: Sequence[int] | MeshConfig,
    memory_limit_gb: float | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    optimizer: Any = "adamw",
    *,
    batch: Any = None,
    optimization_target: str | None = None,
    chip: str = "v4",
) -> ShardingStrategy:
    """The best layout of a model on a mesh of this shape, that fits; an error names the nearest change otherwise.

    `model_params` is any pytree of arrays or shapes; `input_shape` has the batch first. `mesh_shape` is (4, 8), with
    axes data, model, expert as far as they go, or a mesh config. `memory_limit_gb` is in GiB a chip and counts where
    it is less than what the chip has; so does a mesh config's own, where it is not the default.
    `optimization_target` is "throughput", "latency" or "memory"; with none it is latency on a mesh config that is meant
    for inference and throughput on any other.

    With `loss(params, batch)` the whole training step is planned (`capibara.plan.search`): `batch` has its shapes,
    int32 tokens of `input_shape` by default. Without, it goes by the parameters alone (`by_parameters` says how).
    `optimizer` as for `training_job`; None plans a forward pass, which needs no loss.

    Examples:
        >>> import jax
        >>> up, down = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((512, 2048), (2048, 512)))
        >>> plan = optimize_sharding_strategy({"up": up, "down": down}, (32, 128, 512), (4, 8))
        >>> tuple(plan.specs["down"])[0], tuple(plan.input_spec)
        ('model', ('data',))
    """
    shape = _input_shape(input_shape)
    mesh = mesh_shape if isinstance(mesh_shape, MeshConfig) else create_tpu_mesh_config(mesh_shape)
    limit = _limit(memory_limit_gb)
    if mesh.memory_limit_gb != DEFAULT_LIMIT_GB:
        limit = min(limit or math.inf, mesh.memory_limit_gb * GiB)
    target = _TARGETS[mesh.target] if optimization_target is None else optimization_target
    model_params = shaped(model_params)
    where, notes = _where(chip, mesh.size)
    model: Callable[[Job, Any], Any] | None = None
    if loss is None:
        if batch is not None:
            raise rule_error("batch is what a loss takes", "batch and no loss", "pass loss, or leave batch out")
        job: Job = parameter_job(model_params, shape, _moments(optimizer), optimizer is not None)
        usable = float(where.chip.capacity_bytes)

        def model(job: Any, slice: Any) -> Any:
            return ProductsModel(job, slice, usable if limit is None else min(usable, limit))
    else:
        if optimizer is None:
            raise rule_error(
                "A loss is planned as a training step", "a loss and optimizer=None", 'use "adamw" or "sgd"'
            )
        from capibara.parallel.training_step import training_job

        data = jax.ShapeDtypeStruct(shape, "int32") if batch is None else batch
        try:
            job = training_job(loss, model_params, data, optimizer=optimizer)
        except Exception as error:
            if batch is None:
                error.add_note(
                    f"The loss was given int32 tokens of input_shape {shape}; pass batch= where it takes others."
                )
            raise
    best = search(job, where, target=target, memory_limit=limit, mesh=mesh, top=1, offload=False, model=model).require()
    state = None if loss is None else job.build()[1][1]
    return _strategy(model_params, best, mesh, target, (*job.notes, *notes), state)


def _strategy(
    params: Any, best: Ranked, mesh: MeshConfig, target: str, notes: tuple[str, ...], state: Any
) -> ShardingStrategy:
    paths, tree = jax.tree_util.tree_flatten_with_path(params)
    specs = best.layout.specs[: len(paths)]
    why = {
        jax.tree_util.keystr(path): _why(leaf, spec, mesh.axes) for (path, leaf), spec in zip(paths, specs, strict=True)
    }
    return ShardingStrategy(
        specs=jax.tree.unflatten(tree, specs),
        input_spec=best.layout.specs[-1],
        bytes_per_chip=best.estimate.memory.total,
        step_seconds=best.estimate.seconds,
        why=MappingProxyType(why),
        mesh=mesh,
        target=target,
        name=best.layout.name,
        choices=MappingProxyType(dict(best.layout.choices)),
        notes=notes,
        moment_specs=_moment_specs(params, state, best.layout.specs),
    )


def _moment_specs(params: Any, state: Any, specs: Sequence[PartitionSpec]) -> Any:
    """Of each parameter's moments; `state` is None for a job of parameters alone, whose moments follow in order."""
    paths, tree = jax.tree_util.tree_flatten_with_path(params)
    count = len(paths)
    if state is None:
        # The last spec is the input's.
        return jax.tree.unflatten(tree, specs[count : 2 * count]) if count and len(specs) > 2 * count else None
    kept = list(zip(jax.tree_util.tree_leaves_with_path(state), specs[count:], strict=False))

    def found(path: Any, leaf: Any) -> PartitionSpec | None:
        own = [
            (len(where), spec)
            for (where, one), spec in kept
            if where[len(where) - len(path) :] == path and one.shape == leaf.shape
        ]
        # The shortest: a parameter "w" has its moments at mean/w, and mean/a/w belongs to another.
        return min(own, key=lambda one: one[0])[1] if own else None

    moments = [found(path, leaf) for path, leaf in paths]
    if all(one is None for one in moments):
        return None
    return jax.tree.unflatten(tree, [PartitionSpec() if one is None else one for one in moments])


def _why(leaf: Any, spec: PartitionSpec, axes: Mapping[str, int]) -> str:
    reasons, parts = [], 1
    whole = math.prod(leaf.shape) * item_bytes(leaf.dtype)
    last = len(leaf.shape) - 1
    for position, entry in enumerate(spec):
        for name in (entry,) if isinstance(entry, str) else entry or ():
            parts *= axes[name]
            if name == "model":
                how = "columns" if position == last else "rows" if position == last - 1 else f"dimension {position}"
                reasons.append(f"cut by {how} over model {axes[name]}, so that each chip does a part of the product")
            elif name == "expert":
                reasons.append(f"dimension {position} over expert {axes[name]}")
            else:
                reasons.append(f"dimension {position} kept in {axes[name]} parts on {name} and gathered when used")
    if not reasons:
        divides = any(size > 1 and n % size == 0 for n in leaf.shape for size in axes.values())
        reason = (
            "a vector is not worth a message"
            if len(leaf.shape) < 2
            else "cutting it here wins nothing"
            if divides or math.prod(axes.values()) == 1
            else "no dimension of it divides over an axis of the mesh"
        )
        return f"whole on every chip ({bytes_in_words(whole)}): {reason}"
    return f"{'; '.join(reasons)} ({bytes_in_words(whole / parts)} a chip)"


def _input_shape(shape: Any) -> tuple[int, ...]:
    given = tuple(shape) if isinstance(shape, Sequence) and not isinstance(shape, str) else ()
    if not given or any(
        isinstance(n, bool) or not isinstance(n, SupportsIndex) or operator.index(n) < 1 for n in given
    ):
        raise rule_error("input_shape is whole numbers from 1 up, the batch first", repr(shape), "use (32, 512, 768)")
    return tuple(map(operator.index, given))


def _limit(gigabytes: float | None) -> float | None:
    if gigabytes is None:
        return None
    if not is_positive(gigabytes):
        raise rule_error("memory_limit_gb is a positive number of GiB a chip", repr(gigabytes), "use 32.0")
    return float(gigabytes) * GiB


def _where(name: str, chips: int) -> tuple[Slice, tuple[str, ...]]:
    """The slice of so many chips, or a line of them where there is no such slice."""
    found = chip(name)
    try:
        return slice_for(found, chips), ()
    except ValueError:
        line = Slice(f"{chips} x {found.name}", found, (chips,) if found.platform != "tpu" else (chips, 1, 1))
        note = () if found.platform != "tpu" else (f"no {found.name} slice has {chips} chips: a line of them is meant",)
        return line, note


def _moments(optimizer: Any) -> int:
    """How many arrays an optimizer keeps for each parameter: asked of the optimizer itself, on one parameter."""
    if optimizer is None:
        return 0
    from capibara.parallel.optimizers import optimizer_named

    init, _ = optimizer_named(optimizer, True)
    probe = jax.ShapeDtypeStruct((3, 5), "float32")
    return sum(leaf.shape == probe.shape for leaf in jax.tree.leaves(jax.eval_shape(init, probe)))
