"""Is an implementation right? Its output against the op's reference, evaluated in float64 on inputs upcast.

The error is the larger of two relative ones, ‖out − ref‖ / ‖ref‖ and the worst element's against the largest, and
it is held against the op's own tolerance for the call: the norm sees a small error everywhere, the worst element
a race that spoils a few numbers of a million. Where float64 on the host would take too long, the reference runs in
float32 at the highest matrix precision on the device instead, on an excerpt of the call where the op has one, and the
result says so.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara import hardware
from capibara.kernels.core.op import Op, call_of
from capibara.kernels.core.spec import Call, Config, describe, standard_normal, unit_roundoff

# The longest a float64 reference may take on the host, predicted from the op's cost and the host's measured
# rate. An accelerator idles, and costs, meanwhile.
HOST_SECONDS = {"cpu": 4.0, "gpu": 0.5, "tpu": 0.5}
# Outputs above this many elements are compared where they lie; bringing them to the host would take longer.
HOST_ELEMENTS = 1 << 22
# A gradient multiplies rounded cotangents by rounded intermediates, so it is given this many forward
# tolerances.
GRADIENT_TOLERANCES = 4.0


@dataclasses.dataclass(frozen=True)
class Check:
    """Whether an output is right, by how much, and in words."""

    ok: bool
    error: float
    tolerance: float
    why: str

    @property
    def finite_error(self) -> float | None:
        """The error for JSON, which has no infinity: None for an output beyond comparing."""
        return self.error if np.isfinite(self.error) else None


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a right output is: the reference's values, and the shapes and types of its own output."""

    values: tuple[Any, ...]
    structs: tuple[jax.ShapeDtypeStruct, ...]
    tolerance: float
    how: str
    cut: Callable[[Sequence[Any]], Sequence[Any]] = lambda leaves: leaves
    """What of a whole call's outputs `values` stands for."""


def check(
    op: Op,
    arrays: Sequence[Any],
    params: Mapping[str, Hashable],
    implementation: str | None,
    config: Config = None,
) -> Check:
    """Run one implementation (None: what dispatch picks) on `arrays` and compare it with the op's reference.

    >>> from capibara.kernels.core.op import lookup
    >>> gemm = lookup("gemm")
    >>> check(gemm, gemm.case("odd").arrays(), {}, "xla").ok
    True
    """
    wanted = expected(op, arrays, params)
    return check_output(op(*arrays, implementation=implementation, config=config, **params), wanted)


def with_gradient(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` with its gradient: (cotangents, *arrays) -> (output, gradients of the float operands).

    `cotangents` has one array for each float output. The output is returned too, so that no compiler drops
    the forward pass, which a gradient may not need.
    """

    def both(cotangents: Sequence[Any], *arrays: Any) -> tuple[Any, Any]:
        moving = [i for i, x in enumerate(arrays) if _is_float(x)]

        def of_floats(*floats: Any) -> Any:
            full = list(arrays)
            for i, x in zip(moving, floats, strict=True):
                full[i] = x
            return fn(*full)

        out, pull = jax.vjp(of_floats, *(arrays[i] for i in moving))
        leaves, tree = jax.tree.flatten(out)
        given = iter(cotangents)
        full = [next(given) if _is_float(x) else np.zeros(x.shape, jax.dtypes.float0) for x in leaves]
        return out, pull(jax.tree.unflatten(tree, full))

    return both


def cotangents(op: Op, arrays: Sequence[Any], params: Mapping[str, Hashable], seed: int = 1) -> list[jax.Array]:
    """Standard normal cotangents of the op's float outputs: what `with_gradient` takes first."""
    out = jax.tree.leaves(jax.eval_shape(functools.partial(op.reference, **_specified(op, params)), *arrays))
    floats = [x for x in out if _is_float(x)]
    return [standard_normal(x.shape, x.dtype, (seed, index)) for index, x in enumerate(floats)]


def expected(
    op: Op,
    arrays: Sequence[Any],
    params: Mapping[str, Hashable],
    *,
    grad: bool = False,
    host_seconds: float | None = None,
) -> Expected:
    """The reference's output for `arrays`; with `grad`, of `with_gradient` and its cotangents put first."""
    call = call_of(op, arrays, params)
    params = _specified(op, params)
    inputs: tuple[Any, ...] = tuple(arrays)
    tolerance = op.tolerance(call)
    if grad:
        inputs = (cotangents(op, arrays, params), *arrays)
        # A gradient is rounded to its operand's type, however wide the output is.
        rounding = max((unit_roundoff(x.dtype) for x in call.args if x is not None), default=0.0)
        tolerance = GRADIENT_TOLERANCES * max(tolerance, rounding)

    def reference(out_dtype: str | None) -> Callable[..., Any]:
        return _bound(op.reference, tuple(sorted(_with_output(params, out_dtype).items())), grad)

    structs = tuple(jax.tree.leaves(jax.eval_shape(reference(None), *inputs)))
    host = _host_device()
    allowed = HOST_SECONDS[call.target.platform] if host_seconds is None else host_seconds
    if host is not None and _host_seconds(op, call, grad) <= allowed:
        exact = _in_float64(reference("float64"), inputs, host)
        kept = tuple(_placed(x, struct, arrays) for x, struct in zip(exact, structs, strict=True))
        return Expected(kept, structs, tolerance, "float64 on the host")
    how = "float32 at highest precision on the device"
    part = op.excerpt(op, arrays) if op.excerpt is not None else None
    if part is None:
        return Expected(_in_float32(reference("float32"), inputs), structs, tolerance, how)
    outputs = len(jax.tree.leaves(jax.eval_shape(_bound(op.reference, tuple(sorted(params.items())), False), *arrays)))

    def cut(leaves: Sequence[Any]) -> list[Any]:
        return [*part.outputs(leaves[:outputs]), *part.gradients(leaves[outputs:])]

    inputs = (part.outputs(inputs[0]), *part.arrays) if grad else part.arrays
    values = _in_float32(reference("float32"), inputs)
    structs = tuple(jax.tree.leaves(jax.eval_shape(reference(None), *inputs)))
    return Expected(values, structs, tolerance, f"{how}, {part.what}", cut)


def check_output(out: Any, wanted: Expected) -> Check:
    """Compare any output, a peer's too, with what the reference gave."""
    leaves = wanted.cut(jax.tree.leaves(out))
    tolerance = wanted.tolerance

    def wrong(why: str) -> Check:
        return Check(False, float("inf"), tolerance, why)

    if len(leaves) != len(wanted.structs):
        return wrong(f"it returned {len(leaves)} arrays where the reference returns {len(wanted.structs)}")
    worst = 0.0
    for index, (x, struct, value) in enumerate(zip(leaves, wanted.structs, wanted.values, strict=True)):
        name = f"output {index}" if len(leaves) > 1 else "the output"
        if x.shape != struct.shape or x.dtype != struct.dtype:
            return wrong(f"{name} is {describe(x)} where the reference gives {describe(struct)}")
        error, misplaced = _error(x, value)
        if misplaced:
            return wrong(f"{misplaced} elements of {name} are NaN or infinite where the reference's are not, or differ")
        worst = max(worst, error)
    ok = worst <= tolerance
    sign = "≤" if ok else ">"
    return Check(ok, worst, tolerance, f"error {worst:.2e} {sign} tolerance {tolerance:.2e} (reference: {wanted.how})")


def _specified(op: Op, params: Mapping[str, Hashable]) -> dict[str, Hashable]:
    """The parameters that the reference takes: a case may have hints beside them."""
    return {name: value for name, value in params.items() if name not in op.hints}


@functools.lru_cache(maxsize=256)
def _bound(reference: Callable[..., Any], params: tuple[tuple[str, Hashable], ...], grad: bool) -> Callable[..., Any]:
    """One function object for each set of parameters, so that jit compiles a reference once for each shape."""
    bound = functools.partial(reference, **dict(params))
    return with_gradient(bound) if grad else bound


def _is_float(x: Any) -> bool:
    return x is not None and jnp.issubdtype(x.dtype, jnp.inexact)


def _with_output(params: Mapping[str, Hashable], out_dtype: str | None) -> dict[str, Hashable]:
    """The parameters for a wider reference: a narrow output type that was asked for would round it."""
    asked = params.get("out_dtype")
    if out_dtype is None or asked is None or not jnp.issubdtype(jnp.dtype(str(asked)), jnp.floating):
        return dict(params)
    return {**params, "out_dtype": out_dtype}


def _host_device() -> jax.Device | None:
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS names an accelerator alone
        return None


def _host_seconds(op: Op, call: Call, grad: bool) -> float:
    """Predicted time of the reference in float64 on the host."""
    work = op.cost(call).flops * (3 if grad else 1)
    # Tiny calls skip the question, so that checking one does not measure the host.
    return 0.0 if work < 1e8 else work / hardware.chip("cpu").peak_flops("float64")


def _in_float64(reference: Callable[..., Any], inputs: tuple[Any, ...], host: jax.Device) -> tuple[Any, ...]:
    """The reference's outputs as numpy arrays, from inputs upcast to float64 (complex128)."""

    def upcast(x: Any) -> Any:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.device_put(x, host)
        array = np.asarray(x)
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            return array.astype(np.complex128)
        return array.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else array

    with jax.enable_x64(True), jax.default_device(host):
        out = jax.jit(reference)(*jax.tree.map(upcast, inputs))
        return tuple(np.asarray(x) for x in jax.tree.leaves(out))


def _placed(value: Any, struct: jax.ShapeDtypeStruct, arrays: Sequence[Any]) -> Any:
    """A large value brought, once, to where the outputs will be, in float32: finer than what it judges."""
    if _compared_on_host(struct):
        return value
    device = next(next(iter(x.devices())) for x in arrays if isinstance(x, jax.Array))
    return jax.device_put(value.astype(_judging_type(struct.dtype)), device)


def _judging_type(dtype: Any) -> Any:
    """float32 or wider: in fp8, which JAX promotes to nothing, a sum of squares would overflow."""
    return jnp.float32 if jnp.dtype(dtype).itemsize < 4 else dtype


def _compared_on_host(x: Any) -> bool:
    """Small outputs, and those that float32 could not judge."""
    if x.size <= HOST_ELEMENTS or not jnp.issubdtype(x.dtype, jnp.inexact):
        return True
    return jnp.finfo(x.dtype).bits > 32


def _in_float32(reference: Callable[..., Any], inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    def upcast(x: Any) -> Any:
        narrow = jnp.issubdtype(x.dtype, jnp.floating) and jnp.dtype(x.dtype).itemsize < 4
        return x.astype(jnp.float32) if narrow else x

    # XLA would search for the fastest product longer than it takes to run any.
    options = {"xla_gpu_autotune_level": 0} if jax.default_backend() == "gpu" else None
    with jax.default_matmul_precision("highest"):
        # The upcast is inside, so that it costs no more memory than the compiler wants to give it.
        out = jax.jit(lambda *xs: reference(*jax.tree.map(upcast, xs)), compiler_options=options)(*inputs)
        return tuple(jax.block_until_ready(jax.tree.leaves(out)))


def _error(x: Any, value: Any) -> tuple[float, int]:
    """The error of one output, and how many elements are not finite where they should be."""
    if x.size == 0:
        return 0.0, 0
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        # Indices, counts and masks: the fraction that differs. A norm of their differences would mean
        # nothing.
        return float(np.mean(np.asarray(x) != np.asarray(value))), 0
    if _compared_on_host(x):
        complex_ = jnp.issubdtype(x.dtype, jnp.complexfloating)
        wide = np.asarray(x).astype(np.complex128 if complex_ else np.float64)
        difference, size, worst, misplaced = _norms(np, wide, np.asarray(value))
    else:
        wide = _judging_type(value.dtype)
        difference, size, worst, misplaced = _device_norms(x.astype(wide), value.astype(wide))
    error = float(difference) / float(size) if float(size) else float(difference) / x.size**0.5
    error = max(error, float(worst))
    return (error if np.isfinite(error) else float("inf")), int(misplaced)


def _norms(xp: Any, x: Any, ref: Any) -> tuple[Any, Any, Any, Any]:
    """‖x − ref‖, ‖ref‖ and max|x − ref| / max|ref| over the elements that are finite in both, and how many are not
    where they should be.

    Where the reference is infinite or NaN, the output must be the same infinity, or NaN.
    """
    finite = xp.isfinite(ref) & xp.isfinite(x)
    same = (x == ref) | (xp.isnan(x) & xp.isnan(ref))
    misplaced = xp.sum(~finite & ~same)
    kept_ref = xp.where(finite, ref, 0)
    # Scaled by the largest element, so that squares of large float32 numbers stay in range.
    largest = xp.max(xp.abs(kept_ref))
    unit = xp.where(largest == 0, 1.0, largest)
    difference = xp.where(finite, x, 0) - kept_ref
    scaled = difference / unit
    return _norm(xp, scaled), _norm(xp, kept_ref / unit), xp.max(xp.abs(scaled)), misplaced


def _norm(xp: Any, x: Any) -> Any:
    return xp.sqrt(xp.sum(xp.square(xp.abs(x))))


@jax.jit
def _device_norms(x: Any, ref: Any) -> tuple[Any, Any, Any, Any]:
    return _norms(jnp, x, ref)
