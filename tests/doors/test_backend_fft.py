"""capibara.jax.tpu_v4's transforms, and capibara.jax.numpy.fft inside a context, used as the documents do."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from capibara import precision
from capibara.dropin.numpy_fft import TAKEN, _decided
from capibara.jax import numpy as jnp
from capibara.jax._src.core import tpu_v4_optimization_context
from capibara.jax.tpu_v4.backend import TpuV4FFTOps
from capibara.kernels import explain, target, trust
from capibara.kernels.ops.fft.rules import tolerance_of

RNG = np.random.default_rng(0)
X = (RNG.standard_normal((3, 20)) + 1j * RNG.standard_normal((3, 20))).astype("complex64")
ops = TpuV4FFTOps()


def error(got: Any, want: Any) -> float:
    assert got.shape == want.shape
    return float(np.linalg.norm(np.asarray(got) - want) / np.linalg.norm(want))


@pytest.mark.quick
def test_the_documented_call() -> None:
    wanted = np.fft.fft(X)
    exact, coarse = tolerance_of((20,), "float32"), tolerance_of((20,), "bfloat16")
    assert (
        error(ops.radix_optimized_fft(X, radix_factors=[4, 5], use_parallel=True, precision="float32"), wanted) < exact
    )
    assert error(ops.radix_optimized_fft(X), wanted) < exact
    assert error(ops.radix_optimized_fft(X, inverse=True, n=16, norm="ortho"), np.fft.ifft(X, 16, norm="ortho")) < exact
    assert exact < error(ops.radix_optimized_fft(X, precision="bfloat16"), wanted) < coarse


@pytest.mark.quick
def test_the_documented_radices_at_any_length() -> None:
    long = RNG.standard_normal((2, 1000)).astype("float32")
    call: Any = {"radix_factors": [2, 4, 8], "use_parallel": True, "precision": "bfloat16"}
    made = ops.radix_optimized_fft(long, **call)
    assert error(made, np.fft.fft(long)) < tolerance_of((1000,), "bfloat16", (2, 4, 8))
    told = str(explain(ops.radix_optimized_fft, long, **call))
    assert "radices (2, 4, 125): of (2, 4, 8) the plan for 1000 points uses 2 and 4, leaves out 8" in told


@pytest.mark.usefixtures("nothing_said_yet")
def test_every_documented_precision() -> None:
    wanted, coarse = np.fft.fft(X), tolerance_of((20,), "bfloat16")
    by_word = {word: ops.radix_optimized_fft(X, precision=word) for word in ("bfloat16", "mixed")}
    assert error(by_word["mixed"], np.asarray(by_word["bfloat16"])) == 0
    with pytest.warns(UserWarning, match="'fp8' is experimental"):
        narrow = ops.radix_optimized_fft(X, precision="fp8")
    assert narrow.dtype == "complex64"
    # An fp8 value is within 1/16 of the number, and the transform keeps the norm of a difference.
    assert coarse < error(narrow, wanted) < 1 / 16 + coarse
    assert error(ops.radix_optimized_fft(X, use_parallel=False, precision="fp8"), np.asarray(narrow)) < 1e-6
    both = precision.round_fp8(jnp.stack([X.real, X.imag]))
    assert error(ops.radix_optimized_fft(both[0] + 1j * both[1], precision="mixed"), np.asarray(narrow)) < 1e-6
    mesh = jax.make_mesh((2,), ("time",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:2])
    others = {
        "fft2": (ops.fft2(X, precision="fp8"), np.fft.fft2(X)),
        "inverse": (ops.inverse_fft(X, precision="fp8"), np.fft.ifft(X)),
        "real": (ops.real_fft(X.real, precision="fp8"), np.fft.rfft(X.real)),
        "inverse real": (ops.inverse_real_fft(X, precision="mixed"), np.fft.irfft(X)),
        "sharded": (ops.sharded_fft(X, "time", precision="fp8", mesh=mesh), wanted),
    }
    for name, (got, exact) in others.items():
        assert error(got, exact) < 1 / 16 + 4 * coarse, name
    with pytest.raises(ValueError, match="'bfloat16', 'float32', 'mixed', 'fp8'"):
        ops.radix_optimized_fft(X, precision="half")


def test_each_keyword_changes_the_program() -> None:
    def program(**how: Any) -> str:
        return str(jax.make_jaxpr(lambda x: ops.radix_optimized_fft(x, **how))(X))

    plain = program()
    assert "scan" not in plain
    assert "scan" in program(use_parallel=False)
    assert program(radix_factors=(4, 5)) != program(radix_factors=(5, 4)) != plain
    assert "bf16" in program(precision="bfloat16")
    one_by_one = ops.radix_optimized_fft(X, use_parallel=False)
    assert error(one_by_one, np.fft.fft(X)) < tolerance_of((20,), "float32")
    assert program(radix_factors=[4, 4]) == program(radix_factors=[4, 5]).replace("factors=(4, 5)", "factors=(4, 4)")


def test_the_forms_beside_it() -> None:
    bound = 2 * tolerance_of((3, 20), "float32")
    assert error(ops.inverse_fft(X, norm="forward"), np.fft.ifft(X, norm="forward")) < bound
    assert error(ops.real_fft(X.real, n=15), np.fft.rfft(X.real, 15)) < bound
    assert error(ops.inverse_real_fft(X, n=25), np.fft.irfft(X, 25)) < bound
    assert error(ops.fft2(X), np.fft.fft2(X)) < bound
    assert error(ops.inverse_fft2(X), np.fft.ifft2(X)) < bound
    mesh = jax.make_mesh((2,), ("time",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:2])
    assert error(ops.sharded_fft(X, "time", mesh=mesh), np.fft.fft(X)) < bound


@pytest.mark.parametrize("name", TAKEN)
def test_jnp_fft_in_a_context_is_dispatched_and_gives_jnps_result(name: str) -> None:
    x = X if "complex64" in TAKEN[name] else X.real
    mine, jaxs = getattr(jnp.fft, name), getattr(jax.numpy.fft, name)
    assert mine.__wrapped__ is jaxs
    longer = {"s": (3, 18), "axes": (0, 1)} if name.endswith(("2", "n")) else {"n": 18, "axis": 0}
    calls: list[dict[str, Any]] = [{}, {"norm": "ortho", **longer}]
    for how in calls:
        wanted = jaxs(x, **how)
        with tpu_v4_optimization_context(), target("tpu"):
            chosen = explain(lambda x, how=how: mine(x, **how), x).selections
        assert chosen, "no op was called"
        assert {one.implementation for one in chosen} <= {"xla_matmul", "xla_packed"}
        with tpu_v4_optimization_context():
            got = mine(x, **how)
        assert got.dtype == wanted.dtype
        assert error(got, np.asarray(wanted)) < 2 * tolerance_of((20, 20), "float32")


def test_jnp_fft_is_decided_again_under_another_trust() -> None:
    x = jax.ShapeDtypeStruct((4096, 1024), "complex64")
    with target("tpu", "TPU v4"):
        for level, implementation in (("measured", "xla_matmul"), ("predicted", "pallas_tpu")) * 2:
            with trust(level):
                assert [one.implementation for one in _decided("fft", x, None, -1, None)] == [implementation]


def test_what_the_ops_do_not_take_stays_jnps() -> None:
    def selections(fn: Any, *args: Any) -> Any:
        with tpu_v4_optimization_context(), target("tpu"):
            return explain(fn, *args).selections

    assert not selections(lambda x: jnp.fft.fft(x.astype(int)), X.real)
    assert not selections(jnp.fft.fft, jnp.zeros((0, 4), "complex64"))
    with tpu_v4_optimization_context():
        for mistake in ({"n": 0}, {"axis": 7}, {"norm": "orthogonal"}):
            with pytest.raises(ValueError) as ours:
                jnp.fft.fft(X, **mistake)
            with pytest.raises(ValueError) as theirs:
                jax.numpy.fft.fft(X, **mistake)
            assert str(ours.value) == str(theirs.value)
