"""What a decoded row goes through between two attentions of published models, and shapes meant to break it."""

from __future__ import annotations

from typing import Any

import numpy as np

from capibara.kernels.core.spec import Case
from capibara.kernels.ops.layers.few_rows.cases import eight_bits

REAL = frozenset({"bench", "tune", "gpu"})
HOSTILE = frozenset({"test"})


def _scales(inner: int) -> Any:
    return lambda generator, shape: np.asarray(generator.uniform(0.5, 2, shape) / (64 * inner**0.5))


def _case(
    name: str, inner: int, hidden: int, ffn: int, outputs: int, tags: frozenset[str], *, rows: int = 1,
    dtype: str = "bfloat16", int8: bool = False, **params: Any,
) -> Case:  # fmt: skip
    weights = [(hidden, inner), (2 * ffn, hidden), (hidden, ffn)] + ([(outputs, hidden)] if outputs else [])
    first, second, third, *last = weights
    scales = [(held,) if int8 else None for held, _ in weights] + ([] if outputs else [None])
    shapes = (
        (rows, inner), (rows, hidden), first, (hidden,), second, third, (hidden,), last[0] if last else None,
        *scales, None,
    )  # fmt: skip
    places = (2, 4, 5, 7)[: len(weights)]
    inputs = [w[1] for w in weights]
    dtypes: dict[int, str] = {}
    # Products of about one, so that gates and norms see what they see in a model.
    draw: dict[int, Any] = {
        place: lambda generator, shape: generator.standard_normal(shape) / shape[1] ** 0.5 for place in places
    }
    if int8:
        dtypes = {**dict.fromkeys(places, "int8"), **{8 + n: "float32" for n in range(len(weights))}}
        draw = {**dict.fromkeys(places, eight_bits), **{8 + n: _scales(k) for n, k in enumerate(inputs)}}
    return Case(name, shapes, dtype, params, tags, dtypes, draw)


CASES = (
    *(
        _case(f"{name}{'-int8' if int8 else ''}", inner, hidden, ffn, outputs, REAL, int8=int8, out_parts=parts)
        for int8 in (False, True)
        for name, inner, hidden, ffn, outputs, parts in (
            ("llama-1b", 2048, 2048, 8192, 4096, 2), ("llama-8b", 4096, 4096, 14336, 6144, 1),
        )
    ),
    _case("llama-1b-last", 2048, 2048, 8192, 0, REAL),
    _case("llama-1b-int8-last", 2048, 2048, 8192, 0, REAL, int8=True),
    _case("one", 1, 1, 1, 1, HOSTILE, dtype="float32"),
    _case("odd", 34, 66, 35, 70, HOSTILE, rows=3, gate="gelu", out_parts=3),
    _case("odd-int8", 34, 66, 35, 70, HOSTILE, rows=2, int8=True),
    _case("last", 32, 64, 96, 0, HOSTILE, rows=2, dtype="float32"),
    _case("float16", 256, 256, 512, 256, HOSTILE | {"gpu"}, dtype="float16", out_parts=2),
    _case("wide-attention", 1024, 512, 256, 384, HOSTILE | {"gpu"}, out_parts=4, gate="gelu_tanh"),
    _case("int8-small", 512, 512, 256, 512, HOSTILE | {"gpu"}, int8=True, out_parts=2),
    _case("small-last", 256, 256, 256, 0, HOSTILE | {"gpu"}),
)  # fmt: skip
