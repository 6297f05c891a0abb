"""The token cache: text is tokenised once, and read from memory-mapped files ever after.

An entry is a folder named by what it was made from (files, tokenizer, options). It is written aside and renamed when it
is whole. Of several processes that start at once one writes, and the others wait for it; one that dies while it writes
frees the others, and leaves nothing that anybody would read. Entries are kept until somebody deletes them, which is
safe at any time but while one is being read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from capibara.errors import rule_error, say_once
from capibara.models.tokenizer import Tokenizer
from capibara.train.data import files as data_files
from capibara.train.data.config import DataConfig
from capibara.train.data.documents import Encoded, encode_records, encode_texts
from capibara.train.data.readers import Faults, read_records, read_texts, topics
from capibara.train.data.tokens import Tokens, TokenWriter, join_tokens, open_tokens

__all__ = ["build_once", "cache_directory", "tokenised"]

_log = logging.getLogger(__name__)
_FORMAT = 1  # grows when the same files and options would give other tokens
_PATIENCE = 2.0  # seconds after which work is worth a progress bar


def cache_directory(chosen: str | None = None) -> Path:
    """Where tokens are kept: as chosen, else $CAPIBARA_CACHE_DIR, else the platform's cache folder."""
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("CAPIBARA_CACHE_DIR")
    if base:
        return Path(base) / "tokens"
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "capibara" / "tokens"


def tokenised(config: DataConfig, path: str, tokenizer: Tokenizer) -> Tokens:
    """The tokens of a path: of text or records from the cache, or made now; of a file of tokens as they are."""
    if path == data_files.TOPICS:
        listed: list[Path] = []
        format, source = "topics", _digest([text.text for text in topics()])
    else:
        listed, format = data_files.resolve(path, config.format)
        if format == "tokens":
            return join_tokens([_as_they_are(file, tokenizer) for file in listed])
        source = data_files.fingerprint(listed, config.fingerprint)
    options = config.text_key, config.add_bos, config.add_eos, config.on_invalid
    key = _digest([_FORMAT, source, format, tokenizer.fingerprint, *options])
    root = cache_directory(config.cache_dir)

    def build(folder: Path) -> None:
        size = sum(file.stat().st_size for file in listed)
        with _progress(f"Tokenising {path}", size) as advance:
            _write(folder / "tokens.bin", config, path, listed, format, tokenizer, advance)

    def entry(folder: Path) -> Tokens:
        return open_tokens(folder / "tokens.bin", tokenizer.vocab_size)

    return dataclasses.replace(entry(build_once(root, key, build, whole=entry)), where=path)


def _as_they_are(file: Path, tokenizer: Tokenizer) -> Tokens:
    tokens = open_tokens(file, tokenizer.vocab_size, tokenizer.eos_id)
    theirs = (tokens.about or {}).get("tokenizer")
    if theirs and theirs != tokenizer.fingerprint:
        # No error: the fingerprint is also of the chat template, which these ids may have nothing to do with.
        say_once(
            _log,
            (str(file), tokenizer.fingerprint),
            "%s was tokenised by %s, and the tokenizer of this run is %s: text that it decodes may be no text.",
            file,
            theirs,
            tokenizer.fingerprint,
        )
    return tokens


def _write(
    file: Path,
    config: DataConfig,
    path: str,
    listed: list[Path],
    format: str,
    tokenizer: Tokenizer,
    advance: Callable[[int], None],
) -> None:
    faults = Faults(skip=config.on_invalid == "skip")
    documents: Iterator[Encoded]
    if format == "topics":
        documents = encode_texts(topics(), tokenizer, config.add_bos, config.add_eos)
    elif format == "text":
        documents = encode_texts(read_texts(listed, faults, advance), tokenizer, config.add_bos, config.add_eos)
    else:
        records = read_records(listed, format, config.text_key, faults, advance)
        documents = encode_records(records, tokenizer, config.text_key, config.add_bos, config.add_eos, faults)
    with TokenWriter(file, tokenizer.vocab_size) as writer:
        for encoded in documents:
            writer.add(encoded)
        if faults.count:
            _log.warning("%s: %d documents left out, the first: %s", path, faults.count, faults.examples[0])
        if writer.empty:
            _log.info("%s: %d documents have no text, and are left out.", path, writer.empty)
        if not writer.count:
            raise rule_error("Training data has text", f"{path!r}, where there is none", "name other data")
        writer.finish(tokenizer=tokenizer.fingerprint, skipped=faults.count)


def build_once(
    root: Path, key: str, build: Callable[[Path], None], whole: Callable[[Path], object] = lambda folder: None
) -> Path:
    """The folder `root/key`, which `build` fills if it is not there yet, in one process of all that ask.

    An entry that `whole` refuses with a ValueError, as after a full disk or a power cut, is built again.
    """
    folder = root / key
    if _usable(folder, whole):
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with _alone(root / f"{key}.lock", folder):
        if _usable(folder, whole):  # another process was quicker
            return folder
        for left in [folder, *root.glob(f"{key}.part-*")]:  # nobody else writes this key: what lies there is dead
            if left.exists():
                shutil.rmtree(left)
        aside = root / f"{key}.part-{os.getpid()}"
        aside.mkdir()
        try:
            build(aside)
            os.rename(aside, folder)
        except BaseException as error:
            shutil.rmtree(aside, ignore_errors=True)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                error.add_note(f"The token cache {root} is full: free some space, or choose another with cache_dir.")
            raise
    return folder


def _usable(folder: Path, whole: Callable[[Path], object]) -> bool:
    if not folder.is_dir():
        return False
    try:
        whole(folder)
        return True
    except (ValueError, OSError) as error:
        _log.warning("The entry %s of the token cache is not whole, and is made again: %s", folder, error)
        return False


@contextlib.contextmanager
def _alone(lock: Path, folder: Path) -> Iterator[None]:
    """Holds other processes off; the system lets go of the lock when its process ends, however it ends."""
    with lock.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                error.add_note(f"{lock.parent} has no locks for files: choose a cache_dir on another file system.")
                raise
            _log.info("Waiting for the process that tokenises into %s.", folder)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _progress(title: str, size: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, a line in the log elsewhere, once the work has taken a while."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = progress.add_task(title, total=size or None)
    began, shown, done = time.monotonic(), False, 0

    def advance(count: int) -> None:
        nonlocal shown, done
        done += count
        progress.update(task, completed=done)
        if not shown and time.monotonic() - began > _PATIENCE:
            shown = True
            progress.start()
            if not console.is_terminal:
                _log.info("%s: %d MB, of which %d MB are done.", title, size >> 20, done >> 20)

    try:
        yield advance
    finally:
        progress.stop()


def _digest(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
