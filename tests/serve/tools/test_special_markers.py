"""Markers of calls that are special tokens: decoding leaves them out, unless a request has them spelled."""

from __future__ import annotations

from pathlib import Path

import pytest

from capibara.models.tokenizer import Tokenizer, load_tokenizer
from capibara.serve.text import OutputText
from capibara.serve.tools.calls import CallDelta
from capibara.serve.tools.formats import MistralParser

tokenizers = pytest.importorskip("tokenizers")


def _tokenizer(folder: Path) -> Tokenizer:
    letters = {chr(code): code - 32 for code in range(32, 127)}
    engine = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    engine.decoder = tokenizers.decoders.Fuse()
    engine.add_special_tokens(["[TOOL_CALLS]", "</s>"])
    engine.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


def test_a_special_marker_begins_a_call(tmp_path: Path) -> None:
    tokenizer = _tokenizer(tmp_path)
    marker, end = tokenizer.special_tokens["[TOOL_CALLS]"], tokenizer.special_tokens["</s>"]
    ids = [*tokenizer.encode("ok"), marker, *tokenizer.encode('[{"name": "f", "arguments": {}}]'), end]
    silent = OutputText(tokenizer)
    assert "[TOOL_CALLS]" not in "".join(map(silent.put, ids)) + silent.end()
    text = OutputText(tokenizer, spelled=(marker,))
    parser = MistralParser()
    pieces = [piece for id in ids for piece in parser.put(text.put(id))] + parser.put(text.end()) + parser.end()
    assert "".join(piece for piece in pieces if isinstance(piece, str)) == "ok"
    (start, *rest) = [piece for piece in pieces if isinstance(piece, CallDelta)]
    assert start.name == "f"
    assert "".join(piece.arguments for piece in rest) == "{}"


def test_a_spelled_token_is_part_of_what_stop_strings_are_looked_for_in(tmp_path: Path) -> None:
    tokenizer = _tokenizer(tmp_path)
    marker = tokenizer.special_tokens["[TOOL_CALLS]"]
    text = OutputText(tokenizer, stop=("[TOOL",), spelled=(marker,))
    said = "".join(map(text.put, [*tokenizer.encode("a"), marker]))
    assert (said, text.found) == ("a", "[TOOL")
