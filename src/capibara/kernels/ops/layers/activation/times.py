"""What an activation's time is made of on a GPU: bytes, and what is computed of each number."""

from __future__ import annotations

import math

from capibara.kernels.core.spec import Call, TimeTerms, nbytes, short_dtype

CACHED = 32e6  # bytes that a chip's second-level cache holds from one pass to the next


def forward(call: Call, implementation: str) -> TimeTerms | None:
    return _terms(call, implementation, outputs=1)


def backward(call: Call, implementation: str) -> TimeTerms | None:
    return _terms(call, implementation, outputs=1 if call["up"] is None else 2)


def _terms(call: Call, implementation: str, outputs: int) -> TimeTerms | None:
    x = call.need("x")
    numbers = math.prod(x.shape)
    if implementation not in ("xla", "hopper") or call.params["rate"] or not numbers:
        return None
    kind, gate = str(call.params["kind"]), "" if call["up"] is None else ", gated"
    moved = sum(map(nbytes, call.args)) + outputs * nbytes(x)
    terms = {
        "launch": 1.0, "bytes": 1e-6 * moved, "bytes beyond the cache": 1e-6 * max(0.0, moved - CACHED),
        f"numbers, {kind}{gate}": 1e-6 * numbers,
    }  # fmt: skip
    return TimeTerms(terms, {"numbers": numbers}, (short_dtype(x.dtype), f"{kind}{gate}"))
