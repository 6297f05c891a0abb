"""What tests of commands share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_width_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are as wide as in a file, whatever the shell says that runs the tests."""
    monkeypatch.delenv("COLUMNS", raising=False)
