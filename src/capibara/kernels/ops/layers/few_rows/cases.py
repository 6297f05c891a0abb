"""The products of decoding: a model's projections at a few rows, and shapes meant to break them."""

from __future__ import annotations

from capibara.kernels.core.spec import Case

REAL = frozenset({"bench", "tune"})
HOSTILE = frozenset({"test"})


def _case(
    name: str, rows: int, inner: int, outputs: int, tags: frozenset[str], *, gate: str | None = None,
    residual: bool = False, dtype: str = "bfloat16",
) -> Case:  # fmt: skip
    held = 2 * outputs if gate else outputs
    shapes = (rows, inner), (held, inner), (rows, outputs) if residual else None, (outputs,) if residual else None
    return Case(name, shapes, dtype, {"gate": gate} if gate else {}, tags)


def _layer(
    name: str, rows: int, hidden: int, ffn: int, heads: int, tags: frozenset[str] = REAL
) -> tuple[Case, ...]:  # fmt: skip
    """A decoder layer's four products; `heads` counts the columns of queries, keys and values together."""
    return (
        _case(f"{name}-qkv-{rows}", rows, hidden, heads, tags),
        _case(f"{name}-out-{rows}", rows, hidden, hidden, tags, residual=True),
        _case(f"{name}-gated-{rows}", rows, hidden, ffn, tags, gate="silu"),
        _case(f"{name}-down-{rows}", rows, ffn, hidden, tags, residual=True),
    )


CASES = (
    *_layer("llama-1b", 32, 2048, 8192, 4096, REAL | {"gpu"}),
    *(case for rows in (1, 8, 64) for case in _layer("llama-1b", rows, 2048, 8192, 4096)),
    *(case for rows in (1, 32) for case in _layer("llama-8b", rows, 4096, 14336, 6144)),
    _case("one", 1, 1, 1, HOSTILE, dtype="float32"),
    _case("odd", 3, 130, 65, HOSTILE, residual=True),
    _case("a-tile", 1, 128, 128, HOSTILE | {"gpu"}, gate="gelu"),
    _case("steps-that-do-not-divide", 12, 320, 256, HOSTILE | {"gpu"}, residual=True),
    _case("float16", 5, 192, 256, HOSTILE | {"gpu"}, gate="relu", dtype="float16"),
)
