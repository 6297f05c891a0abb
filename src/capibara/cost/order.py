"""In which order a compiler's scheduler runs the passes of one level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from capibara.cost.fusion import LoopPass, Pass

__all__ = ["only_told", "put_off", "reduced_gradients"]


# So many times less than the largest buffer is few.
_FEW = 64


def reduced_gradients(passes: Sequence[Pass | LoopPass], carried: frozenset[int]) -> set[int]:
    """Products whose result only leaves the body through a reduction over chips, and what follows them.

    The TPU compiler does a layer's weight gradients last, as one run of products and reductions that overlap, and
    keeps their operands until then.
    """
    readers: dict[int, list[int]] = {}
    for index, one in enumerate(passes):
        for buffer in one.reads:
            readers.setdefault(buffer, []).append(index)
    leaves: set[int] = set()
    reduced: set[int] = set()
    for index in range(len(passes) - 1, -1, -1):
        one = passes[index]
        if isinstance(one, LoopPass) or any(buffer in carried for buffer in one.writes):
            continue
        after = [reader for buffer in one.writes for reader in readers.get(buffer, ())]
        if all(reader in leaves for reader in after):
            leaves.add(index)
            if _reduces(one) or any(reader in reduced for reader in after):
                reduced.add(index)
    found = {index for index in reduced if _is_product(passes[index])}
    # What follows a product that waits has to wait as well.
    for index, one in enumerate(passes):
        if index in leaves and any(b in passes[early].writes for early in list(found) for b in one.reads):
            found.add(index)
    return found


def _is_product(one: Pass | LoopPass) -> bool:
    return isinstance(one, Pass) and one.kind == "matrix"


def _reduces(one: Pass | LoopPass) -> bool:
    made = None if isinstance(one, LoopPass) else one.steps[0].collective
    return made is not None and made.kind in ("reduce_scatter", "all_reduce")


def only_told(passes: Sequence[Pass | LoopPass], size: Mapping[int, float], told: frozenset[int]) -> set[int]:
    """Passes that make few numbers for the program's caller alone: a loss. `told` are outputs that replace no argument.

    Nothing waits for them, and the TPU compiler has been seen to do them after everything else: a loss that picks each
    row's target out of the logits then keeps the logits through the whole backward pass.
    """
    readers: dict[int, list[int]] = {}
    for index, one in enumerate(passes):
        for buffer in one.reads:
            readers.setdefault(buffer, []).append(index)
    few = max((size[buffer] for buffer in readers), default=0.0) / _FEW
    found: set[int] = set()
    for index in range(len(passes) - 1, -1, -1):
        one = passes[index]
        if isinstance(one, LoopPass) or sum(size[written] for written in one.writes) > few:
            continue
        after = [reader for written in one.writes for reader in readers.get(written, ())]
        leaves = all(written in told or written in readers for written in one.writes)
        if leaves and all(reader in found for reader in after):
            found.add(index)
    return found


def put_off(
    passes: Sequence[Pass | LoopPass], size: Mapping[int, float], held: frozenset[int], last: set[int]
) -> list[Pass | LoopPass]:
    """The passes in order, those that only make memory put off until something reads it, and `last` at the end.

    `held` are buffers that are alive throughout, so that reading them later costs nothing.
    """
    read_at: dict[int, list[int]] = {}
    for index, one in enumerate(passes):
        for buffer in one.reads:
            read_at.setdefault(buffer, []).append(index)
    key: list[int] = list(range(len(passes)))
    for index in last:
        key[index] = len(passes)
    for index in range(len(passes) - 1, -1, -1):
        one = passes[index]
        if isinstance(one, LoopPass) or not one.writes or index in last:
            continue
        if not all(b in read_at for b in one.writes):
            continue
        target = min(key[reader] for b in one.writes for reader in read_at[b])
        kept = sum(size[b] for b in one.reads if b not in held and max(key[r] for r in read_at[b]) <= target)
        if kept < sum(size[b] for b in one.writes):
            key[index] = target
    return [passes[i] for i in sorted(range(len(passes)), key=lambda i: (key[i], i))]
