"""A job: the program to plan, the shapes it is called with, and what may be turned about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from capibara.errors import rule_error, unknown_name
from capibara.program.argument_roles import argument_roles, is_key, token_arrays

__all__ = ["ROLES", "Job", "leaf_roles", "program_job"]

ROLES = ("params", "state", "batch", "other")
"""What an argument can be: "state" is the optimizer's and laid out like the parameters."""


def _nothing() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclass(frozen=True)
class Job:
    """A function of arrays and the shapes of its arguments, for each choice of its knobs.

    `build(**choices)` returns (function, arguments); the arguments' leaves have a shape and a dtype.
    """

    build: Callable[..., tuple[Callable[..., Any], tuple[Any, ...]]]
    roles: tuple[str, ...]
    """Of each argument: one of `ROLES`."""
    donate: tuple[int, ...] = ()
    """Arguments whose memory the outputs take over."""
    tokens: int | None = None
    """Tokens (or examples, by `unit`) of one step, for tokens a second and dollars a billion."""
    knobs: Mapping[str, tuple[Any, ...]] = field(default_factory=_nothing)
    """Name -> the values to try, the first being the one to take when nothing speaks against it."""
    name: str = ""
    beyond: Mapping[str, tuple[Any, ...]] = field(default_factory=_nothing)
    """Name -> values that `build` takes as well and that nobody asked to try: for a job that does not fit."""
    smaller: Mapping[str, Callable[[], Job]] = field(default_factory=_nothing)
    """In words ("half the batch") -> the job changed so: for a job that does not fit."""
    not_smaller: Mapping[str, str] = field(default_factory=_nothing)
    """In words -> what the program says to a change of that kind, which it does not take."""
    notes: tuple[str, ...] = ()
    """What was assumed about the program."""
    staged: Callable[..., tuple[Callable[..., Any], tuple[Any, ...]]] | None = None
    """`staged(microbatches, **choices)` is what `build` returns, with its layers as a pipeline of the mesh's stages: in
    place of `accumulate` microbatches one after another, so many that follow each other through the stages."""
    why_no_stages: Callable[[], str] = lambda: "only a training job (loss and optimizer apart) can run as a pipeline"
    """Why the program cannot run as a pipeline; "" where it can. It takes a look at the program."""
    unit: str = "tokens"
    """What `tokens` counts: "tokens" or "examples"."""
    rows: int | None = None
    """Of the batch, where they are known."""
    lengths: tuple[int, ...] = ()
    """Of each array of tokens."""
    optimizer: str = ""
    """Its name, where the step was built around it."""
    other: frozenset[int] = frozenset()
    """Flat arguments that are "other" whatever their argument is: random keys among the data."""

    def __post_init__(self) -> None:
        tokens = self.tokens
        if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1):
            raise rule_error(
                "tokens of a step are a whole number from 1 up", repr(tokens), "leave it out to have them counted"
            )

    def built(self, choices: Mapping[str, Any], stages: int = 1) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Function and arguments for these choices, as a pipeline where there are stages."""
        if stages == 1:
            return self.build(**choices)
        why_not = self.why_no_stages()
        if self.staged is None or why_not:
            raise rule_error("A job with stages can run as a pipeline", why_not, "lay it out without stages")
        rest = {name: value for name, value in choices.items() if name != "accumulate"}
        return self.staged(choices.get("accumulate", stages), **rest)

    def defaults(self) -> dict[str, Any]:
        """The first value of each knob."""
        return {name: values[0] for name, values in self.knobs.items()}


def leaf_roles(job: Job, args: Sequence[Any]) -> tuple[str, ...]:
    """The role of each flat argument."""
    import jax

    flat = [role for role, one in zip(job.roles, args, strict=True) for _ in jax.tree.leaves(one)]
    return tuple("other" if number in job.other else role for number, role in enumerate(flat))


def program_job(
    fn: Callable[..., Any],
    args: Sequence[Any],
    roles: Sequence[str] | None = None,
    donate: Sequence[int] = (),
    tokens: int | None = None,
    name: str = "",
) -> Job:
    """Any function as a job: nothing about it is turned, only where its arguments lie is planned.

    With no `roles`, they are found from what the program does with each argument (`argument_roles`), and the job's
    notes say how, and what is assumed. Tokens are counted likewise (`counted`) where they are not given.
    """
    import jax

    given = tuple(args)
    for position, one in enumerate(given):
        for leaf in jax.tree.leaves(one):
            check_shaped(leaf, f"argument {position}")
    leaves = jax.tree.leaves(given)
    notes: tuple[str, ...] = ()
    other = frozenset(number for number, leaf in enumerate(leaves) if is_key(leaf))
    rows: int | None = None
    _check_donate(donate, len(given))
    if roles is None:
        found = argument_roles(fn, given, donate)
        chosen, other, rows, notes = found.roles, found.other, found.rows, (found.note(),)
    else:
        chosen = tuple(roles)
        if len(chosen) != len(given):
            raise rule_error(
                "There is one role an argument", f"{len(chosen)} roles for {len(given)} arguments", "name one for each"
            )
        for role in chosen:
            if role not in ROLES:
                raise unknown_name("role", role, ROLES)
    work = counted(fn, given, chosen, other, tokens, rows)
    return Job(
        build=lambda: (fn, given),
        roles=chosen,
        donate=tuple(donate),
        tokens=work.count,
        name=name or getattr(fn, "__name__", ""),
        notes=(*notes, *work.notes),
        unit=work.unit,
        rows=work.rows,
        lengths=work.lengths,
        other=other,
    )


def _check_donate(donate: Sequence[int], count: int) -> None:
    for position in donate:
        if not 0 <= position < count:
            raise rule_error(f"donate holds positions of the {count} arguments", f"{position}", f"use 0 to {count - 1}")


@dataclass(frozen=True)
class Work:
    """What one step does, in tokens or in examples."""

    count: int | None
    unit: str
    rows: int | None
    lengths: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


_OVERRIDES = "`tokens` of plan() or of what shapes() returns overrides it"


def counted(
    fn: Callable[..., Any],
    args: Sequence[Any],
    roles: Sequence[str],
    other: frozenset[int] = frozenset(),
    tokens: int | None = None,
    rows: int | None = None,
) -> Work:
    """How many tokens a step has, by the integers that it looks up in its weights; examples, its rows, where none.

    `tokens` are what the caller says they are, `rows` those of the batch where they are known.
    """
    import jax

    flat = [(role, leaf) for role, one in zip(roles, args, strict=True) for leaf in jax.tree.leaves(one)]
    batch = [leaf for number, (role, leaf) in enumerate(flat) if role == "batch" and leaf.shape and number not in other]
    rows = rows or max((leaf.shape[0] for leaf in batch), default=None)
    may_be_tokens = [leaf for leaf in batch if len(leaf.shape) > 1 and _is_integer(leaf)]
    if tokens is not None:
        # Looked up or not, the caller has said what they are.
        lengths = tuple(dict.fromkeys(leaf.shape[1] for leaf in may_be_tokens))
        return Work(tokens, "tokens", rows, lengths)
    arrays = token_arrays(fn, args, roles) if may_be_tokens else []
    if arrays:
        count = sum(math.prod(shape) for _, shape in arrays)
        told = ", ".join(f"{path} {list(shape)}" for path, shape in arrays)
        note = f"tokens of a step are what is looked up in weights, {told}: {count}; {_OVERRIDES}"
        return Work(count, "tokens", rows, tuple(shape[1] for _, shape in arrays), (note,))
    if rows is None:
        return Work(None, "tokens", None)
    note = f"nothing is looked up in weights row by row, as tokens are: a step has {rows} examples; {_OVERRIDES}"
    return Work(rows, "examples", rows, (), (note,))


def check_shaped(leaf: Any, where: str) -> None:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise rule_error(
            "Arguments are arrays or shapes (jax.ShapeDtypeStruct)",
            f"{type(leaf).__name__} in {where}",
            "pass jax.ShapeDtypeStruct(shape, dtype), or close the function over what is not an array",
        )


def item_bytes(dtype: Any) -> int:
    """Bytes of one element; a random key's type is jax's own and no numpy type."""
    import jax.numpy as jnp

    return int(dtype.itemsize if hasattr(dtype, "itemsize") else jnp.dtype(dtype).itemsize)


def _is_integer(leaf: Any) -> bool:
    import jax.numpy as jnp

    return bool(jnp.issubdtype(leaf.dtype, jnp.integer))
