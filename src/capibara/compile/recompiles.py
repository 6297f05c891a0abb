"""Which functions were compiled again, how often, and why.

    with RecompileDetector() as detector:
        train()
    detector.counts            # {"train_step": 3, ...}: programs made of each function, by name
    detector.recompilations    # a Recompilation for each that was not a function's first: .function, .reason, .changes
    print(detector.report())

Inside of the context every jitted function is counted, whoever jitted it, by jax's own events; the reason is jax's
(`jax_explain_cache_misses`), which is turned on for the time and read instead of logged. Functions that go through
`detector.watch(fn)`, or the decorator `watch_recompiles`, are looked at more closely: each difference is a `Change`
with the argument's path in its tree and what it is (shape, dtype, weak type, static value, sharding, structure); where
no argument changed, the first line of the jaxpr that did. Watching costs little at a call that does not compile.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from capibara.errors import say_once
from capibara.lru import LRU

__all__ = ["Change", "Recompilation", "RecompileDetector", "watch_recompiles"]

_log = logging.getLogger(__name__)
_COMPILE = "/jax/core/compile/backend_compile_duration"
_EXPLAINED = "TRACING CACHE MISS"
_LOGGERS = ("jax._src.interpreters.partial_eval", "jax._src.pjit", "jax._src.compiler", "jax._src.compilation_cache")
_KEPT = 1000
_PROGRAMS = 16
_JAXPR_LINES = 100_000
_UNSEEN = (
    "jax gives no reason: an operation outside of jit has other shapes, or a sharding, a device, a mesh or a setting "
    "of jax differs"
)
_ANEW = (
    "the same program was made again: the function was jitted anew, caches were cleared, or a mesh or a setting of jax "
    "differs"
)


@dataclass(frozen=True)
class Change:
    """What differs in one argument."""

    path: str
    """As Python would write it: params['layers'][0]."""
    what: str
    """shape, dtype, weak type, static value, sharding, or structure."""
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what} {self.before} -> {self.now}"


@dataclass(frozen=True)
class Recompilation:
    """A program that was made of a function which had one."""

    function: str
    reason: str
    seconds: float
    """That compiling took."""
    changes: tuple[Change, ...] = ()
    """Of a watched function."""

    def __str__(self) -> str:
        return f"{self.function} was compiled again in {self.seconds:.2f} s: {self.reason}"


class RecompileDetector:
    """A context that sees every compilation, and what it was for. It may be entered again, and adds up."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Programs made, by the function's name; the names are as many as there are functions."""
        self.recompilations: deque[Recompilation] = deque(maxlen=_KEPT)
        """The last thousand."""
        self._watched: LRU[str, deque[_Program]] = LRU(1024)
        self._explanations = threading.local()
        self._watching = threading.local()
        self._lock = threading.Lock()
        self._open = 0

    def __enter__(self) -> RecompileDetector:
        from jax import monitoring

        with self._lock:
            self._open += 1
            if self._open == 1:
                _EXPLANATIONS.tell_also(self._explained)
                monitoring.register_event_duration_secs_listener(self._on_compiled)
        return self

    def __exit__(self, *_: object) -> None:
        from jax import monitoring

        with self._lock:
            self._open -= 1
            if self._open:
                return
            _EXPLANATIONS.tell_no_more(self._explained)
            try:
                monitoring.unregister_event_duration_listener(self._on_compiled)
            except (ValueError, AssertionError):  # somebody cleared all listeners: nothing after that was counted
                _log.warning("jax's listeners were cleared inside of a RecompileDetector: it missed what came after")

    @property
    def seconds(self) -> float:
        """That the recompilations took: what a fixed shape would have saved."""
        return sum(again.seconds for again in self.recompilations)

    def report(self) -> str:
        """A line a recompilation, the dearest function first."""
        if not self.recompilations:
            return f"{sum(self.counts.values())} programs of {len(self.counts)} functions; none was compiled again"
        by_function: dict[str, list[Recompilation]] = {}
        for again in self.recompilations:
            by_function.setdefault(again.function, []).append(again)
        ranked = sorted(by_function.items(), key=lambda item: -sum(again.seconds for again in item[1]))
        lines = []
        for function, times in ranked:
            lines.append(f"{function}: compiled {len(times)} times again, {sum(t.seconds for t in times):.2f} s")
            lines += [f"  {reason} ({count}x)" for reason, count in Counter(t.reason for t in times).most_common()]
        return "\n".join(lines)

    def watch(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The function, jitted if it is not, with its compilations explained by argument and by line.

        A function that is made anew at each turn of a loop is known by where its code stands.
        """
        import jax

        jitted = fn if hasattr(fn, "lower") and hasattr(fn, "trace") else jax.jit(fn)
        key = _where(fn)

        @functools.wraps(fn)
        def watched(*args: Any, **kwargs: Any) -> Any:
            compiled: list[float] = []
            outer = getattr(self._watching, "state", None)
            self._watching.state = (_name(fn), compiled)
            try:
                with self:
                    result = jitted(*args, **kwargs)
            finally:
                self._watching.state = outer
            if compiled:
                self._compare(key, fn, jitted, args, kwargs, sum(compiled))
            return result

        watched.lower, watched.trace = jitted.lower, jitted.trace  # type: ignore[attr-defined]
        return watched

    # What jax tells.

    def _explained(self, text: str) -> None:
        found = getattr(self._explanations, "by_name", None)
        if found is None:
            found = self._explanations.by_name = {}
        if match := re.search(r"for (\S+) defined at|never seen function:\s+(\S+) id=", text):
            found[match[1] or match[2]] = text
        if len(found) > 4096:
            found.clear()

    def _on_compiled(self, event: str, duration_secs: float, **about: str | int) -> None:
        if event != _COMPILE:
            return
        name = re.sub(r"^\w+\((.*)\)$", r"\1", str(about.get("fun_name", "?")))
        found = getattr(self._explanations, "by_name", {})
        text = found.pop(name, None)
        found.clear()  # of functions that were traced on the way, as parts of this one
        with self._lock:
            self.counts[name] += 1
            again = self.counts[name] > 1
        watched = getattr(self._watching, "state", None)
        if watched is not None and watched[0] == name:
            watched[1].append(duration_secs)
            return
        reason = _reason(text, again)
        if reason is not None:
            self.recompilations.append(Recompilation(name, reason, duration_secs))

    # What is watched.

    def _compare(
        self, key: str, fn: Callable[..., Any], jitted: Any, args: Sequence[Any], kwargs: Any, seconds: float
    ) -> None:
        program = _Program(_leaves(fn, args, kwargs), _jaxpr_lines(jitted, args, kwargs))
        known = self._watched.get(key)
        if known is None:
            known = self._watched[key] = deque(maxlen=_PROGRAMS)
        before = min(reversed(known), key=lambda other: len(_changes(other.leaves, program.leaves)), default=None)
        known.append(program)
        if before is None:
            return
        changes = tuple(_changes(before.leaves, program.leaves))
        if changes:
            reason = "; ".join(map(str, changes[:4])) + (f"; and {len(changes) - 4} more" if len(changes) > 4 else "")
        else:
            reason = _changed_line(before.jaxpr, program.jaxpr)
        self.recompilations.append(Recompilation(_name(fn), reason, seconds, changes))


def watch_recompiles(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that logs why a function is compiled again, each reason once; `fn.detector` has them all.

    >>> import jax.numpy as jnp
    >>> @watch_recompiles
    ... def double(x):
    ...     return 2 * x
    >>> for length in (3, 4):
    ...     _ = double(jnp.ones(length))
    >>> print(double.detector.recompilations[0].changes[0])
    x: shape (3,) -> (4,)
    """
    detector = RecompileDetector()
    watched = detector.watch(fn)

    @functools.wraps(fn)
    def telling(*args: Any, **kwargs: Any) -> Any:
        seen = len(detector.recompilations)
        result = watched(*args, **kwargs)
        if len(detector.recompilations) > seen:
            again = detector.recompilations[-1]
            say_once(_log, (again.function, again.reason), "%s", again)
        return result

    telling.detector = detector  # type: ignore[attr-defined]
    return telling


class _Explanations(logging.Filter):
    """Hands jax's explanations to whoever asks, and keeps out of the log what is there for their sake alone."""

    def __init__(self) -> None:
        super().__init__()
        self._told: list[Callable[[str], None]] = []
        self._was_on = False
        self._lock = threading.Lock()

    def tell_also(self, tell: Callable[[str], None]) -> None:
        import jax

        with self._lock:
            self._told = [*self._told, tell]
            if len(self._told) == 1:
                self._was_on = bool(jax.config.jax_explain_cache_misses)  # type: ignore[attr-defined]
                for name in _LOGGERS:
                    logging.getLogger(name).addFilter(self)
                jax.config.update("jax_explain_cache_misses", True)

    def tell_no_more(self, tell: Callable[[str], None]) -> None:
        import jax

        with self._lock:
            self._told = [other for other in self._told if other != tell]
            if not self._told:
                jax.config.update("jax_explain_cache_misses", self._was_on)
                for name in _LOGGERS:
                    logging.getLogger(name).removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if text.startswith(_EXPLAINED):
            for tell in self._told:
                tell(text)
            return self._was_on
        return self._was_on or not ("persistent" in text.lower() and "cache" in text.lower())


_EXPLANATIONS = _Explanations()


def _reason(text: str | None, again: bool) -> str | None:
    """Why a function has another program, in a line; None where it is its first."""
    if text is None:
        return _UNSEEN if again else None
    if "never seen function" in text:
        if "seen another function defined on the same line" in text:
            return (
                "the function is made anew each time, where its code stands: make and jit it once, outside of the loop"
            )
        return None  # another function of this name
    lines = [line.strip() for line in text.splitlines()[2:]]
    points = [re.sub(r"https?://\S+", "", line.removeprefix("* ")) for line in lines if line.startswith("* ")]
    if points:
        return "; ".join(points)
    return " ".join(line for line in lines if not line.startswith("all previously seen")) or _UNSEEN


# What a call's arguments are, leaf by leaf.


@dataclass(frozen=True)
class _Leaf:
    shape: str = ""
    dtype: str = ""
    weak: str = ""
    sharding: str = ""
    value: str = ""
    """Of what is no array."""


@dataclass(frozen=True)
class _Program:
    leaves: dict[str, _Leaf]
    jaxpr: tuple[str, ...]


_NAMES = {"shape": "shape", "dtype": "dtype", "weak": "weak type", "sharding": "sharding"}


def _leaves(fn: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> dict[str, _Leaf]:
    import jax

    try:
        arguments: dict[str, Any] = dict(inspect.signature(fn).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # a function of C's
        arguments = {f"argument {number}": value for number, value in enumerate(args)} | kwargs
    found = {}
    for name, value in arguments.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(value):
            found[name + jax.tree_util.keystr(path)] = _leaf(leaf)
    return found


def _leaf(leaf: Any) -> _Leaf:
    import jax
    import numpy as np

    if isinstance(leaf, jax.Array):
        sharding = str(leaf.sharding) if len(leaf.sharding.device_set) > 1 or leaf.committed else ""
        return _Leaf(str(leaf.shape), str(leaf.dtype), str(leaf.aval.weak_type), sharding)
    if isinstance(leaf, (bool, int, float, complex)):
        # Its value is a part of the program where it is static, which is seen where nothing else differs.
        return _Leaf("()", str(jax.dtypes.canonicalize_dtype(type(leaf))), "True", value=repr(leaf))
    if isinstance(leaf, np.ndarray | np.generic) or (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return _Leaf(str(tuple(leaf.shape)), str(jax.dtypes.canonicalize_dtype(leaf.dtype)), "False")
    return _Leaf(value=repr(leaf)[:200])


def _changes(before: dict[str, _Leaf], now: dict[str, _Leaf]) -> list[Change]:
    changes, values = [], []
    for path in dict.fromkeys([*before, *now]):
        old, new = before.get(path), now.get(path)
        if old is None or new is None:
            changes.append(Change(path, "structure", _presence(old), _presence(new)))
            continue
        changes += [
            Change(path, name, getattr(old, field) or "none", getattr(new, field) or "none")
            for field, name in _NAMES.items()
            if getattr(old, field) != getattr(new, field)
        ]
        if old.value != new.value and old.value and new.value:
            values.append((Change(path, "static value", old.value, new.value), new.shape != ""))
    # A number that is an operand changes nothing by its value: it counts where nothing else can be the reason.
    certain = [change for change, operand in values if not operand]
    return changes + (certain if changes or certain else [change for change, _ in values])


def _presence(leaf: _Leaf | None) -> str:
    return "absent" if leaf is None else leaf.value or f"{leaf.dtype}{leaf.shape}"


def _jaxpr_lines(jitted: Any, args: Sequence[Any], kwargs: Any) -> tuple[str, ...]:
    """What was traced for this call: jax has it, and traces nothing again."""
    import jax

    def described(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        sharding = leaf.sharding if leaf.committed else None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=leaf.aval.weak_type)

    args, kwargs = jax.tree.map(described, (tuple(args), kwargs))
    text = jitted.trace(*args, **kwargs).jaxpr.pretty_print(use_color=False)
    # One short enough for a line has its equations between semicolons.
    return tuple(line.strip() for line in re.split(r"\n|; ", text)[:_JAXPR_LINES])


def _changed_line(before: Sequence[str], now: Sequence[str]) -> str:
    for old, new in zip(before, now, strict=False):
        if old != new:
            return f"no argument changed; the jaxpr did: {old!r} -> {new!r}"
    if len(before) != len(now):
        longer, word = (now, "more") if len(now) > len(before) else (before, "fewer")
        at = min(len(before), len(now))
        return f"no argument changed; the jaxpr has {abs(len(now) - len(before))} lines {word}, from {longer[at]!r}"
    return f"no argument and no line of the jaxpr changed: {_ANEW}"


def _where(fn: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(fn), "__code__", None)
    return f"{_name(fn)} {code.co_filename}:{code.co_firstlineno}" if code is not None else f"{_name(fn)} {id(fn)}"


def _name(fn: Callable[..., Any]) -> str:
    return str(getattr(fn, "__name__", type(fn).__name__))
