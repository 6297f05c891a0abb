"""Attention by the pattern of who sees whom: any mask, a window, blocks."""

from __future__ import annotations

from typing import Any

import jax

from capibara.errors import rule_error
from capibara.kernels.ops.attention import inputs
from capibara.kernels.ops.attention.mask_shapes import mask_and_bias
from capibara.surface.flash import flash_attention


def masked(query: Any, key: Any, value: Any, mask: Any, block_size: Any, use_flash: bool, **options: Any) -> Any:
    """Attention under a mask of any form that `mask_and_bias` knows; without `use_flash`, by the reference."""
    if not use_flash:
        if options.get("implementation") not in (None, "reference"):
            raise rule_error(
                "use_flash=False runs the reference",
                f"implementation={options['implementation']!r}",
                "pass one of them",
            )
        options["implementation"] = "reference"
    arrays = tuple(inputs.array(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    options |= _rules(arrays, mask, options)
    return flash_attention(*arrays, block_size=block_size, **options)


def block_sparse(query: Any, key: Any, value: Any, block_mask: Any, block_size: Any, mask: Any, **options: Any) -> Any:
    """Attention in the blocks that a block mask, or a function of positions, leaves."""
    if block_mask is None:
        raise rule_error(
            "block_sparse_attention takes a block mask or a function of positions",
            "None",
            "pass booleans, one a block, or lambda i, j: i - j < 256",
        )
    name = "mask_fn" if callable(block_mask) else "block_mask"
    return masked(query, key, value, mask, block_size, True, **{name: block_mask}, **options)


def _rules(arrays: tuple[Any, ...], mask: Any, options: dict[str, Any]) -> dict[str, Any]:
    """`mask` and `bias` for attention()."""
    if mask is None:
        return {}
    layout = options.get("layout", "bhtd")
    q, k, _ = jax.eval_shape(lambda *x: inputs.heads_first(layout, query=x[0], key=x[1], value=x[2]), *arrays)
    made, bias = mask_and_bias(mask, q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if bias is None:
        return {"mask": made}
    if options.get("bias") is not None:
        raise rule_error(
            "A mask of floats is added to the scores, as a bias is", "both", "add them up and pass the sum as mask"
        )
    return {"mask": made, "bias": bias}
