"""What a traced program says of itself: operations, loops, ops, names."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from capibara.mesh import MeshConfig, current_rules
from capibara.mesh.layout import Layout
from capibara.mesh.traced_for import mesh_in_force
from capibara.program import Program, trace
from capibara.program.graph import Node


def every(nodes: Any) -> Iterator[Node]:
    for node in nodes:
        yield node
        if node.body is not None:
            yield from every(node.body.nodes)


def training(llama: ModuleType, **changes: Any) -> tuple[Any, Program]:
    config = dataclasses.replace(llama.SHAPES["tiny"], **changes)
    params = llama.param_shapes(config)
    args = (params, llama.state_shapes(params), llama.batch_shapes(4, 32))
    step = functools.partial(llama.step, config=config)
    return config, trace(step, args, donate=(0, 1), roles=("params", "state", "batch"), device_kind="TPU v4")


@pytest.mark.quick
@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_decoders_training_step_is_six_n_t_and_attention(llama: ModuleType, remat: str) -> None:
    config, program = training(llama, fused=False, remat=remat)
    tokens, length = 4 * 32, 32
    table = config.vocab * config.hidden  # looked up, not multiplied
    norms = (2 * config.layers + 1) * config.hidden
    weights = config.parameters - table - norms
    # Scores and their product with the values, whole tables: 2 products of 2 T T H, and twice that backward.
    attention = 12 * config.layers * length * config.hidden * tokens
    # Exact but for nothing: both counts are of matrix products only.
    assert program.model_flops == 6 * weights * tokens + attention
    again = 0 if remat == "none" else 2 * (weights - table) * tokens + attention / 3
    # Recomputing leaves out products that only the layer's output needs: the last one, and the attention's second.
    skipped = 0 if remat == "none" else 2 * config.layers * config.ffn * config.hidden * tokens
    assert program.flops - program.model_flops == pytest.approx(again - skipped, rel=0.01)


def test_flops_equal_xlas_count(shape: Callable[..., Any]) -> None:
    def fn(x: jax.Array, w: jax.Array, kernel: jax.Array, image: jax.Array) -> Any:
        y = jnp.einsum("bij,bjk->bik", x, w)
        out = jax.lax.conv_general_dilated(image, kernel, (1, 1), "VALID")
        return y + 1.0, out

    args = (shape(3, 8, 16), shape(3, 16, 4), shape(8, 2, 3, 3), shape(2, 2, 9, 9))
    program = trace(fn, args)
    counted = jax.jit(fn).lower(*args).compile().cost_analysis()
    assert counted is not None
    vector = sum(node.flops for node in program.nodes if not node.matrix)
    assert program.flops + vector == counted["flops"]


def test_a_loop_has_its_trips_and_dead_code_is_gone(shape: Callable[..., Any]) -> None:
    def fn(x: jax.Array, ws: jax.Array) -> jax.Array:
        unused = x @ ws[0]

        def layer(carry: tuple[jax.Array, jax.Array], w: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            kept, dropped = carry
            return (jnp.tanh(kept @ w), dropped @ w), dropped

        (kept, _), _ = jax.lax.scan(layer, (x, unused), ws)
        return jax.lax.fori_loop(0, 7, lambda _, y: y @ ws[0], kept)

    program = trace(fn, (shape(2, 4), shape(5, 4, 4)))
    loops = [node for node in program.nodes if node.body is not None]
    assert [node.body.trips for node in loops if node.body] == [5, 7]
    assert len(loops[0].body.carried) == 1  # type: ignore[union-attr]
    # Five trips of one product and seven of another, 2 * 2 * 4 * 4 each; nothing for what is not read.
    assert program.flops == 12 * 64


def test_loops_of_unknown_length_and_branches_are_noted(shape: Callable[..., Any]) -> None:
    def fn(x: jax.Array) -> jax.Array:
        x = jax.lax.while_loop(lambda y: jnp.sum(y) < 3, lambda y: y @ y, x)
        return jax.lax.cond(x[0, 0] > 0, lambda y: y @ y @ y, lambda y: y, x)

    program = trace(fn, (shape(4, 4),))
    assert program.flops == 3 * 128
    assert any("unknown length" in note for note in program.notes)
    assert any("branch with the most work" in note for note in program.notes)


def test_backward_and_recomputation_are_told_apart(llama: ModuleType) -> None:
    _, program = training(llama, remat="full")
    products = [node for node in every(program.nodes) if node.primitive == "dot_general"]
    again = [node for node in products if node.recompute]
    assert again
    assert all(node.backward for node in again)
    assert any(not node.backward for node in products)
    assert any(node.backward and not node.recompute for node in products)


@pytest.mark.quick
def test_a_kernel_op_has_its_own_cost(llama: ModuleType) -> None:
    from capibara.kernels import lookup
    from capibara.kernels.core import context

    config, program = training(llama, remat="none")
    ops = {node.op: node for node in every(program.nodes) if node.bytes is not None}
    assert set(ops) == {"attention", "attention_grad"}
    q = jax.ShapeDtypeStruct((4, 4, 32, config.head_dim), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((4, 2, 32, config.head_dim), jnp.bfloat16)
    with context.target("tpu", "TPU v4"):
        cost = lookup("attention").cost(lookup("attention").call(q, k, k, causal=True))
    assert ops["attention"].flops == cost.flops
    assert ops["attention"].matrix
    assert ops["attention_grad"].backward


def test_an_op_in_plain_jax_is_what_the_compiler_sees(llama: ModuleType) -> None:
    config = llama.SHAPES["tiny"]
    args = (llama.param_shapes(config), llama.batch_shapes(2, 16))
    program = trace(functools.partial(llama.loss, config=config), args)  # for the CPU: no kernel
    assert any(node.op == "attention" and node.primitive == "dot_general" for node in every(program.nodes))


@pytest.mark.quick
def test_the_functions_own_error_is_kept(shape: Callable[..., Any]) -> None:
    class Mine(Exception):
        pass

    def fn(x: jax.Array) -> jax.Array:
        raise Mine("it says this")

    with pytest.raises(Mine, match="it says this"):
        trace(fn, (shape(2),))


def test_bad_input_names_the_rule(shape: Callable[..., Any]) -> None:
    def fn(x: jax.Array) -> jax.Array:
        return x

    with pytest.raises(ValueError, match="one role an argument"):
        trace(fn, (shape(2),), roles=("params", "batch"))
    with pytest.raises(ValueError, match=r"Unknown role 'weights'.*params"):
        trace(fn, (shape(2),), roles=("weights",))
    with pytest.raises(ValueError, match="numbers arguments"):
        trace(fn, (shape(2),), donate=(1,))
    with pytest.raises(ValueError, match="table of chips"):
        trace(fn, (shape(2),), device_kind="abacus")


def test_names_are_the_callers(shape: Callable[..., Any]) -> None:
    def fn(weights: Any, x: jax.Array) -> jax.Array:
        with jax.named_scope("head"):
            return x @ weights["out"]

    program = trace(fn, ({"out": shape(4, 4)}, shape(2, 4)))
    assert program.arguments[0].path == "weights['out']"
    (node,) = program.nodes
    assert node.name.startswith("head test_trace.py:")


def test_an_unknown_primitive_is_noted(shape: Callable[..., Any]) -> None:
    def fn(x: jax.Array) -> jax.Array:
        return jax.pure_callback(lambda y: y, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    assert any("pure_callback: no rule" in note for note in trace(fn, (shape(8, 8),)).notes)


def test_float32_products_run_at_the_bfloat16_rate_on_a_tpu_unless_asked(shape: Callable[..., Any]) -> None:
    def product(x: jax.Array, precision: Any = None) -> jax.Array:
        return jnp.matmul(x, x, precision=precision)

    x = shape(4, 4)
    assert trace(product, (x,), device_kind="TPU v4").nodes[0].dtype == "bfloat16"
    exact = functools.partial(product, precision=jax.lax.Precision.HIGHEST)
    assert trace(exact, (x,), device_kind="TPU v4").nodes[0].dtype == "float32"
    assert trace(product, (x,)).nodes[0].dtype == "float32"


@pytest.mark.quick
def test_a_function_that_asks_for_its_mesh_is_traced_for_it(shape: Callable[..., Any]) -> None:
    def sorted_here(x: jax.Array) -> jax.Array:
        mesh = mesh_in_force()
        if mesh.empty:
            return jnp.sort(x)
        spec = PartitionSpec(current_rules()["batch"])
        return jax.shard_map(jnp.sort, mesh=mesh, in_specs=spec, out_specs=spec)(x)

    x = shape(64)
    anywhere = trace(sorted_here, (x,))
    assert anywhere.asks_for_mesh
    assert not anywhere.local
    layout = Layout(MeshConfig((4, 2), ("data", "model")), (PartitionSpec("data"),), {"batch": "data"})
    program = trace(sorted_here, (x,), layout=layout)
    (sort,) = [node for node in every(program.nodes) if node.primitive == "sort"]
    assert [program.values[value].shape for value in sort.outputs] == [(16,)]
    assert not trace(jnp.sort, (x,), layout=layout).asks_for_mesh


@pytest.mark.quick
def test_what_is_written_twice_is_counted_once_where_that_is_asked_for(shape: Callable[..., Any]) -> None:
    table = [jnp.arange(8.0).reshape(1, 8) + 0 for _ in range(2)]  # equal, and not one array

    def layers(x: jax.Array) -> jax.Array:
        def turned(y: jax.Array, number: int) -> jax.Array:
            return y * jnp.sin(x) + table[number] + jnp.floor_divide(x, 3.0 + number)

        y = turned(turned(x, 0), 1)
        return jax.lax.scan(lambda carry, _: (carry + jnp.sin(x), None), y, None, length=2)[0]

    def count(program: Program, primitive: str) -> int:
        return sum(node.primitive == primitive for node in every(program.nodes))

    apart = trace(layers, (shape(4, 8),))
    shared = trace(layers, (shape(4, 8),), share_repeats=True)
    assert count(apart, "sin") == 3
    assert count(shared, "sin") == 2  # a loop's own stays in it
    assert count(shared, "div") == count(apart, "div") == 2  # by other numbers
    assert len(shared.outputs) == len(apart.outputs) == 1
    assert (len(apart.constants), len(shared.constants)) == (2, 1)


def test_an_op_that_loops_as_its_data_say_counts_its_own_cost(shape: Callable[..., Any]) -> None:
    from capibara.kernels import paged_attention
    from capibara.kernels.core.op import lookup

    pool = shape(64, 64, 2, 64, dtype="bfloat16")
    args = (
        shape(1, 4, 64, dtype="bfloat16"), pool, pool, shape(1, 64, dtype="int32"), shape(1, dtype="int32"),
    )  # fmt: skip
    program = trace(functools.partial(paged_attention, implementation="xla"), args, device_kind="NVIDIA A100-SXM4-80GB")
    op = lookup("paged_attention")
    assert program.flops == op.cost(op.call(*args)).flops
    assert not any("unknown length" in note for note in program.notes)
