"""The three ops of the family on planes: the complex transform, and the real ones there and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op, register
from capibara.kernels.core.operands import as_array
from capibara.kernels.core.spec import Gradient, Implementation
from capibara.kernels.ops.fft import hopper, matmul, mesh, packed, rules, tpu, xla
from capibara.kernels.ops.fft.cases import CASES, IRFFT_CASES, RFFT_CASES
from capibara.kernels.ops.fft.hopper.forward import TILE
from capibara.kernels.ops.fft.hopper.long import LENGTHS_FASTER, faster
from capibara.kernels.ops.fft.reference import reference, reference_irfft, reference_rfft

FFT: Op = Op(
    "fft",
    family="fft",
    reference=reference,
    operands=("re", "im"),
    params=rules.PARAMS,
    untuned=("norm", "factors"),
    check=rules.check,
    cost=rules.cost,
    efficiency=rules.efficiency,
    tolerance=rules.tolerance,
    gradient=Gradient(mesh.forward, lambda _, *rest: mesh.backward(FFT, *rest)),
    batch=mesh.batch,
    partition=mesh.PARTITION,
    cases=CASES,
    remark=rules.remark,
)

RFFT: Op = Op(
    "rfft",
    family="fft",
    reference=reference_rfft,
    operands=("x",),
    params=rules.REAL_PARAMS,
    untuned=("norm",),
    check=rules.check_rfft,
    cost=rules.cost_rfft,
    efficiency=rules.efficiency_rfft,
    tolerance=rules.tolerance_rfft,
    gradient=Gradient(mesh.forward_rfft, lambda *args: mesh.backward_rfft(IRFFT, *args)),
    batch=mesh.batch,
    partition=mesh.PARTITION_RFFT,
    cases=RFFT_CASES,
)

IRFFT: Op = Op(
    "irfft",
    family="fft",
    reference=reference_irfft,
    operands=("re", "im"),
    params={"n": 0, **rules.REAL_PARAMS},
    untuned=("norm",),
    check=rules.check_irfft,
    cost=rules.cost_irfft,
    efficiency=rules.efficiency_irfft,
    tolerance=rules.tolerance_irfft,
    gradient=Gradient(mesh.forward, lambda _, *rest: mesh.backward_irfft(RFFT, *rest)),
    batch=mesh.batch,
    partition=mesh.PARTITION_IRFFT,
    cases=IRFFT_CASES,
)

_PACKED = packed.implementations(FFT)

FFT.implement(
    xla.IMPLEMENTATION,
    matmul.IMPLEMENTATION,
    tpu.IMPLEMENTATION,
    hopper.IMPLEMENTATION,
    hopper.LONG_IMPLEMENTATION,
    hopper.PAIRS_IMPLEMENTATION,
    Implementation("reference", reference),
)
RFFT.implement(xla.RFFT, _PACKED[0], Implementation("reference", reference_rfft))
IRFFT.implement(xla.IRFFT, _PACKED[1], Implementation("reference", reference_irfft))


def fft_planes(
    re: jax.Array,
    im: jax.Array,
    *,
    inverse: bool = False,
    norm: str = "backward",
    precision: str = "float32",
    radix_factors: Sequence[int] | None = None,
    implementation: str | None = None,
    config: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """The transform of the last axis of re + i·im, as two planes in and out.

    Kernels read and write planes; `fft` takes a complex array apart and puts one together, which costs a pass over
    memory each way unless the vendor's transform runs. What goes through several transforms can stay in planes.

    Args:
      re, im: float32 or bfloat16 [..., n], both alike; the result has their type. Of bfloat16 planes, products, factors
        and sums are what `precision` says, and the result is rounded, which adds a relative error of up to 2^-8 to
        each number and about 2^-9 to the whole.
      inverse, norm: the transform back, and the scale: "backward" (1/n on the way back), "ortho", "forward".
      precision: "float32"; "bfloat16" or "mixed": matrix products of bfloat16 numbers with float32 sums; or "fp8"
        (experimental): the signal is rounded to fp8 values first.
      radix_factors: the radices to prefer, see `plan`; implementations that choose their own refuse it.
      implementation, config: force one ("xla", "xla_matmul", "pallas_tpu", "hopper", "hopper_long",
        "hopper_pairs", "reference") and its choices.

    Forward-mode derivatives need implementation="reference".

    >>> re, im = fft_planes(jnp.ones(4), jnp.zeros(4))
    >>> re.tolist(), im.tolist()
    ([4.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0])
    """
    re, im = as_array("fft_planes", "re", re), as_array("fft_planes", "im", im)
    (re, im), precision = rules.by_policy(precision, (re, im))
    radices = None if radix_factors is None else rules.whole_factors(radix_factors)
    given = {"inverse": inverse, "norm": norm, "precision": precision, "factors": radices}
    params = {name: value for name, value in given.items() if value != FFT.params[name]}
    prefer = _kernel_on_planes(re) if precision == "bfloat16" else None
    return run(FFT, (re, im), params, implementation=implementation, config=config, prefer=prefer)


def _kernel_on_planes(plane: jax.Array) -> str | None:
    """Which Hopper kernel is to have the call if it takes it.

    Up to 4096 points one pass is enough: on an H200 a third of cuFFT's time where planes come in and go out.
    """
    if not plane.shape:
        return None
    if plane.shape[-1] <= TILE:
        return "hopper"
    kind = plane.dtype.name
    long = kind in LENGTHS_FASTER and faster(plane.shape, kind)
    return "hopper_long" if long else None


register(FFT)
register(RFFT)
register(IRFFT)
