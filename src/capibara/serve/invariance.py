"""Batch invariance: what makes a request's bits the same whatever it is batched with, and what cannot be.

A sum of floats depends on its order, and compilers and kernels choose the order by shape. So with `batch_invariant`:

- every step runs in one shape, that of a full step: one program, one order for each product. A row of a product is
  then added up alike wherever it stands, since no kernel used here treats rows by their place;
- a token's keys are walked in blocks counted from the start of its sequence, in one part. What a tile walks beyond a
  token's own keys is masked, and adds exact zeros: one token alone and the same token inside of a prompt's piece agree;
- tokens are drawn by two programs, the likeliest and everything else, and not by the least that neighbours need.

What cannot be so is refused here: a state that a scan carries hangs on where a prompt was cut into pieces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara.errors import rule_error

if TYPE_CHECKING:
    from capibara.models.modular import ModularCapibaraModel
    from capibara.serve.config import EngineConfig

__all__ = ["attention_implementation", "check_invariant", "keeps_state"]

_BLOCKS_FROM_THE_START = ("xla", "reference")
"""Implementations of `paged_attention` that also count a window's blocks from the start of the sequence. The kernels
deal blocks out to their warpgroups from the first that some token of the tile sees, which moves with the tile."""


def keeps_state(model: ModularCapibaraModel) -> bool:
    """Whether a block of the model keeps a state a sequence, of which no part can be shared."""
    config = model.config
    return any(config.blocks[name].keeps_state for layer in config.period for name in layer)


def check_invariant(model: ModularCapibaraModel, config: EngineConfig) -> None:
    """Refuse what cannot give the same bits in every batch."""
    if keeps_state(model):
        raise rule_error(
            "batch_invariant is for models of attention: a scan's sums hang on where a prompt is cut into pieces",
            "a model that keeps a state",
            "leave batch_invariant out",
        )
    if config.attention is not None and _has_windows(model) and config.attention not in _BLOCKS_FROM_THE_START:
        raise rule_error(
            f"Windows are batch-invariant with attention by {' or '.join(_BLOCKS_FROM_THE_START)}",
            f"attention={config.attention!r} of a model with windows",
            "leave attention out, or batch_invariant",
        )


def attention_implementation(model: ModularCapibaraModel, config: EngineConfig) -> str | None:
    """The implementation of `paged_attention` that an engine asks for by name; None leaves it to the dispatch."""
    if config.batch_invariant and config.attention is None and _has_windows(model):
        return _BLOCKS_FROM_THE_START[0]
    return config.attention


def _has_windows(model: ModularCapibaraModel) -> bool:
    return any(getattr(block, "window", None) is not None for block in model.config.blocks.values())
