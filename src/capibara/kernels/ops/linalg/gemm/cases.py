"""The shapes gemm is built for: square anchors, the layers of real models, and shapes meant to break it."""

from __future__ import annotations

from capibara.kernels.core.spec import Case

REAL = frozenset({"bench", "tpu", "gpu"})
HOSTILE = frozenset({"test", "tpu"})
HOPPER = frozenset({"test", "gpu"})


def _product(name: str, m: int, k: int, n: int, tags: frozenset[str], **params: object) -> Case:
    """A plain product; "bias" and "residual" in params add those operands."""
    given = dict(params)
    bias = (n,) if given.pop("bias", False) else None
    residual = (m, n) if given.pop("residual", False) else None
    dtype = str(given.pop("dtype", "bfloat16"))
    a = (k, m) if given.get("transpose_a") else (m, k)
    b = (n, k) if given.get("transpose_b") else (k, n)
    return Case(name, (a, b, bias, residual), dtype, given, tags)


CASES = (
    _product("square-4096", 4096, 4096, 4096, REAL | {"tune"}),
    _product("square-8192", 8192, 8192, 8192, REAL | {"tune"}),
    _product("few-rows", 1024, 4096, 4096, REAL | {"tune"}),
    _product("llama-up", 16384, 4096, 14336, REAL | {"tune"}),
    _product("llama-down", 16384, 14336, 4096, REAL | {"tune"}),
    _product("bias-gelu-4096", 4096, 4096, 4096, REAL | {"tune", "fused"}, bias=True, activation="gelu"),
    _product("bias-gelu-up", 16384, 4096, 14336, REAL | {"tune", "fused"}, bias=True, activation="gelu"),
    _product("silu-up", 16384, 4096, 14336, REAL | {"tune", "fused"}, activation="silu"),
    _product("residual-down", 16384, 14336, 4096, REAL | {"tune", "fused"}, residual=True),
    _product("grad-left", 4096, 4096, 4096, REAL | {"tune"}, transpose_b=True),
    _product("grad-right", 4096, 4096, 4096, REAL | {"tune"}, transpose_a=True),
    _product("float32-2048", 2048, 2048, 2048, REAL | {"tune"}, dtype="float32"),
    _product("decode-32", 32, 4096, 14336, REAL | {"tune"}),
    Case("heads-batched", ((64, 2048, 128), (64, 128, 2048), None, None), tags=REAL | {"tune"}),
    # Hostile: one, odd, prime, just past a tile, long and thin, many small batches.
    _product("one", 1, 1, 1, HOSTILE),
    _product("odd", 3, 5, 7, HOSTILE, dtype="float32"),
    _product("prime", 127, 257, 131, HOSTILE, bias=True, activation="silu"),
    _product("past-a-tile", 129, 513, 257, HOSTILE, residual=True, dtype="float32"),
    _product("thin", 8, 1024, 8, HOSTILE),
    _product("both-transposed", 96, 160, 224, HOSTILE, transpose_a=True, transpose_b=True, bias=True),
    _product("everything", 72, 200, 136, HOSTILE, bias=True, residual=True, activation="gelu", transpose_b=True),
    _product("wide-output", 64, 320, 192, HOSTILE, out_dtype="float32"),
    _product("shardable", 128, 256, 192, HOSTILE | {"shard"}, bias=True, residual=True, activation="silu"),
    _product("hopper-edges", 200, 320, 448, HOSTILE | {"gpu"}, bias=True, residual=True, activation="gelu"),
    Case(
        "hopper-batched",
        ((3, 320, 192), (3, 448, 320), None, None),
        params={"transpose_a": True, "transpose_b": True},
        tags=HOSTILE | {"gpu"},
    ),
    _product("hopper-odd-rows", 331, 192, 320, HOPPER, bias=True, residual=True, activation="gelu"),
    _product("hopper-one-row", 1, 128, 192, HOPPER, transpose_b=True, out_dtype="float32"),
    Case("many-small", ((37, 16, 24), (37, 24, 40), (40,), None), "float32", tags=HOSTILE),
    Case("shared-left", ((48, 64), (5, 64, 32), None, (5, 48, 32)), "bfloat16", tags=HOSTILE),
)
