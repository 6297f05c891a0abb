"""What a profile says is in the way: each finding with its numbers, and a change that removes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from capibara.errors import rule_error
from capibara.observe.profiler.result import OpRow, Profile, last_profile

__all__ = ["Bottleneck", "BottleneckReport", "analyze_performance_bottlenecks"]

# What counts as much: shares of the time that the rule speaks of. Below them a change would not be felt.
_MUCH = 0.3
_MOST = 0.5
# A function that is compiled as often as this for other shapes or values is compiled again and again.
_COMPILATIONS = 3
# Of a program that ran less often nobody can say that it runs in a loop.
_LOOP = 5
# Padding to whole tiles of 128 that does so much of a product's work for nothing.
_PADDED = 0.2
_TILE = 128
# Below this a product is too small for its padding or its type to matter, as a share of all products.
_SMALL = 0.1
# Bytes of one run of an operation from which on its time is the memory's and not that of starting it.
_WORTH = 1 << 20
_NARROW = ("bfloat16", "float16", "int8", "float8")


@dataclass(frozen=True)
class Bottleneck:
    """One thing that is in the way."""

    kind: str
    """ "memory", "launch", "communication", "input", "padding", "float32", "host_transfer" or "recompilation"."""
    description: str
    suggestion: str
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BottleneckReport:
    """What was found; `note` says why nothing could be, where that is so."""

    bottlenecks: tuple[Bottleneck, ...] = ()
    note: str = ""

    @property
    def has_bottlenecks(self) -> bool:
        """Whether anything was found."""
        return bool(self.bottlenecks)


def analyze_performance_bottlenecks(
    fn_or_profile: Profile | Callable[[], Any] | None = None,
) -> BottleneckReport:
    """What slows a program down.

    Args:
        fn_or_profile: A profile; or a function without arguments, which is run once to compile and then traced; or
            None, for the profile that this process finished last.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> x = jnp.ones((100, 100))
        >>> report = analyze_performance_bottlenecks(lambda: [jax.jit(lambda y, n=n: y * n)(x) for n in range(6)])
        >>> "recompilation" in [one.kind for one in report.bottlenecks]
        True
    """
    if fn_or_profile is None:
        found = last_profile()
        if found is None:
            return BottleneckReport(note="Nothing has been profiled in this process yet; pass a function or a profile.")
    elif isinstance(fn_or_profile, Profile):
        found = fn_or_profile
    elif callable(fn_or_profile):
        found = _profiled(fn_or_profile)
    else:
        raise rule_error(
            "Bottlenecks are those of a profile or of a function without arguments",
            type(fn_or_profile).__name__,
            "pass one of them, or nothing for the last profile",
        )
    if not found.programs:
        return BottleneckReport(note=f"No compiled program ran inside of {found.name!r}.")
    rules = [_recompilation, _float32, _padding]
    note = ""
    if found.mode == "tracing":
        rules += [_host_transfer, _input, _launch, _communication, _memory]
    else:
        note = "The profile has no times of operations: what only a trace can tell is not judged."
    said = [one for one in (rule(found) for rule in rules) if one is not None]
    # What would gain nothing on this device comes last, however much of the work it is of.
    order = sorted(said, key=lambda one: (not one.evidence.get("gains_here", True), -one.evidence.get("share", 0.0)))
    return BottleneckReport(tuple(order), note)


def _profiled(function: Callable[[], Any]) -> Profile:
    import jax

    from capibara.observe.profiler.session import profile

    jax.block_until_ready(function())  # compiling is not what the program does in the long run
    with profile(getattr(function, "__name__", "function"), "tracing") as recording:
        jax.block_until_ready(function())
    if recording.profile is None:
        raise rule_error("Profilers do not nest", "a call inside of another profiler", "leave that one first")
    return recording.profile


def _time(ops: list[OpRow]) -> float:
    return sum(op.steady_seconds for op in ops)


def _names(ops: list[OpRow]) -> list[str]:
    return list(dict.fromkeys(op.source or op.op for op in ops))[:5]


def _recompilation(found: Profile) -> Bottleneck | None:
    often = {name: count for name, count in found.compilations.items() if count >= _COMPILATIONS and _named(name)}
    if not often or found.compile_seconds < _MUCH * found.wall_seconds:
        return None
    name, count = max(often.items(), key=lambda pair: pair[1])
    share = found.compile_seconds / found.wall_seconds
    return Bottleneck(
        "recompilation",
        f"{name} was compiled {count} times; compiling took {share:.0%} of the time.",
        "Keep its shapes, types and static arguments the same from call to call: pad to a few lengths, pass numbers "
        "that change as arrays, and make the jitted function once, outside of the loop.",
        {"share": share, "compilations": dict(often), "compile_seconds": found.compile_seconds},
    )


def _named(name: str) -> bool:
    """Whether it is a function of the user's: jax compiles its single operations as functions of its own."""
    return "/jax/_src/" not in name.replace("\\", "/")


def _float32(found: Profile) -> Bottleneck | None:
    if found.peak_flops["bfloat16"] <= 0:
        return None
    products = [op for op in found.ops if op.products]
    whole = sum(op.matrix_flops for op in products)
    wide = [op for op in products if op.written_dtype not in _NARROW and op.dtype in ("float32", "float64")]
    share = sum(op.matrix_flops for op in wide) / whole if whole else 0.0
    if share < _MUCH or whole < _MUCH * sum(op.flops for op in found.ops):
        return None
    gains = found.peak_flops["bfloat16"] > found.peak_flops["float32"]
    return Bottleneck(
        "float32",
        f"{share:.0%} of the operations in matrix products have float32 operands: {', '.join(_names(wide))}.",
        ("" if gains else f"A {found.platform} multiplies bfloat16 no faster; for a TPU or a GPU: ")
        + "Compute products in bfloat16 and keep their sums in float32: x.astype(jnp.bfloat16) on both operands, with "
        "preferred_element_type=jnp.float32.",
        {"share": share, "flops": sum(op.matrix_flops for op in wide), "ops": _names(wide), "gains_here": gains},
    )


def _padding(found: Profile) -> Bottleneck | None:
    useful = padded = 0.0
    worst: Counter[tuple[int, ...]] = Counter()
    whole = sum(op.matrix_flops for op in found.ops)
    for op in found.ops:
        per_run = sum(2.0 * b * m * n * k for b, m, n, k in op.products)
        if not per_run or op.matrix_flops < _SMALL * whole:
            continue
        for b, m, n, k in op.products:
            # A side of one row or column is a vector, which other units multiply.
            if min(m, n, k) == 1:
                continue
            flops = 2.0 * b * m * n * k * op.matrix_flops / per_run
            tiles = _up(m) * _up(n) * _up(k) / (m * n * k)
            useful += flops
            padded += flops * tiles
            if tiles > 1 / (1 - _PADDED):
                worst[(b, m, n, k)] += int(flops * tiles)
    share = 1 - useful / padded if padded else 0.0
    if share < _PADDED or not worst:
        return None
    shapes = [f"{m}x{k} by {k}x{n}" for (_, m, n, k), _ in worst.most_common(3)]
    return Bottleneck(
        "padding",
        f"{share:.0%} of the matrix units' work is padding: {', '.join(shapes)} are no multiples of {_TILE}.",
        ("" if found.platform != "cpu" else "A cpu has no such tiles; for a TPU or a GPU: ")
        + f"Make the dimensions of products multiples of {_TILE}: pad a vocabulary, a head or a hidden size once, "
        f"where the weights are made; or batch small products into one.",
        {
            "share": share,
            "shapes": [list(shape) for shape, _ in worst.most_common(5)],
            "gains_here": found.platform != "cpu",
        },
    )


def _up(size: int) -> int:
    return -(-size // _TILE) * _TILE


def _host_transfer(found: Profile) -> Bottleneck | None:
    inside = [op for op in found.ops if op.kind == "host"]
    fetched, sent = found.host_seconds.get("fetch", 0.0), found.host_seconds.get("send", 0.0)
    handed = found.host_arguments
    calls = _looping(found)
    # In the loop: once a run of the program that runs most, or more.
    fetches = found.host_counts.get("fetch", 0)
    reasons = []
    if inside and sum(op.count for op in inside) >= _LOOP:
        reasons.append(f"{sum(op.count for op in inside):.0f} calls back to the host from inside of programs")
    if calls >= _LOOP and fetches >= calls:
        reasons.append(f"{fetches} fetches of a result, {fetched * 1e3:.3g} ms")
    if calls >= _LOOP and handed >= calls:
        reasons.append(f"{handed} calls that were handed an array of the host")
    if not reasons:
        return None
    return Bottleneck(
        "host_transfer",
        f"Arrays cross between the host and the device in the loop: {'; '.join(reasons)}.",
        "Keep arrays on the device from step to step: put batches there ahead of time (jax.device_put), fetch metrics "
        "every so many steps and not every step, and take callbacks and prints out of jitted functions.",
        {
            "share": min((fetched + sent + _time(inside)) / found.wall_seconds, 1.0),
            "fetches": fetches,
            "host_arguments": handed,
            "callbacks": sum(op.count for op in inside),
            "runs": calls,
        },
    )


def _looping(found: Profile) -> int:
    """Runs of the loop's program: of those that ran in one, the one that took the device longest.

    Single operations between its calls (`jnp.ones`, an index) are programs too, and may run more often.
    """
    runs: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for program in found.programs:
        runs[program.name] = max(runs.get(program.name, 0), program.runs)
    for op in found.ops:
        if runs.get(op.program, 0) >= _LOOP:
            seconds[op.program] = seconds.get(op.program, 0.0) + op.steady_seconds
    longest = max(seconds, key=lambda name: seconds[name], default=None)
    return max(runs.values()) if longest is None else runs[longest]


def _input(found: Profile) -> Bottleneck | None:
    waited = found.host_seconds.get("outside_while_idle", 0.0)
    span = found.wall_seconds - found.compile_seconds
    share = waited / span if span > 0 else 0.0
    times = found.host_counts.get("outside_while_idle", 0)
    # Again and again: once a step or every other, and not a pause of the machine's.
    if share < _MUCH or _looping(found) < _LOOP or times < _looping(found) / 2:
        return None
    return Bottleneck(
        "input",
        f"For {share:.0%} of the time the device had nothing to do and the host was outside of jax: it waits for data.",
        "Make batches ahead of time: load them in a thread or another process and keep two on the device, so that the "
        "next is there when a step ends.",
        {"share": share, "waited_seconds": waited, "waits": times, "busy_seconds": found.busy_seconds},
    )


def _launch(found: Profile) -> Bottleneck | None:
    if found.runs < _LOOP * 10 or found.dispatch_median_seconds is None:
        return None
    running = sum(op.steady_seconds for op in found.ops) / found.runs
    # A CPU runs small programs inside of the call that starts them.
    starting = max(found.dispatch_median_seconds - (running if found.platform == "cpu" else 0.0), 0.0)
    share = starting / (starting + running) if starting else 0.0
    if share < _MOST:
        return None
    return Bottleneck(
        "launch",
        f"{found.runs} programs were started, each of which took the host {starting * 1e6:.3g} us to start and the "
        f"device {running * 1e6:.3g} us to run.",
        "Do more in one program: put the loop's body into one jitted function, or the loop itself (jax.lax.scan).",
        {
            "share": share,
            "runs": found.runs,
            "starting_microseconds": 1e6 * starting,
            "running_microseconds": 1e6 * running,
        },
    )


def _communication(found: Profile) -> Bottleneck | None:
    exposed, busy = found.exposed_communication_seconds or 0.0, found.busy_seconds or 0.0
    share = exposed / busy if busy else 0.0
    if share < _MUCH:
        return None
    exchanges = [op for op in found.ops if op.kind == "collective"]
    return Bottleneck(
        "communication",
        f"{share:.0%} of the devices' time goes into exchanges beside which nothing runs: "
        f"{', '.join(_names(exchanges))}.",
        "Exchange less: give each device more work between two exchanges (gradient accumulation), shard another axis "
        "(`capibara plan` compares layouts), or send bfloat16 or int8.",
        {
            "share": share,
            "exposed_seconds": exposed,
            "communication_seconds": found.communication_seconds,
            "bytes": sum(op.bytes for op in exchanges),
            "ops": _names(exchanges),
        },
    )


def _memory(found: Profile) -> Bottleneck | None:
    timed = [op for op in found.ops if op.seconds and op.kind not in ("collective", "host")]
    whole = _time(timed)
    passes = [op for op in timed if op.bound == "memory" and op.bytes / op.count >= _WORTH]
    share = _time(passes) / whole if whole else 0.0
    if share < _MOST:
        return None
    moved = sum(op.bytes for op in passes)
    intensity = sum(op.flops for op in passes) / moved
    return Bottleneck(
        "memory",
        f"{share:.0%} of the operations' time is bound by memory: {intensity:.2g} operations a byte where the chip "
        f"does {found.peak_flops['bfloat16'] / found.memory_bandwidth:.3g}; {', '.join(_names(passes))}.",
        "Read and write less: let one jitted function do what several do one after the other (XLA then fuses them), "
        "keep arrays in bfloat16, and use fused ops such as capibara.kernels.attention in place of their parts.",
        {"share": share, "bytes": moved, "flops_a_byte": intensity, "ops": _names(passes)},
    )
