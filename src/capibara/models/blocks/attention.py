"""Attention: grouped heads, rotary positions, window, norms of queries and keys, soft cap, biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from capibara.errors import rule_error
from capibara.kernels.ops.attention import Rope, attention, rope
from capibara.kernels.ops.attention.paged.api import paged_attention
from capibara.kernels.ops.attention.paged_write.api import has_kernel, paged_write
from capibara.kernels.ops.attention.paged_write.xla import put_rows
from capibara.kernels.ops.attention.rope import rope_angles
from capibara.kernels.ops.attention.rope_scaling import scaling_numbers
from capibara.kernels.ops.layers.norm.api import rms_norm
from capibara.mesh import with_sharding_constraint
from capibara.models.blocks.spec import (
    Block,
    BlockOutput,
    LastProduct,
    PagedBatch,
    Projected,
    Sequences,
    Unsummed,
    Weight,
    held_together,
    joint_name,
    joint_product,
    product,
    products,
)

if TYPE_CHECKING:
    from capibara.models.config import ModularModelConfig

__all__ = ["Attention"]

_HEADS = ("batch", "sequence", "heads", None)


@dataclass(frozen=True)
class Attention(Block):
    """Causal attention of each token to those before it in its document."""

    heads: int
    kv_heads: int = 0
    """Heads of keys and values; as many as there are heads when 0."""
    head_dim: int = 0
    """hidden / heads when 0."""
    rope_base: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    """{type = "linear" | "ntk" | "yarn" | "llama3", factor = ...}, as `capibara.kernels.rope` takes it."""
    rotary_dim: int = 0
    """Numbers of each head that are turned; all when 0."""
    window: int | None = None
    """A token sees its own key and window - 1 before it."""
    qk_norm: bool = False
    """Root mean square norms of each query and key head, with a weight of a head's width."""
    softcap: float | None = None
    bias: bool = False
    """Of the query, key and value projections."""
    out_bias: bool = False
    scale: float | None = None
    """Of the scores; one over the root of head_dim by default."""

    def __post_init__(self) -> None:
        if self.kv_heads == 0:
            object.__setattr__(self, "kv_heads", self.heads)
        for name in ("heads", "kv_heads"):
            if getattr(self, name) < 1:
                raise rule_error(f"{name} of attention is 1 or more", getattr(self, name), f"use {name} = 8")
        if self.heads % self.kv_heads:
            divisors = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            near = min(divisors, key=lambda n: (abs(n - self.kv_heads), n))
            raise rule_error(
                "kv_heads must divide heads",
                f"heads = {self.heads}, kv_heads = {self.kv_heads}",
                f"use kv_heads = {near}",
            )
        for name in ("head_dim", "rotary_dim"):
            if getattr(self, name) < 0:
                raise rule_error(f"{name} of attention is 0 or more", getattr(self, name), "leave it out")
        for name in ("rope_base", "softcap"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise rule_error(f"{name} of attention is above 0", value, "leave it out")
        if self.rope_scaling is not None:
            scaling_numbers(dict(self.rope_scaling))
        if self.window is not None and self.window < 1:
            raise rule_error("window is 1 or more tokens", self.window, "leave it out to see everything before")

    def width(self, model: ModularModelConfig) -> int:
        """Of a head."""
        return self.head_dim or model.hidden // self.heads

    def check(self, model: ModularModelConfig, where: str) -> None:
        if not self.head_dim and model.hidden % self.heads:
            divisors = [n for n in range(1, model.hidden + 1) if model.hidden % n == 0]
            near = min(divisors, key=lambda n: (abs(n - self.heads), n))
            raise rule_error(
                "heads must divide hidden where head_dim is not set",
                f"hidden = {model.hidden}, {where}.heads = {self.heads}",
                f"use heads = {near}, or set head_dim",
            )
        if self.rotary_dim > self.width(model):
            raise rule_error(
                "rotary_dim is at most a head's width",
                f"{where}.rotary_dim = {self.rotary_dim} of {self.width(model)}",
                "leave it out to turn all",
            )
        if (self.rotary_dim or self.width(model)) % 2:
            raise rule_error(
                "What is turned of a head is an even number wide, for its rotary pairs",
                f"{self.rotary_dim or self.width(model)} in {where}",
                "change hidden, heads, head_dim or rotary_dim",
            )

    def weights(self, model: ModularModelConfig) -> dict[str, Weight]:
        wide, each = model.hidden, self.width(model)
        weights = {
            "query": Weight((wide, self.heads, each), (None, "heads", None)),
            "key": Weight((wide, self.kv_heads, each), (None, "heads", None)),
            "value": Weight((wide, self.kv_heads, each), (None, "heads", None)),
            "out": Weight(
                (self.heads, each, wide), ("heads", None, None), fan_in=self.heads * each, gain=model.residual_gain
            ),
        }
        if self.bias:
            weights["query_bias"] = Weight((self.heads, each), ("heads", None), "zeros")
            weights["key_bias"] = Weight((self.kv_heads, each), ("heads", None), "zeros")
            weights["value_bias"] = Weight((self.kv_heads, each), ("heads", None), "zeros")
        if self.out_bias:
            weights["out_bias"] = Weight((wide,), (None,), "zeros")
        if self.qk_norm:
            weights["query_norm"] = Weight((each,), (None,), "ones")
            weights["key_norm"] = Weight((each,), (None,), "ones")
        return weights

    takes_fp8 = True

    def products(self) -> dict[str, int]:
        return {"query": 1, "key": 1, "value": 1, "out": 2}

    def joint_products(self) -> tuple[tuple[str, ...], ...]:
        return (("query", "key", "value"),)

    def _projected(
        self, model: ModularModelConfig, params: Mapping[str, jax.Array], x: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        def biased(name: str, y: jax.Array) -> jax.Array:
            if self.bias:
                y = y + params[f"{name}_bias"].astype(y.dtype)
            return with_sharding_constraint(y, _HEADS)

        each = self.width(model)
        shapes = {"query": (self.heads, each), "key": (self.kv_heads, each), "value": (self.kv_heads, each)}
        q, k, v = (biased(name, y) for name, y in zip(shapes, products(params, shapes, x), strict=True))
        if self.qk_norm:
            q = rms_norm(q, params["query_norm"], eps=model.norm_eps)
            k = rms_norm(k, params["key_norm"], eps=model.norm_eps)
        return q, k, v

    def _out(self, params: Mapping[str, jax.Array], mixed: jax.Array) -> jax.Array:
        y = product(params, "out", with_sharding_constraint(mixed, _HEADS), inputs=2)
        return y + params["out_bias"].astype(y.dtype) if self.out_bias else y

    def __call__(
        self, model: ModularModelConfig, params: Mapping[str, jax.Array], x: jax.Array, sequences: Sequences
    ) -> BlockOutput:
        q, k, v = self._projected(model, params, x)
        turn = Rope(
            base=self.rope_base,
            scaling=self.rope_scaling,
            rotary_dim=self.rotary_dim or None,
            query_positions=sequences.positions,
            key_positions=sequences.positions,
        )
        mixed = attention(
            q,
            k,
            v,
            causal=True,
            window=self.window,
            segment_ids=sequences.segment_ids,
            rope=turn,
            scale=self.scale,
            softcap=self.softcap,
            implementation=model.attention_implementation,
        )
        return BlockOutput(self._out(params, mixed))

    def new_cache(self, model: ModularModelConfig, batch: int, length: int, dtype: Any) -> dict[str, jax.Array]:
        shape = (batch, length, self.kv_heads, self.width(model))
        return {"key": jnp.zeros(shape, dtype), "value": jnp.zeros(shape, dtype)}

    def decode(
        self,
        model: ModularModelConfig,
        params: Mapping[str, jax.Array],
        x: jax.Array,
        cache: Mapping[str, jax.Array],
        start: jax.Array,
        lengths: jax.Array,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        q, k, v = self._projected(model, params, x)
        places = start[:, None] + jnp.arange(x.shape[1])

        def put(kept: jax.Array, new: jax.Array) -> jax.Array:
            # Padding may lie past the cache's end: it is dropped there, where a slice would be moved back over tokens.
            new = new.astype(kept.dtype)
            return jax.vmap(lambda row, part, at: row.at[at].set(part, mode="drop"))(kept, new, places)

        q, k = self._turned(q, places), self._turned(k, places)
        cache = {"key": put(cache["key"], k), "value": put(cache["value"], v)}
        keys = jnp.arange(cache["key"].shape[1])
        # Padding after the new tokens comes after every one of them, so that none of them sees it.
        sees = keys[None, None, :] <= places[:, :, None]
        if self.window is not None:
            sees &= keys[None, None, :] > places[:, :, None] - self.window
        mixed = attention(
            q,
            cache["key"].astype(q.dtype),
            cache["value"].astype(q.dtype),
            mask=sees[:, None],
            scale=self.scale,
            softcap=self.softcap,
        )
        return self._out(params, mixed), dict(cache)

    def new_paged_cache(
        self, model: ModularModelConfig, pages: int, page_size: int, slots: int, dtype: Any
    ) -> dict[str, jax.Array]:
        # A key's heads side by side: what `paged_attention` fetches from on every chip. Over a mesh each device has
        # some of the heads. A page more than there are is for what is written nowhere.
        def pool(width: int, dtype: Any) -> jax.Array:
            heads = jnp.zeros((pages + 1, page_size, self.kv_heads, width), dtype)
            heads = with_sharding_constraint(heads, (None, None, "heads", None))
            return heads.reshape(pages + 1, page_size, -1)

        cache = {name: pool(self.width(model), dtype) for name in ("key", "value")}
        if jnp.dtype(dtype) == jnp.int8:  # a scale a token and head
            cache |= {f"{name}_scale": pool(1, jnp.float32) for name in ("key", "value")}
        return cache

    def paged(
        self,
        model: ModularModelConfig,
        params: Mapping[str, jax.Array],
        x: jax.Array | Unsummed | Projected,
        cache: Mapping[str, jax.Array],
        batch: PagedBatch,
    ) -> tuple[jax.Array | LastProduct, dict[str, jax.Array]]:
        pages, page_size = cache["key"].shape[0] - 1, cache["key"].shape[1]
        column = jnp.clip(batch.positions // page_size, 0, batch.page_table.shape[1] - 1)
        page = batch.page_table[batch.rows, column]
        # Padding, and tokens past the pages that a sequence has, are written nowhere.
        inside = (batch.positions >= 0) & (batch.positions < batch.page_table.shape[1] * page_size)
        inside &= (page >= 0) & (page < pages)
        places = jnp.where(inside, page, pages + 1), batch.positions % page_size
        residual, dtype = None, x.dtype
        if isinstance(x, Unsummed):
            residual, projected = x.times(params, joint_name(self.joint_products()[0]), parts=True)
            q, cache = self._written_at_once(model, projected, cache, batch.positions, places)
        elif isinstance(x, Projected):
            q, cache = self._written_at_once(model, x.parts, cache, batch.positions, places)
        elif self._has_write_kernel(model, params, jax.ShapeDtypeStruct(x.shape[1:-1], x.dtype), cache):
            projected = joint_product(params, self.joint_products()[0], x)[0]
            q, cache = self._written_at_once(model, projected, cache, batch.positions, places)
        else:
            q, cache = self._written(model, params, x, cache, batch.positions, places)
        pools, table = (cache["key"], cache["value"]), batch.page_table
        if "key_scale" in cache:
            pools, table = self._widened(cache, table, dtype)
        mixed = paged_attention(
            q.astype(pools[0].dtype),
            *pools,
            table,
            batch.context_lengths,
            batch.query_starts,
            window=self.window,
            scale=self.scale,
            softcap=self.softcap,
            key_splits=batch.key_splits,
            implementation=batch.attention,
        )
        mixed = mixed[None].astype(dtype)
        if self.out_bias:
            return self._out(params, mixed), cache
        return LastProduct(params, "out", mixed, inputs=2, residual=residual), cache

    def adds_up(
        self, model: ModularModelConfig, params: Mapping[str, Any], x: Unsummed, cache: Mapping[str, Any]
    ) -> bool:
        (names,) = self.joint_products()
        if self.out_bias or not held_together(params, names) or not x.has_kernel(params, joint_name(names), parts=True):
            return False
        # How many parts there are changes nothing of what the kernel that writes them takes.
        return self._has_write_kernel(model, params, jax.ShapeDtypeStruct((1, x.parts.shape[1]), x.dtype), cache)

    def projected_by(
        self, model: ModularModelConfig, params: Mapping[str, Any], tokens: Any, cache: Mapping[str, Any]
    ) -> str | None:
        (names,) = self.joint_products()
        return joint_name(names) if self._has_write_kernel(model, params, tokens, cache) else None

    def _written(
        self,
        model: ModularModelConfig,
        params: Mapping[str, jax.Array],
        x: jax.Array,
        cache: Mapping[str, jax.Array],
        positions: jax.Array,
        places: tuple[jax.Array, jax.Array],
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The turned queries [tokens, heads, head_dim], and the cache with the tokens' keys and values."""
        q, k, v = self._projected(model, params, x)
        q, k = (self._turned(y, jnp.maximum(positions, 0)[None]) for y in (q, k))
        new = {"key": k, "value": v}
        if "key_scale" in cache:
            for name, y in (("key", k), ("value", v)):
                new[name], new[f"{name}_scale"] = _eight_bits(y)

        def put(pool: jax.Array, new: jax.Array) -> jax.Array:
            return put_rows(pool, new.reshape(new.shape[1], -1).astype(pool.dtype), *places, spare_page=True)

        return q[0], {name: put(cache[name], y) for name, y in new.items()}

    def _has_write_kernel(
        self, model: ModularModelConfig, params: Mapping[str, Any], tokens: Any, cache: Mapping[str, Any]
    ) -> bool:
        """Whether there is a kernel for `_written_at_once`; `tokens` are [tokens] or, in parts, [parts, tokens]."""
        (names,), each = self.joint_products(), self.width(model)
        # Over a mesh each weight is held by itself: no kernel has to be split.
        if self.bias or self.qk_norm or "key_scale" in cache or not held_together(params, names):
            return False
        pools = cache["key"], cache["value"]
        if tokens.dtype != pools[0].dtype:
            return False
        count, turned = tokens.shape[-1], self.rotary_dim or each
        wide = jnp.float32 if len(tokens.shape) == 2 else tokens.dtype
        projected = jax.ShapeDtypeStruct((*tokens.shape, self.heads + 2 * self.kv_heads, each), wide)
        angle, at = jax.ShapeDtypeStruct((count, turned // 2), jnp.float32), jax.ShapeDtypeStruct((count,), jnp.int32)
        return has_kernel(projected, *pools, angle, angle, at, at)

    def _written_at_once(
        self,
        model: ModularModelConfig,
        projected: jax.Array,
        cache: Mapping[str, jax.Array],
        positions: jax.Array,
        places: tuple[jax.Array, jax.Array],
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """As `_written`, in one pass over what is projected: [tokens, all outputs], or with an axis of parts before."""
        each = self.width(model)
        angles = rope_angles(
            jnp.maximum(positions, 0), self.rotary_dim or each, base=self.rope_base, scaling=self.rope_scaling
        )
        heads = projected.reshape(*projected.shape[:-1], -1, each)
        q, key, value = paged_write(heads, cache["key"], cache["value"], *angles, *places, spare_page=True)
        return q, {"key": key, "value": value}

    def _widened(
        self, cache: Mapping[str, jax.Array], page_table: jax.Array, dtype: Any
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        """Pools of the batch's own pages out of pools of 8-bit numbers, and where each sequence's lie in them.

        Only one layer's are there at a time: memory is saved in what is kept, and not in what is read.
        """
        pages, page_size = cache["key"].shape[:2]
        at = jnp.clip(page_table.reshape(-1), 0, pages - 1)

        def pool(name: str) -> jax.Array:
            heads = cache[name][at].reshape(-1, page_size, self.kv_heads, cache[name].shape[-1] // self.kv_heads)
            wide = heads.astype(jnp.float32) * cache[f"{name}_scale"][at][..., None]
            return wide.astype(dtype).reshape(-1, page_size, cache[name].shape[-1])

        return (pool("key"), pool("value")), jnp.arange(at.size, dtype=jnp.int32).reshape(page_table.shape)

    def _turned(self, y: jax.Array, places: jax.Array) -> jax.Array:
        return rope(y, places, base=self.rope_base, scaling=self.rope_scaling, rotary_dim=self.rotary_dim or None)

    def flops_per_token(self, model: ModularModelConfig, length: int) -> float:
        seen = length if self.window is None else min(length, self.window)
        # Causal: a token sees half of the length on average, less what a window cuts off.
        pairs = length / 2 if seen == length else seen - seen * seen / (2 * length)
        return 4.0 * self.heads * self.width(model) * pairs


def _eight_bits(y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(8-bit numbers, a scale a token and head) of keys or values [..., heads, head_dim]; each is half a step off."""
    wide = y.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=-1) / 127
    scale = jnp.where(scale > 0, scale, 1)
    return jnp.round(wide / scale[..., None]).astype(jnp.int8), scale
