"""A cost model for a model of which only the parameters are known: each matrix is one product with every token.

The rules, all from shapes. An array's last two dimensions are a matrix; dimensions before them count copies that are
used one after another. A vector costs nothing, and so does a stack of vectors: an array of two dimensions beside stacks
of matrices with as many copies. Dimensions of equal size are the same dimension, so a matrix that widens is followed by
the one that narrows again, and cutting the wide one is a cut by columns, then by rows. Square matrices come in turns:
the first gives a dimension of its own, the second takes it. A vocabulary is a dimension like any other.

Training is six operations a token and weight, inference two. What a product was given is kept for the backward pass, in
bfloat16. Nothing is known of attention, norms and what a compiler fuses: the search over a loss knows them.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from capibara.cost.links import Wiring, exchange, wire
from capibara.cost.result import Estimate, Memory
from capibara.hardware.products import fill
from capibara.mesh.layout import Layout
from capibara.parallel.job import Job, check_shaped, item_bytes
from capibara.program.anatomy import Anatomy, Leaf

__all__ = ["ParameterJob", "ProductsModel", "parameter_job", "shaped"]

_ACTIVATION_BYTES = 2
# Mesh axes along which chips hold copies of the same parameters, and tokens of their own.
_COPIES = ("data", "expert", "sequence")


@dataclass(frozen=True)
class ParameterJob(Job):
    """A job of which only the parameters and the input's shape are known; it has no function to trace."""

    params: Any = None
    input_shape: tuple[int, ...] = ()
    moments: int = 2
    """Arrays that the optimizer keeps for each parameter."""
    train: bool = True


def parameter_job(params: Any, input_shape: tuple[int, ...], moments: int, train: bool) -> ParameterJob:
    """The job of these parameters on inputs of this shape: batch first, features last where a matrix takes them."""
    params = shaped(params)

    def nothing() -> Any:
        raise NotImplementedError("a job of parameters alone has no program to build")

    smaller = {}
    if input_shape[0] % 2 == 0:
        half = (input_shape[0] // 2, *input_shape[1:])
        smaller["half the batch"] = lambda: parameter_job(params, half, moments, train)
    return ParameterJob(
        build=nothing,
        roles=("params", "state", "batch"),
        tokens=math.prod(_tokens(params, input_shape)),
        smaller=MappingProxyType(smaller),
        params=params,
        input_shape=input_shape,
        moments=moments,
        train=train,
        notes=("by parameters alone: each matrix is one product with every token; predicted",),
    )


def shaped(params: Any) -> Any:
    """The parameters with plain numbers as the scalars that jax makes of them; an error where one is no array."""
    numbers = jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, bool | int | float) else leaf, params)
    for leaf in jax.tree.leaves(numbers):
        check_shaped(leaf, "model_params")
    return numbers


def _tokens(params: Any, input_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The input's dimensions that count tokens."""
    widths = {size for leaf in jax.tree.leaves(params) if len(leaf.shape) > 1 for size in leaf.shape[-2:]}
    features = len(input_shape) > 2 or (len(input_shape) == 2 and input_shape[-1] in widths)
    return input_shape[:-1] if features else input_shape


class ProductsModel:
    """The cost model of this module's rules."""

    def __init__(self, job: ParameterJob, slice: Any, memory_limit: float) -> None:
        self.job, self.slice, self.limit = job, slice, memory_limit
        self._anatomy = _anatomy(job)
        names = [leaf.name for leaf in self._anatomy.of_role("params")]
        # The moments follow the parameters, in the same order.
        self._first_moment = {name: len(names) + position for position, name in enumerate(names)}

    def anatomy(self) -> Anatomy:
        return self._anatomy

    def estimate(self, layout: Layout) -> Estimate:
        axes, chip = layout.mesh.axes, self.slice.chip
        table = chip.efficiency
        wiring = wire(layout.mesh, self.slice, hop_seconds=table.hop_seconds)
        tokens = (self.job.tokens or 1) / _parts(layout.specs[-1], axes)
        compute = hidden = exposed = held = kept = largest = flops = 0.0
        for leaf, spec in zip(self._anatomy.leaves, layout.specs, strict=True):
            held += leaf.bytes / _parts(spec, axes)
            if leaf.role != "params":
                continue
            model, sharded = _parts(spec, axes, ("model",)), _parts(spec, axes, _COPIES)
            whole = leaf.bytes / model
            if self.job.train:
                kept += self._gradients(leaf, layout, axes) if self.job.moments else whole / sharded
                hidden += self._exchange(wiring, axes, whole, sharded, leaf, layout)
            elif sharded > 1:
                hidden += _seconds(wiring, "all_gather", _COPIES, axes, whole)
            if sum(group not in self._anatomy.layers for group in leaf.groups) < 2:
                continue
            copies, rows, columns = math.prod(leaf.shape[:-2]), *leaf.shape[-2:]
            cut_rows, cut_columns = (_size(entry, axes) for entry in _last_two(leaf, spec))
            product = 2 * tokens * rows * columns / (cut_rows * cut_columns)
            share = table.matrix.mid * fill(chip, (1, max(1, int(tokens)), columns // cut_columns, rows // cut_rows))
            flops += (3 if self.job.train else 1) * copies * product
            compute += (3 if self.job.train else 1) * copies * product / (chip.product_flops("bfloat16") * share)
            kept += copies * tokens * rows / cut_rows * _ACTIVATION_BYTES if self.job.train else 0
            # The sum of a row cut comes after the product, that of a column cut in its backward pass.
            width = columns / cut_columns if cut_rows > 1 else rows if cut_columns > 1 and self.job.train else 0
            if width:
                size = tokens * width * _ACTIVATION_BYTES
                exposed += copies * _seconds(wiring, "all_reduce", ("model",), axes, size)
            largest = max(
                largest, 0.0 if sharded == 1 else whole / copies, tokens * columns / cut_columns * _ACTIVATION_BYTES
            )
        hidden, exposed = hidden / table.links.mid, exposed / table.links.mid
        seconds = max(compute, hidden) + exposed
        memory = Memory(held, kept + largest, self.limit, "the backward pass", (), ())
        return Estimate(
            memory=memory,
            seconds=seconds,
            low=max(compute, hidden, exposed),
            high=compute + hidden + exposed,
            bound="matrix" if compute >= hidden + exposed else "links",
            compute_seconds=compute,
            link_seconds=hidden + exposed,
            bubble_seconds=0.0,
            flops=flops,
            model_flops=flops,
            mfu=flops / (seconds * chip.product_flops("bfloat16")) if seconds else 0.0,
            links=(),
            parts=(),
            notes=self.job.notes,
            exposed_seconds=exposed,
        )

    def _gradients(self, leaf: Leaf, layout: Layout, axes: dict[str, int]) -> float:
        """A gradient lies where the optimizer's state of its parameter does."""
        return leaf.bytes / _parts(layout.specs[self._first_moment[leaf.name]], axes)

    def _exchange(
        self, wiring: Wiring, axes: dict[str, int], whole: float, sharded: int, leaf: Leaf, layout: Layout
    ) -> float:
        """What the parameters' copies on the data axis say to each other in a step of training."""
        over = _COPIES
        if sharded > 1:
            # Gathered for each pass, and the gradient's sum scattered.
            gathers = 2 * _seconds(wiring, "all_gather", over, axes, whole)
            return gathers + _seconds(wiring, "reduce_scatter", over, axes, whole)
        if self.job.moments and self._gradients(leaf, layout, axes) < whole:
            return _seconds(wiring, "reduce_scatter", over, axes, whole) + _seconds(
                wiring, "all_gather", over, axes, whole
            )
        return _seconds(wiring, "all_reduce", over, axes, whole)


def _anatomy(job: ParameterJob) -> Anatomy:
    flat = jax.tree_util.tree_leaves_with_path(job.params)
    stacks = {(path[:-1], leaf.shape[0]) for path, leaf in flat if len(leaf.shape) > 2}
    matrices = [
        len(leaf.shape) > 2 or (len(leaf.shape) == 2 and (path[:-1], leaf.shape[0]) not in stacks)
        for path, leaf in flat
    ]
    counts = Counter(
        s for (_, leaf), is_matrix in zip(flat, matrices, strict=True) if is_matrix for s in set(leaf.shape[-2:])
    )
    features = job.input_shape[-1] if job.input_shape[-1] in counts else None
    hub = features or (min(counts, key=lambda size: (-counts[size], size)) if counts else 0)
    ids: dict[Any, int] = {"batch": 0, "sequence": 1}
    squares: Counter[int] = Counter()
    leaves, names = [], {}
    for (path, leaf), is_matrix in zip(flat, matrices, strict=True):
        name = jax.tree_util.keystr(path)
        # What comes before a matrix or a vector counts its copies.
        keys: list[Any] = [("copies", name, position) for position in range(len(leaf.shape))]
        keys[-1:] = leaf.shape[-1:]
        if is_matrix:
            rows, columns = leaf.shape[-2:]
            keys[-2] = rows
            if rows == columns:
                # In turns: the first square matrix gives the dimension that the second takes.
                keys[-1 if squares[rows] % 2 == 0 else -2] = ("inner", rows)
                squares[rows] += 1
        groups = tuple(ids.setdefault(key, len(ids)) for key in keys)
        for key, group in zip(keys, groups, strict=True):
            names[group] = "hidden" if key == hub else f"{key[0]} {key[-1]}" if isinstance(key, tuple) else f"{key}"
        leaves.append(Leaf(name, "params", tuple(leaf.shape), item_bytes(leaf.dtype), groups))
    copies = frozenset(group for key, group in ids.items() if isinstance(key, tuple) and key[0] == "copies")
    moments = [
        Leaf(f"moment {n}{one.name}", "state", one.shape, max(4, one.itemsize), one.groups)
        for n in range(job.moments)
        for one in leaves
    ]
    shape = job.input_shape
    counted = len(_tokens(job.params, shape))
    # What comes after the tokens is features, which a matrix has too, and no sequence.
    groups = tuple(n if n < min(2, counted) else ids.get(size, len(ids) + n) for n, size in enumerate(shape))
    batch = Leaf("input", "batch", shape, 4, groups)
    return Anatomy((*leaves, *moments, batch), layers=copies, names=MappingProxyType(names))


def _last_two(leaf: Leaf, spec: PartitionSpec) -> tuple[Any, Any]:
    entries = [*spec, *[None] * (len(leaf.shape) - len(spec))]
    return entries[-2], entries[-1]


def _size(entry: Any, axes: dict[str, int]) -> int:
    names = (entry,) if isinstance(entry, str) else entry or ()
    return math.prod(axes[name] for name in names if name == "model")


def _parts(spec: PartitionSpec, axes: dict[str, int], only: tuple[str, ...] | None = None) -> int:
    names = [name for entry in spec for name in ((entry,) if isinstance(entry, str) else entry or ())]
    return math.prod(axes[name] for name in names if only is None or name in only)


def _seconds(wiring: Wiring, kind: str, names: tuple[str, ...], axes: dict[str, int], size: float) -> float:
    present = [name for name in names if axes.get(name, 1) > 1]
    if not present:
        return 0.0
    found = exchange(wiring, kind, present, size)
    return found.seconds + found.latency
