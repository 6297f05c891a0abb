"""The Hopper kernels of norm, emulated: their arithmetic and the synchronisation of their rings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Case
from capibara.kernels.lab.check import check_output, expected
from capibara.kernels.ops.layers import NORM, NORM_GRAD
from capibara.kernels.ops.layers.norm.cases import grad_case
from capibara.kernels.ops.layers.norm.hopper.backward import norm_backward
from capibara.kernels.ops.layers.norm.hopper.forward import RingConfig, norm_forward

pytestmark = pytest.mark.quick


def _large(generator: np.random.Generator, shape: tuple[int, ...]) -> Any:
    return generator.standard_normal(shape) * np.asarray([1, 1e25, 1e-25, 1e28, 1])[:, None]


def _shifted(generator: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """Rows that grow from 0 to 4: their mean is not 0, and numbers that are counted twice move it."""
    return generator.standard_normal(shape) + np.linspace(0, 4, shape[-1])


CASES = [
    # (rows, columns, parameters): more rows than a ring holds, rows of one piece and of several, every operand.
    Case("layer", ((7, 256), (256,), (256,), None)),
    Case("rms", ((5, 768), (768,), None, (5, 768)), params={"kind": "rms", "offset": 1.0, "return_residual": True}),
    Case(
        "five-pieces",
        ((3, 5120), (5120,), (5120,), (3, 5120)),
        params={"return_residual": True, "return_stats": True},
        dtypes={1: "float32", 2: "float32"},
    ),
    Case("plain", ((2, 3, 128), None, None, None), "float32"),
    Case("grouped", ((3, 4, 128), (3, 128), (3, 128), None)),
    # Squares that overflow float32.
    Case("large", ((5, 256), (256,), None, None), "float32", {"kind": "rms"}, draw={0: _large}),
    # Pieces that overlap, whose numbers are to be counted once: two of them and three, vectors of one number and of
    # eight, one row and several.
    Case("overlap-layer", ((4, 192), (192,), (192,), None), params={"return_stats": True}, draw={0: _shifted}),
    Case(
        "overlap-rms",
        ((5, 320), (320,), None, (5, 320)),
        "float32",
        {"kind": "rms", "offset": 1.0, "return_residual": True, "return_stats": True},
        draw={0: _shifted},
    ),
    Case(
        "overlap-gpt-oss",
        ((1, 2880), (2880,), None, (1, 2880)),
        params={"kind": "rms", "return_residual": True, "return_stats": True},
    ),
    Case(
        "overlap-wide",
        ((3, 2880), (2880,), (2880,), (3, 2880)),
        params={"return_residual": True, "return_stats": True},
        dtypes={1: "float32", 2: "float32"},
        draw={0: _shifted},
    ),
    Case("overlap-plain", ((1, 192), None, None, None), "float32", {"return_stats": True}, draw={0: _shifted}),
    Case("overlap-grouped", ((2, 3, 320), (2, 320), (2, 320), None)),
]


SHALLOW, DEEP = RingConfig(3, 1), RingConfig(2, 2)
# How many rows a ring holds and what a row is made of are apart from each other: every case on one ring, and the one
# of most pieces and operands on both.
RINGS = [*zip(CASES, (SHALLOW, DEEP) * 6, strict=True), (CASES[2], DEEP)]


@pytest.mark.parametrize(("case", "config"), [pytest.param(*x, id=f"{x[0].name}-{x[1]}") for x in RINGS])
def test_emulated(emulated_hopper: Callable[..., Any], case: Case, config: RingConfig) -> None:
    def right(op: Op, kernel: Callable[..., Any], case: Case) -> None:
        arrays = case.arrays()
        out = emulated_hopper(kernel, *arrays, config=config, **{**op.params, **case.params})
        result = check_output(out, expected(op, arrays, case.params))
        assert result.ok, result.why

    right(NORM, norm_forward, case)
    right(NORM_GRAD, norm_backward, grad_case(case))
