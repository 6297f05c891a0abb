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
    """One call of an op as shapes: what selection, cost and tolerance reason about."""

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
    """The work a call cannot avoid: operations, and bytes moved if each operand is touched once."""

    flops: float
    bytes: float
    dtype: str = "bfloat16"  # which of the chip's peak rates the flops run at
    link_bytes: float = 0.0  # what one device sends to others

    def __add__(self, other: Cost) -> Cost:
        links = self.link_bytes + other.link_bytes
        return Cost(self.flops + other.flops, self.bytes + other.bytes, self.dtype, links)


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute an op.

    `fn(*arrays, config=..., **params)` computes it. `refuses(call)` returns why it cannot take the call, or
    None. `rank(call)` orders those that accept where no tuned table speaks; `remark(call)` says in words what the rank
    goes by, where that is more than the platform, and `explain` shows it. A `kernel` is opaque to JAX's
    transformations, so the op's own gradient, batching and partitioning rules stand in; anything else is
    plain JAX that XLA differentiates and partitions itself. With `own_gradient`, XLA partitions it but the op's
    gradient and batching rules are used: for plain JAX whose derivative by JAX would keep too much. `hints` names
    the op's hints that `fn` takes; the others are not passed on.
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
    """Plain JAX whose loops do not trace where types say how arrays are split, on mesh axes of type Explicit: there it
    runs on each device's part, by the op's mesh rule, as a kernel does."""
    hints: tuple[str, ...] = ()
    same_bits: bool = True
    """Two runs on the same operands give the same bits."""
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

    `forward(op, arrays, params, prefer)` returns (output, residuals); `backward(residuals, cotangent, params,
    prefer)` returns one cotangent for each operand (None for an absent one). Both pass `prefer`, a `Preference` or
    None, on to the ops that they call. It holds the implementation that the caller asked for and, in the forward
    pass, the config; the backward pass, whose shapes are others, chooses its own configs.
    """

    forward: Callable[..., tuple[Any, Any]]
    backward: Callable[..., tuple[Any, ...]]


# What most rules call the batch or the first axis of the rows, the rows' second axis, and the heads.
_COMMON_FACTORS = MappingProxyType({"b": "batch", "r0": "batch", "r1": "sequence", "h": "heads"})


@dataclasses.dataclass(frozen=True)
class Partition:
    """How a kernel is split over a mesh.

    `rule(call)` is an einsum-like line over the operands that are present, e.g. "m k, k n -> m n";
    `(h g)` is one axis made of two factors, whose `sizes(call)` gives what no axis shows. `reduced` names the
    factors that are summed away; when such a factor is sharded, `combine(op, arrays, params, axes, prefer)`
    computes the local part and reduces it over the mesh axes. `replicated(call)` names the factors that no device
    may hold a part of. `local(op, arrays, params, axes, prefer)` computes one device's part where the plain call
    on its shards is not all there is to do; `axes` maps each factor to the mesh axes that split it. `logical` says
    which logical axis a factor is, for TPU meshes whose layout XLA decides only later; empty where nobody can tell.
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

    `dtypes` and `draw(generator, shape)` are for the operands, by position, that are not standard normal numbers
    of `dtype`: masks, ids, seeds. `complete(arrays)` computes those that follow from the others, such as what a
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

    `outputs` and `gradients` cut the same part out of the flat lists that the whole call returns.
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
    """A named operation with a specification and any number of implementations. Calling it dispatches."""

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
        self.hints = frozenset(hints)  # parameters that say how, and never change what is computed
        self.untuned = frozenset(untuned)  # parameters that do not change which implementation is fastest
        self.check = check
        self.cost = cost
        self.tolerance = tolerance
        self.gradient = gradient
        self.batch = batch
        self.partition = partition
        self.cases = tuple(cases)
        self.public = public  # the documented function in front of the op, where there is one
        # What a user would run without this library: for benchmarks, a function of the case's arrays (None where it
        # does not apply); for TPU compilation, jax's own Pallas program for the same work with its arguments.
        self.peers = MappingProxyType(dict(peers or {}))
        self.stock_tpu = stock_tpu
        self.excerpt = excerpt
        # Of the operands' shapes by name, what a tuned case must have alike to speak for a call that is near it.
        self.exact = exact
        # For an op that runs only inside shard_map, on one device's operands: the mesh axes that a call is over.
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
