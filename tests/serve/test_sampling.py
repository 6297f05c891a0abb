"""Drawing on the device: each parameter does what it says, and a row's draw is its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.serve.engines import answers, engine_of, model_of, prompts_of, run, wanted

from capibara.serve import Request, SamplingParams, sampling

VOCAB = 40
DEFAULTS: dict[str, float] = {
    "number": 3, "seed_high": 0, "seed_low": 7, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
    "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "slot": 0,
}  # fmt: skip
WHOLE = ("number", "seed_high", "seed_low", "top_k", "slot")

_draw = jax.jit(sampling.draw, static_argnums=2)


def rows_of(count: int, **changes: Any) -> sampling.Rows:
    given = {**DEFAULTS, **changes}
    return sampling.Rows(
        **{
            name: jnp.broadcast_to(jnp.asarray(value, jnp.int32 if name in WHOLE else jnp.float32), (count,))
            for name, value in given.items()
        }
    )


def logits_of(rows: int = 1, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (rows, VOCAB)) * 2


def drawn(logits: jax.Array, form: sampling.Form = "filtered", count: int = 400, **changes: Any) -> np.ndarray:
    """Many draws from one row, each of another token number."""
    rows = rows_of(count, number=np.arange(count), **changes)
    return np.asarray(_draw(jnp.broadcast_to(logits, (count, VOCAB)), rows, form))


def share(logits: jax.Array) -> np.ndarray:
    return np.asarray(jax.nn.softmax(logits, axis=-1))[0]


@pytest.mark.quick
def test_temperature_zero_is_the_likeliest_in_every_form() -> None:
    logits = logits_of(8)
    best = np.argmax(np.asarray(logits), -1)
    for form in sampling.FORMS[:3]:
        assert (np.asarray(_draw(logits, rows_of(8, temperature=0.0), form)) == best).all()


def test_the_least_temperature_is_as_good_as_none() -> None:
    logits = jnp.full((1, VOCAB), 40.0).at[0, 9].set(60.0)  # divided by so little, all of them are infinite
    assert set(drawn(logits, "drawn", 8, temperature=2e-38)) == {9}


def test_draws_follow_the_odds_and_temperature_sharpens_them() -> None:
    logits = logits_of()
    for temperature in (1.0, 0.5):
        tokens = drawn(logits, "drawn", 6000, temperature=temperature)
        odds = share(logits / temperature)
        seen = np.bincount(tokens, minlength=VOCAB) / len(tokens)
        # Four deviations of a share of 6,000 draws.
        assert (np.abs(seen - odds) <= 4 * np.sqrt(odds * (1 - odds) / len(tokens)) + 1e-3).all()


@pytest.mark.quick
def test_filters_keep_what_they_say() -> None:
    logits = logits_of()
    order, odds = np.argsort(-np.asarray(logits)[0]), share(logits)
    assert set(drawn(logits, top_k=3)) == set(order[:3])
    assert set(drawn(logits, top_k=1)) == {order[0]}
    fewest = int(np.searchsorted(np.cumsum(odds[order]), 0.6)) + 1
    assert set(drawn(logits, top_p=0.6)) == set(order[:fewest])
    assert set(drawn(logits, top_p=0.0)) == {order[0]}
    assert set(drawn(logits, min_p=0.3)) == set(np.flatnonzero(odds >= 0.3 * odds.max()))
    # top_p's share is of what top_k left.
    left = odds[order[:4]] / odds[order[:4]].sum()
    fewest = int(np.searchsorted(np.cumsum(left), 0.8)) + 1
    assert set(drawn(logits, top_k=4, top_p=0.8)) == set(order[:fewest])


def test_what_is_not_asked_for_changes_no_draw() -> None:
    logits = logits_of()
    assert (drawn(logits, "drawn") == drawn(logits, "filtered")).all()
    assert (drawn(logits, "filtered", top_k=VOCAB + 5) == drawn(logits, "drawn")).all()


@pytest.mark.quick
def test_a_draw_hangs_on_seed_and_number_and_not_on_its_neighbours() -> None:
    logits = logits_of(6)
    seeds = np.arange(6)
    together = np.asarray(_draw(logits, rows_of(6, seed_low=seeds), "drawn"))
    for row in range(6):
        alone = _draw(logits[row : row + 1], rows_of(1, seed_low=row), "drawn")
        assert int(alone[0]) == together[row]
    logits = jnp.zeros((1, VOCAB))
    assert len(set(drawn(logits, "drawn", 50))) > 10
    assert (drawn(logits, "drawn", 50) != drawn(logits, "drawn", 50, seed_low=8)).any()
    assert (drawn(logits, "drawn", 50) != drawn(logits, "drawn", 50, seed_high=1)).any()


@pytest.mark.quick
def test_penalties_move_the_tokens_that_came_before() -> None:
    logits = jnp.zeros((1, VOCAB)).at[0, :4].set(jnp.array([4.0, 3.5, -1.0, 2.0]))
    output = jnp.zeros((2, VOCAB), jnp.int32).at[0, 0].set(3)
    prompt = jnp.zeros((2, VOCAB), bool).at[0, 1].set(True)
    counts = sampling.Counts(output, prompt)

    def best(**changes: Any) -> int:
        return int(_draw(logits, rows_of(1, temperature=0.0, **changes), "penalised", counts=counts)[0])

    assert best() == 0
    assert best(presence_penalty=0.4) == 0
    assert best(presence_penalty=0.6) == 1  # once, however often it came
    assert best(frequency_penalty=0.2) == 1  # for each time
    assert best(repetition_penalty=1.1) == 0
    assert best(repetition_penalty=3.0) == 3  # of the prompt too
    assert best(repetition_penalty=3.0, slot=1) == 0  # another sequence's


def test_a_grammar_s_bits_are_all_that_can_be_drawn() -> None:
    allowed = np.zeros((1, 2), np.uint32)
    allowed[0, 1] = 1 << (35 - 32)
    token = _draw(logits_of(), rows_of(1, temperature=0.0), "full", allowed=jnp.asarray(allowed))
    assert int(token[0]) == 35


def test_log_probabilities_are_the_models_own() -> None:
    logits = logits_of(3)
    own, tokens, top = jax.jit(sampling.logprobs)(logits, jnp.array([1, 2, 3]))
    expected = np.asarray(jax.nn.log_softmax(logits, -1))
    np.testing.assert_allclose(np.asarray(own), expected[np.arange(3), [1, 2, 3]], rtol=1e-5)
    np.testing.assert_allclose(np.asarray(top), -np.sort(-expected)[:, :20], rtol=1e-5)
    assert (np.asarray(tokens)[:, 0] == expected.argmax(-1)).all()


def test_a_request_draws_the_same_whatever_it_is_batched_with(programs: Path) -> None:
    engine = engine_of(model_of("attention"), programs)
    prompts = prompts_of(5, 9, 12)
    asked = {"temperature": 1.5, "seed": 11}
    alone = answers(engine, prompts[:1], **asked)
    assert alone == answers(engine, prompts, **asked)[:1]
    assert alone == answers(engine_of(model_of("attention"), programs, decode_steps=3), prompts, **asked)[:1]
    assert alone != answers(engine, prompts[:1], temperature=1.5, seed=12)
    assert alone != [wanted("attention", prompts[0])]
    # Beside one that is filtered and penalised, in whose program it is drawn then.
    mixed = [
        Request("mine", prompts[0], SamplingParams(max_tokens=8, ignore_eos=True, **asked)),
        Request("other", prompts[1], SamplingParams(max_tokens=8, top_k=3, frequency_penalty=1.0, ignore_eos=True)),
    ]
    assert [t for output in run(engine, mixed)["mine"] for t in output.tokens] == alone[0]


def test_requests_without_a_seed_differ_and_come_again_with_the_engine_s(programs: Path) -> None:
    (prompt,) = prompts_of(5)
    engine = engine_of(model_of("attention"), programs)
    first, second = answers(engine, [prompt, prompt], temperature=1.5)
    assert first != second
    again = engine_of(model_of("attention"), programs)
    assert answers(again, [prompt, prompt], temperature=1.5) == [first, second]
    other = engine_of(model_of("attention"), programs, seed=5)
    assert answers(other, [prompt, prompt], temperature=1.5) != [first, second]


def test_log_probabilities_and_penalties_through_the_engine(programs: Path) -> None:
    engine = engine_of(model_of("attention"), programs)
    (prompt,) = prompts_of(5)
    plain = wanted("attention", prompt)
    asked = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=3)
    outputs = run(engine, [Request("a", prompt, asked)])["a"]
    told = [each for output in outputs for each in output.logprobs or ()]
    assert [each.token for each in told] == plain
    for each in told:
        assert len(each.top) == 3
        assert each.top[0] == (each.token, pytest.approx(each.logprob))
    # No token twice: those that came are pushed far down, also by a request that was sent away and came back.
    (once,) = answers(engine, [prompt], presence_penalty=2.0, repetition_penalty=50.0)
    assert len(set(once)) == len(once)
    assert once != plain or len(set(plain)) == len(plain)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"max_tokens": 0}, "max_tokens is 1 or more"),
        ({"temperature": -1}, "temperature is from 0 to"),
        ({"temperature": "hot"}, "temperature is a number"),
        ({"top_p": 1.5}, "top_p is from 0 to 1"),
        ({"logprobs": 21}, "logprobs is from 0 to 20"),
        ({"repetition_penalty": 0}, "repetition_penalty is above 0"),
        # What the device's 32 bits do not hold.
        ({"repetition_penalty": 1e39}, "repetition_penalty is above 0"),
        ({"temperature": 1e39}, "temperature is from 0 to"),
        ({"top_k": 2**31}, "top_k is from 0 to"),
        ({"stop_token_ids": (5, 2**70)}, "stop_token_ids are token ids"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids are token ids"),
        ({"stop": ("",)}, "A stop string has a character"),
        ({"regex": "a", "grammar": "b"}, "one of json_schema, regex and grammar"),
        ({"seed": 2**70}, "seed is a 64-bit number"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SamplingParams(**changes)
