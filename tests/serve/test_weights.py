"""Weights as serving holds them: side by side and by output on one device, each by itself over a mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.serve.engines import model_of

from capibara.models import decoder
from capibara.models.blocks.spec import BY_OUTPUT, product, products
from capibara.serve.weights import nbytes_on_one, prepared


def _products(config: Any, held: Any, apart: Any) -> tuple[list[Any], list[tuple[Any, int]]]:
    """Rows by every weight, that lies by output and by input; and of how many terms each sum is."""
    terms = []

    @jax.jit  # all of them together: each alone would be a program or two
    def multiplied(held: Any, apart: Any) -> tuple[list[Any], list[Any]]:
        found, wanted = [], []
        for number, names in enumerate(config.period):
            for place, block_name in enumerate(names):
                slot, block = decoder.slot_of(names, place), config.blocks[block_name]
                by_output, by_input = held["layers"][number][slot], apart["layers"][number][slot]
                joint = [weight for group in block.joint_products() for weight in group]
                for weight, inputs in block.products().items():
                    shape = by_input[weight].shape
                    terms.append(int(np.prod(shape[:inputs])))
                    drawn = np.random.default_rng(len(found)).normal(size=(3, *shape[:inputs]))
                    rows = jnp.asarray(drawn, jnp.float32)
                    wanted.append(product(by_input, weight, rows, inputs))
                    if weight in joint:
                        [group] = [group for group in block.joint_products() if weight in group]
                        shapes = {one: by_input[one].shape[1:] for one in group}
                        found.append(products(by_output, shapes, rows)[group.index(weight)])
                    else:
                        assert by_output[weight + BY_OUTPUT].shape == (*shape[inputs:], terms[-1])
                        found.append(product(by_output, weight, rows, inputs))
                    assert weight not in by_output
        return found, wanted

    found, wanted = multiplied(held, apart)
    return found, list(zip(wanted, terms, strict=True))


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("name", ["attention", "hybrid"])
def test_weights_by_output_multiply_as_those_by_input_and_lie_there_once(name: str, int8: bool) -> None:
    model = model_of(name)
    held = prepared(model.config, model.params, jnp.float32, joint=True, int8=int8)
    apart = prepared(model.config, model.params, jnp.float32, joint=False, int8=int8)
    assert nbytes_on_one(held) == nbytes_on_one(apart), "nothing is held twice"
    found, wanted = _products(model.config, held, apart)
    assert len(found) >= 4
    for mine, (right, terms) in zip(found, wanted, strict=True):
        # Sums of so many terms in another order.
        np.testing.assert_allclose(mine, right, atol=terms * 2.0**-23 * np.abs(right).max())
