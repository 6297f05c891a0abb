"""Peers compute what the op computes: a ratio to something else would say nothing."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest

from capibara.kernels.lab.lattice import measure
from capibara.kernels.lab.lattice.workloads import FAMILIES, draw


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_peers_are_right(family: str) -> None:
    """torch and tokamax are peers on a GPU alone; there every row of a run says whether they were right."""
    drawn = itertools.islice(draw(0, [family], shrink=64), 40)
    forward = next(w for w in drawn if not w.grad or family == "cross-entropy")
    with ThreadPoolExecutor(2) as pool:
        made = measure.prepare(forward, pool)
    assert forward.peers
    for name in ("dispatch", *forward.peers):
        assert made.programs[name].right, f"{name}: {made.programs[name].note}"
