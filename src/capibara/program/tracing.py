"""`trace`: any function of arrays, on shapes alone, as a graph of what it computes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from capibara.errors import rule_error, unknown_name
from capibara.program.graph import Argument, Program

if TYPE_CHECKING:
    from capibara.mesh.layout import Layout
    from capibara.mesh.traced_for import TracedFor

__all__ = ["ROLES", "trace"]

ROLES = ("params", "state", "batch", "other")
"""What an argument is: weights, the optimizer's state (laid out like weights), data, anything else."""


def trace(
    fn: Callable[..., Any],
    args: Sequence[Any],
    donate: Sequence[int] = (),
    roles: Sequence[str] | None = None,
    device_kind: str | None = None,
    layout: Layout | None = None,
    share_repeats: bool = False,
    closed: frozenset[str] = frozenset(),
) -> Program:
    """What `fn(*args)` computes. Nothing runs; an error that `fn` raises is its own.

    `args` are pytrees of arrays or of anything with a shape and a dtype. `donate` numbers the arguments whose memory
    the outputs take over, `roles` has one of `ROLES` for each argument. Capibara's ops choose their implementation for
    `device_kind`, or for what is attached.

    One trace serves every layout, but for a function that asks for its mesh (`Program.asks_for_mesh`): that is traced
    again for the mesh and the rules of a `layout`, and has the shard_map that it writes for them.

    With `share_repeats`, what the program writes several times of the same operands is counted once, as compilers
    compute it: of layers that are written one after another, say, each of which finds the same pages and rotations.

    Kernels of the ops in `closed` are not traced into, which takes as long as all else of a small program: a kernel is
    read as its op's call and cost anyway. Such a program is not differentiated.

    Examples:
        >>> import jax
        >>> x = jax.ShapeDtypeStruct((8, 4), "float32")
        >>> w = jax.ShapeDtypeStruct((4, 16), "float32")
        >>> trace(lambda w, x: x @ w, (w, x)).flops
        1024.0
    """
    import jax

    from capibara.program.build import Builder
    from capibara.program.dead_code import live

    if not callable(fn):
        raise rule_error("The program is a function", repr(fn), "pass a function and its arguments")
    if not isinstance(args, Sequence):
        raise rule_error("`args` is a tuple of the function's arguments", type(args).__name__, "write (x,) for one")
    args = tuple(args)
    for leaf in jax.tree.leaves(args):
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")) and not isinstance(
            leaf, bool | int | float | complex
        ):
            raise rule_error(
                "Arguments are arrays, numbers, or shapes (jax.ShapeDtypeStruct)",
                f"{type(leaf).__name__} {leaf!r}",
                "close the function over what is not an array",
            )
    roles = _checked_roles(roles, len(args))
    for index in donate:
        if not 0 <= index < len(args):
            raise rule_error(
                "`donate` numbers arguments", f"{index} of {len(args)} arguments", f"use 0 to {len(args) - 1}"
            )
    labels = _labels(fn, len(args))
    jaxprs, found, platform, asking = _jaxpr(fn, args, device_kind, layout, closed)

    arguments: list[tuple[str, str, bool]] = []
    for index, arg in enumerate(args):
        for path, _ in jax.tree_util.tree_flatten_with_path(arg)[0]:
            arguments.append((labels[index] + jax.tree_util.keystr(path), roles[index], index in donate))

    build = Builder(found, platform, share_repeats)
    jaxpr = jaxprs.jaxpr
    env: dict[Any, int | None] = {}
    flat: list[Argument] = []
    for (label, role, donated), var in zip(arguments, jaxpr.invars, strict=True):
        value = build.value(var.aval, label, from_batch=role == "batch")
        env[var] = value.id
        flat.append(Argument(value.id, label, value.shape, value.dtype, role, donated))
    for var, const in zip(jaxpr.constvars, jaxprs.consts, strict=True):
        env[var] = build.constant(var.aval, const)
    nodes = build.nodes(jaxpr, env, "")
    outputs = tuple(build.array(env, atom) for atom in jaxpr.outvars)
    kept = live(nodes, set(outputs))
    notes = tuple(dict.fromkeys(build.notes))
    name = getattr(fn, "__name__", "")
    return Program(
        tuple(kept), tuple(build.values), tuple(flat), outputs, tuple(build.constants), notes, name,
        frozenset(build.local), asking.asked, None if asking.places is None else frozenset(asking.places),
    )  # fmt: skip


def _jaxpr(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    device_kind: str | None,
    layout: Layout | None,
    closed: frozenset[str],
) -> tuple[Any, list[Any], str, TracedFor]:
    import contextlib

    import jax

    from capibara.hardware import chip_for
    from capibara.kernels.core import context, dispatch, trusting
    from capibara.mesh.rules import use_rules
    from capibara.mesh.traced_for import traced_for
    from capibara.program.markers import recording_axes

    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if hasattr(leaf, "shape") else leaf, args
    )
    with contextlib.ExitStack() as stack:
        if device_kind is not None:
            chip = chip_for(device_kind)
            if chip is None:
                raise rule_error("device_kind is a chip that the table of chips has", repr(device_kind), "use 'TPU v4'")
            stack.enter_context(context.target(chip.platform, device_kind))
            # Planned for a chip, it will run on that chip in an optimisation context (`parallel.run`).
            stack.enter_context(trusting.optimising(True))
        platform = context.current_target().platform
        found = stack.enter_context(dispatch.marking(closed))
        stack.enter_context(recording_axes())
        asking = stack.enter_context(traced_for(None if layout is None else layout.mesh.axes))
        if layout is not None:
            stack.enter_context(use_rules(layout.rules_in_force()))
        # A fresh function each time: jit's cache would hand back a trace without the markers.
        jaxpr = jax.make_jaxpr(functools.partial(fn))(*shapes)
        return jaxpr, found, platform, asking


def _checked_roles(roles: Sequence[str] | None, count: int) -> tuple[str, ...]:
    if roles is None:
        return ("other",) * count
    if isinstance(roles, str) or len(roles) != count:
        raise rule_error("There is one role an argument", f"roles={roles!r} for {count}", f"pass {count} words")
    for role in roles:
        if role not in ROLES:
            raise unknown_name("role", role, ROLES)
    return tuple(roles)


def _labels(fn: Callable[..., Any], count: int) -> list[str]:
    """What the function calls its arguments, where that can be known."""
    try:
        names = [
            p.name
            for p in inspect.signature(fn).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        names = []
    return [names[index] if index < len(names) else f"argument {index}" for index in range(count)]
