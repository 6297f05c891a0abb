"""Text from a decoder."""

from __future__ import annotations

import dataclasses

from capibara.models import ModularCapibaraModel, load_preset


def test_ids_that_the_tokenizer_has_not_are_never_drawn() -> None:
    """A vocabulary of 259 bytes and marks, filled up to 512: ids from 259 on stand for nothing."""
    config = dataclasses.replace(load_preset("dev").model, vocab=512, hidden=32, layers=1, max_length=64)
    model = ModularCapibaraModel(config, precision="float32")
    assert model.encode_prompt("ab") == [256, 97, 98]
    model.prompt_bos = False
    assert model.encode_prompt("ab") == [97, 98]
    beyond = []
    for words in (None, 259):
        drawn = [int(tokens[0]) for tokens, _ in model.stream([[1, 2]], max_tokens=40, temperature=5.0, words=words)]
        beyond.append(sum(token >= 259 for token in drawn))
    assert beyond[0] > 0
    assert beyond[1] == 0
    assert isinstance(model.generate("ab", max_tokens=8, temperature=5.0), str)
