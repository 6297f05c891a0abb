"""On what grounds an implementation is taken where no tuned entry speaks, and which grounds dispatch may act on.

*measured*: it ran on this chip. *predicted*: the chip's compiler gave figures for it and for XLA's form of the same
work, and nothing ran. *untimed*: neither. Dispatch acts on what is measured; inside an optimisation context, or under
`trust("predicted")`, on predictions too.

Predictions are a table a chip, `kernels/evidence/<chip>.json`, which tools/predicted_evidence.py makes of what
`capibara kernels compile` says: operands, parameters, and the microseconds that bytes, schedule and matrix units leave
at the least for XLA's program and at the most for ours.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal

import jax

from capibara import task_states
from capibara.errors import say_once, unknown_name
from capibara.kernels.core import tables
from capibara.kernels.core.spec import Call, Implementation, describe

__all__ = ["LEVELS", "Evidence", "Trust", "of", "optimising", "trust", "trusted"]

Level = Literal["measured", "predicted"]
LEVELS: tuple[Level, ...] = ("measured", "predicted")
SHIPPED = Path(__file__).parents[1] / "evidence"
# A prediction decides where it says at least this much: what a bound leaves out is some per cent.
LEAST_GAIN = 1.1
# Sizes of operands this many doublings away, all axes together, are another call: the op's worst row speaks for it.
_FAR = 10.0

_explicit = jax.make_user_context(None)
optimising = jax.make_user_context(False)
"""Whether an optimisation context is around; `capibara.mesh.context` enters it."""
_ONLY_REMEMBERED = (
    "trust() was entered in a coroutine that cannot be followed: asyncio does not run it, or it was started eagerly "
    "and has not awaited yet. Ops that are called directly go by it there, and a jitted function runs as if outside, "
    "since jax keeps what is in jit's cache key per thread. Put the `with` in a plain function."
)


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What speaks for an implementation of one call."""

    kind: Literal["measured", "predicted", "untimed"]
    gain: float | None
    """How many times as fast as XLA's form of the same call; None where nothing says."""
    source: str

    def __str__(self) -> str:
        gain = "" if self.gain is None else f" {self.gain:.2g} times as fast as XLA's form"
        return f"{self.kind}{gain} ({self.source})"


class _Inside:
    """One `with trust(...)` that was entered, and the one around it."""

    def __init__(self, owner: Trust, of_task: bool, outer: _Inside | None) -> None:
        self.owner, self.outer = owner, outer
        self.held = task_states.Held(lambda: _explicit(owner.level)) if of_task else None
        self._state: Any = None

    @property
    def remembered(self) -> bool:
        """Of a coroutine that cannot be followed here: no state of jax has it."""
        return self.held is not None and not task_states.in_force(self.held)

    def apply(self) -> None:
        if self.held is None:
            self._state = _explicit(self.owner.level)
            self._state.__enter__()
        elif not task_states.hold(self.held):
            say_once(RuntimeWarning, None, _ONLY_REMEMBERED, stacklevel=3)

    def undo(self) -> None:
        if self.held is None:
            self._state.__exit__(None, None, None)
        else:
            task_states.release(self.held)


_INNERMOST: ContextVar[_Inside | None] = ContextVar("capibara_trust", default=None)
# The settings of the process, the latest last. A `with` takes back its own and no other, whatever threads have set
# between its two steps; of those that nobody takes back the last alone matters.
_settings: deque[Trust] = deque(maxlen=256)
_lock = threading.Lock()


class Trust:
    """What `trust` returns: a setting that is in force already, and as a context manager only inside of its `with`.

    In a coroutine the `with` follows the task, as an optimisation context does. One object may be entered again.
    """

    def __init__(self, level: Level | None) -> None:
        self.level = level
        with _lock:
            _settings.append(self)
            _explicit.set_global(level)

    def __enter__(self) -> Trust:
        with _lock:
            if self in _settings:
                _settings.remove(self)
                _explicit.set_global(_settings[-1].level if _settings else None)
        inside = _Inside(self, task_states.may_be_suspended(sys._getframe(1)), _INNERMOST.get())
        inside.apply()
        _INNERMOST.set(inside)
        return self

    def __exit__(self, *exc: object) -> None:
        inside, later = _INNERMOST.get(), []
        while inside is not None and inside.owner is not self:
            later.append(inside)
            inside = inside.outer
        if inside is None:  # an async generator that the event loop closes elsewhere: nothing was set here
            return
        # Held by generators, they may end out of order: those inside are taken off and put back.
        for one in later:
            one.undo()
        inside.undo()
        outer = inside.outer
        for one in reversed(later):
            one.apply()
            one.outer, outer = outer, one
        _INNERMOST.set(outer)

    def __repr__(self) -> str:
        return f"trust({self.level!r})"


def trust(level: str | None) -> Trust:
    """Which evidence dispatch may act on, for the process from now on, or inside of a `with`.

    Args:
      level: "measured", what ran on this chip; "predicted", also what its compiler's figures say; None for what holds
        by itself: predictions inside an optimisation context, and measurements outside of one.

    >>> with trust("predicted"):
    ...     trusted()
    'predicted'
    >>> trusted()
    'measured'
    """
    if level is not None and level not in LEVELS:
        raise unknown_name("evidence", level, LEVELS)
    return Trust(level)


def trusted() -> Level:
    """What dispatch acts on here; what `trust` says comes before an optimisation context."""
    inside = _INNERMOST.get()
    if inside is not None and inside.remembered and not task_states.tracing():
        explicit = inside.owner.level
    else:
        # Inside a trace jax's own state is the only truth, since it is what the trace is cached under.
        explicit = _explicit.value
    if explicit is not None:
        return explicit
    return "predicted" if optimising.value else "measured"


def of(call: Call, implementation: Implementation) -> Evidence:
    """What speaks for this implementation of this call, where no tuned entry does."""
    if call.target.platform != "tpu" or implementation.platforms != ("tpu",):
        # XLA's own forms need none, and the ranks on a GPU follow runs on an H200 (benchmarks/results).
        return Evidence("measured", None, "ranked by runs")
    rows = _table(tables.slug(call.target.device_kind)).get((call.op.name, implementation.name), ())
    if not rows:
        if not (_ours(call.op.reference) and _ours(implementation.fn)):
            return Evidence("measured", None, "ranked by its own author")
        return Evidence("untimed", None, "neither run nor compared with XLA's form for this chip")
    beyond = implementation.beyond_evidence(call)
    if beyond is not None:
        return Evidence("untimed", None, beyond)
    near, far = _nearest(call, rows)
    gain = near.gain if far <= _FAR else min(row.gain for row in rows)
    which = f"as compiled for {' '.join(near.operands)}" if far <= _FAR else f"the least of {len(rows)} compiled cases"
    return Evidence("predicted", gain, f"{which}; not run")


def _ours(fn: Callable[..., Any]) -> bool:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__module__", "").startswith("capibara.")


@dataclasses.dataclass(frozen=True)
class _Row:
    operands: tuple[str, ...]
    params: str
    xla_us: float
    ours_us: float

    @property
    def gain(self) -> float:
        return self.xla_us / self.ours_us


@functools.lru_cache(maxsize=64)
def _table(chip: str) -> dict[tuple[str, str], tuple[_Row, ...]]:
    path = SHIPPED / f"{chip}.json"
    if not path.exists():
        return {}
    document = json.loads(path.read_text(encoding="utf-8"))
    return {
        (op, implementation): tuple(
            _Row(tuple(row["operands"]), row["params"], row["xla_us"], row["ours_us"]) for row in rows
        )
        for op, implementations in document["ops"].items()
        for implementation, rows in implementations.items()
    }


def _nearest(call: Call, rows: Sequence[_Row]) -> tuple[_Row, float]:
    """The row nearest to the call, and how far it is: doublings of sizes; without end for another type."""
    operands, params = tuple(map(describe, call.args)), params_key(call)
    found = [(_distance(row.operands, operands) + (0.0 if row.params == params else 1.0), row) for row in rows]
    far, row = min(found, key=lambda pair: pair[0])
    return row, far


def params_key(call: Call) -> str:
    return json.dumps({k: str(v) for k, v in call.tuning_key.items()}, sort_keys=True)


_OPERAND = re.compile(r"(\w+)\[([\d,]*)\]")


def _distance(left: Sequence[str], right: Sequence[str]) -> float:
    if len(left) != len(right):  # compiled before the op had one of its operands
        return math.inf
    total = 0.0
    for one, other in zip(left, right, strict=True):
        if one == other:
            continue
        if "-" in (one, other):  # an operand that only one of the calls has, such as a weight
            total += 1.0
            continue
        a, b = _OPERAND.fullmatch(one), _OPERAND.fullmatch(other)
        if a is None or b is None or a[1] != b[1]:
            return math.inf
        dims = [[int(n) for n in m[2].split(",") if n] for m in (a, b)]
        if len(dims[0]) != len(dims[1]) or 0 in dims[0] + dims[1]:
            return math.inf
        total += sum(abs(math.log2(x / y)) for x, y in zip(*dims, strict=True))
    return total
