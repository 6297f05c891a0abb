"""What dispatch takes from its surroundings: the chip it is for, and whether kernels are emulated.

Both are JAX user contexts, so they are part of jit's cache key: a function traced for one chip is never
reused for another, nor an emulated trace for a real run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import jax

from capibara import hardware
from capibara.errors import rule_error, unknown_name

PLATFORMS = ("cpu", "gpu", "tpu")
Emulation = Literal["off", "hlo", "machine"]


class Target(NamedTuple):
    """The chip a call is dispatched for."""

    platform: str
    device_kind: str


@dataclasses.dataclass(frozen=True)
class Interpret:
    """How a TPU kernel runs off its chip.

    "machine" emulates the chip's memories on the CPU (Pallas TPU interpret mode): reads out of bounds raise,
    memory starts as NaN, and with `detect_races` unsynchronised accesses are recorded. "hlo" replays the
    kernel as plain XLA operations: it checks less, and it is the form that runs under a partitioned jit.
    """

    mode: Emulation = "machine"
    detect_races: bool = False

    def pallas_argument(self) -> Any:
        """What to pass as `pallas_call(interpret=...)`."""
        if self.mode == "off":
            return False
        if self.mode == "hlo":
            return True
        from jax.experimental.pallas import tpu as pltpu

        # JAX 0.12 would raise at the first race and then emulate no other kernel; before, it kept a record.
        record: dict[str, Any] = {"on_race": "warn"} if hasattr(pltpu.InterpretParams, "on_race") else {}
        return pltpu.InterpretParams(
            detect_races=self.detect_races, out_of_bounds_reads="raise", uninitialized_memory="nan", **record
        )

    def races_found(self) -> bool:
        """Whether the last kernel that was emulated had accesses that nothing orders. Waits for it to finish.

        JAX keeps the record of one kernel, the last, and prints each race as it finds it.
        """
        if not self.detect_races:
            raise rule_error(
                "Races are known where they were looked for", f"detect_races={self.detect_races}",
                "use interpret(detect_races=True)",
            )  # fmt: skip
        jax.effects_barrier()
        state = _recorded_races()
        if state is None or (_races_before is not None and state is _races_before()):
            raise rule_error(
                "races_found() speaks of a TPU kernel that was emulated inside of this interpret()",
                "none: another implementation ran",
                "ask for the kernel by implementation=, and read `explain` for why it was not taken",
            )
        return bool(state.races_found)


def _recorded_races() -> Any:
    """JAX's record of the kernel emulated last; it has no public name."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    return interpret_pallas_call.races


# The record that the latest interpret(detect_races=True) found: an older kernel's is not taken for a new one's.
_races_before: weakref.ref[Any] | None = None
_OFF = Interpret(mode="off")
_config: Any = jax.config  # its attributes are made at run time, which type checkers do not see
_target_context = jax.make_user_context(None)
_interpret_context = jax.make_user_context(_OFF)


@contextlib.contextmanager
def target(platform: str, device_kind: str | None = None) -> Iterator[Target]:
    """Dispatch as if for another chip, e.g. to lower for a TPU from a laptop.

    >>> with target("tpu", "TPU v4"):
    ...     current_target().platform
    'tpu'
    """
    if platform not in PLATFORMS:
        raise unknown_name("platform", platform, PLATFORMS)
    chosen = Target(platform, device_kind or {"tpu": "TPU v4", "gpu": "NVIDIA H200", "cpu": "cpu"}[platform])
    with _target_context(chosen):
        yield chosen


@contextlib.contextmanager
def interpret(mode: str = "machine", *, detect_races: bool = False) -> Iterator[Interpret]:
    """Let TPU kernels run on this machine by emulation: slow, and for tests only.

    A kernel of your own takes part when it passes `interpret=current_interpret().pallas_argument()` to `pallas_call`.

    Args:
      mode: "machine" emulates the chip's memories: they start as NaN and have hard bounds. "hlo" replays the kernel as
        plain XLA operations, which is quicker and also runs under a partitioned jit.
      detect_races: look for accesses that nothing orders; what this context manager gives has `.races_found()`.
    """
    if mode not in ("machine", "hlo"):
        raise unknown_name("interpret mode", mode, ("machine", "hlo"))
    if detect_races and mode != "machine":
        raise rule_error("Races are detected by the 'machine' emulation only", mode, "pass mode='machine'")
    setting = Interpret(mode=mode, detect_races=detect_races)  # type: ignore[arg-type]
    if detect_races:
        global _races_before
        earlier = _recorded_races()
        _races_before = None if earlier is None else weakref.ref(earlier)
    with _interpret_context(setting):
        yield setting


def current_interpret() -> Interpret:
    """How TPU kernels run here; `pallas_call` takes it as `interpret=current_interpret().pallas_argument()`.

    >>> with interpret("hlo"):
    ...     current_interpret().mode
    'hlo'
    """
    return _interpret_context.value


def current_target() -> Target:
    """An explicit `target`, else the active mesh's chip, else the default device."""
    chosen = _target_context.value
    if chosen is not None:
        return chosen
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None:
        kind = described.device_kind
        known = hardware.chip_for(kind)
        if known is not None:
            return Target(known.platform, kind)
    device = _config.jax_default_device
    if device is not None and not isinstance(device, str):
        return target_of(device)
    return target_of(jax.devices(device)[0] if device else jax.devices()[0])


def matmul_precision() -> str | None:
    """JAX's default precision of matrix products here, by its own name; None when nobody chose one."""
    return _config.jax_default_matmul_precision


def explicit_target() -> Target | None:
    return _target_context.value


@functools.lru_cache(maxsize=1024)
def target_of(device: jax.Device) -> Target:
    """The target of one attached device."""
    return Target({"cuda": "gpu", "rocm": "gpu"}.get(device.platform, device.platform), device.device_kind)
