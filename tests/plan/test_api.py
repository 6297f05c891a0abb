"""`capibara.plan.plan(...)` from Python: any function, a loss, a name; what each keyword does and what is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import capibara
from capibara.mesh import with_sharding_constraint
from capibara.parallel.training_step import training_job
from capibara.plan.result import Plan
from capibara.prices.spot import SpotAssumptions

PARAMS = {
    "up": jax.ShapeDtypeStruct((256, 1024), jnp.float32),
    "down": jax.ShapeDtypeStruct((1024, 256), jnp.float32),
}
BATCH = {"x": jax.ShapeDtypeStruct((512, 256), jnp.float32)}


def _forward(params: Any, x: jax.Array) -> jax.Array:
    y = with_sharding_constraint(jnp.tanh(x @ params["up"]), ("batch", "mlp"))
    return with_sharding_constraint(y @ params["down"], ("batch", None))


def _loss(params: Any, batch: Any) -> jax.Array:
    return jnp.mean(_forward(params, batch["x"]) ** 2)


@pytest.mark.quick
def test_a_loss_is_planned_and_confirmed_in_this_process() -> None:
    plan = capibara.plan.plan(_loss, (PARAMS, BATCH), on="v4-8", train=True, level="xla", top=1, tokens=1000)
    assert isinstance(plan, Plan)
    assert plan.fits
    assert plan.level == "xla"
    assert plan.best is not None
    assert plan.best.compiled is not None
    assert plan.best.compiled.arguments == pytest.approx(plan.best.estimate.memory.arguments, rel=0.01)
    # AdamW keeps two moments of each weight, and a count.
    assert plan.state_bytes == pytest.approx(3 * 2 * 256 * 1024 * 4, abs=64)
    assert plan.tokens == 1000
    assert "XLA-partitioned" in str(plan)


def test_any_function_and_what_its_keywords_change() -> None:
    x = BATCH["x"]
    common: dict[str, Any] = {"on": "v4-8", "roles": ("params", "batch"), "tokens": 512}
    plan = capibara.plan.plan(_forward, (PARAMS, x), mesh={"data": 4}, **common)
    assert plan.best is not None
    assert {name: size for name, size in plan.best.layout.mesh.axes.items() if size > 1} == {"data": 4}
    assert plan.state_bytes == 2 * 256 * 1024 * 4
    small = capibara.plan.plan(_forward, (PARAMS, x), target="memory", top=5, **common)
    assert small.best is not None
    assert small.best.bytes <= plan.best.bytes
    assert len(small.candidates) > 1
    often = capibara.plan.plan(
        _forward, (PARAMS, x), mesh="data=4", spot=SpotAssumptions(preemptions_per_host_hour=3.0), **common
    )
    assert often.bills[1].usd_per_billion_tokens is not None
    assert plan.bills[1].usd_per_billion_tokens is not None
    assert often.bills[1].usd_per_billion_tokens > plan.bills[1].usd_per_billion_tokens


def test_a_job_and_a_name() -> None:
    job = training_job(_loss, PARAMS, BATCH, optimizer="sgd", knobs={"remat": ("none",), "accumulate": (1,)})
    assert capibara.plan.plan(job, on="h200").tokens == job.tokens
    with pytest.raises(ValueError, match="Did you mean 'llama-7b'"):
        capibara.plan.plan("llama-8b")


def test_a_function_that_does_not_trace_keeps_its_own_error() -> None:
    def broken(params: Any, x: jax.Array) -> jax.Array:
        return params["missing"] @ x

    with pytest.raises(KeyError, match="missing"):
        capibara.plan.plan(broken, (PARAMS, BATCH["x"]))


@pytest.mark.parametrize(
    ("program", "keywords", "said"),
    [
        (_loss, {}, "a function and no args"),
        (_loss, {"args": (PARAMS,), "train": True}, "loss\\(params, batch\\)"),
        (_loss, {"args": (PARAMS, BATCH), "train": True, "roles": ("params", "batch")}, "roles is not taken"),
        (_loss, {"args": (PARAMS, BATCH), "optimizer": "sgd"}, "optimizer is not taken"),
        ("llama-1b", {"args": (PARAMS,)}, "args is not taken with a named target"),
        ("llama-1b", {"tokens": 5}, "tokens is not taken"),
        (_loss, {"args": (PARAMS, BATCH), "on": "v4-33"}, "use v4-32"),
        (_loss, {"args": (PARAMS, BATCH), "on": "v4-8", "mesh": {"data": 8}}, "use data=4"),
        (_loss, {"args": (PARAMS, BATCH), "memory_limit_gb": 0}, "above 0"),
    ],
)
def test_what_is_not_taken_is_refused(program: Any, keywords: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        capibara.plan.plan(program, **keywords)


def test_importing_the_room_is_light() -> None:
    import subprocess
    import sys

    code = "import sys, capibara; capibara.plan; capibara.prices; print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.parametrize(
    ("fn", "args"), [(lambda x: x * x, (jax.ShapeDtypeStruct((), "float32"),)), (lambda: jnp.ones(3), ())]
)
def test_what_cannot_be_divided_fits_whole(fn: Any, args: tuple[Any, ...]) -> None:
    plan = capibara.plan.plan(fn, args, on="v4-8")
    assert plan.fits
    assert "no argument is divided over the 4 chips: each has all of them" in plan.notes


def test_how_far_from_fitting_arguments_alone_are() -> None:
    """400 GiB over four chips: an answer, on a given mesh too, and no complaint about the mesh."""
    x = jax.ShapeDtypeStruct((1024, 100 * 2**20), "float32")
    for mesh in (None, "data=4"):
        made = capibara.plan.plan(lambda x: x.sum(), (x,), on="v4-8", mesh=mesh)
        assert not made.fits
        assert made.best is None
        assert "needs 100.0 of 30.8 GiB a chip for its arguments alone" in made.closest
        assert f"DOES NOT FIT: at best {made.closest}" in str(made)


@pytest.mark.parametrize(("gib", "said"), [(100, False), (120, True)])
def test_a_gpu_of_which_jax_takes_a_part(gib: int, said: bool) -> None:
    made = capibara.plan.plan(
        lambda x: x.sum(), (jax.ShapeDtypeStruct((gib, 2**28), "float32"),), on="h200", roles=("params",)
    )
    assert made.fits
    assert any("XLA_PYTHON_CLIENT_MEM_FRACTION=0.91" in note for note in made.notes) == said
