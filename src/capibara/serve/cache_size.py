"""How many pages of cache a device has room for beside the weights, and what that holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import psutil

from capibara.errors import rule_error
from capibara.hardware.devices import attached
from capibara.hardware.facts import GiB
from capibara.models import decoder

if TYPE_CHECKING:
    from capibara.models.config import ModularModelConfig
    from capibara.serve.config import EngineConfig

__all__ = ["CacheSize", "cache_size", "working_bytes"]

_COUNT_BYTES = 5
"""Of `sampling.Counts`, a sequence and word: how often it is in the output, and whether it is in the prompt."""


@dataclass(frozen=True)
class CacheSize:
    """An engine's cache, and why it is of that size."""

    pages: int
    page_size: int
    page_bytes: int
    """Of one page of every layer, on one device."""
    state_bytes: int
    """Of what is kept a sequence and not a token, and of a page that nobody has, on one device."""
    max_length: int
    limited_by: Literal["max_sequences", "memory", "pages"]

    @property
    def tokens(self) -> int:
        return self.pages * self.page_size

    @property
    def longest_sequences(self) -> int:
        """How many sequences of the full length fit at a time."""
        return self.pages // -(-self.max_length // self.page_size)

    def __str__(self) -> str:
        why = {
            "max_sequences": "as much as max_sequences can fill",
            "memory": "as much as memory_share of the device leaves",
            "pages": "as pages says",
        }
        size = (self.pages * self.page_bytes + self.state_bytes) / GiB
        return (
            f"a cache of {self.tokens:,} tokens in {self.pages:,} pages, {size:.2f} GiB a device, "
            f"{why[self.limited_by]}: {self.longest_sequences} sequences of {self.max_length:,} tokens at a time"
        )


def cache_size(
    model: ModularModelConfig,
    config: EngineConfig,
    *,
    max_length: int,
    dtype: Any,
    weight_bytes: int,
    device_bytes: int | None = None,
) -> CacheSize:
    """The cache that fits beside what the device already holds; a `ValueError` where not one sequence does.

    Args:
      dtype: of the pages.
      weight_bytes: of all weights on one device, where the device does not say what it holds.
      device_bytes: what a device has that is not here; the attached one is asked when None.
    """
    page_bytes, state_bytes = _bytes(model, config, dtype)
    of_one = -(-max_length // config.page_size)
    wanted = config.max_sequences * of_one

    def size(pages: int, limited_by: Literal["max_sequences", "memory", "pages"]) -> CacheSize:
        return CacheSize(pages, config.page_size, page_bytes, state_bytes, max_length, limited_by)

    if config.pages is not None:
        return size(config.pages, "pages")
    working = working_bytes(model, config, wanted, page_bytes, dtype)
    room: int | None
    if device_bytes is None:
        room = _room(config, weight_bytes, working)
    else:
        room = int(device_bytes * config.memory_share) - weight_bytes - working
    if room is None or page_bytes == 0:
        return size(wanted, "max_sequences")
    fits = (room - state_bytes) // page_bytes
    if fits < of_one:
        tokens = max(0, fits) * config.page_size
        raise rule_error(
            f"The cache holds one sequence of max_length, {max_length} tokens "
            f"({of_one * page_bytes / GiB:.2f} GiB of {config.memory_share:.0%} of the device's memory)",
            f"room for {tokens} tokens beside the weights",
            f"use max_length={tokens} or less"
            if tokens > 1
            else "use int8 weights, a larger memory_share or more devices",
        )
    return size(min(wanted, fits), "max_sequences" if fits >= wanted else "memory")


def _bytes(model: ModularModelConfig, config: EngineConfig, dtype: Any) -> tuple[int, int]:
    """(of a page, of all states and a page that nobody has) on one device."""

    def of(pages: int) -> int:
        shapes = jax.eval_shape(
            lambda: decoder.new_paged_cache(model, pages, config.page_size, config.max_sequences, dtype)
        )
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))

    whole = of(2) - of(1)
    page = -(-whole // _split(model, config))
    return page, of(0) - whole + page


def _split(model: ModularModelConfig, config: EngineConfig) -> int:
    """Among how many devices the heads of every pool are divided: by the model axis, where all blocks' heads are."""
    if config.mesh is None:
        return 1
    from capibara.mesh import logical_sharding

    parts = []
    for names in model.period:
        for name in names:
            heads = getattr(model.blocks[name], "kv_heads", None)
            if heads is not None:
                spec = logical_sharding(config.mesh, ("heads",), (heads,)).spec
                axes = spec[0] if len(spec) else None
                named = (axes,) if isinstance(axes, str) else tuple(axes or ())
                parts.append(math.prod(config.mesh.shape[axis] for axis in named))
    return min(parts, default=1)


def _room(config: EngineConfig, weight_bytes: int, working_bytes: int) -> int | None:
    device = jax.devices()[0] if config.mesh is None else config.mesh.devices.flat[0]
    here = next(one for one in attached() if one.index == device.id)
    if here.memory_limit_bytes is None:
        return None
    share = int(here.memory_limit_bytes * config.memory_share)
    if here.platform == "cpu":
        # A host's memory is everybody's: what others hold is counted, as on a device, and however much that is, half of
        # what nobody holds may be taken.
        free = _free_of_host()
        held = max(weight_bytes, here.memory_limit_bytes - free)
        return max(share - held, min(share, free // 2)) - working_bytes
    held = (device.memory_stats() or {}).get("bytes_in_use", weight_bytes)
    return share - held - working_bytes


def _free_of_host() -> int:
    return int(psutil.virtual_memory().available)


def working_bytes(model: ModularModelConfig, config: EngineConfig, pages: int, page_bytes: int, dtype: Any) -> int:
    """What a step needs beside weights and cache, about: logits, what drawing makes of them, penalties' counts, and a
    layer's values.

    Args:
      pages: that a batch has at most.
    """
    rows = config.max_sequences * (1 + config.speculative_tokens)
    working = 3 * rows * model.vocab * 4 + 4 * config.max_batch_tokens * _widest(model) * 4
    working += config.max_sequences * model.vocab * _COUNT_BYTES  # made when a request first brings a penalty
    if jnp.dtype(dtype) == jnp.int8:  # one layer's pages are widened before they are read
        with_pages = sum(not model.blocks[name].keeps_state for names in model.period for name in names)
        working += pages * page_bytes * 4 // max(1, with_pages * model.repeats)
    return working


def _widest(model: ModularModelConfig) -> int:
    """Numbers that a block's widest product makes of a token, those of one input together."""
    widest = model.hidden
    for name in {name for names in model.period for name in names}:
        block = model.blocks[name]
        inputs = block.products()
        # Of a weight that is no product's of its own (an expert's) the last axis is what comes of it, for each expert.
        width = {
            part: math.prod(weight.shape[inputs[part] :]) if part in inputs else weight.shape[-1]
            for part, weight in block.weights(model).items()
        }
        together = [sum(width[part] for part in group) for group in block.joint_products()]
        widest = max(widest, *(getattr(block, "top_k", 1) * each for each in (*width.values(), *together)))
    return widest
