"""From the arguments of attention() to the operands and parameters of the op."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.errors import rule_error, unknown_name
from capibara.kernels.core.operands import as_array
from capibara.kernels.core.spec import describe
from capibara.kernels.ops.attention.block_mask import DEFAULT_BLOCK, MaskFn, block_mask_from
from capibara.kernels.ops.attention.masking import Window

LAYOUTS = ("bhtd", "bthd")


def four_axes_in(layout: str, **arrays: Any) -> list[jax.Array]:
    """The query, key and value, as they are given, once they have the axes of a known layout."""
    if layout not in LAYOUTS:
        raise unknown_name("layout of attention", layout, LAYOUTS)
    made = []
    for name, value in arrays.items():
        x = array(name, value)
        if x is None:
            raise rule_error("attention takes a query, a key and a value", f"a {name} of None", "pass an array")
        if x.ndim != 4:
            axes = "batch, heads, length, head_dim" if layout == "bhtd" else "batch, length, heads, head_dim"
            raise rule_error(
                f"attention's arrays have four axes, [{axes}] with layout={layout!r}",
                f"a {name} of {describe(x)}",
                "add the missing axes with x[None], or fold the extra ones into the batch",
            )
        made.append(x)
    return made


def heads_first(layout: str, **arrays: Any) -> list[jax.Array]:
    """The query, key and value as [batch, heads, length, head_dim]."""
    made = four_axes_in(layout, **arrays)
    return made if layout == "bhtd" else [x.swapaxes(1, 2) for x in made]


def array(name: str, x: Any) -> Any:
    """An array, or an error that names the argument; None stays None."""
    return as_array("attention", name, x, optional=True)


def four_axes(name: str, x: Any) -> Any:
    """A mask or bias [queries, keys] gets axes of 1 for the batch and the heads."""
    x = array(name, x)
    return x[None, None] if x is not None and x.ndim == 2 else x


def segments(segment_ids: Any, key_segment_ids: Any, rows: int, columns: int) -> tuple[Any, Any]:
    """Ids of the queries and of the keys; one array serves for both where the lengths agree."""
    if segment_ids is None and key_segment_ids is None:
        return None, None
    if segment_ids is not None and key_segment_ids is None and rows == columns:
        key_segment_ids = segment_ids
    if segment_ids is None or key_segment_ids is None:
        raise rule_error(
            "Segment ids are given for the queries and for the keys, unless the lengths agree",
            f"{'key_' if segment_ids is None else ''}segment_ids alone, with {rows} queries and {columns} keys",
            "pass both segment_ids and key_segment_ids",
        )

    def ids(name: str, x: Any) -> jax.Array:
        x = array(name, x)
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise rule_error(f"{name} is an array of integers", describe(x), "convert it with .astype(jnp.int32)")
        return x.astype(jnp.int32)

    return ids("segment_ids", segment_ids), ids("key_segment_ids", key_segment_ids)


def causal_flag(causal: bool | None, is_causal: bool | None) -> bool:
    """One rule under two names, ours and jax.nn's."""
    if causal is not None and is_causal is not None and bool(causal) != bool(is_causal):
        raise rule_error(
            "causal and is_causal are one rule, in capibara's spelling and in jax.nn's",
            f"causal={causal} and is_causal={is_causal}",
            "pass one of them",
        )
    return bool(causal or is_causal)


def static_int(name: str, x: Any) -> int:
    if isinstance(x, bool) or not isinstance(x, int | np.integer):
        raise rule_error(
            f"{name} is a whole number known before tracing", repr(x), "pass a Python int (static under jit)"
        )
    return int(x)


def static_float(name: str, x: Any) -> float:
    if isinstance(x, bool) or not isinstance(x, int | float | np.integer | np.floating):
        raise rule_error(f"{name} is a number known before tracing", repr(x), "pass a Python float (static under jit)")
    return float(x)


def pair(name: str, x: Any) -> tuple[Any, Any]:
    if not isinstance(x, tuple | list) or len(x) != 2:
        raise rule_error(f"{name} has two parts", repr(x), f"pass {name}=(a, b)")
    return tuple(None if side is None else static_int(name, side) for side in x)  # type: ignore[return-value]


def window_sides(window: Any) -> Window:
    """(left, right); a number w is its own key and the w - 1 before it."""
    if window is None:
        return None
    if isinstance(window, tuple | list):
        return pair("window", window)
    width = static_int("window", window)
    if width < 1:
        raise rule_error(
            "A window holds 1 key or more", str(width), "pass window=1 for a query's own key, or None for all"
        )
    return width - 1, 0


def dropout_seed(rate: float, key: Any) -> jax.Array | None:
    """Two words drawn from a JAX key; None when nothing is dropped."""
    if rate <= 0 or key is None:
        return None  # the op's check refuses a rate without a seed, and a rate out of range
    try:
        return jax.random.bits(key, (2,), jnp.uint32)
    except TypeError as error:
        raise rule_error("Dropout draws from a JAX key", repr(key), "pass jax.random.key(...)") from error


def sparsity(
    mask_fn: MaskFn | None, block_mask: Any, block_size: Any, mask: Any, rows: int, columns: int,
    causal: bool, q_offset: int, window: Window,
) -> tuple[Any, Any, tuple[int, int] | None]:  # fmt: skip
    """(mask, block_mask, block_size), with what a mask function says worked in."""
    size = None if block_size is None else pair("block_size", _squared(block_size))
    if mask_fn is None:
        block_mask = array("block_mask", block_mask)
        if block_mask is not None and block_mask.ndim == 2:
            block_mask = block_mask[None, None]
        return mask, block_mask, size
    if block_mask is not None:
        raise rule_error(
            "Sparsity is given by a block mask or by a mask function", "both", "pass one, or pass the other as mask"
        )
    size = size or DEFAULT_BLOCK
    if min(n or 0 for n in size) < 1:
        raise rule_error("A block size is (queries, keys), both 1 or more", repr(size), "pass block_size=(128, 128)")
    found = block_mask_from(mask_fn, rows, columns, size, causal=causal, query_offset=q_offset, window=window)
    if found.pairs is not None:
        pairs = jnp.asarray(found.pairs)
        mask = pairs if mask is None else mask & pairs
    return mask, jnp.asarray(found.blocks), size


def _squared(size: Any) -> Any:
    return (size, size) if isinstance(size, int | np.integer) else size
