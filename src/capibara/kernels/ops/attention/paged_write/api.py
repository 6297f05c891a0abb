"""paged_write: the public function and the op behind it."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float, Int

from capibara.kernels.core.dispatch import run, takes_kernel
from capibara.kernels.core.op import Op, call_of, register
from capibara.kernels.core.operands import as_array
from capibara.kernels.core.spec import Implementation
from capibara.kernels.ops.attention.paged_write import hopper, xla
from capibara.kernels.ops.attention.paged_write.cases import CASES
from capibara.kernels.ops.attention.paged_write.reference import reference
from capibara.kernels.ops.attention.paged_write.rules import check, cost, tolerance

PAGED_WRITE = Op(
    "paged_write",
    family="attention",
    reference=reference,
    operands=("projected", "key_pages", "value_pages", "cos", "sin", "page", "slot"),
    params={"spare_page": False},
    hints=("spare_page",),
    check=check,
    cost=cost,
    tolerance=tolerance,
    cases=CASES,
)
PAGED_WRITE.implement(xla.IMPLEMENTATION, hopper.IMPLEMENTATION, Implementation("reference", reference))


def paged_write(
    projected: Float[Array, "*parts tokens all_heads D"],
    key_pages: Float[Array, "pages page_size Hkv D"] | Float[Array, "pages page_size width"],
    value_pages: Float[Array, "pages page_size Hkv D"] | Float[Array, "pages page_size width"],
    cos: Float[Array, "tokens half"],
    sin: Float[Array, "tokens half"],
    page: Int[Array, " tokens"],
    slot: Int[Array, " tokens"],
    *,
    spare_page: bool = False,
    implementation: str | None = None,
    config: Any = None,
) -> tuple[Float[Array, "tokens H D"], Array, Array]:
    """What goes before `paged_attention`: queries and keys turned, keys and values written to their pages.

    Inside of jit the pools are written where they lie, if they are donated or were made there, and nothing reads them
    as they were before.

    Args:
      projected: [tokens, heads + 2 * kv_heads, head_dim], as one product gives them: each token's queries, its keys and
        its values. Or in parts, float32 [parts, tokens, ...], as `few_rows(..., out_parts=n)` gives them: their sum is
        rounded to the pools' type.
      key_pages, value_pages: the pools, [pages, page_size, kv_heads, head_dim], or a key's heads side by side,
        [pages, page_size, kv_heads * head_dim].
      cos, sin: of each token's position, float32 [tokens, rotary_dim / 2]: rows of `rope_tables`. The first rotary_dim
        numbers of a head are turned in the style "half", the others stay.
      page, slot: where each token's key and value go, in pages and inside of one; no two tokens to one place. A page or
        a slot that is not in the pools: nowhere.
      spare_page: the pools' last page is nobody's, and what goes nowhere may be written there: XLA needs a pass less
        for one token. All else is the same.
      implementation: force one by name ("xla", "hopper", "reference"); a refusal is an error.
      config: that implementation's tuning choices; by default from the tuned table or a rule.

    Returns:
      (queries [tokens, heads, head_dim], key pages, value pages).

    >>> import jax.numpy as jnp
    >>> pool = jnp.zeros((6, 4, 2, 32))
    >>> straight, none = jnp.ones((3, 16)), jnp.zeros((3, 16))
    >>> page, slot = jnp.array([5, 0, 6]), jnp.array([3, 0, 0])
    >>> query, keys, values = paged_write(jnp.ones((3, 8 + 2 + 2, 32)), pool, pool, straight, none, page, slot)
    >>> query.shape, float(keys[5, 3].sum()), float(keys.sum())
    ((3, 8, 32), 64.0, 128.0)
    """
    given = (projected, key_pages, value_pages, cos, sin, page, slot)
    operands = tuple(as_array("paged_write", name, x) for name, x in zip(PAGED_WRITE.operands, given, strict=True))
    params = {"spare_page": True} if spare_page else {}
    return run(PAGED_WRITE, operands, params, implementation=implementation, config=config)


def has_kernel(*operands: Any, spare_page: bool = False) -> bool:
    """Whether dispatch takes a kernel for this call of `paged_write`: elsewhere its steps are as well written out.

    Shapes and types will do (`jax.ShapeDtypeStruct`).
    """
    return takes_kernel(call_of(PAGED_WRITE, operands, {"spare_page": spare_page}))


PAGED_WRITE.public = paged_write
register(PAGED_WRITE)
