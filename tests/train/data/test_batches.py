"""Batches: one order for any number of processes, resumed at any step, read ahead, ended with the interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capibara.models.tokenizer import ByteTokenizer
from capibara.train.data.batches import Batch, RowBatches, open_batches
from capibara.train.data.config import DataConfig
from capibara.train.data.rows import StreamRows
from capibara.train.data.tokens import write_tokens


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A hundred documents of a few words each."""
    file = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    lines = [json.dumps({"text": f"document {number} " * (1 + number % 7)}) for number in range(100)]
    file.write_text("\n".join(lines), encoding="utf-8")
    return str(file)


def _open(path: str, *, batch_size: int = 8, sequence_length: int = 32, seed: int = 3, **options: Any) -> RowBatches:
    places = {name: options.pop(name) for name in ("split", "process_index", "process_count") if name in options}
    config = DataConfig(path, **options)
    return open_batches(config, batch_size=batch_size, sequence_length=sequence_length, seed=seed, **places)


def _take(batches: RowBatches, count: int) -> list[Batch]:
    return [next(batches) for _ in range(count)]


def _equal(left: list[Batch], right: list[Batch]) -> bool:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.keys() == b.keys()
        if any(a[key].dtype != b[key].dtype or not np.array_equal(a[key], b[key]) for key in a):
            return False
    return True


@pytest.mark.quick
def test_any_number_of_processes_reads_the_same_batches(corpus: str) -> None:
    with _open(corpus) as whole:
        steps = len(whole) + 2  # into the second epoch
        wanted = _take(whole, steps)
    for count in (2, 4, 8):
        parts = []
        for index in range(count):
            with _open(corpus, process_index=index, process_count=count) as mine:
                parts.append(_take(mine, steps))
                assert parts[-1][0]["inputs"].shape == (8 // count, 32)
        joined = [
            {key: np.concatenate([part[key] for part in step]) for key in step[0]} for step in zip(*parts, strict=True)
        ]
        assert _equal(joined, wanted)


@pytest.mark.quick
def test_resuming_at_any_step_gives_the_same_batches(corpus: str) -> None:
    with _open(corpus) as batches:
        states, wanted = [], []
        for _ in range(len(batches) + 3):
            states.append(json.loads(json.dumps(batches.state())))
            wanted.append(next(batches))
    with _open(corpus) as resumed:
        for step in (0, 5, 1, len(wanted) - 1, 2):
            resumed.restore(states[step])
            assert _equal([resumed.peek()], [wanted[step]])
            assert resumed.step == step
            assert resumed.state() == states[step]
            assert _equal(_take(resumed, len(wanted) - step), wanted[step:])
    assert len(json.dumps(states[-1])) < 500


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("prefetch", [0, 5])
def test_threads_change_nothing(corpus: str, workers: int, prefetch: int) -> None:
    with _open(corpus) as plain, _open(corpus, workers=workers, prefetch=prefetch) as other:
        assert _equal(_take(plain, 12), _take(other, 12))
    before = set(threading.enumerate())
    with _open(corpus, workers=workers, prefetch=prefetch) as other:
        next(other)
        started = set(threading.enumerate()) - before
        assert len(started) <= workers
        assert bool(started) == bool(workers and prefetch)
    for thread in started:
        thread.join(60)
        assert not thread.is_alive()


def test_as_many_batches_as_asked_for_are_kept_ready(corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    read = StreamRows.__getitem__
    monkeypatch.setattr(StreamRows, "__getitem__", lambda rows, number: (reads.append(number), read(rows, number))[1])
    with _open(corpus, prefetch=3) as batches:
        next(batches)
        deadline = time.monotonic() + 60
        while len(reads) < 4 * 8 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert len(reads) == 4 * 8


@pytest.mark.quick
def test_closed_batches_read_nothing_more(corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapped file that is cut while it is read ends the process: after close it may be."""
    reading: list[int] = []
    read = StreamRows.__getitem__

    def slow(rows: StreamRows, number: int) -> Any:
        reading.append(number)
        time.sleep(0.05)
        row = read(rows, number)
        reading.remove(number)
        return row

    monkeypatch.setattr(StreamRows, "__getitem__", slow)
    batches = _open(corpus, batch_size=1, prefetch=64, workers=3)  # a second of reading
    next(batches)
    assert reading
    batches.close()
    assert not reading
    time.sleep(0.1)
    assert not reading


@pytest.mark.quick
def test_every_epoch_has_all_rows_in_another_order(corpus: str) -> None:
    def rows(batches: list[Batch]) -> list[bytes]:
        return [row.tobytes() for batch in batches for row in batch["inputs"]]

    with _open(corpus, batch_size=1, pack="stream") as batches:
        count = len(batches.rows)
        assert batches.steps_per_epoch == len(batches) == count
        first, second = rows(_take(batches, count)), rows(_take(batches, count))
        assert batches.epoch == 2
        lying = [batches.rows[number]["inputs"].tobytes() for number in range(count)]
    assert first != second
    assert sorted(first) == sorted(second) == sorted(lying)
    assert first != lying
    with _open(corpus, batch_size=1, pack="stream", seed=4) as other:
        assert rows(_take(other, count)) not in (first, second)
    with _open(corpus, batch_size=1, pack="stream", shuffle=False) as unshuffled:
        assert rows(_take(unshuffled, count)) == lying
    with _open(corpus, batch_size=7, pack="stream") as sevens:  # epochs follow each other within a batch
        assert sevens.steps_per_epoch == -(-count // 7)
        assert sevens.steps(2) == -(-2 * count // 7)
        assert rows(_take(sevens, sevens.steps(2)))[: 2 * count] == first + second


@pytest.mark.quick
def test_an_epoch_of_a_stream_has_every_token_once(corpus: str) -> None:
    tokenizer = ByteTokenizer()
    with _open(corpus, batch_size=1, pack="stream", seed=9) as batches:
        targets = [batch["targets"][batch["mask"]] for batch in _take(batches, len(batches))]
    counted = np.bincount(np.concatenate(targets), minlength=tokenizer.vocab_size)
    assert tokenizer.bos_id is not None
    texts = [json.loads(line)["text"] for line in Path(corpus).read_text().splitlines()]
    wanted = np.bincount(np.frombuffer("".join(texts).encode(), np.uint8), minlength=tokenizer.vocab_size)
    wanted[[tokenizer.bos_id, tokenizer.eos_id]] = [99, 100]  # the very first token has none before it
    assert counted.tolist() == wanted.tolist()


@pytest.mark.quick
def test_evaluation_reads_what_training_does_not_once(corpus: str) -> None:
    def texts(batches: RowBatches, count: int) -> list[str]:
        stream = [batch["inputs"][batch["segment_ids"] > 0] for batch in _take(batches, count)]
        decoded = ByteTokenizer().decode(np.concatenate(stream).tolist(), special=True)
        return [text.removesuffix("<|eos|>") for text in decoded.split("<|bos|>") if text]

    options: dict[str, Any] = {"held_out": 0.2, "pack": False, "sequence_length": 200, "batch_size": 3}
    with _open(corpus, **options, split="eval") as batches:
        assert len(batches) == 7
        held = texts(batches, 7)
        assert batches.epoch == 1
        with pytest.raises(StopIteration):
            next(batches)
        batches.rewind()
        assert texts(batches, 7) == held
    with _open(corpus, **options, seed=5, split="eval") as other_seed:
        assert texts(other_seed, 7) == held
    with _open(corpus, **options, shuffle=False) as batches:
        trained = texts(batches, batches.steps_per_epoch)
    assert len(held) == 20
    assert not set(held) & set(trained)
    assert {*held, *trained} == {json.loads(line)["text"] for line in Path(corpus).read_text().splitlines()}
    with pytest.raises(ValueError, match="Evaluation has data of its own"):
        _open(corpus, split="eval")


def test_evaluation_by_another_path(corpus: str, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("something else", encoding="utf-8")
    with _open(corpus, held_out=str(other), split="eval", batch_size=1) as batches:
        (batch,) = batches
    with _open(corpus, held_out=str(other), split="eval") as batches:  # eight rows a batch, and one row
        assert [batch["mask"].any(axis=1).sum() for batch in batches] == [1]
        assert batches.epoch == 1
    assert ByteTokenizer().decode(batch["inputs"][0][:14].tolist()) == "something els"


@pytest.mark.quick
def test_help_texts_are_there_without_a_network() -> None:
    from pydoc_data.topics import topics

    with _open("python:topics", split="eval", pack=False, sequence_length=8, batch_size=1) as batches:
        held = len(batches)
    with _open("python:topics", pack=False, sequence_length=8, batch_size=1) as batches:
        assert len(batches) + held == len(topics)
    assert held == round(0.1 * len(topics))


@pytest.mark.quick
def test_conversations_are_packed_whole_and_count_on_answers(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    said = [f"answer {number}" for number in range(30)]
    turns = [[{"role": "user", "content": "why?"}, {"role": "assistant", "content": text}] for text in said]
    file.write_text("\n".join(json.dumps({"messages": one}) for one in turns), encoding="utf-8")
    tokenizer = ByteTokenizer()
    with _open(str(file), sequence_length=200, batch_size=1) as batches:
        rows = _take(batches, len(batches))
        assert batches.truncated == 0
    assert len(rows) < 30
    with _open(str(file), sequence_length=30, batch_size=1) as short:
        assert short.truncated == 30
    assert max(int(row["segment_ids"].max()) for row in rows) > 1
    answers = tokenizer.decode(np.concatenate([row["targets"][row["mask"]] for row in rows]).tolist(), special=True)
    assert sorted(answers.split("<|eos|>")[:-1]) == sorted(said)
    documents = [
        tokenizer.decode(row["inputs"][row["segment_ids"] == segment].tolist(), special=True)
        for row in rows
        for segment in range(1, int(row["segment_ids"].max()) + 1)
    ]
    whole = [tokenizer.render_chat(one) for one in turns]
    assert sorted(documents) == sorted(text.removesuffix("\n") for text in whole)


@pytest.mark.quick
def test_completions_count_and_prompts_do_not(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "2 + 2 =", "completion": " 4"}), encoding="utf-8")
    with _open(str(file), batch_size=1) as batches:
        batch = next(batches)
    assert ByteTokenizer().decode(batch["targets"][batch["mask"]].tolist(), special=True) == " 4<|eos|>"
    assert batch["inputs"][0, 0] == ByteTokenizer.bos_id


@pytest.mark.parametrize(("add_bos", "add_eos"), [(True, False), (False, True), (False, False)])
def test_bos_and_eos_can_be_left_out(corpus: str, add_bos: bool, add_eos: bool) -> None:
    with _open(corpus, add_bos=add_bos, add_eos=add_eos) as batches:
        ids = np.concatenate([batch["inputs"].ravel() for batch in _take(batches, len(batches))])
    assert ((ids == ByteTokenizer.bos_id).any(), (ids == ByteTokenizer.eos_id).any()) == (add_bos, add_eos)


@pytest.mark.quick(cases="all")
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seed": 4}, "the seed"),
        ({"sequence_length": 16}, "the length of a row"),
        ({"pack": "stream"}, "how documents are packed"),
        ({"shuffle": False}, "whether rows are shuffled"),
        ({"held_out": 0.1}, "which documents are held out"),
        ({"add_eos": False}, "the content of the data"),
        ({"batch_size": 16}, "a batch size that divides 24"),
    ],
)
def test_a_state_of_another_run_is_refused(corpus: str, change: dict[str, Any], told: str) -> None:
    with _open(corpus) as batches:
        _take(batches, 3)
        state = batches.state()
    with _open(corpus, **change) as other:
        with pytest.raises(ValueError, match=told):
            other.restore(state)
        with pytest.raises(ValueError, match="a state of 'wrapped'"):
            other.restore({"kind": "wrapped", "drawn": 3})


def test_a_run_goes_on_with_another_batch_size(corpus: str) -> None:
    with _open(corpus) as batches:
        _take(batches, 4)
        state = batches.state()
        wanted = np.concatenate([batch["inputs"] for batch in _take(batches, 2)])
    with _open(corpus, batch_size=16) as other:
        other.restore(state)
        assert other.step == 2
        assert np.array_equal(next(other)["inputs"], wanted)


def test_a_copy_elsewhere_is_the_same_data(corpus: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(Path(corpus).read_bytes())
    with _open(corpus) as batches, _open(str(copy)) as other:
        next(batches)
        other.restore(batches.state())
        assert _equal(_take(batches, 2), _take(other, 2))


@pytest.mark.quick(cases="all")
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"batch_size": 9, "process_count": 2}, "use a batch size of 10"),
        ({"batch_size": 0}, "batch_size is a whole number"),
        ({"process_index": 2, "process_count": 2}, "process_index is 0 to 1"),
        ({"sequence_length": 0}, "sequence_length is"),
        ({"seed": "x"}, "seed is a whole number"),
        ({"split": "test"}, "Unknown split"),
    ],
)
def test_what_cannot_be_is_refused(corpus: str, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        _open(corpus, **options)


def test_a_fault_is_raised_again_and_no_batch_is_lost(tmp_path: Path) -> None:
    file = write_tokens(tmp_path / "bad.bin", [np.full(35, 7), np.full(1, 300), np.full(84, 8)], 400)
    (tmp_path / "bad.json").write_text('{"dtype": "uint16"}')
    batches = _open(str(file), batch_size=1, sequence_length=10, shuffle=False)
    first = _take(batches, 3)
    for _ in range(3):  # one row has it: the next one is not given in its place
        with pytest.raises(ValueError, match="300 in"):
            next(batches)
    batches.restore({**batches.state(), "next_step": 8})
    assert np.all(next(batches)["inputs"] == 8)
    batches.rewind()
    assert _equal(_take(batches, 3), first)
    batches.close()
    with pytest.raises(ValueError, match="closed"):
        next(batches)


@pytest.mark.quick
def test_threads_end_with_the_interpreter(corpus: str, as_a_reader: dict[str, str]) -> None:
    program = (
        "from capibara.train.data import DataConfig, open_batches\n"
        f"batches = open_batches(DataConfig({corpus!r}), batch_size=8, sequence_length=32)\n"
        "print(next(batches)['inputs'].shape)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=as_a_reader, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "(8, 32)\n"
    assert not done.stderr
