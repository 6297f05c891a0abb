"""paged_write for Hopper, in Pallas (Mosaic GPU): one pass where XLA makes three.

A program has some heads of one token, all of them queries, keys or values. Everything that it reads is asked for before
anything is computed, and where it writes is read beside: what it waits for is the memory's answer, once. There is no
shared memory and nobody to wait for: each number goes through one thread, and the rows of the pools that no token goes
to are neither read nor written.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.errors import rule_error
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.trusting import trusted
from capibara.kernels.core.varying import out_struct, vary_like
from capibara.kernels.ops.attention.paged_write.rules import Sizes, sizes, sizes_of
from capibara.kernels.pallas.hopper import LANE, load, named, refuses_chip, store_to_memory
from capibara.kernels.pallas.overlap import await_previous, let_next_start, overlaps

THREADS = 128  # of a warpgroup
PAIRS = 2  # of numbers, that a thread turns, about: more programs have each less to wait for
MOST_PAIRS = 8
TIMED_TOKENS = 256
NOWHERE = -1
COMPILER_PARAMS = plgpu.CompilerParams(
    lowering_semantics=LANE,
    unsafe_no_auto_barriers=True,  # memory is either read or written
)


@dataclasses.dataclass(frozen=True)
class HeadsConfig:
    """How many heads of a token a program has."""

    heads: int = 4

    def __post_init__(self) -> None:
        if self.heads < 1:
            raise rule_error("heads is one or more", self.heads, "use 4")


def _divides(n: Sizes, heads: int) -> bool:
    """Whether so many heads are all queries, keys or values, and their parts whole rounds of a program's threads."""
    apart = not n.heads % heads and not n.kv_heads % heads
    parts = heads * n.rotary // 2, heads * (n.depth - n.rotary)
    return apart and not any(part % THREADS for part in parts) and parts[0] <= MOST_PAIRS * THREADS


def candidates(call: Call) -> Sequence[HeadsConfig]:
    n = sizes(call)
    fitting = [heads for heads in range(1, n.kv_heads + 1) if _divides(n, heads)]
    return [HeadsConfig(h) for h in sorted(fitting, key=lambda h: abs(h * n.rotary // 2 - PAIRS * THREADS))]


def refuses(call: Call) -> str | None:
    n = sizes(call)
    dtype = np.dtype(call.need("key_pages").dtype).name
    chip = refuses_chip(call.target.device_kind)
    if chip is not None:
        return chip
    if dtype not in ("bfloat16", "float16"):
        return f"it takes bfloat16 or float16, not {dtype}"
    if not n.tokens:
        return "there are no tokens"
    if not n.rotary:
        return "nothing is turned"
    if n.pages * n.page_size > np.iinfo(np.int32).max:
        return f"a place in the pools is counted in 32 bits, not {n.pages * n.page_size}"
    if not candidates(call):
        return (
            f"no number of heads that divides {n.heads} and {n.kv_heads} has a multiple of {THREADS} pairs and of "
            f"{THREADS} numbers that stay, with {n.rotary} of {n.depth} numbers turned"
        )
    return None


def paged_write_hopper(
    projected: jax.Array, key_pages: jax.Array, value_pages: jax.Array, cos: jax.Array, sin: jax.Array, page: jax.Array,
    slot: jax.Array, *, config: HeadsConfig,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """One kernel over (groups of heads, tokens); see the module's text."""
    n = sizes_of(projected, key_pages, cos)
    if not _divides(n, config.heads):
        raise rule_error("heads divides the heads, into whole rounds of threads", f"{config} of {n}", "leave it out")
    groups = (n.heads + 2 * n.kv_heads) // config.heads
    if projected.ndim == 4 and projected.shape[0] == 1:
        projected = projected[0]
    # pl.kernel, since plgpu.kernel takes no array to write into.
    kernel = pl.kernel(
        named("paged_write", _program, n=n, heads=config.heads, early=overlaps()),
        out_type=[out_struct((n.tokens, n.heads, n.depth), key_pages.dtype, projected)],
        # Tokens last, which CUDA takes 2^31 of: of what stands before, 65,535.
        mesh=plgpu.Mesh(grid=(groups, n.tokens), grid_names=("group", "token")),
        compiler_params=COMPILER_PARAMS,
        name="paged_write",
    )
    # Two arrays, for what makes each is a pass of XLA's: the same in every layer, and made once a step. The angles are
    # there once for each head of a program, as its threads take them.
    angles = jnp.broadcast_to(jnp.stack((cos, sin), axis=1)[:, :, None], (n.tokens, 2, config.heads, n.rotary // 2))
    inside = (page >= 0) & (page < n.pages) & (slot >= 0) & (slot < n.page_size)
    place = jnp.where(inside, page * n.page_size + slot, NOWHERE)

    def into(refs: tuple[Any, Any, Any]) -> None:
        query, keys, values = refs
        (query[...],) = kernel(projected, angles, place, keys, values)

    # References that live in run_state alone: custom_vmap, which stands around this, takes no function that makes one
    # for itself. What the queries start from is overwritten and never made.
    empty = vary_like(jnp.zeros((n.tokens, n.heads, n.depth), key_pages.dtype), projected)
    pools = (pool.reshape(n.pages * n.page_size, n.kv_heads, n.depth) for pool in (key_pages, value_pages))
    query, keys, values = pl.run_state(into)((empty, *pools))
    return query, keys.reshape(key_pages.shape), values.reshape(value_pages.shape)


def _program(
    projected_hbm: Any, angles_hbm: Any, place_hbm: Any, keys_hbm: Any, values_hbm: Any, query_hbm: Any, *, n: Sizes,
    heads: int, early: bool,
) -> None:  # fmt: skip
    if early:
        let_next_start()
        await_previous()
    token, group = lax.axis_index("token"), lax.axis_index("group")
    first_key, first_value = n.heads // heads, (n.heads + n.kv_heads) // heads  # groups
    half, rest = n.rotary // 2, n.depth - n.rotary
    dtype = query_hbm.dtype
    addends = projected_hbm.shape[0] if len(projected_hbm.shape) == 4 else 1  # one part is no axis of its own

    def read(start: int, width: int) -> list[Any]:
        """Numbers of the heads, once or as parts of a sum."""
        at = token, pl.ds(group * heads, heads), pl.ds(start, width)
        refs = [projected_hbm.at[n, *at] for n in range(addends)] if addends > 1 else [projected_hbm.at[*at]]
        return [load(ref, layout(width)) for ref in refs]

    def layout(width: int) -> Any:
        # Vectors of four numbers at most, each inside of a head's part of that width.
        return plgpu.Layout.WG_STRIDED((heads, width), vec_size=math.gcd(heads * width // THREADS, width, 4))

    # All of it before it is known what the heads are: in a branch, a compiler would read it after `place`.
    place = place_hbm[token]
    cos, sin = (load(angles_hbm.at[token, which], layout(half)) for which in (0, 1))
    cuts = [(0, half), (half, half)] + ([(n.rotary, rest)] if rest else [])
    asked = [read(start, width) for start, width in cuts]
    parts = [sum(one[1:], start=one[0]).astype(dtype) for one in asked]

    def turned() -> list[Any]:
        a, b = (x.astype(jnp.float32) for x in parts[:2])
        return [x.astype(dtype) for x in (a * cos - b * sin, b * cos + a * sin)] + parts[2:]

    def write(target: Any, first_head: Any, values: list[Any]) -> None:
        for (start, width), value in zip(cuts, values, strict=True):
            store_to_memory(target.at[pl.ds(first_head, heads), pl.ds(start, width)], value)

    @pl.when(group < first_key)
    def _queries() -> None:
        write(query_hbm.at[token], group * heads, turned())

    @pl.when((group >= first_key) & (group < first_value) & (place != NOWHERE))
    def _keys() -> None:
        write(keys_hbm.at[place], (group - first_key) * heads, turned())

    @pl.when((group >= first_value) & (place != NOWHERE))
    def _values() -> None:
        write(values_hbm.at[place], (group - first_value) * heads, parts)


def ahead_of(call: Call) -> tuple[str, ...]:
    """On an H200, of a layer of a 1.1B model: 1.2 us for xla's 3.1 at one token, 1.4 for 4.1 at 32 and 3.0 for 7.4 at
    256, one launch for three (benchmarks/results/2026-11-17-h200-paged-write.json). More tokens were not timed."""
    return ("xla",) if sizes(call).tokens <= TIMED_TOKENS or trusted() == "predicted" else ()


IMPLEMENTATION = Implementation(
    "hopper",
    paged_write_hopper,
    platforms=("gpu",),
    refuses=refuses,
    ahead_of=ahead_of,
    kernel=True,
    config_type=HeadsConfig,
    candidates=candidates,
)
