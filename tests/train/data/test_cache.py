"""The token cache: written once by one process, whatever happens to it, and read ever after."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from capibara.models.tokenizer import ByteTokenizer
from capibara.train.data import cache
from capibara.train.data.cache import build_once, cache_directory, tokenised
from capibara.train.data.config import DataConfig
from capibara.train.data.tokens import Tokens, TokenWriter


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(json.dumps({"text": f"text {number}"}) for number in range(50)), encoding="utf-8")
    return DataConfig(str(file), cache_dir=str(tmp_path / "cache"))


class Counting(ByteTokenizer):
    """Counts what it is asked to tokenise."""

    calls = 0

    def encode_batch(self, texts: object, *, special: bool = False) -> list[np.ndarray]:  # type: ignore[override]
        self.calls += 1
        return super().encode_batch(texts, special=special)  # type: ignore[arg-type]


def _entries(config: DataConfig) -> list[Path]:
    assert config.cache_dir
    return sorted(path for path in Path(config.cache_dir).iterdir() if path.is_dir())


def _same(left: Tokens, right: Tokens) -> bool:
    return bool(np.array_equal(left.ids, right.ids) and np.array_equal(left.starts, right.starts))


@pytest.mark.quick
def test_text_is_tokenised_once_and_again_when_something_changed(config: DataConfig) -> None:
    tokenizer = Counting()
    first = tokenised(config, config.path, tokenizer)
    assert _same(first, tokenised(config, config.path, tokenizer))
    assert tokenizer.calls == 1
    assert isinstance(first.ids, np.memmap)
    os.utime(config.path, ns=(1, 1))
    again = tokenised(config, config.path, tokenizer)
    assert tokenizer.calls == 2
    assert again.fingerprint == first.fingerprint, "the same content, whenever it was written"
    tokenised(config, config.path, Counting(chat_template="{{ messages }}"))
    assert len(_entries(config)) == 3


def test_by_content_a_touched_file_is_the_same_and_a_changed_one_is_not(config: DataConfig) -> None:
    config = DataConfig(config.path, cache_dir=config.cache_dir, fingerprint="content")
    tokenizer, file = Counting(), Path(config.path)
    tokenised(config, config.path, tokenizer)
    os.utime(file, ns=(1, 1))
    tokenised(config, config.path, tokenizer)
    assert tokenizer.calls == 1
    times = file.stat()
    file.write_text(file.read_text().replace("text 7", "text x"))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # same size, same times
    tokenised(config, config.path, tokenizer)
    assert tokenizer.calls == 2


@pytest.mark.quick
def test_an_entry_that_was_cut_is_made_again(config: DataConfig, caplog: pytest.LogCaptureFixture) -> None:
    first = tokenised(config, config.path, ByteTokenizer())
    content = np.array(first.ids)
    (entry,) = _entries(config)
    (entry / "tokens.bin").write_bytes(b"12")
    assert np.array_equal(tokenised(config, config.path, ByteTokenizer()).ids, content)
    assert "is not whole, and is made again" in caplog.text


def test_a_fault_leaves_nothing_behind(config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(writer: TokenWriter, encoded: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(TokenWriter, "add", full)
        with pytest.raises(OSError, match="No space left") as caught:
            tokenised(config, config.path, ByteTokenizer())
    assert "choose another with cache_dir" in caught.value.__notes__[0]
    assert not _entries(config)
    assert tokenised(config, config.path, ByteTokenizer()).documents == 50


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_directory("~/x") == Path.home() / "x"
    monkeypatch.setenv("CAPIBARA_CACHE_DIR", str(tmp_path))
    assert cache_directory() == tmp_path / "tokens"
    monkeypatch.delenv("CAPIBARA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "capibara" / "tokens"


PROGRAM = """
import sys, time
from pathlib import Path
from capibara.train.data.cache import build_once

root, seconds = Path(sys.argv[1]), float(sys.argv[2])

def build(folder):
    with open(root.parent / "log", "a") as log:
        log.write("begun\\n")
    (folder / "data").write_text("half")
    time.sleep(seconds)
    (folder / "data").write_text("whole")

print((build_once(root, "key", build) / "data").read_text())
"""


def _start(tmp_path: Path, seconds: float, environment: dict[str, str]) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", PROGRAM, str(tmp_path / "root"), str(seconds)]
    return subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.quick
def test_of_two_processes_one_writes_and_the_other_waits(tmp_path: Path, as_a_reader: dict[str, str]) -> None:
    processes = [_start(tmp_path, 1.0, as_a_reader) for _ in range(2)]
    for process in processes:
        out, errors = process.communicate(timeout=60)
        assert out == "whole\n", errors
    assert (tmp_path / "log").read_text() == "begun\n"


@pytest.mark.quick
def test_a_writer_that_is_killed_frees_the_others(tmp_path: Path, as_a_reader: dict[str, str]) -> None:
    doomed = _start(tmp_path, 600, as_a_reader)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "root").glob("key.part-*/data")) and time.monotonic() < deadline:
        time.sleep(0.02)
    other = _start(tmp_path, 0, as_a_reader)
    time.sleep(0.2)
    doomed.send_signal(signal.SIGKILL)
    out, errors = other.communicate(timeout=60)
    assert out == "whole\n", errors
    doomed.wait(60)
    assert (tmp_path / "log").read_text() == "begun\nbegun\n"
    assert [path.name for path in (tmp_path / "root").iterdir() if path.is_dir()] == ["key"]


def test_long_work_shows_that_it_goes_on(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache, "_PATIENCE", -1.0)
    caplog.set_level("INFO")
    tokenised(config, config.path, ByteTokenizer())
    assert caplog.text.count(f"Tokenising {config.path}") == 1


def test_a_terminal_gets_a_bar(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cache, "_PATIENCE", -1.0)
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    monkeypatch.setenv("COLUMNS", "200")
    tokenised(config, config.path, ByteTokenizer())
    assert f"Tokenising {config.path}" in capsys.readouterr().err


def test_an_error_of_the_builder_is_its_own(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        build_once(tmp_path, "key", build)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
