"""Rows: which token is where, against a few lines of plain Python."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capibara.train.data.rows import Row, StreamRows, WholeRows, first_fit
from capibara.train.data.split import Documents, split
from capibara.train.data.tokens import Tokens

VOCAB, PAD = 1 << 20, 7


def _tokens(lengths: list[int], whole: bool = False, masks: list[list[bool]] | None = None) -> Tokens:
    """Documents of these lengths whose ids are 100, 101, ... over all of them, so that an id says where it is from."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids = np.arange(100, 100 + starts[-1], dtype=np.uint32)
    mask = None if masks is None else np.array([bit for one in masks for bit in one], np.uint8)
    return Tokens(ids, starts, "test", "fingerprint", mask=mask, whole=whole, checked=True)


def _documents(lengths: list[int], **options: object) -> Documents:
    return split(_tokens(lengths, **options), 0.0, "train")  # type: ignore[arg-type]


def _pairs(row: Row) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b, m in zip(row["inputs"], row["targets"], row["mask"], strict=True) if m]


LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(lambda lengths: sum(lengths) >= 2)


@pytest.mark.quick
@given(LENGTHS, st.integers(1, 9))
def test_a_stream_has_every_token_once(lengths: list[int], length: int) -> None:
    documents = _documents(lengths)
    rows = StreamRows(documents, length, VOCAB, PAD, segments=False)
    total = sum(lengths)
    pairs = [pair for number in range(len(rows)) for pair in _pairs(rows[number])]
    assert pairs == [(100 + place, 101 + place) for place in range(total - 1)]
    for number in range(len(rows)):
        row = rows[number]
        assert sorted(row) == ["inputs", "mask", "positions", "targets"]
        count = int(row["mask"].sum())
        assert row["positions"][:count].tolist() == list(range(count))
        assert np.all(row["inputs"][count:] == PAD)
        assert all(len(values) == length for values in row.values())


@pytest.mark.quick
@given(LENGTHS, st.integers(1, 9))
def test_packed_rows_keep_to_their_documents(lengths: list[int], length: int) -> None:
    documents = _documents(lengths)
    rows = StreamRows(documents, length, VOCAB, PAD, segments=True)
    of = [number for number, count in enumerate(lengths) for _ in range(count)]  # the document of each token
    seen = []
    for number in range(len(rows)):
        row = rows[number]
        segment, position, last = 0, 0, None
        for place in range(length):
            token = int(row["inputs"][place]) - 100
            if row["segment_ids"][place] == 0:  # padding, at the end alone
                assert not row["mask"][place:].any()
                assert not row["segment_ids"][place:].any()
                break
            assert token == number * length + place
            document = of[token]
            segment, position = (segment, position + 1) if document == last else (segment + 1, 0)
            last = document
            assert row["segment_ids"][place] == segment
            assert row["positions"][place] == position
            inside = token + 1 < len(of) and of[token + 1] == document
            assert bool(row["mask"][place]) == inside
        seen += _pairs(rows[number])
    assert seen == [(100 + t, 101 + t) for t in range(len(of) - 1) if of[t] == of[t + 1]]


@pytest.mark.quick
@pytest.mark.parametrize("packed", [True, False])
def test_whole_rows_have_every_document_once_and_cut_long_ones(packed: bool) -> None:
    @given(LENGTHS.filter(lambda lengths: max(lengths) > 1), st.integers(1, 9), st.data())
    def check(lengths: list[int], length: int, data: st.DataObject) -> None:
        masks = [data.draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in lengths]
        documents = _documents(lengths, whole=True, masks=masks)
        rows = WholeRows(documents, length, VOCAB, PAD, packed=packed)
        flat = [bit for one in masks for bit in one]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        wanted = {
            tuple(range(100 + start, 100 + start + min(count, length + 1)))
            for start, count in zip(starts.tolist(), lengths, strict=False)
            if count > 1
        }
        seen = []
        for number in range(len(rows)):
            row = rows[number]
            last = int(row["segment_ids"].max())
            assert last == 1 or packed
            for segment in range(1, last + 1):
                here = row["segment_ids"] == segment
                inputs, targets = row["inputs"][here], row["targets"][here]
                seen.append((*inputs.tolist(), int(targets[-1])))
                assert row["positions"][here].tolist() == list(range(len(inputs)))
                assert row["mask"][here].tolist() == [flat[target - 100] for target in targets]
            assert not row["mask"][row["segment_ids"] == 0].any()
        assert len(seen) == len(wanted)
        assert set(seen) == wanted
        assert rows.truncated == sum(count > length + 1 for count in lengths)
        assert rows.truncated_tokens == sum(max(count - length - 1, 0) for count in lengths)

    check()


def test_cutting_is_said(caplog: pytest.LogCaptureFixture, nothing_said_yet: None) -> None:
    WholeRows(_documents([3, 9, 20]), 4, VOCAB, PAD, packed=True)
    assert "2 of 3 documents are longer than a row of 4 tokens and are cut; 19 tokens are left out" in caplog.text


@pytest.mark.quick
@given(st.lists(st.integers(1, 10), min_size=1, max_size=60), st.integers(1, 20))
def test_first_fit(lengths: list[int], window: int) -> None:
    order, firsts = first_fit(lengths, 10, window)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    rows = [order[a:b].tolist() for a, b in itertools.pairwise(firsts)]
    assert all(rows), "no row is empty"
    assert all(sum(lengths[document] for document in row) <= 10 for row in rows)
    assert len({document // window for document in order}) <= len(rows)
    if window >= len(lengths):
        for later, row in enumerate(rows):  # the first document of a row fitted into none before it
            for earlier in rows[:later]:
                before = sum(lengths[document] for document in earlier if document < row[0])
                assert before + lengths[row[0]] > 10


@pytest.mark.quick
@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.sampled_from([0.05, 0.1, 0.3, 0.5]), st.booleans())
def test_what_is_held_out_is_never_trained_on(lengths: list[int], share: float, hashed: bool) -> None:
    tokens = _tokens(lengths)
    if hashed:
        tokens = Tokens(tokens.ids, tokens.starts, "", "", hashes=np.array(lengths, np.uint64), checked=True)

    def ids(part: str) -> set[int]:
        documents = split(tokens, share, part)
        return {
            int(id)
            for number in range(len(documents))
            for id in documents.read(
                tokens.ids, number, number + 1, int(documents.offsets[number]), int(documents.offsets[number + 1])
            )
        }

    try:
        train, held = ids("train"), ids("eval")
    except ValueError as error:
        assert "Some data is left" in str(error)  # noqa: PT017
        return
    assert not train & held
    assert train | held == set(tokens.ids.tolist())
    assert held


@pytest.mark.quick
def test_copies_of_a_document_are_on_one_side() -> None:
    hashes = np.array([5, 3, 3, 3, 9, 8], np.uint64)
    tokens = Tokens(np.arange(12, dtype=np.uint16), np.arange(0, 13, 2), "", "", hashes=hashes)
    assert split(tokens, 0.2, "eval").begins.tolist() == [2, 4, 6]
    assert split(tokens, 0.2, "train").begins.tolist() == [0, 8, 10]


def test_a_share_of_one_long_document_is_its_end() -> None:
    tokens = _tokens([100])
    assert split(tokens, 0.1, "eval").begins.tolist() == [90]
    assert split(tokens, 0.1, "train").total == 90
    whole = _tokens([100], whole=True)
    with pytest.raises(ValueError, match="at least one conversation"):
        split(whole, 0.1, "eval")


def test_ids_beyond_the_vocabulary_are_refused() -> None:
    tokens = Tokens(np.array([1, 2, 300, 4], np.uint16), np.array([0, 4]), "file.bin", "")
    rows = StreamRows(split(tokens, 0.0, "train"), 2, 259, PAD, segments=True)
    with pytest.raises(ValueError, match=r"0 to 258.*300 in file.bin"):
        rows[0]
    negative = Tokens(np.array([1, -1, 3]), np.array([0, 3]), "file.npy", "")
    with pytest.raises(ValueError, match=r"-1 in file.npy"):
        StreamRows(split(negative, 0.0, "train"), 2, 259, PAD, segments=True)[0]
