"""The Hopper kernels of the recurrence, emulated: their arithmetic and the synchronisation of their rings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Case
from capibara.kernels.lab.check import check_output, expected
from capibara.kernels.ops.scan import LINEAR_RECURRENCE, LINEAR_RECURRENCE_GRAD
from capibara.kernels.ops.scan.recurrence.cases import LOWERED, _case, grad_case
from capibara.kernels.ops.scan.recurrence.hopper.backward import recurrence_backward
from capibara.kernels.ops.scan.recurrence.hopper.forward import TileConfig, recurrence_forward
from capibara.kernels.ops.scan.recurrence.reference import reference, reference_grad

pytestmark = pytest.mark.quick

EMULATED = [
    # More tiles than the ring holds; a short tile, which is last or, backwards, first; one step; segments of time.
    (_case("whole", (1, 24, 128), LOWERED), TileConfig(8, 2)),
    (
        _case("short-first", (1, 21, 128), LOWERED, "bfloat16", initial=True, reverse=True, return_final=True),
        TileConfig(9, 1),
    ),
    (_case("one-step-left", (1, 5, 256), LOWERED, initial=True), TileConfig(4, 3, width=256)),
    (_case("cut", (2, 12, 128), LOWERED, initial=True, return_final=True), TileConfig(4, 2, segments=3)),
    (_case("complex", (1, 11, 128), LOWERED, "complex64", initial=True, return_final=True), TileConfig(8, 2)),
]


@pytest.mark.parametrize(("case", "config"), [pytest.param(*x, id=x[0].name) for x in EMULATED])
def test_emulated(emulated_hopper: Callable[..., Any], case: Case, config: TileConfig) -> None:
    def right(op: Op, kernel: Callable[..., Any], case: Case) -> None:
        arrays = case.arrays()
        out = emulated_hopper(kernel, *arrays, config=config, **{**op.params, **case.params})
        result = check_output(out, expected(op, arrays, case.params))
        assert result.ok, result.why

    right(LINEAR_RECURRENCE, recurrence_forward, case)
    right(LINEAR_RECURRENCE_GRAD, recurrence_backward, grad_case(case))


@pytest.mark.parametrize("grows", [True, False])
def test_segments_whose_products_overflow(emulated_hopper: Callable[..., Any], grows: bool) -> None:
    """Eight decays of 1e5 are not finite: all of time in one piece; and what is not finite stays so in its channel."""
    a, b = np.full((1, 24, 128), 0.5, "float32"), np.ones((1, 24, 128), "float32")
    if grows:
        a[..., 3], b[:, :-2, 3] = 1e5, 0.0
    else:
        b[:, 5, 4] = np.inf
        a[:, 20, 4] = 0.0
    cut = TileConfig(4, 2, segments=3)
    arrays, params = (jnp.asarray(a), jnp.asarray(b)), {"reverse": False, "return_final": True}
    for got, wanted in zip(
        emulated_hopper(recurrence_forward, *arrays, config=cut, **params), reference(*arrays, **params), strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
    h = reference(*arrays)
    operands = (arrays[0], h, None, arrays[1])
    got = emulated_hopper(recurrence_backward, *operands, config=cut, reverse=False)
    for one, wanted in zip(got[:2], reference_grad(*operands)[:2], strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-6)
