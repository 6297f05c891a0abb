"""What an op is.

An op is one object made of a reference in plain JAX (its specification), implementations that each say which
calls they take and why they refuse the others, a gradient, a cost, and the workload shapes that tests, tuning,
benchmarks and TPU compilation all read. `capibara.kernels.dispatch` chooses among the implementations.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.errors import rule_error, unknown_name
from capibara.kernels.context import Target, current_interpret, current_target

Operand = jax.ShapeDtypeStruct | None
Config = Any  # a frozen dataclass of one implementation's tuning choices

_SHORT_DTYPES = {"bfloat16": "bf16", "float32": "f32", "float64": "f64", "float16": "f16", "int32": "i32"}


def short_dtype(dtype: Any) -> str:
    name = np.dtype(dtype).name
    return _SHORT_DTYPES.get(name, name)


def describe(x: Operand | jax.Array) -> str:
    """`bf16[4096,1024]`, the way every message and table writes an operand."""
    return "-" if x is None else f"{short_dtype(x.dtype)}[{','.join(map(str, x.shape))}]"


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of an op as shapes: what selection, cost and tolerance reason about.

    `call["x"]` is an operand by its name, None when it is absent; `call.need("x")` one that is always there.

    Attributes:
      op: whose call it is.
      args: an entry an operand of the op, in its order: a `jax.ShapeDtypeStruct`, or None for an absent one.
      params: every parameter of the op by name, the defaults filled in.
      target: the chip that it is for: `platform` and `device_kind`.
    """

    op: Op
    args: tuple[Operand, ...]
    params: Mapping[str, Hashable]
    target: Target

    def __getitem__(self, operand: str) -> Operand:
        return self.args[self.op.operands.index(operand)]

    def need(self, operand: str) -> jax.ShapeDtypeStruct:
        found = self[operand]
        assert found is not None, operand  # the op's check has seen to it
        return found

    @property
    def changed_params(self) -> dict[str, Hashable]:
        """The parameters that differ from the op's defaults. Hints, which change no result, are left out."""
        return {k: v for k, v in sorted(self.specified.items()) if v != self.op.params[k]}

    @property
    def specified(self) -> dict[str, Hashable]:
        """The parameters that the reference takes: all but the hints."""
        return {k: v for k, v in self.params.items() if k not in self.op.hints}

    @property
    def tuning_key(self) -> dict[str, Hashable]:
        """The changed parameters that a tuned table tells calls apart by."""
        return {k: v for k, v in self.changed_params.items() if k not in self.op.untuned}

    @property
    def signature(self) -> str:
        operands = " ".join(map(describe, self.args))
        changed = " ".join(f"{k}={v}" for k, v in self.changed_params.items())
        return f"{operands} {changed}".rstrip()

    def __str__(self) -> str:
        return f"{self.op.name}({self.signature})"


@dataclasses.dataclass(frozen=True)
class Cost:
    """The work a call cannot avoid: operations, and bytes moved if each operand is touched once.

    Rooflines, the planner and the profiler read it; two costs add up.

    Attributes:
      flops: floating point operations, a multiplication and an addition being two.
      bytes: read from the device's memory and written to it, every operand and result once.
      dtype: which of the chip's peak rates the flops run at: "bfloat16", "float32", ...
      link_bytes: what one device sends to others.
    """

    flops: float
    bytes: float
    dtype: str = "bfloat16"
    link_bytes: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        links = self.link_bytes + other.link_bytes
        return Cost(self.flops + other.flops, self.bytes + other.bytes, self.dtype, links)


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute an op; `op.implement(...)` adds it.

    Attributes:
      name: what `implementation=` asks for it by.
      fn: `fn(*arrays, **params)`, with the op's operands in their order (None for an absent one) and every parameter;
        with `config=` too where there is a `config_type`.
      platforms: where it runs, of "cpu", "gpu" and "tpu". One for "tpu" alone also runs on a CPU inside `interpret()`.
      refuses: `Call` -> why it cannot take that call, in words, or None. It is asked before anything runs.
      rank: `Call` -> a number; where no tuned table speaks, the highest of those that accept runs.
      remark: `Call` -> in words what the rank goes by, where that is more than the platform; `explain` shows it.
      kernel: `fn` is opaque to JAX (Pallas, a custom call): the op's own gradient, batching and partitioning rules
        stand in. Anything else is plain JAX, which JAX differentiates and XLA partitions.
      own_gradient: plain JAX whose derivative by JAX would keep too much: XLA partitions it, and the op's gradient and
        batching rules are used.
      needs_local_types: plain JAX whose loops do not trace where types say how arrays are split, on mesh axes of type
        Explicit: there it runs on each device's part, by the op's mesh rule, as a kernel does.
      hints: the op's hints that `fn` takes; the others are not passed on to it.
      same_bits: two runs on the same operands give the same bits.
      config_type: a frozen dataclass of what can be tuned (tiles, stages); None when there is nothing.
      default_config: `Call` -> the config that runs where none was tuned.
      candidates: `Call` -> the configs that tuning tries, best predicted first.
    """

    name: str
    fn: Callable[..., Any]
    platforms: tuple[str, ...] = ("cpu", "gpu", "tpu")
    refuses: Callable[[Call], str | None] = lambda call: None
    rank: Callable[[Call], float] = lambda call: 0.0
    remark: Callable[[Call], str | None] = lambda call: None
    kernel: bool = False
    own_gradient: bool = False
    needs_local_types: bool = False
    hints: tuple[str, ...] = ()
    same_bits: bool = True
    config_type: type | None = None
    default_config: Callable[[Call], Config] = lambda call: None
    candidates: Callable[[Call], Sequence[Config]] = lambda call: (None,)

    def refusal(self, call: Call) -> str | None:
        """Why this implementation does not take the call; None when it does."""
        platform = call.target.platform
        if platform not in self.platforms:
            emulated = platform == "cpu" and "tpu" in self.platforms
            if not emulated:
                return f"it is for {' and '.join(self.platforms)}; this call is for {platform}"
            if current_interpret().mode == "off":
                return "it is for tpu; this call is for cpu (capibara.kernels.interpret() would emulate it)"
        return self.refuses(call)


@dataclasses.dataclass(frozen=True)
class Preference:
    """What a call runs on, handed to the op's own rules, which pass it on to the ops that they call.

    The implementation is taken where it accepts. A `config` is one that the caller asked for: it holds for the ops
    that have this op's name, and there a refusal is an error, since another implementation has other choices.
    """

    op: str
    implementation: str
    config: Config = None


Prefer = Preference | str | None
"""A preference; a name alone has no config. None leaves the choice to dispatch."""


@dataclasses.dataclass(frozen=True)
class Gradient:
    """How a kernel is differentiated: JAX's custom_vjp pair, in terms of ops.

    Both pass `prefer`, a `Preference` or None, on to the ops that they call. It holds the implementation that the
    caller asked for and, in the forward pass, the config; the backward pass, whose shapes are others, chooses its own
    configs.

    Attributes:
      forward: `forward(op, arrays, params, prefer)` -> (output, residuals).
      backward: `backward(residuals, cotangent, params, prefer)` -> one cotangent for each operand (None for an absent
        one).
    """

    forward: Callable[..., tuple[Any, Any]]
    backward: Callable[..., tuple[Any, ...]]


# What most rules call the batch or the first axis of the rows, the rows' second axis, and the heads.
_COMMON_FACTORS = MappingProxyType({"b": "batch", "r0": "batch", "r1": "sequence", "h": "heads"})


@dataclasses.dataclass(frozen=True)
class Partition:
    """How a kernel is split over a mesh.

    Attributes:
      rule: `Call` -> an einsum-like line over the operands that are present, e.g. "m k, k n -> m n"; `(h g)` is one
        axis made of two factors.
      reduced: the factors that are summed away.
      combine: `combine(op, arrays, params, axes, prefer)`, where a reduced factor is sharded: the local part, reduced
        over the mesh axes.
      replicated: `Call` -> the factors that no device may hold a part of.
      sizes: `Call` -> the sizes of factors that no axis shows, by name.
      local: `local(op, arrays, params, axes, prefer)`: one device's part, where the plain call on its shards is not all
        there is to do; `axes` maps each factor to the mesh axes that split it.
      logical: which logical axis a factor is, for TPU meshes whose layout XLA decides only later; empty where nobody
        can tell.
    """

    rule: Callable[[Call], str]
    reduced: tuple[str, ...] = ()
    combine: Callable[..., Any] | None = None
    replicated: Callable[[Call], tuple[str, ...]] = lambda call: ()
    sizes: Callable[[Call], Mapping[str, int]] = lambda call: {}
    local: Callable[..., Any] | None = None
    logical: Mapping[str, str] = dataclasses.field(default_factory=lambda: _COMMON_FACTORS)

    def factors(self, call: Call) -> tuple[list[list[tuple[str, ...]]], list[list[tuple[str, ...]]]]:
        """The rule read: for each present operand, and each output, the factors of each of its axes."""

        def read(side: str) -> list[list[tuple[str, ...]]]:
            terms = (re.findall(r"\([^)]*\)|\w+", term) for term in side.split(","))
            return [[tuple(axis.strip("()").split()) for axis in term] for term in terms]

        left, right = self.rule(call).split("->")
        return read(left), read(right)


@dataclasses.dataclass(frozen=True)
class Case:
    """A workload: operand shapes and parameters, listed once and read by tests, tuning, benchmarks, compilation.

    `case.arrays()` draws the operands, `case.args()` gives their shapes alone.

    Attributes:
      name: what `--case` asks for it by.
      shapes: an entry an operand, in the op's order; None for an absent one.
      dtype: of the operands.
      params: those parameters of the op that are not at their default.
      tags: who reads it: "test" (small and hostile), "shard" (divides over 32 devices), "bench", "tune", "tpu"
        (compiled for TPU), "gpu" (lowered for GPU).
      dtypes: of operands that have another type (masks, ids, seeds), by position.
      draw: `draw(generator, shape)` for operands that are not standard normal numbers, by position.
      complete: `complete(arrays)` -> the arrays with those filled in that follow from the others, such as what a
        forward pass returned.
    """

    name: str
    shapes: tuple[tuple[int, ...] | None, ...]
    dtype: str = "bfloat16"
    params: Mapping[str, Hashable] = dataclasses.field(default_factory=dict)
    tags: frozenset[str] = frozenset()
    dtypes: Mapping[int, str] = dataclasses.field(default_factory=dict)
    draw: Mapping[int, Callable[[np.random.Generator, tuple[int, ...]], Any]] = dataclasses.field(default_factory=dict)
    complete: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None = None

    def args(self) -> tuple[Operand, ...]:
        return tuple(
            None if s is None else jax.ShapeDtypeStruct(s, jnp.dtype(self.dtypes.get(i, self.dtype)))
            for i, s in enumerate(self.shapes)
        )

    def arrays(self, seed: int = 0) -> tuple[jax.Array | None, ...]:
        """The operands, standard normal unless `draw` says otherwise; a different draw for each operand and seed."""
        from capibara.kernels.check import standard_normal

        def drawn(index: int, shape: tuple[int, ...]) -> jax.Array:
            dtype = jnp.dtype(self.dtypes.get(index, self.dtype))
            if index in self.draw:
                return jnp.asarray(self.draw[index](np.random.default_rng((seed, index)), shape), dtype)
            return standard_normal(shape, dtype, (seed, index))

        made = tuple(None if s is None else drawn(i, s) for i, s in enumerate(self.shapes))
        return made if self.complete is None else self.complete(made)


@dataclasses.dataclass(frozen=True)
class Excerpt:
    """A part of a call that does not depend on the rest: what is checked where the whole would take too long.

    Attributes:
      arrays: the part's operands.
      outputs: cuts the same part out of the flat list of outputs that the whole call returns.
      gradients: cuts the same part out of the flat list of gradients.
      what: which part it is, in words.
    """

    arrays: tuple[Any, ...]
    outputs: Callable[[Sequence[Any]], list[Any]]
    gradients: Callable[[Sequence[Any]], list[Any]]
    what: str


def _compiler_cost(call: Call) -> Cost:
    """The reference's own flops and bytes, by XLA's count: the default cost of a user's op."""
    present = [x for x in call.args if x is not None]

    def reference(*arrays: Any) -> Any:
        given = iter(arrays)
        full = [None if x is None else next(given) for x in call.args]
        return call.op.reference(*full, **call.specified)

    counted = jax.jit(reference).lower(*present).cost_analysis() or {}
    dtype = np.dtype(present[0].dtype).name if present else "float32"
    return Cost(float(counted.get("flops", 0.0)), float(counted.get("bytes accessed", 0.0)), dtype)


def unit_roundoff(dtype: Any) -> float:
    """The largest relative error of rounding a number to `dtype`; 0 for what is not a float."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return 0.0
    return float(jnp.finfo(dtype).eps) / 2


def _output_rounding(call: Call) -> float:
    """Default tolerance: a few roundings in the widest-error operand type."""
    return 8 * max((unit_roundoff(x.dtype) for x in call.args if x is not None), default=0.0)


class Op:
    """A named operation with a specification and any number of implementations. Calling it dispatches.

    `vishwamai.kernels.tpu.register_tpu_op` makes one of a function by its signature; this is the long form. Then
    `op.implement(Implementation(...))` adds a way to compute it, and `register(op)` makes it known by name.

    >>> plain = lambda x, *, times: x / 2**times
    >>> op = Op("halved", family="mine", reference=plain, operands=("x",), params={"times": 1})
    >>> _ = op.implement(Implementation("xla", lambda x, *, times: x * 0.5**times))
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
        self.tolerance = tolerance
        self.gradient = gradient
        self.batch = batch
        self.partition = partition
        self.cases = tuple(cases)
        self.remark = remark
        self.public = public
        self.peers = MappingProxyType(dict(peers or {}))
        self.stock_tpu = stock_tpu
        self.excerpt = excerpt
        self.exact = exact
        self.mesh_axes = mesh_axes
        self.implementations: dict[str, Implementation] = {}
        self.runners: dict[Any, Any] = {}  # filled by dispatch
        self.__doc__ = reference.__doc__

    def __repr__(self) -> str:
        return f"<op {self.name}: {', '.join(self.implementations)}>"

    def __call__(
        self, *arrays: Any, implementation: str | None = None, config: Config = None, **params: Hashable
    ) -> Any:
        from capibara.kernels.dispatch import run

        return run(self, arrays, params, implementation=implementation, config=config)

    def implement(self, implementation: Implementation) -> Implementation:
        """Add an implementation; a name is taken once."""
        if implementation.name in self.implementations:
            raise rule_error(
                f"An implementation name is used once in op {self.name!r}",
                implementation.name,
                "choose another name",
            )
        self.implementations[implementation.name] = implementation
        self.runners.clear()
        return implementation

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
    from capibara.kernels import families, outside

    families.load()
    outside.load_entry_points()
    return dict(_REGISTRY)


def lookup(name: str) -> Op:
    ops = registry()
    if name not in ops:
        raise unknown_name("op", name, ops)
    return ops[name]
