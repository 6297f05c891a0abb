"""A decoder's anatomy by hand and a cost model of ten lines, for tests of the search alone."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any

from jax.sharding import PartitionSpec

from capibara.cost.result import Estimate, Memory
from capibara.mesh.layout import Layout
from capibara.program.anatomy import Anatomy, Leaf

BATCH, SEQUENCE, LAYERS, HIDDEN, HEADS, HEAD, MLP, VOCAB = range(8)
WORDS = ("batch", "sequence", "layers", "hidden", "heads", "head_dim", "mlp", "vocab")


def decoder(
    rows: int = 16,
    length: int = 64,
    layers: int = 4,
    hidden: int = 64,
    heads: int = 8,
    mlp: int = 256,
    vocab: int = 512,
) -> Anatomy:
    """Parameters, their two moments and the tokens of a decoder."""
    head = hidden // heads
    matrices = {
        "embed": ((vocab, hidden), (VOCAB, HIDDEN)),
        "q": ((layers, hidden, heads, head), (LAYERS, HIDDEN, HEADS, HEAD)),
        "o": ((layers, heads, head, hidden), (LAYERS, HEADS, HEAD, HIDDEN)),
        "up": ((layers, hidden, mlp), (LAYERS, HIDDEN, MLP)),
        "down": ((layers, mlp, hidden), (LAYERS, MLP, HIDDEN)),
        "norm": ((layers, hidden), (LAYERS, HIDDEN)),
    }
    leaves = [Leaf(name, "params", shape, 4, groups) for name, (shape, groups) in matrices.items()]
    leaves += [
        Leaf(f"{moment}/{name}", "state", shape, 4, groups)
        for moment in ("mean", "square")
        for name, (shape, groups) in matrices.items()
    ]
    leaves.append(Leaf("tokens", "batch", (rows, length), 4, (BATCH, SEQUENCE)))
    return Anatomy(tuple(leaves), layers=frozenset({LAYERS}), names=MappingProxyType(dict(enumerate(WORDS))))


def parts(spec: PartitionSpec, axes: dict[str, int], only: tuple[str, ...] | None = None) -> int:
    names = [name for entry in spec for name in ((entry,) if isinstance(entry, str) else entry or ())]
    return math.prod(axes[name] for name in names if only is None or name in only)


class TenLines:
    """Products at a rate, exchanges at a rate, activations kept or computed again: enough to pull in all directions."""

    def __init__(self, anatomy: Anatomy, limit: float, link: float = 1e9, flops: float = 1e11) -> None:
        self._anatomy, self.limit, self.link, self.flops = anatomy, limit, link, flops
        self.seen: list[Layout] = []

    def anatomy(self) -> Anatomy:
        return self._anatomy

    def estimate(self, layout: Layout) -> Estimate:
        self.seen.append(layout)
        axes, choices = layout.mesh.axes, dict(layout.choices)
        leaves = list(zip(self._anatomy.leaves, layout.specs, strict=True))
        tokens = next(math.prod(leaf.shape) / parts(spec, axes) for leaf, spec in leaves if leaf.role == "batch")
        turns, remat = choices.get("accumulate", 1), choices.get("remat", "none")
        compute = link = held = activations = 0.0
        for position, (leaf, spec) in enumerate(leaves):
            size = leaf.bytes / parts(spec, axes)
            held += 0 if position in layout.host else size
            link += 4 * size if position in layout.host else 0
            if leaf.role != "params":
                continue
            model = parts(spec, axes, ("model",))
            work = {"none": 6, "dots": 7, "full": 8}[remat]
            compute += work * tokens * math.prod(leaf.shape) / model
            sharded = parts(spec, axes, ("data", "sequence"))
            replicas = axes.get("data", 1) * axes.get("sequence", 1)
            if sharded > 1:
                link += turns * 2 * leaf.bytes / model
            link += 2 * leaf.bytes / model if replicas > 1 else 0
            held += leaf.bytes / (model * sharded)
            if model > 1:
                link += 8 * tokens * leaf.shape[-1] ** 0.5 * (2 if HIDDEN in _cut(leaf, spec) else 1)
            kept = {"none": 16, "dots": 6, "full": 1}[remat]
            activations += kept * tokens * leaf.shape[-1] / model / turns
        link += tokens * 64 * (axes.get("sequence", 1) > 1)
        a, b = compute / self.flops, link / self.link
        memory = Memory(held, activations, self.limit, "the last layer", (), ())
        return _estimate(memory, max(a, b) + 0.2 * min(a, b) + 1e-6 * turns, a + b + 1e-6 * turns, a, b)


def _cut(leaf: Leaf, spec: PartitionSpec) -> set[int]:
    return {g for g, entry in zip(leaf.groups, spec, strict=False) if entry == "model" or "model" in (entry or ())}


def _estimate(memory: Memory, seconds: float, high: float, compute: float, link: float) -> Estimate:
    keywords: dict[str, Any] = {"links": (), "parts": (), "notes": ()}
    return Estimate(
        memory=memory,
        seconds=seconds,
        low=max(compute, link),
        high=high,
        bound="matrix" if compute > link else "links",
        compute_seconds=compute,
        link_seconds=link,
        bubble_seconds=0.0,
        flops=1.0,
        model_flops=1.0,
        mfu=0.5,
        **keywords,
    )
