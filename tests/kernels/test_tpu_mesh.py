"""On a TPU mesh a kernel is split by shard_map, since TPU's compiler has no hook to split it: emulated on 8 devices."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from capibara.errors import ImplementationRefused
from capibara.kernels import attention, explain, gemm, interpret, layer_norm, linear_recurrence, target
from capibara.kernels.core.op import Op, registry
from capibara.kernels.core.spec import Case, standard_normal
from capibara.kernels.lab.check import check_output, expected
from capibara.kernels.ops.attention.reference import reference
from capibara.mesh import use_rules

pytestmark = pytest.mark.quick
KERNEL = "pallas_tpu"


def _mesh(names: tuple[str, str] = ("data", "model"), kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), names, axis_types=(kind,) * 2, devices=jax.devices("cpu")[:8])


def _normal(seed: int, *shape: int) -> jax.Array:
    return standard_normal(shape, "float32", (seed,))


def _uniform(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).random(shape, np.float32))


def _qkv(heads: int = 4, kv_heads: int = 2) -> tuple[Any, Any, Any]:
    return _normal(0, 4, heads, 128, 64), _normal(1, 4, kv_heads, 128, 64), _normal(2, 4, kv_heads, 128, 64)


def _on_tpu(fn: Any, arrays: Any) -> tuple[Any, str]:
    """Result and program text of a jitted call, dispatched as for TPU and emulated."""
    with target("tpu", "TPU v4"), interpret("hlo"):
        compiled = jax.jit(fn).lower(*arrays).compile()
    return compiled(*arrays), compiled.as_text()


def _attended(q: Any, k: Any, v: Any) -> Any:
    return attention(q, k, v, layout="bhtd", causal=True, implementation=KERNEL)


# Float32 products by XLA on the CPU and sums of at most 128 terms of size one: a few units in the last place of each.
TOLERANCE = 128 * float(np.finfo(np.float32).eps)

_exact = jax.jit(functools.partial(reference, causal=True))  # one program for all tests of this file


def _far(got: Any, wanted: Any) -> float:
    """The largest difference, worked out on the host: on a mesh each step of it would be a program."""
    return float(np.abs(np.asarray(got) - np.asarray(wanted)).max())


def _layer_norm(x: Any, scale: Any) -> np.ndarray:
    rows = np.asarray(x, np.float64)
    return (rows - rows.mean(-1, keepdims=True)) / np.sqrt(rows.var(-1, keepdims=True) + 1e-5) * np.asarray(scale)


@pytest.mark.parametrize("set_mesh", [True, False])
def test_batch_and_heads_follow_the_table(set_mesh: bool) -> None:
    mesh = _mesh()
    arrays = [jax.device_put(x, NamedSharding(mesh, P("data", "model"))) for x in _qkv()]
    if set_mesh:
        with jax.set_mesh(mesh):
            got, text = _on_tpu(_attended, arrays)
    else:  # the arrays bring the mesh along
        got, text = _on_tpu(_attended, arrays)
    assert _far(got, _exact(*_qkv())) < TOLERANCE
    assert "CustomSPMDPartitioning" not in text
    assert "all-gather" not in text, "nothing moves where the arrays lie as the table says"
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), got.ndim)


def test_arrays_that_lie_otherwise_give_the_same() -> None:
    mesh = _mesh()
    arrays = [jax.device_put(x, NamedSharding(mesh, P(None, None, "data"))) for x in _qkv()]
    got, _ = _on_tpu(_attended, arrays)
    assert _far(got, _exact(*_qkv())) < TOLERANCE


def test_gradients_are_split_too() -> None:
    mesh = _mesh()
    arrays = [jax.device_put(x, NamedSharding(mesh, P("data", "model"))) for x in _qkv()]

    def loss(fn: Any, *given: Any) -> Any:
        return (fn(*given) ** 2).sum()

    got, text = _on_tpu(jax.grad(functools.partial(loss, _attended), argnums=(0, 1, 2)), arrays)
    with jax.default_matmul_precision("highest"):
        wanted = jax.jit(jax.grad(functools.partial(loss, _exact), argnums=(0, 1, 2)))(*_qkv())
    assert "CustomSPMDPartitioning" not in text
    for mine, exact in zip(got, wanted, strict=True):
        # A gradient sums 128 products of numbers up to the gradient's own size.
        assert _far(mine, exact) < TOLERANCE * np.abs(exact).max()


def test_heads_that_do_not_divide_stay_whole() -> None:
    mesh = _mesh()
    arrays = [jax.device_put(x, NamedSharding(mesh, P("data"))) for x in _qkv(heads=3, kv_heads=3)]
    got, text = _on_tpu(_attended, arrays)
    assert _far(got, _exact(*_qkv(3, 3))) < TOLERANCE
    assert "all-gather" not in text


def test_another_table_moves_the_split() -> None:
    mesh = _mesh(("rows", "columns"))
    arrays = [jax.device_put(x, NamedSharding(mesh, P("rows", "columns"))) for x in _qkv()]
    with use_rules({"batch": "rows", "heads": "columns"}):
        got, text = _on_tpu(_attended, arrays)
    assert "all-gather" not in text
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, P("rows", "columns")), got.ndim)


@pytest.mark.usefixtures("nothing_said_yet")
def test_axes_that_no_table_knows_run_whole_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    mesh = _mesh(("x", "y"))
    arrays = [jax.device_put(x, NamedSharding(mesh, P("x", "y"))) for x in _qkv()]
    got, text = _on_tpu(_attended, arrays)
    assert _far(got, _exact(*_qkv())) < TOLERANCE
    assert "all-gather" in text
    assert "runs whole on every device of a mesh with axes x, y" in caplog.text


@pytest.mark.usefixtures("nothing_said_yet")
def test_dropout_is_drawn_in_the_whole_batch_and_says_why_it_is_not_split(caplog: pytest.LogCaptureFixture) -> None:
    mesh = _mesh()
    placed = [jax.device_put(x, NamedSharding(mesh, P("data", "model"))) for x in _qkv()]

    def dropped(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, layout="bhtd", dropout_rate=0.3, dropout_key=jax.random.key(7), implementation=KERNEL)

    got, _ = _on_tpu(dropped, placed)
    alone, _ = _on_tpu(dropped, _qkv())
    np.testing.assert_array_equal(got, alone)
    assert "this call cannot be split (dropout" in caplog.text


def test_explicit_axes_say_where_arrays_lie() -> None:
    mesh = _mesh(("x", "y"), AxisType.Explicit)
    with jax.set_mesh(mesh):
        arrays = [jax.device_put(x, NamedSharding(mesh, P("x", "y"))) for x in _qkv()]
        got, text = _on_tpu(_attended, arrays)
    assert _far(got, _exact(*_qkv())) < TOLERANCE
    assert "all-gather" not in text


def test_sharded_arrays_outside_of_jit() -> None:
    mesh = _mesh(("x", "y"))
    arrays = [jax.device_put(x, NamedSharding(mesh, P("x", "y"))) for x in _qkv()]
    with target("tpu", "TPU v4"), interpret("hlo"):
        got = _attended(*arrays)
    assert _far(got, _exact(*_qkv())) < TOLERANCE
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, P("x", "y")), got.ndim)


@pytest.mark.parametrize("rows", [(8, 16), (64,)])
def test_rows_are_split(rows: tuple[int, ...]) -> None:
    mesh = _mesh()
    x, scale = _normal(0, *rows, 256), np.linspace(0.5, 1.5, 256, dtype=np.float32)
    placed = [jax.device_put(x, NamedSharding(mesh, P("data"))), jax.device_put(scale, NamedSharding(mesh, P()))]
    got, text = _on_tpu(lambda x, s: layer_norm(x, s, implementation=KERNEL), placed)
    assert _far(got, _layer_norm(x, scale)) < 256 * float(np.finfo(np.float32).eps)
    assert "all-gather" not in text


def test_channels_of_a_recurrence_are_split() -> None:
    mesh = _mesh()
    a, b = _uniform(0, 4, 32, 256), _normal(1, 4, 32, 256)
    placed = [jax.device_put(x, NamedSharding(mesh, P("data", None, "model"))) for x in (a, b)]
    got, text = _on_tpu(lambda a, b: linear_recurrence(a, b, implementation=KERNEL), placed)
    state, wanted = np.zeros((4, 256), np.float32), []
    for decay, added in zip(np.swapaxes(a, 0, 1), np.swapaxes(b, 0, 1), strict=True):
        state = decay * state + added
        wanted.append(state)
    assert _far(got, np.stack(wanted, 1)) < 32 * 8 * float(np.finfo(np.float32).eps)
    assert "all-gather" not in text


def test_a_product_whose_layout_nobody_knows_is_left_to_xla() -> None:
    mesh = _mesh()
    a, b = (jax.device_put(jnp.ones((256, 256), jnp.bfloat16), NamedSharding(mesh, P("data"))) for _ in range(2))
    with target("tpu", "TPU v4"):
        told = explain(lambda a, b: gemm(a, b), a, b)
        (selection,) = told.selections
        assert selection.implementation == "xla"
        assert "nothing says how these operands lie" in str(told)
        with pytest.raises(ImplementationRefused, match="inside shard_map, or on mesh axes of type Explicit"):
            jax.jit(lambda a, b: gemm(a, b, implementation=KERNEL)).lower(a, b)


@pytest.mark.parametrize("explicit", [0, 1])
def test_axes_of_both_types(explicit: int) -> None:
    """Explicit axes say where arrays lie; the table speaks for the Auto ones."""
    kinds = [AxisType.Auto, AxisType.Auto]
    kinds[explicit] = AxisType.Explicit
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=tuple(kinds), devices=jax.devices("cpu")[:8])
    with jax.set_mesh(mesh):
        arrays = [jax.device_put(x, NamedSharding(mesh, P("data", "model"))) for x in _qkv()]
        got, text = _on_tpu(_attended, arrays)
    assert _far(got, _exact(*_qkv())) < TOLERANCE
    assert "all-gather" not in text
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), got.ndim)


def _inside_a_shard_map(check_vma: bool) -> Any:
    """Attention where a shard_map around has taken the batch's axis and left the heads' to XLA."""
    return jax.shard_map(
        _attended, mesh=_mesh(), in_specs=P("data"), out_specs=P("data"), axis_names={"data"}, check_vma=check_vma
    )


def test_what_a_shard_map_around_left_is_split() -> None:
    arrays = [jax.device_put(x, NamedSharding(_mesh(), P("data", "model"))) for x in _qkv()]
    got, text = _on_tpu(_inside_a_shard_map(False), arrays)
    assert _far(got, _exact(*_qkv())) < TOLERANCE
    assert "all-gather" not in text
    assert got.sharding.is_equivalent_to(NamedSharding(_mesh(), P("data", "model")), got.ndim)


@pytest.mark.parametrize("check_vma", [True, False])
def test_what_a_shard_map_around_left_lowers_for_tpu(check_vma: bool) -> None:
    """A TPU kernel lowers only where every mesh axis is taken by a shard_map; so do its gradients."""
    arrays = [jax.device_put(x, NamedSharding(_mesh(), P("data"))) for x in _qkv()]
    loss = jax.grad(lambda *given: (_inside_a_shard_map(check_vma)(*given) ** 2).sum(), argnums=(0, 1, 2))
    with target("tpu", "TPU v4"):
        exported = jax.export.export(jax.jit(loss), platforms=["tpu"])(*arrays)
    assert "tpu_custom_call" in exported.mlir_module()


def test_arrays_know_their_mesh_whichever_is_active() -> None:
    x, scale = _normal(0, 8, 256), np.linspace(0.5, 1.5, 256, dtype=np.float32)
    mesh = _mesh()
    placed = [jax.device_put(x, NamedSharding(mesh, P("data"))), jax.device_put(scale, NamedSharding(mesh, P()))]
    with jax.set_mesh(_mesh(("x", "y"))), target("tpu", "TPU v4"), interpret("hlo"):
        got = layer_norm(*placed, implementation=KERNEL)
    assert _far(got, _layer_norm(x, scale)) < 256 * float(np.finfo(np.float32).eps)
    assert got.sharding.is_equivalent_to(placed[0].sharding, got.ndim)


def test_arrays_on_two_meshes_outside_of_jit() -> None:
    """One mesh is followed; what lies on the other is brought there."""
    a, b = _uniform(0, 4, 8, 128), _normal(1, 4, 8, 128)
    placed = (
        jax.device_put(a, NamedSharding(_mesh(), P())),
        jax.device_put(b, NamedSharding(_mesh(("x", "y")), P("x"))),
    )
    with target("tpu", "TPU v4"), interpret("hlo"):
        alone = linear_recurrence(a, b, implementation=KERNEL)
        got = linear_recurrence(*placed, implementation=KERNEL)
    np.testing.assert_array_equal(got, alone)


# Slow to emulate, and above or in their families' own suites with a mesh.
SLOW = ("attention", "attention_grad", "paged_attention", "linear_recurrence", "linear_recurrence_grad")


def _with_a_table() -> list[Any]:
    made = []
    for op in registry().values():
        case = next((case for case in op.cases if "shard" in case.tags), None)
        known = op.partition is not None and op.partition.logical and op.mesh_axes is None
        if KERNEL in op.implementations and known and case is not None:
            marks = [pytest.mark.slow] if op.name in SLOW else []
            made.append(pytest.param(op, case, id=op.name, marks=marks))
    return made


@pytest.mark.parametrize(("op", "case"), _with_a_table())
def test_every_op_is_split_by_its_table(op: Op, case: Case) -> None:
    mesh, arrays = _mesh(), case.arrays()
    placed = [jax.device_put(x, NamedSharding(mesh, P())) for x in arrays if x is not None]

    def call(*present: Any) -> Any:
        given = iter(present)
        return op(*(None if x is None else next(given) for x in arrays), implementation=KERNEL, **case.params)

    with jax.set_mesh(mesh):
        got, text = _on_tpu(call, placed)
    result = check_output(got, expected(op, arrays, case.params))
    assert result.ok, result.why
    assert "CustomSPMDPartitioning" not in text
    assert any(axis for x in jax.tree.leaves(got) for axis in x.sharding.spec), "no factor was split"


def test_a_product_whose_terms_are_split_is_summed() -> None:
    mesh = _mesh(("x", "y"), AxisType.Explicit)
    a, b = _normal(0, 256, 256), _normal(1, 256, 256)
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(a, NamedSharding(mesh, P(None, "y"))),
            jax.device_put(b, NamedSharding(mesh, P("y"))),
        ]
        got, text = _on_tpu(lambda a, b: gemm(a, b, implementation=KERNEL, precision="highest"), placed)
    wanted = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    # Each of 256 products and of as many sums is rounded once, by half an eps of what has been added up so far.
    largest = np.abs(a).astype(np.float64) @ np.abs(b)
    assert (np.abs(got - wanted) < 256 * float(np.finfo(np.float32).eps) * largest).all()
    assert "all-reduce" in text
    assert "all-gather" not in text
