"""Single ops on one H200: predicted against what was measured and recorded under benchmarks/results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capibara.cost.calibration import Calibration, Run
from capibara.cost.ops import op_seconds
from capibara.errors import UnknownNameError
from capibara.hardware.chips import chip
from capibara.hardware.products import fill
from capibara.kernels.core.op import lookup

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
# The promise of the project for one op on one chip.
PROMISE = 0.15
_LONG = {"bf16": "bfloat16", "f32": "float32"}


def _rows(name: str) -> list[dict[str, Any]]:
    document = json.loads((RESULTS / f"2026-11-15-h200-{name}.json").read_text(encoding="utf-8"))
    rows: list[dict[str, Any]] = document["rows"]
    return rows


def _shape(*sizes: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def _parsed(text: str) -> tuple[list[jax.ShapeDtypeStruct | None], dict[str, Any]]:
    """A recorded call: `bf16[8,8] bf16[8,8] - - activation=gelu`."""
    operands: list[jax.ShapeDtypeStruct | None] = []
    params: dict[str, Any] = {}
    for word in text.split():
        if match := re.fullmatch(r"(\w+)\[([\d,]+)\]", word):
            operands.append(_shape(*map(int, match[2].split(",")), dtype=_LONG[match[1]]))
        elif word == "-":
            operands.append(None)
        else:
            key, _, value = word.partition("=")
            params[key] = True if value == "True" else value
    return operands, params


def _off(predicted: float, measured: float) -> float:
    return abs(predicted / measured - 1)


@pytest.mark.quick
def test_gemm() -> None:
    rows = _rows("gemm")
    assert len(rows) > 10
    for row in rows:
        operands, params = _parsed(row["call"])
        assert _off(op_seconds("gemm", *operands, chip="h200", **params), row["ours"]["timing"]["seconds"]) < PROMISE, (
            row
        )
    # Another machine of the same kind, with a higher power limit.
    for n, tflops in ((4096, 758), (8192, 796)):
        predicted = op_seconds("gemm", _shape(n, n), _shape(n, n), chip="h200")
        assert _off(predicted, 2 * n**3 / tflops / 1e12) < PROMISE


def test_attention() -> None:
    names = lookup("attention_grad").operands
    for row in _rows("attention"):
        b, t, h, kv, d = (row[key] for key in ("batch", "length", "heads", "kv_heads", "head_dim"))
        q, k = _shape(b, h, t, d), _shape(b, kv, t, d)
        seconds = op_seconds("attention", q, k, k, chip="h200", causal=row["causal"])
        if row["direction"] != "forward":
            given = {"q": q, "k": k, "v": k, "out": q, "d_out": q, "lse": _shape(b, h, t, dtype="float32")}
            assert set(given) <= set(names)
            operands = [given.get(name) for name in names]
            seconds += op_seconds("attention_grad", *operands, chip="h200", causal=row["causal"])
        assert _off(seconds, row["microseconds"]["dispatch"] * 1e-6) < PROMISE, row


def test_norm() -> None:
    for row in (one for one in _rows("layers") if one["part"] == "norm"):
        kind, size, direction = row["what"].split()
        rows, width = map(int, size.split("x"))
        x, w = _shape(rows, width), _shape(width)
        stats = _shape(rows, dtype="float32")
        layer = kind == "layer"
        if direction == "forward":
            seconds = op_seconds("norm", x, w, w if layer else None, chip="h200", kind=kind)
        else:
            mean = stats if layer else None
            seconds = op_seconds("norm_grad", x, w, w if layer else None, mean, stats, x, None, chip="h200", kind=kind)
        assert _off(seconds, row["microseconds"]["dispatch"] * 1e-6) < PROMISE, (row, seconds)


def test_a_calibration_and_the_chip_change_the_answer() -> None:
    x = _shape(4096, 4096)
    base = op_seconds("gemm", x, x, chip="h200")
    runs = (Run({"matrix": base}, base, 1.5 * base),) * 20
    # The runs are of 200 µs: most of what they took longer may have been their start, which one call does not have.
    assert op_seconds("gemm", x, x, chip="h200", calibration=Calibration("h200", runs)) > base
    long = (Run({"matrix": 100 * base}, 100 * base, 150 * base),) * 20
    assert op_seconds("gemm", x, x, chip="h200", calibration=Calibration("h200", long)) > 1.2 * base
    with pytest.raises(ValueError, match="the chip that it was measured on"):
        op_seconds("gemm", x, x, chip="h200", calibration=Calibration("v4"))
    assert op_seconds("gemm", x, x, chip="v4") > 2 * base


def test_an_unknown_op_is_named() -> None:
    with pytest.raises(UnknownNameError, match="gemm"):
        op_seconds("gem", _shape(8, 8), _shape(8, 8), chip="h200")


def test_fill_of_the_matrix_units() -> None:
    v4, h200 = chip("v4"), chip("h200")
    assert fill(v4, (1, 1024, 1024, 1024)) == 1
    # 64 deep in a unit of 128: half of it.
    assert fill(v4, (16, 512, 512, 64)) == 0.5
    # One row: a tile of eight.
    assert fill(v4, (1, 1, 4096, 4096)) == 1 / 8
    # 132 units, 128 tiles: the rest idles.
    assert fill(h200, (1, 1024, 4096, 4096)) == pytest.approx(128 / 132)
    # Few tiles of a long reduction are shared out.
    assert fill(h200, (1, 256, 256, 65536)) > 0.5
    assert fill(h200, (1, 256, 256, 128)) < 0.1
    # Nothing known of the sizes: nothing taken off.
    assert fill(v4, ()) == 1


_SIZE = st.integers(1, 5000)


@given(which=st.sampled_from(["v4", "h200"]), sizes=st.tuples(_SIZE, _SIZE, _SIZE), more=st.tuples(_SIZE, _SIZE, _SIZE))
def test_a_larger_product_is_never_faster(which: str, sizes: tuple[int, int, int], more: tuple[int, int, int]) -> None:
    def seconds(m: int, n: int, k: int) -> float:
        return op_seconds("gemm", _shape(m, k), _shape(k, n), chip=which)

    m, n, k = sizes
    # A little for the last digit.
    assert seconds(m, n, k) <= seconds(m + more[0], n + more[1], k + more[2]) * (1 + 1e-9)
