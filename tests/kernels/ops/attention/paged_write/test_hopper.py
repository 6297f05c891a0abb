"""The Hopper kernel of paged_write: its numbers by emulation, what it leaves alone, what it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.compile import lower_for
from capibara.kernels import target, trust
from capibara.kernels.lab.check import check_output, expected
from capibara.kernels.ops.attention.paged_write.api import PAGED_WRITE, has_kernel
from capibara.kernels.ops.attention.paged_write.hopper import IMPLEMENTATION
from capibara.kernels.ops.attention.paged_write.hopper.forward import HeadsConfig, candidates, paged_write_hopper

SMALL = ("a-token", "padded", "part-of-a-head", "wide-heads", "three-numbers-a-thread")


def _configs(name: str) -> list[HeadsConfig]:
    case = PAGED_WRITE.case(name)
    return list(candidates(PAGED_WRITE.call(*case.args(), **case.params)))


@pytest.mark.parametrize(("name", "config"), [(name, config) for name in SMALL for config in _configs(name)], ids=str)
def test_emulated(name: str, config: HeadsConfig, emulated_hopper: Callable[..., Any]) -> None:
    case = PAGED_WRITE.case(name)
    arrays = case.arrays()
    found = emulated_hopper(jax.jit(lambda *given: paged_write_hopper(*given, config=config)), *arrays)
    result = check_output(found, expected(PAGED_WRITE, arrays, case.params))
    assert result.ok, result.why
    # Values are copied, and what no token goes to stays: to the bit.
    wanted = PAGED_WRITE.reference(*arrays)
    np.testing.assert_array_equal(np.asarray(found[2], np.float32), np.asarray(wanted[2], np.float32))
    changed = np.any(np.asarray(arrays[1] != wanted[1]), axis=tuple(range(2, arrays[1].ndim)))
    np.testing.assert_array_equal(np.asarray(found[1])[~changed], np.asarray(arrays[1])[~changed])
