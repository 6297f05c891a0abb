"""Batches in one global order, for any number of processes, resumable from a few numbers.

Row number i of a run is `permutation(seed, i // rows)[i % rows]`: a pure function, by Grain's index shuffle, which
needs no table. Step s is rows s * B to (s + 1) * B; process p of P reads its p-th part of them. So the order knows
nothing of P, and a run that goes on with other hosts goes on with the same batches.
"""

from __future__ import annotations

import hashlib
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from capibara.distribution import NAME
from capibara.errors import rule_error, unknown_name
from capibara.models.tokenizer import Tokenizer, load_tokenizer
from capibara.train.data.cache import tokenised
from capibara.train.data.config import DataConfig
from capibara.train.data.rows import Row, Rows, StreamRows, WholeRows
from capibara.train.data.split import split as split_documents

if TYPE_CHECKING:
    import grain

__all__ = ["Batch", "Batches", "RowBatches", "open_batches"]

Batch = dict[str, npt.NDArray[Any]]

_MOST_ROWS = 1 << 32  # of Grain's index shuffle


class Batches(ABC, Iterator[Batch]):
    """Batches of this process, one after another, and where it stands among them.

    A context manager; threads that prepare batches end with it, with `close`, or with the interpreter.
    """

    @property
    @abstractmethod
    def step(self) -> int:
        """Number of the batch that comes next."""

    @property
    @abstractmethod
    def epoch(self) -> int:
        """How many times all of the data has been read."""

    @property
    @abstractmethod
    def steps_per_epoch(self) -> int | None:
        """Batches that hold all of the data once, the last of them in part; None where that is not known."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """All that it takes to go on from here, as JSON."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; one of other data or of another order is refused."""

    @abstractmethod
    def peek(self) -> Batch:
        """The batch that comes next, which still comes next: for its shapes, before the first step is compiled."""

    @abstractmethod
    def rewind(self) -> None:
        """Begin again, as each evaluation does."""

    def steps(self, epochs: float) -> int | None:
        """Batches until so many epochs have been read; None where that is not known."""
        return None if self.steps_per_epoch is None else math.ceil(self.steps_per_epoch * epochs)

    def close(self) -> None:
        """End the threads that prepare batches."""

    def __len__(self) -> int:
        if self.steps_per_epoch is None:
            raise TypeError("this dataset does not say how many batches it has")
        return self.steps_per_epoch

    def __enter__(self) -> Batches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RowBatches(Batches):
    """Batches of rows that can be read in any order. Training goes on for ever; evaluation ends after one epoch.

    Args:
        rows: rows by number.
        batch_size: rows of a step, over all processes.
        seed: of the order; each epoch has another.
        shuffle: False reads rows as they lie.
        endless: one epoch after another; else one, whose last batch is filled with rows of padding.
        identity: what else the order hangs on, by name: a state of another is refused.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        endless: bool = True,
        process_index: int = 0,
        process_count: int = 1,
        prefetch: int = 4,
        workers: int = 2,
        identity: Mapping[str, Any] | None = None,
    ) -> None:
        _check_shares(batch_size, process_index, process_count)
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
            raise rule_error("seed is a whole number", repr(seed), "use seed = 0")
        if len(rows) > _MOST_ROWS:
            raise rule_error(
                f"An epoch has {_MOST_ROWS} rows at most", f"{len(rows)} of {rows.length} tokens", "use longer rows"
            )
        self.rows = rows
        self.batch_size, self.seed = batch_size, int(seed)
        self._endless, self._step, self._closed = endless, 0, False
        self._order = _order(len(rows), self.seed, shuffle)
        self._identity = {
            "data": rows.documents.tokens.fingerprint,
            "documents": rows.documents.which,
            "sequence_length": rows.length,
            "seed": self.seed,
            "shuffle": shuffle,
            "order": _probe(self._order, len(rows)),
            **(identity or {}),
        }
        mine = batch_size // process_count
        self._source = _Ordered(rows, self._order, batch_size, endless)
        dataset = _grain().MapDataset.source(self._source)
        dataset = dataset.batch(mine, drop_remainder=True).slice(slice(process_index, None, process_count))
        threads = workers if prefetch else 0
        options = _grain().ReadOptions(num_threads=threads, prefetch_buffer_size=prefetch if threads else 0)
        self._iterator = iter(dataset.to_iter_dataset(options))

    @property
    def step(self) -> int:
        return self._step

    @property
    def epoch(self) -> int:
        if not self._endless:
            return self._step // self.steps_per_epoch
        return self._step * self.batch_size // len(self.rows)

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.rows) // self.batch_size)

    def steps(self, epochs: float) -> int:
        """Batches until so many epochs have been read. Epochs follow each other within a batch: none is padded."""
        return math.ceil(len(self.rows) * epochs / self.batch_size)

    @property
    def truncated(self) -> int:
        """Documents of an epoch that are longer than a row, and are cut; none where rows are windows of a stream."""
        return self.rows.truncated

    def __next__(self) -> Batch:
        if self._closed:
            raise rule_error("Batches are read before they are closed", "closed ones", "open them again")
        try:
            batch: Batch = next(self._iterator)
        except StopIteration:
            raise
        except BaseException:
            self._seek(self._step)  # what was asked for is asked for again, not left out
            raise
        self._step += 1
        return batch

    def peek(self) -> Batch:
        batch = next(self)
        self._seek(self._step - 1)
        return batch

    def rewind(self) -> None:
        self._seek(0)

    def state(self) -> dict[str, Any]:
        return {"kind": "rows", "next_step": self._step, "batch_size": self.batch_size, **self._identity}

    def restore(self, state: Mapping[str, Any]) -> None:
        if state.get("kind") != "rows":
            raise rule_error(
                "The state is one of batches of files", f"a state of {state.get('kind')!r}", "resume with the same data"
            )
        for key, mine in self._identity.items():
            if state.get(key) != mine:
                raise rule_error(
                    f"A run goes on with the data and the order that it began with: {_MEANING.get(key, key)}",
                    f"a state with {state.get(key)!r} for a run with {mine!r}",
                    "use the same, or begin the data anew by not restoring its state",
                )
        rows = state["next_step"] * state["batch_size"]
        if rows % self.batch_size:
            raise rule_error(
                "With another batch size a run goes on where one of its batches begins",
                f"row {rows} and batches of {self.batch_size}",
                f"use a batch size that divides {rows}, such as {state['batch_size']}",
            )
        self._seek(rows // self.batch_size)

    def _seek(self, step: int) -> None:
        self._iterator.set_state({"next_index": step})
        self._step = step

    def close(self) -> None:
        self._closed = True
        self._iterator.close()
        self._source.stop()


_MEANING = {
    "data": "the content of the data",
    "documents": "which documents are held out",
    "sequence_length": "the length of a row",
    "seed": "the seed",
    "shuffle": "whether rows are shuffled",
    "order": "the permutation that Grain's version gives",
    "pack": "how documents are packed",
}


def _grain() -> Any:
    try:
        import grain
    except ImportError as error:
        raise ImportError(f"Training data is read through Grain: pip install '{NAME}[train]'") from error
    return grain


def _order(count: int, seed: int, shuffle: bool) -> grain.MapDataset[int]:
    """Rows in the order of the run, of every epoch."""
    order = _grain().MapDataset.range(count)
    if not shuffle:
        return order
    # Grain takes 32 bits and adds the epoch to them: hashed, so that seeds 0 and 1 do not share all epochs but one.
    digest = hashlib.blake2b(str(seed).encode(), digest_size=4).digest()
    return order.shuffle(seed=int.from_bytes(digest, "little"))


def _probe(order: grain.MapDataset[int], count: int) -> str:
    """A few rows of the order: a version of Grain that permutes differently does not go on with another's state."""
    places = [0, 1, 2, count // 2, count - 1, count, count + 1, 7 * count]
    return hashlib.blake2b(str([int(order[place]) for place in places]).encode(), digest_size=6).hexdigest()


class _Ordered:
    """Rows in the order of the run, for Grain to read from: a step's first row is `step * batch_size`."""

    def __init__(self, rows: Rows, order: grain.MapDataset[int], batch_size: int, endless: bool) -> None:
        self._rows, self._order = rows, order
        self._length = _FOREVER if endless else -(-len(rows) // batch_size) * batch_size
        self._quiet = threading.Condition()
        self._reading, self._stopped = 0, False

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> Row:
        with self._quiet:
            if self._stopped or (number >= len(self._rows) and self._length != _FOREVER):
                return self._rows.empty()
            self._reading += 1
        try:
            return self._rows[int(self._order[number])]
        finally:
            with self._quiet:
                self._reading -= 1
                self._quiet.notify_all()

    def stop(self) -> None:
        """Returns when no thread reads any more. Grain does not wait for its own; and to read a mapped file that
        somebody cuts, thinking it closed, ends the process."""
        with self._quiet:
            self._stopped = True
            self._quiet.wait_for(lambda: self._reading == 0)


_FOREVER = 1 << 62


def open_batches(
    config: DataConfig,
    *,
    tokenizer: Tokenizer | None = None,
    batch_size: int,
    sequence_length: int,
    seed: int = 0,
    split: str = "train",
    process_index: int = 0,
    process_count: int = 1,
) -> RowBatches:
    """Batches of the configured data, tokenised before the first one where that was not done yet.

    Args:
        tokenizer: the configured one when None.
        batch_size: rows of a step over all processes, of which each reads its part.
        sequence_length: tokens of a row.
        seed: of the order in which rows are read.
        split: "train", or "eval": what is held out, once, as it lies.
        process_index: which part of every batch this process reads.
        process_count: how many parts there are.

    Examples:
        >>> with open_batches(DataConfig("python:topics"), batch_size=2, sequence_length=64) as batches:
        ...     batch = next(batches)
        >>> sorted(batch), batch["inputs"].shape
        (['inputs', 'mask', 'positions', 'segment_ids', 'targets'], (2, 64))
    """
    if split not in ("train", "eval"):
        raise unknown_name("split of data", split, ("train", "eval"))
    if not isinstance(sequence_length, int) or isinstance(sequence_length, bool) or sequence_length < 1:
        raise rule_error("sequence_length is a whole number from 1 up", repr(sequence_length), "use 2048")
    _check_shares(batch_size, process_index, process_count)
    tokenizer = tokenizer or load_tokenizer(config.tokenizer)
    path, share = config.path, config.held_out_share
    if split == "eval":
        if isinstance(config.held_out, str):
            path, share = config.held_out, 0.0
        elif not share:
            raise rule_error(
                "Evaluation has data of its own", "no held_out", "use held_out = 0.05, or the path of other data"
            )
    documents = split_documents(tokenised(config, path, tokenizer), share, split)
    common = documents, sequence_length, tokenizer.vocab_size, tokenizer.pad_id or 0
    if documents.tokens.whole and config.pack == "stream":
        raise rule_error(
            "A stream is cut anywhere, and conversations are not",
            f"pack = 'stream' for {documents.tokens.where}",
            "use pack = true, which puts whole ones into a row",
        )
    rows: Rows
    if config.pack is False or documents.tokens.whole:
        rows = WholeRows(*common, packed=config.pack is not False)
    else:
        rows = StreamRows(*common, segments=config.pack is True)
    return RowBatches(
        rows,
        batch_size=batch_size,
        seed=seed,
        shuffle=config.shuffle and split == "train",
        endless=split == "train",
        process_index=process_index,
        process_count=process_count,
        prefetch=config.prefetch,
        workers=config.workers,
        identity={"pack": config.pack},
    )


def _check_shares(batch_size: int, process_index: int, process_count: int) -> None:
    for name, value, least in (("batch_size", batch_size, 1), ("process_count", process_count, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise rule_error(f"{name} is a whole number from {least} up", repr(value), f"use {name} = 8")
    if not 0 <= process_index < process_count:
        raise rule_error(f"process_index is 0 to {process_count - 1}", repr(process_index), "use jax.process_index()")
    if batch_size % process_count:
        raise rule_error(
            "Processes share a batch evenly",
            f"batch_size {batch_size} over {process_count} processes",
            f"use a batch size of {-(-batch_size // process_count) * process_count}",
        )
