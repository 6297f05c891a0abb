"""Which change of parameters breaks a call."""

from __future__ import annotations

import pytest

from capibara.jax_releases import Parameter, breaks, parse


@pytest.mark.quick
def test_parse() -> None:
    assert parse("") == ()
    assert parse("x, /, y=, *rest, z, **options") == (
        Parameter("x", "positional", required=True),
        Parameter("y", "either", required=False),
        Parameter("rest", "*", required=False),
        Parameter("z", "keyword", required=True),
        Parameter("options", "**", required=False),
    )


@pytest.mark.quick(cases="all")
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("x, axis=", "x, axis=, where=", ()),
        ("x, axis=", "x", ("axis is gone",)),
        ("x, axis=", "x, *, axis=", ("axis is taken by its name alone",)),
        ("x, *, axis=", "x, axis=", ()),
        ("x, axis=", "x, **options", ("axis is taken by its name alone",)),
        ("x, y", "x, *args, **options", ()),
        ("x", "x, /", ("x is taken by its place alone",)),
        ("x, /", "y, /", ()),
        ("a, b", "b, a", ("a has another place", "b has another place")),
        ("a", "a, b", ("b is new and has to be given",)),
        ("a, b=", "a, b", ("b has to be given",)),
        ("*args", "x", ("more arguments (*args) are gone",)),
        ("a, **options", "a", ("more keywords (**options) are gone",)),
    ],
)
def test_breaks(old: str, new: str, said: tuple[str, ...]) -> None:
    assert breaks(old, new) == said
