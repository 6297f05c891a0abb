"""vmap of an op that has no axis for the batch."""

from __future__ import annotations

from typing import Any

import jax

from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Prefer


def one_by_one(
    op: Op, batched: tuple[bool, ...], arrays: tuple[Any, ...], params: dict[str, Any], prefer: Prefer
) -> Any:
    """The elements of the batch one after another; `batched` says which operands have its axis, in front."""
    mapped = [x for x, b in zip(arrays, batched, strict=True) if b]

    def one(slices: list[Any]) -> Any:
        given = iter(slices)
        full = tuple(next(given) if b else x for x, b in zip(arrays, batched, strict=True))
        return run(op, full, params, prefer=prefer)

    return jax.lax.map(one, mapped)
