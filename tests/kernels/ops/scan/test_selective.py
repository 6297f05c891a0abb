"""selective_scan and selective_step: what the documents promise, beyond what every op must pass."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from capibara.kernels import interpret, selective_scan, selective_step
from capibara.kernels.ops.scan import SELECTIVE_SCAN
from capibara.kernels.ops.scan.selective.cases import ALL, make_case
from capibara.kernels.ops.scan.selective.chunks import cut_time

NAMES = SELECTIVE_SCAN.operands
NONE: frozenset[str] = frozenset()


def _operands(time: int = 9, **given: Any) -> dict[str, Any]:
    case = make_case("own", 2, time, 3, 4, NONE, dtype="float32", **{**ALL, **given})
    return {name: x for name, x in zip(NAMES, case.arrays(), strict=True) if x is not None}


def _naive(given: dict[str, Any], *, softplus: bool) -> tuple[np.ndarray, np.ndarray]:
    """Number by number in float64."""
    o = {name: np.asarray(x, np.float64) for name, x in given.items()}
    batch, time, channels = o["x"].shape
    h, y = o["initial_state"].copy(), np.zeros(o["x"].shape)
    for b, t, d in np.ndindex(batch, time, channels):
        delta = o["dt"][b, t, d] + o["dt_bias"][d]
        delta = np.log1p(np.exp(delta)) if softplus else delta
        h[b, d] = np.exp(delta * o["A"][d]) * h[b, d] + delta * o["B"][b, t] * o["x"][b, t, d]
        z = o["z"][b, t, d]
        y[b, t, d] = (h[b, d] @ o["C"][b, t] + o["D"][d] * o["x"][b, t, d]) * z / (1 + np.exp(-z))
    return y, h


@pytest.mark.quick
@pytest.mark.parametrize("softplus", [True, False])
def test_against_numpy(softplus: bool) -> None:
    given = _operands() if softplus else {**_operands(), "dt_bias": jnp.zeros(3)}
    if not softplus:
        given["dt"] = jnp.abs(given["dt"])
    y, last = selective_scan(**given, dt_softplus=softplus, return_state=True)
    wanted_y, wanted_last = _naive(given, softplus=softplus)
    # Float32: nine steps and sums of four numbers up to about 10.
    np.testing.assert_allclose(y, wanted_y, atol=2e-5)
    np.testing.assert_allclose(last, wanted_last, atol=2e-5)


def test_decoding_goes_on_where_the_prefill_ended() -> None:
    """prefill(T) is prefill(T - k) and k steps, and is prefill(T - k) and a scan of k from its state."""
    given, ahead = _operands(time=40), 4
    whole, last = selective_scan(**given, dt_softplus=True, return_state=True)
    timed = {name: given[name] for name in ("x", "dt", "B", "C", "z")}
    shared = {name: given[name] for name in ("A", "D", "dt_bias")}
    early = {name: v[:, :-ahead] for name, v in timed.items()}
    y, state = selective_scan(
        **early, **shared, initial_state=given["initial_state"], dt_softplus=True, return_state=True
    )
    late = {name: v[:, -ahead:] for name, v in timed.items()}
    rest, rest_last = selective_scan(**late, **shared, initial_state=state, dt_softplus=True, return_state=True)
    steps, step = [y], jax.jit(functools.partial(selective_step, dt_softplus=True))
    for t in range(ahead):
        one, state = step(state, **{name: v[:, t] for name, v in late.items()}, **shared)
        steps.append(one[:, None])
    # The same sums in another order: a few units of float32 of numbers up to about 10.
    for got in (jnp.concatenate(steps, 1), jnp.concatenate([y, rest], 1)):
        np.testing.assert_allclose(got, whole, atol=2e-5)
    for got in (state, rest_last):
        np.testing.assert_allclose(got, last, atol=2e-5)


def _largest(jaxpr: Any) -> int:
    """Elements of the largest array anywhere in a traced program."""
    found = [int(np.prod(v.aval.shape)) for e in jaxpr.eqns for v in e.outvars]
    inner = [_largest(sub) for e in jaxpr.eqns for sub in jaxprs_in_params(e.params)]
    return max([0, *found, *inner])


def test_no_array_has_time_and_states() -> None:
    """Forward and backward: far less than [batch, time, channels, N]."""
    time, channels, states = 8192, 16, 16
    shapes = make_case("long", 1, time, channels, states, NONE, dtype="float32", D=False).args()[:5]

    def loss(*operands: Any) -> Any:
        return selective_scan(*operands, implementation="xla").sum()

    traced = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2, 3, 4)))(*shapes)
    # Most are the size of an operand; one state a chunk, and those of 256 steps at a time, are smaller still.
    assert _largest(traced.jaxpr) <= time * channels * states // 8
    assert _largest(traced.jaxpr) >= time * channels  # the count sees inside


@pytest.mark.parametrize("time", [1, 32, 33, 257, 4096, 1 << 20])
def test_time_is_cut_without_loss(time: int) -> None:
    cut = cut_time(time)
    assert cut.steps * cut.chunks >= time
    assert cut.chunks % cut.together == 0
    # Padding is for the last chunks alone.
    assert cut.steps * (cut.chunks - cut.together) < time


def test_gradient_of_an_absent_operand_is_not_asked_for() -> None:
    given = _operands(time=5)
    plain = {name: given[name] for name in ("x", "dt", "A", "B", "C")}
    found = jax.jit(jax.grad(lambda o: selective_scan(**o, dt_softplus=True).sum()))(plain)
    assert all(bool(jnp.isfinite(v).all()) for v in found.values())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"A": jnp.zeros((4, 3))}, "A is \\[channels, N\\]"),
        ({"B": jnp.zeros((2, 9, 5))}, "B is \\(2, 9, 4\\)"),
        ({"x": jnp.zeros((9, 3))}, "x is \\[batch, time, channels\\]"),
        ({"dt": jnp.zeros((2, 9, 3), int)}, "takes bfloat16"),
        ({"initial_state": jnp.zeros((2, 4, 3))}, "initial_state is \\(2, 3, 4\\)"),
        ({"A": jnp.full((3, 4), -1 + 2j)}, "A of complex64"),
        ({"dt_softplus": "no"}, "dt_softplus is True or False"),
        ({"return_state": 1}, "return_state is True or False"),
    ],
)
def test_bad_input(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        selective_scan(**{**_operands(), **change})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"state": jnp.zeros((2, 4, 3))}, "^state is \\[batch, channels, N\\], \\(2, 3, 4\\)"),
        ({"state": jnp.zeros((2, 3, 4), int)}, "convert state"),
        ({"dt_softplus": "no"}, "dt_softplus is True or False"),
        ({"x": None}, "selective_step takes arrays"),
    ],
)
def test_bad_input_of_a_step(change: dict[str, Any], words: str) -> None:
    given = _operands()
    now = {name: given[name][:, 0] for name in ("x", "dt", "B", "C")}
    with pytest.raises(ValueError, match=words):
        selective_step(**{"state": given["initial_state"], "A": given["A"], **now, **change})


def test_flags_of_numpy() -> None:
    given = _operands(time=3)
    with_it, without = (selective_scan(**given, dt_softplus=np.bool_(on)) for on in (True, False))
    np.testing.assert_array_equal(with_it, selective_scan(**given, dt_softplus=True))
    assert (with_it != without).any()


def test_a_step_has_no_time() -> None:
    given = _operands()
    with pytest.raises(ValueError, match="leave out its time"):
        selective_step(given["initial_state"], given["x"], given["dt"], given["A"], given["B"], given["C"])


def _many() -> dict[str, Any]:
    """A batch of 4 and 8 channels: what a mesh of 4 x 2 divides."""
    case = make_case("mesh", 4, 5, 8, 3, NONE, dtype="float32", **ALL)
    return dict(zip(NAMES, case.arrays(), strict=True))


SPECS = {
    "x": P("data", None, "model"),
    "dt": P("data", None, "model"),
    "A": P("model"),
    "B": P("data"),
    "C": P("data"),
    "D": P("model"),
    "z": P("data", None, "model"),
    "dt_bias": P("model"),
    "initial_state": P("data", "model"),
}


def _mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu")[:8])


def _scan(given: dict[str, Any], implementation: str = "xla") -> Any:
    return selective_scan(**given, dt_softplus=True, return_state=True, implementation=implementation)


@pytest.mark.parametrize("name", ["xla", "pallas_tpu"])
def test_batch_and_channels_are_split_over_a_mesh(name: str) -> None:
    given, mesh = _many(), _mesh()
    placed = {n: jax.device_put(x, NamedSharding(mesh, SPECS[n])) for n, x in given.items()}
    with interpret("hlo"):
        run = jax.jit(lambda o: _scan(o, name))
        y, last = run(placed)
        program = run.lower(placed).compile().as_text()
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, SPECS["x"]), 3)
    assert last.sharding.is_equivalent_to(NamedSharding(mesh, SPECS["initial_state"]), 3)
    assert "all-gather" not in program
    for got, wanted in zip((y, last), _scan(given), strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-5)  # the same float32 sums in another order


def test_gradients_inside_shard_map() -> None:
    """What all of a batch share has the sum of the devices' gradients."""
    given = _many()

    def total(o: dict[str, Any]) -> Any:
        return _scan(o)[0].sum()

    split = jax.shard_map(
        lambda o: _scan(o)[0], mesh=_mesh(), in_specs=({n: SPECS[n] for n in given},), out_specs=SPECS["x"]
    )
    found = jax.jit(jax.grad(lambda o: split(o).sum()))(given)
    wanted = jax.jit(jax.grad(total))(given)
    for name in given:
        np.testing.assert_allclose(found[name], wanted[name], atol=5e-5, err_msg=name)


@pytest.mark.parametrize("mapped", ["x", "A"])
def test_vmap(mapped: str) -> None:
    """Over an operand of the batch, which makes a larger batch, and over one that the batch shares."""
    given = _many()
    stacked = jnp.stack([given[mapped], 0.5 * given[mapped]])
    got = jax.jit(jax.vmap(lambda v: _scan({**given, mapped: v})))(stacked)
    for element in range(2):
        for one, wanted in zip(got, _scan({**given, mapped: stacked[element]}), strict=True):
            np.testing.assert_allclose(one[element], wanted, atol=2e-5)
