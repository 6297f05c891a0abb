"""Lowering for a platform that need not be here: all that happens before the platform's compiler."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from capibara.compile.failures import classify, thrown_by_compilers, useful_lines
from capibara.compile.report import ErrorKind
from capibara.errors import unknown_name

__all__ = ["PLATFORMS", "LoweringResult", "custom_calls_in", "jitted", "lower_for"]

Platform = Literal["tpu", "cuda", "cpu"]
PLATFORMS: tuple[Platform, ...] = ("tpu", "cuda", "cpu")

# jax.export refuses custom calls whose format may change between releases. The module is looked at and
# dropped here, so that does not matter; a target that is missing from this list is added when jax names it.
_UNSTABLE_TARGETS = ("mosaic_gpu_v2", "__gpu$xla.gpu.triton", "__cudnn$fmhaSoftmax", "tpu_custom_call")
_TARGET = re.compile(r'custom_call\s+@(?:"([^"]+)"|([\w.$]+))')
_NAMED_IN_ERROR = re.compile(r'call_target_name\s*=\s*"([^"]+)"|custom_call\s+@(?:"([^"]+)"|([\w.$]+))')


@dataclasses.dataclass(frozen=True)
class LoweringResult:
    """What came of lowering.

    Attributes:
      stablehlo_bytes: size of the serialized module, with the kernels in it.
      custom_calls: targets the module calls: "tpu_custom_call" is a Pallas TPU kernel, "mosaic_gpu_v2" a
        Mosaic GPU one.
    """

    platform: str
    ok: bool
    seconds: float
    stablehlo_bytes: int | None = None
    custom_calls: tuple[str, ...] = ()
    error_kind: ErrorKind | None = None
    error: str | None = None


def lower_for(fn: Callable[..., Any], args: Sequence[Any], platform: Platform = "tpu") -> LoweringResult:
    """Lowers `fn(*args)` for `platform` on any machine.

    Args:
      fn: a function of arrays, static keywords already bound; a jitted one keeps its options.
      args: `jax.ShapeDtypeStruct`s, or trees of them.
    """
    if platform not in PLATFORMS:
        raise unknown_name("platform", platform, PLATFORMS)
    start = time.perf_counter()
    try:
        exported = _export(fn, args, platform)
    except thrown_by_compilers() as error:
        text = f"{type(error).__name__}: {error}"
        return LoweringResult(
            platform=platform,
            ok=False,
            seconds=time.perf_counter() - start,
            error_kind=classify(text, lowering=True),
            error=useful_lines(text),
        )
    return LoweringResult(
        platform=platform,
        ok=True,
        seconds=time.perf_counter() - start,
        stablehlo_bytes=len(exported.mlir_module_serialized),
        custom_calls=custom_calls_in(exported.mlir_module()),
    )


def jitted(fn: Callable[..., Any]) -> Any:
    """`fn` as something that can be lowered; what is jitted already keeps its donations and shardings."""
    import jax

    return fn if hasattr(fn, "lower") and hasattr(fn, "trace") else jax.jit(fn)


def _export(fn: Callable[..., Any], args: Sequence[Any], platform: str) -> Any:
    from jax import export

    def attempt(targets: Sequence[str]) -> Any:
        checks = [export.DisabledSafetyCheck.custom_call(target) for target in targets]
        return export.export(jitted(fn), platforms=[platform], disabled_checks=checks)(*args)

    try:
        return attempt(_UNSTABLE_TARGETS)
    except ValueError as error:
        if "no compatibility guarantees" not in str(error):
            raise
        named = {name for match in _NAMED_IN_ERROR.findall(str(error)) for name in match if name}
        if not named - set(_UNSTABLE_TARGETS):
            raise
        return attempt([*_UNSTABLE_TARGETS, *sorted(named)])


def custom_calls_in(module: str) -> tuple[str, ...]:
    """Targets that a StableHLO module in text calls, each once, in order."""
    return tuple(dict.fromkeys(quoted or plain for quoted, plain in _TARGET.findall(module)))
