"""Every name that jax removed since 0.4.30 is served, or there is a reason why it is not."""

from __future__ import annotations

import importlib

import pytest

import capibara.jax
from capibara.dropin.compat import MODULES, NAMES
from capibara.dropin.unserved import UNSERVED, serves, why_not
from capibara.jax_releases import find, names

REMOVED = [one.path for path in names() if (one := find(path)) is not None and one.removed and one.exported]


@pytest.mark.quick
def test_each_removed_name_is_served_or_has_a_reason() -> None:
    assert len(REMOVED) > 1000
    assert [path for path in REMOVED if not serves(path) and why_not(path) is None] == []


@pytest.mark.quick
def test_each_reason_is_of_a_name_that_is_not_served() -> None:
    spoken = set()
    for path in REMOVED:
        if not serves(path):
            while path not in UNSERVED:
                path = path.rpartition(".")[0]
            spoken.add(path)
    assert set(UNSERVED) == spoken


@pytest.mark.quick
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_is_said_to_be_served_is_there() -> None:
    lacking = []
    for path in filter(serves, REMOVED):
        module, _, name = f"capibara.{path}".rpartition(".")
        if path.removeprefix("jax.") in MODULES:
            importlib.import_module(f"capibara.{path}")
        elif not hasattr(importlib.import_module(module), name):
            lacking.append(path)
    assert lacking == []


@pytest.mark.quick
def test_since_when_a_name_is_gone_has_one_source() -> None:
    """The table for all that it has; rows of older names say it themselves."""
    objects = {"config", "checkpoint"}  # the names are objects by now, and were modules
    for row in (*NAMES.values(), *MODULES.values()):
        known = find(f"jax.{row.old}")
        assert (row.before is None) == (known is not None) or row.old in objects, row.old
    assert NAMES["core.typecheck"].since == "0.7.0"
    assert str(NAMES["experimental.pjit.pjit"]).startswith(
        "jax.experimental.pjit.pjit is gone from jax since a release"
    )


def test_a_removed_name_says_why() -> None:
    with pytest.raises(AttributeError, match=r"jax 0.7.0 removed it; devices have no infeed and outfeed"):
        _ = capibara.jax.lax.infeed
