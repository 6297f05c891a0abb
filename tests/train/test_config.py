"""The config of a run: its sections together."""

from __future__ import annotations

import pytest

from capibara.train.config import load_run


@pytest.mark.quick
def test_the_datas_tokenizer_is_the_models() -> None:
    run = load_run("dev", ["data.tokenizer=words/tokenizer.json"], environment={})
    assert run.preset.model.tokenizer == run.data.tokenizer == "words/tokenizer.json"
    run = load_run("dev", ["model.tokenizer=words/tokenizer.json"], environment={})
    assert run.preset.model.tokenizer == run.data.tokenizer == "words/tokenizer.json"


@pytest.mark.quick
def test_two_tokenizers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"one tokenizer.*'bytes'.*'words'.*set model.tokenizer alone"):
        load_run("dev", ["model.tokenizer=bytes", "data.tokenizer=words"], environment={})
