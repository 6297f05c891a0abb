"""A user's own batches, any iterable of them, with the interface that the trainer reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import numpy as np

from capibara.errors import rule_error
from capibara.train.data.batches import Batch, Batches

__all__ = ["WrappedBatches", "wrap_dataset"]


def wrap_dataset(
    iterable: Iterable[Any], *, epochs: int | None = None, vocab_size: int | None = None, tokens: bool = True
) -> Batches:
    """Batches of a user's own, which are this process's rows.

    Args:
        iterable: batches: dictionaries with "inputs" and "targets" [rows, T], or arrays of ids [rows, T + 1]. One that
            can be iterated anew (a list, a loader) is read again and again; a generator once.
        epochs: how often it is read; until the trainer stops when None, and a generator once.
        vocab_size: ids are held to it.
        tokens: False hands batches on as they are, for a loss function that reads something else.

    Examples:
        >>> batches = wrap_dataset([np.arange(6).reshape(2, 3)])
        >>> next(batches)["targets"].tolist(), batches.state()["drawn"]
        ([[1, 2], [4, 5]], 1)
    """
    if not isinstance(iterable, Iterable) or isinstance(iterable, str | bytes | Mapping):
        raise rule_error(
            "A dataset is an iterable of batches",
            type(iterable).__name__,
            "pass a list, a loader or a generator of batches, or a DataConfig for files",
        )
    if isinstance(iterable, Batches):
        return iterable
    if epochs is not None and (isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1):
        raise rule_error("epochs is a whole number from 1 up", repr(epochs), "use epochs = 1")
    return WrappedBatches(iterable, epochs, vocab_size, tokens)


class WrappedBatches(Batches):
    """Batches of an iterable; the state is how many were drawn, and restoring it draws as many again."""

    def __init__(self, iterable: Iterable[Any], epochs: int | None, vocab_size: int | None, tokens: bool) -> None:
        self._iterable, self._epochs = iterable, epochs
        self._vocab_size, self._as_tokens = vocab_size, tokens
        self._iterator: Iterator[Any] = iter(iterable)
        self._once = self._iterator is iterable
        self._length = len(iterable) if isinstance(iterable, Sized) else None
        self._drawn = self._epoch = self._in_epoch = 0
        self._peeked: list[Any] = []  # the batch that was looked at before its turn

    @property
    def step(self) -> int:
        return self._drawn

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def steps_per_epoch(self) -> int | None:
        return self._length

    def __next__(self) -> Batch:
        batch = self._draw()
        self._drawn += 1
        self._in_epoch += 1
        return self._checked(batch, self._drawn - 1)

    def peek(self) -> Batch:
        batch = self._draw()
        self._peeked.append(batch)
        return self._checked(batch, self._drawn)

    def _draw(self) -> Any:
        if self._peeked:
            return self._peeked.pop()
        try:
            return next(self._iterator)
        except StopIteration:
            self._begin_epoch()
            try:
                return next(self._iterator)
            except StopIteration:
                raise self._empty() from None

    def _begin_epoch(self) -> None:
        if self._in_epoch == 0:
            raise self._empty()
        if self._epochs is not None and self._epoch + 1 >= self._epochs:
            raise StopIteration
        if self._once:
            if self._epochs is None:
                raise StopIteration
            raise rule_error(
                f"{self._epochs} epochs read the dataset {self._epochs} times",
                f"a {type(self._iterable).__name__}, which can be read once, at its end after {self._drawn} batches",
                "pass a list, or an object whose __iter__ begins anew",
            )
        self._length = self._length or self._in_epoch
        self._epoch, self._in_epoch = self._epoch + 1, 0
        self._iterator = iter(self._iterable)

    def _empty(self) -> ValueError:
        return rule_error(
            "A dataset has at least one batch", f"an empty {type(self._iterable).__name__}", "pass one with batches"
        )

    def state(self) -> dict[str, Any]:
        return {"kind": "wrapped", "drawn": self._drawn, "epoch": self._epoch, "drawn_in_epoch": self._in_epoch}

    def restore(self, state: Mapping[str, Any]) -> None:
        if state.get("kind") != "wrapped":
            raise rule_error(
                "The state is one of a dataset passed as batches",
                f"a state of {state.get('kind')!r}",
                "resume with the same data",
            )
        if self._once:
            ahead = state["drawn"] - self._drawn
            if ahead < 0:
                raise rule_error(
                    "A dataset goes back to a state by beginning anew",
                    f"a {type(self._iterable).__name__}, which can be read once, {-ahead} batches past it",
                    "pass a list, or an object whose __iter__ begins anew",
                )
        else:
            self._iterator = iter(self._iterable)
            self._peeked.clear()
            ahead, self._in_epoch = state["drawn_in_epoch"], 0
            self._epoch, self._drawn = state["epoch"], state["drawn"] - ahead
        for _ in range(ahead):
            try:
                self._peeked.pop() if self._peeked else next(self._iterator)
            except StopIteration:
                raise rule_error(
                    "A dataset has the batches that were drawn from it before",
                    f"{self._in_epoch} of {state['drawn_in_epoch']}",
                    "resume with the same data",
                ) from None
            self._drawn += 1
            self._in_epoch += 1

    def rewind(self) -> None:
        self.restore({"kind": "wrapped", "drawn": 0, "epoch": 0, "drawn_in_epoch": 0})

    def _checked(self, batch: Any, number: int) -> Any:
        if not self._as_tokens:
            return batch
        where = f"batch {number}"
        if isinstance(batch, Mapping):
            arrays = {str(name): np.asarray(value) for name, value in batch.items()}
            if "inputs" not in arrays or "targets" not in arrays:
                raise rule_error(
                    'A batch has "inputs" and "targets", or is an array of ids',
                    f"{where} with {', '.join(arrays) or 'nothing'}",
                    "rename its keys, or pass tokens=False for a loss function of your own",
                )
        else:
            ids = np.asarray(batch)
            if ids.ndim != 2 or ids.shape[1] < 2:
                raise rule_error(
                    "A batch of ids is [rows, T + 1]", f"{where} of shape {ids.shape}", "stack rows of two ids or more"
                )
            arrays = {"inputs": ids[:, :-1], "targets": ids[:, 1:]}
        for name in ("inputs", "targets"):
            arrays[name] = self._ids(arrays[name], f"{name} of {where}")
        shape = arrays["inputs"].shape
        for name in ("targets", "mask", "segment_ids", "positions"):
            if name in arrays and arrays[name].shape != shape:
                raise rule_error(
                    f"{name} has the shape of inputs, {shape}",
                    f"{arrays[name].shape} in {where}",
                    "pad or cut them alike",
                )
        return arrays

    def _ids(self, ids: Any, where: str) -> Any:
        if ids.dtype.kind not in "iu" or ids.ndim != 2:
            raise rule_error(
                "Ids are whole numbers, [rows, T]",
                f"{ids.dtype}{list(ids.shape)} in {where}",
                "tokenise the text first",
            )
        if ids.size and (int(ids.min()) < 0 or (self._vocab_size is not None and int(ids.max()) >= self._vocab_size)):
            most = "" if self._vocab_size is None else f" to {self._vocab_size - 1}"
            raise rule_error(
                f"Ids are from 0{most}",
                f"{int(ids.min())} to {int(ids.max())} in {where}",
                "mask what is no target instead, or use the model's own tokenizer",
            )
        return ids.astype(np.int32, copy=False)
