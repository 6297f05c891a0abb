"""What to train on, in one small record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from capibara.errors import rule_error, unknown_name

__all__ = ["FORMATS", "PACKINGS", "DataConfig"]

FORMATS = ("auto", "text", "jsonl", "parquet", "arrow", "tokens")
PACKINGS = (True, False, "stream")


@dataclass(frozen=True)
class DataConfig:
    """Where training data is, and how it becomes rows of tokens.

    >>> DataConfig("python:topics").pack
    True
    """

    path: str
    """A file, a folder, a glob ("logs/**/*.jsonl"), or "python:topics": the help texts that every Python ships."""
    format: str = "auto"
    """One of `FORMATS`; "auto" goes by the suffix."""
    text_key: str | None = None
    """Key or column of the text (or of the messages); without it "text", "messages", or "prompt" and "completion"."""
    tokenizer: str = "bytes"
    """What `capibara.models.load_tokenizer` takes, where no tokenizer is passed along."""
    pack: bool | Literal["stream"] = True
    """True: rows are full, and attention keeps to a document (segment ids). "stream": rows are windows of the text as
    one long stream. False: a document is a row, padded or cut. Conversations are packed whole."""
    shuffle: bool = True
    """Rows in an order of their own each epoch; False: as they lie."""
    held_out: float | str | None = None
    """For evaluation: a share of the documents, or a path of other data. None: a tenth of python:topics, else nothing.
    A share of fewer documents than would make one is the end of each document instead."""
    add_bos: bool = True
    """Begin each document of text with bos, where the tokenizer has one."""
    add_eos: bool = True
    """End each document of text with eos, where the tokenizer has one."""
    prefetch: int = 4
    """Batches that are kept ready."""
    workers: int = 2
    """Threads that prepare them; 0 prepares each when it is asked for."""
    cache_dir: str | None = None
    """Where tokens are kept; $CAPIBARA_CACHE_DIR or the platform's cache folder when None."""
    fingerprint: str = "times"
    """How a changed file is told: by its size and "times", or by its "content", which reads all of it."""
    on_invalid: str = "error"
    """A file that is not UTF-8, a line that is no JSON, a record without text: "error", or "skip" and count."""

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path:
            raise rule_error("path names the data", repr(self.path), 'use a file, a folder, or "python:topics"')
        for name, choices in (
            ("format", FORMATS),
            ("fingerprint", ("times", "content")),
            ("on_invalid", ("error", "skip")),
        ):
            if getattr(self, name) not in choices:
                raise unknown_name(f"{name} of data", getattr(self, name), choices)
        if not any(self.pack is choice or self.pack == choice != 1 for choice in PACKINGS):
            raise rule_error("pack is True, False or 'stream'", repr(self.pack), "use one of them")
        for name in ("shuffle", "add_bos", "add_eos"):
            if not isinstance(getattr(self, name), bool):
                raise rule_error(f"{name} is true or false", repr(getattr(self, name)), f"use {name} = true")
        for name in ("prefetch", "workers"):
            count = getattr(self, name)
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise rule_error(f"{name} is a whole number from 0 up", repr(count), f"use {name} = 2")
        share = self.held_out
        if isinstance(share, bool) or not isinstance(share, int | float | str | None):
            raise rule_error("held_out is a share or a path", repr(share), "use held_out = 0.05")
        if isinstance(share, int | float) and not 0 <= share < 1:
            raise rule_error("held_out is a share from 0 up to less than 1", repr(share), "use held_out = 0.05")
        for name in ("text_key", "cache_dir"):
            if not isinstance(getattr(self, name), str | None):
                raise rule_error(f"{name} is text", repr(getattr(self, name)), f"leave {name} out")

    @property
    def held_out_share(self) -> float:
        """The share of the training data that evaluation keeps for itself."""
        if self.held_out is None:
            return 0.1 if self.path == "python:topics" else 0.0
        return 0.0 if isinstance(self.held_out, str) else float(self.held_out)
