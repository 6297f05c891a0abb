"""Programs that are no decoders: convolutions, solvers, branches, keys, nothing. Held against XLA and by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from capibara.cost.estimate import estimate
from capibara.hardware.chips import chip
from capibara.hardware.topology import slice_by_name
from capibara.mesh.layout import Layout
from capibara.mesh.mesh import MeshConfig
from capibara.program import ChipProgram, Loop, Step, spread, trace
from capibara.program.hlo_collectives import collectives_in


def array(*sizes: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))


def convolved(image: jax.Array, kernel: jax.Array, strides: tuple[int, int] = (1, 1), **more: Any) -> jax.Array:
    return lax.conv_general_dilated(
        image, kernel, strides, more.pop("padding", "SAME"), dimension_numbers=("NHWC", "HWIO", "NHWC"), **more
    )


def upsampled(image: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.conv_transpose(image, kernel, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def pooled(x: jax.Array) -> jax.Array:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def strided_gradients(kernel: jax.Array, image: jax.Array) -> Any:
    return jax.grad(lambda k, i: jnp.sum(convolved(i, k, (2, 2), padding="VALID")), (0, 1))(kernel, image)


V4_16 = slice_by_name("v4-16")
ONE = MeshConfig((1,), ("data",))
IMAGE, KERNEL, THIN = array(8, 16, 16, 8), array(3, 3, 8, 16), array(3, 3, 1, 8)
SQUARE, BATCHED, FLAG = array(8, 8), array(8, 8, 8), array()
KEYS = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8))
CLOSED_OVER = np.arange(64, dtype=np.float32).reshape(8, 8)


def remat_in_scan_in_remat(w: jax.Array, x: jax.Array) -> Any:
    layer = jax.checkpoint(lambda c, one: (jnp.tanh(c @ one) @ one, None))
    return jax.grad(lambda w, x: jax.checkpoint(lambda w, x: lax.scan(layer, x, w)[0])(w, x).sum())(w, x)


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "nothing at all": (lambda: jnp.zeros(()), ()),
    "no result": (lambda x: None, (SQUARE,)),
    "the argument": (lambda x: (x, x), (SQUARE,)),
    "its transpose": (lambda x: x.T, (SQUARE,)),
    "one number": (lambda x: x + 1.0, (FLAG,)),
    "no elements": (lambda x, w: x @ w, (array(0, 8), array(8, 4))),
    "no elements, reshaped": (lambda x: x.reshape(4, 0, 2), (array(2, 0, 8),)),
    "a constant": (lambda x: x @ CLOSED_OVER, (SQUARE,)),
    "two scans": (lambda x: lax.scan(lambda c, _: (lax.scan(lambda d, _: (d @ d, d.sum()), c, None, 3)[0], c),
                                     x, None, 4, reverse=True), (SQUARE,)),
    "no trip": (lambda x: lax.scan(lambda c, _: (c @ c, c), x, None, length=0), (SQUARE,)),
    "carries that change places": (lambda x, y: lax.scan(lambda c, _: (c[::-1], None), (x, y), None, 3),
                                   (SQUARE, SQUARE)),
    "vmap of a while": (jax.vmap(lambda x: lax.while_loop(lambda c: c.sum() < 9, lambda c: c @ c, x)), (BATCHED,)),
    "remat in scan in remat": (remat_in_scan_in_remat, (array(3, 8, 8), SQUARE)),
    "a switch": (lambda i, x: lax.switch(i, [lambda x: x, lambda x: x @ x, jnp.zeros_like], x),
                 (array(dtype="int32"), SQUARE)),
    "a branch of numbers": (lambda p: lax.cond(p > 0, lambda: 1.0, lambda: 2.0), (FLAG,)),
    "a linear system": (jnp.linalg.solve, (BATCHED, array(8, 8, 3))),
    "three diagonals": (lax.linalg.tridiagonal_solve, (array(8), array(8), array(8), array(8, 2))),
    "eigenvalues": (jnp.linalg.eigh, (BATCHED,)),
    "a sort by keys": (lambda x, y: lax.sort((x, y), num_keys=1), (SQUARE, SQUARE)),
    "a transform": (lambda x: jnp.fft.irfft2(jnp.fft.rfft2(x)), (BATCHED,)),
    "keys": (jax.vmap(lambda k: jax.random.normal(k, (8,))), (KEYS,)),
    "old keys": (lambda k: jax.random.split(k, 8), (array(2, dtype="uint32"),)),
    "rows in the middle": (lambda x, i, j: x[i, :, j], (BATCHED, array(8, dtype="int32"), array(8, dtype="int32"))),
    "the largest of those added": (lambda x, i, u: x.at[:, i].max(u), (SQUARE, array(8, dtype="int32"), SQUARE)),
    "windows picked": (jax.grad(lambda x: pooled(x).sum()), (IMAGE,)),
    "a strided convolution's gradients": (strided_gradients, (KERNEL, IMAGE)),
    "int8": (lambda x: lax.dot(x, x, preferred_element_type=jnp.int32), (array(8, 8, dtype="int8"),)),
    "float8": (lambda x: lax.dot(x, x, preferred_element_type=jnp.float32), (array(8, 8, dtype="float8_e4m3fn"),)),
    "complex": (lambda x: jnp.abs(x @ x), (array(8, 8, dtype="complex64"),)),
    "a named sum of vmap": (jax.vmap(lambda r: lax.psum(r, "rows"), axis_name="rows"), (SQUARE,)),
    "a call to the host": (lambda x: jax.pure_callback(lambda a: a, SQUARE, x), (SQUARE,)),
    "a print": (lambda x: (jax.debug.print("{}", x, ordered=True), x @ x)[1], (SQUARE,)),
    "a cache": (lambda c, u, i: lax.dynamic_update_slice(c, u, (i, 0)),
                (SQUARE, array(1, 8), array(dtype="int32"))),
}  # fmt: skip


def reads_only_what_is_there(program: ChipProgram) -> bool:
    def level(steps: Sequence[Step | Loop], have: set[int]) -> set[int]:
        for step in steps:
            assert have.issuperset(step.reads), step
            if isinstance(step, Loop):
                inside = {body for _, body in (*step.carried[0::2], *step.sliced)}
                made = level(step.body, have | inside)
                assert made.issuperset(body for _, body in step.carried[1::2])
                assert made.issuperset(body for body, _ in step.stacked)
            have = have | set(step.writes)
        return have

    return level(program.steps, {*program.arguments, *program.constants}).issuperset(program.outputs)


@pytest.mark.quick
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_is_read_spread_and_costed(name: str) -> None:
    fn, args = PROGRAMS[name]
    program = trace(fn, args)
    whole = sum(step.flops * times for step, times in _spread(program, {"data": 1}, None).walk())
    for mesh in ({"data": 8}, {"data": 2, "model": 4}):
        for entry in ("data", tuple(mesh)):
            made = _spread(program, mesh, entry)
            assert reads_only_what_is_there(made)
            mine = sum(step.flops * times for step, times in made.walk())
            # One chip does no more than all of the work, and never less than its share.
            assert whole / 8 <= mine * (1 + 1e-9)
            assert mine <= whole * (1 + 1e-9)
            for where, kind in ((chip("h200"), chip("h200")), (V4_16, V4_16.chip)):
                found = estimate(made, MeshConfig(tuple(mesh.values()), tuple(mesh)), where)
                held = sum(made.buffers[number].bytes for number in made.arguments)
                assert found.memory.arguments >= held
                most = max((size for _, size in found.memory.timeline), default=0.0)
                assert found.memory.temporaries == pytest.approx(most + kind.efficiency.reserved_bytes)
                assert 0 <= found.low <= found.seconds <= found.high < 1


def _spread(program: Any, mesh: dict[str, int], entry: Any) -> ChipProgram:
    specs = tuple(P(entry) if argument.shape and entry else P() for argument in program.arguments)
    return spread(program, Layout(MeshConfig(tuple(mesh.values()), tuple(mesh)), specs))


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (lambda x, w: convolved(x, w, (2, 2)), (IMAGE, KERNEL)),
        (lambda x, w: convolved(x, w, rhs_dilation=(2, 2)), (IMAGE, KERNEL)),
        (lambda x, w: convolved(x, w, feature_group_count=8), (IMAGE, THIN)),
        (upsampled, (IMAGE, KERNEL)),
        (strided_gradients, (KERNEL, array(8, 17, 17, 8))),
        (lambda x: lax.while_loop(lambda c: (c @ c)[0, 0] < 9, lambda c: c @ c, x), (SQUARE,)),
        (lambda x: lax.cond((x @ x)[0, 0] > 0, lambda x: x + 1, lambda x: x, x), (SQUARE,)),
    ],
    ids=["strided", "dilated", "a channel a group", "transposed", "its gradients", "a condition", "a predicate"],
)
def test_products_are_xlas_count(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    counted = jax.jit(fn).lower(*args).compile().cost_analysis()
    assert counted is not None
    # Beside the products XLA counts additions, at most one a number of the arguments, and a comparison with its cast.
    few = sum(np.prod(one.shape) for one in args) + 2
    assert trace(fn, args).flops <= counted["flops"] <= trace(fn, args).flops + few


def loss_of(kernel: jax.Array, image: jax.Array) -> jax.Array:
    return jnp.sum(convolved(image, kernel, feature_group_count=8) ** 2)


EXCHANGES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[P, ...]]] = {
    "a channel a group": (jax.grad(loss_of), (THIN, IMAGE), (P(), P("data"))),
    "windows picked": (jax.grad(lambda x: jnp.sum(pooled(x) ** 2)), (IMAGE,), (P("data"),)),
    "linear systems": (jnp.linalg.solve, (array(16, 8, 8), array(16, 8, 3)), (P("data"), P("data"))),
    "keys": (jax.vmap(lambda k: jax.random.normal(k, (64,))), (KEYS,), (P("data"),)),
    "a predicate": (lambda p, w, x: lax.cond(p.sum() > 0, lambda x: x @ w, lambda x: x, x),
                    (array(64), SQUARE, SQUARE), (P("data"), P(), P())),
    # A maximum of parts cannot wait for the sum with another.
    "two maxima added": (lambda x, y: jnp.tanh(x.max(0) + y.max(0)), (array(64, 8), array(64, 8)),
                         (P("data"), P("data"))),
}  # fmt: skip


@pytest.mark.parametrize("name", EXCHANGES)
def test_exchanges_are_xlas(name: str) -> None:
    fn, args, specs = EXCHANGES[name]
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    shardings = tuple(NamedSharding(mesh, spec) for spec in specs)
    text = jax.jit(fn, in_shardings=shardings).lower(*args).compile().as_text() or ""
    theirs: Counter[Any] = Counter()
    for one in collectives_in(text, {"data": 8}):
        theirs[one.kind] += int(one.bytes)
    ours: Counter[Any] = Counter()
    for step, times in spread(trace(fn, args), Layout(MeshConfig((8,), ("data",)), specs)).walk():
        if step.collective is not None:
            ours[step.collective.kind] += int(times * step.collective.bytes)
    assert ours == theirs


def test_a_solver_is_opened_and_complex_products_count_four() -> None:
    conjugate = trace(lambda a, b: jax.scipy.sparse.linalg.cg(lambda v: a @ v, b)[0], (SQUARE, array(8)))
    assert conjugate.flops >= 2 * 2 * 8 * 8  # one product before the loop and one a trip
    assert trace(lambda x: x @ x, (array(8, 8, dtype="complex64"),)).flops == 4 * 2 * 8**3
    assert trace(lambda x, y: x @ y, (array(8, 8, dtype="complex64"), SQUARE)).flops == 2 * 2 * 8**3


def test_what_a_function_closes_over_is_held_whole_and_once() -> None:
    large = np.ones((8192, 1024), np.float32)
    inner = jax.jit(lambda x: x @ large)
    made = _spread(trace(lambda x: inner(x) + large.sum() + (x @ large) * 2, (array(8, 8192),)), {"data": 8}, "data")
    assert [made.buffers[number].bytes for number in made.constants if made.buffers[number].shape] == [large.nbytes]
    assert any("closes over 32 MiB" in note for note in made.notes)
    found = estimate(made, MeshConfig((8,), ("data",)), chip("h200"))
    assert found.memory.temporaries >= large.nbytes
    assert found.memory.largest[0] == ("constant float32[8192,1024]", large.nbytes)


def test_small_tables_that_a_function_closes_over_are_counted_and_not_worth_a_note() -> None:
    table = np.ones((2048, 128), np.float32)  # 1 MiB: the rotary positions of a decoder
    made = _spread(trace(lambda x: x * table, (array(8, 2048, 128),)), {"data": 8}, "data")
    assert [made.buffers[number].bytes for number in made.constants] == [table.nbytes]
    assert not any("closes over" in note for note in made.notes)


def test_looked_up_rows_lie_as_their_indices_do() -> None:
    """A table split along the axis of the batch does not take the activations off it."""

    def loss(params: Any, ids: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(params["table"][ids]) @ params["w"]) ** 2)

    args = ({"table": array(64, 32), "w": array(32, 128)}, array(16, 8, dtype="int32"))
    program = trace(jax.value_and_grad(loss), args, roles=("params", "batch"))
    made = spread(program, Layout(MeshConfig((8,), ("data",)), (P("data"), P("data"), P("data"))))
    products = [step for step, _ in made.walk() if step.primitive == "dot_general"]
    assert [step.sizes[1] for step in products[:1]] == [16 * 8 // 8]
    assert all(step.flops == 2 * 16 * 8 * 32 * 128 / 8 for step in products)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"specs": (P("dta"), P())}, "Did you mean 'data'"),
        ({"specs": (P("data", "data"), P())}, "splits one dimension"),
        ({"specs": (P(None, None, "data"), P())}, "no more entries than its array has dimensions"),
        ({"host": (5,)}, "`host` numbers flat arguments"),
        ({"stages": 2}, "'pipeline' of that size"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(change: dict[str, Any], says: str) -> None:
    program = trace(lambda x, w: x @ w, (SQUARE, SQUARE))
    layout = {"mesh": MeshConfig((8,), ("data",)), "specs": (P(), P()), **change}
    with pytest.raises(ValueError, match=says):
        spread(program, Layout(**layout))


@pytest.mark.parametrize(
    ("fn", "args", "says"),
    [
        (3, (SQUARE,), "The program is a function"),
        (lambda x: x, SQUARE, r"write \(x,\) for one"),
        (lambda x: x, ("a",), "Arguments are arrays"),
    ],
)
def test_what_is_no_program_is_refused(fn: Any, args: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        trace(fn, args)


def test_an_axis_that_shard_map_leaves_to_the_compiler_is_said() -> None:
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))
    part = jax.shard_map(
        lambda x: lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P(), axis_names={"data"}
    )
    assert any("model are left to the compiler" in note for note in trace(part, (SQUARE,)).notes)
    whole = jax.shard_map(lambda x: lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
    assert trace(whole, (SQUARE,)).notes == ()


@pytest.mark.parametrize(("fn", "dtype"), [(jnp.sort, "float32"), (jnp.fft.fft, "complex64")])
def test_a_long_row_goes_through_memory_more_than_once(fn: Callable[..., Any], dtype: str) -> None:
    def seconds(*sizes: int) -> float:
        program = trace(fn, (array(*sizes, dtype=dtype),))
        return estimate(_spread(program, {"data": 1}, None), ONE, chip("h200")).seconds

    assert seconds(64, 1 << 16) > 1.5 * seconds(4096, 1 << 10)


def test_a_kernel_that_says_no_cost_is_counted_by_its_body() -> None:
    def product(a: Any, b: Any, out: Any) -> None:
        out[...] = lax.fori_loop(0, 2, lambda i, sum_: sum_ + a[...] @ b[...], jnp.zeros((8, 32)))

    call = pl.pallas_call(
        product,
        out_shape=array(64, 32),
        grid=(8,),
        in_specs=[pl.BlockSpec((8, 16), lambda i: (i, 0)), pl.BlockSpec((16, 32), lambda i: (0, 0))],
        out_specs=pl.BlockSpec((8, 32), lambda i: (i, 0)),
    )
    program = trace(call, (array(64, 16), array(16, 32)))
    assert program.flops == 2 * (2 * 64 * 16 * 32)
    assert any("the products of its body" in note for note in program.notes)
    silent = trace(pl.pallas_call(lambda x, out: None, out_shape=array(64, 16)), (array(64, 16),))
    assert silent.flops == 0
    assert any("no operations" in note for note in silent.notes)
