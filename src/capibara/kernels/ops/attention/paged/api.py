"""paged_attention: the public function, and the op behind it."""

from __future__ import annotations

from typing import Any, Literal, overload

from jaxtyping import Array, Float, Int

from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op, register
from capibara.kernels.core.spec import Implementation
from capibara.kernels.ops.attention import inputs
from capibara.kernels.ops.attention.paged import debug as values
from capibara.kernels.ops.attention.paged import mesh, rules, xla
from capibara.kernels.ops.attention.paged.cases import CASES
from capibara.kernels.ops.attention.paged.efficiency import efficiency
from capibara.kernels.ops.attention.paged.hopper import forward as hopper
from capibara.kernels.ops.attention.paged.reference import reference
from capibara.kernels.ops.attention.paged.tpu import forward as tpu

PAGED_ATTENTION = Op(
    "paged_attention",
    family="attention",
    reference=reference,
    operands=("query", "key_pages", "value_pages", "page_table", "context_lengths", "query_starts"),
    params={"window": None, "scale": None, "softcap": None, "key_splits": None, "return_lse": False},
    check=rules.check,
    cost=rules.cost,
    efficiency=efficiency,
    tolerance=rules.tolerance,
    partition=mesh.PARTITION,
    cases=CASES,
)

PAGED_ATTENTION.implement(
    xla.IMPLEMENTATION,
    tpu.IMPLEMENTATION,
    hopper.IMPLEMENTATION,
    Implementation("reference", reference),
)


@overload
def paged_attention(
    query: Array, key_pages: Array, value_pages: Array, page_table: Array, context_lengths: Array,
    query_starts: Array | None = None, *, window: int | None = None, scale: float | None = None,
    softcap: float | None = None, key_splits: int | None = None, return_lse: Literal[False] = False,
    debug: bool = False, implementation: str | None = None, config: Any = None,
) -> Array: ...  # fmt: skip


@overload
def paged_attention(
    query: Array, key_pages: Array, value_pages: Array, page_table: Array, context_lengths: Array,
    query_starts: Array | None = None, *, window: int | None = None, scale: float | None = None,
    softcap: float | None = None, key_splits: int | None = None, return_lse: Literal[True], debug: bool = False,
    implementation: str | None = None, config: Any = None,
) -> tuple[Array, Array]: ...  # fmt: skip


@overload
def paged_attention(
    query: Array, key_pages: Array, value_pages: Array, page_table: Array, context_lengths: Array,
    query_starts: Array | None = None, *, window: int | None = None, scale: float | None = None,
    softcap: float | None = None, key_splits: int | None = None, return_lse: bool, debug: bool = False,
    implementation: str | None = None, config: Any = None,
) -> Array | tuple[Array, Array]: ...  # fmt: skip


def paged_attention(
    query: Float[Array, "tokens H D"],
    key_pages: Float[Array, "pages page_size Hkv D"] | Float[Array, "pages page_size width"],
    value_pages: Float[Array, "pages page_size Hkv D"] | Float[Array, "pages page_size width"],
    page_table: Int[Array, "sequences max_pages"],
    context_lengths: Int[Array, " sequences"],
    query_starts: Int[Array, " sequences+1"] | None = None,
    *,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    key_splits: int | None = None,
    return_lse: bool = False,
    debug: bool = False,
    implementation: str | None = None,
    config: Any = None,
) -> Float[Array, "tokens H D"] | tuple[Float[Array, "tokens H D"], Float[Array, "tokens H"]]:
    """Attention of a ragged batch over a paged cache: prompts, pieces of prompts and single tokens in one call.

    Each sequence's tokens see its own keys causally: token j of the n that a sequence has here stands at position
    context_length - n + j and sees the keys up to its own. Keys that no token sees, the unused rest of a page and
    page-table entries that hold no key in sight may be anything, NaN included: they are never used. With a window,
    pages that lie wholly before it may be freed. A NaN or an infinity among the keys that are seen is its own head's
    alone, but on a TPU, whose kernel multiplies the heads of a page together: there it may reach the sequence's others.

    Args:
      query: [tokens, heads, head_dim], the tokens of all sequences one after another.
      key_pages, value_pages: the pools, [pages, page_size, kv_heads, head_dim], this call's tokens written already.
        Head h of the query uses head h // (heads / kv_heads) of the pools. Or [pages, page_size, kv_heads * head_dim],
        a key's heads side by side: the way to hold a cache with a head_dim below 128 on a TPU, whose compiler would
        lay four axes out in an order that no page can be fetched from, and copy the pool at every call. (Pages of a
        multiple of 128 keys can be fetched either way.)
      page_table: [sequences, max_pages]; key i of a sequence is in its page i // page_size.
      context_lengths: how many keys each sequence has, this call's tokens included. 0 gives zeros.
      query_starts: [sequences + 1], where each sequence's tokens start and the last one's end. None: one token a
        sequence. Tokens past the last start are padding, and give zeros.
      window: each token sees its own key and the window - 1 before it.
      scale: 1 / sqrt(head_dim) by default.
      softcap: c makes each score c · tanh(score / c).
      key_splits: into how many parts the keys are cut, to be worked on side by side and joined: for few sequences
        with long contexts. By default chosen from the shapes and the chip's cores. Results agree up to rounding.
      return_lse: also return the log-sum-exp of the scores, float32 [tokens, heads], minus infinity where a token
        sees nothing.
      debug: check that pages in use are in the pool, lengths fit their row of the table and starts do not fall. A
        ValueError at once, or for traced arrays an error of the running program (jax.errors.JaxRuntimeError with the
        same text) when its result is waited for. It reads the three arrays on the host at every call.
      implementation: force one by name; a refusal is an error.
      config: that implementation's tuning choices; by default from the tuned table or a rule.

    Two sequences, of 3 and of 5 keys, in pages of 4:

    >>> import jax.numpy as jnp
    >>> pool = jnp.ones((6, 4, 2, 32))
    >>> table = jnp.array([[5, 0], [2, 3]])
    >>> paged_attention(jnp.ones((2, 8, 32)), pool, pool, table, jnp.array([3, 5])).shape
    (2, 8, 32)

    The second sequence with two tokens at once:

    >>> starts = jnp.array([0, 1, 3])
    >>> paged_attention(jnp.ones((3, 8, 32)), pool, pool, table, jnp.array([3, 5]), starts).shape
    (3, 8, 32)
    """
    operands = tuple(
        inputs.array(name, x)
        for name, x in zip(
            PAGED_ATTENTION.operands,
            (query, key_pages, value_pages, page_table, context_lengths, query_starts),
            strict=True,
        )
    )
    given: dict[str, Any] = {
        "window": None if window is None else inputs.static_int("window", window),
        "scale": None if scale is None else inputs.static_float("scale", scale),
        "softcap": None if softcap is None else inputs.static_float("softcap", softcap),
        "key_splits": None if key_splits is None else inputs.static_int("key_splits", key_splits),
        "return_lse": bool(return_lse),
    }
    changed = {name: value for name, value in given.items() if value != PAGED_ATTENTION.params[name]}
    if debug:
        PAGED_ATTENTION.call(*operands, **changed)  # shapes first: the values are read by them
        q, keys, _, table, lengths, starts = operands
        lengths = values.checked(
            table, lengths, starts, tokens=q.shape[0], pages=keys.shape[0], page_size=keys.shape[1],
            window=given["window"],
        )  # fmt: skip
        operands = (*operands[:4], lengths, starts)
    return run(PAGED_ATTENTION, operands, changed, implementation=implementation, config=config)


PAGED_ATTENTION.public = paged_attention
register(PAGED_ATTENTION)
