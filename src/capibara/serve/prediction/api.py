"""`predict_serving`: from a model and the name of a slice to what serving it takes."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from capibara.errors import rule_error, unknown_name
from capibara.hardware.facts import GiB
from capibara.hardware.topology import Slice
from capibara.parallel.trainer_step import compute_dtype
from capibara.plan.api import JAX_TAKES
from capibara.plan.place import place
from capibara.prices.table import PriceTable, price_table
from capibara.serve.cache_size import CacheSize, cache_size, working_bytes
from capibara.serve.config import EngineConfig
from capibara.serve.load.trace import Lengths
from capibara.serve.prediction.placement import EnginePlacement
from capibara.serve.prediction.result import ServingMemory, ServingPlan, TrafficRow, traffic_row
from capibara.serve.prediction.served import ServedModel, served_model
from capibara.serve.prediction.simulation import Outcome, SimulatedEngine, Traffic, steady
from capibara.serve.prediction.step_times import StepTimes, Tokens
from capibara.serve.shapes import StepShapes

if TYPE_CHECKING:
    from capibara.serve.sampling import Form

__all__ = ["USERS", "predict_serving"]

USERS = (1, 8, 32, 64, 128, 256, 512, 1024)
"""Of one engine, in a plan's table."""
FORMS: tuple[Form, ...] = ("greedy", "drawn", "filtered")
"""Ways to draw that need nothing but the logits."""
_KINDS = ("on_demand", "spot")
_FEW_WAIT = 0.05
"""Of the users, where all are said to have a place."""
_NEAR = 16
"""The most users are found to within a part of so many."""
_MOST_USERS = 1 << 17


def predict_serving(
    target: str | Path | ServedModel,
    on: str | Slice = "v4-32",
    *,
    config: EngineConfig | None = None,
    traffic: Traffic | None = None,
    target_latency_ms: float | None = None,
    target_first_ms: float | None = None,
    tensor_parallel: int | None = None,
    form: Form = "drawn",
    users: Sequence[int] = USERS,
    memory_limit_gb: float | None = None,
    region: str | None = None,
    pricing: PriceTable | str | Path | None = None,
    tell: Callable[[str], None] | None = None,
) -> ServingPlan:
    """How many users a slice holds at a latency, tokens a second and dollars for a million; nothing is run.

    Args:
      target: a preset, a training run's folder, or a Hugging Face config.json or folder; its weights are not read.
      on: a TPU slice or GPUs, by name.
      config: of each engine; `mesh`, drafts, adapters and `keep_keys=False` are not predicted.
      traffic: what users ask for; 512 tokens in and 128 out, and again at once, when None.
      target_latency_ms: of the 95th percentile between two tokens of an answer.
      target_first_ms: of the 95th percentile from a request to its first token. When None, of twenty users no more
        than one waits for a place.
      tensor_parallel: chips of one engine, of which the slice has as many as fit. When None the fewest that hold the
        model and keep the latency for one user.
      form: how tokens are drawn: "greedy", "drawn" (by temperature) or "filtered" (top_k, top_p, min_p too).
      users: of one engine, for the table; those above `max_sequences` are left out.
      memory_limit_gb: GiB of a chip to plan with; what jax's programs have of it by default.
      region: whose prices are taken; the chip's first one by default.
      pricing: a table, or a TOML file laid over the shipped one.
      tell: called with a line of text now and then, for a progress bar.

    >>> from capibara.serve.config import EngineConfig
    >>> from capibara.serve.load.trace import Lengths
    >>> from capibara.serve.prediction.simulation import Traffic
    >>> plan = predict_serving("dev", "h200", traffic=Traffic([Lengths(64, 16)]), users=(1,),
    ...     config=EngineConfig(max_sequences=1, max_batch_tokens=64), target_latency_ms=50)
    >>> plan.fits, plan.held.users
    (True, 1)
    """
    started = time.perf_counter()
    where = place(on)
    served = target if isinstance(target, ServedModel) else served_model(target)
    config = config or EngineConfig()
    traffic = traffic or Traffic([Lengths(512, 128)])
    _check_config(config)
    _check_targets(target_latency_ms, target_first_ms)
    if any(count < 1 for count in users):
        raise rule_error("Each count of users is 1 or more", tuple(users), "leave it out for the table's own")
    if form not in FORMS:
        raise unknown_name("form of drawing", form, FORMS)
    max_length = min(config.max_length or served.config.max_length, served.config.max_length)
    if traffic.longest > max_length:
        raise rule_error(
            f"A prompt and its answer fit the context of {max_length} tokens",
            f"{traffic.longest} tokens",
            "ask for shorter ones, or raise max_length where the model allows it",
        )
    table = pricing if isinstance(pricing, PriceTable) else price_table(pricing)
    prices = tuple(price for kind in _KINDS if (price := table.find(where.chip, region, kind)) is not None)
    limit = _limit(memory_limit_gb, where)
    say = tell or (lambda text: None)
    tries = [_Try(served, config, where, chips, limit, max_length, form) for chips in _ways(tensor_parallel, where)]
    chosen = _choose(tries, traffic, target_latency_ms, say)
    rows: dict[int, TrafficRow] = {}
    held: TrafficRow | None = None
    if chosen.size is not None:
        targets = _Targets(target_latency_ms, target_first_ms)

        def row(count: int) -> TrafficRow:
            if count not in rows:
                say(f"{where.name}: users of an engine: {count}")
                outcome = steady(SimulatedEngine(chosen.times, chosen.sized, targets.latency_ms), traffic, count)
                engines = where.chips // chosen.chips
                rows[count] = traffic_row(outcome, engines, where.chips, prices, targets.kept(outcome))
            return rows[count]

        shown = [row(count) for count in users if count <= config.max_sequences]
        held = _most(row, [one.engine.users for one in shown])
    best = None if chosen.size is None else chosen.best_ms(traffic)
    return ServingPlan(
        name=served.name,
        where=where,
        config=config,
        lengths=_in_words(traffic),
        think_s=traffic.think_s,
        target_ms=target_latency_ms,
        target_first_ms=target_first_ms,
        tensor_parallel=chosen.chips,
        memory=chosen.memory,
        cache=chosen.size,
        misfit=chosen.misfit,
        best_ms=best,
        best_range_ms=None
        if best is None
        else (chosen.best_ms(traffic, level="high"), chosen.best_ms(traffic, level="low")),
        rows=tuple(rows[count] for count in sorted(rows)),
        held=held,
        anatomy=() if chosen.size is None else _anatomy(chosen, traffic, held),
        prices=prices,
        notes=_notes(chosen, traffic),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        planning_seconds=time.perf_counter() - started,
    )


@dataclass(frozen=True)
class _Targets:
    latency_ms: float | None
    first_ms: float | None

    def kept(self, outcome: Outcome) -> bool:
        # Who says how long the first token may take has said what waiting is.
        waits = (
            outcome.waiting > _FEW_WAIT * outcome.users
            if self.first_ms is None
            else outcome.first_p95_ms > self.first_ms
        )
        return not waits and (self.latency_ms is None or outcome.p95_ms <= self.latency_ms)


class _Try:
    """An engine on so many chips: what fits, and how long its steps take."""

    def __init__(
        self,
        served: ServedModel,
        config: EngineConfig,
        where: Slice,
        chips: int,
        limit: int,
        max_length: int,
        form: Form,
    ) -> None:
        self.chips = chips
        mesh = None if chips == 1 else cast(Any, jax.sharding.AbstractMesh((chips,), ("model",)))
        sized = replace(config, mesh=mesh)
        dtype = jnp.dtype(config.cache_dtype or compute_dtype(served.precision))
        own, loaded = EnginePlacement(served, chips, int8=config.weights == "int8").weight_bytes()
        self.size: CacheSize | None = None
        self.misfit = ""
        try:
            self.size = cache_size(
                served.config, sized, max_length=max_length, dtype=dtype, weight_bytes=own + loaded, device_bytes=limit
            )
        except ValueError as misfit:  # the one thing that it refuses
            self.misfit = str(misfit)
        found = self.size
        cache = None if found is None else found.pages * found.page_bytes + found.state_bytes
        of_batch = config.max_sequences * -(-max_length // config.page_size)
        page = 0 if found is None else found.page_bytes
        self.memory = ServingMemory(
            own, loaded, working_bytes(served.config, sized, of_batch, page, dtype), limit, cache
        )
        if cache is not None and own + loaded + self.memory.working + cache > limit:  # pages that were asked for
            self.size, self.misfit = None, (
                f"{config.pages} pages of {page:,} bytes, weights and a step's values are more than the "
                f"{limit / GiB:.2f} GiB of a chip"
            )  # fmt: skip
        self._make = lambda pages: StepTimes(
            served, config, where, pages=pages, max_length=max_length, tensor_parallel=chips, form=form
        )
        self._times: StepTimes | None = None

    @property
    def sized(self) -> CacheSize:
        assert self.size is not None
        return self.size

    @property
    def times(self) -> StepTimes:
        if self._times is None:
            self._times = self._make(self.sized.pages)
        return self._times

    def best_ms(self, traffic: Traffic, level: str = "mid") -> float:
        """Between two tokens of one user alone, at the mean of the contexts."""
        shapes = StepShapes(self.times.config, self.times.table_pages)
        context = _mean_context(traffic)
        shape = shapes.decode(1, -(-context // self.times.config.page_size))
        return 1e3 * self.times.seconds(shape, [Tokens(1, context)], level)


def _choose(tries: list[_Try], traffic: Traffic, target_ms: float | None, say: Callable[[str], None]) -> _Try:
    """The fewest chips that hold the model and keep the latency for one user; else those that come nearest."""
    fit = [one for one in tries if one.size is not None]
    if not fit:
        return tries[-1]
    if len(fit) == 1 or target_ms is None:
        return fit[0]
    best: dict[int, float] = {}
    for one in fit:
        say(f"chips of an engine: {one.chips}")
        best[one.chips] = one.best_ms(traffic)
        if best[one.chips] <= target_ms:
            return one
    return min(fit, key=lambda one: best[one.chips])


def _most(row: Callable[[int], TrafficRow], counts: list[int]) -> TrafficRow | None:
    """The most users for whom all is kept, to within a sixteenth."""
    kept = max((count for count in counts if row(count).within), default=0)
    over = min((count for count in counts if count > kept and not row(count).within), default=0)
    while not over and kept < _MOST_USERS:
        tried = max(1, 2 * kept)
        if row(tried).within:
            kept = tried
        else:
            over = tried
    while kept and over - kept > max(1, kept // _NEAR):
        middle = (kept + over) // 2
        if row(middle).within:
            kept = middle
        else:
            over = middle
    if not kept and over > 1 and row(1).within:
        return _most(row, [1, over])
    return row(kept) if kept else None


def _ways(asked: int | None, where: Slice) -> list[int]:
    if asked is not None:
        if asked < 1 or where.chips % asked:
            raise rule_error(
                f"tensor_parallel divides the {where.chips} chips of {where.name}",
                asked,
                f"use one of {', '.join(str(n) for n in range(1, where.chips + 1) if where.chips % n == 0)}",
            )
        return [asked]
    return [chips for chips in (2**power for power in range(10)) if where.chips % chips == 0]


def _limit(memory_limit_gb: float | None, where: Slice) -> int:
    chip = where.chip
    if memory_limit_gb is None:
        return int(chip.capacity_bytes * (JAX_TAKES if chip.platform == "gpu" else 1))
    if not 0 < memory_limit_gb <= chip.hbm_bytes / GiB:
        raise rule_error(
            f"memory_limit_gb is above 0 and at most the {chip.hbm_bytes / GiB:g} GiB of a {chip.name}",
            f"{memory_limit_gb:g}",
            f"use {chip.capacity_bytes / GiB:g}",
        )
    return int(memory_limit_gb * GiB)


def _check_config(config: EngineConfig) -> None:
    unpredicted = {
        "mesh": config.mesh is not None,
        "speculative_tokens": config.speculative_tokens > 0,
        "adapters": bool(config.adapters),
        "keep_keys": not config.keep_keys,
    }
    why = {
        "mesh": "say tensor_parallel",
        "speculative_tokens": "leave it out: how many drafts are right hangs on the text",
        "adapters": "leave them out",
        "keep_keys": "leave it out",
    }
    for name, given in unpredicted.items():
        if given:
            raise rule_error(
                "A prediction is of an engine without drafts, adapters and a mesh of its own, that keeps keys",
                f"{name}={getattr(config, name)!r}",
                why[name],
            )


def _check_targets(latency_ms: float | None, first_ms: float | None) -> None:
    for name, value in (("target_latency_ms", latency_ms), ("target_first_ms", first_ms)):
        if value is not None and not value > 0:
            raise rule_error(f"{name} is above 0", value, "use None for no target")


def _mean_context(traffic: Traffic) -> int:
    return max(1, round(float(np.mean([one.prompt + one.output / 2 for one in traffic.lengths]))))


def _in_words(traffic: Traffic) -> str:
    if len(set(traffic.lengths)) == 1:
        one = traffic.lengths[0]
        return f"{one.prompt:,} tokens in, {one.output:,} out"
    prompts, outputs = ([getattr(one, side) for one in traffic.lengths] for side in ("prompt", "output"))
    return (
        f"a trace of {len(traffic.lengths):,} lengths: {np.median(prompts):,.0f} tokens in and "
        f"{np.median(outputs):,.0f} out in the median, {max(prompts):,} and {max(outputs):,} at the most"
    )


def _anatomy(chosen: _Try, traffic: Traffic, held: TrafficRow | None) -> tuple[tuple[str, float], ...]:
    times = chosen.times
    count = 1 if held is None else max(1, round(held.engine.running))
    shapes = StepShapes(times.config, times.table_pages)
    context = _mean_context(traffic)
    shape = shapes.decode(min(count, times.config.max_sequences), -(-context // times.config.page_size))
    parts = times.anatomy(shape, [Tokens(1, context)] * count)
    whole = sum(parts.values())
    return tuple((name, seconds / whole) for name, seconds in parts.items())


def _notes(chosen: _Try, traffic: Traffic) -> tuple[str, ...]:
    notes = [
        "steps are the device's alone: what the host does between them is taken to hide behind them, as an engine that "
        "sends the next step ahead does",
        "no prefix is shared: prompts that begin alike take less",
    ]
    if chosen.memory.loaded:
        notes.append("an engine keeps the weights that were loaded beside its own: both are counted")
    if chosen.size is not None:
        shape = chosen.times.decode_shape(1)
        notes += chosen.times.priced(shape).notes
    if traffic.think_s:
        notes.append("a chip that idles while users think is paid for: by new tokens")
    return tuple(dict.fromkeys(notes))
