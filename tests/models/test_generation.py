"""Text from a decoder: which tokens may be drawn, and which numbers of drawing are refused."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.errors import UnknownNameError
from capibara.models import ModularCapibaraModel, decoder, load_preset
from capibara.models.generation import sample
from capibara.models.restored import load_model

SHARES = np.array([0.5, 0.3, 0.15, 0.05])


def _drawn(**options: float) -> set[int]:
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(SHARES)), (512, 4))
    return set(np.asarray(sample(logits, jax.random.key(0), 1.0, **options)).tolist())


@pytest.mark.quick
def test_top_k_and_top_p_leave_the_likeliest() -> None:
    assert _drawn() == {0, 1, 2, 3}
    assert _drawn(top_k=2) == {0, 1}
    assert _drawn(top_p=0.9) == {0, 1, 2}
    assert _drawn(top_p=0.0) == {0}
    assert _drawn(top_k=3, top_p=0.8) == {0, 1}  # of the three that are left 0.5 / 0.95 and 0.3 / 0.95


@pytest.mark.quick
@pytest.mark.parametrize(
    ("option", "rule"),
    [
        ({"temperature": -1.0}, "temperature is 0 or more"),
        ({"top_k": -1}, "top_k is 0"),
        ({"top_p": 1.5}, "top_p is"),
        ({"seed": 2**63}, "seed is a 64-bit number"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(option: dict[str, float], rule: str) -> None:
    model = ModularCapibaraModel(load_preset("dev").model)
    with pytest.raises(ValueError, match=rule):
        model.generate([1, 2], max_tokens=1, **option)


@pytest.mark.quick
def test_a_model_is_computed_in_what_is_asked_for() -> None:
    for asked, dtype in ((None, "bfloat16"), ("bfloat16", "bfloat16"), ("float32", "float32")):
        model, origin = load_model("small", asked)
        assert model._dtype == dtype
        assert origin.endswith("computed in float32") == (dtype == "float32")
    with pytest.raises(UnknownNameError, match="bfloat16"):
        load_model("small", "float16")


def test_another_way_of_drawing_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(load_preset("dev").model, hidden=32, layers=1, max_length=64)
    model = ModularCapibaraModel(config, precision="float32")
    traced: list[int] = []
    logits = decoder.logits
    monkeypatch.setattr(decoder, "logits", lambda *args: (traced.append(1), logits(*args))[1])
    ways: list[dict[str, float]] = [{"temperature": t} for t in (0.0, 0.7, 1.3)]
    ways += [
        {"temperature": 5.0, "top_k": 1},
        {"temperature": 5.0, "top_p": 0.0},
        {"temperature": 5.0, "top_k": 2**40, "seed": 2**62},
    ]
    texts = [[int(t[0]) for t, _ in model.stream([[1, 2]], max_tokens=6, **way)] for way in ways]
    assert len(traced) == 2, "the prompt's program and the next token's"
    assert texts[0] == texts[3] == texts[4], "the likeliest, whichever way it is asked for"
    assert texts[5] != texts[0]


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
