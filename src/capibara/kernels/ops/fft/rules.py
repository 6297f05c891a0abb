"""What the transforms' ops take, what they cost, and how exact they are."""

from __future__ import annotations

import math
import operator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from capibara.errors import rule_error, unknown_name
from capibara.hardware.facts import Chip
from capibara.kernels.core.spec import Call, CallEfficiency, Cost, describe, unit_roundoff
from capibara.kernels.ops.fft.plan import plan
from capibara.precision import policy, round_fp8

NORMS = ("backward", "ortho", "forward")
PRECISIONS = ("float32", "bfloat16")
MOST_AXES = 3
PARAMS = {"inverse": False, "norm": "backward", "precision": "float32", "axes": 1, "factors": None}
REAL_PARAMS = {"norm": "backward", "precision": "float32"}


def scale_of(lengths: tuple[int, ...], norm: str, inverse: bool) -> float:
    """What numpy multiplies a transform by: 1, 1/n or 1/sqrt(n)."""
    n = math.prod(lengths)
    if norm == "ortho":
        return 1 / math.sqrt(n)
    return 1 / n if (norm == "backward") == inverse else 1.0


def transposed_norm(norm: str) -> str:
    """The norm that gives the transform back the same scale as `norm` gives this one."""
    return {"backward": "forward", "forward": "backward", "ortho": "ortho"}[norm]


def whole_factors(factors: Any) -> tuple[int, ...]:
    """Radices as a tuple of ints."""
    try:
        return tuple(operator.index(factor) for factor in factors)
    except TypeError:
        raise rule_error(
            "radix_factors is a sequence of whole numbers",
            f"radix_factors={factors!r}",
            "pass a tuple of ints, or leave it out",
        ) from None


def by_policy(precision: Any, x: Any) -> tuple[Any, str]:
    """(the signal, how the products are made: one of PRECISIONS) by a precision policy.

    Results are complex64 whatever the policy, so that "mixed" is what "bfloat16" is: products of bfloat16 numbers with
    float32 sums. "fp8" rounds the signal, an array or a pair of planes, to fp8 values first, with one scale for all.
    """
    chosen = policy(precision)
    if chosen.rounds_to_fp8:
        if isinstance(x, tuple):
            # Planes that are not alike are for the op's check to name.
            x = tuple(round_fp8(jnp.stack(x))) if x[0].shape == x[1].shape and x[0].dtype == x[1].dtype else x
        elif jnp.issubdtype(x.dtype, jnp.complexfloating):
            x = lax.complex(*round_fp8(jnp.stack([x.real, x.imag])))
        else:
            x = round_fp8(x)
    return x, chosen.compute_dtype


KNOWN = {"norm": NORMS, "precision": PRECISIONS}


def check_names(call: Call, *names: str) -> None:
    """Those of the parameters that are one of a few names."""
    for name in names or KNOWN:
        value = call.params[name]
        if value not in KNOWN[name]:
            raise unknown_name(name, value, KNOWN[name])


PLANES = ("float32", "bfloat16")  # types of the complex transform's planes


def _check_planes(call: Call, kinds: tuple[str, ...]) -> None:
    re, im = call["re"], call["im"]
    alike = re is not None and im is not None and re.shape == im.shape and re.dtype == im.dtype
    if re is None or not alike or np.dtype(re.dtype).name not in kinds:
        raise rule_error(
            f"A complex signal is two planes of one shape and one type, {' or '.join(kinds)}",
            f"re={describe(re)}, im={describe(im)}",
            "pass x.real and x.imag of a complex64 array, or call capibara.kernels.ops.fft.fft(x)",
        )


def check(call: Call) -> None:
    _check_planes(call, PLANES)
    check_names(call)
    axes, factors = call.params["axes"], call.params["factors"]
    if not isinstance(call.params["inverse"], bool | np.bool_):
        raise rule_error("inverse is True or False", f"inverse={call.params['inverse']!r}", "pass one of them")
    shape = call.need("re").shape
    if not isinstance(axes, int) or not 1 <= axes <= MOST_AXES:
        raise rule_error(f"A call transforms the last 1 to {MOST_AXES} axes", f"axes={axes}", "do the others in turn")
    if len(shape) < axes or 0 in shape[-axes:]:
        raise rule_error("A transformed axis has one point or more", f"shape {shape}, axes={axes}", "check the shape")
    if factors is not None:
        if axes > 1 or not isinstance(factors, tuple):
            raise rule_error(
                "radix_factors is a tuple of radices for one axis",
                f"{factors!r}, axes={axes}",
                "leave radix_factors out",
            )
        plan(shape[-1], factors)


def remark(call: Call) -> str | None:
    """How the radices differ from those asked for."""
    factors = call.params["factors"]
    return None if factors is None else plan(call.need("re").shape[-1], whole_factors(factors)).remark


def check_rfft(call: Call) -> None:
    x = call.need("x")
    check_names(call)
    if x.dtype != jnp.dtype("float32") or not x.shape or x.shape[-1] == 0:
        raise rule_error("rfft takes float32 [..., n] with n of 1 or more", describe(x), "convert, or check the shape")


def check_irfft(call: Call) -> None:
    _check_planes(call, PLANES[:1])
    check_names(call)
    n, points = call.params["n"], call.need("re").shape[-1:]
    if not isinstance(n, int) or n < 1 or points != (n // 2 + 1,):
        raise rule_error("irfft makes n numbers of n // 2 + 1 points", f"n={n}, {points} points", "cut or pad them")


def transform_cost(flops: float, moved: float, precision: Any) -> Cost:
    """In bfloat16 transforms are products on the matrix units, in float32 butterflies; either is counted as these."""
    if precision == "bfloat16":
        return Cost(matrix_flops=flops, bytes=moved)
    return Cost(vector_flops=flops, bytes=moved, dtype="float32")


def _cost(batch: int, lengths: tuple[int, ...], moved: float, precision: Any) -> Cost:
    """The customary 5 n log2 n operations, and each number moved once."""
    n = math.prod(lengths)
    return transform_cost(5.0 * max(batch, 1) * n * max(math.log2(n), 1), moved, precision)


def cost(call: Call) -> Cost:
    shape, axes = call.need("re").shape, call.params["axes"]
    assert isinstance(axes, int)
    moved = 4.0 * call.need("re").dtype.itemsize * math.prod(shape)
    return _cost(math.prod(shape[:-axes]), shape[-axes:], moved, call.params["precision"])


def cost_rfft(call: Call) -> Cost:
    shape = call.need("x").shape
    batch, n = math.prod(shape[:-1]), shape[-1]
    return _cost(batch, (n,), batch * (4.0 * n + 8 * (n // 2 + 1)), call.params["precision"])


def cost_irfft(call: Call) -> Cost:
    n = call.params["n"]
    assert isinstance(n, int)
    batch = math.prod(call.need("re").shape[:-1])
    return _cost(batch, (n,), batch * (4.0 * n + 8 * (n // 2 + 1)), call.params["precision"])


def by_products(lengths: tuple[int, ...]) -> CallEfficiency:
    """Of the products that make a transform: each radix is so many operations a number, eight times, where butterflies
    have the customary five for each of its levels."""
    plans = [plan(length) for length in lengths]
    done = sum(8 * sum(one.factors) * (1 if one.padded is None else 2 * one.padded / one.length) for one in plans)
    counted = 5 * max(math.log2(math.prod(lengths)), 1)
    return CallEfficiency(filled=min(1.0, counted / done), source="predicted: the radices of its matrix products")


def efficiency(call: Call, chip: Chip) -> CallEfficiency:
    axes = call.params["axes"]
    assert isinstance(axes, int)
    return by_products(call.need("re").shape[-axes:])


def efficiency_rfft(call: Call, chip: Chip) -> CallEfficiency:
    return by_products(call.need("x").shape[-1:])


def efficiency_irfft(call: Call, chip: Chip) -> CallEfficiency:
    n = call.params["n"]
    assert isinstance(n, int)
    return by_products((n,))


def tolerance_of(lengths: tuple[int, ...], precision: Any, factors: tuple[int, ...] | None = None) -> float:
    """The relative error that a right result stays under.

    In bfloat16 each product rounds the data and the matrix, each by up to 2^-8 and 0.4 of that in the root mean square:
    independent errors, so less than 2^-8 times the root of the number of products, and twice that for the worst of many
    points. In float32 a product's sum over a
    radix loses the root of its length, and the factors a few roundings more. A length with a large prime goes by a
    longer transform there and back, whose errors on up to twice as many points fall on its own.
    """
    plans = [plan(n, factors) for n in lengths]
    products = sum(p.products for p in plans)
    longer = 2.0 if any(p.padded for p in plans) else 1.0
    if precision == "bfloat16":
        return 2 * longer * 2**-8 * math.sqrt(products)
    return longer * unit_roundoff("float32") * (16 + 4 * math.sqrt(sum(sum(p.factors) for p in plans)))


def tolerance(call: Call) -> float:
    """That of the transform; what is rounded to bfloat16 at its end adds as much as one rounding does."""
    axes = call.params["axes"]
    assert isinstance(axes, int)
    plane = call.need("re")
    rounding = unit_roundoff(plane.dtype) if plane.dtype == jnp.bfloat16 else 0.0
    factors = call.params["factors"]
    radices = None if factors is None else whole_factors(factors)
    return tolerance_of(plane.shape[-axes:], call.params["precision"], radices) + rounding


def tolerance_rfft(call: Call) -> float:
    """As the complex transform's, twice: two halves are told apart by sums and differences."""
    return 2 * tolerance_of(call.need("x").shape[-1:], call.params["precision"])


def tolerance_irfft(call: Call) -> float:
    n = call.params["n"]
    assert isinstance(n, int)
    return 2 * tolerance_of((n,), call.params["precision"])
