"""The ring kernels with remote copies: emulated with race detection on 4 and 8 devices, and lowered for TPU."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from capibara.compile import lower_for
from capibara.compile.kernels import implementation_program
from capibara.errors import ImplementationRefused
from capibara.kernels import interpret, target
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Case, standard_normal
from capibara.kernels.ops import collective
from capibara.kernels.ops.collective import ops
from capibara.kernels.ops.collective.over_mesh import each_device
from capibara.kernels.ops.collective.tpu import ring
from capibara.kernels.ops.collective.tpu.matmul import RingMatmulConfig
from capibara.kernels.ops.collective.tpu.ring import RingConfig, barrier_number, block


def mesh_of(**sizes: int) -> Mesh:
    devices, kinds = jax.devices("cpu")[: math.prod(sizes.values())], (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=devices)


def each(fn: Any, mesh: Mesh, check_vma: bool = True) -> Any:
    return jax.jit(each_device(fn, mesh, check_vma))


KERNELS = [op for op in ops.OPS if "pallas_tpu" in op.implementations]


def cases(tag: str) -> list[Any]:
    """(op, case); on the newest JAX the all-reduce alone is emulated, which is both rings, and all is lowered."""
    return [
        pytest.param(op, c, id=f"{op.name}-{c.name}", marks=(pytest.mark.quick,) if c.name == "small_mean" else ())
        for op in KERNELS
        for c in op.cases
        if tag in c.tags
    ]


def races() -> bool:
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    state = interpret_pallas_call.races
    return state is not None and state.races_found


def operands(op: Op, case: Case) -> list[Any]:
    """Every device's operands, a row each."""
    devices = int(case.params["devices"])  # type: ignore[call-overload]
    return [standard_normal((devices, *shape), case.dtype, (0, i)) for i, shape in enumerate(case.shapes) if shape]


def compared(op: Op, case: Case, config: Any) -> None:
    mesh, arrays = mesh_of(x=int(case.params["devices"])), operands(op, case)  # type: ignore[call-overload]
    with interpret(detect_races=True):
        call = partial(op, implementation="pallas_tpu", config=config, **case.params)
        made = np.asarray(each(call, mesh, check_vma=False)(*arrays), np.float64)
        assert not races(), "unsynchronised accesses"
    wide = [np.asarray(x, np.float64) for x in arrays]
    plain = partial(op, implementation="xla", **case.params)
    with jax.enable_x64(True):
        right, size = (np.asarray(each(plain, mesh)(*map(abs_or_not, wide))) for abs_or_not in (np.asarray, np.abs))
    # The op's own tolerance, relative to the sum of the absolute values of all that is added.
    bound = op.tolerance(op.call(*case.args(), **case.params)) * size
    assert (np.abs(made - right) <= bound).all(), np.abs(made - right).max()


@pytest.mark.parametrize(("op", "case"), cases("test"))
def test_emulated(op: Op, case: Case) -> None:
    """Over several tiles; on three devices in one direction, on four and eight in two."""
    config = RingConfig(1 if case.params["devices"] == 3 else 2, 8, 128)
    compared(op, case, RingMatmulConfig(8, 128, 128) if "w" in op.operands else config)


@pytest.mark.quick
def test_emulated_over_one_and_both_axes_of_a_mesh() -> None:
    mesh = mesh_of(a=2, b=2)
    x = np.random.default_rng(0).integers(-9, 10, (4, 16, 128)).astype(np.float32)
    with interpret():
        both = each(partial(collective.all_gather, axis_name=("a", "b"), implementation="pallas_tpu"), mesh, False)(x)
        inner = each(partial(collective.all_gather, axis_name="b", implementation="pallas_tpu"), mesh, False)(x)
    np.testing.assert_array_equal(both, np.broadcast_to(x.reshape(64, 128), (4, 64, 128)))
    np.testing.assert_array_equal(inner, np.repeat(x.reshape(2, 32, 128), 2, axis=0))


@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="a race ends the program there, from other threads")
def test_without_word_of_a_free_slot_the_sums_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulation sees what the handshake is for: without it, a slot is written while it is read."""
    monkeypatch.setattr(ring, "say_free", lambda *given: None)
    monkeypatch.setattr(ring, "wait_free", lambda *given: None)
    # Not through the op, which keeps what it has traced.
    call = partial(ring.scatter_parts, names=("x",), config=RingConfig(1, 16, 128))
    with interpret(detect_races=True):
        jax.block_until_ready(each(call, mesh_of(x=6), check_vma=False)(np.ones((6, 6, 16, 128), np.float32)))
    assert races()


@pytest.mark.quick
@pytest.mark.parametrize(("op", "case"), cases("tpu"))
def test_lowers_for_tpu(op: Op, case: Case) -> None:
    fn, args = implementation_program(op, case, "pallas_tpu", None, "TPU v4")
    result = lower_for(fn, args, "tpu")
    assert result.ok, result.error
    assert result.custom_calls == ("tpu_custom_call",)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "other"), [("all_gather", "ring_reduce_scatter"), ("reduce_scatter", "ring_all_gather")]
)
def test_the_gradient_is_the_other_kernel(name: str, other: str) -> None:
    mesh = mesh_of(x=4)
    call = partial(getattr(collective, name), axis_name="x", implementation="pallas_tpu")
    x = np.random.default_rng(0).integers(-9, 10, (4, 64, 128)).astype(np.float32)
    gradient = jax.grad(lambda x: each(call, mesh)(x).sum())
    with target("tpu", "TPU v4"):
        assert other in str(jax.make_jaxpr(gradient)(x))
        assert lower_for(gradient, [jax.ShapeDtypeStruct(x.shape, x.dtype)], "tpu").ok
        stacked = partial(collective.all_gather, axis_name="x", axis=1, tiled=False, implementation="pallas_tpu")
        assert jax.eval_shape(jax.grad(lambda x: each(stacked, mesh)(x).sum()), x).shape == x.shape


def test_it_says_what_it_does_not_take() -> None:
    mesh = mesh_of(x=4)

    def asked(call: Any, *shape: int, dtype: str = "float32") -> None:
        with interpret():
            each(partial(call, axis_name="x", implementation="pallas_tpu"), mesh)(np.ones((4, *shape), dtype))

    with pytest.raises(ImplementationRefused, match="a multiple of 16 rows and 128 columns; got 12 x 128"):
        asked(collective.all_gather, 12, 128)
    with pytest.raises(ImplementationRefused, match="it adds; this call asks for the max"):
        asked(partial(collective.all_reduce, op="max"), 64, 128)
    with pytest.raises(ImplementationRefused, match="floats of 16 and 32 bits; got int32"):
        asked(collective.all_gather, 16, 128, dtype="int32")
    with pytest.raises(ImplementationRefused, match="splits axis 0 over the 4 devices"):
        asked(collective.all_reduce, 6, 128)
    with interpret("hlo"), pytest.raises(ImplementationRefused, match=r"interpret\('machine'\) emulates"):
        each(partial(collective.all_gather, axis_name="x", implementation="pallas_tpu"), mesh)(np.ones((4, 16, 128)))
    with pytest.raises(ValueError, match="1 or 2 directions"):
        RingConfig(3)
    with pytest.raises(ValueError, match="8 rows and 128 columns"):
        RingMatmulConfig(block_k=64)


@pytest.mark.quick
def test_rings_over_different_axes_have_different_barriers() -> None:
    """Else a neighbour on one axis that is ahead would be taken for one on another that is late."""
    mesh = ("a", "b", "c")
    numbers = [barrier_number(names, mesh) for names in (("a",), ("b",), ("c",), ("a", "b"), ("a", "b", "c"))]
    assert len(set(numbers)) == len(numbers)
    assert barrier_number(("b", "a"), mesh) == barrier_number(("a", "b"), mesh), "the same devices"

    def both(x: Any) -> Any:
        inner = collective.all_gather(x, "b", implementation="pallas_tpu")
        return collective.all_gather(inner, "a", implementation="pallas_tpu")

    with target("tpu", "TPU v4"):
        text = str(jax.make_jaxpr(each(both, mesh_of(a=2, b=2)))(np.ones((4, 16, 128), np.float32)))
    assert text.count("collective_id=2") == text.count("collective_id=1") == 1


def test_a_tile_divides_what_it_tiles() -> None:
    assert block(24, 8, 256) == 24
    assert block(24, 8, 16) == 8
    assert block(4096, 128, 1000) == 512
    assert block(128, 128, 64) == 128, "never less than the unit"
