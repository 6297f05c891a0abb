"""What an optimisation level means to a platform's compiler: its options, tried once, and those it refuses left out.

XLA names its options differently from one release to the next, and one that a jaxlib does not know stops the
compilation ("No such compile option"). So every option here is tried on an empty program, once a process and device
kind; of several spellings of one wish the first that is accepted is taken; and where none is, it is said once and the
program is compiled without. No option changes what a program computes beyond the order of its sums: fast math is none
of them.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, get_args

from capibara.errors import rule_error, say_once, unknown_name

if TYPE_CHECKING:
    import jax

__all__ = ["ASYNC_COLLECTIVES", "LEVELS", "MEMORY", "PLATFORMS", "Level", "Wish", "check_level", "compiler_options"]

_log = logging.getLogger(__name__)

Level = Literal["none", "basic", "balanced", "aggressive"]
PLATFORMS = ("cpu", "gpu", "tpu")


class Wish(NamedTuple):
    """Something to ask of a compiler: its spellings, the newest first, and what it does."""

    spellings: tuple[tuple[str, Any], ...]
    does: str

    @property
    def name(self) -> str:
        return self.spellings[0][0]


def _wish(does: str, **option: Any) -> Wish:
    return Wish(tuple(option.items()), does)


def _effort(level: str, effort: float, does: str) -> Wish:
    """jaxlib 0.12 has levels, and 0.10.2 a number from -1 to 1 in their place."""
    return Wish((("optimization_level", level), ("exec_time_optimization_effort", effort)), does)


LEVELS: dict[str, dict[Level, tuple[Wish, ...]]] = {
    "cpu": {
        "none": (
            _wish("machine code as LLVM's -O0 makes it", xla_backend_optimization_level=0),
            _wish("LLVM leaves its slow passes out", xla_llvm_disable_expensive_passes=True),
        ),
        "basic": (_wish("machine code as LLVM's -O1 makes it", xla_backend_optimization_level=1),),
        "balanced": (),
        "aggressive": (
            _wish("loops in vectors of 512 bits, where the processor has them", xla_cpu_prefer_vector_width=512),
        ),
    },
    "gpu": {
        "none": (
            _wish("no kernel is timed against another", xla_gpu_autotune_level=0),
            _wish("LLVM leaves its slow passes out", xla_llvm_disable_expensive_passes=True),
        ),
        "basic": (_wish("kernels are timed once, on memory as it lies", xla_gpu_autotune_level=1),),
        "balanced": (),
        "aggressive": (
            _effort("O3", 1.0, "all passes that take long: loops are pipelined, collectives hidden behind work"),
            _wish("every tiling of a Triton product is tried", xla_gpu_exhaustive_tiling_search=True),
        ),
    },
    "tpu": {
        "none": (
            _effort("O0", -1.0, "least effort: about a quarter of the time to compile a large step"),
            _wish("products do not take in the operations before them", xla_jf_conv_input_fusion=False),
        ),
        "basic": (_effort("O1", -0.5, "little effort: operands are not brought into VMEM ahead of their use"),),
        "balanced": (),
        "aggressive": (
            _effort("O3", 1.0, "most effort"),
            _wish("fusions by the newer model of their cost", xla_tpu_enable_experimental_fusion_cost_model=True),
        ),
    },
}
"""Platform -> level -> what is asked of its compiler. "balanced" is what the compiler does by itself."""

ASYNC_COLLECTIVES: dict[str, tuple[Wish, ...]] = {
    "cpu": (),
    "gpu": (
        _wish(
            "work is scheduled between a collective's start and its end", xla_gpu_enable_latency_hiding_scheduler=True
        ),
        _wish("collectives have a stream that goes before others", xla_gpu_enable_highest_priority_async_stream=True),
    ),
    "tpu": (
        _wish("all-gathers start and end apart", xla_enable_async_all_gather="true"),
        _wish("permutes start and end apart", xla_enable_async_collective_permute="true"),
    ),
}
"""What lets work go on while a collective runs. A CPU's run where they stand."""

MEMORY: dict[str, tuple[Wish, ...]] = {
    "cpu": (
        _wish(
            "operations in the order that needs least memory",
            xla_cpu_scheduler_type=("CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"),
        ),
    ),
    "gpu": (
        Wish(
            (("memory_fitting_level", "O3"), ("memory_fitting_effort", 1.0)),
            "all that makes a program fit is tried, however long it takes",
        ),
    ),
    "tpu": (
        Wish(
            (("memory_fitting_level", "O3"), ("memory_fitting_effort", 1.0)),
            "all that makes a program fit is tried, however long it takes",
        ),
    ),
}
"""What a compiler does for memory, beside what the function's own backward pass does not keep (`jit.py`)."""


def check_level(level: str) -> Level:
    if level not in get_args(Level):
        raise unknown_name("optimization level", level, get_args(Level))
    return cast(Level, level)


def compiler_options(
    level: Level = "balanced",
    *,
    async_collectives: bool = False,
    memory: bool = False,
    device: jax.Device | None = None,
) -> dict[str, Any]:
    """The options that this level means for a device's compiler: those it accepts.

    >>> sorted(compiler_options("basic"))  # on a CPU
    ['xla_backend_optimization_level']

    Args:
      async_collectives: also what lets work go on while a collective runs.
      memory: also what makes programs smaller.
      device: the machine's first by default; one of a slice that is not attached is asked by way of libtpu.
    """
    import jax

    level = check_level(level)
    device = jax.devices()[0] if device is None else device
    platform = _platform(device)
    wishes = list(LEVELS[platform][level])
    if async_collectives:
        if not ASYNC_COLLECTIVES[platform]:
            say_once(
                _log,
                platform,
                "enable_async_collective changes nothing on a %s: its collectives run where they stand in the program",
                platform.upper(),
            )
        wishes += ASYNC_COLLECTIVES[platform]
    if memory:
        wishes += MEMORY[platform]
    return dict(spelling for wish in wishes if (spelling := _accepted(wish, device)) is not None)


def _platform(device: jax.Device) -> str:
    platform = {"cuda": "gpu", "rocm": "gpu"}.get(device.platform, device.platform)
    if platform not in PLATFORMS:
        raise rule_error(f"Levels are known for {', '.join(PLATFORMS)}", platform, "use jax.jit, or a device of these")
    return platform


def _accepted(wish: Wish, device: jax.Device) -> tuple[str, Any] | None:
    refusals = []
    for name, value in wish.spellings:
        refusal = _refusal(name, value, device.platform, device.device_kind, _Asked(device))
        if refusal is None:
            return name, value
        refusals.append(f"{name}: {refusal}")
    import jaxlib.version

    say_once(
        _log,
        (wish.name, device.platform),
        "This compiler (jaxlib %s, %s) has no option by which %s, and compiles without: %s",
        jaxlib.version.__version__,
        device.platform,
        wish.does,
        "; ".join(refusals),
    )
    return None


class _Asked:
    """A device that is no part of a cache's key: its kind, beside it, is."""

    def __init__(self, device: jax.Device) -> None:
        self.device = device

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Asked)

    def __hash__(self) -> int:
        return 0


@functools.lru_cache(maxsize=256)
def _refusal(name: str, value: Any, platform: str, kind: str, asked: _Asked) -> str | None:
    """Why this compiler does not take an option; None where it does."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    del platform, kind  # of the key alone
    empty = jax.jit(lambda: jnp.zeros((), jnp.int32), out_shardings=SingleDeviceSharding(asked.device)).lower()
    try:
        empty.compile(compiler_options={name: value})
    # TypeError and ValueError: another release takes another type of value.
    except (jax.errors.JaxRuntimeError, TypeError, ValueError) as error:
        return str(error).splitlines()[0]
    return None
