"""docs/layers.md, "What runs where": each row of the table against what dispatch picks, at its limits and past them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from capibara.kernels import explain
from capibara.kernels.core.context import target
from capibara.kernels.ops import layers, vq

DOCS = Path(__file__).parents[2] / "docs" / "layers.md"
MOSAIC = "hopper"
KEY = jax.random.key(0)
Claim = tuple[Callable[..., Any], tuple[Any, ...], str, str, str]


def shape(*axes: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(axes, dtype)


SMALL, LARGE = shape(512, 512), shape(4096, 2048)
ENTROPY = (shape(64, 32), shape(32, 512), shape(64, dtype="int32"))


def backward(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: jax.vjp(fn, x)[1](x)


def norm_rows() -> list[Claim]:
    """In float16, which no model of times knows."""
    layer, rms = layers.layer_norm, layers.rms_norm
    added = lambda x: layers.rms_norm(x, residual=x)  # noqa: E731
    claims: list[Claim] = [
        (fn, (shape(*sizes, dtype="float16"),), "xla", hopper, "xla")
        for fn, sizes, hopper in (
            (layer, (24, 512), MOSAIC),
            (layer, (24, 384), "xla"),
            (rms, (24, 4096), MOSAIC),
            (rms, (127, 4224), "xla"),
            (rms, (128, 4224), MOSAIC),
            (added, (24, 4224), MOSAIC),
        )
    ]
    return claims


def dropped(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *xs: fn(*xs, dropout_rate=0.1, key=KEY)


def chosen(top_k: int) -> Callable[..., Any]:
    return lambda x: layers.route(x, top_k=top_k)


def grouped_rows(dtype: str, hopper: str) -> list[Claim]:
    rows, weights, sizes = shape(512, 256, dtype=dtype), shape(4, 256, 256, dtype=dtype), shape(4, dtype="int32")
    plain: Claim = (layers.grouped_gemm, (rows, weights, sizes), "xla", hopper, "xla")
    return [plain, (layers.grouped_gated_gemm, (rows, weights, weights, sizes), "xla", hopper, "xla")]


def gated_mlp_rows() -> list[Claim]:
    """At the fewest rows that kernels take, one fewer, and with weights that need no cast."""
    fewest, weights = 4096, (shape(512, 1024, dtype="float32"), shape(512, 1024, dtype="float32"))
    down = shape(1024, 512, dtype="float32")
    both = lambda *arrays: jax.vjp(layers.gated_mlp, *arrays)[1](arrays[0])  # noqa: E731
    cast = [
        (fn, (shape(rows, 512), *weights, down), "xla", hopper, "xla")
        for fn in (layers.gated_mlp, both)
        for rows, hopper in ((fewest, MOSAIC), (fewest - 1, "xla"))
    ]
    plain = (shape(512, 1024), shape(512, 1024), shape(1024, 512))
    return [*cast, (layers.gated_mlp, (shape(fewest, 512), *plain), "xla", "xla", "xla")]


# Row of the table -> the ops whose choice it tells, the numbers that its cells name, and calls with their choice on a
# CPU, on Hopper and on a TPU.
ROWS: dict[str, tuple[tuple[str, ...], set[int], list[Claim]]] = {
    "norm, forward": (("norm",), {128, 512, 4096}, norm_rows()),
    "norm, backward": (
        ("norm_grad",),
        {512, 8192},
        [
            (backward(fn), (shape(24, columns),), "xla", hopper, "xla")
            for fn in (layers.layer_norm, layers.rms_norm)
            for columns, hopper in ((384, "xla"), (512, MOSAIC), (8192, MOSAIC), (8320, "xla"))
        ],
    ),
    "activation": (
        ("activation",),
        {8388608},
        [
            (layers.silu, (LARGE,), "xla", MOSAIC, "xla"),
            (layers.gelu, (LARGE,), "xla", MOSAIC, "xla"),
            (layers.gelu, (SMALL,), "xla", MOSAIC, "xla"),
            (layers.silu, (SMALL,), "xla", "xla", "xla"),
            (dropped(layers.silu), (SMALL,), "xla", MOSAIC, "xla"),
            (dropped(functools.partial(layers.activation, kind="relu")), (SMALL,), "xla", "xla", "xla"),
        ],
    ),
    "activation, backward": (
        ("activation_grad",),
        set(),
        [
            (backward(layers.gelu), (LARGE,), "xla", MOSAIC, "xla"),
            (backward(layers.gelu), (SMALL,), "xla", MOSAIC, "xla"),
            (backward(layers.silu), (LARGE,), "xla", "xla", "xla"),
            (backward(dropped(layers.gelu)), (SMALL,), "xla", MOSAIC, "xla"),
            (backward(dropped(layers.silu)), (SMALL,), "xla", "xla", "xla"),
        ],
    ),
    "gated activation": (
        ("activation",),
        set(),
        [
            (fn, (SMALL, SMALL), "xla", hopper, "xla")
            for fn, hopper in (
                (layers.gated_activation, "xla"),
                (dropped(layers.gated_activation), "xla"),
                (dropped(layers.geglu), MOSAIC),
            )
        ],
    ),
    "gated activation, backward": (
        ("activation_grad",),
        set(),
        [(lambda x, up: jax.vjp(dropped(layers.geglu), x, up)[1](x), (SMALL, SMALL), "xla", "xla", "xla")],
    ),
    # Where it has no kernels, its activation is an op of its own, and its products are XLA's.
    "gated_mlp, forward and backward": (
        ("gated_products", "gated_products_grad", "activation", "activation_grad"),
        {4096},
        gated_mlp_rows(),
    ),
    "cross_entropy": (
        ("cross_entropy",),
        set(),
        [(layers.cross_entropy, ENTROPY, "xla", "xla", "xla")],
    ),
    "route": (
        ("route",),
        {16, 256, 512},
        [
            (chosen(top_k), (shape(1024, experts, dtype="float32"),), cpu, hopper, tpu)
            for top_k, experts, cpu, hopper, tpu in (
                (16, 32, "xla", MOSAIC, "xla"),
                (17, 30, "reference", "reference", "reference"),
                (8, 64, "xla", MOSAIC, "xla"),
                (8, 65, "reference", MOSAIC, "xla"),
                (2, 256, "xla", MOSAIC, "xla"),
                (2, 257, "reference", "reference", "xla"),
                (1, 257, "xla", "xla", "xla"),
            )
        ],
    ),
    "grouped_gemm, grouped_gated_gemm": (
        ("grouped_gemm", "grouped_gated_gemm"),
        set(),
        [*grouped_rows("bfloat16", MOSAIC), *grouped_rows("float16", MOSAIC), *grouped_rows("float32", "xla")],
    ),
    "nearest_code": (
        ("nearest_code",),
        {8, 128, 8192},
        [
            (vq.nearest_code, (shape(512, width, dtype=dtype), shape(64, width, dtype=dtype)), "xla", hopper, "xla")
            for width, hopper in ((8, MOSAIC), (9, MOSAIC), (192, MOSAIC), (8192, MOSAIC), (8193, "xla"))
            for dtype in ("float32", "bfloat16")
        ],
    ),
}


def table() -> dict[str, list[str]]:
    """Each op's cells: CPU, Hopper, TPU."""
    lines = DOCS.read_text().partition("## What runs where")[2].partition("\n## ")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert cells[0] == ["op", "CPU", "Hopper", "TPU"]
    return {row[0]: row[1:] for row in cells[2:]}


def test_every_row_of_the_table_is_checked() -> None:
    assert list(table()) == list(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_what_the_table_says_runs(row: str) -> None:
    ops, limits, claims = ROWS[row]
    cells = table()[row]
    # bfloat16 and the like are no limits.
    assert {int(number) for cell in cells for number in re.findall(r"\b\d+\b", cell)} == limits
    words = {"xla": "XLA", MOSAIC: "Mosaic", "reference": "reference"}
    for fn, arrays, *wanted in claims:
        for platform, cell, name in zip(("cpu", "gpu", "tpu"), cells, wanted, strict=True):
            with target(platform):
                found = {s.call.op.name: s.implementation for s in explain(fn, *arrays).selections}
            # Of a function and its gradient the last choice is what runs: the first is made and then not used.
            made = [implementation for called, implementation in found.items() if called in ops]
            assert set(made) == {name}, (platform, arrays)
            assert words[name] in (cells[0] if cell == "as on the CPU" else cell)
