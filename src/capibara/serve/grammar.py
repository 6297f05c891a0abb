"""Output held to a JSON schema, a regular expression or a grammar: which tokens may come next, by llguidance.

A grammar is read by a thread of its own, of which there are few: a large one takes a second, in which all others go on
(llguidance lets the interpreter go meanwhile). Those that were read last are kept.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from capibara.distribution import NAME
from capibara.errors import CapibaraError, rule_error
from capibara.lru import LRU

if TYPE_CHECKING:
    from capibara.models.tokenizer import Tokenizer
    from capibara.serve.request import SamplingParams

__all__ = ["JSON_SPACING", "Grammar", "GrammarError", "Grammars"]

JSON_SPACING = {"whitespace_pattern": " "}
"""How JSON is spaced, as llguidance's "x-guidance": one space or none where JSON has any, as the model was trained to.
With any white space it may write nothing else."""

_LONGEST = 1 << 17
"""Characters of a grammar. One of so many takes a second or two to read, and four times as many sixteen times as
long."""
_KEPT = 64
"""Grammars that were read, at their beginning: many requests come with the same."""
_READERS = 2
"""Threads that read grammars: whoever sends large ones takes no more of the machine than that."""


class GrammarError(CapibaraError, ValueError):
    """A schema, a regular expression or a grammar that no output can be held to."""


def _no_grammar(rule: str, arrived: object, fix: str) -> GrammarError:
    return GrammarError(str(rule_error(rule, arrived, fix)))


class Grammar:
    """One request's place in its grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allow(self, bits: np.ndarray) -> None:
        """Set which tokens may come next: a bit each in this row of uint32; tokens past the tokenizer's stay out."""
        known = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        size = min(len(known), len(bits))
        bits[:size], bits[size:] = known[:size], 0

    def take(self, token: int) -> bool:
        """Go on by a token; whether it was one of those allowed."""
        return bool(self._matcher.consume_token(token))

    @property
    def complete(self) -> bool:
        """Whether the output is whole, and nothing but the end of text may follow."""
        return bool(self._matcher.is_stopped())

    @property
    def error(self) -> str:
        """What went wrong; empty where nothing did."""
        return _first_part(self._matcher.get_error()) if self._matcher.is_error() else ""


@dataclass
class _Reading:
    """A grammar that is being read, or waits for a reader."""

    wanted_by: list[Future[Grammar]]
    done: Future[Any] | None = None


class Grammars:
    """Grammars over one tokenizer, whose words are laid out for them once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._words: Any = None
        self._begun: LRU[str, Any] = LRU(_KEPT)
        """By their text."""
        self._reading: dict[str, _Reading] = {}
        self._lock = threading.Lock()
        self._words_lock = threading.Lock()  # apart: laying out a large vocabulary takes a second
        self._readers: ThreadPoolExecutor | None = None

    def start(self, asked: SamplingParams) -> Grammar | Future[Grammar]:
        """The grammar that a request asks for, at its beginning; or, where it is yet to be read, what brings it.

        A `ValueError` says what is wrong with it: at once where that is seen without reading it, else as the result.
        """
        library = _library()
        text, kind = self._text(library, asked)
        known = self._begun.get(text)
        if known is not None:
            return Grammar(known.deep_copy())
        if len(text) > _LONGEST:
            raise _no_grammar(f"A {kind} has {_LONGEST} characters at the most", f"{len(text)}", "simplify it")
        brought: Future[Grammar] = Future()
        with self._lock:
            reading = self._reading.get(text)
            if reading is None:
                if self._readers is None:
                    self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="grammar")
                reading = self._reading[text] = _Reading([])
                reading.done = self._readers.submit(self._read, reading, library, text, kind)
            reading.wanted_by.append(brought)
            done = reading.done
        assert done is not None
        done.add_done_callback(lambda done: _hand_over(done, brought))
        return brought

    def _read(self, reading: _Reading, library: Any, text: str, kind: str) -> Any:
        """What a reader does; nothing where all who asked are gone: their grammars hold up nobody else's."""
        with self._lock:
            wanted = any(not brought.cancelled() for brought in reading.wanted_by)
            if not wanted:
                self._reading.pop(text, None)  # whoever asks from now on is read for
        if not wanted:
            return None
        try:
            return self._begin(library, text, kind)
        finally:
            with self._lock:
                self._reading.pop(text, None)

    def close(self) -> None:
        """Read nothing more; what waits is cancelled."""
        with self._lock:
            readers, self._readers = self._readers, None
            self._reading = {text: one for text, one in self._reading.items() if one.done and one.done.running()}
        if readers is not None:
            readers.shutdown(wait=False, cancel_futures=True)

    def _begin(self, library: Any, text: str, kind: str) -> Any:
        known = self._begun.get(text)
        if known is not None:
            return known
        with self._words_lock:
            if self._words is None:
                self._words = _words(library, self._tokenizer)
        matcher = library.LLMatcher(self._words, text, log_level=0)
        if matcher.is_error():
            wrong = _first_part(matcher.get_error())
            raise _no_grammar(f"A {kind} is one that llguidance takes", wrong, "mend or simplify it")
        self._begun[text] = matcher
        return matcher

    def _text(self, library: Any, asked: SamplingParams) -> tuple[str, str]:
        if asked.regex is not None:
            return library.LLMatcher.grammar_from_regex(asked.regex), "regular expression"
        if asked.grammar is not None:
            return library.LLMatcher.grammar_from_lark(asked.grammar), "grammar"
        schema = asked.json_schema
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except ValueError as error:
                raise _no_grammar("A JSON schema is JSON", str(error), "pass a dict, or mend the text") from error
        if not isinstance(schema, dict):
            raise _no_grammar("A JSON schema is an object", type(schema).__name__, 'pass {"type": "object", ...}')
        schema = schema or {"type": "object"}
        # A schema's own "x-guidance" says otherwise.
        return library.LLMatcher.grammar_from_json_schema(schema, JSON_SPACING), "JSON schema"


def _first_part(error: str) -> str:
    """Without the parser's inner state and the whole grammar, which follow."""
    return str(error).partition("\n<state>")[0].strip()


def _hand_over(done: Future[Any], brought: Future[Grammar]) -> None:
    """Give a request its own copy of what was read. One that was cancelled meanwhile wants none."""
    if not brought.set_running_or_notify_cancel():
        return
    if done.cancelled():
        brought.set_exception(RuntimeError("the engine was closed"))
    elif (error := done.exception()) is not None:
        brought.set_exception(error)
    else:
        brought.set_result(Grammar(done.result().deep_copy()))


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ImportError(f"Output by a schema or a grammar needs llguidance: pip install '{NAME}[serve]'") from error
    return llguidance


def _words(library: Any, tokenizer: Tokenizer) -> Any:
    """The tokenizer as llguidance takes it: every token's bytes."""
    from capibara.models.tokenizer import ByteTokenizer, HuggingFaceTokenizer

    if isinstance(tokenizer, HuggingFaceTokenizer):
        return library.LLTokenizer(tokenizer.to_json(), n_vocab=tokenizer.vocab_size, eos_token=tokenizer.eos_id)
    if isinstance(tokenizer, ByteTokenizer):
        return library.LLTokenizer(library.TokenizerWrapper(_Bytes(tokenizer)))
    raise _no_grammar(
        "A grammar needs the bytes of every token, which bytes and a tokenizer.json have",
        type(tokenizer).__name__,
        "leave json_schema, regex and grammar out",
    )


class _Bytes:
    """What `llguidance.TokenizerWrapper` reads."""

    def __init__(self, tokenizer: Any) -> None:
        special = {id: text.encode() for text, id in tokenizer.special_tokens.items()}
        self.eos_token_id = tokenizer.eos_id
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [bytes((id,)) if id < 256 else special[id] for id in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(special)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())
