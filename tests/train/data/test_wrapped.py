"""A user's own batches: read again where they can be, skipped to where a state says, refused where they cannot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from capibara.train.data.wrapped import wrap_dataset

BATCHES = [np.arange(10 * number, 10 * number + 6).reshape(2, 3) for number in range(4)]


class Loader:
    """Begins anew at each iter, as loaders do, and does not know its length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(BATCHES)


def _firsts(batches: Iterator[Any], count: int) -> list[int]:
    return [int(next(batches)["inputs"][0, 0]) for _ in range(count)]


@pytest.mark.quick
def test_arrays_are_inputs_and_their_next_ids() -> None:
    for first in (BATCHES[1], BATCHES[1].tolist(), jnp.asarray(BATCHES[1]), BATCHES[1].astype(np.uint16)):
        batch = next(wrap_dataset([first]))
        assert batch["inputs"].tolist() == [[10, 11], [13, 14]]
        assert batch["targets"].tolist() == [[11, 12], [14, 15]]
        assert batch["inputs"].dtype == batch["targets"].dtype == np.int32
    pair = {"inputs": BATCHES[0], "targets": BATCHES[1], "mask": np.ones((2, 3)), "weight": np.ones(2)}
    assert next(wrap_dataset([pair])).keys() == pair.keys()
    anything = ("x", 3)
    assert next(wrap_dataset([anything], tokens=False)) is anything  # type: ignore[comparison-overlap]
    batches = wrap_dataset(BATCHES)
    assert wrap_dataset(batches) is batches


@pytest.mark.quick
@pytest.mark.parametrize("dataset", [BATCHES, Loader()])
def test_what_can_be_read_again_is_and_a_state_finds_its_place(dataset: Any) -> None:
    batches = wrap_dataset(dataset)
    assert batches.steps_per_epoch == (4 if isinstance(dataset, list) else None)
    order = _firsts(batches, 6)
    assert order == [0, 10, 20, 30, 0, 10]
    assert (batches.step, batches.epoch, len(batches)) == (6, 1, 4)
    state = batches.state()
    rest = _firsts(batches, 5)
    other = wrap_dataset(dataset)
    other.restore(state)
    assert (other.step, other.epoch) == (6, 1)
    assert _firsts(other, 5) == rest
    batches.restore(state)
    assert _firsts(batches, 5) == rest
    batches.rewind()
    assert _firsts(batches, 5) == [0, 10, 20, 30, 0]
    assert batches.steps(1.5) == 6
    limited = wrap_dataset(dataset, epochs=2)
    assert len(list(limited)) == 8


@pytest.mark.quick
def test_a_generator_is_read_once_and_says_so() -> None:
    def generate() -> Iterator[Any]:
        yield from BATCHES

    batches = wrap_dataset(generate())
    state = {**batches.state(), "drawn": 2, "drawn_in_epoch": 2}
    batches.restore(state)
    assert _firsts(batches, 2) == [20, 30]
    with pytest.raises(StopIteration):
        next(batches)
    with pytest.raises(ValueError, match="a generator, which can be read once, 2 batches past it"):
        batches.restore(state)
    twice = wrap_dataset(generate(), epochs=2)
    assert len(_firsts(twice, 4)) == 4
    with pytest.raises(ValueError, match=r"2 epochs read the dataset 2 times. Got a generator"):
        next(twice)
    with pytest.raises(TypeError, match="does not say how many"):
        len(twice)


@pytest.mark.quick
@pytest.mark.parametrize("once", [True, False])
def test_to_look_at_a_batch_takes_nothing(once: bool) -> None:
    batches = wrap_dataset(iter(BATCHES) if once else BATCHES)
    state = batches.state()
    for _ in range(2):
        assert batches.peek()["inputs"][0, 0] == 0
    assert batches.state() == state
    batches.rewind()  # a generator too is at its beginning still
    assert _firsts(batches, 2) == [0, 10]
    assert batches.peek()["inputs"][0, 0] == 20
    batches.restore({**state, "drawn": 3, "drawn_in_epoch": 3})
    assert _firsts(batches, 1) == [30]
    if once:
        with pytest.raises(StopIteration):
            batches.peek()
    else:
        assert batches.peek()["inputs"][0, 0] == 0
        assert _firsts(batches, 2) == [0, 10]


@pytest.mark.quick(cases="all")
@pytest.mark.parametrize(
    ("batch", "told"),
    [
        ({"inputs": [[1, 2]]}, '"inputs" and "targets".*batch 0 with inputs'),
        ({"inputs": [[1, 2]], "targets": [[1]]}, "targets has the shape of inputs"),
        ({"inputs": [[1]], "targets": [[1]], "mask": [[1, 1]]}, "mask has the shape"),
        ([1, 2, 3], r"\[rows, T \+ 1\]"),
        ([[0.5, 1.5]], "float64"),
        ([[3, -1]], "Ids are from 0 to 49"),
        ([[3, 50]], "Ids are from 0 to 49"),
    ],
)
def test_batches_that_are_none_are_refused(batch: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        next(wrap_dataset([batch], vocab_size=50))


def test_datasets_that_are_none_are_refused() -> None:
    for dataset in (3, "text", {"inputs": [1]}):
        with pytest.raises(ValueError, match="an iterable of batches"):
            wrap_dataset(dataset)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one batch"):
        next(wrap_dataset([]))
    with pytest.raises(ValueError, match="epochs is"):
        wrap_dataset(BATCHES, epochs=0)
    with pytest.raises(ValueError, match="a state of 'rows'"):
        wrap_dataset(BATCHES).restore({"kind": "rows"})
    short = wrap_dataset(BATCHES[:2])
    with pytest.raises(ValueError, match="2 of 3"):
        short.restore({"kind": "wrapped", "drawn": 3, "epoch": 0, "drawn_in_epoch": 3})
