"""The bottleneck of codes: values, the gradient that passes it, and what teaches its codebook."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.models.blocks.single import HIDDEN, drawn, inputs, model_with, run

from capibara.models.blocks import Sequences, Vq

CODES = 7


def _nearest(y: np.ndarray, codebook: np.ndarray) -> np.ndarray:
    return ((y[..., None, :] - codebook) ** 2).sum(-1).argmin(-1)


@pytest.mark.quick
@pytest.mark.parametrize("dim", [0, 4])
def test_each_token_becomes_its_nearest_code(dim: int) -> None:
    model = model_with("vq", codes=CODES, dim=dim)
    w, x = drawn(model), inputs()
    assert w["codebook"].shape == (CODES, dim or HIDDEN)
    y, loss, metrics = run(model, w, x)
    entered = x @ w["in"]
    indices = _nearest(entered, w["codebook"])
    codes = w["codebook"][indices]
    np.testing.assert_allclose(y, codes @ w["out"], atol=1e-5, rtol=1e-5)
    distance = np.mean((codes - entered) ** 2)
    assert float(loss) == pytest.approx(1.25 * distance, rel=1e-5)
    share = np.bincount(indices.ravel(), minlength=CODES) / indices.size
    perplexity = np.exp(-np.sum(share[share > 0] * np.log(share[share > 0])))
    assert float(metrics["vq_perplexity"]) == pytest.approx(perplexity, rel=1e-5)


@pytest.mark.quick
def test_the_gradient_passes_straight_through_and_the_loss_teaches() -> None:
    model = model_with("vq", codes=CODES, dim=4, commitment=0.5, loss_weight=3.0)
    block, w, x = model.blocks["vq"], drawn(model), inputs()
    params = {name: jnp.asarray(value, jnp.float32) for name, value in w.items()}
    towards = np.random.default_rng(5).standard_normal(x.shape)

    def value(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(block(model, params, x, Sequences()).value * towards)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return block(model, params, x, Sequences()).loss

    x32 = jnp.asarray(x, jnp.float32)
    (of_value, of_value_x), (of_loss, of_loss_x) = jax.jit(
        lambda p, x: (jax.grad(value, (0, 1))(p, x), jax.grad(loss, (0, 1))(p, x))
    )(params, x32)
    entered = x @ w["in"]
    codes = w["codebook"][_nearest(entered, w["codebook"])]
    back = towards @ w["out"].T  # as if what entered had not been replaced
    close = {"atol": 1e-5, "rtol": 1e-4}
    np.testing.assert_allclose(of_value_x, back @ w["in"].T, **close)
    np.testing.assert_allclose(of_value["in"], np.einsum("bth,btd->hd", x, back), **close)
    np.testing.assert_allclose(of_value["out"], np.einsum("btd,bth->dh", codes, towards), **close)
    assert not np.any(of_value["codebook"]), "only its own loss teaches the codebook"

    pull = 2 * (codes - entered) / entered.size
    wanted = np.zeros(w["codebook"].shape)
    np.add.at(wanted, _nearest(entered, w["codebook"]), 3.0 * pull)
    np.testing.assert_allclose(of_loss["codebook"], wanted, **close)
    np.testing.assert_allclose(of_loss_x, -3.0 * 0.5 * pull @ w["in"].T, **close)
    assert not np.any(of_loss["out"])


def test_every_key_is_tested_and_bad_ones_are_refused() -> None:
    assert {field.name for field in dataclasses.fields(Vq)} == {"codes", "dim", "commitment", "loss_weight"}
    for keys, said in (
        ({"codes": 1}, "2 codes or more"),
        ({"codes": 4, "dim": -1}, "dim"),
        ({"codes": 4, "commitment": -1.0}, "commitment"),
        ({"codes": 4, "loss_weight": -1.0}, "loss_weight"),
    ):
        with pytest.raises(ValueError, match=said):
            model_with("vq", **keys)
