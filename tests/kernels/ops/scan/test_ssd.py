"""state_space_dual, its step, and gated linear attention: what the documents promise beyond the shared suite."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from capibara.kernels import gated_linear_attention, interpret, state_space_dual, state_space_dual_step

BATCH, HEADS, WIDTH, GROUPS, STATES = 2, 4, 3, 2, 5


def _normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape), jnp.float32)


def _operands(time: int = 11) -> dict[str, Any]:
    return {
        "x": _normal(BATCH, time, HEADS, WIDTH),
        "dt": jnp.exp(_normal(BATCH, time, HEADS, seed=1) - 1),
        "A": -jnp.exp(_normal(HEADS, seed=2)),
        "B": _normal(BATCH, time, GROUPS, STATES, seed=3),
        "C": _normal(BATCH, time, GROUPS, STATES, seed=4),
        "D": _normal(HEADS, seed=5),
        "initial_state": _normal(BATCH, HEADS, WIDTH, STATES, seed=6),
    }


def _naive(given: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Head by head and step by step in float64."""
    o = {name: np.asarray(v, np.float64) for name, v in given.items()}
    h, y = o["initial_state"].copy(), np.zeros(o["x"].shape)
    for b, t, head in np.ndindex(o["x"].shape[:3]):
        group, dt, x = head // (HEADS // GROUPS), o["dt"][b, t, head], o["x"][b, t, head]
        h[b, head] = np.exp(dt * o["A"][head]) * h[b, head] + dt * np.outer(x, o["B"][b, t, group])
        y[b, t, head] = h[b, head] @ o["C"][b, t, group] + o["D"][head] * x
    return y, h


@pytest.mark.quick
@pytest.mark.parametrize("chunk", [None, 4, 1])
def test_against_numpy(chunk: int | None) -> None:
    given = _operands()
    y, last = state_space_dual(**given, block_size=chunk, return_state=True)
    wanted_y, wanted_last = _naive(given)
    # Float32: sums of some tens of products of numbers up to about 10.
    np.testing.assert_allclose(y, wanted_y, atol=3e-5)
    np.testing.assert_allclose(last, wanted_last, atol=3e-5)


def test_chunk_is_what_a_product_takes() -> None:
    given = _operands(time=16)

    def scores(chunk: int) -> str:
        return str(jax.make_jaxpr(lambda o: state_space_dual(**o, block_size=chunk, implementation="xla"))(given))

    assert ",8,8]" in scores(8)
    assert ",4,4]" in scores(4)
    assert ",8,8]" not in scores(4)


@pytest.mark.quick
def test_decoding_goes_on_where_the_prefill_ended() -> None:
    """prefill(T) is prefill(T - k) and k steps."""
    given, ahead = _operands(time=20), 3
    whole, last = state_space_dual(**given, return_state=True)
    timed, shared = {n: given[n] for n in ("x", "dt", "B", "C")}, {n: given[n] for n in ("A", "D")}
    y, state = state_space_dual(
        **{n: v[:, :-ahead] for n, v in timed.items()},
        **shared,
        initial_state=given["initial_state"],
        return_state=True,
    )
    steps, step = [y], jax.jit(state_space_dual_step)
    for t in range(-ahead, 0):
        one, state = step(state, **{n: v[:, t] for n, v in timed.items()}, **shared)
        steps.append(one[:, None])
    # The same sums in another order: a few units of float32 of numbers up to about 30.
    np.testing.assert_allclose(jnp.concatenate(steps, 1), whole, atol=5e-5)
    np.testing.assert_allclose(state, last, atol=5e-5)


def test_a_decay_to_nothing_leaves_no_nan() -> None:
    """A step that forgets everything, and states that would overflow if decays were divided by: values, gradients."""
    given = _operands(time=70)
    given["A"] = jnp.full(HEADS, -3e3)

    def total(o: dict[str, Any]) -> Any:
        return state_space_dual(**o).sum()

    value, found = jax.jit(jax.value_and_grad(total))(given)
    np.testing.assert_allclose(value, _naive(given)[0].sum(), rtol=1e-4)
    assert all(bool(jnp.isfinite(v).all()) for v in found.values())


@pytest.mark.parametrize("size", [1e3, 1e5, 1e8])
def test_a_large_step_leaves_the_small_ones_after_it_exact(size: float) -> None:
    given = _operands(time=70)
    given["dt"] = given["dt"].at[:, 5::9, 1].set(size)
    given["x"] = given["x"].at[:, 5::9, 1].divide(size)
    y, last = state_space_dual(**given, return_state=True)
    wanted_y, wanted_last = _naive(given)
    # Float32: sums of some tens of products of numbers up to about 10.
    np.testing.assert_allclose(y, wanted_y, atol=3e-5)
    np.testing.assert_allclose(last, wanted_last, atol=3e-5)


def test_a_chunk_is_any_whole_number() -> None:
    given = _operands()
    np.testing.assert_array_equal(
        state_space_dual(**given, block_size=np.int64(4)), state_space_dual(**given, block_size=4)
    )


def test_heads_of_one_group_are_split_over_a_mesh() -> None:
    """Each device has some heads and the whole of B and C; the kernel's own rule says so, and nothing is gathered."""
    given = _operands(time=5)
    given |= {"B": given["B"][:, :, :1], "C": given["C"][:, :, :1]}
    devices = jax.devices("cpu")[:4]
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,), devices=devices)
    split = NamedSharding(mesh, P(None, None, "model"))
    placed = {**given, "x": jax.device_put(given["x"], split), "dt": jax.device_put(given["dt"], split)}
    with interpret("hlo"):
        run = jax.jit(lambda o: state_space_dual(**o, implementation="pallas_tpu"))
        y = run(placed)
        program = run.lower(placed).compile().as_text()
    assert y.sharding.is_equivalent_to(split, y.ndim)
    assert "all-gather" not in program
    # Float32 sums of some tens of products of numbers up to about 10, in another order.
    np.testing.assert_allclose(y, state_space_dual(**given), atol=3e-5)


def _attention(time: int, channels: bool) -> dict[str, Any]:
    rows = (BATCH, time, HEADS, STATES)
    return {
        "q": _normal(*rows),
        "k": _normal(*rows, seed=1),
        "v": _normal(BATCH, time, HEADS, WIDTH, seed=2),
        "log_decay": -jnp.exp(_normal(*rows[: 4 if channels else 3], seed=3)),
    }


@pytest.mark.quick
@pytest.mark.parametrize("channels", [False, True])
def test_gated_linear_attention_is_a_weighted_sum_of_values(channels: bool) -> None:
    """y_i = scale · Σ_j≤i Σ_d q_id k_jd exp(Σ_j<t≤i log_decay_td) v_j, pair by pair in float64."""
    given = _attention(21, channels)
    q, k, v, fades = (np.asarray(x, np.float64) for x in given.values())
    fades = fades if channels else np.broadcast_to(fades[..., None], q.shape)
    sums, wanted = np.cumsum(fades, 1), np.zeros(v.shape)
    for i in range(21):
        for j in range(i + 1):
            weight = (q[:, i] * k[:, j] * np.exp(sums[:, i] - sums[:, j])).sum(-1)
            wanted[:, i] += 0.5 * weight[..., None] * v[:, j]
    # Float32: sums of some hundred products of numbers up to about 10.
    np.testing.assert_allclose(gated_linear_attention(**given, scale=0.5), wanted, atol=5e-5)
    default = gated_linear_attention(**given)
    np.testing.assert_allclose(default, wanted * 2 / STATES**0.5, atol=5e-5)


@pytest.mark.parametrize("channels", [False, True])
def test_gated_linear_attention_goes_on_from_a_state(channels: bool) -> None:
    given = _attention(9, channels)
    whole, last = gated_linear_attention(**given, return_state=True)
    y, state = gated_linear_attention(**{n: x[:, :5] for n, x in given.items()}, return_state=True)
    rest, end = gated_linear_attention(
        **{n: x[:, 5:] for n, x in given.items()}, initial_state=state, return_state=True
    )
    np.testing.assert_allclose(jnp.concatenate([y, rest], 1), whole, atol=2e-5)
    np.testing.assert_allclose(end, last, atol=2e-5)


def _reset(reset: float, channels: bool, time: int = 70) -> dict[str, Any]:
    """Weak decays, so that what follows a reset still counts at the end of its chunk; several resets in each."""
    given = _attention(time, channels)
    return {**given, "log_decay": jnp.full_like(given["log_decay"], -0.0123).at[:, 10::19].set(reset)}


def _by_steps(given: dict[str, Any]) -> np.ndarray:
    """One step after another in float64, unscaled."""
    q, k, v, fades = (np.asarray(x, np.float64) for x in given.values())
    fades = fades if fades.ndim == 4 else np.broadcast_to(fades[..., None], q.shape)
    h, y = np.zeros((BATCH, HEADS, STATES, WIDTH)), np.zeros(v.shape)
    for t in range(v.shape[1]):
        h = np.exp(fades[:, t])[..., None] * h + k[:, t][..., :, None] * v[:, t][..., None, :]
        y[:, t] = (q[:, t][..., None] * h).sum(-2)
    return y


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("reset", [-1e3, -1e6, -1e9, -np.inf])
def test_what_follows_a_reset_is_exact(reset: float, channels: bool) -> None:
    given = _reset(reset, channels)
    # Float32: sums of some hundred products of numbers up to about 10.
    np.testing.assert_allclose(gated_linear_attention(**given, scale=1.0), _by_steps(given), atol=5e-5)


def test_what_follows_a_reset_is_exact_in_the_tpu_kernel() -> None:
    given = _reset(-np.inf, False)
    with interpret("hlo"):
        y = gated_linear_attention(**given, scale=1.0, implementation="pallas_tpu")
    np.testing.assert_allclose(y, _by_steps(given), atol=5e-5)


@pytest.mark.parametrize("channels", [False, True])
def test_gradients_past_a_reset(channels: bool) -> None:
    """Of infinite strength: those of the step by step form, and 0 for the reset itself."""
    given = _reset(-np.inf, channels, time=32)

    def total(o: dict[str, Any], implementation: str) -> Any:
        return jnp.sin(gated_linear_attention(**o, implementation=implementation)).sum()

    found, wanted = (jax.jit(jax.grad(total), static_argnums=1)(given, name) for name in ("xla", "reference"))
    for name, x in found.items():
        # The decays' are sums of some hundred products of numbers up to about 30.
        np.testing.assert_allclose(x, wanted[name], atol=2e-4, err_msg=name)
    assert not found["log_decay"][:, 10::19].any()


def test_nothing_passes_a_reset() -> None:
    given = _attention(5, False)
    given |= {"k": given["k"].at[:, 3:].set(0), "log_decay": given["log_decay"].at[:, 3].set(-jnp.inf)}
    assert not gated_linear_attention(**given)[:, 3:].any()


def test_channels_that_forget_at_once_stay_finite() -> None:
    given = _attention(40, True)
    given["log_decay"] = given["log_decay"].at[:, ::3].set(-500.0)  # exp(500) would overflow
    found = jax.jit(jax.grad(lambda o: gated_linear_attention(**o).sum()))(given)
    assert all(bool(jnp.isfinite(x).all()) for x in (gated_linear_attention(**given), *found.values()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"A": jnp.zeros((HEADS, 1))}, "A is one number a head"),
        ({"B": jnp.zeros((BATCH, 11, 3, STATES))}, "groups dividing the 4 heads"),
        ({"C": jnp.zeros((BATCH, 11, GROUPS, 1))}, "C is"),
        ({"x": jnp.zeros((BATCH, 11, HEADS))}, "x is \\[batch, time, heads, P\\]"),
        ({"block_size": 0}, "block_size is a positive whole number"),
        (
            {"initial_state": jnp.zeros((BATCH, HEADS, STATES, WIDTH))},
            "\\(2, 4, 3, 5\\) by x and B. Got f32\\[2,4,5,3\\]",
        ),
        ({"A": jnp.full(HEADS, -1 + 2j)}, "takes bfloat16.* A of complex64\\[4\\]"),
        ({"A": -jnp.ones(HEADS, int)}, "takes bfloat16.* A of i32\\[4\\]"),
        ({"dt": jnp.ones((BATCH, 11, HEADS), int)}, "takes bfloat16.* dt of i32"),
        ({"initial_state": jnp.zeros((BATCH, HEADS, WIDTH, STATES), complex)}, "initial_state of complex64"),
        ({"dt": jnp.zeros((BATCH, 10, HEADS))}, "dt is one number a step and head, \\(2, 11, 4\\)"),
        ({"dt": 0.1}, "dt is one number a step and head"),
        ({"return_state": "no"}, "return_state is True or False"),
        ({"block_size": True}, "block_size is a positive whole number"),
    ],
)
def test_bad_input(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        state_space_dual(**{**_operands(), **change})


def test_bad_input_of_linear_attention() -> None:
    given = _attention(5, False)
    with pytest.raises(ValueError, match="log_decay is"):
        gated_linear_attention(**{**given, "log_decay": jnp.zeros((5,))})
    with pytest.raises(ValueError, match="q and k are"):
        gated_linear_attention(**{**given, "k": given["k"][..., :2]})


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"v": jnp.zeros((BATCH, 5, 2 * HEADS, WIDTH))}, "v is \\[batch, time, heads, Dv\\], \\(2, 5, 4, Dv\\)"),
        ({"v": jnp.zeros((BATCH, 6, HEADS, WIDTH))}, "v is \\[batch, time, heads, Dv\\]"),
        ({"v": jnp.zeros((5, HEADS, WIDTH))}, "v is \\[batch, time, heads, Dv\\]"),
        ({"q": jnp.zeros((BATCH, 5, HEADS, STATES), int)}, "convert q"),
        ({name: jnp.zeros((BATCH, 5, HEADS, 0)) for name in "qk"}, "Dk being 1 or more"),
        ({"log_decay": jnp.zeros((BATCH, 4, HEADS))}, "log_decay is"),
        ({"initial_state": jnp.zeros((BATCH, HEADS, WIDTH, STATES))}, "\\[batch, heads, Dk, Dv\\], \\(2, 4, 5, 3\\)"),
        ({"implementation": "x"}, "implementation of gated_linear_attention 'x'"),
        ({"return_state": 1}, "return_state is True or False"),
        ({"scale": 1j}, "scale is a real number"),
    ],
)
def test_errors_of_linear_attention_name_its_own_operands(change: dict[str, Any], words: str, channels: bool) -> None:
    with pytest.raises(ValueError, match=words):
        gated_linear_attention(**{**_attention(5, channels), **change})


def test_grouped_heads_are_of_state_space_dual_alone() -> None:
    """Two heads of q and k never serve four of v, as long as the decays are of four too."""
    given = _attention(5, False)
    with pytest.raises(ValueError, match="v is"):
        gated_linear_attention(given["q"][:, :, :2], given["k"][:, :, :2], given["v"], given["log_decay"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"state": jnp.zeros((BATCH, HEADS, STATES, WIDTH))}, "state is .*\\(2, 4, 3, 5\\) by x and B"),
        ({"state": None}, "state"),
        ({"A": jnp.full(HEADS, -1 + 2j)}, "A of complex64"),
        ({"dt": jnp.ones((BATCH, 1))}, "dt is one number a step and head"),
    ],
)
def test_bad_input_of_a_step(change: dict[str, Any], words: str) -> None:
    given = _operands()
    state = given.pop("initial_state")
    now = {name: x[:, 0] if name in ("x", "dt", "B", "C") else x for name, x in given.items()}
    with pytest.raises(ValueError, match=words):
        state_space_dual_step(**{"state": state, **now, **change})
