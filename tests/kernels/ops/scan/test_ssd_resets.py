"""state_space_dual(resets=...): documents packed into a row are what they are apart, forward and back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels import interpret, state_space_dual

BATCH, HEADS, WIDTH, GROUPS, STATES = 2, 4, 3, 2, 5
TIME = 150  # more than a chunk of 128
# Where documents begin: at a chunk's first and last step, beside each other, and at the row's own start.
STARTS = [[0, 17, 18, 127, 128], [64, 140]]


def _operands(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    return {
        "x": normal(BATCH, TIME, HEADS, WIDTH),
        "dt": jnp.exp(normal(BATCH, TIME, HEADS) - 2),
        "A": -jnp.exp(normal(HEADS)),
        "B": normal(BATCH, TIME, GROUPS, STATES),
        "C": normal(BATCH, TIME, GROUPS, STATES),
        "D": normal(HEADS),
        "initial_state": normal(BATCH, HEADS, WIDTH, STATES),
    }


RESETS = np.zeros((BATCH, TIME), bool)
for row, places in enumerate(STARTS):
    RESETS[row, places] = True


def _naive(given: dict[str, Any], resets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A step at a time in float64."""
    o = {name: np.asarray(v, np.float64) for name, v in given.items()}
    h, y = o["initial_state"].copy(), np.zeros(o["x"].shape)
    for b, t, head in np.ndindex(o["x"].shape[:3]):
        group, dt, x = head // (HEADS // GROUPS), o["dt"][b, t, head], o["x"][b, t, head]
        kept = 0.0 if resets[b, t] else np.exp(dt * o["A"][head])
        h[b, head] = kept * h[b, head] + dt * np.outer(x, o["B"][b, t, group])
        y[b, t, head] = h[b, head] @ o["C"][b, t, group] + o["D"][head] * x
    return y, h


def _run(given: dict[str, Any], implementation: str | None, **more: Any) -> Any:
    call = jax.jit(lambda o: state_space_dual(**o, implementation=implementation, **more))
    if implementation == "pallas_tpu":
        with interpret("hlo"):
            return call(given)
    return call(given)


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize(
    ("implementation", "chunk"), [("reference", None), ("xla", None), ("xla", 16), (None, None), ("pallas_tpu", None)]
)
def test_against_steps(implementation: str | None, chunk: int | None) -> None:
    given = _operands()
    y, last = _run(given, implementation, resets=jnp.asarray(RESETS), block_size=chunk, return_state=True)
    wanted_y, wanted_last = _naive(given, RESETS)
    # Float32 sums of up to a hundred steps of numbers up to about 10.
    np.testing.assert_allclose(y, wanted_y, atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(last, wanted_last, atol=1e-4, rtol=1e-4)
    apart, _ = _naive(given, np.zeros_like(RESETS))
    assert np.abs(apart - wanted_y).max() > 0.1, "without resets it is another result"


@pytest.mark.quick
@pytest.mark.parametrize("implementation", [None, "pallas_tpu"])
def test_gradients_are_those_of_the_documents_apart(implementation: str | None) -> None:
    """Of the first row's last document, cut out and alone."""
    given, at = _operands(), STARTS[0][-1]
    weight = jnp.asarray(np.random.default_rng(9).standard_normal((TIME, HEADS, WIDTH)), jnp.float32)
    per_step = ("x", "dt", "B", "C")

    def packed(o: dict[str, Any]) -> jax.Array:
        y = state_space_dual(**o, resets=jnp.asarray(RESETS), implementation=implementation)
        return jnp.sum(y[0, at:] * weight[at:])

    def alone(o: dict[str, Any]) -> jax.Array:
        cut = {name: v[:1, at:] if name in per_step else v for name, v in o.items() if name != "initial_state"}
        return jnp.sum(state_space_dual(**cut, implementation="reference")[0] * weight[at:])

    def gradient(fn: Any) -> Any:
        if implementation == "pallas_tpu" and fn is packed:
            with interpret("hlo"):
                return jax.jit(jax.grad(fn))(given)
        return jax.jit(jax.grad(fn))(given)

    got, wanted = gradient(packed), gradient(alone)
    for name in given:
        np.testing.assert_allclose(got[name], wanted[name], atol=1e-4, rtol=1e-4, err_msg=name)
    for name in per_step:
        assert not np.any(np.asarray(got[name])[0, :at]), f"{name}: nothing passes a reset"
    assert not np.any(got["initial_state"])


def test_all_gradients_of_a_packed_row_are_the_steps_own() -> None:
    """Every document at once, A and D too, against JAX's derivative of a plain loop."""
    given = {name: v[:, :40] if v.ndim > 2 and name != "initial_state" else v for name, v in _operands().items()}
    resets = jnp.asarray(RESETS[:, :40])
    weight = jnp.asarray(np.random.default_rng(9).standard_normal(given["x"].shape), jnp.float32)

    def loop(o: dict[str, Any]) -> jax.Array:
        B, C = (jnp.repeat(o[name], HEADS // GROUPS, axis=2) for name in ("B", "C"))

        def step(h: jax.Array, now: Any) -> tuple[jax.Array, jax.Array]:
            x, dt, b, c, reset = now
            kept = jnp.where(reset[:, None], 0.0, jnp.exp(dt * o["A"]))
            h = kept[..., None, None] * h + (dt[..., None] * x)[..., None] * b[:, :, None, :]
            return h, jnp.einsum("bhpn,bhn->bhp", h, c) + o["D"][:, None] * x

        by_time = jax.tree.map(lambda v: jnp.moveaxis(v, 1, 0), (o["x"], o["dt"], B, C, resets))
        _, y = jax.lax.scan(step, o["initial_state"], by_time)
        return jnp.sum(jnp.moveaxis(y, 0, 1) * weight)

    def op(o: dict[str, Any]) -> jax.Array:
        return jnp.sum(state_space_dual(**o, resets=resets) * weight)

    got, wanted = jax.jit(jax.grad(op))(given), jax.jit(jax.grad(loop))(given)
    for name in given:
        np.testing.assert_allclose(got[name], wanted[name], atol=2e-4, rtol=2e-4, err_msg=name)


def test_bfloat16_forgets_as_well() -> None:
    given = {n: v.astype(jnp.bfloat16) if n in ("x", "B", "C") else v for n, v in _operands().items()}
    large = {**given, "initial_state": given["initial_state"] * 1e6, "x": given["x"].at[:, :64].multiply(1e4)}
    resets = jnp.asarray(RESETS)
    got, small = (_run(o, None, resets=resets)[:, 140:].astype(jnp.float32) for o in (large, given))
    assert jnp.array_equal(got, small), "what was large before the last reset leaves no bit behind"


@pytest.mark.parametrize(
    "resets", [np.zeros((BATCH, TIME), np.int32), np.zeros((TIME, BATCH), bool), np.zeros((BATCH, TIME, HEADS), bool)]
)
def test_bad_resets(resets: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"resets is bool \(2, 150\), one a step"):
        state_space_dual(**_operands(), resets=jnp.asarray(resets))
