"""The one selection loop, and the fast path around it.

`select` decides, in words, which implementation takes a call; `run` decides once for each distinct call and keeps
the answer; `recording` collects what is decided.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from capibara.errors import ImplementationRefused, rule_error, say_once
from capibara.kernels.core import context, evidence, placement, tables, times, transforms, trusting, varying
from capibara.kernels.core.spec import Call, Config, Prefer, Preference

if TYPE_CHECKING:
    from capibara.kernels.core.op import Op

logger = logging.getLogger("capibara.kernels")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One implementation's answer to one call."""

    implementation: str
    accepts: bool
    reason: str


@dataclasses.dataclass(frozen=True)
class Selection:
    """What takes a call, with which tuning choices, and why; and why each other implementation does not."""

    call: Call
    implementation: str
    config: Config
    why: str
    verdicts: tuple[Verdict, ...]
    pinned: bool = False
    """The caller named the implementation, so the gradient keeps to it too."""
    asked_config: Config = None
    """The config, when the caller asked for it: forward passes under differentiation, vmap and meshes keep it."""
    evidence: evidence.Evidence | None = None
    """What speaks for it, where evidence decided and it is for one platform alone."""
    times: Mapping[str, times.Estimate] = dataclasses.field(default_factory=dict)
    """What models say of those that accept, by name; empty where a name was asked for."""

    def __str__(self) -> str:
        chosen = f"{self.implementation}" + (f" {self.config}" if self.config is not None else "")
        lines = [f"{self.call} on {self.call.target.device_kind}: {chosen}", f"  because {self.why}"]
        remark = self.call.op.remark(self.call)
        lines += [] if remark is None else [f"  {remark}"]
        told = [f"{name} {found} ({found.kind}: {found.source})" for name, found in self.times.items()]
        lines += [f"  times by a model: {', '.join(told)}"] if told else []
        others = (v for v in self.verdicts if v.implementation != self.implementation)
        lines += [f"  not {v.implementation}: {v.reason}" for v in others]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        return {
            "op": self.call.op.name,
            "call": self.call.signature,
            "platform": self.call.target.platform,
            "device_kind": self.call.target.device_kind,
            "implementation": self.implementation,
            "config": dataclasses.asdict(self.config) if self.config is not None else None,
            "why": self.why,
            "evidence": None if self.evidence is None else dataclasses.asdict(self.evidence),
            "times": {name: dataclasses.asdict(found) for name, found in self.times.items()},
            "remark": self.call.op.remark(self.call),
            "others": [
                {"implementation": v.implementation, "accepts": v.accepts, "reason": v.reason}
                for v in self.verdicts
                if v.implementation != self.implementation
            ],
        }


def select(
    call: Call,
    implementation: str | None = None,
    config: Config = None,
    prefer: Prefer = None,
    where: placement.Placement | None = None,
) -> Selection:
    """Choose the implementation of one call.

    `implementation` forces one, and its refusal is an error; `prefer` asks for one where it accepts. Otherwise the
    tuned table for this chip speaks for the calls that it has, then the models of times, then a near case of the user's
    own table, then the evidence that is trusted, and where none tells, the order in which the op's implementations were
    added. A shipped case that is near lends its config alone. `where` is the operands' place on a mesh.
    """
    op = call.op
    preferred = prefer.implementation if isinstance(prefer, Preference) else prefer
    by_config = ""
    if isinstance(prefer, Preference) and prefer.op == op.name and prefer.config is not None:
        # The config that the surrounding call was given is of one implementation, which must then take this call.
        implementation, config, by_config = preferred, prefer.config, " by the surrounding call's config"
    asked_config = config
    unused: dict[str, str | None] = {}
    if implementation is not None:
        op.implementation(implementation)  # an unknown name is an error before anything is decided
    refusals = {name: impl.refusal(call) for name, impl in op.implementations.items()}
    on_mesh = placement.needs_layout(call, where)
    if on_mesh is not None:
        refusals |= {n: refusals[n] or on_mesh for n, impl in op.implementations.items() if impl.kernel}
    accepting = [name for name, reason in refusals.items() if reason is None]
    known = times.estimates(call, accepting) if implementation is None else {}
    order = evidence.order(call, trusting.trusted(), known) if implementation is None else None
    grounds = None

    if order is None:
        assert implementation is not None
        if refusals[implementation] is not None:
            raise ImplementationRefused(
                f"{op.name}: the implementation {implementation!r} was asked for{by_config} and cannot take this call: "
                f"{refusals[implementation]}. Got {call.signature} on {call.target.device_kind}. "
                f"Fix: change the call, or use one that accepts it: {', '.join(accepting) or 'none does'}."
            )
        chosen, why = implementation, f"it was asked for{by_config or ' by name'}"
    elif preferred is not None and refusals.get(preferred, "absent") is None:
        chosen, why = preferred, "the surrounding call runs on it"
    else:
        if not accepting:
            told = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
            raise ImplementationRefused(f"{op.name}: no implementation takes {call.signature}. {told}.")
        tuned = tables.find(call, accepting)
        if tuned is not None and (tuned.exact or tuned.implementation not in order.by_time):
            chosen, why = tuned.implementation, tuned.why
            config = config if config is not None else _config_of(tuned, call)
        else:
            chosen, why, unused = _by_evidence(call, accepting, order, known)
            grounds = order.grounds.get(chosen)
    made = op.implementations[chosen]
    if config is None and made.config_type is not None:
        # One that was asked for runs with its own tuned config, though another may be faster.
        tuned = tables.find(call, [chosen], to_configure=True)
        config = _config_of(tuned, call) if tuned is not None else None
    if config is None:
        config = made.default_config(call)
    elif made.config_type is None or not isinstance(config, made.config_type):
        if made.config_type is None:
            raise rule_error(f"{op.name} on {chosen} has nothing to configure", repr(config), "leave config out")
        expected = made.config_type.__name__
        raise rule_error(f"{op.name} on {chosen} takes a config of type {expected}", repr(config), "pass that type")

    verdicts = tuple(
        Verdict(
            name,
            reason is None,
            reason if reason is not None else _not_chosen(unused.get(name), chosen),
        )
        for name, reason in refusals.items()
    )
    if order is not None:
        _say_fallback(call, chosen, order.names, refusals)
    pinned = chosen in (implementation, preferred)
    return Selection(call, chosen, config, why, verdicts, pinned, asked_config, grounds, known)


def _config_of(tuned: tables.Tuned, call: Call) -> Config:
    if tuned.exact or tuned.config is None:
        return tuned.config
    return call.op.implementations[tuned.implementation].for_call(tuned.config, call)


def _by_evidence(
    call: Call, accepting: Sequence[str], order: evidence.Order, known: Mapping[str, times.Estimate]
) -> tuple[str, str, dict[str, str | None]]:
    """What runs where no tuned entry speaks, why, and what is to be said of each that does not."""
    chosen = next(name for name in order.names if name in accepting)
    remarks = {name: call.op.implementations[name].remark(call) for name in accepting}
    for name in accepting:
        found = order.grounds.get(name)
        if found is None:
            continue
        waits = found.decides and name not in order.passed
        unused = ", on which dispatch acts inside an optimisation context or trust" if waits else ""
        remarks[name] = "; ".join(filter(None, (f"{found}{unused}", remarks[name])))
    if chosen in order.by_time:
        least = ", ".join(f"{name} {known[name]}" for name in order.by_time)
        fastest = min(order.by_time, key=lambda name: known[name].seconds)
        rank = "the least" if chosen == fastest else "level with the least, and it stands first"
        return chosen, f"its time by a model is {rank}: {least}", remarks
    told = remarks[chosen]
    before = [name for name in order.passed.get(chosen, ()) if name in accepting]
    if chosen in order.grounds and order.grounds[chosen].kind == "predicted" and before:
        return chosen, f"it is {told}", remarks
    by_rule = f"it goes before {', '.join(before)}" if before else f"it comes first for {call.target.platform}"
    why = f"{by_rule} where no table has the call"
    return chosen, why if told is None else f"{why}: {told}", remarks


def _not_chosen(remark: str | None, chosen: str) -> str:
    return f"it accepts, and {chosen} was chosen" + ("" if remark is None else f"; {remark}")


def _say_fallback(call: Call, chosen: str, order: Sequence[str], refusals: Mapping[str, str | None]) -> None:
    """Log once when an implementation made for this platform would go first and refused."""
    for name in order[: order.index(chosen)]:
        reason = refusals[name]
        if reason is not None and call.target.platform in call.op.implementations[name].platforms:
            say_once(
                logger, (call.op.name, name, reason), "%s runs on %s instead of %s: %s", call, chosen, name, reason
            )


@dataclasses.dataclass(frozen=True)
class _Runner:
    """A decided call: what to run on concrete arrays, and what to run on tracers."""

    selection: Selection
    eager: Callable[..., Any]
    traced: Callable[..., Any]

    @property
    def is_kernel(self) -> bool:
        selection = self.selection
        return selection.call.op.implementations[selection.implementation].kernel

    def shaped(self, *arrays: Any) -> Any:
        """What stands for the call in a trace that is read for its shapes alone."""
        return jax.tree.map(lambda result: jnp.zeros(result.shape, result.dtype), self._results)

    @functools.cached_property
    def _results(self) -> Any:
        call = self.selection.call
        return jax.eval_shape(functools.partial(call.op.reference, **call.specified), *call.args)


_recorder: contextvars.ContextVar[list[Selection] | None] = contextvars.ContextVar("recorder", default=None)
# Its value changes with every explain(), so that functions already traced by jit are traced again and recorded.
_explain_context = jax.make_user_context(0)
_explain_count = itertools.count(1)
_marking: contextvars.ContextVar[bool] = contextvars.ContextVar("marking", default=False)
_closed: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar("closed", default=frozenset())
MARK = "capibara_op_"
"""Under `marking`, an op's call is in the trace a jit of this name and the number of its decision."""


def takes_kernel(call: Call) -> bool:
    """Whether dispatch takes a kernel for a call: of ops that are as well written out where it takes none.

    Shapes and types will do (`jax.ShapeDtypeStruct`).
    """
    kernels = [name for name, one in call.op.implementations.items() if one.kernel and one.refusal(call) is None]
    # Selecting also tells the log what was wanted and refused; where no kernel accepts, nobody wanted one.
    return bool(kernels) and select(call).implementation in kernels


def run(
    op: Op,
    arrays: tuple[Any, ...],
    params: Mapping[str, Hashable],
    *,
    implementation: str | None = None,
    config: Config = None,
    prefer: Prefer = None,
    local: bool = False,
) -> Any:
    """Run an op: the decision is made once for each distinct call, then it is a dictionary read.

    `local` says the arrays are one device's shards already, so nothing is to be partitioned again.
    """
    if len(arrays) < len(op.operands):  # the op's rules are written for all of its operands
        arrays = (*arrays, *(None,) * (len(op.operands) - len(arrays)))
    traced = False
    operands: list[Any] = []
    device: Any = None
    for x in arrays:
        if x is None:
            operands.append(None)
        else:
            operands.append((x.shape, x.dtype))
            if isinstance(x, jax.core.Tracer):
                traced = True
            elif device is None and isinstance(x, jax.Array):
                (device, *_) = x.devices()
    chosen_target = context.explicit_target()
    if chosen_target is None:
        if traced or device is None:
            chosen_target = context.current_target()
        else:
            chosen_target = context.target_of(device)
    manual = local or (traced and bool(jax.sharding.get_abstract_mesh().manual_axes))
    # TPU's compiler does not split kernels itself: there the layout must be known now, over all axes that no shard_map
    # around has taken. On Explicit axes it is in the operands' types, which a kernel cannot be traced with.
    by_layout = not local and (chosen_target.platform == "tpu" or placement.on_explicit_axes(arrays))
    if _marking.get() and jax.sharding.get_abstract_mesh().empty:
        # Read as what it computes and laid out afterwards, also behind a shard_map, whose results name its mesh.
        by_layout = False
    where = placement.placement(arrays) if by_layout else None
    # With their types: 1 is True to a dictionary, and not to an op's check.
    parameters = tuple((name, _kind(value), value) for name, value in params.items())
    key = (
        implementation, prefer, config, tuple(operands), parameters, chosen_target,
        context.current_interpret(), manual, where, context.matmul_precision(), tables.generation(),
        trusting.trusted(),
    )  # fmt: skip
    try:
        runner = op.runners.get(key)
    except TypeError:
        given = {"config": config, **params}
        wrong = [f"{name}={value!r}" for name, value in given.items() if not _hashable(value)]
        raise rule_error(
            f"{op.name} takes numbers, words and tuples of them, and a config of its implementation's type",
            ", ".join(wrong), "pass a tuple for a list, and the config's own class for a dictionary",
        ) from None  # fmt: skip
    if runner is None:
        call = op.call(*arrays, target=chosen_target, **params)
        selection = select(call, implementation, config, prefer, where)
        runner = op.runners[key] = _build(selection, manual, where)
    record = _recorder.get()
    if record is not None:
        record.append(runner.selection)
    if not traced:
        return runner.eager(*arrays)
    if manual and not local:
        arrays = varying.vary_alike(arrays)
    if record is not None and _marking.get():
        decision = len(record) - 1
        body = runner.shaped if op.name in _closed.get() and runner.is_kernel else runner.traced
        return _marked(body, decision)(*arrays)
    return runner.traced(*arrays)


def _marked(fn: Callable[..., Any], decision: int) -> Callable[..., Any]:
    def call(*arrays: Any) -> Any:
        return fn(*arrays)

    call.__name__ = call.__qualname__ = f"{MARK}{decision}"
    return jax.jit(call)


def _kind(value: Any) -> Any:
    return tuple(map(_kind, value)) if type(value) is tuple else type(value)


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _build(selection: Selection, manual: bool, where: placement.Placement | None) -> _Runner:
    call = selection.call
    impl = call.op.implementations[selection.implementation]
    parts = where if impl.needs_local_types and where is not None and where.explicit else None
    if not impl.kernel and not impl.own_gradient:
        if parts is not None:
            return _Runner(selection, *transforms.plain_on_shards(call, impl, selection.config, parts))
        plain = transforms.plain(call, impl, selection.config)
        return _Runner(selection, jax.jit(plain), plain)
    # The machine emulation orders its side effects, which JAX cannot carry through a partitioned computation.
    split: bool | placement.Placement = False
    if impl.kernel and context.current_interpret().mode != "machine":
        split = where if where is not None else call.target.platform != "tpu" and not manual
    elif parts is not None:
        split = parts
    eager, traced = transforms.kernel(
        call, impl, selection.config, split=split, pinned=selection.pinned, asked_config=selection.asked_config
    )
    return _Runner(selection, eager, traced)


@contextlib.contextmanager
def recording() -> Iterator[list[Selection]]:
    """Collect the decisions taken inside, including in functions that jit has traced before."""
    found: list[Selection] = []
    token = _recorder.set(found)
    try:
        with _explain_context(next(_explain_count)):
            yield found
    finally:
        _recorder.reset(token)


@contextlib.contextmanager
def marking(closed: frozenset[str] = frozenset()) -> Iterator[list[Selection]]:
    """As `recording`, and the trace shows where each op is called: a jit named `MARK` and the decision's place.

    Kernels of the ops in `closed` are not traced: their calls have results of the right shapes, and no body.
    """
    with recording() as found:
        tokens = _marking.set(True), _closed.set(closed)
        try:
            yield found
        finally:
            _marking.reset(tokens[0])
            _closed.reset(tokens[1])


def note(decision: Any) -> None:
    """Tell `explain` a decision that is no op's selection; it has `implementation`, `str()` and `as_dict()` too."""
    record = _recorder.get()
    if record is not None:
        record.append(decision)
