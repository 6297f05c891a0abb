"""Boards of kernels whose programs wait for one another (capibara.kernels.pallas.grid), on the CPU.

It is the memory of a chip at its worst. What is announced is seen late, number by number and in any order, when
counters have long told of it; every look finds some more of it, and all of it is there when the kernel has ended. A
turn that ends is seen at once.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from tests.kernels.pallas import hopper_emulator as emulator

from capibara.kernels.pallas import grid

SEEN = 0.5  # of what is on its way, with a look


def _grid() -> Any:
    return emulator._here.program.grid


def _look() -> None:
    """Some of what is on its way arrives."""
    memory = _grid()
    left = []
    for store in memory.leaving:
        if memory.draw.random() < SEEN:
            store()
        else:
            left.append(store)
    memory.leaving[:] = left


def turn_of(board: emulator.Ref) -> Any:
    with _grid().lock:
        return np.int32(board.array[0] + 1)


def end_turn(board: emulator.Ref, turn: Any) -> None:
    with _grid().lock:
        assert board.array[0] == turn - 1, "a turn is ended once"
        board.array[0] = turn


def arrive(board: emulator.Ref, event: int) -> None:
    with _grid().lock:
        board.array[(1 + event) * grid.LINE] += 1


def wait(board: emulator.Ref, event: int, arrivals: int, turn: Any) -> None:
    def there() -> bool:
        with _grid().lock:
            return bool(board.array[(1 + event) * grid.LINE] - turn * arrivals >= 0)

    emulator.wait_until(there, f"event {event} never came")


def _checked(pairs: emulator.Ref, count: int) -> np.ndarray:
    assert pairs.first_byte % (grid.LINE * 4) == 0, "pairs begin with a cache line"
    ((first, size),) = pairs.part
    assert size == grid.WORDS * count, f"{size} words of {count} pairs"
    assert first + size <= pairs.array.size, "past the end of the board"
    return pairs.array[first : first + size].reshape(count, grid.WORDS)


def announce(row: emulator.Ref, pairs: emulator.Ref, turn: Any) -> None:
    words, count = row.read().reshape(-1).view(np.int32), math.prod(row.shape)
    assert row.dtype == np.float32
    assert count <= grid.THREADS
    target = _checked(pairs, count)
    with _grid().lock:
        for number, word in enumerate(words):
            _grid().leaving.append(functools.partial(target[number].__setitem__, slice(None), (word, turn)))


def gather(pairs: list[emulator.Ref], shape: tuple[int, ...], layout: Any, turn: Any) -> list[np.ndarray]:
    del layout
    count = math.prod(shape)
    assert count % grid.THREADS == 0, "a warpgroup's threads have as many numbers each"
    sources = [_checked(one, count) for one in pairs]
    found: list[np.ndarray] = []

    def there() -> bool:
        with _grid().lock:
            _look()
            found[:] = [source.copy() for source in sources]
        return all((one[:, 1] == turn).all() for one in found)

    emulator.wait_until(there, "numbers of this turn never came")
    return [one[:, 0].copy().view(np.float32).reshape(shape) for one in found]


def reduced(how: str, x: np.ndarray, layout: Any, scratch: emulator.Ref) -> Any:
    del layout
    assert scratch.shape == (4,), "a number a warp"
    return x.sum(dtype=np.float32) if how == "add" else x.max()


@contextlib.contextmanager
def emulated(monkeypatch: pytest.MonkeyPatch, *kernels: ModuleType) -> Iterator[None]:
    """`hopper_emulator.emulated`, for kernels whose programs tell one another by a board how far they are."""
    with emulator.emulated(*kernels, at_once=True), monkeypatch.context() as patched:
        for stand_in in (turn_of, end_turn, arrive, wait, announce, gather):
            patched.setattr(grid, stand_in.__name__, stand_in)
        for kernel in kernels:
            if hasattr(kernel, "reduced"):
                patched.setattr(kernel, "reduced", reduced)
        yield
