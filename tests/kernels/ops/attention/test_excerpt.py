"""A large call is checked on its first batch element and key head: what belongs to it is cut, and judged."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from capibara.kernels.lab import check as checks
from capibara.kernels.ops.attention.api import ATTENTION, ATTENTION_GRAD
from capibara.kernels.ops.attention.excerpt import first_group

CASES = ("packed", "dropped")


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_an_excerpt_judges_the_whole_call(name: str, grad: bool) -> None:
    case = ATTENTION.case(name)
    arrays = case.arrays()
    wanted = checks.expected(ATTENTION, arrays, case.params, grad=grad, host_seconds=-1.0)
    assert wanted.how.endswith("the first batch element and key head")
    fn = lambda *xs: ATTENTION(*xs, implementation="xla", **case.params)  # noqa: E731
    if grad:
        given = (checks.cotangents(ATTENTION, arrays, case.params), *arrays)
        made = jax.tree.leaves(jax.jit(checks.with_gradient(fn))(*given))
    else:
        made = jax.tree.leaves(fn(*arrays))
    assert checks.check_output(made, wanted).ok
    # What is wrong inside of the excerpt is seen, whichever output it is in.
    for index, x in enumerate(made):
        spoilt = list(made)
        spoilt[index] = x.at[(0,) * x.ndim].add(8 * float(np.abs(np.asarray(x, np.float32)).max()) + 1)
        assert not checks.check_output(spoilt, wanted).ok, index


def test_the_gradient_op_has_an_excerpt_too() -> None:
    case = ATTENTION_GRAD.case("grouped")
    arrays = case.arrays()
    wanted = checks.expected(ATTENTION_GRAD, arrays, case.params, host_seconds=-1.0)
    made = ATTENTION_GRAD(*arrays, implementation="xla", **case.params)
    assert checks.check_output(made, wanted).ok
    dq, dk, dv = wanted.values
    group = arrays[0].shape[1] // arrays[1].shape[1]
    assert (dq.shape[:2], dk.shape[:2], dv.shape[:2]) == ((1, group), (1, 1), (1, 1))


def test_a_bias_that_others_share_is_not_cut() -> None:
    case = ATTENTION.case("biased")  # one bias for the batch: its gradient is a sum over all
    assert first_group(ATTENTION, case.arrays()) is None
