"""The trainer's step: loss, gradients over microbatches and devices, the optimizer, and a guard against NaN.

`step(params, state, batch) -> (params, state, metrics)` is one compiled program. The state has the optimizer's, the
number of the step, from which every random number follows, and how many steps were skipped. `trainer_job` puts it into
the form that the planner lays out and `capibara.parallel.run` compiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from capibara.errors import rule_error, unknown_name
from capibara.kernels.pallas.prng import bits_by_place
from capibara.parallel.job import Job
from capibara.parallel.pipelines.program import pipelined, why_not_pipelined
from capibara.parallel.remat import POLICIES, checkpoint_scans
from capibara.parallel.training_step import microbatches_of

__all__ = [
    "COMMUNICATION",
    "EXPERT_SHARE",
    "FP8_HISTORY",
    "FROZEN",
    "UNSENT",
    "StepOptions",
    "WithHistory",
    "compute_dtype",
    "counted_targets",
    "initial_state",
    "param_dtype",
    "rounded_by_chance",
    "step_function",
    "trainer_job",
]

Loss = Callable[[Any, Any, Any], tuple[jax.Array, Mapping[str, jax.Array]]]
"""`loss(params, batch, key) -> (what is minimised, metrics)`: a mean over the tokens, or rows, that count."""

COMMUNICATION = ("automatic", "overlapped", "sequential", "compressed")
"""How gradients are summed over the data axis. "automatic": where the compiler puts the sums. The others sum them in
buckets after each device's own backward pass, for parameters that every device has whole: buckets beside each other,
one after another, or as int8 with what was rounded off sent the next time."""

FROZEN = "frozen"
"""The state's key of weights that are not trained: they pass through the step, and a loss gets (trained, frozen)."""

UNSENT = "unsent"
"""The state's key of what each device has not sent yet of its own gradients, where they are sent compressed."""

EXPERT_SHARE = "expert_share"
"""The metric [layers, experts] of how each layer's tokens went to its experts, and the state's key of its sum over the
steps since the experts were looked at last."""

FP8_HISTORY = "fp8_history"
"""The state's key of the largest magnitudes of the last steps, where fp8 products are scaled by them."""

_PARAM = {"mixed": jnp.float32, "float32": jnp.float32, "bfloat16": jnp.bfloat16, "fp8": jnp.float32}
_COMPUTE = {"mixed": jnp.bfloat16, "float32": jnp.float32, "bfloat16": jnp.bfloat16, "fp8": jnp.bfloat16}


class WithHistory(NamedTuple):
    """What a loss gets in its parameters' place where the state has a history. The gradient of that has this step's
    magnitudes, in [..., 0]."""

    params: Any
    history: Any


def param_dtype(precision: str) -> Any:
    """The type of weights."""
    return jnp.dtype(_PARAM[precision])


def compute_dtype(precision: str) -> Any:
    """The type of activations and of the operands of products."""
    return jnp.dtype(_COMPUTE[precision])


@dataclass(frozen=True)
class StepOptions:
    """What a step does beside its loss and its optimizer."""

    precision: str = "mixed"
    seed: int = 0
    communication: str = "automatic"
    rate: Callable[[Any], Any] | None = None
    """The learning rate by step, for the metrics."""
    guard: bool = True
    """Leave parameters and optimizer as they were where the loss or the gradient is not finite."""

    def __post_init__(self) -> None:
        if self.precision not in _PARAM:
            raise unknown_name("precision", self.precision, _PARAM)
        if self.communication not in COMMUNICATION:
            raise unknown_name("gradient communication", self.communication, COMMUNICATION)


def initial_state(
    optimizer: Any,
    params: Any,
    options: StepOptions,
    data_size: int = 1,
    frozen: Any = None,
    expert_share: Any = None,
    fp8_history: Any = None,
) -> dict[str, Any]:
    """What a step keeps beside the parameters, before the first one.

    `frozen` are weights that are not trained, `expert_share` is the shape of that metric where the loss has it, and
    `fp8_history` are the shapes of what its fp8 products are scaled by.
    """
    state = {
        "optimizer": _stored(optimizer.init(_wide(params, options)), options),
        "step": jnp.int32(0),
        "skipped": jnp.int32(0),
        "skipped_in_a_row": jnp.int32(0),
    }
    if options.communication == "compressed":
        state[UNSENT] = jax.tree.map(lambda p: jnp.zeros((data_size, *p.shape), jnp.float32), params)
    if expert_share is not None:
        state[EXPERT_SHARE] = jnp.zeros(expert_share.shape, jnp.float32)
    if fp8_history is not None:
        state[FP8_HISTORY] = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), fp8_history)
    return state if frozen is None else {**state, FROZEN: frozen}


def _wide(params: Any, options: StepOptions) -> Any:
    """Parameters as the optimizer computes with them: float32."""
    return params if options.precision != "bfloat16" else jax.tree.map(_float32, params)


def _float32(x: Any) -> Any:
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _stored(state: Any, options: StepOptions) -> Any:
    """The optimizer's state as it is kept: in bfloat16 its arrays too, rounded to the nearest."""
    if options.precision != "bfloat16":
        return state
    return jax.tree.map(lambda s: s.astype(jnp.bfloat16) if s.ndim and s.dtype == jnp.float32 else s, state)


def trainer_job(
    loss: Loss,
    params: Any,
    batch: Any,
    optimizer: Any,
    options: StepOptions,
    *,
    tokens: int | None = None,
    remat: tuple[str, ...] = POLICIES,
    accumulate: tuple[int, ...] = (1,),
    data_size: int = 1,
    frozen: Any = None,
    fp8_history: Any = None,
    name: str = "",
) -> Job:
    """The job of training from shapes: what the planner lays out and the trainer runs.

    `remat` and `accumulate` are the values to choose from. `data_size` is that of the mesh's data axis, where gradients
    are summed by hand. With `frozen`, shapes of weights that are not trained, the loss gets (trained, frozen) in the
    parameters' place; with `fp8_history`, shapes of what fp8 products are scaled by, it gets `WithHistory`.
    """
    rows = jax.tree.leaves(batch)[0].shape[0]
    for parts in accumulate:
        if rows % parts:
            divisors = ", ".join(str(n) for n in range(1, rows + 1) if rows % n == 0)
            raise rule_error(f"accumulate divides the batch's {rows} rows", parts, f"use one of {divisors}")
    # A loss that draws gets a key in training, so it is looked at with one.
    key = jax.eval_shape(lambda: jax.random.key(0))
    metrics = jax.eval_shape(loss, params if frozen is None else (params, frozen), batch, key)[1]
    share = metrics.get(EXPERT_SHARE)
    share = share if share is not None and len(share.shape) == 2 else None  # a user's own metric of that name
    state = jax.eval_shape(
        lambda p, f: initial_state(optimizer, p, options, data_size, f, expert_share=share, fp8_history=fp8_history),
        params,
        frozen,
    )

    def build(remat: str = "none", accumulate: int = 1) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        slim = checkpoint_scans(_positional(loss), remat)
        return step_function(slim, optimizer, options, accumulate), (params, state, batch)

    def staged(microbatches: int, remat: str = "none") -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if frozen is not None:
            raise rule_error("A pipeline trains all of its weights", "weights that are frozen", "use other mesh axes")
        if fp8_history is not None:
            raise rule_error(
                "A pipeline scales fp8 products by the tensors themselves", 'scaling = "delayed"', 'use "current"'
            )
        slim = checkpoint_scans(without_key, remat)
        sums = options.precision != "bfloat16"

        def run(p: Any, b: Any, key: Any) -> Any:
            # The pipeline cuts the loss and its metrics apart where rows meet.
            return pipelined(slim, microbatches=microbatches, float32_sums=sums)(p, b)

        return step_function(run, optimizer, options, 1), (params, state, batch)

    def without_key(p: Any, b: Any) -> Any:
        value, metrics = loss(p, b, None)
        return value, {"loss": value, **metrics}

    @functools.cache
    def why_no_stages() -> str:
        if frozen is None and _reads_key(loss, params, batch, key):
            # One key for all microbatches would be the same noise in each of them.
            return "a loss that draws at random (a router's jitter, dropout), where each microbatch passes alone"
        if fp8_history is not None:
            return 'fp8 products that are scaled by a history, which stages do not keep; use fp8.scaling = "current"'
        return why_not_pipelined(without_key, (params, batch), microbatches=accumulate)

    return Job(
        build=build,
        roles=("params", "state", "batch"),
        donate=(0, 1),
        tokens=tokens,
        knobs=MappingProxyType({"remat": remat, "accumulate": accumulate}),
        name=name,
        staged=staged,
        why_no_stages=why_no_stages,
        rows=rows,
        optimizer=type(optimizer).__name__,
    )


def _reads_key(loss: Loss, params: Any, batch: Any, key: Any) -> bool:
    traced = jax.make_jaxpr(lambda key, p, b: loss(p, b, key))(key, params, batch).jaxpr
    return any(traced.invars[0] is atom for equation in traced.eqns for atom in equation.invars)


def _positional(loss: Loss) -> Loss:
    def run(params: Any, batch: Any, key: Any) -> Any:
        value, metrics = loss(params, batch, key)
        return value, dict(metrics)

    return run


def step_function(loss: Loss, optimizer: Any, options: StepOptions, accumulate: int = 1) -> Callable[..., Any]:
    """`step(params, state, batch) -> (params, state, metrics)`."""

    def step(params: Any, state: dict[str, Any], batch: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        frozen = {FROZEN: state[FROZEN]} if FROZEN in state else {}
        own = loss
        if frozen:

            def own(params: Any, batch: Any, key: Any) -> Any:
                if isinstance(params, WithHistory):
                    return loss(WithHistory((params.params, frozen[FROZEN]), params.history), batch, key)
                return loss((params, frozen[FROZEN]), batch, key)

        gradients_of = _by_hand(own, options, accumulate) if options.communication != "automatic" else None
        key = jax.random.fold_in(jax.random.key(options.seed), state["step"])
        trained = WithHistory(params, state[FP8_HISTORY]) if FP8_HISTORY in state else params
        if gradients_of is None:
            value, metrics, gradients = _accumulated(own, accumulate, trained, batch, key)
            after: dict[str, Any] = {}
        else:
            value, metrics, gradients, after = gradients_of(trained, batch, key, state)
        if isinstance(gradients, WithHistory):
            after = {**after, FP8_HISTORY: jax.tree.map(_moved_on, state[FP8_HISTORY], gradients.history)}
            gradients = gradients.params
        new_params, new_state, norm = _update(optimizer, options, params, state, gradients, key)
        new_state = {**new_state, **after}
        finite = jnp.isfinite(value) & jnp.isfinite(norm)
        if options.guard:
            kept = {name: state[name] for name in new_state}
            new_params, new_state = jax.tree.map(
                lambda new, old: jnp.where(finite, new, old), (new_params, new_state), (params, kept)
            )
        bad = jnp.where(finite, 0, 1).astype(jnp.int32)
        new_state |= {
            "step": state["step"] + 1,
            "skipped": state["skipped"] + bad,
            "skipped_in_a_row": jnp.where(finite, 0, state["skipped_in_a_row"] + 1),
        }
        if EXPERT_SHARE in state:
            new_state[EXPERT_SHARE] = state[EXPERT_SHARE] + metrics[EXPERT_SHARE]
        metrics = {"loss": value, **metrics, "grad_norm": norm, "skipped_in_a_row": new_state["skipped_in_a_row"]}
        metrics = jax.tree.map(_everywhere, metrics)
        if options.rate is not None:
            # The optimizer counts the steps that it made, and its schedule waits for those that were skipped.
            made = state["step"] - (state["skipped"] if options.guard else 0)
            metrics["learning_rate"] = jnp.asarray(options.rate(made), jnp.float32)
        return new_params, {**new_state, **frozen}, metrics

    return step


def _moved_on(history: jax.Array, step: jax.Array) -> jax.Array:
    """A history with this step's magnitudes, [..., 0], before the others, and without the oldest."""
    return jnp.concatenate([step[..., :1], history[..., :-1]], axis=-1)


def _everywhere(metric: jax.Array) -> jax.Array:
    """Whole on every device, so that each process of a program can read it; the compiler would leave it cut."""
    if metric.ndim == 0 or jax.sharding.get_abstract_mesh().empty:
        return metric
    return jax.lax.with_sharding_constraint(metric, PartitionSpec())


def _update(
    optimizer: Any, options: StepOptions, params: Any, state: Mapping[str, Any], gradients: Any, key: jax.Array
) -> tuple[Any, dict[str, Any], jax.Array]:
    """(parameters, {"optimizer": its state}, the gradients' norm)."""
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(_float32(g))) for g in jax.tree.leaves(gradients)))
    if options.precision != "bfloat16":
        changes, after = optimizer.update(gradients, state["optimizer"], params)
        moved = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, changes)
        return moved, {"optimizer": after}, norm
    # All of it in float32, and back: parameters by chance, so that a change below half of a bfloat16 step still counts
    # on average; moments, which change by a tenth or a twentieth of themselves, to the nearest.
    wide = jax.tree.map(_float32, params)
    changes, after = optimizer.update(
        jax.tree.map(_float32, gradients), jax.tree.map(_float32, state["optimizer"]), wide
    )
    seed = jax.random.bits(key, (2,), jnp.uint32)
    leaves, tree = jax.tree.flatten(params)
    moved = [
        rounded_by_chance(w + u, p.dtype, seed + jnp.uint32(2 * number))
        for number, (p, w, u) in enumerate(zip(leaves, jax.tree.leaves(wide), jax.tree.leaves(changes), strict=True))
    ]
    return jax.tree.unflatten(tree, moved), {"optimizer": _stored(after, options)}, norm


def rounded_by_chance(x: jax.Array, dtype: Any, seed: jax.Array) -> jax.Array:
    """float32 as bfloat16, up or down by chance, so that it is right on average; other types are only converted.

    Which way is a function of the seed (two uint32) and the element's place alone, the same on any mesh.
    """
    if jnp.dtype(dtype) != jnp.bfloat16:
        return x.astype(dtype)
    if x.ndim == 0:
        return rounded_by_chance(x[None], dtype, seed)[0]
    noise = bits_by_place(seed, x.shape) >> 16
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    # Sixteen random bits are added below the sixteen that stay: they carry as often as what is cut off is large.
    moved = jax.lax.bitcast_convert_type((bits + noise) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), moved, x).astype(jnp.bfloat16)


def counted_targets(batch: Any) -> jax.Array:
    """How many targets of the batch count; its rows where it does not say."""
    if isinstance(batch, Mapping) and "targets" in batch and ("mask" in batch or "segment_ids" in batch):
        counts = jnp.ones(batch["targets"].shape, bool)
        for name in ("mask", "segment_ids"):
            if name in batch:
                counts &= batch[name] != 0
        return counts.sum().astype(jnp.float32)
    return jnp.float32(jax.tree.leaves(batch)[0].shape[0])


def _accumulated(loss: Loss, parts: int, params: Any, batch: Any, key: jax.Array) -> tuple[Any, Any, Any]:
    """(loss, metrics, gradients) over the microbatches, each weighted by the targets of it that count."""
    grad = jax.value_and_grad(loss, has_aux=True)
    if parts == 1:
        (value, metrics), gradients = grad(params, batch, key)
        return value, metrics, gradients
    split = jax.tree.map(lambda x: microbatches_of(x, parts), batch)

    def run(number: Any, part: Any) -> Any:
        weight = counted_targets(part)
        (value, metrics), gradients = grad(params, part, jax.random.fold_in(key, number))
        most = ()
        if isinstance(gradients, WithHistory):
            gradients, most = gradients
        return weight, jax.tree.map(lambda x: x.astype(jnp.float32) * weight, (value, metrics, gradients)), most

    first = jax.tree.map(lambda x: x[0], split)
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(run, jnp.int32(0), first))

    def add(total: Any, numbered: Any) -> tuple[Any, None]:
        (weight, sums, most), (more, parts, magnitudes) = total, run(*numbered)
        sums = jax.tree.map(jnp.add, sums, parts)
        return (weight + more, sums, jax.tree.map(jnp.maximum, most, magnitudes)), None

    (weight, sums, most), _ = jax.lax.scan(add, zero, (jnp.arange(parts), split))
    value, metrics, gradients = jax.tree.map(lambda x: x / jnp.maximum(weight, 1), sums)
    if isinstance(params, WithHistory):
        gradients = WithHistory(gradients, most)
    return value, metrics, jax.tree.map(lambda g, p: g.astype(p.dtype), gradients, params)


def _by_hand(loss: Loss, options: StepOptions, accumulate: int) -> Callable[..., Any]:
    """Gradients by each device's own backward pass, then summed over the data axis in buckets."""
    from capibara.kernels.ops.collective import bucketed_all_reduce, compressed_all_reduce

    def local(params: Any, batch: Any, key: jax.Array, unsent: Any) -> Any:
        weight = counted_targets(batch)
        key = jax.random.fold_in(key, jax.lax.axis_index("data"))
        value, metrics, gradients = _accumulated(loss, accumulate, params, batch, key)
        share = weight / jnp.maximum(jax.lax.psum(weight, "data"), 1)
        value, metrics = jax.tree.map(lambda x: jax.lax.psum(x * share, "data"), (value, metrics))
        history = None
        if isinstance(gradients, WithHistory):
            gradients, history = gradients
            history = jax.tree.map(lambda m: jax.lax.pmax(m, "data"), history)
        gradients = jax.tree.map(lambda g: (g.astype(jnp.float32) * share).astype(g.dtype), gradients)
        if options.communication == "compressed":
            gradients, unsent = compressed_all_reduce(gradients, "data", state=unsent)
        else:
            overlap = options.communication == "overlapped"
            gradients = bucketed_all_reduce(gradients, "data", overlap=overlap)
        if history is not None:
            gradients = WithHistory(gradients, history)
        return value, metrics, gradients, unsent

    def run(params: Any, batch: Any, key: jax.Array, state: Mapping[str, Any]) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.shape.get("data", 1) == 1:
            return *_accumulated(loss, accumulate, params, batch, key), {k: state[k] for k in (UNSENT,) if k in state}
        compressed = options.communication == "compressed"
        unsent = state[UNSENT] if compressed else ()
        spread = PartitionSpec("data")
        value, metrics, gradients, unsent = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(PartitionSpec(), spread, PartitionSpec(), spread),
            out_specs=(PartitionSpec(), PartitionSpec(), PartitionSpec(), spread),
            axis_names={"data"},
            check_vma=False,
        )(params, batch, key, unsent)
        return value, metrics, gradients, ({UNSENT: unsent} if compressed else {})

    return run
