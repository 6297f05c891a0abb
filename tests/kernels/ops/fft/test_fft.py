"""The transforms as numpy.fft has them, beyond what every op must pass."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from capibara.dropin import numpy_fft as numpy_api
from capibara.errors import ImplementationRefused
from capibara.kernels import explain, target
from capibara.kernels.ops import fft
from capibara.kernels.ops.fft.matmul import LARGEST_TABLE, table
from capibara.kernels.ops.fft.rules import tolerance_of
from capibara.kernels.ops.fft.twiddles import twiddles


def _complex(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    draw = np.random.default_rng((seed, *shape)).standard_normal((2, *shape))
    return (draw[0] + 1j * draw[1]).astype("complex64")


def _error(got: Any, wanted: Any) -> float:
    assert got.shape == wanted.shape
    return float(np.linalg.norm(np.asarray(got) - wanted) / np.linalg.norm(wanted))


@pytest.mark.quick
@pytest.mark.parametrize("norm", [None, "ortho", "forward"])
@pytest.mark.parametrize("implementation", ["xla", "xla_matmul"])
def test_numpy_agrees_on_axis_length_and_norm(implementation: str, norm: str | None) -> None:
    x = _complex(5, 12, 3)
    for n, ours, numpys in ((12, fft.fft, np.fft.fft), (10, fft.ifft, np.fft.ifft), (15, fft.fft, np.fft.fft)):
        got = ours(x, n, axis=1, norm=norm, implementation=implementation)
        assert _error(got, numpys(x, n, axis=1, norm=norm)) < tolerance_of((n,), "float32")


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_real_transforms_are_numpys(precision: str) -> None:
    x = _complex(3, 14).real
    for n in (14, 9, 16):
        bound = 2 * tolerance_of((n,), precision)
        half = fft.rfft(x, n, norm="ortho", precision=precision)
        assert _error(half, np.fft.rfft(x, n, norm="ortho")) < bound
        back = fft.irfft(_complex(3, 9), n, norm="forward", precision=precision)
        assert _error(back, np.fft.irfft(_complex(3, 9), n, norm="forward")) < bound
    # Two axes: as many transforms again.
    assert _error(fft.rfft2(x, precision=precision), np.fft.rfft2(x)) < 2 * bound
    plane = _complex(4, 5)
    assert _error(fft.irfft2(plane, s=(3, 7), precision=precision), np.fft.irfft2(plane, s=(3, 7))) < 2 * bound


def test_several_axes_are_numpys() -> None:
    x = _complex(2, 3, 4, 5)
    bound = tolerance_of((2, 3, 4, 5), "float32")
    assert _error(fft.fft2(x, axes=(0, 2), implementation="xla_matmul"), np.fft.fft2(x, axes=(0, 2))) < bound
    assert _error(fft.ifft2(x, s=(3, 4)), np.fft.ifft2(x, s=(3, 4))) < bound
    assert _error(fft.fftn(x, norm="ortho"), np.fft.fftn(x, norm="ortho")) < bound
    assert _error(fft.ifftn(x, s=(2, 2, 2), axes=(0, 1, 3)), np.fft.ifftn(x, s=(2, 2, 2), axes=(0, 1, 3))) < bound


def test_bfloat16_is_as_exact_as_the_documents_say() -> None:
    """About half of 2^-8 times the root of the number of products, for any number of radices: never more than all of
    it, and much more than float32 would have, so that the products are seen to be in bfloat16."""
    for n in (64, 4096, 27000, 1009):
        x = _complex(2, n)
        unit = 2**-8 * fft.plan(n).products ** 0.5
        assert 0.3 * unit < _error(fft.fft(x, precision="bfloat16"), np.fft.fft(x)) < unit


@pytest.mark.quick
def test_the_gradient_of_a_real_loss() -> None:
    """d/dx of |fft(x)|² weighted: against jnp.fft's own derivative, for every form."""
    x, weight = _complex(3, 10), _complex(3, 10, seed=1).real

    def loss(transform: Any) -> Any:
        def of(x: jax.Array) -> jax.Array:
            y = transform(x)
            return (jnp.abs(y) ** 2 * weight[:, : y.shape[1]]).sum()

        return jax.jit(jax.grad(of))

    pairs = (
        (lambda x: fft.ifft(x, implementation="xla_matmul", norm="ortho"), lambda x: jnp.fft.ifft(x, norm="ortho")),
        (lambda x: fft.rfft(x.real, implementation="xla_packed"), lambda x: jnp.fft.rfft(x.real)),
        (lambda x: fft.irfft(x, 9, implementation="xla_packed"), lambda x: jnp.fft.irfft(x, 9)),
    )
    for ours, jaxs in pairs:
        # Four times the forward tolerance: the loss squares the result, and the gradient transforms it back.
        assert _error(loss(ours)(x), np.asarray(loss(jaxs)(x))) < 4 * tolerance_of((10,), "float32")


def test_what_is_chosen_where() -> None:
    x = jax.ShapeDtypeStruct((16, 4096), "complex64")
    for platform, precision, name in (
        ("cpu", "float32", "xla"), ("gpu", "float32", "xla"), ("tpu", "float32", "xla_matmul"),
        ("cpu", "bfloat16", "xla_matmul"), ("tpu", "bfloat16", "xla_matmul"),
    ):  # fmt: skip
        with target(platform):
            assert explain(lambda x, p=precision: fft.fft(x, precision=p), x).implementation == name


def test_a_complex_array_costs_no_pass_in_front_of_the_vendors_transform() -> None:
    """Taking it apart and putting it together cancel: the program is the transform alone."""
    compiled = jax.jit(fft.fft).lower(jnp.zeros((4, 8), jnp.complex64)).compile().as_text()
    assert "fft(" in compiled
    assert "real(" not in compiled
    assert "complex(" not in compiled


def test_factors_are_used_as_far_as_the_length_allows() -> None:
    x = _complex(2, 12)
    text = jax.jit(lambda x: fft.fft(x, radix_factors=(2, 6), implementation="xla_matmul")).lower(x).as_text()
    assert "2x2x2x2x" in text.replace("tensor<", "")  # the radix-2 matrix on planes, beside a signal in two parts
    with pytest.raises(ImplementationRefused, match="chooses its own radices"):
        fft.fft(x, radix_factors=(2, 6), implementation="xla")
    told = explain(lambda x: fft.fft(x, radix_factors=(2, 5), implementation="xla_matmul"), x)
    assert "radices (2, 6): of (2, 5) the plan for 12 points uses 2, leaves out 5, not a divisor" in str(told)
    assert told.as_dict()["selections"][0]["remark"].endswith("fills in 6")
    assert "the plan for" not in str(explain(lambda x: fft.fft(x, radix_factors=(2, 6)), x)), "as asked: nothing to say"
    for n in (1, 2, 64, 100, 131, 262, 1000, 4096):
        made = fft.plan(n, (2, 4, 8))
        assert np.prod(made.factors) == (fft.plan(n).padded or n)
        assert (made.remark is None) == (n == 64)
    # By a longer transform of 288 points.
    assert fft.plan(131, (2, 4, 8)).factors == (2, 4, 36)
    y = _complex(3, 131)
    bound = tolerance_of((131,), "float32", (2, 4, 8))
    assert _error(fft.fft(y, radix_factors=(2, 4, 8)), np.fft.fft(y)) < bound
    with pytest.raises(ValueError, match=r"from 1 to 128.*like \(16, 16\)"):
        fft.plan(256, (256,))
    with pytest.raises(ValueError, match="from 1 to 128"):
        fft.plan(262, (2, 131))


def test_bad_calls_say_what_to_do() -> None:
    x = _complex(2, 12)
    with pytest.raises(ValueError, match="norm"):
        fft.fft(x, norm="orthogonal")
    with pytest.raises(ValueError, match="at least one point"):
        fft.fft(x, 0)
    with pytest.raises(ValueError, match="one of the array's"):
        fft.fft(x, axis=2)
    with pytest.raises(ValueError, match="use fft for complex"):
        fft.rfft(x)
    with pytest.raises(ValueError, match="precision"):
        fft.fft(x, precision="float16")
    with pytest.raises(ValueError, match="keyword of a transform"):
        fft.fft(x, radix=2)
    with pytest.raises(ValueError, match="once"):
        fft.fft2(x, axes=(0, -2))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda x: fft.fft(x, axis=1.0), "axis is a whole number"),
        (lambda x: fft.fft(x, axis=None), "axis is a whole number"),
        (lambda x: fft.rfft(x.real, axis="a"), "axis is a whole number"),
        (lambda x: fft.fft(x, 8.0), "n is a whole number"),
        (lambda x: fft.irfft(x, "8"), "n is a whole number"),
        (lambda x: fft.fft(x, radix_factors=(3.0, 4.0)), "factors is a sequence of whole numbers"),
        (lambda x: fft.fft(x, radix_factors=12), "factors is a sequence of whole numbers"),
        (lambda x: fft.radix_fft(x, "34"), "factors is a sequence of whole numbers"),
        (lambda x: fft.radix_fft(x, inverse="no"), "inverse is True or False"),
        (lambda x: fft.fft2(x, s=4), "s is a sequence of whole numbers"),
        (lambda x: fft.fftn(x, s=4), "s is a sequence of whole numbers"),
        (lambda x: fft.rfft2(x.real, s=4), "s is a sequence of whole numbers"),
        (lambda x: fft.fft2(x, axes=1), "axes is a sequence of whole numbers"),
        (lambda x: fft.irfft2(x, axes=1), "axes is a sequence of whole numbers"),
        (lambda x: fft.irfft2(x, s=(3, 4, 5)), "s has a length for each axis"),
        (lambda x: fft.fft(x, precision=["a"]), "precision"),
        (lambda x: fft.rfft(x.real, config={"rows": 1}), "config is of its implementation's own type"),
        (lambda x: fft.fft_planes(x.real, x.imag, radix_factors=12), "factors is a sequence of whole numbers"),
        (lambda x: fft.fft_planes(x.real, x.imag, inverse="no"), "inverse is True or False"),
        (lambda x: fft.fft_planes(None, x.imag), "fft_planes takes arrays"),
    ],
)  # fmt: skip
def test_mistakes_are_named(call: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call(_complex(2, 12))


@pytest.mark.parametrize(
    ("implementation", "precision"),
    [("xla", "float32"), ("xla_matmul", "float32"), ("xla_matmul", "bfloat16"), ("reference", "bfloat16")],
)
def test_bfloat16_planes(implementation: str, precision: str) -> None:
    """In and out in bfloat16; the transform between is as exact as `precision` says, and is rounded once."""
    re, im = jnp.asarray(np.random.default_rng(3).standard_normal((2, 3, 96)), "bfloat16")
    made = fft.fft_planes(re, im, precision=precision, implementation=implementation, norm="ortho")
    assert {plane.dtype for plane in made} == {jnp.dtype("bfloat16")}
    got = np.asarray(made[0], "float64") + 1j * np.asarray(made[1], "float64")
    wanted = np.fft.fft(np.asarray(re, "float64") + 1j * np.asarray(im, "float64"), norm="ortho")
    # A rounding to bfloat16 is at most 2^-8 of a number. Its effect is there: float32 alone would be far below 2^-10.
    exact = tolerance_of((96,), precision) if implementation != "reference" else 0
    assert 2**-10 < _error(got, wanted) < exact + 2**-8


def test_planes_are_of_one_type() -> None:
    plane = jnp.zeros((2, 8))
    with pytest.raises(ValueError, match=r"float32 or bfloat16.*re=f32.*im=bf16"):
        fft.fft_planes(plane, plane.astype("bfloat16"))
    with pytest.raises(ValueError, match=r"float32 or bfloat16.*f16"):
        fft.fft_planes(plane.astype("float16"), plane.astype("float16"))
    with pytest.raises(ValueError, match=r"one type, float32.*bf16"):
        fft.IRFFT(plane.astype("bfloat16"), plane.astype("bfloat16"), n=14)


def test_planes_take_lists() -> None:
    re, im = fft.fft_planes([1.0, 2.0, 3.0, 4.0], [0.0] * 4, radix_factors=[2, 2], implementation="xla_matmul")  # type: ignore[arg-type]
    assert _error(re + 1j * im, np.fft.fft([1.0, 2.0, 3.0, 4.0])) < tolerance_of((4,), "float32")


@pytest.mark.parametrize("one_by_one", [False, True])
def test_radices_along_any_axis(one_by_one: bool) -> None:
    x = _complex(12, 5, 2)
    for axis, n, factors in ((0, None, (3, 4)), (-2, 6, (2, 3)), (2, None, (2,))):
        got = fft.radix_fft(x, factors, axis=axis, n=n, one_by_one=one_by_one)
        assert _error(got, np.fft.fft(x, n, axis=axis)) < tolerance_of((n or x.shape[axis],), "float32")


def test_forward_mode_where_the_vendors_transform_runs() -> None:
    """Inside an optimisation context jnp's functions are themselves there, and dispatch is told of all the same."""
    x = _complex(3, 12)
    for name, given in (("fft", x), ("ifft2", x), ("rfft", x.real), ("irfft", x), ("fftn", x)):
        theirs, ours = getattr(jnp.fft, name), functools.partial(getattr(numpy_api, name), getattr(jnp.fft, name))
        for got, wanted in zip(jax.jvp(ours, (given,), (given,)), jax.jvp(theirs, (given,), (given,)), strict=True):
            assert _error(got, np.asarray(wanted)) == 0
        assert explain(ours, given).implementation == "xla"
        with target("tpu"):
            assert {one.implementation for one in explain(ours, given).selections} <= {"xla_matmul", "xla_packed"}
    (back,) = jax.linear_transpose(functools.partial(numpy_api.fft, jnp.fft.fft), x)(x)
    assert _error(back, np.fft.fft(x)) < tolerance_of((12,), "float32")


def test_plans_are_few_and_large_radices() -> None:
    for n in range(1, 600):
        made = fft.plan(n)
        assert np.prod(made.factors) == (made.padded or n)
        assert max(made.factors) <= 128
        if made.padded:
            assert made.padded >= 2 * n - 1
    assert fft.plan(1 << 24).factors == (64, 64, 64, 64)


def test_a_long_table_of_two_small_ones_is_as_exact() -> None:
    left, radix = 3 << 14, 16
    assert left * radix > LARGEST_TABLE
    made = np.asarray(table(left * radix, left, radix, False))
    # One rounding for each factor, and three in their product.
    assert np.abs(made - twiddles(left * radix, left, radix, False)).max() < 5 * 2**-24


@pytest.mark.parametrize("inverse", [False, True])
def test_sharded_along_its_own_axis(inverse: bool) -> None:
    mesh = jax.make_mesh((2, 4), ("data", "time"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu")[:8])
    x = _complex(2, 96)
    wanted = np.fft.ifft(x, norm="ortho") if inverse else np.fft.fft(x)
    how: dict[str, Any] = {"axis_name": "time", "inverse": inverse, "norm": "ortho" if inverse else None}
    bound = tolerance_of((12, 8), "float32")
    with_mesh = fft.sharded_fft(x, mesh=mesh, **how)
    assert _error(with_mesh, wanted) < bound
    assert "time" in str(with_mesh.sharding.spec)

    spec = P("data", "time")
    local = jax.jit(jax.shard_map(lambda x: fft.sharded_fft(x, **how), mesh=mesh, in_specs=spec, out_specs=spec))
    assert _error(local(x), wanted) < bound
    text = local.lower(x).compile().as_text()
    assert "all-to-all" in text
    assert "all-gather" not in text

    weight = _complex(2, 96, seed=1).real
    if inverse:
        coarse = _error(fft.sharded_fft(x, mesh=mesh, precision="bfloat16", **how), wanted)
        assert bound < coarse < tolerance_of((12, 8), "bfloat16")
        return
    grad = jax.jit(jax.grad(lambda x, f: (jnp.abs(f(x)) ** 2 * weight).sum()), static_argnums=1)
    assert _error(grad(x, local), np.asarray(grad(x, jnp.fft.fft))) < 4 * bound


def test_a_sharded_length_must_divide() -> None:
    mesh = jax.make_mesh((4,), ("time",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:4])
    with pytest.raises(ValueError, match="gather the axis and call fft, or share it") as told:
        fft.sharded_fft(jnp.zeros(12), axis_name="time", mesh=mesh)
    assert "pad" not in str(told.value)  # a padded signal's transform is another
    with pytest.raises(ValueError, match="at least one point"):
        fft.sharded_fft(jnp.zeros(0), axis_name="time", mesh=mesh)
    with pytest.raises(ValueError, match="pass mesh="):
        fft.sharded_fft(jnp.zeros(16), axis_name="time")
    with pytest.raises(ValueError, match="inverse is True or False"):
        fft.sharded_fft(jnp.zeros(16), axis_name="time", mesh=mesh, inverse="no")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mesh axis"):
        fft.sharded_fft(jnp.zeros(16), axis_name="tiem", mesh=mesh)
