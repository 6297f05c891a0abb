"""Dimensions that are split together, found in a whole training step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import pytest

from capibara.program import trace


@pytest.mark.quick
@pytest.mark.parametrize("fused", [True, False])
def test_the_groups_of_a_decoder(llama: ModuleType, fused: bool) -> None:
    config = dataclasses.replace(llama.SHAPES["tiny"], fused=fused, remat="full")
    params = llama.param_shapes(config)
    args = (params, llama.state_shapes(params), llama.batch_shapes(4, 32))
    step = functools.partial(llama.step, config=config)
    program = trace(step, args, donate=(0, 1), roles=("params", "state", "batch"), device_kind="TPU v4")
    groups = program.groups

    def held(group: Any, role: str = "params") -> dict[str, int]:
        return {
            program.arguments[a].path.split("'")[-2]: d
            for a, d in group.members
            if program.arguments[a].role == role
        }  # fmt: skip

    named = {group.names[0]: group for group in groups if group.names}
    assert held(named["heads"]) == {"query": 2, "key": 2, "value": 2, "out": 1}
    assert (named["heads"].size, named["heads"].parts) == (2, 2)  # of the keys: queries share them
    assert held(named["mlp"]) == {"gate": 2, "up": 2, "down": 1}
    assert held(named["vocab"]) == {"unembed": 1}
    assert held(named["batch"], "batch") == {"inputs": 0, "targets": 0}
    assert named["batch"].batch
    assert held(named["sequence"], "batch") == {"inputs": 1, "targets": 1}

    def path(number: int) -> str:
        return program.arguments[number].path.split("'")[-2]

    assert {path(a) for a in named["mlp"].contracted} == {"down"}
    assert {path(a) for a in named["mlp"].free} == {"gate", "up"}
    layers = [group for group in groups if group.stacked]
    assert len(layers) == 1
    assert set(held(layers[0]).values()) == {0}
    assert layers[0].size == config.layers
    (rows,) = [group for group in groups if group.looked_up and not group.names]
    assert held(rows) == {"embed": 0}
    (width,) = [group for group in groups if "norm" in held(group)]
    assert held(width)["embed"] == 1
    assert held(width)["out"] == 3
    assert held(width)["norm_mlp"] == 1
    # The optimizer's arrays are tied to their weights, dimension by dimension.
    count = len([a for a in program.arguments if a.role == "params"])
    of = groups.of
    first = [n for n, a in enumerate(program.arguments) if a.path.startswith("state['first']")]
    assert [of[n] for n in first] == [of[n] for n in range(count)]


def test_a_reshape_is_tied_by_its_outer_part(shape: Callable[..., Any]) -> None:
    def fn(w: Any, x: Any) -> Any:
        y = (x @ w).reshape(x.shape[0], 4, 6)  # 24 columns are 4 heads of 6
        return jnp.sum(y, axis=2)

    groups = trace(fn, (shape(5, 24), shape(8, 5))).groups
    columns = groups[groups.of[0][1]]
    assert (columns.size, columns.parts) == (24, 4)
    assert groups.of[0][0] == groups.of[1][1]
