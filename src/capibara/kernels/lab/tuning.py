"""Choosing an implementation and its config by measurement.

Every candidate is held against the op's reference before it is timed, so that a fast wrong kernel never wins.
The search has two stages: all that are right are timed briefly, then the best few, with each implementation's
best and default among them, are timed carefully and interleaved. The winner goes into the user's table, or
one given by path.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from capibara.errors import CapibaraError, rule_error, runtime_errors
from capibara.kernels.core import context, tables
from capibara.kernels.core.op import Op, call_of, lookup
from capibara.kernels.core.spec import Call, Case, Config, describe, standard_normal
from capibara.kernels.lab import timing
from capibara.kernels.lab.check import check_output, expected
from capibara.kernels.lab.timing import Timing, format_seconds

# The reference is the specification, not a way to run: it is tuned only when it is asked for by name.
LEFT_OUT = ("reference",)
FINALISTS = 4
MOST_WORKERS = 8
QUICK_SAMPLES = 3
QUICK_SAMPLE_SECONDS = 0.005
QUICK_BUDGET_SECONDS = 0.5

# Compilers of kernels raise these, which derive from Exception alone. Whoever raised one has imported its
# module.
_COMPILER_ERRORS = (
    ("jax._src.pallas.mosaic.error_handling", "MosaicError"),
    ("jax._src.pallas.mosaic.lowering", "LoweringException"),
    ("jax._src.pallas.mosaic_gpu.lowering", "LoweringError"),
    ("jax._src.pallas.triton.lowering", "LoweringError"),
    ("jax.experimental.mosaic.gpu.fragmented_array", "UnsupportedTransferError"),
    ("jax.experimental.mosaic.gpu.fragmented_array", "TransferPlanDerivationError"),
    ("jaxlib.mlir.ir", "MLIRError"),
)


def failures() -> tuple[type[BaseException], ...]:
    """What a candidate that does not compile or run raises. Call it in the `except` clause itself."""
    found = [getattr(sys.modules.get(module), name, None) for module, name in _COMPILER_ERRORS]
    named = (
        jax.errors.JaxRuntimeError,
        NotImplementedError,
        ValueError,
        TypeError,
        AssertionError,
        LookupError,
    )
    return (*named, *(error for error in found if isinstance(error, type)))


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One implementation with one config, and what came of it."""

    implementation: str
    config: Config
    default: bool
    """Whether the config is the implementation's own default."""
    quick: Timing | None = None
    careful: Timing | None = None
    error: float | None = None
    rejected: str | None = None
    """Why it was not timed; None for a candidate that is right."""

    @property
    def name(self) -> str:
        return self.implementation if self.config is None else f"{self.implementation} {self.config}"

    @property
    def seconds(self) -> float | None:
        best = self.careful or self.quick
        return None if best is None else best.seconds

    def as_dict(self) -> dict[str, Any]:
        return {
            "implementation": self.implementation,
            "config": None if self.config is None else dataclasses.asdict(self.config),
            "default": self.default,
            "quick": None if self.quick is None else self.quick.as_dict(),
            "careful": None if self.careful is None else self.careful.as_dict(),
            "error": self.error,
            "rejected": self.rejected,
        }


@dataclasses.dataclass(frozen=True)
class TuneReport:
    """What tuning one call found. `best` is None when no candidate is right."""

    call: Call
    candidates: tuple[Candidate, ...]
    """Every candidate; the fastest first, then those that were rejected."""
    refused: Mapping[str, str]
    """Implementations that do not take the call, and why."""
    entry: tables.Entry | None
    path: Path | None

    @property
    def best(self) -> Candidate | None:
        first = self.candidates[0] if self.candidates else None
        return first if first is not None and first.rejected is None else None

    @property
    def rejected(self) -> tuple[Candidate, ...]:
        return tuple(c for c in self.candidates if c.rejected is not None)

    def fastest(self, implementation: str) -> Candidate | None:
        """The best candidate of one implementation."""
        right = (c for c in self.candidates if c.implementation == implementation and c.rejected is None)
        return next(right, None)

    def __str__(self) -> str:
        lines = [f"{self.call} on {self.call.target.device_kind}"]
        for c in self.candidates:
            if c.rejected is None:
                mark = "*" if c is self.best else " "
                careful = " (carefully)" if c.careful else ""
                lines.append(f" {mark} {format_seconds(c.seconds or 0.0):>9}  {c.name}{careful}")
        lines += [f"   rejected   {c.name}: {c.rejected}" for c in self.rejected]
        lines += [f"   refused    {name}: {why}" for name, why in self.refused.items()]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        return {
            "op": self.call.op.name,
            "call": self.call.signature,
            "device_kind": self.call.target.device_kind,
            "candidates": [c.as_dict() for c in self.candidates],
            "refused": dict(self.refused),
            "entry": None if self.entry is None else self.entry.as_dict(),
            "path": None if self.path is None else str(self.path),
        }


@dataclasses.dataclass(frozen=True)
class Progress:
    """A step of the search: `done` of `total` candidates, and what is happening."""

    done: int
    total: int
    text: str


def autotune(
    op: Op | str,
    *operands: Any,
    params: Mapping[str, Hashable] | None = None,
    implementations: Sequence[str] | None = None,
    max_configs: int | None = None,
    finalists: int = FINALISTS,
    workers: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    save: bool | str | Path = True,
    seed: int = 0,
) -> TuneReport:
    """Find the fastest right implementation and config of one call on the attached chip.

    Args:
      op: an op or its name.
      operands: one `Case` (or the name of one of the op's), or the operands: arrays, or
        `jax.ShapeDtypeStruct`s that are drawn at random; None for an absent one.
      params: the op's parameters, where operands are given; a case brings its own.
      implementations: which to try; by default all but the reference.
      max_configs: at most so many configs of each implementation, its default always among them; None tries
        all.
      finalists: how many go on to the careful timing, besides each implementation's best and default.
      workers: candidates compiled side by side; by default one a core, eight at most.
      on_progress: called at each step.
      save: True stores the winner in the user's table; a path stores it there: a .json file, or a folder of
        tables as this package ships them (<folder>/<chip>/<op>.json). False stores nothing.
    """
    op = lookup(op) if isinstance(op, str) else op
    op.must_run_alone("Tuning")
    if context.current_interpret().mode != "off":
        raise rule_error("Tuning measures kernels on their chip", "an emulated run", "leave the interpret() context")
    arrays, params = _arrays(op, operands, params, seed)
    call = call_of(op, arrays, params)
    if call.target.device_kind != context.target_of(_device_of(arrays)).device_kind:
        raise rule_error(
            "Tuning measures on the attached chip",
            f"a target of {call.target.device_kind}",
            "leave the target() context",
        )
    made, refused = _candidates(op, call, implementations, max_configs)
    told = on_progress or (lambda progress: None)
    total = len(made)

    wanted = expected(op, arrays, params)
    functions = [_function(op, params, candidate) for candidate in made]
    # All are compiled before any is timed: compilers side by side are quick, and they would disturb a timing.
    for index, failure in enumerate(_compile_all(functions, arrays, workers)):
        told(Progress(index, total, f"compiling {made[index].name}"))
        if failure is not None:
            made[index] = dataclasses.replace(made[index], rejected=f"it does not compile: {failure}")
    for index, candidate in enumerate(made):
        if candidate.rejected is None:
            told(Progress(index, total, f"checking and timing {candidate.name}"))
            made[index] = _try(candidate, functions[index], arrays, wanted)

    order = sorted((i for i in range(total) if made[i].rejected is None), key=lambda i: made[i].seconds or 0.0)
    chosen = _finalists(made, order, finalists)
    if chosen:
        told(Progress(total, total, f"timing the best {len(chosen)} side by side"))
        named = {str(i): functions[i] for i in chosen}
        for key, careful in timing.compare(named, *arrays).items():
            made[int(key)] = dataclasses.replace(made[int(key)], careful=careful)
    ranked = sorted(made, key=_rank)
    best = ranked[0] if ranked and ranked[0].rejected is None else None
    entry = None if best is None else _entry(call, best)
    path = None
    if entry is not None and save is not False:
        # Every implementation's best is kept, for callers that ask for it by name and for when the winner refuses.
        for made_by in {c.implementation: c for c in reversed(ranked) if c.careful is not None}.values():
            path = tables.store(call, _entry(call, made_by), None if save is True else _table(Path(save), call))
    return TuneReport(call, tuple(ranked), refused, entry, path)


def _arrays(
    op: Op, operands: Sequence[Any], params: Mapping[str, Hashable] | None, seed: int
) -> tuple[tuple[Any, ...], dict[str, Hashable]]:
    """Concrete operands and parameters from a case, its name, or operands."""
    if len(operands) == 1 and isinstance(operands[0], (Case, str)):
        case = op.case(operands[0]) if isinstance(operands[0], str) else operands[0]
        if params:
            raise rule_error("A case brings its own parameters", f"params={dict(params)}", "leave params out")
        return case.arrays(seed), dict(case.params)

    def concrete(index: int, x: Any) -> Any:
        if x is None or isinstance(x, jax.Array):
            return x
        if not isinstance(x, jax.ShapeDtypeStruct):
            return jnp.asarray(x)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise rule_error(
                "Only float operands can be drawn at random",
                describe(x),
                "pass an array with values that mean something",
            )
        return standard_normal(x.shape, x.dtype, (seed, index))

    drawn = tuple(concrete(index, x) for index, x in enumerate(operands))
    if not any(isinstance(x, jax.Array) for x in drawn):
        raise rule_error("Tuning needs a case or operands", "none", f"pass a case of {op.name}, or its operands")
    return drawn, dict(params or {})


def _device_of(arrays: Sequence[Any]) -> jax.Device:
    return next(next(iter(x.devices())) for x in arrays if x is not None)


def _candidates(
    op: Op, call: Call, implementations: Sequence[str] | None, max_configs: int | None
) -> tuple[list[Candidate], dict[str, str]]:
    names = [n for n in op.implementations if n not in LEFT_OUT] if implementations is None else implementations
    made: list[Candidate] = []
    refused: dict[str, str] = {}
    for name in names:
        impl = op.implementation(name)
        why = impl.refusal(call)
        if why is not None:
            refused[name] = why
            continue
        default = impl.default_config(call)
        configs = dict.fromkeys([default, *impl.candidates(call)]) if impl.config_type is not None else {None: None}
        made += [Candidate(name, config, config == default) for config in list(configs)[:max_configs]]
    return made, refused


def _function(op: Op, params: Mapping[str, Hashable], candidate: Candidate) -> Callable[..., Any]:
    name, config = candidate.implementation, candidate.config
    return jax.jit(lambda *arrays: op(*arrays, implementation=name, config=config, **params))


def _compile_all(
    functions: Sequence[Callable[..., Any]], arrays: Sequence[Any], workers: int | None
) -> Iterator[str | None]:
    """Compile every function, several at once; yields, in order, why one failed or None."""

    def attempt(fn: Any) -> str | None:
        try:
            fn.lower(*arrays).compile()  # jit keeps the result for its later calls
        except failures() as error:
            return first_line(error)
        return None

    pool = ThreadPoolExecutor(workers or min(os.cpu_count() or 1, MOST_WORKERS))
    try:
        yield from pool.map(attempt, functions)
    finally:
        pool.shutdown(cancel_futures=True)


def _try(candidate: Candidate, fn: Callable[..., Any], arrays: Sequence[Any], wanted: Any) -> Candidate:
    """Run, compare with the reference, and time briefly; a failure is a reason and not an exception."""
    try:
        out = jax.block_until_ready(fn(*arrays))
    except failures() as error:
        _expect_alive(candidate, error)
        return dataclasses.replace(candidate, rejected=f"it does not run: {first_line(error)}")
    verdict = check_output(out, wanted)
    if not verdict.ok:
        return dataclasses.replace(candidate, error=verdict.finite_error, rejected=f"wrong result: {verdict.why}")
    quick = timing.measure(
        fn,
        *arrays,
        samples=QUICK_SAMPLES,
        sample_seconds=QUICK_SAMPLE_SECONDS,
        budget_seconds=QUICK_BUDGET_SECONDS,
    )
    return dataclasses.replace(candidate, error=verdict.error, quick=quick)


def first_line(error: BaseException) -> str:
    """The error's type and the first line that says something; compilers put whole modules behind it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else "no text"
    return f"{type(error).__name__}: {text if len(text) <= 300 else text[:299] + '…'}"


def _expect_alive(candidate: Candidate, error: BaseException) -> None:
    """A kernel that wrote out of bounds can take the device's context with it; no later result counts."""
    try:
        jax.block_until_ready(jnp.zeros(8) + 1)
    except runtime_errors():
        raise CapibaraError(
            f"{candidate.name} left the device unusable ({first_line(error)}). Tune again in a new process, "
            f"without this implementation or with a smaller max_configs."
        ) from error


def _finalists(made: Sequence[Candidate], order: Sequence[int], count: int) -> list[int]:
    """The fastest few, and the best and the default of each implementation."""
    chosen = dict.fromkeys(order[:count])
    seen: set[str] = set()
    for index in order:
        candidate = made[index]
        if candidate.implementation not in seen or candidate.default:
            chosen[index] = None
        seen.add(candidate.implementation)
    return list(chosen)


def _rank(candidate: Candidate) -> tuple[int, float]:
    """Carefully timed ones first: a brief timing is too noisy to win by."""
    if candidate.rejected is not None or candidate.seconds is None:
        return 2, 0.0
    return (0 if candidate.careful else 1), candidate.seconds


def _entry(call: Call, best: Candidate) -> tables.Entry:
    careful = best.careful
    assert careful is not None  # the winner is always a finalist
    evidence = (
        f"{call.target.device_kind}, jax {jax.__version__}, {datetime.date.today().isoformat()}, "
        f"measured: median of {careful.samples} interleaved samples"
    )
    return tables.Entry(
        operands=tuple(map(describe, call.args)),
        params=call.tuning_key,
        implementation=best.implementation,
        config=None if best.config is None else dataclasses.asdict(best.config),
        seconds=careful.seconds,
        evidence=evidence,
        source="user's",
    )


def _table(path: Path, call: Call) -> Path:
    return path if path.suffix == ".json" else tables.table_path(path, call.target.device_kind, call.op.name)
