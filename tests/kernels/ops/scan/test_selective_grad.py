"""The backward kernels of the selective scan: what every op must pass does not ask for their races, mesh and memory."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from capibara.kernels import explain, interpret, selective_scan, target, trust
from capibara.kernels.lab.check import check_output, expected
from capibara.kernels.ops.scan.selective.api import OPERANDS, SELECTIVE_SCAN_GRAD
from capibara.kernels.ops.scan.selective.cases import ALL, grad_case, make_case
from capibara.kernels.ops.scan.selective.tpu import backward
from capibara.kernels.ops.scan.selective.tpu.forward import ChannelsConfig

NONE: frozenset[str] = frozenset()
CHIPS = {"pallas_tpu": ("tpu", "TPU v4"), "hopper": ("gpu", "NVIDIA H200")}


def test_emulated_without_races() -> None:
    """Two blocks of time, the second of a few steps, and every operand."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    case = grad_case(make_case("own", 1, 130, 4, 3, NONE, dtype="float32", **ALL))
    wanted = expected(SELECTIVE_SCAN_GRAD, case.arrays(), case.params)
    with interpret(detect_races=True):
        made = SELECTIVE_SCAN_GRAD(*case.arrays(), implementation="pallas_tpu", **case.params)
    result = check_output(made, wanted)
    assert result.ok, result.why
    state = interpret_pallas_call.races
    assert state is not None
    assert not state.races_found


SPECS = {
    "x": P("data", None, "model"), "dt": P("data", None, "model"), "A": P("model"), "B": P("data"), "C": P("data"),
    "D": P("model"), "z": P("data", None, "model"), "dt_bias": P("model"), "initial_state": P("data", "model"),
}  # fmt: skip


def test_gradients_over_a_mesh() -> None:
    """Split by batch and channels: sums over devices where several share an operand, and nothing gathered."""
    case = make_case("mesh", 4, 5, 8, 3, NONE, dtype="float32", **ALL)
    given = dict(zip(OPERANDS, case.arrays(), strict=True))
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu")[:8])
    placed = {n: jax.device_put(x, NamedSharding(mesh, SPECS[n])) for n, x in given.items()}

    def loss(o: dict[str, Any], name: str) -> Any:
        y, last = selective_scan(**o, dt_softplus=True, return_state=True, implementation=name)
        return (y * y).sum() + last.sum()

    with interpret("hlo"):
        program = jax.jit(jax.grad(lambda o: loss(o, "pallas_tpu"))).lower(placed).compile()
        found = program(placed)
    wanted = jax.jit(jax.grad(lambda o: loss(o, "xla")))(given)
    assert "all-gather" not in program.as_text()
    assert "all-reduce" in program.as_text()
    for name in given:
        assert found[name].sharding.is_equivalent_to(NamedSharding(mesh, SPECS[name]), found[name].ndim), name
        # Sums of at most 20 numbers, of size up to about 100, in another order.
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-5, atol=1e-4, err_msg=name)


def _largest(jaxpr: Any) -> int:
    """Elements of the largest array anywhere in a traced program."""
    found = [int(np.prod(v.aval.shape)) for e in jaxpr.eqns for v in e.outvars]
    inner = [_largest(sub) for e in jaxpr.eqns for sub in jaxprs_in_params(e.params)]
    return max([0, *found, *inner])


@pytest.mark.parametrize("name", CHIPS)
def test_no_array_has_time_and_states(name: str) -> None:
    time, channels, states = 8192, 128, 16
    shapes = make_case("long", 1, time, channels, states, NONE, D=False).args()[:5]

    def loss(*operands: Any) -> Any:
        return selective_scan(*operands, implementation=name).astype(jnp.float32).sum()

    with target(*CHIPS[name]):
        traced = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2, 3, 4)))(*shapes)
    # A state a chunk of 32 steps is half as large as an operand.
    assert time * channels <= _largest(traced.jaxpr) < time * channels * 2


def _kernels(jaxpr: Any) -> list[Any]:
    inner = [one for e in jaxpr.eqns for sub in jaxprs_in_params(e.params) for one in _kernels(sub)]
    return [e for e in jaxpr.eqns if e.primitive.name == "pallas_call"] + inner


def test_vmem_is_counted_block_by_block() -> None:
    """Against what the kernel's own trace holds: two of each operand's and result's block, and scratch once."""
    case = grad_case(make_case("own", 1, 130, 200, 9, NONE, dtype="float32", **ALL))
    with target(*CHIPS["pallas_tpu"]):
        config = ChannelsConfig(256)
        fn = functools.partial(SELECTIVE_SCAN_GRAD, implementation="pallas_tpu", config=config, **case.params)
        back = _kernels(jax.make_jaxpr(fn)(*case.args()).jaxpr)[-1]
    mapping = back.params["grid_mapping"]
    refs = [v.aval for v in back.params["jaxpr"].invars]
    scratch = refs[len(refs) - mapping.num_scratch_operands :]

    def held(ref: Any) -> int:
        *lead, rows, lanes = ref.shape
        tile = 8 if rows > 1 else 2  # a line alone is not padded to a whole register
        tiles = math.prod(lead) * math.ceil(rows / tile) * math.ceil(lanes / 128)
        return tiles * tile * 128 * ref.dtype.itemsize

    blocks = refs[: len(refs) - len(scratch)]
    found = 2 * sum(map(held, blocks)) + sum(map(held, scratch))
    assert backward.block_bytes(states=16, channels=256) == found


@pytest.mark.quick
@pytest.mark.parametrize("name", CHIPS)
def test_dispatch_takes_the_kernel_forward_and_backward(name: str) -> None:
    shapes = make_case("own", 2, 64, 256, 16, NONE, **ALL).args()

    def loss(*operands: Any) -> Any:
        x, dt, A, B, C, D, z, bias, initial = operands
        y = selective_scan(x, dt, A, B, C, D, z=z, dt_bias=bias, initial_state=initial, dt_softplus=True)
        return y.astype(jnp.float32).sum()

    with target(*CHIPS[name]), trust("predicted"):
        found = explain(jax.grad(loss), *shapes).selections
    assert {s.call.op.name: s.implementation for s in found} == {"selective_scan": name, "selective_scan_grad": name}
