"""einsum by pairwise contractions that run as gemm, in a bounded amount of memory when asked."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara import hardware
from capibara import precision as precisions
from capibara.errors import rule_error
from capibara.kernels.core import tables, varying
from capibara.kernels.core.context import current_target
from capibara.kernels.core.operands import as_array
from capibara.kernels.ops.linalg.contraction import Chunks, Plan, Step, chunked, plan, reduced_term
from capibara.kernels.ops.linalg.gemm.rules import LAX_PRECISIONS
from capibara.kernels.ops.linalg.pairwise import How, contract_pair, plain
from capibara.kernels.ops.linalg.placement import on_their_device

MEMORY_FRACTION = 4
"""By default an intermediate may take one part in so many of the device's memory."""


def contract(
    equation: str,
    *operands: Any,
    optimize: str | bool = "optimal",
    memory_efficient: bool = False,
    memory_limit_bytes: int | None = None,
    precision: str | None = None,
) -> jax.Array:
    """`jnp.einsum(equation, *operands)`, each matrix product in it by the fastest gemm that takes it.

    Args:
      equation: einsum's, with `...`, an implicit output, repeated indices (diagonals) and axes of one
        element, which are broadcast.
      optimize: the order of contraction: "optimal" (of every order; slow beyond eight operands), "greedy",
        "auto" (by the number of operands), True ("optimal"), or False (left to right).
      memory_efficient: when a step's result is larger than the limit, loop over one index of the output, a
        chunk at a time, so that no step's result is. The gradient recomputes a chunk and does not keep it.
        Counted are the results of steps, as if on one device; the output as a whole is not, since it has to
        exist, nor is a copy that puts an operand's axes in order.
      memory_limit_bytes: that limit; by default a quarter of the device's memory.
      precision: as gemm's.

    >>> q = jnp.ones((2, 4, 8, 16)); k = jnp.ones((2, 4, 9, 16))
    >>> contract("bhnd,bhkd->bhnk", q, k).shape
    (2, 4, 8, 9)
    """
    how = How(precision=precision)
    return contract_as(equation, operands, how, optimize, memory_limit(memory_efficient, memory_limit_bytes))


def contract_as(
    equation: str,
    operands: tuple[Any, ...],
    how: How,
    optimize: str | bool,
    limit: int | None,
    compiled: bool = True,
) -> jax.Array:
    """`contract` with each product run as `how` says; step by step if not `compiled` and not traced."""
    arrays = tuple(as_array("einsum", f"operand {i}", x) for i, x in enumerate(operands))
    how = typed(how, arrays)
    made = planned(equation, arrays, how, optimize, limit)
    if not compiled:
        return _execute(arrays, made, how)
    with on_their_device(arrays):
        return _compiled(arrays, made, how, tables.generation())


def typed(how: How, operands: tuple[Any, ...]) -> How:
    """Every step gives the type of the whole, as in jnp: the policy's, else what all operands promote to."""
    if not operands:
        raise rule_error("An einsum has one operand or more", "none", 'write contract("ij,jk->ik", a, b)')
    if how.out_dtype is not None:
        return how
    floating = all(jnp.issubdtype(x.dtype, jnp.floating) for x in operands)
    if floating and how.precision is not None and how.precision not in LAX_PRECISIONS:
        return dataclasses.replace(how, out_dtype=precisions.policy(how.precision).output_dtype)
    return dataclasses.replace(how, out_dtype=np.dtype(jnp.result_type(*operands)).name)


def planned(equation: str, operands: tuple[Any, ...], how: How, optimize: str | bool, limit: int | None) -> Plan:
    whole = plan(equation, tuple(tuple(x.shape) for x in operands), optimize)
    return whole if limit is None else chunked(whole, np.dtype(how.out_dtype).itemsize, limit)


def memory_limit(memory_efficient: bool, asked: int | None) -> int | None:
    """The bytes that a step's result may take; None for no limit."""
    if asked is not None and not memory_efficient:
        raise rule_error(
            "memory_limit_bytes is what memory_efficient keeps to",
            f"memory_limit_bytes={asked} with memory_efficient=False",
            "pass memory_efficient=True too",
        )
    if not memory_efficient:
        return None
    if asked is not None:
        if asked <= 0:
            raise rule_error("memory_limit_bytes is a positive number of bytes", asked, "pass e.g. 2**30")
        return int(asked)
    return _device_memory() // MEMORY_FRACTION


def _device_memory() -> int:
    target = current_target()
    if target.platform == "cpu":
        return hardware.host_memory_bytes()
    attached = hardware.default()
    if attached.device_kind == target.device_kind and attached.memory_limit_bytes is not None:
        return attached.memory_limit_bytes
    chip = hardware.chip_for(target.device_kind)
    if chip is None:
        raise rule_error(
            "The default limit is a quarter of the device's memory, which has to be known",
            f"a {target.device_kind}, whose memory is not",
            "pass memory_limit_bytes",
        )
    return chip.capacity_bytes


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _compiled(operands: tuple[Any, ...], made: Plan, how: How, tuned: int) -> jax.Array:
    # `tuned` is part of jit's key: a choice that was traced before a table changed is made again.
    return _execute(operands, made, how)


def _execute(operands: tuple[Any, ...], made: Plan, how: How) -> jax.Array:
    values: dict[int, Any] = {
        number: jnp.squeeze(x, gone) if gone else x
        for number, (x, gone) in enumerate(zip(operands, made.squeezed, strict=True))
    }
    first = len(operands)
    chunks = made.chunks
    if chunks is None:
        for number, step in enumerate(made.steps, first):
            values[number] = _run(step, values, how)
        return values[number]
    # What the index takes no part in is computed once, in front of the loop.
    inside = [(number, step) for number, step in enumerate(made.steps, first) if chunks.label in step.result]
    for number, step in enumerate(made.steps, first):
        if chunks.label not in step.result:
            values[number] = _run(step, values, how)
    return _loop(inside, values, chunks, how)


def _loop(inside: list[tuple[int, Step]], values: dict[int, Any], chunks: Chunks, how: How) -> jax.Array:
    made_inside = {number for number, _ in inside}
    terms = {n: t for _, step in inside for n, t in zip(step.inputs, step.terms, strict=True)}
    held = {number: values[number] for number in terms if number not in made_inside}

    # Recomputed in the backward pass: kept, the intermediates of all chunks are what was to be avoided.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def part(start: Any, held: dict[int, Any]) -> jax.Array:
        local = dict(held)
        for number in held:
            for axis, label in enumerate(terms[number]):
                if label == chunks.label:
                    local[number] = jax.lax.dynamic_slice_in_dim(local[number], start, chunks.size, axis)
        for number, step in inside:
            local[number] = _run(step, local, how)
        return local[number]

    _, last = inside[-1]
    axis = last.result.index(chunks.label)
    struct = jax.eval_shape(part, jnp.int32(0), held)
    empty = jnp.zeros(last.shape, struct.dtype)
    (empty, *_) = varying.vary_alike((empty, *held.values()))

    def body(out: jax.Array, start: Any) -> tuple[jax.Array, None]:
        return jax.lax.dynamic_update_slice_in_dim(out, part(start, held), start, axis), None

    # The last chunk starts early enough to be whole, and writes what it shares with the one before it again.
    starts = np.minimum(np.arange(chunks.count) * chunks.size, chunks.length - chunks.size).astype(np.int32)
    out, _ = jax.lax.scan(body, empty, starts)
    return out


def _run(step: Step, values: dict[int, Any], how: How) -> jax.Array:
    if len(step.inputs) == 1:
        return _reduced(values[step.inputs[0]], step.terms[0], step.result, how.out_dtype)
    left, right = (
        _reduced(values[number], step.terms[i], reduced_term(i, step), None) for i, number in enumerate(step.inputs)
    )
    return contract_pair(left, reduced_term(0, step), right, reduced_term(1, step), step.result, how)


def _reduced(x: Any, term: str, wanted: str, out_dtype: str | None) -> Any:
    """One operand's own diagonals, sums and permutations; sums of narrow floats are kept in float32."""
    out = np.dtype(out_dtype or x.dtype)
    if term == wanted:
        return x if x.dtype == out else x.astype(out)
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    wide = jnp.promote_types(x.dtype, jnp.float32) if floating and set(term) != set(wanted) else x.dtype
    return plain(f"{term}->{wanted}", (x.astype(wide),), How()).astype(out)


@dataclasses.dataclass(frozen=True)
class PathReport:
    """What `contract` would do, in words and as data."""

    equation: str
    steps: tuple[Step, ...]
    flops: float
    largest_intermediate_bytes: int
    """Of the steps before the last, as they run: with chunks, of one chunk; 0 with no such step."""
    output_bytes: int
    chunks: int
    chunked_index: str | None
    memory_limit_bytes: int | None

    def __str__(self) -> str:
        counted = f"{len(self.steps)} step{'s' if len(self.steps) != 1 else ''}"
        lines = [f"{self.equation}: {counted}, {self.flops:.4g} flops"]
        lines += [
            f"  {i}. {step.equation} by {step.by}, {step.flops:.4g} flops, result {list(step.shape)}"
            for i, step in enumerate(self.steps, 1)
        ]
        largest, output = self.largest_intermediate_bytes, self.output_bytes
        lines.append(f"  largest intermediate {largest:,} bytes, output {output:,} bytes")
        if self.memory_limit_bytes is not None:
            cut = f"{self.chunks} chunks along {self.chunked_index!r}" if self.chunked_index else "no chunks needed"
            lines.append(f"  limit {self.memory_limit_bytes:,} bytes a step: {cut}")
        return "\n".join(lines)


def path_report(
    equation: str,
    *operands: Any,
    optimize: str | bool = "optimal",
    memory_efficient: bool = False,
    memory_limit_bytes: int | None = None,
    precision: str | None = None,
) -> PathReport:
    """Steps, flops, largest intermediate and chunks of `contract` with these arguments; nothing is computed.

    Operands are arrays or `jax.ShapeDtypeStruct`s.

    >>> x = jax.ShapeDtypeStruct((4, 8), "float32"); y = jax.ShapeDtypeStruct((8, 16), "float32")
    >>> path_report("ij,jk->ik", x, y).flops
    1024.0
    """
    limit = memory_limit(memory_efficient, memory_limit_bytes)
    how = typed(How(precision=precision), operands)
    made = planned(equation, operands, how, optimize, limit)
    chunks, item = made.chunks, np.dtype(how.out_dtype).itemsize

    def as_run(step: Step) -> int:
        shares = chunks is not None and chunks.label in step.result
        of = chunks.size / chunks.length if chunks is not None and shares else 1.0
        return round(item * math.prod(step.shape) * of)

    return PathReport(
        equation=equation,
        steps=made.steps,
        flops=sum(step.flops for step in made.steps),
        largest_intermediate_bytes=max(map(as_run, made.steps[:-1]), default=0),
        output_bytes=item * math.prod(made.steps[-1].shape),
        chunks=1 if chunks is None else chunks.count,
        chunked_index=None if chunks is None else chunks.label,
        memory_limit_bytes=limit,
    )
