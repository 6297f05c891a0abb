"""numpy.fft's functions on the family's ops: any axis, padding and cutting to n, complex arrays in and out."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Complex, Float, Num, Real

from capibara.errors import rule_error, unknown_name
from capibara.kernels.core import context, tables
from capibara.kernels.core.dispatch import run
from capibara.kernels.core.operands import as_array
from capibara.kernels.core.spec import describe
from capibara.kernels.ops.fft.api import FFT, IRFFT, RFFT
from capibara.kernels.ops.fft.rules import MOST_AXES, NORMS, by_policy, whole_factors

How = Mapping[str, Any]


class RealTransformOptions(TypedDict, total=False):
    """How a transform of real numbers runs: see `fft`."""

    precision: str
    implementation: str | None
    config: Any


class TransformOptions(RealTransformOptions, total=False):
    """How a transform runs: see `fft`."""

    radix_factors: Sequence[int] | None


def fft(
    a: Num[Array, " ..."],
    n: int | None = None,
    axis: int = -1,
    norm: str | None = None,
    **how: Unpack[TransformOptions],
) -> Complex[Array, " ..."]:
    """The discrete Fourier transform along an axis, as numpy.fft.fft.

    Args:
      a: real or complex; computed and returned as complex64.
      n: the length: the axis is cut, or padded with zeros at its end, to it.
      axis: the axis to transform.
      norm: "backward" (the default: 1/n on the way back), "ortho" (1/sqrt(n) both ways) or "forward".
      how: any of
        precision: "float32", or "bfloat16": matrix products of bfloat16 numbers with float32 sums, to a relative error
          of about 2^-8 times the root of the number of radices (`plan`). On Hopper a kernel gains by it from 2^16 to
          2^18 points where there are 2^23 numbers or more; else, on a GPU, cuFFT's float32 is faster for complex arrays
          and runs instead. `fft_planes` and `fft_convolve` have kernels that gain at other lengths. "mixed" is the
          same, the result being complex64 in any case; "fp8" (experimental) rounds the signal to fp8 values, with one
          scale for all of it, and goes on as "bfloat16".
        radix_factors: the radices to prefer, for implementations that take them; see `plan`.
        implementation: force one ("xla", "xla_matmul", "pallas_tpu", "hopper", "hopper_long", "hopper_pairs",
          "reference"); a refusal is an error.
        config: that implementation's choices.

    The gradient is the transform the other way. On a mesh every other axis may be sharded and nothing is gathered; for
    a sharded axis of its own see `sharded_fft`. Forward-mode derivatives need implementation="reference".

    >>> fft(jnp.arange(4.0)).tolist()
    [(6+0j), (-2+2j), (-2+0j), (-2-2j)]
    """
    return _over(a, None if n is None else (n,), (axis,), norm, how, inverse=False)


def ifft(
    a: Num[Array, " ..."],
    n: int | None = None,
    axis: int = -1,
    norm: str | None = None,
    **how: Unpack[TransformOptions],
) -> Complex[Array, " ..."]:
    """The inverse transform along an axis, as numpy.fft.ifft; arguments as for `fft`.

    >>> x = jnp.array([1.0, 2.0, 4.0])
    >>> bool(jnp.allclose(ifft(fft(x)), x, atol=1e-6))
    True
    """
    return _over(a, None if n is None else (n,), (axis,), norm, how, inverse=True)


def radix_fft(
    signal: Num[Array, " ..."], radix_factors: Sequence[int] | None = None, *, one_by_one: bool = False,
    inverse: bool = False, n: int | None = None, axis: int = -1, norm: str | None = None,
    **how: Unpack[RealTransformOptions],
) -> Complex[Array, " ..."]:  # fmt: skip
    """The transform of an axis, all signals at once or, `one_by_one`, each after the other.

    `radix_factors` are preferences: `plan` says how far they are used.

    >>> x = jnp.ones((2, 6))
    >>> bool(jnp.allclose(radix_fft(x, (2, 3), one_by_one=True), radix_fft(x, (2, 3))))
    True
    """
    for name, flag in (("one_by_one", one_by_one), ("inverse", inverse)):
        if not isinstance(flag, bool | np.bool_):
            raise rule_error(f"{name} is True or False", f"{name}={flag!r}", "pass one of them")
    x = _complex(signal)
    at = _axis(x, axis)
    x = _fitted(x, None if n is None else (n,), (at,))
    x, rounded = _by_policy(x, how)  # before the signals are taken one by one: they share a scale
    form: Callable[..., jax.Array] = ifft if inverse else fft
    transform = functools.partial(form, norm=norm, radix_factors=radix_factors, **rounded)
    if not one_by_one or x.ndim == 1 or x.size == 0:
        return transform(x, axis=at)
    moved = jnp.moveaxis(x, at, -1)
    made = lax.map(transform, moved.reshape(-1, moved.shape[-1])).reshape(moved.shape)
    return jnp.moveaxis(made, -1, at)


def fft2(
    a: Num[Array, " ..."], s: Sequence[int] | None = None, axes: Sequence[int] = (-2, -1),
    norm: str | None = None, **how: Unpack[TransformOptions],
) -> Complex[Array, " ..."]:  # fmt: skip
    """The transform along two axes, as numpy.fft.fft2; `s` are their lengths, the rest as for `fft`."""
    return _over(a, s, axes, norm, how, inverse=False)


def ifft2(
    a: Num[Array, " ..."], s: Sequence[int] | None = None, axes: Sequence[int] = (-2, -1),
    norm: str | None = None, **how: Unpack[TransformOptions],
) -> Complex[Array, " ..."]:  # fmt: skip
    """The inverse transform along two axes, as numpy.fft.ifft2."""
    return _over(a, s, axes, norm, how, inverse=True)


def fftn(
    a: Num[Array, " ..."], s: Sequence[int] | None = None, axes: Sequence[int] | None = None,
    norm: str | None = None, **how: Unpack[TransformOptions],
) -> Complex[Array, " ..."]:  # fmt: skip
    """The transform along any axes, by default all (or the last len(s)), as numpy.fft.fftn."""
    return _over(a, s, axes, norm, how, inverse=False)


def ifftn(
    a: Num[Array, " ..."], s: Sequence[int] | None = None, axes: Sequence[int] | None = None,
    norm: str | None = None, **how: Unpack[TransformOptions],
) -> Complex[Array, " ..."]:  # fmt: skip
    """The inverse transform along any axes, as numpy.fft.ifftn."""
    return _over(a, s, axes, norm, how, inverse=True)


def rfft(
    a: Real[Array, " ..."],
    n: int | None = None,
    axis: int = -1,
    norm: str | None = None,
    **how: Unpack[RealTransformOptions],
) -> Complex[Array, " ..."]:
    """The first n // 2 + 1 points of a real signal's transform, as numpy.fft.rfft.

    Arguments as for `fft`; the implementations are "xla", "xla_packed" (a complex transform of half the length) and
    "reference", and none takes radix factors.

    >>> rfft(jnp.arange(4.0)).tolist()
    [(6+0j), (-2+2j), (-2+0j)]
    """
    x, rounded = _by_policy(_real(a), how)
    x = _fitted(x, None if n is None else (n,), (_axis(x, axis),))
    return _jitted(_rfft, x, axis=_axis(x, axis), norm=_norm(norm), how=_how(rounded))


def irfft(
    a: Num[Array, " ..."],
    n: int | None = None,
    axis: int = -1,
    norm: str | None = None,
    **how: Unpack[RealTransformOptions],
) -> Float[Array, " ..."]:
    """The real signal of length n (by default 2 (k - 1)) from half its spectrum, as numpy.fft.irfft.

    >>> irfft(rfft(jnp.arange(5.0)), n=5).round(4).tolist()
    [0.0, 1.0, 2.0, 3.0, 4.0]
    """
    x, rounded = _by_policy(_complex(a), how)
    axis = _axis(x, axis)
    length = 2 * (x.shape[axis] - 1) if n is None else _length(n)
    if length < 1:
        raise rule_error("A real signal has at least one number", f"n={length}", "give n=1 or more")
    x = _fitted(x, (length // 2 + 1,), (axis,))
    return _jitted(_irfft, x, n=length, axis=axis, norm=_norm(norm), how=_how(rounded))


def rfft2(
    a: Real[Array, " ..."], s: Sequence[int] | None = None, axes: Sequence[int] = (-2, -1),
    norm: str | None = None, precision: str = "float32",
) -> Complex[Array, " ..."]:  # fmt: skip
    """The transform of a real signal along two axes, half of the last one's points, as numpy.fft.rfft2."""
    x, how = _by_policy(_real(a), {"precision": precision})
    first, last = _two(x, axes)
    x = _fitted(x, s, (first, last))
    return fft(rfft(x, None, last, norm, **how), None, first, norm, **how)


def irfft2(
    a: Num[Array, " ..."], s: Sequence[int] | None = None, axes: Sequence[int] = (-2, -1),
    norm: str | None = None, precision: str = "float32",
) -> Float[Array, " ..."]:  # fmt: skip
    """The inverse of `rfft2`, as numpy.fft.irfft2; `s` are the lengths of the result."""
    x, how = _by_policy(_complex(a), {"precision": precision})
    first, last = _two(x, axes)
    rows, columns = (None, None) if s is None else _lengths(s, 2)
    return irfft(ifft(x, rows, first, norm, **how), columns, last, norm, **how)


def _jitted(fn: Any, x: jax.Array, **static: Any) -> Any:
    """`fn` as one program, so that taking a complex array apart and putting one together fuse into it."""
    if isinstance(x, jax.core.Tracer):
        return fn(x, **static)
    key = tuple(sorted(static.items()))
    if context.explicit_target() is not None:
        return _program(x, fn, key, tables.generation())
    # Inside a program dispatch sees the default device, and the array may be on another.
    with context.target(*context.target_of(next(iter(x.devices())))):
        return _program(x, fn, key, tables.generation())


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _program(x: jax.Array, fn: Any, static: Any, tables_read: int) -> Any:
    return fn(x, **dict(static))


def _over(a: Any, s: Any, axes: Sequence[int] | None, norm: str | None, how: How, *, inverse: bool) -> jax.Array:
    x, how = _by_policy(_complex(a), how)
    if axes is None:
        axes = range(x.ndim) if s is None else range(x.ndim - len(_sequence("s", s)), x.ndim)
    at = tuple(_axis(x, axis) for axis in _sequence("axes", axes))
    if len(set(at)) != len(at):
        raise rule_error("Each axis is transformed once", f"axes={tuple(axes)}", "name each axis once")
    x = _fitted(x, s, at)
    params = (*_how(how, ("radix_factors",)), ("inverse", inverse), ("norm", _norm(norm)))
    while at:  # an op takes a few axes at a time
        now, at = at[-MOST_AXES:], at[:-MOST_AXES]
        x = _jitted(_fft, x, axes=now, how=params)
    return x


def _fft(x: jax.Array, *, axes: tuple[int, ...], how: Any) -> jax.Array:
    last = tuple(range(-len(axes), 0))
    moved = jnp.moveaxis(x, axes, last)
    re, im = _run(FFT, (moved.real, moved.imag), dict(how) | {"axes": len(axes)})
    return jnp.moveaxis(lax.complex(re, im), last, axes)


def _rfft(x: jax.Array, *, axis: int, norm: str, how: Any) -> jax.Array:
    re, im = _run(RFFT, (jnp.moveaxis(x, axis, -1),), dict(how) | {"norm": norm})
    return jnp.moveaxis(lax.complex(re, im), -1, axis)


def _irfft(x: jax.Array, *, n: int, axis: int, norm: str, how: Any) -> jax.Array:
    moved = jnp.moveaxis(x, axis, -1)
    made = _run(IRFFT, (moved.real, moved.imag), dict(how) | {"norm": norm, "n": n})
    return jnp.moveaxis(made, -1, axis)


def _run(op: Any, arrays: tuple[Any, ...], given: dict[str, Any]) -> Any:
    chosen = {name: given.pop(name, None) for name in ("implementation", "config")}
    params = {name: value for name, value in given.items() if value != op.params[name]}
    return run(op, arrays, params, **chosen)


def _how(how: How, more: tuple[str, ...] = ()) -> tuple[tuple[str, Any], ...]:
    known = ("precision", "implementation", "config", *more)
    for name in how:
        if name not in known:
            raise unknown_name("keyword of a transform", name, (*known, "norm", "axis", "n"))
    if "radix_factors" in how:
        factors = how["radix_factors"]
        given = {name: value for name, value in how.items() if name != "radix_factors"}
        how = given if factors is None else {**given, "factors": whole_factors(factors)}
    try:
        hash(how.get("config"))
    except TypeError:
        raise rule_error(
            "config is of its implementation's own type", f"config={how['config']!r}", "leave it out, or pass that type"
        ) from None
    return tuple(how.items())


def _by_policy(x: jax.Array, how: How) -> tuple[jax.Array, How]:
    """The signal rounded as the precision says, and `how` with the precision of the products."""
    x, products = by_policy(how.get("precision", "float32"), x)
    return x, {**how, "precision": products}


def _norm(norm: str | None) -> str:
    if norm is None:
        return "backward"
    if norm not in NORMS:
        raise unknown_name("norm", norm, NORMS)
    return norm


def _axis(x: jax.Array, axis: Any) -> int:
    at = _index("axis", axis)
    if not -x.ndim <= at < x.ndim:
        raise rule_error("The axis is one of the array's", f"axis={axis} of {describe(x)}", "name another axis")
    return at % x.ndim


def _two(x: jax.Array, axes: Sequence[int]) -> tuple[int, int]:
    if len(_sequence("axes", axes)) != 2:
        raise rule_error("A transform in two dimensions has two axes", f"axes={tuple(axes)}", "name two, or use fftn")
    return _axis(x, axes[0]), _axis(x, axes[1])


def _index(name: str, given: Any) -> int:
    try:
        return operator.index(given)
    except TypeError:
        raise rule_error(f"{name} is a whole number", f"{name}={given!r}", "pass an int") from None


def _sequence(name: str, given: Any) -> tuple[Any, ...]:
    """As a tuple; that each is a whole number is checked where it is read."""
    try:
        return tuple(given)
    except TypeError:
        raise rule_error(
            f"{name} is a sequence of whole numbers", f"{name}={given!r}", "pass a tuple of ints"
        ) from None


def _length(n: Any) -> int:
    length = _index("n", n)
    if length < 1:
        raise rule_error("A transform has at least one point", f"n={n}", "give n=1 or more")
    return length


def _fitted(x: jax.Array, s: Sequence[int] | None, axes: tuple[int, ...]) -> jax.Array:
    """Cut, or padded with zeros at the end, to the lengths `s` of `axes`."""
    if s is None:
        return x
    for axis, wanted in zip(axes, _lengths(s, len(axes)), strict=True):
        own = x.shape[axis]
        if wanted < own:
            x = lax.slice_in_dim(x, 0, wanted, axis=axis)
        elif wanted > own:
            x = jnp.pad(x, [(0, wanted - own if i == axis else 0) for i in range(x.ndim)])
    return x


def _lengths(s: Any, axes: int) -> tuple[int, ...]:
    if len(_sequence("s", s)) != axes:
        raise rule_error("s has a length for each axis", f"s={tuple(s)} for {axes} axes", "give as many lengths")
    return tuple(map(_length, s))


def _complex(a: Any) -> jax.Array:
    x = _at_least_one_axis(as_array("fft", "a", a))
    if x.dtype in (jnp.dtype("complex128"), jnp.dtype("float64")):
        raise rule_error("fft computes in complex64", describe(x), "convert it, or use jnp.fft for double precision")
    return x if jnp.issubdtype(x.dtype, jnp.complexfloating) else x.astype(jnp.complex64)


def _real(a: Any) -> jax.Array:
    x = _at_least_one_axis(as_array("rfft", "a", a))
    if jnp.issubdtype(x.dtype, jnp.complexfloating) or x.dtype == jnp.dtype("float64"):
        raise rule_error("rfft takes real numbers, in float32", describe(x), "use fft for complex ones, or convert")
    return x.astype(jnp.float32)


def _at_least_one_axis(x: jax.Array) -> jax.Array:
    if x.ndim == 0:
        raise rule_error("A signal has an axis", describe(x), "pass an array of one axis or more")
    return x
