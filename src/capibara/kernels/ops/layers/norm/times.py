"""What a norm's time is made of on a GPU: bytes, and rows, each of which waits for its sums."""

from __future__ import annotations

from capibara.kernels.core.spec import Call, TimeTerms, nbytes, short_dtype
from capibara.kernels.ops.layers.norm.hopper.forward import REGISTER_COLUMNS
from capibara.kernels.ops.layers.norm.rules import sizes_of, writes_sum

# Bytes of a row that take as long to move as our programs, eight on a core, wait for its sums: 0.43 ns of an H200. Of a
# shorter row the wait shows.
WAITED_BYTES = 1850
# Columns beyond which a row is more than XLA's fused program, and our backward pass, keep at hand.
LONG_ROW = 8192


def forward(call: Call, implementation: str) -> TimeTerms | None:
    x = call.need("x")
    outputs = 2 if writes_sum(call) else 1
    words: tuple[str, ...] = ("statistics",) if call.params["return_stats"] else ()
    words += ("residual",) if call["residual"] is not None else ()
    return _terms(call, implementation, sum(map(nbytes, call.args)) + outputs * nbytes(x), words)


def backward(call: Call, implementation: str) -> TimeTerms | None:
    words: tuple[str, ...] = ("residual",) if call["d_sum"] is not None else ()
    return _terms(call, implementation, sum(map(nbytes, call.args)) + nbytes(call.need("x")), words)


def _terms(call: Call, implementation: str, moved: int, words: tuple[str, ...]) -> TimeTerms | None:
    n = sizes_of(call)
    if implementation not in ("xla", "hopper") or n.groups != 1 or not n.rows:
        return None
    kind = str(call.params["kind"])
    terms = {
        "launch": 1.0, f"bytes, {kind}": 1e-6 * moved, "rows": 1e-3 * n.rows,
        "bytes of long rows": 1e-6 * moved if n.columns > LONG_ROW else 0.0,
        "bytes beyond registers": 1e-6 * moved if n.columns > REGISTER_COLUMNS else 0.0,
        "bytes with a residual": 1e-6 * moved if "residual" in words else 0.0,
        "launch beyond registers": 1.0 if n.columns > REGISTER_COLUMNS else 0.0,
        "waits": 1e-3 * max(0.0, n.rows - moved / WAITED_BYTES),
    }  # fmt: skip
    found = (short_dtype(call.need("x").dtype), kind, *words)
    return TimeTerms(terms, {"rows": n.rows, "columns": n.columns}, found)
