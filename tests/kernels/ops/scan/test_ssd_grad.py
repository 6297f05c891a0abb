"""The gradient op of state space duality: its TPU kernel under emulation, and its rules for meshes and vmap."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from capibara.kernels import gated_linear_attention, interpret, target
from capibara.kernels.core.spec import Case
from capibara.kernels.lab.check import check_output, expected
from capibara.kernels.ops.scan.ssd.api import SSD_GRAD
from capibara.kernels.ops.scan.ssd.cases import ALL, grad_case, make_case

NONE: frozenset[str] = frozenset()


@pytest.mark.parametrize(
    "case",
    [
        # Two chunks, heads in two parts whose sums are added, everything there is; two groups, nothing that may miss.
        make_case("parts", 1, 131, 4, 8, 1, 4, NONE, dtype="float32", **ALL),
        make_case("groups", 1, 7, 4, 5, 2, 4, NONE, dtype="float32", dt=False, D=False),
    ],
    ids=lambda case: case.name,
)
def test_the_tpu_kernel_under_race_detection(case: Case) -> None:
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    case = grad_case(case)
    arrays = case.arrays()
    with interpret(detect_races=True):
        made = SSD_GRAD(*arrays, implementation="pallas_tpu", **case.params)
    result = check_output(made, expected(SSD_GRAD, arrays, case.params))
    assert result.ok, result.why
    assert not interpret_pallas_call.races.races_found


def test_the_tpu_kernel_says_why_not() -> None:
    case = grad_case(make_case("no", 1, 128, 64, 256, 1, 512, NONE))
    with target("tpu", "TPU v4"):
        reason = SSD_GRAD.implementations["pallas_tpu"].refusal(SSD_GRAD.call(*case.args()))
    assert reason is not None
    assert "64 heads, 512 x 256 each, do not fit" in reason


@pytest.mark.parametrize("groups", [1, 4])
def test_a_mesh_splits_batch_and_heads(groups: int) -> None:
    """Nothing is gathered; what several devices share, D and one group's B and C, is summed over them."""
    case = grad_case(make_case("mesh", 2, 5, 4, 3, groups, 4, NONE, dtype="float32", **ALL))
    devices = jax.devices("cpu")[:4]
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=devices)
    shared = P("data", None, "model" if groups > 1 else None)
    rows, state = P("data", None, "model"), P("data", "model")
    specs = (rows, rows, shared, shared, rows, P("model"), state, rows, state)
    arrays = case.arrays()
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
    with interpret("hlo"):
        program = jax.jit(lambda *given: SSD_GRAD(*given, implementation="pallas_tpu")).lower(*placed).compile()
        made = program(*placed)
    result = check_output(made, expected(SSD_GRAD, arrays, case.params))
    assert result.ok, result.why
    text = program.as_text()
    assert "all-gather" not in text
    assert "all-reduce" in text


@pytest.mark.quick
@pytest.mark.parametrize("name", ["xla", "pallas_tpu", "reference"])
def test_a_mesh_of_explicit_axes(name: str) -> None:
    """Layouts are types there: of heads in groups, of both kinds of chunks, and of a kernel's operands."""
    case = grad_case(make_case("mesh", 2, 5, 4, 3, 2, 4, NONE, dtype="float32", **ALL))
    devices = jax.devices("cpu")[:4]
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2, devices=devices)
    rows, state = P("data", None, "model"), P("data", "model")
    specs = (rows, rows, rows, rows, rows, P("model"), state, rows, state)
    arrays = case.arrays()
    with jax.set_mesh(mesh), interpret("hlo"):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
        made = jax.jit(lambda *given: SSD_GRAD(*given, implementation=name))(*placed)
    result = check_output(made, expected(SSD_GRAD, arrays, case.params))
    assert result.ok, result.why
    assert made[0].sharding.spec[2] == "model"


@pytest.mark.parametrize("skip", [False, True])
def test_vmap_is_a_larger_batch(skip: bool) -> None:
    """With D it is not: D's gradient is a sum over the batch of each element alone."""
    case = grad_case(make_case("vmap", 2, 5, 2, 3, 1, 4, NONE, dtype="float32", D=skip))
    several = [case.arrays(seed) for seed in range(3)]
    stacked = [None if several[0][i] is None else jnp.stack([one[i] for one in several]) for i in range(9)]
    present = [i for i, x in enumerate(stacked) if x is not None]

    def one(*given: Any) -> Any:
        full: list[Any] = [None] * 9
        for i, x in zip(present, given, strict=True):
            full[i] = x
        return SSD_GRAD(*full, implementation="xla")

    made = jax.jit(jax.vmap(one))(*(stacked[i] for i in present))
    for number, arrays in enumerate(several):
        mine = jax.tree.map(lambda x, n=number: x[n], made)
        result = check_output(mine, expected(SSD_GRAD, arrays, case.params))
        assert result.ok, result.why


def test_linear_attention_is_differentiated_by_the_kernel() -> None:
    """One decay a head runs on the same op, backward too, and asks the same implementation."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((1, 20, 2, 4)), jnp.float32) for _ in range(3))
    fades = -jnp.asarray(rng.random((1, 20, 2)), jnp.float32)

    def total(name: str) -> Any:
        return lambda *given: jnp.sin(gated_linear_attention(*given, implementation=name)).sum()

    def gradients(name: str) -> Any:
        return jax.jit(jax.grad(total(name), argnums=(0, 1, 2, 3)))

    with interpret("hlo"):
        assert "capibara_ssd_grad" in str(jax.make_jaxpr(gradients("pallas_tpu"))(q, k, v, fades))
        found = gradients("pallas_tpu")(q, k, v, fades)
    for mine, right in zip(found, gradients("reference")(q, k, v, fades), strict=True):
        # Float32: sums of some tens of products of numbers up to about 10.
        np.testing.assert_allclose(mine, right, atol=3e-5)
