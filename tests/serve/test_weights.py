"""Weights as serving holds them: side by side and by output on one device, each by itself over a mesh."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from tests.serve.engines import model_of

from capibara.models import decoder
from capibara.models.blocks.spec import BY_OUTPUT, product, products
from capibara.serve.weights import nbytes_on_one, prepared


@pytest.mark.quick
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("name", ["attention", "hybrid"])
def test_weights_by_output_multiply_as_those_by_input_and_lie_there_once(name: str, int8: bool) -> None:
    model = model_of(name)
    held = prepared(model.config, model.params, jnp.float32, joint=True, int8=int8)
    apart = prepared(model.config, model.params, jnp.float32, joint=False, int8=int8)
    assert nbytes_on_one(held) == nbytes_on_one(apart), "nothing is held twice"
    looked_at = 0
    for number, names in enumerate(model.config.period):
        for place, block_name in enumerate(names):
            slot, block = decoder.slot_of(names, place), model.config.blocks[block_name]
            by_output, by_input = held["layers"][number][slot], apart["layers"][number][slot]
            joint = [weight for group in block.joint_products() for weight in group]
            for weight, inputs in block.products().items():
                shape = by_input[weight].shape
                rows = np.random.default_rng(looked_at).normal(size=(3, *shape[:inputs])).astype(np.float32)
                wanted = product(by_input, weight, jnp.asarray(rows), inputs)
                if weight in joint:
                    [group] = [group for group in block.joint_products() if weight in group]
                    shapes = {one: by_input[one].shape[1:] for one in group}
                    found = products(by_output, shapes, jnp.asarray(rows))[group.index(weight)]
                else:
                    assert by_output[weight + BY_OUTPUT].shape == (*shape[inputs:], int(np.prod(shape[:inputs])))
                    found = product(by_output, weight, jnp.asarray(rows), inputs)
                assert weight not in by_output
                # Sums of so many terms in another order.
                terms = int(np.prod(shape[:inputs]))
                np.testing.assert_allclose(found, wanted, atol=terms * 2.0**-23 * float(jnp.max(jnp.abs(wanted))))
                looked_at += 1
    assert looked_at >= 4
