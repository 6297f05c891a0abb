"""linear_recurrence: what the documents promise, beyond what every op must pass."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from capibara.errors import ImplementationRefused
from capibara.kernels import explain, interpret, linear_recurrence, target
from capibara.kernels.core.dispatch import run
from capibara.kernels.lab.check import check
from capibara.kernels.ops.scan import LINEAR_RECURRENCE, LINEAR_RECURRENCE_GRAD
from capibara.kernels.ops.scan.recurrence.cases import LOWERED, draw_complex, draw_complex_decay, draw_decay
from capibara.kernels.ops.scan.recurrence.hopper.forward import TileConfig, Walk
from capibara.kernels.ops.scan.recurrence.reference import reference_grad
from capibara.kernels.ops.scan.recurrence.tpu.forward import BlockConfig
from capibara.kernels.ops.scan.recurrence.xla import ChunkConfig

EVERYWHERE = ("xla", "pallas_tpu", "reference")


def _normal(*shape: int, seed: int = 0, dtype: Any = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape), dtype)


def _decay(*shape: int, seed: int = 7, dtype: Any = "float32") -> jax.Array:
    return jnp.asarray(draw_decay(np.random.default_rng((seed, *shape)), shape), dtype)


def _loop(a: Any, b: Any, initial: Any = None, *, axis: int = 1, reverse: bool = False) -> tuple[Any, Any]:
    """Step by step in float64, and the last state."""
    wide = np.result_type(np.asarray(b).dtype, np.float64)
    a, b = (np.moveaxis(np.asarray(x, wide), axis, 0) for x in np.broadcast_arrays(a, b))
    state = np.zeros(b.shape[1:], wide) if initial is None else np.asarray(initial, wide)
    h = np.zeros_like(b)
    for t in range(len(b))[:: -1 if reverse else 1]:
        state = h[t] = a[t] * state + b[t]
    return np.moveaxis(h, 0, axis), state


FEW_STEPS = 4e-6  # six steps or fewer in float32: two roundings of 2^-24 each, of numbers up to about 5


@pytest.mark.quick
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", EVERYWHERE)
def test_against_numpy(name: str, reverse: bool) -> None:
    a, b, initial = _decay(2, 21, 3), _normal(2, 21, 3), _normal(2, 3, seed=1)
    with interpret("hlo"):
        h, final = linear_recurrence(a, b, initial, reverse=reverse, return_state=True, implementation=name)
        alone = linear_recurrence(a, b, reverse=reverse, implementation=name)
    # Float32: two roundings a step of numbers up to about 10, 21 steps.
    for got, wanted in zip((h, final), _loop(a, b, initial, reverse=reverse), strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-5)
    np.testing.assert_allclose(alone, _loop(a, b, reverse=reverse)[0], atol=2e-5)


@pytest.mark.parametrize("shape", [(6,), (5, 4), (2, 4, 3), (2, 3, 4, 2)])
def test_any_axis_of_any_array(shape: tuple[int, ...]) -> None:
    a, b = _decay(*shape), _normal(*shape)
    for axis in range(-1, len(shape)):
        state = _normal(*np.delete(shape, axis), seed=1)
        h, final = linear_recurrence(a, b, state, axis=axis, return_state=True)
        wanted, last = _loop(a, b, state, axis=axis)
        np.testing.assert_allclose(h, wanted, atol=FEW_STEPS)
        np.testing.assert_allclose(final, last, atol=FEW_STEPS)


def test_decays_broadcast() -> None:
    b = _normal(2, 5, 3)
    for a in (_decay(5, 3), _decay(3), _decay(2, 1, 3), jnp.float32(0.5)):
        np.testing.assert_allclose(linear_recurrence(a, b), _loop(a, b)[0], atol=FEW_STEPS)
    grad = jax.grad(lambda a: linear_recurrence(a, b).sum())(_decay(3))
    assert grad.shape == (3,)


def test_complex_numbers() -> None:
    """Also where one operand alone is complex, and the gradient is JAX's."""
    generator = np.random.default_rng(0)
    a, b = draw_complex_decay(generator, (2, 9, 3)), draw_complex(generator, (2, 9, 3))
    np.testing.assert_allclose(linear_recurrence(a, b), _loop(a, b)[0], atol=2e-5)
    real = _normal(2, 9, 3)
    mixed, state = linear_recurrence(a, real, return_state=True)
    assert mixed.dtype == state.dtype == jnp.complex64
    np.testing.assert_allclose(mixed, _loop(a, real.astype("complex64"))[0], atol=2e-5)

    def loss(a: Any, b: Any, name: str) -> Any:
        return jnp.abs(linear_recurrence(a, b, implementation=name) ** 2).sum()

    slopes = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
    for mine, right in zip(slopes(a, real, "xla"), slopes(a, real, "reference"), strict=True):
        assert mine.dtype == right.dtype
        np.testing.assert_allclose(mine, right, atol=1e-5 * float(jnp.abs(right).max()))


@pytest.mark.parametrize("name", EVERYWHERE)
def test_the_state_is_float32(name: str) -> None:
    """Ones added up in bfloat16 would stop at 256; the last state is returned unrounded."""
    ones = jnp.ones((1, 300, 1), "bfloat16")
    with interpret("hlo"):
        h, final = linear_recurrence(ones, ones, return_state=True, implementation=name)
    assert h.dtype == jnp.bfloat16
    assert final.dtype == jnp.float32
    assert float(final[0, 0]) == 300
    assert float(h[0, -1, 0]) == 300  # 8 bits: 300 is a multiple of 2


def test_two_pieces_are_one() -> None:
    a, b = _decay(2, 10, 3, dtype="bfloat16"), _normal(2, 10, 3, dtype="bfloat16")
    whole, last = linear_recurrence(a, b, return_state=True)
    first, state = linear_recurrence(a[:, :4], b[:, :4], return_state=True)
    second, final = linear_recurrence(a[:, 4:], b[:, 4:], state, return_state=True)
    np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (whole, jnp.concatenate([first, second], 1))))
    np.testing.assert_array_equal(last, final)


def test_nothing_to_do() -> None:
    start = _normal(2, 3)
    h, final = linear_recurrence(jnp.ones((2, 0, 3)), jnp.ones((2, 0, 3)), start, return_state=True)
    assert h.shape == (2, 0, 3)
    np.testing.assert_array_equal(final, start)
    assert linear_recurrence(jnp.ones((0, 4, 3)), jnp.ones((0, 4, 3))).shape == (0, 4, 3)
    empty = jax.vmap(linear_recurrence)(jnp.ones((2, 0, 4, 3)), jnp.ones((2, 0, 4, 3)))
    assert empty.shape == (2, 0, 4, 3)
    start_grad = jax.grad(lambda s: (linear_recurrence(h, h, s, return_state=True)[1] * start).sum())(start)
    np.testing.assert_array_equal(start_grad, start)


@pytest.mark.parametrize("reverse", [False, True])
def test_time_in_segments(reverse: bool) -> None:
    """What accelerators run: two levels of segments with a short one, forward and backward."""
    config = ChunkConfig(3, parallel=True)
    a, b, initial = _decay(2, 17, 3), _normal(2, 17, 3), _normal(2, 3, seed=1)
    params = {"reverse": reverse, "return_final": True}
    assert check(LINEAR_RECURRENCE, (a, b, initial), params, "xla", config).ok
    h, flow, final = linear_recurrence(a, b, initial, reverse=reverse), _normal(2, 17, 3, seed=2), _normal(2, 3, seed=3)
    result = check(LINEAR_RECURRENCE_GRAD, (a, h, initial, flow, final), {"reverse": reverse}, "xla", config)
    assert result.ok, result.why


@pytest.mark.parametrize("case", [c for c in LINEAR_RECURRENCE.cases if c.tags == LOWERED], ids=lambda c: c.name)
def test_cases_that_the_shared_suite_only_lowers(case: Any) -> None:
    result = check(LINEAR_RECURRENCE, case.arrays(), case.params, "xla")
    assert result.ok, result.why


def test_the_backward_pass_keeps_a_and_h() -> None:
    a, b = _decay(2, 8, 3, dtype="bfloat16"), _normal(2, 8, 3, dtype="bfloat16")
    _, pull = jax.vjp(lambda a, b: linear_recurrence(a, b, implementation="xla"), a, b)
    assert [(leaf.dtype.name, leaf.shape) for leaf in jax.tree.leaves(pull)] == [("bfloat16", (2, 8, 3))] * 2


@pytest.mark.parametrize("name", ["xla", "pallas_tpu"])
def test_second_derivatives(name: str) -> None:
    a, b, initial, direction = _decay(1, 6, 2), _normal(1, 6, 2), _normal(1, 2, seed=1), _normal(1, 6, 2, seed=2)

    def slope(implementation: str) -> Any:
        def loss(*xs: Any) -> Any:
            h, final = linear_recurrence(*xs, return_state=True, implementation=implementation)
            return (h**3).sum() + (final**2).sum()

        bent = jax.grad(lambda *xs: (jax.grad(loss)(*xs) * direction).sum(), argnums=(0, 1, 2))
        return jax.jit(bent)(a, b, initial)

    with interpret("hlo"):
        for got, wanted in zip(slope(name), slope("reference"), strict=True):
            # Both in float32, some thirty roundings deep.
            np.testing.assert_allclose(got, wanted, atol=1e-5 * float(jnp.abs(wanted).max()))


def test_forward_mode_by_the_reference() -> None:
    a, b, tangent = _decay(1, 6, 2), _normal(1, 6, 2), _normal(1, 6, 2, seed=1)
    _, moved = jax.jvp(lambda a: linear_recurrence(a, b, implementation="reference"), (a,), (tangent,))
    _, pull = jax.vjp(lambda a: linear_recurrence(a, b), a)
    # <J t, t> = <t, Jᵀ t>, in float32.
    np.testing.assert_allclose((moved * tangent).sum(), (pull(tangent)[0] * tangent).sum(), rtol=1e-5)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: linear_recurrence(x, x, axis=3), "axis is one of b's 3 axes"),
        (lambda x: linear_recurrence(x, x, axis=True), "axis is one of b's 3 axes"),
        (lambda x: linear_recurrence(x, x[0]), "a has b's shape"),
        (lambda x: linear_recurrence(x[:, :2], x), "a has b's shape"),
        (lambda x: linear_recurrence(x, x, x[0]), "initial_state has b's shape without the axis of time"),
        (lambda x: linear_recurrence(x.astype("int32"), x), "a of i32"),
        (lambda x: linear_recurrence(x, "terms"), "linear_recurrence takes arrays"),
        (lambda x: linear_recurrence(x, x, reverse=1), "reverse is True or False"),
        (lambda x: linear_recurrence(x, x, return_state="yes"), "return_state is True or False"),
        (lambda x: LINEAR_RECURRENCE(x[0], x[0]), "the middle axis of"),
        (lambda x: LINEAR_RECURRENCE(x, x[:1]), "b has a's shape"),
        (lambda x: LINEAR_RECURRENCE(x, x.astype("complex64")), "all real or all complex"),
        (lambda x: LINEAR_RECURRENCE_GRAD(x, x, None, x[:, :1]), "d_h has a's shape"),
        (lambda x: LINEAR_RECURRENCE_GRAD(x, x, None, x, x[0]), "d_final is one number a channel"),
        (lambda x: ChunkConfig(1, parallel=True), "2 or more for segments"),
        (lambda x: BlockConfig(40, 128, 16), "steps is a positive multiple of chunk"),
        (lambda x: TileConfig(32, 0), "stages and segments are 1 or more"),
        (lambda x: TileConfig(32, 2, width=64), "width is 128 or 256"),
    ],
)
def test_bad_input_is_named(call: Any, words: str) -> None:
    with pytest.raises((ValueError, KeyError), match=words):
        call(jnp.ones((2, 4, 3)))


def test_kernels_say_why_they_refuse() -> None:
    def refusal(name: str, shape: tuple[int, ...], dtype: str = "float32") -> str:
        x = jax.ShapeDtypeStruct(shape, dtype)
        with target({"pallas_tpu": "tpu", "hopper": "gpu"}[name]):
            return str(LINEAR_RECURRENCE.implementations[name].refusal(LINEAR_RECURRENCE.call(x, x)))

    assert "float16" in refusal("pallas_tpu", (2, 8, 128), "float16")
    assert "it takes bfloat16, float16, float32 and complex64" in refusal("hopper", (2, 8, 128), "float64")
    assert "multiple of 128" in refusal("hopper", (2, 8, 129))
    assert "no steps" in refusal("pallas_tpu", (2, 0, 128))
    assert refusal("hopper", (2, 8, 128)) == refusal("pallas_tpu", (2, 8, 129)) == "None"
    with target("gpu", "NVIDIA H200"), pytest.raises(ImplementationRefused, match="multiple of 128"):
        explain(lambda x: linear_recurrence(x, x, implementation="hopper"), jax.ShapeDtypeStruct((2, 8, 3), "float32"))


def test_a_config_that_was_asked_for_is_used() -> None:
    x = jax.ShapeDtypeStruct((2, 64, 256), "float32")
    for kind, name, chosen in (
        ("tpu", "pallas_tpu", BlockConfig(16, 128, 8)),
        ("gpu", "hopper", TileConfig(8, 2, width=256, segments=2)),
        ("cpu", "xla", ChunkConfig(2, parallel=True)),
    ):
        with target(kind):
            made = explain(lambda x, n=name, c=chosen: linear_recurrence(x, x, implementation=n, config=c), x)
        assert made.selections[0].config == chosen
    with target("gpu"), pytest.raises(ValueError, match="segments divides the steps"):
        explain(lambda x: linear_recurrence(x, x, implementation="hopper", config=TileConfig(8, 2, segments=5)), x)


def test_few_channels_are_cut_into_segments_of_time() -> None:
    """Segments cost a second reading, so there are none where the channels fill an H200's 132 multiprocessors."""

    def segments(*shape: int) -> int:
        x = jax.ShapeDtypeStruct(shape, "float32")
        with target("gpu", "NVIDIA H200"):
            call = LINEAR_RECURRENCE.call(x, x)
            return LINEAR_RECURRENCE.implementations["hopper"].candidates(call)[0].segments

    assert segments(8, 4096, 2048) == segments(1, 1021, 128) == 1
    assert segments(1, 65536, 256) == 64
    assert segments(1, 1024, 128) == 8


@pytest.mark.parametrize(
    ("walk", "loop"),
    [
        (Walk(12, 4, backwards=False, edge=False), range(3)),
        (Walk(13, 4, backwards=False, edge=False), range(3)),
        (Walk(13, 4, backwards=True, edge=False), range(1, 4)),
        (Walk(13, 4, backwards=True, edge=True), range(1, 3)),
        (Walk(12, 4, backwards=False, edge=True), range(2)),
        (Walk(3, 4, backwards=True, edge=True), range(1, 1)),
    ],
)
def test_a_walk_takes_every_step_once(walk: Walk, loop: range) -> None:
    assert walk.alike == loop
    steps = [walk.start(t) + row for t in range(walk.turns) for row in range(walk.rows(t))]
    assert sorted(steps) == list(range(walk.length))
    assert all(walk.rows(turn) == walk.steps for turn in walk.alike)


@pytest.mark.parametrize("name", EVERYWHERE)
def test_vmap_over_nothing(name: str) -> None:
    def one(b: Any, initial: Any) -> Any:
        made = linear_recurrence(jnp.full_like(b, 0.5), b, initial, return_state=True, implementation=name)
        return made[0].sum() + made[1].sum(), made

    b, initial = jnp.zeros((0, 2, 3, 4)), jnp.zeros((0, 2, 4))
    with interpret():
        (_, made), grads = jax.vmap(jax.value_and_grad(one, argnums=(0, 1), has_aux=True))(b, initial)
        shared = jax.vmap(lambda b, initial: one(b, initial)[1], in_axes=(0, None))(b, jnp.zeros((2, 4)))
    for pair in (made, grads, shared):
        assert [x.shape for x in pair] == [(0, 2, 3, 4), (0, 2, 4)]


def test_flags_and_axes_of_numpy() -> None:
    a, b = _decay(2, 5, 3), _normal(2, 5, 3)
    want = linear_recurrence(a, b, reverse=True)
    np.testing.assert_array_equal(linear_recurrence(a, b, reverse=np.True_, axis=np.int64(1)), want)
    assert isinstance(linear_recurrence(a, b, return_state=np.False_), jax.Array)
    for options, said in (
        ({"reverse": "no"}, "reverse is True or False"),
        ({"return_state": 1}, "return_state is True or False"),
        ({"axis": 1.0}, "axis is one of b's 3 axes"),
        ({"axis": True}, "axis is one of b's 3 axes"),
        ({"config": {"steps": 3}, "implementation": "xla"}, "the config's own class"),
    ):
        with pytest.raises(ValueError, match=said):
            linear_recurrence(a, b, **options)


def _extremes() -> tuple[Any, Any, Any]:
    """A channel each: products of decays that overflow and that vanish where no state does, and what is not finite."""
    rng = np.random.default_rng(3)
    a, b = rng.uniform(0.5, 1.0, (1, 600, 8)), rng.standard_normal((1, 600, 8))
    initial = np.zeros((1, 8))
    a[..., 0], b[:, :-3, 0] = 1.5, 0.0  # 1.5^600 is not finite, and the state is zero until the end
    a[:, :150, 1], a[:, 150:300, 1], b[:, :300, 1] = 0.5, 2.0, 0.0  # down by 2^150 and up again
    initial[:, 1] = 2.0**100
    a[:, 100:103, 2], a[:, 103:106, 2], b[:, 96:112, 2] = 1e20, 1e-20, 0.0
    b[:, 300, 3], b[:, 310, 4] = np.nan, np.inf  # a NaN stays one, an infinity is carried on ...
    a[:, 400, 4] = 0.0  # ... until a decay of zero makes it NaN
    a[:, 50, 5], b[:, 50, 5] = np.inf, 0.0
    a[..., 6], b[..., 6], initial[:, 6] = 1.25, -0.25, 1.0  # stays at 1, as the difference of two that grow
    return tuple(jnp.asarray(x, "float32") for x in (a, b, initial))


@pytest.mark.quick
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("name", "config"), [("xla", ChunkConfig(8, True)), ("pallas_tpu", BlockConfig(64, 8, 16))])
def test_decays_that_grow_and_states_that_are_not_finite(name: str, config: Any, reverse: bool) -> None:
    """What the reference gives, one step after another, forwards and in the gradients, without and with such states."""
    a, b, initial = _extremes()
    if reverse:
        a, b = a[:, ::-1], b[:, ::-1]
    options: dict[str, Any] = {"reverse": reverse, "return_state": True, "implementation": name, "config": config}
    plain = {**options, "implementation": "reference", "config": None}
    with interpret("hlo"):
        for got, wanted in zip(
            linear_recurrence(a, b, initial, **options), linear_recurrence(a, b, initial, **plain), strict=True
        ):
            # One by one here and there: the same sums, up to whether a product and a sum are rounded once or twice.
            np.testing.assert_allclose(got, wanted, rtol=2e-4)

        def slopes(chosen: dict[str, Any]) -> Any:
            total = lambda *xs: linear_recurrence(*xs, **chosen)[0].sum()  # noqa: E731
            return jax.grad(total, (0, 1, 2))(a, b, initial)

        for got, wanted in zip(slopes(options), slopes(plain), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=1e-5)


def test_the_first_step_of_a_backward_scan_is_the_last_row_of_a_chunk() -> None:
    """The chunk behind it is past the end of time: its gradient reads the initial state, and nobody's memory."""
    a, h, initial, d_h = _decay(1, 24, 4), _normal(1, 24, 4), _normal(1, 4, seed=1), _normal(1, 24, 4, seed=2)
    with interpret("hlo"):
        options = {"implementation": "pallas_tpu", "config": BlockConfig(16, 4, 8)}
        (da, *_) = run(LINEAR_RECURRENCE_GRAD, (a, h, initial, d_h), {"reverse": True}, **options)
    (wanted, *_) = reference_grad(a, h, initial, d_h, reverse=True)
    # 24 steps of two roundings of 2^-24 each, of products of numbers up to about 10.
    np.testing.assert_allclose(da, wanted, atol=24 * 2 * 2**-24 * 10)


@pytest.mark.quick
@pytest.mark.parametrize("segments", [1, 4])
def test_the_hopper_kernels_inside_a_checked_shard_map(segments: int) -> None:
    """From an initial state, and where time is cut; forwards and backwards, as far as they are traced."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    config = TileConfig(32, 2, segments=segments)

    def total(*operands: Any) -> Any:
        one = functools.partial(linear_recurrence, return_state=True, implementation="hopper", config=config)
        h, final = jax.shard_map(one, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(*operands)
        return h.sum() + final.sum()

    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((2, 512, 128), (2, 512, 128), (2, 128))]
    with target("gpu", "NVIDIA H200"):
        made = jax.eval_shape(jax.grad(total, (0, 1, 2)), *shapes)
    assert [one.shape for one in made] == [one.shape for one in shapes]
