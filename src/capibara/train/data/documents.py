"""Texts, conversations, and prompts with their completions, as ids and where the loss counts on them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from capibara.errors import rule_error
from capibara.models.tokenizer import Tokenizer
from capibara.train.data.readers import Faults, Record, Text

__all__ = ["Encoded", "encode_records", "encode_texts"]

_TEXTS, _CHARACTERS = 1024, 4 << 20  # handed to the tokenizer at a time, which then uses all cores


@dataclass(frozen=True)
class Encoded:
    """Ids of a document, or of a piece of one (`ends` is False for all but its last)."""

    ids: npt.NDArray[Any]
    mask: npt.NDArray[np.bool_] | None = None
    """Which of them the loss counts on; all of them when None."""
    ends: bool = True


def encode_texts(texts: Iterable[Text], tokenizer: Tokenizer, add_bos: bool, add_eos: bool) -> Iterator[Encoded]:
    """Plain text: bos, the text, eos. A text of nothing stays nothing."""
    bos = [] if tokenizer.bos_id is None or not add_bos else [tokenizer.bos_id]
    eos = [] if tokenizer.eos_id is None or not add_eos else [tokenizer.eos_id]
    for group in _groups(texts):
        encoded = tokenizer.encode_batch([text.text for text in group])
        for text, ids in zip(group, encoded, strict=True):
            if len(ids) or not (text.begins and text.ends):
                before, after = (bos if text.begins else []), (eos if text.ends else [])
                ids = np.concatenate([np.asarray(before, np.uint32), ids, np.asarray(after, np.uint32)])
            yield Encoded(ids, ends=text.ends)


def _groups(texts: Iterable[Text]) -> Iterator[list[Text]]:
    group: list[Text] = []
    characters = 0
    for text in texts:
        group.append(text)
        characters += len(text.text)
        if len(group) >= _TEXTS or characters >= _CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group


def encode_records(
    records: Iterable[Record], tokenizer: Tokenizer, text_key: str | None, add_bos: bool, add_eos: bool, faults: Faults
) -> Iterator[Encoded]:
    """Records by what they hold: text, a conversation, or a prompt and its completion; all of one kind."""
    kinds = _Kinds(text_key, faults)
    first = next(records := iter(kinds.known(records)), None)
    if first is None:
        return
    everything = _again(first, records)
    if kinds.kind == "text":
        texts = (Text(record.values[kinds.key]) for record in everything)
        yield from encode_texts(texts, tokenizer, add_bos, add_eos)
        return
    for record in everything:
        try:
            if kinds.kind == "messages":
                tools = record.values.get("tools")
                ids, mask = tokenizer.encode_chat(record.values[kinds.key], **({"tools": tools} if tools else {}))
            else:
                ids, mask = _pair(record.values, tokenizer, add_bos, add_eos)
        except ValueError as error:
            faults.take(_at(error, record.where))
            continue
        if not any(mask):
            faults.take(
                rule_error(
                    "A conversation has an answer of the assistant", f"{record.where} without", "delete it, or add one"
                )
            )
            continue
        yield Encoded(np.asarray(ids, np.uint32), np.asarray(mask, np.bool_))


def _at(error: ValueError, where: str) -> ValueError:
    """The same error, with the place of the record in its text."""
    parts = getattr(error, "parts", None)
    if parts is None:
        return error
    placed = rule_error(parts["rule"], f"{where}: {parts['got']}", parts["fix"])
    placed.__cause__ = error
    return placed


def _again(first: Record, rest: Iterator[Record]) -> Iterator[Record]:
    yield first
    yield from rest


def _pair(
    values: Mapping[str, Any], tokenizer: Tokenizer, add_bos: bool, add_eos: bool
) -> tuple[list[int], list[bool]]:
    prompt, completion = values["prompt"], values["completion"]
    # Together, and told apart by characters: a tokenizer may put a space before a text that it takes for a beginning.
    ids, mask = tokenizer.encode_spans(prompt + completion, [(len(prompt), len(prompt) + len(completion))])
    if add_bos and tokenizer.bos_id is not None:
        ids, mask = [tokenizer.bos_id, *ids], [False, *mask]
    if add_eos and tokenizer.eos_id is not None:
        ids, mask = [*ids, tokenizer.eos_id], [*mask, True]
    return ids, mask


class _Kinds:
    """What the records hold, by the first of them; the others are held to it."""

    def __init__(self, text_key: str | None, faults: Faults) -> None:
        self.kind, self.key = "", text_key or ""
        self._text_key, self._faults = text_key, faults

    def known(self, records: Iterable[Record]) -> Iterator[Record]:
        for record in records:
            try:
                self._check(record)
            except ValueError as error:
                self._faults.take(error)
                continue
            yield record

    def _check(self, record: Record) -> None:
        values = record.values
        if not self.kind:
            self.kind, self.key = self._of_first(record)
        if self.kind == "pair":
            for key in ("prompt", "completion"):
                if not isinstance(values.get(key), str):
                    raise self._wrong(record, key, "text")
        elif self.kind == "text":
            if not isinstance(values.get(self.key), str):
                raise self._wrong(record, self.key, "text")
        elif not isinstance(values.get(self.key), list):
            raise self._wrong(record, self.key, "a list of messages")

    def _of_first(self, record: Record) -> tuple[str, str]:
        values = record.values
        if self._text_key is not None:
            value = values.get(self._text_key)
            if value is None:
                raise self._wrong(record, self._text_key, "text or a list of messages")
            return ("messages" if isinstance(value, list) else "text"), self._text_key
        if "text" in values:
            return "text", "text"
        if "messages" in values:
            return "messages", "messages"
        if "prompt" in values and "completion" in values:
            return "pair", ""
        raise rule_error(
            "A record has text, messages, or prompt and completion",
            f"{record.where} with {', '.join(values) or 'nothing'}",
            f"name the key: text_key = {next(iter(values), 'text')!r}",
        )

    def _wrong(self, record: Record, key: str, wanted: str) -> ValueError:
        if key not in record.values:
            near = difflib.get_close_matches(key, record.values, n=1, cutoff=0.5)
            return rule_error(
                f"Every record has {key!r}",
                f"{record.where} with {', '.join(map(repr, record.values)) or 'nothing'}",
                f"use text_key = {near[0]!r}" if near else "name a key that is there with text_key, or mend the record",
            )
        return rule_error(
            f"{key!r} of every record is {wanted}",
            f"{record.where}: {repr(record.values[key])[:60]}",
            "mend the record, or leave such ones out with on_invalid = 'skip'",
        )
