"""Tokenizers: bytes, which need nothing, and Hugging Face's tokenizer.json.

Text never becomes a special token by its spelling unless that is asked for (`special=True`): a document that talks
about <|im_end|> does not end there. A rendered conversation is read with it, since templates spell their tokens; so a
message that spells one has it, as in every library that has chat templates.
"""

from __future__ import annotations

import codecs
import functools
import hashlib
import itertools
import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from capibara.distribution import NAME
from capibara.errors import rule_error, say_once
from capibara.models.chat import DEFAULT_TEMPLATE, Message, answer_spans, check_messages, render

if TYPE_CHECKING:
    import numpy.typing as npt
    import tokenizers

__all__ = ["ByteTokenizer", "HuggingFaceTokenizer", "TextStream", "Tokenizer", "load_tokenizer"]

_log = logging.getLogger(__name__)


class Tokenizer(ABC):
    """What training and serving ask of a tokenizer. One of your own gets its chat half from here."""

    vocab_size: int
    """One more than the largest id."""
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None
    special_tokens: Mapping[str, int] = MappingProxyType({})
    """Text of a special token -> its id."""
    chat_template: str | None = None
    """Jinja; ChatML's way of writing turns when None."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Two tokenizers with the same one turn every text and conversation into the same ids."""

    @abstractmethod
    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of the text alone, without bos and eos; `special` reads special tokens by their spelling."""

    @abstractmethod
    def encode_spans(
        self, text: str, spans: Iterable[tuple[int, int]], *, special: bool = False
    ) -> tuple[list[int], list[bool]]:
        """Ids, and for each whether it has a character of one of the spans."""

    @abstractmethod
    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Text; special tokens are left out, or spelled where `special`. What is no UTF-8 is U+FFFD."""

    def encode_batch(self, texts: Sequence[str], *, special: bool = False) -> list[npt.NDArray[Any]]:
        """`encode` of each, as arrays."""
        import numpy as np

        return [np.asarray(self.encode(text, special=special), np.uint32) for text in texts]

    def stream(self) -> TextStream:
        """A detokenizer that takes ids as they come."""
        return TextStream(self.decode)

    def render_chat(self, messages: Sequence[Message], add_generation_prompt: bool = False, **variables: Any) -> str:
        """A conversation as the text that the model reads; `variables` are the template's own (tools, ...)."""
        check_messages(messages)
        return render(self._template(), messages, add_generation_prompt, **self.chat_variables(variables))

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> tuple[list[int], list[bool]]:
        """Ids of a conversation, and which of them are the assistant's answers, end tokens included."""
        text, spans = answer_spans(self._template(), messages, self.special_tokens, **self.chat_variables(variables))
        return self.encode_spans(text, spans, special=True)

    def _template(self) -> str:
        if self.chat_template is None:
            say_once(_log, self.fingerprint, "The tokenizer has no chat template: turns are written as in ChatML.")
            return DEFAULT_TEMPLATE
        return self.chat_template

    def chat_variables(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """What a chat template is given beside the messages: the special tokens by their names, and `variables`."""
        names: dict[int | None, str] = {id: text for text, id in self.special_tokens.items()}
        eos = names.get(self.eos_id, "")
        return {
            "bos_token": names.get(self.bos_id, ""),
            "eos_token": eos,
            "pad_token": names.get(self.pad_id, ""),
            "end_of_turn": "<|im_end|>" if "<|im_end|>" in self.special_tokens or not eos else eos,
            **variables,
        }


class TextStream:
    """Ids in, text out, and never half a character: what cannot be told yet comes with a later id.

    >>> stream = ByteTokenizer().stream()
    >>> [stream.put(byte) for byte in "a€".encode()], stream.end()
    (['a', '', '', '€'], '')
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []  # the last piece that was whole, which sets the scene, and what came since
        self._whole = 0  # how many of them are that piece
        self._said = ""  # text of `_ids` that has been given out

    def put(self, token: int) -> str:
        """The text that is certain now."""
        self._ids.append(int(token))
        text = self._text()
        # A character that is not whole yet shows as U+FFFD at the end, one for each byte with some decoders. It has
        # four bytes at most: after more ids than that they were no character, and are given out as they are.
        sure = text.rstrip("\ufffd")
        if len(text) - len(sure) > 4 and len(self._ids) - self._whole > 4:
            sure = text
        fresh = sure[len(self._said) :]
        self._said += fresh
        if sure == text and fresh:
            self._ids, self._whole = self._ids[self._whole :], len(self._ids) - self._whole
            self._said = self._decode(self._ids)
        return fresh

    def end(self) -> str:
        """What was still open: a character that never became whole is U+FFFD."""
        rest = self._text()[len(self._said) :]
        self._ids, self._whole, self._said = [], 0, ""
        return rest

    def _text(self) -> str:
        text = self._decode(self._ids)
        if text.startswith(self._said):
            return text
        # Bytes that turned out to be no character changed how those before them are shown. What was said stays said.
        self._ids, self._whole, self._said = self._ids[-1:], 0, ""
        return self._decode(self._ids)


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as they are, and bos, eos and pad above them.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode("hé"), tokenizer.decode([104, 195, 169, tokenizer.eos_id])
    ([104, 195, 169], 'hé')
    """

    vocab_size = 259
    bos_id, eos_id, pad_id = 256, 257, 258
    special_tokens = MappingProxyType({"<|bos|>": 256, "<|eos|>": 257, "<|pad|>": 258})

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template

    @property
    def fingerprint(self) -> str:
        return f"bytes-1-{_digest(self.chat_template or DEFAULT_TEMPLATE)}"

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        if not special:
            return list(_utf8(text))
        return [id for piece in _split(text, tuple(self.special_tokens)) for id in self._piece(piece)]

    def _piece(self, piece: str) -> Sequence[int]:
        id = self.special_tokens.get(piece)
        return _utf8(piece) if id is None else (id,)

    def encode_batch(self, texts: Sequence[str], *, special: bool = False) -> list[npt.NDArray[Any]]:
        import numpy as np

        if special:
            return super().encode_batch(texts, special=True)
        return [np.frombuffer(_utf8(text), np.uint8) for text in texts]

    def encode_spans(
        self, text: str, spans: Iterable[tuple[int, int]], *, special: bool = False
    ) -> tuple[list[int], list[bool]]:
        spans = list(spans)
        edges = sorted({0, len(text), *(edge for span in spans for edge in span)})
        ids: list[int] = []
        mask: list[bool] = []
        for begin, end in itertools.pairwise(edges):
            piece = self.encode(text[begin:end], special=special)
            ids += piece
            mask += [any(first <= begin < last for first, last in spans)] * len(piece)
        return ids, mask

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        names = {id: text.encode() if special else b"" for text, id in self.special_tokens.items()}
        data = bytearray()
        for id in ids:
            if 0 <= id < 256:
                data.append(id)
            elif id in names:
                data += names[id]
            else:
                raise _beyond(id, self.vocab_size)
        return data.decode("utf-8", "replace")

    def stream(self) -> TextStream:
        return _ByteStream()


class _ByteStream(TextStream):
    """Python's own incremental decoder does it for bytes."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._open = False  # whether it is inside of a character

    def put(self, token: int) -> str:
        if 0 <= token < 128 and not self._open:
            return chr(token)
        if 0 <= token < 256:
            text = self._utf8.decode(bytes((token,)))
            self._open = bool(self._utf8.getstate()[0])
            return text
        if token >= ByteTokenizer.vocab_size or token < 0:
            raise _beyond(token, ByteTokenizer.vocab_size)
        return ""

    def end(self) -> str:
        self._open = False
        return self._utf8.decode(b"", final=True)


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json, with what tokenizer_config.json says of its special tokens and its chat template.

    Args:
        path: the tokenizer.json file, or the folder it is in.
        chat_template: in place of the folder's own.
    """

    def __init__(self, path: str | Path, chat_template: str | None = None) -> None:
        path = Path(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        self.path = file
        self._special = _read_tokenizer(file)
        self._content = hashlib.sha256(file.read_bytes()).hexdigest()
        config = _read_json(file.parent / "tokenizer_config.json")
        self.chat_template = chat_template or _chat_template(file.parent, config)
        added = self._special.get_added_tokens_decoder()
        special = {token.content: id for id, token in added.items() if token.special}
        ids = {name: self._named(config.get(f"{name}_token")) for name in ("bos", "eos", "pad")}
        model = _read_json(file.parent / "config.json")  # a model's folder; some tokenizers say it nowhere else
        for name, id in ids.items():
            if id is None and f"{name}_token" not in config:
                there: Any = model.get(f"{name}_token_id")
                ids[name] = there[0] if isinstance(there, list) and there else there
        self.bos_id, self.eos_id, self.pad_id = ids["bos"], ids["eos"], ids["pad"]
        for id in ids.values():
            text = None if id is None else self._special.id_to_token(id)
            if id is not None and text is not None:
                special.setdefault(text, id)
        self.special_tokens = special
        self.vocab_size = max(self._special.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def _named(self, token: Any) -> int | None:
        text = token.get("content") if isinstance(token, Mapping) else token
        if text is None:
            return None
        id = self._special.token_to_id(text)
        if id is None:
            raise rule_error(
                "A special token of tokenizer_config.json is in tokenizer.json",
                f"{text!r}, which {self.path} does not have",
                "take the two files from the same model",
            )
        return int(id)

    @functools.cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The same, for text in which special tokens are letters. A switch on the one would not be safe in threads."""
        plain = type(self._special).from_str(self._special.to_str())
        plain.encode_special_tokens = True
        return plain

    @property
    def fingerprint(self) -> str:
        ids = json.dumps([self.bos_id, self.eos_id, self.pad_id])
        return f"hf-1-{_digest(self._content, ids, self.chat_template or DEFAULT_TEMPLATE)}"

    def _engine(self, special: bool) -> tokenizers.Tokenizer:
        return self._special if special else self._plain

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return list(self._engine(special).encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str], *, special: bool = False) -> list[npt.NDArray[Any]]:
        import numpy as np

        encodings = self._engine(special).encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.uint32) for encoding in encodings]

    def encode_spans(
        self, text: str, spans: Iterable[tuple[int, int]], *, special: bool = False
    ) -> tuple[list[int], list[bool]]:
        import numpy as np

        encoding = self._engine(special).encode(text, add_special_tokens=False)
        begins, ends = np.asarray(encoding.offsets, np.int64).reshape(-1, 2).T
        mask = np.zeros(len(begins), np.bool_)
        for first, last in spans:
            mask |= (begins < last) & (first < ends)
        return list(encoding.ids), mask.tolist()

    def to_json(self) -> str:
        """The tokenizer.json that it was read from, without padding and truncation."""
        return str(self._special.to_str())

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        ids = [int(id) for id in ids]
        for id in ids:
            if not 0 <= id < self.vocab_size:
                raise _beyond(id, self.vocab_size)
        return str(self._special.decode(ids, skip_special_tokens=not special))


def load_tokenizer(name_or_path: str | Path) -> Tokenizer:
    """A tokenizer by name ("bytes"), by its tokenizer.json, or by the folder of a model.

    >>> load_tokenizer("bytes").vocab_size
    259
    """
    if str(name_or_path) == "bytes":
        return ByteTokenizer()
    path = Path(name_or_path)
    if path.is_dir() and not (path / "tokenizer.json").is_file():
        beside = sorted(p.name for p in path.glob("*token*"))
        raise rule_error(
            "A model's folder has a tokenizer.json",
            f"{path} with {', '.join(beside) or 'no tokenizer'}",
            "save it anew with transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...), or use 'bytes'",
        )
    if not path.exists():
        raise rule_error(
            'A tokenizer is "bytes", a tokenizer.json, or a folder that has one',
            f"{str(name_or_path)!r}, which is not there",
            "name a file or a folder that is, or 'bytes'",
        )
    return HuggingFaceTokenizer(path)


def _read_tokenizer(file: Path) -> tokenizers.Tokenizer:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(f"A tokenizer.json needs tokenizers: pip install '{NAME}[train]'") from error
    try:
        text = file.read_text(encoding="utf-8")
        engine = tokenizers.Tokenizer.from_str(text)
    except UnicodeDecodeError as error:
        raise rule_error("A tokenizer.json is UTF-8", f"{file}: {error}", "copy it again") from error
    except FileNotFoundError:
        raise
    except Exception as error:  # tokenizers raises the bare class
        raise rule_error(
            "A tokenizer.json is one that `tokenizers` reads", f"{file}: {error}", "copy it again, or save it anew"
        ) from error
    # Both may be stored in the file, and would cut and fill what is encoded.
    engine.no_truncation()
    engine.no_padding()
    return engine


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise rule_error(f"{file.name} is JSON", f"{file}: {error}", "copy it again") from error
    return content if isinstance(content, dict) else {}


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default") or (next(iter(named.values())) if len(named) == 1 else None)
        if template is None:
            raise rule_error(
                "One of a tokenizer's chat templates is called default",
                ", ".join(named),
                "pass chat_template=... with the one that is meant",
            )
    return template


def _split(text: str, words: tuple[str, ...]) -> list[str]:
    return [piece for piece in re.split(f"({'|'.join(map(re.escape, words))})", text) if piece]


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise rule_error(
            "Text has no halves of surrogate pairs", f"{text[error.start]!r} at {error.start}", "mend the text"
        ) from error


def _beyond(id: int, vocab_size: int) -> ValueError:
    return rule_error(
        f"Ids of this tokenizer are 0 to {vocab_size - 1}", str(id), "decode with the tokenizer that the model has"
    )


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogatepass")).hexdigest()[:16]
