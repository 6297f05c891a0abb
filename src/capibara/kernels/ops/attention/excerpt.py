"""A part of a large call that can be checked by itself: the first batch element and the heads of its first key head.

No number of it depends on the rest, so its reference needs a small share of the work and memory of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Excerpt


def first_group(op: Op, arrays: Sequence[Any]) -> Excerpt | None:
    """None with a bias that others share, whose gradient is a sum over all of them."""
    given = dict(zip(op.operands, arrays, strict=False))
    q, k, bias = given["q"], given["k"], given.get("bias")
    group = q.shape[1] // k.shape[1]
    if bias is not None and (bias.shape[0] < q.shape[0] or bias.shape[1] < q.shape[1]):
        return None

    def cut(name: str, x: Any) -> Any:
        if x is None or name == "dropout_seed":
            return x
        if name in ("q_segments", "kv_segments"):
            return x[:1]
        return x[:1, :1] if name in ("k", "v") else x[:1, :group]

    def outputs(made: Sequence[Any]) -> list[Any]:
        """The forward's are all of the query's heads; the backward's have the operands' order."""
        names = ("q", "k", "v", "bias") if "d_out" in op.operands else ("q", "lse")
        return [cut(name, x) for name, x in zip(names, made, strict=False)]

    def gradients(made: Sequence[Any]) -> list[Any]:
        floats = [name for name in op.operands if name in ("q", "k", "v", "bias") and given.get(name) is not None]
        return [cut(name, x) for name, x in zip(floats, made, strict=False)]

    chosen = tuple(cut(name, x) for name, x in zip(op.operands, arrays, strict=False))
    return Excerpt(chosen, outputs, gradients, "the first batch element and key head")
