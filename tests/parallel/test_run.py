"""From a plan to a run: the same numbers as the step without a layout, on virtual devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import capibara
from capibara.parallel.optimizers import optimizer_named
from capibara.parallel.run import lower_program
from capibara.parallel.training_step import training_step

WIDTH, ROWS = 16, 16


def _loss(params: Any, batch: Any) -> Any:
    hidden = jnp.tanh(batch["x"] @ params["up"])
    return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)


def _arguments() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    shapes = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    params = {name: jnp.asarray(rng.standard_normal(shape, np.float32) / 8) for name, shape in shapes.items()}
    return params, {name: jnp.asarray(rng.standard_normal((ROWS, WIDTH), np.float32)) for name in ("x", "y")}


@pytest.mark.quick
@pytest.mark.parametrize("mesh", ["data=2,model=2", "data=4"])
def test_a_planned_step_runs_as_planned(mesh: str) -> None:
    params, batch = _arguments()
    plan = capibara.plan.plan(_loss, (params, batch), on="v4-8", train=True, mesh=mesh, calibrated=False)
    assert repr(plan).startswith("<Plan of _loss on v4-8: fits, data ")
    program = plan.program(jax.devices("cpu")[:4])
    state = optimizer_named("adamw", True)[0](params)
    placed = program.place(params, state, batch)
    wanted = jax.tree.leaves(plan.best.layout.specs) if plan.best is not None else []
    assert [leaf.sharding.spec for leaf in jax.tree.leaves(placed)] == wanted
    names = plan.as_dict()["arguments"]
    assert len(names) == len(wanted)
    assert names[:2] == ["args[0]['down']", "args[0]['up']"]
    made = program(*placed)
    right = jax.jit(training_step(_loss))(params, state, batch)  # the caller's arrays are still there
    # One step of Adam moves each parameter by about the rate, 3e-4, in the sign of its gradient; sums in another order
    # change the gradient by some roundings, and a parameter by less than a thousandth of that step.
    for got, expected in zip(jax.tree.leaves(made[0]), jax.tree.leaves(right[0]), strict=True):
        assert np.abs(np.asarray(got) - np.asarray(expected)).max() < 3e-7
    assert float(made[2]) == pytest.approx(float(right[2]), rel=4 * WIDTH * float(jnp.finfo(jnp.float32).eps))


@pytest.mark.parametrize("devices", [1, 4])
def test_a_step_is_traced_once_to_be_laid_out_and_lowered(devices: int) -> None:
    traced = 0

    def loss(params: Any, batch: Any) -> Any:
        nonlocal traced
        traced += 1
        return _loss(params, batch)

    where = "v4-8" if devices == 4 else "h200"
    plan = capibara.plan.plan(loss, _arguments(), on=where, train=True, calibrated=False)
    planned = traced
    lower_program(plan.program(jax.devices("cpu")[:devices]))
    assert traced == planned + 1


def test_what_cannot_be_placed_or_run_is_refused() -> None:
    params, batch = _arguments()
    plan = capibara.plan.plan(_loss, (params, batch), on="v4-8", train=True, calibrated=False)
    program = plan.program(jax.devices("cpu")[:4])
    with pytest.raises(ValueError, match=r"takes 3 arguments\. Got 2\. Fix: pass all of them"):
        program.place(params, batch)
    with pytest.raises(ValueError, match="Argument 0 is a tree like the one that was planned"):
        program.place(batch, batch, batch)
    large = {"up": jax.ShapeDtypeStruct((2**17, 2**18), "float32"), "down": jax.ShapeDtypeStruct((2**18, 2**17), "f4")}
    rows = {name: jax.ShapeDtypeStruct((4, 2**17), "float32") for name in ("x", "y")}
    too_large = capibara.plan.plan(_loss, (large, rows), on="v4-8", train=True, calibrated=False)
    with pytest.raises(ValueError, match="does not fit"):
        too_large.program()


def test_a_step_goes_on_with_what_it_returned_and_with_nothing_donated() -> None:
    params, batch = _arguments()
    plan = capibara.plan.plan(_loss, (params, batch), on="v4-8", train=True, mesh="data=4", calibrated=False)
    program = plan.program(jax.devices("cpu")[:4])
    state = optimizer_named("adamw", True)[0](params)
    placed = program.place(params, state, batch)
    after, moments, first = program(*placed)
    with pytest.raises(ValueError, match=r"donated argument is gone .* Got args\[0\]\['down'\], which an earlier call"):
        program(*placed)
    with pytest.raises(ValueError, match="donated argument is gone"):
        program.place(placed[0], state, batch)
    assert float(program(after, moments, placed[2])[2]) < float(first)
    with pytest.raises(ValueError, match=r"devices is a list of them\. Got 4\. Fix: pass jax\.devices"):
        plan.program(4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"needs 4 devices\. Got 2 cpu devices\. .*device_count=4"):
        plan.program(jax.devices("cpu")[:2])


@pytest.mark.parametrize(
    ("leaf", "got"),
    [
        (jnp.zeros((WIDTH, 2 * WIDTH)), r"float32\[16, 32\]"),
        (jnp.zeros((WIDTH, 4 * WIDTH), jnp.bfloat16), r"bfloat16\[16, 64\]"),
        (1.0, r"float32\[\]"),
        ("up", "<class 'str'>"),
    ],
    ids=["shape", "type", "number", "word"],
)
def test_an_argument_of_another_shape_or_type_is_refused(leaf: Any, got: str) -> None:
    params, batch = _arguments()
    plan = capibara.plan.plan(_loss, (params, batch), on="v4-8", train=True, mesh="data=4", calibrated=False)
    program = plan.program(jax.devices("cpu")[:4])
    state = optimizer_named("adamw", True)[0](params)
    with pytest.raises(ValueError, match=rf"Argument 0\['up'\] was planned as float32\[16, 64\]\. Got {got}\."):
        program.place({**params, "up": leaf}, state, batch)
