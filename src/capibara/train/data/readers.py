"""Files as texts and records: what is read, before anything is tokenised.

A fault names its place: file and byte of what is not UTF-8, file and line of what is no JSON, file and row of what has
no text.
"""

from __future__ import annotations

import codecs
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from capibara.distribution import NAME
from capibara.errors import rule_error, unknown_name
from capibara.train.data.files import opened

__all__ = ["Faults", "Record", "Text", "read_records", "read_texts", "topics"]

_log = logging.getLogger(__name__)

_PIECE = 4 << 20  # bytes of a text file that are tokenised at a time


@dataclass(frozen=True)
class Text:
    """A document, or a piece of one that is too large to be tokenised at once."""

    text: str
    begins: bool = True
    ends: bool = True


@dataclass(frozen=True)
class Record:
    """A line of JSONL or a row of a table, and where it is."""

    where: str
    values: Mapping[str, Any]


@dataclass
class Faults:
    """What to do about a document that cannot be read: raise, or leave it out and count."""

    skip: bool = False
    count: int = 0
    examples: list[str] = field(default_factory=list)

    def take(self, error: ValueError) -> None:
        if not self.skip:
            raise error
        self.count += 1
        if len(self.examples) < 3:
            self.examples.append(str(error))


def topics() -> Iterator[Text]:
    """Python's help texts, one document a topic, in order of their names."""
    from pydoc_data.topics import topics as texts

    for name in sorted(texts):
        yield Text(texts[name])


def read_texts(files: Sequence[Path], faults: Faults, advance: Callable[[int], None]) -> Iterator[Text]:
    """Files of text, one document a file."""
    for file in files:
        if faults.skip:  # a file that turns out bad half-way is left out whole
            try:
                pieces = list(_pieces(file))
            except ValueError as error:
                faults.take(error)
                pieces = []
            yield from pieces
        else:
            yield from _pieces(file)
        advance(file.stat().st_size)


def _pieces(file: Path) -> Iterator[Text]:
    """A file in pieces that end where a line does: there no tokenizer of words joins letters of both sides."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    rest, begins, offset = "", True, 0
    with opened(file) as data:
        while block := data.read(_PIECE):
            if offset == 0 and block.startswith(codecs.BOM_UTF8):
                block = block[3:]
                offset = 3
            rest += _decoded(decoder, block, file, offset)
            offset += len(block)
            cut = rest.rfind("\n") + 1
            if cut and len(rest) > _PIECE // 2:
                yield Text(rest[:cut], begins=begins, ends=False)
                rest, begins = rest[cut:], False
        rest += _decoded(decoder, b"", file, offset, final=True)
    yield Text(rest, begins=begins, ends=True)


def _decoded(decoder: codecs.IncrementalDecoder, block: bytes, file: Path, offset: int, final: bool = False) -> str:
    waiting = len(decoder.getstate()[0])  # bytes of a character that the last block ended within
    try:
        return decoder.decode(block, final)
    except UnicodeDecodeError as error:
        raise _not_utf8(f"{file}, byte {offset - waiting + error.start}", error) from error


def _not_utf8(where: str, error: UnicodeDecodeError) -> ValueError:
    byte = error.object[error.start]
    return rule_error(
        "Text is UTF-8",
        f"{where}: 0x{byte:02x} ({error.reason})",
        "convert it (iconv -f latin1 -t utf-8), or leave such files out with on_invalid = 'skip'",
    )


def read_records(
    files: Sequence[Path], format: str, text_key: str | None, faults: Faults, advance: Callable[[int], None]
) -> Iterator[Record]:
    """Records of JSONL, Parquet or Arrow files, in order."""
    for file in files:
        if format == "jsonl":
            yield from _lines(file, faults, advance)
        else:
            yield from _rows(file, format, text_key, advance)


def _lines(file: Path, faults: Faults, advance: Callable[[int], None]) -> Iterator[Record]:
    with opened(file) as data:
        for number, line in enumerate(data, 1):
            advance(len(line))
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            where = f"{file}:{number}"
            try:
                yield Record(where, _json_object(line, where))
            except ValueError as error:
                faults.take(error)


def _json_object(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        values = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _not_utf8(f"{where}, byte {error.start} of the line", error) from error
    except (ValueError, RecursionError) as error:
        raise rule_error(
            "A line of JSONL is a JSON object", f"{where}: {error} in {_excerpt(line)}", "mend the line, or delete it"
        ) from error
    if not isinstance(values, dict):
        raise rule_error("A line of JSONL is a JSON object", f"{where}: {_excerpt(line)}", 'write {"text": ...}')
    return values


def _excerpt(line: bytes) -> str:
    text = line.strip().decode("utf-8", "replace")
    return repr(text if len(text) <= 60 else text[:57] + "...")


_WANTED = ("text", "messages", "prompt", "completion")
_WITH_THEM = ("tools",)  # what a chat template may read beside the messages


def _rows(file: Path, format: str, text_key: str | None, advance: Callable[[int], None]) -> Iterator[Record]:
    """Rows of a table, a batch in memory at a time, and of its columns those that are read."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ImportError(f"Parquet and Arrow files need pyarrow: pip install '{NAME}[arrow]'") from error
    size, number, source = file.stat().st_size, 0, None
    try:
        if format == "parquet":
            source = pq.ParquetFile(file)
            columns = _columns(source.schema_arrow.names, text_key, file)
            batches, parts = source.iter_batches(batch_size=1024, columns=columns), -(-source.metadata.num_rows // 1024)
        else:
            source = pa.memory_map(str(file))
            batches, parts, names = _arrow_batches(pa, source)
            columns = _columns(names, text_key, file)
        for batch in batches:
            for values in batch.select(columns).to_pylist():
                number += 1
                yield Record(f"{file}, row {number}", values)
            advance(size // max(parts, 1))
    except (pa.ArrowInvalid, OSError) as error:
        raise rule_error(
            f"A {format} file is whole", f"{file} after row {number}: {str(error).splitlines()[0]}", "copy it again"
        ) from error
    finally:
        if source is not None:
            source.close()


def _arrow_batches(pa: Any, source: Any) -> tuple[Iterator[Any], int, list[str]]:
    """An Arrow file (Feather) or stream, as Hugging Face's datasets writes them."""
    try:
        reader = pa.ipc.open_file(source)
    except pa.ArrowInvalid:
        source.seek(0)
        stream = pa.ipc.open_stream(source)
        return iter(stream), 1, list(stream.schema.names)
    count = reader.num_record_batches
    return (reader.get_batch(i) for i in range(count)), count, list(reader.schema.names)


def _columns(names: Sequence[str], text_key: str | None, file: Path) -> list[str]:
    if text_key is not None:
        if text_key not in names:
            raise unknown_name(f"column of {file}", text_key, names)
        return [text_key, *(name for name in _WITH_THEM if name in names)]
    known = [name for name in _WANTED if name in names]
    if not known:
        raise rule_error(
            "A table of training data has a column text, messages, or prompt and completion",
            f"{file} with {', '.join(names) or 'none'}",
            f"name the column: text_key = {names[0]!r}" if names else "take another file",
        )
    return [*known, *(name for name in _WITH_THEM if name in names)]
