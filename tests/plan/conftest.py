"""A plan made by hand: figures that a person can check, without a search."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from jax.sharding import PartitionSpec

from capibara.cost.result import Estimate, LinkUse, Memory, Part
from capibara.mesh.layout import Layout
from capibara.mesh.mesh import MeshConfig
from capibara.plan.money import bills
from capibara.plan.place import place
from capibara.plan.result import Candidate, Change, Plan
from capibara.prices.table import price_table

GiB = 2**30


def make_estimate(seconds: float = 2.0, total_gib: float = 20.0) -> Estimate:
    memory = Memory(
        arguments=12 * GiB,
        temporaries=(total_gib - 12) * GiB,
        limit=30.75 * GiB,
        peak_at="layers/mlp <train.py:40>",
        largest=tuple((f"buffer {index} [8, 2048]", (6 - index) * GiB) for index in range(6)),
        timeline=tuple((f"step {index}", (index % 9) * GiB) for index in range(4000)),
    )
    return Estimate(
        memory=memory,
        seconds=seconds,
        low=0.9 * seconds,
        high=1.3 * seconds,
        bound="matrix",
        compute_seconds=0.8 * seconds,
        link_seconds=0.3 * seconds,
        bubble_seconds=0.0,
        flops=3e14,
        model_flops=2.75e14,
        mfu=0.5,
        links=(
            LinkUse("all_gather", ("data",), "ICI", 64, 3 * GiB, 0.2, "weights <fully sharded>"),
            LinkUse("all_reduce", ("model",), "ICI", 128, 5 * GiB, 0.4, "partial sums"),
        ),
        parts=(
            Part("products & sums", 2.7e14, 4e11, 1.4, "matrix"),
            Part("norms", 1e10, 3e11, 0.3, "memory"),
            Part("copies", 0.0, 1e9, 0.01, "memory"),
        ),
        notes=("a loop of unknown length",),
    )


def make_layout(name: str = "data 4 x model 8, fully sharded") -> Layout:
    specs = (PartitionSpec("data", ("model", "expert")), PartitionSpec(None, "model"), PartitionSpec())
    return Layout(
        MeshConfig((4, 8)),
        specs,
        {"batch": "data", "mlp": ("model",), "vocab": None},
        (("remat", "full"),),
        (1,),
        1,
        name,
    )


@pytest.fixture
def make_plan() -> Callable[..., Plan]:
    def make(fits: bool = True, tokens: int | None = 65536, **changes: Any) -> Plan:
        where = place("v4-64")
        best = Candidate(make_layout(), make_estimate(total_gib=20.0 if fits else 44.0))
        second = Candidate(make_layout("data 32, <plain>"), make_estimate(2.5))
        made = {
            "name": "tiny & small",
            "where": where,
            "fits": fits,
            "candidates": (best, second) if fits else (best,),
            "bills": bills(best.estimate, where, tokens, 84e9, price_table()),
            "tokens": tokens,
            "state_bytes": 84e9,
            "changes": () if fits else (Change("half the batch", "v4-64", 1.1, 25 * GiB, 500.0),),
            "refused": (("data 3", "3 does not divide 32 rows"),),
            "notes": ("roles were guessed",),
        }
        return Plan(**{**made, **changes})

    return make
