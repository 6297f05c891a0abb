"""Feed-forward layers of published models, and shapes meant to break the kernels."""

from __future__ import annotations

from capibara.kernels.core.spec import Case

REAL = frozenset({"bench", "tune"})
HOSTILE = frozenset({"test"})


def _forward(
    name: str, rows: int, depth: int, columns: int, tags: frozenset[str], kind: str = "silu", *, keep: bool = True,
    dtype: str = "bfloat16",
) -> Case:  # fmt: skip
    params = {"kind": kind, "keep": keep}
    given = {key: value for key, value in params.items() if value != {"kind": "silu", "keep": True}[key]}
    return Case(name, ((rows, depth), (depth, 2 * columns)), dtype, given, tags)


def _grad(
    name: str, rows: int, depth: int, columns: int, tags: frozenset[str], kind: str = "silu", *,
    dtype: str = "bfloat16",
) -> Case:  # fmt: skip
    given = {} if kind == "silu" else {"kind": kind}
    return Case(name, ((rows, depth), (columns, depth), (rows, 2 * columns)), dtype, given, tags)


CASES = (
    _forward("llama-1b", 16384, 2048, 8192, REAL | {"gpu"}),
    _forward("llama-1b-prompt", 8192, 2048, 8192, REAL, keep=False),
    _forward("llama-8b", 8192, 4096, 14336, REAL),
    _forward("gemma-2b", 4096, 2048, 16384, REAL, "gelu_tanh"),
    _forward("odd", 3, 5, 64, HOSTILE, "gelu", dtype="float32"),
    _forward("a-tile", 128, 128, 128, HOSTILE | {"gpu"}),
    _forward("rows-past-a-tile", 200, 192, 320, HOSTILE | {"gpu"}, "gelu_tanh"),
    _forward("result-alone", 136, 320, 192, HOSTILE | {"gpu"}, "gelu", keep=False),
    _forward("shards", 256, 64, 512, HOSTILE | {"shard"}, "relu"),
)
GRAD_CASES = (
    _grad("llama-1b", 16384, 2048, 8192, REAL | {"gpu"}),
    _grad("llama-8b", 8192, 4096, 14336, REAL),
    _grad("gemma-2b", 4096, 2048, 16384, REAL, "gelu_tanh"),
    _grad("odd", 3, 5, 64, HOSTILE, "gelu", dtype="float32"),
    _grad("a-tile", 128, 128, 128, HOSTILE | {"gpu"}),
    _grad("rows-past-a-tile", 200, 192, 320, HOSTILE | {"gpu"}, "gelu_tanh"),
    _grad("shards", 256, 64, 512, HOSTILE | {"shard"}, "relu"),
)
