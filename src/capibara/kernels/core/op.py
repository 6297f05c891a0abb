"""What an op is.

An op is one object made of a reference in plain JAX (its specification), implementations that each say which
calls they take and why they refuse the others, a gradient, a cost, and the workload shapes that tests, tuning,
benchmarks and TPU compilation all read. `capibara.kernels.core.dispatch` chooses among the implementations.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from capibara.errors import rule_error, unknown_name
from capibara.hardware.facts import Chip
from capibara.kernels.core import context, dispatch, families, naming, outside
from capibara.kernels.core.context import Target, current_target
from capibara.kernels.core.counting import traced_cost
from capibara.kernels.core.spec import (
    Call,
    CallEfficiency,
    Case,
    Config,
    Cost,
    Excerpt,
    Gradient,
    Implementation,
    Partition,
    Prefer,
    TimeTerms,
    unit_roundoff,
)
from capibara.lru import LRU

# Decided calls that an op keeps. A model makes some dozens; a process that sees more shapes decides again, and compiles
# again where it calls outside of jit.
_MOST_RUNNERS = 2048


def traced_reference(call: Call) -> Any:
    """The reference traced on the call's shapes: it lowers, and has a jaxpr."""
    present = [x for x in call.args if x is not None]

    def reference(*arrays: Any) -> Any:
        operands = iter(arrays)
        full = [None if x is None else next(operands) for x in call.args]
        return call.op.reference(*full, **call.specified)

    return jax.jit(reference).trace(*present)


def _compiler_cost(call: Call) -> Cost:
    """The reference's own flops and bytes, by XLA's count: the default cost of a user's op."""
    dtype = next((np.dtype(x.dtype).name for x in call.args if x is not None), "float32")
    return traced_cost(traced_reference(call), dtype)


def _output_rounding(call: Call) -> float:
    """Default tolerance: a few roundings in the widest-error operand type."""
    return 8 * max((unit_roundoff(x.dtype) for x in call.args if x is not None), default=0.0)


class Op:
    """A named operation with a specification and any number of implementations. Calling it dispatches.

    `vishwamai.kernels.tpu.register_tpu_op` makes one of a function by its signature; this is the long form. Then
    `op.implement(Implementation(...))` adds a way to compute it, and `register(op)` makes it known by name.

    >>> plain = lambda x, *, times: x / 2**times
    >>> op = Op("halved", family="mine", reference=plain, operands=("x",), params={"times": 1})
    >>> op.implement(Implementation("xla", lambda x, *, times: x * 0.5**times))
    >>> float(op(jnp.float32(12), times=2))
    3.0

    Args:
      name: in the registry, on the command line and in every table.
      family: the group that it is listed in; any word.
      reference: `reference(*arrays, **params)` in plain JAX: what is right. Checks run it in float64, a kernel without
        a gradient is differentiated by it.
      operands: the names of the arrays, in their order; one that a call leaves out is None.
      params: the other arguments with their defaults; values are static and hash.
      hints: those parameters that say how, and never change what is computed; the reference does not take them.
      untuned: those parameters that do not change which implementation is fastest.
      check: `Call` -> None, or raises what is wrong with the operands, before anything is chosen (`rule_error`).
      cost: `Call` -> `Cost`; by default what XLA counts in the reference.
      efficiency: `efficiency(call, chip)` -> `CallEfficiency`: how much of the chip's peaks its kernels reach, where
        that differs from the chip's own factors; by default those.
      tolerance: `Call` -> the largest error against the reference in float64 that is still right, relative to the
        output's norm and to its largest element; by default 8 roundings of the operands' coarsest type.
      gradient: how kernels are differentiated; by default the reference's own.
      batch: `batch(op, size, batched, arrays, params, prefer)` -> the output with a leading axis, for `vmap` of a
        kernel, where `batched` says which arrays have that axis in front; by default one element after another.
      partition: how kernels are split over a mesh; by default they run whole on every device.
      cases: the workloads.
      remark: what a call's parameters come to, where that is not what they say; `explain` shows it.
      public: the documented function in front of the op, where there is one: what `explain` takes in its place.
      peers: what a user would run without this library, for benchmarks, by name: `Case` -> a function of the case's
        arrays, or None where it does not apply.
      stock_tpu: `Case` -> jax's own Pallas TPU program for the same work with its arguments, or None; for compilation.
      excerpt: `excerpt(op, arrays)` -> an `Excerpt` to check where the whole would take too long, or None.
      mesh_axes: for an op that runs only inside shard_map, on one device's operands: `Call` -> the sizes of the mesh
        axes that it is over, by name.
      exact: of the operands' shapes by name, what a tuned case must have alike to speak for a call that is near it.
      times: `times(call, implementation)` -> the `TimeTerms` of that implementation, or None where there is no model of
        it; the coefficients are data of a chip, `kernels/times/<chip>.json`.
    """

    def __init__(
        self,
        name: str,
        *,
        family: str,
        reference: Callable[..., Any],
        operands: Sequence[str],
        params: Mapping[str, Hashable] | None = None,
        hints: Sequence[str] = (),
        untuned: Sequence[str] = (),
        check: Callable[[Call], None] = lambda call: None,
        cost: Callable[[Call], Cost] = _compiler_cost,
        efficiency: Callable[[Call, Chip], CallEfficiency] = lambda call, chip: CallEfficiency(),
        tolerance: Callable[[Call], float] = _output_rounding,
        gradient: Gradient | None = None,
        batch: Callable[..., Any] | None = None,
        partition: Partition | None = None,
        cases: Iterable[Case] = (),
        remark: Callable[[Call], str | None] = lambda call: None,
        public: Callable[..., Any] | None = None,
        peers: Mapping[str, Callable[[Case], Callable[..., Any] | None]] | None = None,
        stock_tpu: Callable[[Case], tuple[Callable[..., Any], tuple[Any, ...]] | None] | None = None,
        excerpt: Callable[[Op, Sequence[Any]], Excerpt | None] | None = None,
        mesh_axes: Callable[[Call], Mapping[str, int]] | None = None,
        exact: Callable[[Mapping[str, tuple[int, ...]]], Hashable] = lambda shapes: None,
        times: Callable[[Call, str], TimeTerms | None] = lambda call, implementation: None,
    ) -> None:
        self.name = name
        self.family = family
        self.reference = reference
        self.operands = tuple(operands)
        self.params: Mapping[str, Hashable] = MappingProxyType(dict(params or {}))
        self.hints = frozenset(hints)
        self.untuned = frozenset(untuned)
        self.check = check
        self.cost = cost
        self.efficiency = efficiency
        self.tolerance = tolerance
        self.gradient = gradient
        self.batch = batch
        self.partition = partition
        self.cases = tuple(cases)
        self.remark = remark
        self.public = public
        # Public functions of other names that run it, each with the parameters that make it that function.
        self.functions: dict[str, tuple[Callable[..., Any], Mapping[str, Hashable]]] = {}
        self.peers = MappingProxyType(dict(peers or {}))
        self.stock_tpu = stock_tpu
        self.excerpt = excerpt
        self.exact = exact
        self.times = times
        self.mesh_axes = mesh_axes
        self.implementations: dict[str, Implementation] = {}
        self.runners: LRU[Hashable, Any] = LRU(_MOST_RUNNERS)  # filled by dispatch
        self.__doc__ = reference.__doc__

    def __repr__(self) -> str:
        return f"<op {self.name}: {', '.join(self.implementations)}>"

    def __call__(
        self, *arrays: Any, implementation: str | None = None, config: Config = None, **params: Hashable
    ) -> Any:
        return dispatch.run(self, arrays, params, implementation=implementation, config=config)

    def run(
        self, arrays: tuple[Any, ...], params: Mapping[str, Hashable], *, prefer: Prefer = None, local: bool = False
    ) -> Any:
        """Call it from a rule of its own: where `prefer` accepts, on that; `local` arrays are one device's part."""
        return dispatch.run(self, arrays, params, prefer=prefer, local=local)

    def implement(self, *implementations: Implementation) -> None:
        """Add implementations, in the order they are taken in where no evidence speaks; a name is taken once."""
        for implementation in implementations:
            if implementation.name in self.implementations:
                raise rule_error(
                    f"An implementation name is used once in op {self.name!r}",
                    implementation.name,
                    "choose another name",
                )
            self.implementations[implementation.name] = implementation
            naming.from_outside(implementation.fn)
        self.runners.clear()

    def implementation(self, name: str) -> Implementation:
        if name not in self.implementations:
            raise unknown_name(f"implementation of {self.name}", name, self.implementations)
        return self.implementations[name]

    def call(self, *args: Any, target: Target | None = None, **params: Hashable) -> Call:
        """The checked `Call` of these operands (arrays or ShapeDtypeStructs) and parameters."""
        for name in params:
            if name not in self.params:
                raise unknown_name(f"parameter of {self.name}", name, self.params)
        if len(args) > len(self.operands):
            raise rule_error(
                f"{self.name} takes the operands {', '.join(self.operands)}", f"{len(args)} operands", "pass fewer"
            )
        padded = (*args, *(None,) * (len(self.operands) - len(args)))
        shapes = tuple(None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in padded)
        made = Call(self, shapes, MappingProxyType({**self.params, **params}), target or current_target())
        self.check(made)
        return made

    def must_run_alone(self, what: str) -> None:
        """An error where `what` is asked of an op that runs over mesh axes, which one device has none of."""
        if self.mesh_axes is not None:
            raise rule_error(
                f"{what} runs an op on one device",
                f"{self.name}, which runs over mesh axes, inside shard_map",
                "time the program that it is part of; `capibara kernels compile` compiles it for a slice",
            )

    def case(self, name: str) -> Case:
        for case in self.cases:
            if case.name == name:
                return case
        raise unknown_name(f"case of {self.name}", name, [c.name for c in self.cases])


_REGISTRY: dict[str, Op] = {}


def register(op: Op) -> Op:
    """Make an op known by name: the CLI, the shared tests, tuning and benchmarks then all see it."""
    if op.name in _REGISTRY:
        raise rule_error("An op name is registered once", op.name, "choose another name, or `unregister` the first")
    if not op.implementations:
        raise rule_error("An op needs one implementation", f"{op.name} with none", "call op.implement(...) first")
    _REGISTRY[op.name] = op
    return op


def unregister(name: str) -> None:
    lookup(name)
    del _REGISTRY[name]


def registry() -> dict[str, Op]:
    """Every registered op by name: the families' own, those of installed packages, and what was registered here."""
    families.load()
    outside.load_entry_points()
    return dict(_REGISTRY)


def lookup(name: str) -> Op:
    """The op of this name, or the one that runs the public function of this name.

    >>> lookup("gemm").name, lookup("rms_norm").name
    ('gemm', 'norm')
    """
    ops = registry()
    if name in ops:
        return ops[name]
    behind = {function: op for op in ops.values() for function in op.functions}
    if name not in behind:
        raise unknown_name("op", name, [*ops, *behind])
    return behind[name]


def call_of(op: Op, arrays: Sequence[Any], params: Mapping[str, Hashable]) -> Call:
    """The call these arrays make, for the chip that dispatch would choose it for."""
    chosen = context.explicit_target()
    if chosen is None:
        for x in arrays:
            if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
                chosen = context.target_of(next(iter(x.devices())))
                break
    return op.call(*arrays, target=chosen, **params)
