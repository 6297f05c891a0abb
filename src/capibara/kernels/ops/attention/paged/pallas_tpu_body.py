"""The body of the TPU paged attention kernel: the loop over a tile's pages, for each of the forms a page may have.

A page is fetched whole, with all of its heads, and lies in one of three forms:

- "rows", [page_size * kv_heads, head_dim]: keys and heads are rows of one matrix. The scores of a tile's query heads
  against all of these rows take as many passes of the matrix unit as those against their own head's rows alone,
  because a decoding token has far fewer query heads than the unit has rows; pairs of different heads are masked.
- "lanes", [page_size, kv_heads * head_dim]: a key's heads lie side by side. Each query is spread over as many lanes,
  zero but for its own head's: one product gives its scores with no pair to mask, and another the sums of every head,
  of which its own are picked at the end.
- "turned", [kv_heads * head_dim, page_size]: the same with the keys along the lanes.

So no head is ever picked out of a page, which the packed layout would make slow. Tiles of a prompt pay for it: their
products are kv_heads times the least.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from capibara.errors import rule_error, unknown_name
from capibara.kernels.ops.attention.paged.rules import Sizes
from capibara.kernels.ops.attention.pallas_tpu_common import FLOOR, LANES, LOG2_E, MASKED

SLOTS = 2
FORMS = ("rows", "lanes", "turned")


@dataclasses.dataclass(frozen=True)
class PagesConfig:
    """How the work is cut.

    Attributes:
      tokens: of a tile (1 where the call has no query_starts).
      pages: fetched in one step.
      chunk: pages whose scores are in registers together; it divides `pages`.
      splits: parts along the keys, where the call does not say.
      cores: of the chip, that the tiles are dealt out to.
      form: how a page is read, "rows", "lanes" or "turned". Only one of them is how the pool lies in memory, see
        `pallas_tpu.form_of`; for another the compiler copies the whole pool first.
    """

    tokens: int = 1
    pages: int = 8
    chunk: int = 2
    splits: int = 1
    cores: int = 1
    form: str = "rows"

    def __post_init__(self) -> None:
        for name in ("tokens", "pages", "chunk", "splits", "cores"):
            if getattr(self, name) < 1:
                raise rule_error(f"{name} is 1 or more", getattr(self, name), f"raise {name}")
        if self.pages % self.chunk:
            raise rule_error("chunk divides pages", self, "make pages a multiple of chunk")
        if self.form not in FORMS:
            raise unknown_name("form", self.form, FORMS)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the body is specialised by."""

    n: Sizes
    config: PagesConfig
    per_core: int
    window: int | None
    scale: float
    softcap: float | None
    precision: jax.lax.Precision | None

    @property
    def turned(self) -> bool:
        return self.config.form == "turned"

    @property
    def spread(self) -> bool:
        """Whether a key's heads lie side by side, and queries are spread over them."""
        return self.config.form != "rows"

    @property
    def unit(self) -> int:
        """Scores of one key: one for each head of a page's rows, or one."""
        return 1 if self.spread else self.n.kv_heads

    @property
    def length(self) -> int:
        """Scores of one page."""
        return self.n.page_size * self.unit

    @property
    def depth(self) -> int:
        """Numbers that a query and a key are multiplied over."""
        return self.n.depth * (self.n.kv_heads if self.spread else 1)

    @property
    def step_keys(self) -> int:
        return self.config.pages * self.n.page_size

    def matrix(self, pages: int) -> tuple[int, int]:
        """The shape of so many pages beside each other."""
        shape = (pages * self.length, self.depth)
        return shape[::-1] if self.turned else shape

    def part(self, at: Any) -> tuple[Any, Any]:
        """Where so much of the keys' axis is in such a matrix."""
        return (slice(None), at) if self.turned else (at, slice(None))

    def pool(self, x: jax.Array) -> jax.Array:
        """A pool with each page in its form; see `pallas_tpu.form_of` for when this moves nothing."""
        if self.turned:
            x = x.reshape(self.n.pages, self.n.page_size, self.n.kv_heads, self.n.depth).transpose(0, 2, 3, 1)
        return x.reshape(self.n.pages, *self.matrix(1))


def body(*given: Any, plan: Plan, names: tuple[str, ...]) -> None:
    """Grid (core, turn): the tiles and parts of each, dealt out to the cores."""
    refs = dict(zip(names, given, strict=True))
    first, last, done = refs["first"], refs["last"], refs["done"]
    core, turn = pl.program_id(0), pl.program_id(1)
    cores = plan.config.cores
    item = turn * cores + core
    steps = last[item] - first[item]

    @pl.when(turn == 0)
    def _() -> None:
        done[0] = 0

    before = done[0]
    # The tile before fetched this one's first pages, if both have any.
    previous = jnp.maximum(item - cores, 0)
    fetched = (turn > 0) & (last[previous] > first[previous])
    following = jnp.minimum(item + cores, plan.per_core * cores - 1)
    follows = (turn + 1 < plan.per_core) & (last[following] > first[following])
    for name, start in (("acc", 0.0), ("highest", FLOOR), ("total", 0.0)):
        refs[name][...] = jnp.full_like(refs[name], start)

    @pl.when((steps > 0) & ~fetched)
    def _() -> None:
        _fetch(plan, refs, item, first[item], jax.lax.rem(before, SLOTS))

    if plan.spread:
        _spread_queries(plan, refs)

    @pl.loop(0, steps)
    def _step(step: Any) -> None:
        slot = jax.lax.rem(before + step, SLOTS)
        block = first[item] + step

        @pl.when(step + 1 < steps)
        def _() -> None:
            _fetch(plan, refs, item, block + 1, 1 - slot)

        @pl.when((step + 1 == steps) & follows)
        def _() -> None:
            _fetch(plan, refs, following, first[following], 1 - slot)

        _fetch(plan, refs, item, block, slot, wait=True)
        start, end = block * plan.step_keys, refs["end"][item]
        whole = start + plan.step_keys <= refs["position"][item] + 1
        if plan.window is not None:
            whole = whole & (start > end - 1 - plan.window)
        pl.when(whole)(lambda: _compute(plan, refs, item, block, slot, partial=False))
        pl.when(~whole)(lambda: _compute(plan, refs, item, block, slot, partial=True))

    done[0] = before + steps
    total = refs["total"][...]
    seen = total != 0.0  # a NaN among the keys in sight is not nothing, and stays
    safe = jnp.where(seen, total, 1.0)
    out = refs["acc"][...] * jnp.where(seen, 1.0 / safe, 0.0)
    refs["out"][...] = (_own_head(plan, refs, out) if plan.spread else out).astype(refs["out"].dtype)
    refs["lse"][...] = jnp.where(seen, refs["highest"][...] * math.log(2) + jnp.log(safe), -jnp.inf)


def _fetch(plan: Plan, refs: dict[str, Any], item: Any, block: Any, slot: Any, wait: bool = False) -> None:
    """Start, or wait for, the copies of a block's pages that hold a key in sight; of no other entry of the table."""
    # lax.div and lax.rem: `//` and `%` round towards minus infinity, which nothing here needs and which costs a sign.
    size, pages, length = plan.n.page_size, plan.config.pages, plan.length
    low = jnp.maximum(block * pages, jax.lax.div(refs["begin"][item], size))
    high = jnp.minimum((block + 1) * pages, jax.lax.div(refs["end"][item] + size - 1, size))
    row = refs["sequence"][item] * plan.n.max_pages

    @pl.loop(low, high)
    def _page(column: Any) -> None:
        page = jnp.clip(refs["table"][row + column], 0, plan.n.pages - 1)
        at = plan.part(pl.ds(pl.multiple_of((column - block * pages) * length, length), length))
        for pool, slots, number in (("k", "k_slots", 0), ("v", "v_slots", 1)):
            copy = pltpu.make_async_copy(
                refs[pool].at[page], refs[slots].at[slot, *at], refs["arrived"].at[slot, number]
            )
            copy.wait() if wait else copy.start()


def _spread_queries(plan: Plan, refs: dict[str, Any]) -> None:
    """Each query at its own head's place among all heads', zero elsewhere."""
    q = refs["q"][...]
    # A product with ones and zeros: it copies every query to the place of each head, which no move of lanes does.
    repeated = jax.lax.dot(q, refs["repeat"][...], precision=plan.precision, preferred_element_type=jnp.float32)
    own = refs["row_head"][...] == refs["column_head"][...]
    refs["q_spread"][...] = jnp.where(own, repeated, 0.0).astype(q.dtype)


def _own_head(plan: Plan, refs: dict[str, Any], x: jax.Array) -> jax.Array:
    """Of x [rows, kv_heads * head_dim], each row's own head."""
    head, depth = refs["row_head"][...], plan.n.depth
    # So many heads fill whole lanes: first which of these groups, then which head of it.
    group = math.lcm(depth, LANES)
    heads = group // depth
    found = x[:, :group]
    for start in range(group, plan.depth, group):
        found = jnp.where(head >= start // depth, x[:, start : start + group], found)
    out = found[:, :depth]
    for place in range(1, heads):
        moved = pltpu.roll(found, group - place * depth, 1)[:, :depth]
        for own in range(place, plan.n.kv_heads, heads):
            out = jnp.where(head == own, moved, out)
    return out


def _compute(plan: Plan, refs: dict[str, Any], item: Any, block: Any, slot: Any, partial: bool) -> None:
    """One step of the online softmax, a chunk of pages at a time. `partial`: some token does not see some key."""
    unit, columns = plan.unit, plan.config.chunk * plan.length
    keys_axis = 1 if plan.turned else 0
    q = refs["q_spread" if plan.spread else "q"][...]
    own_head = None if plan.spread else refs["row_head"][...] == refs["column_head"][...]
    for chunk in range(plan.config.pages // plan.config.chunk):
        at = plan.part(pl.ds(chunk * columns, columns))
        start = block * plan.step_keys + chunk * plan.config.chunk * plan.n.page_size
        keys, values = refs["k_slots"][slot, *at], refs["v_slots"][slot, *at]
        x = jax.lax.dot_general(
            q, keys, (((1,), (1 - keys_axis,)), ((), ())), precision=plan.precision, preferred_element_type=jnp.float32
        )
        if plan.softcap is None:
            x = x * (plan.scale * LOG2_E)
        else:
            x = jnp.tanh(x * (plan.scale / plan.softcap)) * (plan.softcap * LOG2_E)
        allowed = own_head
        if partial:
            # Column c is key start + c // unit; comparing c itself with multiples of the unit needs no division.
            column = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
            position = refs["row_token"][...] + (refs["position"][item] - start)
            seen = column < (position + 1) * unit
            if plan.window is not None:
                seen = seen & (column >= (position + 1 - plan.window) * unit)
            allowed = seen if allowed is None else allowed & seen
            # A product with zero would keep a NaN alive: rows that no token sees are put to zero.
            row = jax.lax.broadcasted_iota(jnp.int32, values.shape, keys_axis)
            low, high = (refs[name][item] - start for name in ("begin", "end"))
            inside = (row >= low * unit) & (row < high * unit)
            values = jnp.where(inside, values.astype(jnp.float32), 0.0).astype(values.dtype)
        if allowed is not None:
            x = jnp.where(allowed, x, MASKED)
        highest = refs["highest"][...]
        higher = jnp.maximum(highest, jnp.max(x, axis=1, keepdims=True))
        p = jnp.exp2(x - higher)
        shrink = jnp.exp2(highest - higher)
        refs["highest"][...] = higher
        refs["total"][...] = refs["total"][...] * shrink + jnp.sum(p, axis=1, keepdims=True)
        refs["acc"][...] = refs["acc"][...] * shrink + jax.lax.dot_general(
            p.astype(values.dtype), values, (((1,), (keys_axis,)), ((), ())),
            precision=plan.precision, preferred_element_type=jnp.float32,
        )  # fmt: skip
