"""What a call of rope may be, its cost, how exact it is, and how it is batched and split over a mesh."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from capibara.errors import rule_error, unknown_name
from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Call, Cost, Operand, Partition, Prefer, describe, nbytes, unit_roundoff

STYLES = ("half", "interleaved")
LAYOUTS = ("bhtd", "bthd")


def each_head(cos: jax.Array, sin: jax.Array, layout: str) -> tuple[jax.Array, jax.Array]:
    """[T, n] or [B, T, n] with four axes, 1 for the heads: broadcast once and not in each product, they are kept once
    for the gradient."""
    heads = layout.index("h")
    cos, sin = (jnp.expand_dims(x if x.ndim == 3 else x[None], heads) for x in (cos, sin))
    return cos, sin


def check_x(x: Operand | jax.Array, layout: str) -> None:
    """Of x alone, before there are angles for it."""
    if layout not in LAYOUTS:
        raise unknown_name("layout of rope", layout, LAYOUTS)
    if x is None or len(x.shape) != 4 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise rule_error(f"rope takes four axes, {layout}, of floats", describe(x), "add axes with x[None]")


def check_style(style: str) -> None:
    if style not in STYLES:
        raise unknown_name("style of rope", style, STYLES)


def check(call: Call) -> None:
    """Refuse a call that has no meaning, saying the rule, what arrived and the fix."""
    x, cos, sin = call.args
    layout: Any = call.params["layout"]
    check_style(str(call.params["style"]))
    check_x(x, layout)
    assert x is not None
    batch, length, depth = (x.shape[layout.index(axis)] for axis in "btd")
    for angles in (cos, sin):
        if angles is None or angles.dtype not in (jnp.float32, jnp.float64):
            raise rule_error("cos and sin are float32", describe(angles), "take rows of rope_tables(...)")
    assert cos is not None
    assert sin is not None
    if cos.shape != sin.shape or cos.shape[:-1] not in ((length,), (batch, length)):
        raise rule_error(
            f"cos and sin are [length, pairs] or [batch, length, pairs], here [{length}, pairs] or [{batch}, {length}, "
            "pairs]",
            call.signature,
            "take rows of rope_tables(...) by the positions",
        )
    if not 1 <= cos.shape[-1] <= depth // 2:
        raise rule_error(
            "What is turned of a head is 1 pair to all of it", call.signature, "pass the angles of fewer pairs"
        )


def cost(call: Call) -> Cost:
    """x read and written once, the angles read once; each pair takes four products and two sums."""
    x, cos = call.need("x"), call.need("cos")
    pairs = math.prod(x.shape[:-1]) * cos.shape[-1]
    return Cost(vector_flops=max(6.0 * pairs, 1.0), bytes=float(nbytes(x) + sum(map(nbytes, call.args))),
                dtype="float32")  # fmt: skip


def tolerance(call: Call) -> float:
    """The relative error that a right result stays under: its rounding to x's type, and three in float32."""
    dtype = call.need("x").dtype
    return unit_roundoff(dtype) + 4 * unit_roundoff(jnp.promote_types(jnp.float32, dtype))


def batch(
    op: Op, size: int, batched: tuple[bool, ...], arrays: tuple[Any, ...], params: dict[str, Any], prefer: Prefer
) -> Any:
    """vmap: `size` calls as one with a batch `size` times as large; angles that all of them share stay as they are."""
    x, *angles = arrays
    inner = x.shape[1] if batched[0] else x.shape[0]

    def folded(array: Any, is_batched: bool, axes: int) -> Any:
        """An array that has `axes` without any batch: with both batches as one."""
        if not is_batched:
            array = jnp.broadcast_to(array, (size, *array.shape))
        if array.ndim == axes + 1:
            array = jnp.broadcast_to(array[:, None], (size, inner, *array.shape[1:]))
        return array.reshape(size * inner, *array.shape[2:])

    shared = not any(batched[1:]) and angles[0].ndim == 2
    angles = angles if shared else [folded(table, b, 2) for table, b in zip(angles, batched[1:], strict=True)]
    made = run(op, (folded(x, batched[0], 3), *angles), params, prefer=prefer)
    return made.reshape(size, inner, *made.shape[1:])


def rule(call: Call) -> str:
    """d: of a head, n: its pairs."""
    heads = " ".join(str(call.params["layout"]))
    angles = "b t n" if len(call.need("cos").shape) == 3 else "t n"
    return f"{heads}, {angles}, {angles} -> {heads}"


PARTITION = Partition(
    rule, replicated=lambda call: ("d", "n"), logical={"b": "batch", "t": "sequence", "h": "heads"}
)  # fmt: skip
