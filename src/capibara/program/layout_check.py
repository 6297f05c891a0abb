"""Whether a layout is one of this program at all, before anything is laid out."""

from __future__ import annotations

from collections.abc import Iterator

from jax.sharding import PartitionSpec

from capibara.errors import rule_error, unknown_name
from capibara.mesh.layout import Layout
from capibara.program.graph import Program

__all__ = ["check_layout"]


def check_layout(program: Program, layout: Layout) -> None:
    """An error where a spec names what is not there, or one axis twice: that is a mistake and not a layout."""
    if len(layout.specs) != len(program.arguments):
        raise rule_error(
            "A layout has one PartitionSpec for each flat argument",
            f"{len(layout.specs)} for {len(program.arguments)} arguments",
            "pass one a leaf of the arguments, PartitionSpec() for what is whole",
        )
    known = tuple(layout.mesh.axis_names)
    for argument, spec in zip(program.arguments, layout.specs, strict=True):
        if len(spec) > len(argument.shape):
            raise rule_error(
                "A PartitionSpec has no more entries than its array has dimensions",
                f"{spec} for {argument.path} of shape {argument.shape}",
                f"use at most {len(argument.shape)}",
            )
        seen: set[str] = set()
        for name in _names(spec):
            if name not in known:
                raise unknown_name("mesh axis", name, known)
            if name in seen:
                raise rule_error(
                    "A mesh axis splits one dimension of an array", f"{spec} for {argument.path}",
                    f"leave {name!r} on one of its dimensions",
                )  # fmt: skip
            seen.add(name)
    if layout.stages > 1 and layout.mesh.axes.get("pipeline") != layout.stages:
        raise rule_error(
            "A layout with stages has a mesh axis 'pipeline' of that size",
            f"stages={layout.stages} on a mesh of {dict(layout.mesh.axes)}",
            "add the axis, or leave stages at 1",
        )
    for number in layout.host:
        if not 0 <= number < len(program.arguments):
            raise rule_error(
                "`host` numbers flat arguments",
                f"{number} of {len(program.arguments)} arguments",
                f"use 0 to {len(program.arguments) - 1}",
            )


def _names(spec: PartitionSpec) -> Iterator[str]:
    for entry in spec:
        for name in entry if isinstance(entry, tuple) else (entry,):
            if isinstance(name, str):
                yield name
