"""Matrix products by a fixed set of choices: how much is optimised, fused, laid out, and in what precision.

| optimization_level | a product runs as | compiled |
|---|---|---|
| "none" | gemm's reference: the specification, every step in float32 | operation by operation |
| "basic" | XLA's own product | as one program |
| "balanced" | what dispatch picks | as one program |
| "aggressive" | what dispatch picks after the shape was tuned, at its first sight | as one program |

Tuning times every implementation that takes the call, on the device, which takes seconds, and writes the answer
to the user's cache. It is said, the first time as a warning in the log and then at INFO: the op, the file, how
long it took and what it found. A shape that the cache has an answer for, from this chip and this release of jax,
is not tuned again. It happens outside of traces only: under jit, "aggressive" uses what was tuned before. Where
one implementation alone takes a call, as on a CPU, there is nothing to tune. No other level tunes or writes.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from capibara import precision as precisions
from capibara.errors import say_once, unknown_name
from capibara.kernels.core import context, tables
from capibara.kernels.core.explanation import explain
from capibara.kernels.core.operands import as_array
from capibara.kernels.core.spec import Call
from capibara.kernels.ops.linalg.einsum import contract_as, memory_limit
from capibara.kernels.ops.linalg.gemm.api import gemm
from capibara.kernels.ops.linalg.gemm.reference import epilogue
from capibara.kernels.ops.linalg.gemm.rules import LAX_PRECISIONS
from capibara.kernels.ops.linalg.pairwise import How
from capibara.kernels.ops.linalg.placement import on_their_device, target_for
from capibara.kernels.ops.linalg.rounding import rounded
from capibara.lru import LRU

logger = logging.getLogger("capibara.kernels")

LEVELS: dict[str, str | None] = {"none": "reference", "basic": "xla", "balanced": None, "aggressive": None}
"""Level -> the implementation it forces; None leaves it to dispatch."""
ALGORITHMS = ("tpu_optimized", "xla", "pallas", "reference")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The choices that hold for every product; refused by name when they do not exist."""

    precision: str = "bfloat16"
    """A policy: what operands are rounded to and the results' type."""
    optimization_level: str = "balanced"
    enable_xla_fusion: bool = True
    """True: rounding, product and epilogue are one program. False: a barrier on either side of a product."""
    memory_layout_optimization: bool = True
    """True: a transposed operand is read in place. False: it is copied into row-major order first."""

    def __post_init__(self) -> None:
        precisions.policy(self.precision)
        if self.optimization_level not in LEVELS:
            raise unknown_name("optimization_level", self.optimization_level, LEVELS)

    @property
    def compiled(self) -> bool:
        return self.optimization_level != "none" and self.enable_xla_fusion


@dataclasses.dataclass(frozen=True)
class _Product:
    """What of one product is not an array."""

    transpose_a: bool
    transpose_b: bool
    activation: str | None
    precision: str
    implementation: str | None
    fuse: bool
    in_place: bool


def matmul(
    settings: Settings,
    a: Any,
    b: Any,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    precision: str | None = None,
    algorithm: str = "tpu_optimized",
    bias: Any = None,
    residual: Any = None,
    activation: str | None = None,
) -> jax.Array:
    """`activation(a @ b + bias) + residual`; shapes are gemm's.

    `algorithm`: "tpu_optimized" is what the level says; "xla", "pallas" (this platform's Pallas kernel, an
    error where there is none) and "reference" are that implementation at any level.
    """
    named = {"a": a, "b": b, "bias": bias, "residual": residual}
    arrays = tuple(as_array("matmul", n, x, optional=n in ("bias", "residual")) for n, x in named.items())
    product = _Product(
        transpose_a=bool(transpose_a),
        transpose_b=bool(transpose_b),
        activation=activation,
        precision=_named_policy(precision or settings.precision),
        implementation=_implementation(settings, algorithm, arrays),
        fuse=settings.enable_xla_fusion,
        in_place=settings.memory_layout_optimization,
    )
    if settings.optimization_level == "aggressive" and algorithm == "tpu_optimized":
        tune_once(product, functools.partial(_product, product=product), arrays)
    if not settings.compiled:
        return _product(*arrays, product=product)
    with on_their_device(arrays):
        return _optimized_matmul(*arrays, product=product, tuned=tables.generation())


def einsum(
    settings: Settings,
    equation: str,
    operands: Sequence[Any],
    *,
    optimize: str | bool = "optimal",
    memory_efficient: bool = False,
    memory_limit_bytes: int | None = None,
    precision: str | None = None,
) -> jax.Array:
    """An einsum whose matrix products run by the settings; the keywords are `contract`'s."""
    how = How(
        precision=_named_policy(precision or settings.precision),
        implementation=LEVELS[settings.optimization_level],
        fuse=settings.enable_xla_fusion,
        transpose_in_place=settings.memory_layout_optimization,
    )
    limit = memory_limit(memory_efficient, memory_limit_bytes)
    arrays = tuple(as_array("einsum", f"operand {i}", x) for i, x in enumerate(operands))

    def run(*arrays: Any) -> jax.Array:
        return contract_as(equation, arrays, how, optimize, limit, compiled=settings.compiled)

    if settings.optimization_level == "aggressive":
        tune_once((equation, how, optimize, limit), run, arrays)
    return run(*arrays)


def _named_policy(name: str) -> str:
    """The name, when it is a policy or one of jax's; an error that lists the choices otherwise."""
    if name in LAX_PRECISIONS:
        return name
    return precisions.policy(name).name


def _implementation(settings: Settings, algorithm: str, arrays: Sequence[Any]) -> str | None:
    if algorithm not in ALGORITHMS:
        raise unknown_name("algorithm", algorithm, ALGORITHMS)
    if algorithm == "tpu_optimized":
        return LEVELS[settings.optimization_level]
    if algorithm == "pallas":
        return "hopper" if target_for(arrays).platform == "gpu" else "pallas_tpu"
    return algorithm


@functools.partial(jax.jit, static_argnames=("product", "tuned"))
def _optimized_matmul(a: Any, b: Any, bias: Any, residual: Any, *, product: _Product, tuned: int) -> jax.Array:
    # `tuned` is part of jit's key: a choice that was traced before a table changed is made again.
    return _product(a, b, bias, residual, product=product)


def _product(a: Any, b: Any, bias: Any, residual: Any, *, product: _Product) -> jax.Array:
    flip_a, flip_b = product.transpose_a, product.transpose_b
    if not product.in_place:
        a, flip_a = _copied(a, flip_a), flip_a and a.ndim < 2
        b, flip_b = _copied(b, flip_b), flip_b and b.ndim < 2
    a, b, precision, out = rounded(a, b, product.precision, None)
    run = functools.partial(
        gemm,
        transpose_a=flip_a,
        transpose_b=flip_b,
        precision=precision,
        implementation=product.implementation,
    )
    if product.fuse:
        return run(a, b, bias=bias, residual=residual, activation=product.activation, out_dtype=out)
    a, b = jax.lax.optimization_barrier((a, b))
    if bias is None and residual is None and product.activation is None:
        return jax.lax.optimization_barrier(run(a, b, out_dtype=out))
    # Of gemm's own type and form, were it one program: a mistake in the epilogue is found there.
    whole = functools.partial(run, activation=product.activation, out_dtype=out)
    like = jax.eval_shape(whole, a, b, bias=bias, residual=residual)
    z = jax.lax.optimization_barrier(run(a, b, out_dtype=jnp.promote_types(jnp.float32, like.dtype)))
    return epilogue(z, bias, residual, product.activation).astype(like.dtype)


def _copied(x: jax.Array, flip: bool) -> jax.Array:
    """The transpose as an array of its own; without the barrier XLA would fold it into the product again."""
    return jax.lax.optimization_barrier(x.mT) if flip and x.ndim >= 2 else x


_SEEN: LRU[Hashable, None] = LRU(4096)
_TUNED: LRU[Hashable, None] = LRU(4096)


def tune_once(what: Hashable, fn: Callable[..., Any], arrays: Sequence[Any]) -> None:
    """Tune each op that `fn(*arrays)` calls, at the first sight of these shapes; `what` stands for the rest.

    Nothing happens while something is traced, for a chip that is not attached or is emulated, as neither can
    be timed, nor for arrays on several devices, whose parts have other shapes.
    """
    arrays = tuple(as_array("a kernel", f"operand {i}", x, optional=True) for i, x in enumerate(arrays))
    present = [x for x in arrays if x is not None]
    if any(isinstance(x, jax.core.Tracer) or len(x.sharding.device_set) > 1 for x in present):
        return
    if context.explicit_target() is not None or context.current_interpret().mode != "off":
        return
    shapes = tuple(None if x is None else (x.shape, x.dtype) for x in arrays)
    if not _SEEN.add((what, shapes, target_for(present)), None):
        return
    with on_their_device(present):
        calls = [selection.call for selection in explain(fn, *arrays).selections]
    for call in calls:
        ways = _choices(call)
        key = (call.op.name, call.args, tuple(call.params.items()), call.target)
        if ways > 1 and not tables.has_own(call, f"jax {jax.__version__},") and _TUNED.add(key, None):
            _tune(call, ways, next(iter(present[0].devices())))


def _choices(call: Call) -> int:
    """How many ways there are to run it; with one, as on a CPU, there is nothing to time."""
    if any(0 in x.shape for x in call.args if x is not None):
        return 0
    taking = [i for i in call.op.implementations.values() if i.name != "reference" and i.refusal(call) is None]
    return sum(len(i.candidates(call)) for i in taking)


def _tune(call: Call, ways: int, device: jax.Device) -> None:
    # Here, because only this level tunes.
    from capibara.kernels.lab.tuning import autotune

    text = (
        "%s: optimization_level='aggressive' times the %d ways to run a shape on this %s when it first sees it, and "
        "keeps the answer in %s. optimization_level='balanced' does neither"
    )
    kind = call.target.device_kind
    values = call, ways, kind, tables.table_path(tables.cache_directory(), kind, call.op.name)
    loud = say_once(logger, None, f"{text}; later shapes are said at the log's level INFO", *values)
    if not loud:
        logger.info(text, *values)
    started = time.perf_counter()
    with jax.default_device(device):
        report = autotune(call.op, *map(_stand_in, call.args), params=call.changed_params)
    found = "no implementation gave the right result" if report.best is None else f"fastest is {report.best.name}"
    kept = "nothing was written" if report.path is None else f"written to {report.path}"
    logger.log(
        logging.WARNING if loud else logging.INFO,
        "%s: tuned in %.1f s: %s; %s.",
        call,
        time.perf_counter() - started,
        found,
        kept,
    )


def _stand_in(x: Any) -> Any:
    """Floats are drawn by the tuner. Ids and seeds are not: any will do; and masks hide nothing, since what they hide
    is not part of a shape."""
    if x is None or jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return jnp.ones(x.shape, x.dtype) if x.dtype == jnp.bool_ else jnp.zeros(x.shape, x.dtype)
