"""Which dimension gets a mesh axis when an operation's arrays lie differently."""

from __future__ import annotations

from typing import Any, NamedTuple

from capibara.program.factors import Factors

__all__ = ["Choice", "Sharding", "choose", "split_dims"]

Sharding = tuple[int, ...]
"""One dimension for each mesh axis; -1 where the axis does not split the value."""


class Choice(NamedTuple):
    """How a node computes on a mesh."""

    split: tuple[int, ...]
    """The factor that each mesh axis splits; -1 for none."""
    operands: tuple[Sharding, ...]
    """How it reads its operands."""
    results: tuple[Sharding, ...]
    """How its results come out."""
    summed: tuple[int, ...]
    """Axes over which the results are partial sums."""
    ways: int
    """Over how many chips the work is divided."""


def split_dims(side: tuple[int, ...], split: tuple[int, ...]) -> Sharding:
    return tuple(side.index(factor) if factor >= 0 and factor in side else -1 for factor in split)


def choose(
    factors: Factors, inputs: tuple[Sharding, ...], outputs: tuple[Sharding, ...], batch: tuple[bool, ...],
    weights: tuple[float, ...], sizes: tuple[int, ...],
) -> tuple[int, ...]:  # fmt: skip
    chosen: list[int] = []
    ways = [1] * len(factors.sizes)
    for axis, size in enumerate(sizes):
        asked: dict[int, list[int]] = {}  # factor -> operands that are split so
        for position, sharding in enumerate(inputs):
            if sharding[axis] >= 0 and (factor := factors.operands[position][sharding[axis]]) >= 0:
                asked.setdefault(factor, []).append(position)
        wanted = set()
        for side, sharding in zip(factors.results, outputs, strict=True):
            if sharding[axis] >= 0 and (factor := side[sharding[axis]]) >= 0:
                wanted.add(factor)
        candidates = [f for f in sorted({*asked, *wanted}) if factors.sizes[f] % (ways[f] * size) == 0]
        best = -1
        if len(candidates) == 1:
            best = candidates[0]
        elif candidates:
            best = min(candidates, key=lambda f: _worth(f, factors, asked, f in wanted, batch, weights, sizes[axis]))
        if best >= 0:
            ways[best] *= size
        chosen.append(best)
    return tuple(chosen)


def _worth(
    factor: int,
    factors: Factors,
    asked: dict[int, list[int]],
    wanted: bool,
    batch: tuple[bool, ...],
    weights: tuple[float, ...],
    ways: int,
) -> tuple[Any, ...]:
    """Two dimensions want one mesh axis: the smallest of these is granted."""
    asking = asked.get(factor, [])
    reduced = factor in factors.reduced
    holders = [position for position, side in enumerate(factors.operands) if factor in side]
    agreed = reduced and len(asking) == len(holders)
    activation = any(batch[position] for position in asking) and not reduced
    # Operands that lie otherwise move: those that have the dimension exchange their parts, the others are gathered.
    moved = sum(
        weights[position] / (ways if factor in factors.operands[position] else 1)
        for other, positions in asked.items()
        if other != factor
        for position in positions
    )
    return (
        factor not in factors.granted,
        not agreed,  # both operands lie so: nothing moves before the product
        not (wanted and not reduced and asking),  # as the result is wanted
        not activation,  # weights come to activations, as the compiler's partitioner has it
        reduced,
        moved,
        factor,
    )
