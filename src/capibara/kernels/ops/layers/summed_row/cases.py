"""The products of decoding a token, of a row that the product before left in parts; and shapes meant to break them."""

from __future__ import annotations

from typing import Any

import numpy as np

from capibara.kernels.core.spec import Case
from capibara.kernels.ops.layers.few_rows.cases import eight_bits

REAL = frozenset({"bench", "tune"})
HOSTILE = frozenset({"test"})


def _case(
    name: str, parts: int, inner: int, outputs: int, tags: frozenset[str], *, rows: int = 1, gate: str | None = None,
    out_parts: int | None = None, dtype: str = "bfloat16", int8: bool = False,
) -> Case:  # fmt: skip
    held = 2 * outputs if gate else outputs
    params = {key: value for key, value in {"gate": gate, "out_parts": out_parts}.items() if value}
    shapes = (parts, rows, inner), (rows, inner), (inner,), (held, inner), (held,) if int8 else None
    dtypes = {0: "float32"}
    draw: dict[int, Any] = {}
    if int8:
        dtypes |= {3: "int8", 4: "float32"}
        draw = {3: eight_bits, 4: _scales(inner)}
    return Case(name, shapes, dtype, params, tags, dtypes, draw)


def _scales(inner: int) -> Any:
    return lambda generator, shape: np.asarray(generator.uniform(0.5, 2, shape) / (64 * inner**0.5))


CASES = (
    *(
        case
        for name, parts, hidden, ffn, heads, cut in (
            ("llama-1b", 4, 2048, 8192, 4096, 2), ("llama-8b", 2, 4096, 14336, 6144, 1),
        )
        for kind, int8 in ((name, False), (f"{name}-int8", True))
        for case in (
            _case(f"{kind}-gated", parts, hidden, ffn, REAL | {"gpu"}, gate="silu", int8=int8),
            _case(f"{kind}-qkv", parts, hidden, heads, REAL | {"gpu"}, out_parts=cut, int8=int8),
        )
    ),
    _case("one", 1, 1, 1, HOSTILE, dtype="float32"),
    _case("odd", 3, 130, 65, HOSTILE, rows=3, gate="gelu"),
    _case("in-parts", 2, 64, 32, HOSTILE, rows=2, out_parts=4, dtype="float32"),
    _case("a-tile", 2, 128, 128, HOSTILE | {"gpu"}, gate="gelu"),
    _case("one-part", 1, 256, 192, HOSTILE | {"gpu"}),
    _case("float16", 8, 256, 256, HOSTILE | {"gpu"}, out_parts=2, dtype="float16"),
    _case("int8-odd", 3, 130, 65, HOSTILE, rows=2, int8=True),
    _case("int8-a-tile", 2, 256, 128, HOSTILE | {"gpu"}, gate="silu", int8=True),
)  # fmt: skip
