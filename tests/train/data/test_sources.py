"""Files in every format become the same tokens; a fault of a file is named by its place."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capibara.models.tokenizer import ByteTokenizer
from capibara.train.data import readers
from capibara.train.data.batches import open_batches
from capibara.train.data.config import DataConfig
from capibara.train.data.tokens import write_tokens

TEXTS = ["first document", "zweites Döcument €", "the third\nwith two lines"]


def _read(path: Path | str, **options: Any) -> list[str]:
    """The documents of some data, as training reads them."""
    config = DataConfig(str(path), pack=False, shuffle=False, workers=0, **options)
    with open_batches(config, batch_size=1, sequence_length=200) as batches:
        rows = [next(batches) for _ in range(batches.steps_per_epoch)]
    return [ByteTokenizer().decode(row["targets"][row["segment_ids"] > 0].tolist()) for row in rows]


def _jsonl(file: Path, records: list[dict[str, Any]]) -> Path:
    data = "\n".join(map(json.dumps, records)).encode()
    file.write_bytes(gzip.compress(data) if file.suffix == ".gz" else data)
    return file


def _text(folder: Path) -> Path:
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_bytes(text.encode())
    return folder


def _table(file: Path, key: str = "text") -> Path:
    import pyarrow as pa
    import pyarrow.feather
    import pyarrow.parquet

    table = pa.table({"id": [1, 2, 3], key: TEXTS})
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(table, file, row_group_size=2)
    elif file.suffix == ".feather":
        pyarrow.feather.write_feather(table, file)
    else:  # a stream, as Hugging Face's datasets writes it
        with pa.OSFile(str(file), "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return file


def _ids(text: str) -> list[int]:
    return [ByteTokenizer.bos_id, *text.encode(), ByteTokenizer.eos_id]


def _bin(folder: Path) -> Path:
    return write_tokens(folder / "tokens.bin", [np.array(_ids(text)) for text in TEXTS], 259)


def _npy(folder: Path) -> Path:
    np.save(folder / "tokens.npy", np.concatenate([_ids(text) for text in TEXTS]))
    return folder / "tokens.npy"


def _bare_bin(folder: Path) -> Path:
    file = _bin(folder)
    file.with_suffix(".json").write_text('{"dtype": "uint16"}')
    return file


def _shards(folder: Path) -> Path:
    for number, text in enumerate(TEXTS):
        write_tokens(folder / f"{number}.bin", [np.array(_ids(text))], 259)
    return folder


SOURCES: dict[str, Callable[[Path], Any]] = {
    "folder": lambda folder: _text(folder / "texts"),
    "glob": lambda folder: _text(folder / "texts") / "**" / "*.txt",
    "jsonl": lambda folder: _jsonl(folder / "x.jsonl", [{"text": text} for text in TEXTS]),
    "jsonl.gz": lambda folder: _jsonl(folder / "x.jsonl.gz", [{"text": text} for text in TEXTS]),
    "parquet": lambda folder: _table(folder / "x.parquet"),
    "feather": lambda folder: _table(folder / "x.feather"),
    "arrow": lambda folder: _table(folder / "x.arrow"),
    "bin": _bin,
    "bin without documents": _bare_bin,
    "npy": _npy,
    "shards": _shards,
}


@pytest.mark.quick(cases="all")
@pytest.mark.parametrize("name", SOURCES)
def test_every_format_has_the_same_documents(tmp_path: Path, name: str) -> None:
    assert _read(SOURCES[name](tmp_path)) == TEXTS


@pytest.mark.quick
def test_a_key_can_be_named(tmp_path: Path) -> None:
    file = _jsonl(tmp_path / "x.jsonl", [{"body": text, "text": "no"} for text in TEXTS])
    assert _read(file, text_key="body") == TEXTS
    assert _read(_table(tmp_path / "x.parquet", key="body"), text_key="body") == TEXTS
    with pytest.raises(ValueError, match=r"Unknown column .*'bodi'. Did you mean 'body'"):
        _read(tmp_path / "x.parquet", text_key="bodi")
    with pytest.raises(ValueError, match=r"Every record has 'bodi'. Got .*x.jsonl:1 with 'body', 'text'.*'body'"):
        _read(file, text_key="bodi")
    with pytest.raises(ValueError, match=r"a column text, .* with id, body"):
        _read(tmp_path / "x.parquet")


def test_a_format_can_be_named(tmp_path: Path) -> None:
    file = tmp_path / "notes.log"
    file.write_text("some notes", encoding="utf-8")
    assert _read(file, format="text") == ["some notes"]
    with pytest.raises(ValueError, match="known by its suffix"):
        _read(file)
    (tmp_path / "x.txt").write_text("a")
    (tmp_path / "x.jsonl").write_text("{}")
    with pytest.raises(ValueError, match="with jsonl and text"):
        _read(tmp_path)
    assert _read(tmp_path, format="text") == ["a"]
    with pytest.raises(ValueError, match=r"A folder of parquet has files ending in .parquet"):
        _read(tmp_path, format="parquet")


def test_a_large_file_is_one_document_though_it_is_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "_PIECE", 16)
    text = "a line of €uros\nanother\n" * 6
    file = tmp_path / "large.txt"
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert _read(file) == [text]
    file.write_bytes(text.encode() + b"\xff rest")
    with pytest.raises(ValueError, match=rf"large.txt, byte {len(text.encode())}: 0xff"):
        _read(file)


def _cut(file: Path, keep: float = 0.6) -> Path:
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep)])
    return file


def _written(file: Path, data: bytes | str) -> Path:
    file.write_bytes(data.encode() if isinstance(data, str) else data)
    return file


FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda folder: folder / "no.txt", "which is not there"),
    "empty folder": (lambda folder: folder, "where there is none"),
    "empty glob": (lambda folder: folder / "*.txt", "where there is none"),
    "empty file": (lambda folder: _written(folder / "x.txt", ""), "Training data has text"),
    "empty lines": (lambda folder: _written(folder / "x.jsonl", "\n\n"), "Training data has text"),
    "empty npy": (lambda folder: (np.save(folder / "x.npy", np.zeros(0, int)), folder / "x.npy")[1], "is empty"),
    "latin": (lambda folder: _written(folder / "x.txt", "Grüße".encode("latin-1")), r"x.txt, byte 2: 0xfc"),
    "half a character": (lambda folder: _written(folder / "x.txt", "a€".encode()[:-1]), r"x.txt, byte 1: 0xe2"),
    "latin line": (
        lambda folder: _written(folder / "x.jsonl", b'{"text": "a"}\n{"text": "\xfc"}'),
        r"x.jsonl:2, byte 10",
    ),
    "no json": (lambda folder: _written(folder / "x.jsonl", '{"text": "a"}\n{"text": '), r"x.jsonl:2: "),
    "no object": (lambda folder: _written(folder / "x.jsonl", '["a"]'), r"JSON object. Got .*x.jsonl:1"),
    "no key": (
        lambda folder: _jsonl(folder / "x.jsonl", [{"text": "a"}, {"txt": "b"}]),
        r"x.jsonl:2 with 'txt'.*'txt'",
    ),
    "no known key": (
        lambda folder: _jsonl(folder / "x.jsonl", [{"txt": "b"}]),
        r"x.jsonl:1 with txt.*text_key = 'txt'",
    ),
    "no text": (lambda folder: _jsonl(folder / "x.jsonl", [{"text": 3}]), r"'text' of every record is text. Got .*: 3"),
    "no answer": (
        lambda folder: _jsonl(folder / "x.jsonl", [{"messages": [{"role": "user", "content": "a"}]}]),
        r"an answer of the assistant. Got .*x.jsonl:1",
    ),
    "no turn": (lambda folder: _jsonl(folder / "x.jsonl", [{"messages": [{"role": "user"}]}]), r"x.jsonl:1: turn 0"),
    "cut gz": (
        lambda folder: _cut(_jsonl(folder / "x.jsonl.gz", [{"text": str(n) * n} for n in range(99)])),
        r"gz file is whole. Got .*x.jsonl.gz",
    ),
    "cut parquet": (lambda folder: _cut(_table(folder / "x.parquet")), r"parquet file is whole. Got .*x.parquet"),
    "cut feather": (lambda folder: _cut(_table(folder / "x.feather")), r"arrow file is whole. Got .*x.feather"),
    "cut arrow": (lambda folder: _cut(_table(folder / "x.arrow")), r"arrow file is whole. Got .*x.arrow"),
    "cut bin": (lambda folder: _cut(_bin(folder), 0.5), r"holds 65 ids of 2 bytes each. Got 65 bytes"),
    "odd bin": (lambda folder: _cut(_bare_bin(folder), 0.5), r"whole ids of 2 bytes each. Got 65 bytes"),
    "cut npy": (lambda folder: _cut(_npy(folder)), r"A .npy file is a whole array. Got .*tokens.npy"),
    "floats": (lambda folder: (np.save(folder / "x.npy", np.zeros(4)), folder / "x.npy")[1], r"float64\[4\]"),
    "no sidecar": (lambda folder: _written(folder / "x.bin", b"1234"), r"x.bin has x.json beside it"),
    "odd sidecar": (
        lambda folder: (_bin(folder), _written(folder / "tokens.json", '{"dtype": "int8"}'), folder / "tokens.bin")[2],
        r"Unknown dtype .*'int8'",
    ),
    "odd key": (
        lambda folder: (
            _bin(folder),
            _written(folder / "tokens.json", '{"dtype": "uint16", "vocab": 3}'),
            folder / "tokens.bin",
        )[2],
        r"Unknown key .*'vocab'. Did you mean 'vocab_size'",
    ),
    "large ids": (
        lambda folder: write_tokens(folder / "x.bin", [np.array([1, 2, 300])], 400),
        "written for a vocabulary of 400",
    ),
}


@pytest.mark.quick(cases="all")
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_named_by_their_place(tmp_path: Path, name: str) -> None:
    build, told = FAULTS[name]
    with pytest.raises(ValueError, match=told):
        _read(build(tmp_path))


@pytest.mark.quick
def test_what_is_invalid_can_be_left_out_and_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = _written(tmp_path / "x.jsonl", b'{"text": "a"}\n{"text": \n{"txt": "b"}\n{"text": "\xfc"}\n{"text": "c"}')
    assert _read(file, on_invalid="skip") == ["a", "c"]
    assert "3 documents left out" in caplog.text
    assert "x.jsonl:2" in caplog.text
    folder = _text(tmp_path / "texts")
    (folder / "1.txt").write_bytes(b"fine at first \xff")
    assert _read(folder, on_invalid="skip") == [TEXTS[0], TEXTS[2]]


def test_documents_without_text_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert _read(_jsonl(tmp_path / "x.jsonl", [{"text": text} for text in ("", "a", "", "b")])) == ["a", "b"]
    assert "2 documents have no text" in caplog.text


def test_tools_go_to_the_chat_template(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file = _jsonl(tmp_path / "x.jsonl", [{"messages": turns, "tools": [{"name": "clock"}]}])
    template = (
        "{% for tool in tools %}{{ tool.name }}{% endfor %}{% for m in messages %}|{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}|{% endif %}"
    )
    tokenizer = ByteTokenizer(chat_template=template)
    with open_batches(DataConfig(str(file)), tokenizer=tokenizer, batch_size=1, sequence_length=9) as batches:
        batch = next(batches)
    assert tokenizer.decode(batch["inputs"][batch["segment_ids"] > 0].tolist()) == "clock|a|"
    assert tokenizer.decode(batch["targets"][batch["mask"]].tolist()) == "b"
    with pytest.raises(ValueError, match="A stream is cut anywhere"):
        open_batches(DataConfig(str(file), pack="stream"), tokenizer=tokenizer, batch_size=1, sequence_length=9)


def test_a_row_a_document(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.array([[65, 66, 67], [68, 69, 70]], np.int32))
    assert _read(tmp_path / "rows.npy") == ["BC", "EF"]


def test_where_documents_begin_is_part_of_the_data(tmp_path: Path) -> None:
    def state(name: str, documents: list[list[int]]) -> dict[str, Any]:
        file = write_tokens(tmp_path / name, [np.array(ids) for ids in documents], 259)
        with open_batches(DataConfig(str(file)), batch_size=1, sequence_length=4) as batches:
            return batches.state()

    one = state("one.bin", [[1, 2, 3], [4, 5, 6]])
    assert one == state("copy.bin", [[1, 2, 3], [4, 5, 6]])
    assert one["data"] != state("other.bin", [[1, 2], [3, 4, 5, 6]])["data"]


def test_tokens_of_another_tokenizer_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, nothing_said_yet: None
) -> None:
    ids = [np.array(_ids("abc"))]
    assert _read(write_tokens(tmp_path / "same.bin", ids, 259, ByteTokenizer().fingerprint)) == ["abc"]
    assert not caplog.text
    assert _read(write_tokens(tmp_path / "other.bin", ids, 259, "hf-1-0123")) == ["abc"]
    assert "was tokenised by hf-1-0123" in caplog.text


def test_a_mask_of_ones_own(tmp_path: Path) -> None:
    file = write_tokens(tmp_path / "x.bin", [np.array([65, 66, 67, 68])], 259)
    about = json.loads((tmp_path / "x.json").read_text())
    (tmp_path / "x.mask.bin").write_bytes(bytes([0, 0, 1, 0]))
    (tmp_path / "x.json").write_text(json.dumps({**about, "mask": "x.mask.bin"}))
    with open_batches(DataConfig(str(file)), batch_size=1, sequence_length=4) as batches:
        batch = next(batches)
    assert batch["targets"][batch["mask"]].tolist() == [67]
    (tmp_path / "x.mask.bin").write_bytes(bytes([0, 0, 1]))
    with pytest.raises(ValueError, match=r"a byte a token, 4. Got 3"):
        open_batches(DataConfig(str(file)), batch_size=1, sequence_length=4)


@pytest.mark.quick(cases="all")
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"path": ""}, "path names the data"),
        ({"format": "json"}, "Did you mean 'jsonl'"),
        ({"pack": "streem"}, "pack is True"),
        ({"pack": 1}, "pack is True"),
        ({"held_out": 1.0}, "held_out is a share"),
        ({"held_out": True}, "held_out is a share or a path"),
        ({"prefetch": -1}, "prefetch is"),
        ({"workers": 1.5}, "workers is"),
        ({"shuffle": "yes"}, "shuffle is true or false"),
        ({"fingerprint": "name"}, "Unknown fingerprint"),
        ({"on_invalid": "ignore"}, "Unknown on_invalid"),
        ({"text_key": 3}, "text_key is text"),
    ],
)
def test_a_config_says_what_is_wrong_with_it(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        DataConfig(**{"path": "x.txt", **options})
