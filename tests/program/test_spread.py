"""One chip's steps under a layout: what is split, what is exchanged, what is said."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from capibara.mesh import with_sharding_constraint
from capibara.mesh.layout import Layout
from capibara.mesh.mesh import MeshConfig
from capibara.program import ChipProgram, Loop, Program, Step, spread, trace

RULES = {"batch": "data", "heads": "model", "mlp": "model", "vocab": "model"}


def exchanges(program: ChipProgram) -> Counter[tuple[str, tuple[str, ...]]]:
    """How often each kind of exchange runs."""
    found: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for step, times in program.walk():
        if step.collective is not None:
            found[step.collective.kind, step.collective.axes] += times
    return found


def on(program: Program, mesh: dict[str, int], specs: Sequence[P], **more: Any) -> ChipProgram:
    return spread(program, Layout(MeshConfig(tuple(mesh.values()), tuple(mesh)), tuple(specs), **more))


@functools.cache
def decoder(llama: ModuleType, size: str, batch: int, length: int, **changes: Any) -> tuple[Any, Program]:
    config = dataclasses.replace(llama.SHAPES[size], **changes)
    params = llama.param_shapes(config)
    args = (params, llama.state_shapes(params), llama.batch_shapes(batch, length))
    step = functools.partial(llama.step, config=config)
    roles = ("params", "state", "batch")
    return args, trace(step, args, donate=(0, 1), roles=roles, device_kind="TPU v4")


def decoder_specs(args: Any, sharded: bool, state_sharded: bool = True) -> list[P]:
    """Weights split over model, and over data too where they are fully sharded."""

    def one(path: Any, leaf: Any) -> P:
        name = jax.tree_util.keystr(path).split("'")[-2]
        data = "data" if (state_sharded if path[0].idx else sharded) else None
        return {
            "inputs": P("data"), "targets": P("data"), "embed": P("model", data), "unembed": P(data, "model"),
            "query": P(None, data, "model"), "key": P(None, data, "model"), "value": P(None, data, "model"),
            "out": P(None, "model", None, data), "gate": P(None, data, "model"), "up": P(None, data, "model"),
            "down": P(None, "model", data),
        }.get(name, P())  # fmt: skip

    return [one(path, leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(args)[0]]


def test_a_column_and_a_row_split_share_the_work(shape: Callable[..., Any]) -> None:
    def fn(up: Any, down: Any, x: Any) -> Any:
        return jnp.tanh(x @ up) @ down

    program = trace(fn, (shape(16, 64), shape(64, 16), shape(8, 16)), roles=("params", "params", "batch"))
    chip = on(program, {"model": 4}, (P(None, "model"), P("model"), P()))
    steps = [step for step in chip.steps if isinstance(step, Step)]
    assert [step.primitive for step in steps] == ["dot_general", "tanh", "dot_general", "all_reduce"]
    assert [step.flops for step in steps] == [2 * 8 * 16 * 16, 10 * 8 * 16, 2 * 8 * 16 * 16, 0]
    assert [step.sizes for step in steps if step.matrix] == [(1, 8, 16, 16), (1, 8, 16, 16)]
    sent = steps[-1].collective
    assert sent is not None
    assert sent.bytes == 8 * 16 * 4
    assert "test_spread.py" in sent.why
    assert [chip.buffers[a].shape for a in chip.arguments] == [(16, 16), (16, 16), (8, 16)]
    assert chip.buffers[chip.arguments[0]].name == "up"
    assert chip.buffers[chip.outputs[0]].output


def test_gradients_scatter_to_a_split_state_and_are_whole_for_a_whole_one(
    shape: Callable[..., Any], momentum: Callable[..., Any]
) -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.sum((x @ w) ** 2)

    program = trace(momentum(loss), (shape(16, 8), shape(16, 8), shape(32, 16)), (0, 1), ("params", "state", "batch"))
    whole = exchanges(on(program, {"data": 4}, (P(), P(), P("data"))))
    assert whole == {("all_reduce", ("data",)): 2}  # the gradient and the loss
    state = exchanges(on(program, {"data": 4}, (P(), P("data"), P("data"))))
    assert state == {("reduce_scatter", ("data",)): 1, ("all_reduce", ("data",)): 1, ("all_gather", ("data",)): 1}
    full = exchanges(on(program, {"data": 4}, (P("data"), P("data"), P("data"))))
    # Gathered for the product; the gradient of x is nobody's.
    assert full == {("reduce_scatter", ("data",)): 1, ("all_reduce", ("data",)): 1, ("all_gather", ("data",)): 1}


def test_layers_are_gathered_inside_of_their_loop(llama: ModuleType) -> None:
    args, program = decoder(llama, "tiny", 8, 32, remat="full")
    chip = on(program, {"data": 4, "model": 1}, decoder_specs(args, sharded=True), rules=RULES)
    loops = [step for step in chip.steps if isinstance(step, Loop)]
    assert [loop.trips for loop in loops] == [2, 2]
    for loop in loops:
        gathered = [step for step in loop.body if isinstance(step, Step) and step.primitive == "all_gather"]
        # Seven matrices, once a trip: the second pass and the gradients use one copy.
        assert len(gathered) == 7
    scattered = [step for step in loops[1].body if isinstance(step, Step) and step.primitive == "reduce_scatter"]
    assert len(scattered) == 7
    assert all(step.backward for step in scattered)


def test_work_is_divided_and_buffers_are_written_before_they_are_read(llama: ModuleType) -> None:
    args, program = decoder(llama, "tiny", 8, 32, remat="full")
    chip = on(program, {"data": 4, "model": 2}, decoder_specs(args, sharded=True), rules=RULES)
    products = sum(step.flops * times for step, times in chip.walk() if step.matrix)
    assert products == program.flops / 8
    again = sum(step.flops * times for step, times in chip.walk() if step.matrix and step.recompute)
    assert products - again == program.model_flops / 8
    known = set(chip.arguments)

    def check(steps: Any) -> None:
        for step in steps:
            # A value that the trace itself holds is there from the start.
            assert {b for b in step.reads if "constant" not in chip.buffers[b].name} <= known, step
            if isinstance(step, Loop):
                known.update(inner for _, inner in step.carried[0::2])
                known.update(inner for _, inner in step.sliced)
                check(step.body)
                assert {end for _, end in step.carried[1::2]} | {inner for inner, _ in step.stacked} <= known
            known.update(step.writes)

    check(chip.steps)
    assert set(chip.outputs) <= known
    assert chip == on(program, {"data": 4, "model": 2}, decoder_specs(args, sharded=True), rules=RULES)


# Bytes of one chip's exchanges in 7B training steps on 32 chips (data 8 x model 4, T 2048, batch 64, plain attention)
# as the TPU v4 compiler (libtpu of 2026-11) wrote them. Along `model` it writes all_reduces. Along `data` it turns most
# gathers and scatters into rings of permutes beside the products, whose first step is sent too: so within a tenth.
@pytest.mark.parametrize(
    ("remat", "sharded", "model", "data"),
    [("full", True, 21.8777e9, 10.904e9), ("dots", True, 17.5827e9, 10.937e9), ("full", False, 21.8777e9, 10.595e9)],
)
def test_exchanges_are_those_of_the_tpu_compiler(
    llama: ModuleType, remat: str, sharded: bool, model: float, data: float
) -> None:
    args, program = decoder(llama, "7b", 64, 2048, remat=remat, fused=False)
    chip = on(program, {"data": 8, "model": 4}, decoder_specs(args, sharded), rules=RULES)
    found: dict[tuple[str, ...], float] = defaultdict(float)
    for step, times in chip.walk():
        if step.collective is not None:
            found[step.collective.axes] += times * step.collective.bytes
            if step.collective.axes == ("model",):
                assert step.collective.kind == "all_reduce"
    assert found["model",] == pytest.approx(model, rel=1e-5)
    assert found["data",] == pytest.approx(data, rel=0.1)
    assert not chip.notes


def test_partial_sums_that_are_added_are_exchanged_once(shape: Callable[..., Any]) -> None:
    def fn(a: Any, b: Any, x: Any, y: Any) -> Any:
        return x @ a + y @ b

    program = trace(fn, (shape(8, 4), shape(8, 4), shape(2, 8), shape(2, 8)))
    split = (P("model"), P("model"), P(None, "model"), P(None, "model"))
    assert exchanges(on(program, {"model": 2}, split)) == {("all_reduce", ("model",)): 1}


@pytest.mark.quick
def test_names_are_resolved_by_the_layouts_rules(shape: Callable[..., Any]) -> None:
    def fn(x: Any) -> Any:
        return with_sharding_constraint(jnp.tanh(x), ("batch", "hidden"))

    program = trace(fn, (shape(8, 8),))

    def out(rules: Any, axes: int = 2) -> tuple[int, ...]:
        chip = on(program, {"data": axes, "model": 4}, (P(),), rules=rules)
        return chip.buffers[chip.outputs[0]].shape

    assert out({}) == (8, 8)
    assert out({"batch": "data", "hidden": "model"}) == (4, 2)
    assert out({"batch": ("data", "model"), "hidden": None}) == (1, 8)
    assert out({"hidden": "data"}) == (8, 4)
    chip = on(program, {"data": 3}, (P(),), rules={"batch": "data"})
    assert any("8 does not divide over data" in note for note in chip.notes)


@pytest.mark.quick
def test_jaxs_own_constraint_is_honoured(shape: Callable[..., Any]) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))

    def fn(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x * 2.0, NamedSharding(mesh, P(None, "data")))

    chip = on(trace(fn, (shape(8, 8),)), {"data": 4}, (P("data"),))
    assert exchanges(chip) == {("all_to_all", ("data",)): 1}
    assert chip.buffers[chip.outputs[0]].shape == (8, 2)


def test_what_cannot_stay_split_is_gathered_and_said(shape: Callable[..., Any]) -> None:
    def reshaped(x: Any) -> Any:
        return jnp.reshape(x, (32,)) + 1.0  # the inner dimension of a merged pair

    chip = on(trace(reshaped, (shape(4, 8),)), {"data": 4}, (P(None, "data"),))
    assert exchanges(chip) == {("all_gather", ("data",)): 1}
    assert any("reshape" in note and "gathered" in note for note in chip.notes)
    carried = on(trace(reshaped, (shape(4, 8),)), {"data": 4}, (P("data"),))
    assert not exchanges(carried)
    assert carried.buffers[carried.outputs[0]].shape == (8,)

    def sorted_rows(x: Any) -> Any:
        return jnp.sort(x, axis=0)

    chip = on(trace(sorted_rows, (shape(8, 8),)), {"data": 4}, (P("data"),))
    assert exchanges(chip) == {("all_gather", ("data",)): 1}
    assert any("sort" in note for note in chip.notes)

    def unknown(x: Any) -> Any:
        return jax.pure_callback(lambda y: y, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    chip = on(trace(unknown, (shape(8, 8),)), {"data": 4}, (P("data"),))
    assert exchanges(chip) == {("all_gather", ("data",)): 1}
    assert any("no rule" in note for note in chip.notes)


def test_arguments_on_the_host_are_fetched_and_stored(shape: Callable[..., Any], momentum: Callable[..., Any]) -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.sum((x @ w) ** 2)

    program = trace(momentum(loss), (shape(16, 8), shape(16, 8), shape(32, 16)), (0, 1), ("params", "state", "batch"))
    chip = on(program, {"data": 4}, (P(), P(), P("data")), host=(1,))
    kinds = [step.primitive for step, _ in chip.walk()]
    assert kinds.count("host_to_device") == kinds.count("device_to_host") == 1
    assert chip.buffers[chip.arguments[1]].host
    assert chip.buffers[chip.outputs[1]].host
    assert not chip.buffers[chip.arguments[0]].host
    assert not chip.buffers[chip.outputs[0]].host


def test_stages_of_a_pipeline_share_the_layers(llama: ModuleType) -> None:
    _args, program = decoder(llama, "tiny", 8, 32, remat="full")
    specs = [P("pipeline") if a.shape[:1] == (2,) and a.role != "batch" else P() for a in program.arguments]
    chip = on(program, {"pipeline": 2}, specs, stages=2)
    assert [step.trips for step in chip.steps if isinstance(step, Loop)] == [1, 1]
    assert exchanges(chip) == {("permute", ("pipeline",)): 2}
    stacked = [chip.buffers[a].shape[0] for a, made in zip(chip.arguments, program.arguments, strict=True)
               if "layers" in made.path]  # fmt: skip
    assert set(stacked) == {1}
    # Without stages the axis only stores: each chip gathers every layer.
    stored = on(program, {"pipeline": 2}, specs)
    assert [step.trips for step in stored.steps if isinstance(step, Loop)] == [2, 2]
    assert exchanges(stored)["all_gather", ("pipeline",)] > 0
    assert any("gathered" in note for note in stored.notes)


def test_a_layout_has_a_spec_for_each_argument(shape: Callable[..., Any]) -> None:
    program = trace(lambda x, y: x + y, (shape(4), shape(4)))
    with pytest.raises(ValueError, match=r"one PartitionSpec for each flat argument\. Got 1 for 2"):
        on(program, {"data": 2}, (P(),))


@pytest.mark.quick
def test_the_inside_of_a_shard_map_is_one_chips(shape: Callable[..., Any]) -> None:
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))

    def one(x: Any, w: Any) -> Any:
        y = jax.lax.psum(x @ w, "model")
        y = jax.lax.all_gather(y, "data", axis=0, tiled=True)
        y = jax.lax.psum_scatter(y, "data", scatter_dimension=0, tiled=True)
        return jax.lax.ppermute(y, "data", [(0, 1), (1, 0)])

    mapped = jax.shard_map(
        one, mesh=mesh, in_specs=(P("data", "model"), P("model")), out_specs=P("data"), check_vma=False
    )
    program = trace(lambda x, w: jnp.tanh(mapped(x * 2.0, w)), (shape(8, 16), shape(16, 4)))
    chip = on(program, {"data": 2, "model": 4}, (P("data"), P()))
    sent = {s.collective.kind: (s.collective.axes, s.collective.bytes) for s, _ in chip.walk() if s.collective}
    row = 4 * 4 * 4  # one chip's [4, 4] of float32
    assert sent == {
        "all_reduce": (("model",), row), "all_gather": (("data",), 2 * row), "reduce_scatter": (("data",), 2 * row),
        "permute": (("data",), row),
    }  # fmt: skip
    (product,) = [step for step, _ in chip.walk() if step.matrix]
    assert product.flops == 2 * 4 * 4 * 4
    assert chip.buffers[chip.outputs[0]].shape == (4, 4)
    assert not chip.notes
    other = on(program, {"data": 4}, (P("data"), P()))
    assert any("shard_map for the mesh {'data': 2, 'model': 4}" in note for note in other.notes)


def test_experts_on_the_batchs_axis_exchange_their_tokens(shape: Callable[..., Any]) -> None:
    def layer(up: Any, x: Any, sent: Any) -> Any:
        inside = jnp.einsum("gsec,gsm->egcm", sent, x)
        inside = with_sharding_constraint(inside, ("expert", None, None, None))
        out = with_sharding_constraint(jnp.einsum("egcm,emf->egcf", inside, up), ("expert", None, None, None))
        return with_sharding_constraint(jnp.einsum("egcf,gsec->gsf", out, sent), ("batch", None, None))

    program = trace(
        jax.grad(lambda up, x, sent: jnp.sum(layer(up, x, sent) ** 2)),
        (shape(8, 32, 64), shape(8, 16, 32), shape(8, 16, 8, 4)),
        roles=("params", "batch", "batch"),
    )
    specs = (P("expert"), P("expert"), P("expert"))
    chip = on(program, {"expert": 8}, specs, rules={"expert": "expert", "batch": "expert"})
    # To the experts, back, and the gradient to the experts; weights and their gradients stay.
    assert exchanges(chip) == {("all_to_all", ("expert",)): 3}
    products = sum(step.flops for step, _ in chip.walk() if step.matrix)
    assert products == program.flops / 8
