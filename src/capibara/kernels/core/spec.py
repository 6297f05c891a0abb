"""What an op is made of: its calls as shapes, their cost, implementations, gradient, mesh rule, workloads.

`capibara.kernels.core.op` puts them together.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.kernels.core.context import Target, current_interpret

if TYPE_CHECKING:
    from capibara.kernels.core.op import Op

Operand = jax.ShapeDtypeStruct | None
Config = Any  # a frozen dataclass of one implementation's tuning choices
_UNSAID: Any = None  # a default that follows from other fields

FLOATS = ("bfloat16", "float16", "float32", "float64")
"""The types that an op takes which says nothing else."""

_SHORT_DTYPES = {"bfloat16": "bf16", "float32": "f32", "float64": "f64", "float16": "f16", "int32": "i32"}


def short_dtype(dtype: Any) -> str:
    name = np.dtype(dtype).name
    return _SHORT_DTYPES.get(name, name)


def describe(x: Operand | jax.Array) -> str:
    """`bf16[4096,1024]`, the way every message and table writes an operand."""
    return "-" if x is None else f"{short_dtype(x.dtype)}[{','.join(map(str, x.shape))}]"


def nbytes(x: Operand) -> int:
    """What an operand takes of memory; an absent one nothing."""
    return 0 if x is None else x.size * np.dtype(x.dtype).itemsize


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """The work a call cannot avoid: operations, and bytes moved if each operand is touched once.

    Rooflines, the planner and the profiler read it; two costs add up.

    Attributes:
      matrix_flops: floating point operations of matrix products, a multiplication and an addition being two.
      vector_flops: all other operations: elementwise work, sums, scans.
      bytes: read from the device's memory and written to it, every operand and result once.
      dtype: which of the chip's peak rates the products run at: "bfloat16", "float32", ...
      link_bytes: what one device sends to others.
    """

    matrix_flops: float = 0.0
    vector_flops: float = 0.0
    bytes: float
    dtype: str = "bfloat16"
    link_bytes: float = 0.0

    @property
    def flops(self) -> float:
        """Of the matrix and the vector units together."""
        return self.matrix_flops + self.vector_flops

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            matrix_flops=self.matrix_flops + other.matrix_flops,
            vector_flops=self.vector_flops + other.vector_flops,
            bytes=self.bytes + other.bytes,
            dtype=self.dtype,
            link_bytes=self.link_bytes + other.link_bytes,
        )


@dataclasses.dataclass(frozen=True)
class CallEfficiency:
    """How near a chip's peaks a call comes, where the op knows it better than the chip's own row.

    Attributes:
      matrix: share of the matrix peak that its products reach; None for the chip's own.
      filled: share of the matrix units' work that is not padding, or whole blocks of which a mask leaves a part.
      memory: share of the bandwidth, relative to what kernels reach on this chip.
      seconds: what it takes beside that, whatever the rates: work that no product hides.
      source: where the figures come from: "measured: ..." on this chip, else "predicted: ...".
    """

    matrix: float | None = None
    filled: float = 1.0
    memory: float = 1.0
    seconds: float = 0.0
    source: str = "predicted: the chip's own factors"


@dataclasses.dataclass(frozen=True)
class TimeTerms:
    """What one implementation's time at a call is made of; `capibara.kernels.core.times` adds it up.

    Attributes:
      terms: quantities by name: a launch, bytes, the busiest core's share of the work. The time is their sum, each
        times a coefficient that was fitted to runs.
      sizes: the numbers by which a call lies inside of what was run, or outside.
      words: what sort of call it is: types, masks, kinds. The model speaks where it was fitted on every one of them.
    """

    terms: Mapping[str, float]
    sizes: Mapping[str, float]
    words: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute an op; `op.implement(...)` adds it.

    Attributes:
      name: what `implementation=` asks for it by.
      fn: `fn(*arrays, **params)`, with the op's operands in their order (None for an absent one) and every parameter;
        with `config=` too where there is a `config_type`.
      platforms: where it runs, of "cpu", "gpu" and "tpu". One for "tpu" alone also runs on a CPU inside `interpret()`.
      refuses: `Call` -> why it cannot take that call, in words, or None. It is asked before anything runs.
      ahead_of: the implementations of its op that it goes before where both accept and no tuned table speaks: their
        names, or `Call` -> their names, which is a rule learnt by runs. None leaves it to the chip's table of evidence,
        and where that has no row of it, to the order in which implementations were added: the first that accepts runs.
      remark: `Call` -> in words what `ahead_of` goes by, where that is more than the platform; `explain` shows it.
      beyond_evidence: `Call` -> why the cases that were timed or compiled say nothing of this call, or None.
      kernel: `fn` is opaque to JAX (Pallas, a custom call): the op's own gradient, batching and partitioning rules
        stand in. Anything else is plain JAX, which JAX differentiates and XLA partitions.
      own_gradient: plain JAX whose derivative by JAX would keep too much: XLA partitions it, and the op's gradient and
        batching rules are used.
      needs_local_types: plain JAX whose loops do not trace where types say how arrays are split, on mesh axes of type
        Explicit: there it runs on each device's part, by the op's mesh rule, as a kernel does.
      hints: the op's hints that `fn` takes; the others are not passed on to it.
      same_bits: two runs on the same operands give the same bits.
      config_type: a frozen dataclass of what can be tuned (tiles, stages); None when there is nothing.
      candidates: `Call` -> the configs that tuning tries, best predicted first.
      default_config: `Call` -> the config that runs where none was tuned; by default the first candidate.
      for_call: (config, `Call`) -> what a config that was tuned for a near call is for this one: what hangs on how many
        tiles there are, and not on what a tile is, is the call's own.
    """

    name: str
    fn: Callable[..., Any]
    platforms: tuple[str, ...] = ("cpu", "gpu", "tpu")
    refuses: Callable[[Call], str | None] = lambda call: None
    ahead_of: Collection[str] | Callable[[Call], Collection[str]] | None = None
    remark: Callable[[Call], str | None] = lambda call: None
    beyond_evidence: Callable[[Call], str | None] = lambda call: None
    kernel: bool = False
    own_gradient: bool = False
    needs_local_types: bool = False
    hints: tuple[str, ...] = ()
    same_bits: bool = True
    config_type: type | None = None
    candidates: Callable[[Call], Sequence[Config]] = lambda call: (None,)
    default_config: Callable[[Call], Config] = _UNSAID
    for_call: Callable[[Any, Call], Config] = lambda config, call: config

    def __post_init__(self) -> None:
        if self.default_config is _UNSAID:
            object.__setattr__(self, "default_config", lambda call: self.candidates(call)[0])

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


def unit_roundoff(dtype: Any) -> float:
    """The largest relative error of rounding a number to `dtype`; 0 for what is not a float."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return 0.0
    return float(jnp.finfo(dtype).eps) / 2


DRAWN_ON_HOST = 1 << 20


def standard_normal(shape: Sequence[int], dtype: Any, seed: Sequence[int]) -> jax.Array:
    """Random numbers on the default device; drawn on the host when few, to spare compiling the draw."""
    if np.prod(shape) <= DRAWN_ON_HOST:
        return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32)).astype(dtype)
    key = jax.random.key(seed[0])
    for number in seed[1:]:
        key = jax.random.fold_in(key, number)
    return jax.random.normal(key, shape, jnp.float32).astype(dtype)
