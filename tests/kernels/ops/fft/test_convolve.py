"""The convolution by transforms against the sum it stands for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from capibara.kernels.ops import fft
from capibara.kernels.ops.fft.rules import tolerance_of


def _normal(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype("float32")


def _direct(x: Any, h: Any) -> Any:
    """The definition, in float64 where x is."""
    time = x.shape[2]
    padded = np.pad(x, ((0, 0), (0, 0), (h.shape[1] - 1, 0)))
    return sum(h[:, s, None] * padded[:, :, h.shape[1] - 1 - s :][:, :, :time] for s in range(h.shape[1]))


def _error(got: Any, wanted: Any) -> float:
    assert got.shape == wanted.shape
    return float(np.linalg.norm(np.asarray(got, "float64") - wanted) / np.linalg.norm(wanted))


def _bound(length: int, precision: str) -> float:
    """Three transforms: of the signal, of the filter, and back; and the products of spectra, a few roundings."""
    return 3 * tolerance_of((length,), precision)


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(("batch", "taps"), [(4, 9), (3, 1), (1, 40)])
def test_values_and_gradients(batch: int, taps: int, precision: str) -> None:
    x, h, flow = _normal(batch, 2, 21), _normal(2, taps), _normal(batch, 2, 21, seed=1)
    bound = _bound(fft.smooth_length(21 + min(taps, 21) - 1), precision)

    @jax.jit
    def both(x: Any, h: Any, flow: Any) -> Any:
        made, pull = jax.vjp(lambda x, h: fft.fft_convolve(x, h, precision=precision), x, h)
        return made, *pull(flow)

    got, dx, dh = both(x, h, flow)
    assert _error(got, _direct(x.astype("float64"), h.astype("float64"))) < bound
    # A correlation is the convolution of the reversed flow, read backwards.
    wanted_dx = _direct(flow[:, :, ::-1].astype("float64"), h.astype("float64"))[:, :, ::-1]
    lags = [np.einsum("bct,bct->c", flow[:, :, s:], x[:, :, : 21 - s], dtype="float64") for s in range(min(taps, 21))]
    wanted_dh = np.pad(np.stack(lags, 1), ((0, 0), (0, max(taps - 21, 0))))
    assert _error(dx, wanted_dx) < bound
    assert _error(dh, wanted_dh) < bound


@pytest.mark.quick
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_large_signal_does_not_round_a_small_one_away(precision: str) -> None:
    """Each element of the batch to its own relative error, forward and backward."""
    x, h, flow = _normal(4, 2, 21), _normal(2, 9), _normal(4, 2, 21, seed=1)
    size = np.float32([1e6, 1, 1e-3, 0])[:, None, None]
    bound = _bound(fft.smooth_length(29), precision)

    def of(x: Any, h: Any, flow: Any) -> Any:
        made, pull = jax.vjp(lambda x, h: fft.fft_convolve(x, h, precision=precision), x, h)
        return made, *pull(flow)

    # Where x is large its cotangent is small: the products that the filters' gradient sums are of one size.
    got, _, dh = of(x * size, h, flow / np.where(size == 0, 1, size))
    _, dx, _ = of(x, h, flow * size)
    wanted = _direct(x.astype("float64") * size, h.astype("float64"))
    wanted_dx = _direct(flow[:, :, ::-1].astype("float64") * size, h.astype("float64"))[:, :, ::-1]
    for one in range(3):
        assert _error(got[one], wanted[one]) < bound
        assert _error(dx[one], wanted_dx[one]) < bound
    assert not np.asarray(got[3]).any()
    lags = [np.einsum("bct,bct->c", flow[:3, :, s:], x[:3, :, : 21 - s], dtype="float64") for s in range(9)]
    assert _error(dh, np.stack(lags, 1)) < bound


def test_a_nan_stays_in_its_signal() -> None:
    x = _normal(4, 2, 21)
    x[0, 1, 5] = np.nan
    h = _normal(2, 9)
    got = np.asarray(fft.fft_convolve(x, h))
    slope = np.asarray(jax.grad(lambda x: (fft.fft_convolve(x, h) ** 2).sum())(x))
    for made in (got, slope):
        assert np.isnan(made[0, 1]).any()
        assert np.isfinite(np.delete(made.reshape(8, 21), 1, axis=0)).all()


@pytest.mark.quick
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_inside_shard_map_a_shared_filters_gradient_is_summed(precision: str) -> None:
    """Over the devices that have parts of the batch, which the type of its gradient must say."""
    x, h = _normal(4, 2, 6), _normal(2, 3)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:2])

    def local(x: Any, h: Any) -> Any:
        return jax.lax.psum((fft.fft_convolve(x, h, precision=precision) ** 2).sum(), "data")

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P()), out_specs=P())
    dx, dh = jax.jit(jax.grad(mapped, argnums=(0, 1)))(x, h)
    whole = jax.jit(jax.grad(lambda x, h: (fft.fft_convolve(x, h) ** 2).sum(), argnums=(0, 1)))(x, h)
    bound = 2 * _bound(8, precision)  # a filter and its gradient, one after the other
    assert _error(dx, np.asarray(whole[0])) < bound
    assert _error(dh, np.asarray(whole[1])) < bound


def test_vmap_and_type() -> None:
    x, h = _normal(3, 2, 2, 10), _normal(3, 2, 4)
    got = jax.vmap(fft.fft_convolve)(jnp.asarray(x, "bfloat16"), jnp.asarray(h))
    assert got.dtype == jnp.bfloat16
    wanted = np.stack([_direct(a, b) for a, b in zip(x, h, strict=True)])
    assert _error(got.astype("float32"), wanted) < 2 * 2**-9 + _bound(15, "float32")  # x rounded, and the result


def test_bad_calls_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="each channel one filter"):
        fft.fft_convolve(jnp.ones((2, 3, 8)), jnp.ones((2, 8)))
    with pytest.raises(ValueError, match="precision"):
        fft.fft_convolve(jnp.ones((2, 3, 8)), jnp.ones((3, 8)), precision="float64")
