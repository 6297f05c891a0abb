"""Tokens on disk, memory-mapped: a .bin with a .json beside it, or a .npy.

`train.bin` holds ids, one after another, as little-endian uint16 or uint32; `train.json` says what they are:

    {"dtype": "uint16", "vocab_size": 32000, "document_starts": "train.starts.npy", "mask": "train.mask.bin"}

Only dtype is needed. Documents are told apart by `document_starts` (a .npy of the first token of each), or by the id
that ends each (`eos_id`, else the tokenizer's). `mask` has a byte a token: 1 where the loss counts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from capibara.errors import rule_error, unknown_name
from capibara.train.data.documents import Encoded

__all__ = ["TokenWriter", "Tokens", "join_tokens", "open_tokens", "token_dtype", "write_tokens"]

_DTYPES = ("uint16", "uint32")
_KEYS = (
    *("dtype", "vocab_size", "eos_id", "document_starts", "mask", "whole"),  # whoever writes tokens may say
    *(
        "format",
        "tokens",
        "documents",
        "empty",
        "skipped",
        "tokenizer",
        "fingerprint",
        "document_hashes",
    ),  # the cache says
)


@dataclass(frozen=True)
class Tokens:
    """Ids of many documents, end to end."""

    ids: npt.NDArray[Any]
    """Memory-mapped."""
    starts: npt.NDArray[Any]
    """First token of each document, and after them the number of tokens."""
    where: str
    fingerprint: str
    """Of the content: equal for a copy elsewhere."""
    mask: npt.NDArray[Any] | None = None
    """A byte a token: whether the loss counts on it."""
    hashes: npt.NDArray[np.uint64] | None = None
    """Of each document's content, where they were taken."""
    whole: bool = False
    """Documents are conversations, and lose their sense when they are cut."""
    checked: bool = False
    """All ids are known to be in the vocabulary."""
    about: Mapping[str, Any] | None = None
    """What the .json beside it says."""

    @property
    def documents(self) -> int:
        return len(self.starts) - 1


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class TokenWriter:
    """Writes documents as they come; nothing of them is kept in memory but where each begins.

    Used by one `with`; the .json is written last, so that what has one is whole.
    """

    def __init__(self, file: Path, vocab_size: int) -> None:
        self._file, self._vocab_size = file, vocab_size
        self._dtype = token_dtype(vocab_size)
        self._starts: list[int] = [0]
        self._hashes: list[int] = []
        self._content = hashlib.blake2b(digest_size=16)
        self._document = hashlib.blake2b(digest_size=8)
        self._count = 0
        self._has_mask: bool | None = None
        self.empty = 0
        """Documents without a token, which are left out."""

    def __enter__(self) -> TokenWriter:
        self._beside(".json").unlink(missing_ok=True)  # of what lay here before: it does not speak for what comes
        self._tokens = self._file.open("wb")
        self._mask = self._beside(".mask.bin").open("wb")
        return self

    def __exit__(self, *exception: object) -> None:
        self._tokens.close()
        self._mask.close()

    def _beside(self, suffix: str) -> Path:
        return self._file.with_suffix(suffix)

    def add(self, encoded: Encoded) -> None:
        ids = encoded.ids
        if encoded.ends and not len(ids) and self._count == self._starts[-1]:
            self.empty += 1
            return
        if self._has_mask is None:
            self._has_mask = encoded.mask is not None
        elif self._has_mask is not (encoded.mask is not None):
            raise rule_error("All documents have a mask or none has", f"document {len(self._hashes)}", "give all one")
        if len(ids) and int(ids.max()) >= self._vocab_size:
            raise rule_error(
                f"Ids are below the vocabulary's {self._vocab_size}",
                f"{int(ids.max())} in document {len(self._hashes)}",
                "use the tokenizer that they come from",
            )
        data = ids.astype(self._dtype).tobytes()
        self._tokens.write(data)
        self._content.update(data)
        self._document.update(data)
        if encoded.mask is not None:
            loss = np.asarray(encoded.mask, np.uint8).tobytes()
            self._mask.write(loss)
            self._content.update(loss)
        self._count += len(ids)
        if encoded.ends:
            self._content.update(self._count.to_bytes(8, "little"))
            self._starts.append(self._count)
            self._hashes.append(int.from_bytes(self._document.digest(), "little"))
            self._document = hashlib.blake2b(digest_size=8)

    @property
    def count(self) -> int:
        """Tokens so far."""
        return self._count

    @property
    def documents(self) -> int:
        return len(self._hashes)

    def finish(self, **about: Any) -> None:
        """Write what is known of the tokens, and at the very end the .json that makes them a dataset."""
        self._tokens.close()
        self._mask.close()
        if not self._has_mask:
            self._beside(".mask.bin").unlink()
        name = self._file.stem
        np.save(self._beside(".starts.npy"), np.asarray(self._starts, np.int64))
        np.save(self._beside(".hashes.npy"), np.asarray(self._hashes, np.uint64))
        known = {
            "format": 1,
            "dtype": self._dtype.name,
            "tokens": self._count,
            "documents": len(self._hashes),
            "empty": self.empty,
            "vocab_size": self._vocab_size,
            "fingerprint": self._content.hexdigest(),
            "document_starts": f"{name}.starts.npy",
            "document_hashes": f"{name}.hashes.npy",
            **({"mask": f"{name}.mask.bin"} if self._has_mask else {}),
            **about,
        }
        self._beside(".json").write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def write_tokens(
    file: str | Path, documents: Iterable[npt.ArrayLike], vocab_size: int, tokenizer: str | None = None
) -> Path:
    """Documents of ids as a .bin that training reads, with its .json beside it.

    Args:
        file: the .bin.
        documents: ids of each; no more than one of them is in memory.
        vocab_size: ids are below it.
        tokenizer: the fingerprint of the one that they come from, which is then compared when they are read.
    """
    path = Path(file)
    if path.suffix != ".bin":
        raise rule_error("Tokens are written to a .bin", str(path), f"use {path.with_suffix('.bin')}")
    with TokenWriter(path, vocab_size) as writer:
        for ids in documents:
            writer.add(Encoded(np.asarray(ids)))
        writer.finish(**({} if tokenizer is None else {"tokenizer": tokenizer}))
    return path


def open_tokens(file: Path, vocab_size: int, eos_id: int | None = None) -> Tokens:
    """Tokens of a .bin or .npy file; `eos_id` tells documents apart where nothing else does."""
    if file.suffix == ".npy":
        return _open_npy(file, vocab_size, eos_id)
    about = _sidecar(file)
    dtype = np.dtype(about["dtype"]).newbyteorder("<")
    size = file.stat().st_size
    if size % dtype.itemsize or about.get("tokens", size // dtype.itemsize) * dtype.itemsize != size:
        wanted = about.get("tokens")
        raise rule_error(
            f"{file} holds {wanted if wanted is not None else 'whole'} ids of {dtype.itemsize} bytes each",
            f"{size} bytes",
            "it was cut or is still being written: copy or write it again",
        )
    if size == 0:
        raise _empty(file)
    theirs = about.get("vocab_size")
    if theirs is not None and theirs > vocab_size:
        raise rule_error(
            f"Ids are below the vocabulary's {vocab_size}",
            f"{file}, written for a vocabulary of {theirs}",
            "use the tokenizer that the tokens come from",
        )
    ids = np.memmap(file, dtype, "r")
    starts = _starts(file, ids, about, eos_id)
    return Tokens(
        ids,
        starts,
        str(file),
        about.get("fingerprint") or _sampled(ids, starts),
        mask=_mask(file, ids, about),
        hashes=_loaded(file, about.get("document_hashes"), "document_hashes"),
        whole=bool(about.get("whole", "mask" in about)),
        checked="fingerprint" in about and theirs is not None,
        about=about,
    )


def _open_npy(file: Path, vocab_size: int, eos_id: int | None) -> Tokens:
    try:
        ids = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise rule_error("A .npy file is a whole array", f"{file}: {error}", "copy or write it again") from error
    if ids.dtype.kind not in "iu" or ids.ndim not in (1, 2):
        raise rule_error(
            "A .npy of tokens has integers, in one row or in rows that are documents",
            f"{file} with {ids.dtype}[{', '.join(map(str, ids.shape))}]",
            "save the ids alone",
        )
    if ids.size == 0:
        raise _empty(file)
    if ids.ndim == 2:
        starts = np.arange(0, ids.size + 1, ids.shape[1])
        ids = ids.reshape(-1)
    else:
        starts = _by_eos(ids, eos_id)
    return Tokens(ids, starts, str(file), _sampled(ids, starts))


def _empty(file: Path) -> ValueError:
    return rule_error("Training data has tokens", f"{file}, which is empty", "name another file")


def _sidecar(file: Path) -> dict[str, Any]:
    beside = file.with_suffix(".json")
    fix = 'write {"dtype": "uint16"} there, or write both with capibara.train.data.write_tokens'
    if not beside.is_file():
        raise rule_error(f"{file.name} has {beside.name} beside it, which says what it holds", "no such file", fix)
    try:
        about = json.loads(beside.read_text(encoding="utf-8"))
    except ValueError as error:
        raise rule_error(f"{beside} is JSON", str(error), "mend it") from error
    if not isinstance(about, dict) or "dtype" not in about:
        raise rule_error(f"{beside} names the dtype of the ids", repr(about)[:60], fix)
    if about["dtype"] not in _DTYPES:
        raise unknown_name(f"dtype in {beside}", about["dtype"], _DTYPES)
    for key in about:
        if key not in _KEYS:
            raise unknown_name(f"key of {beside}", key, _KEYS)
    return about


def _loaded(file: Path, name: str | None, what: str) -> npt.NDArray[Any] | None:
    if name is None:
        return None
    try:
        return np.load(file.parent / name, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise rule_error(f"{what} of {file} is a .npy", f"{name}: {error}", "copy or write it again") from error


def _starts(file: Path, ids: npt.NDArray[Any], about: Mapping[str, Any], eos_id: int | None) -> npt.NDArray[Any]:
    starts = _loaded(file, about.get("document_starts"), "document_starts")
    if starts is None:
        return _by_eos(ids, about.get("eos_id", eos_id))
    if starts.ndim != 1 or starts.dtype.kind not in "iu" or len(starts) == 0 or starts[0] != 0:
        raise rule_error(f"document_starts of {file} is a row of places from 0 up", f"{starts[:3]}", "write it again")
    if starts[-1] != len(ids):
        starts = np.append(starts, len(ids))
    if np.any(starts[1:] < starts[:-1]):
        raise rule_error(
            f"document_starts of {file} grow, up to its {len(ids)} tokens",
            f"{starts[-2]} as the last of {len(starts) - 1}",
            "write them again",
        )
    return starts


def _mask(file: Path, ids: npt.NDArray[Any], about: Mapping[str, Any]) -> npt.NDArray[Any] | None:
    name = about.get("mask")
    if name is None:
        return None
    beside = file.parent / name
    size = beside.stat().st_size if beside.is_file() else 0
    if size != len(ids):
        raise rule_error(f"{beside} has a byte a token, {len(ids)}", f"{size} bytes", "copy or write it again")
    return np.memmap(beside, np.uint8, "r")


def _by_eos(ids: npt.NDArray[Any], eos_id: int | None) -> npt.NDArray[Any]:
    """A document ends with eos; what follows the last one is a document too."""
    ends = [np.zeros(1, np.int64)]
    if eos_id is not None:
        for begin in range(0, len(ids), 1 << 24):
            ends.append(np.flatnonzero(ids[begin : begin + (1 << 24)] == eos_id) + begin + 1)
    starts = np.concatenate(ends)
    return starts if starts[-1] == len(ids) else np.append(starts, len(ids))


def _sampled(ids: npt.NDArray[Any], starts: npt.NDArray[Any]) -> str:
    """By its length, where documents begin, and 64 pieces of it: to read a whole terabyte would take an hour."""
    digest = hashlib.blake2b(f"{len(ids)} {len(starts)} {ids.dtype.str}".encode(), digest_size=16)
    for begin in np.unique(np.linspace(0, max(len(ids) - 4096, 0), 64).astype(np.int64)):
        digest.update(ids[begin : begin + 4096].tobytes())
    digest.update(np.ascontiguousarray(starts[:4096]).astype(np.int64).tobytes())
    return digest.hexdigest()


class _EndToEnd:
    """Several memory-mapped arrays as one; a slice that lies in one of them is no copy."""

    def __init__(self, arrays: list[npt.NDArray[Any]]) -> None:
        self._arrays = arrays
        self._firsts = np.concatenate([[0], np.cumsum([len(array) for array in arrays])])

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitem__(self, where: slice) -> npt.NDArray[Any]:
        begin, end, _ = where.indices(len(self))
        first = int(np.searchsorted(self._firsts, begin, "right")) - 1
        pieces = []
        while first < len(self._arrays) and self._firsts[first] < end:
            offset = int(self._firsts[first])
            pieces.append(self._arrays[first][max(begin - offset, 0) : end - offset])
            first += 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces or [self._arrays[0][:0]])


def join_tokens(parts: list[Tokens]) -> Tokens:
    """Files of tokens as one dataset, in their order."""
    if len(parts) == 1:
        return parts[0]
    if len({part.mask is None for part in parts}) > 1:
        raise rule_error(
            "All files of tokens have a mask or none has",
            " and ".join(f"{part.where} with{'out' * (part.mask is None)}" for part in parts[:4]),
            "name them apart",
        )
    firsts = np.concatenate([[0], np.cumsum([len(part.ids) for part in parts])])
    starts = [part.starts[:-1] + first for part, first in zip(parts, firsts, strict=False)]
    masks = [part.mask for part in parts if part.mask is not None]
    hashes = [part.hashes for part in parts if part.hashes is not None]
    content = "".join(part.fingerprint for part in parts)
    return Tokens(
        _EndToEnd([part.ids for part in parts]),  # type: ignore[arg-type]
        np.concatenate([*starts, firsts[-1:]]),
        f"{parts[0].where} and {len(parts) - 1} more",
        hashlib.blake2b(content.encode(), digest_size=16).hexdigest(),
        mask=_EndToEnd(masks) if masks else None,  # type: ignore[arg-type]
        hashes=np.concatenate(hashes) if len(hashes) == len(parts) else None,
        whole=any(part.whole for part in parts),
        checked=all(part.checked for part in parts),
    )
