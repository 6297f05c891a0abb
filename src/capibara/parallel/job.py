"""A job: the program to plan, the shapes it is called with, and what may be turned about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from capibara.errors import rule_error, unknown_name

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
    """Tokens (or examples) of one step, for tokens a second and dollars a billion."""
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

    return tuple(role for role, one in zip(job.roles, args, strict=True) for _ in jax.tree.leaves(one))


def program_job(
    fn: Callable[..., Any],
    args: Sequence[Any],
    roles: Sequence[str] | None = None,
    donate: Sequence[int] = (),
    tokens: int | None = None,
    name: str = "",
) -> Job:
    """Any function as a job: nothing about it is turned, only where its arguments lie is planned.

    With no `roles`, an argument whose leaves are all integers or booleans is the batch and any other the parameters;
    the job's notes say so.
    """
    import jax

    given = tuple(args)
    for position, one in enumerate(given):
        for leaf in jax.tree.leaves(one):
            check_shaped(leaf, f"argument {position}")
    notes: tuple[str, ...] = ()
    if roles is None:
        chosen = tuple(_guessed_role(one) for one in given)
        notes = (f"roles were taken from the types (integers are the batch, floats are parameters): {chosen}",)
    else:
        chosen = tuple(roles)
        if len(chosen) != len(given):
            raise rule_error(
                "There is one role an argument", f"{len(chosen)} roles for {len(given)} arguments", "name one for each"
            )
        for role in chosen:
            if role not in ROLES:
                raise unknown_name("role", role, ROLES)
    for position in donate:
        if not 0 <= position < len(given):
            raise rule_error(
                f"donate holds positions of the {len(given)} arguments", f"{position}", f"use 0 to {len(given) - 1}"
            )
    if tokens is None:
        tokens, note = guessed_tokens([one for one, role in zip(given, chosen, strict=True) if role == "batch"])
        notes += note
    return Job(
        build=lambda: (fn, given),
        roles=chosen,
        donate=tuple(donate),
        tokens=tokens,
        name=name or getattr(fn, "__name__", ""),
        notes=notes,
    )


def guessed_tokens(batch: Any) -> tuple[int | None, tuple[str, ...]]:
    """How many tokens a batch holds, and the note that says how they were counted."""
    import jax

    leaves = jax.tree.leaves(batch)
    whole = [leaf for leaf in leaves if _is_integer(leaf)]
    if whole:
        most = max(math.prod(leaf.shape) for leaf in whole)
        return most, (f"tokens of a step are the elements of the batch's largest integer array: {most}",)
    rows = [leaf.shape[0] for leaf in leaves if leaf.shape]
    if rows:
        return max(rows), (f"the batch holds no integers: examples of a step are its rows: {max(rows)}",)
    return None, ()


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


def _guessed_role(tree: Any) -> str:
    import jax

    leaves = jax.tree.leaves(tree)
    return "batch" if leaves and all(_is_integer(leaf) for leaf in leaves) else "params"


def _is_integer(leaf: Any) -> bool:
    import jax.numpy as jnp

    return not jnp.issubdtype(leaf.dtype, jnp.inexact)
