"""A piece of text by the model that a run ended with, after the beginning of a held-out row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax

from capibara.models.modular import ModularCapibaraModel
from capibara.train.config import RunConfig

__all__ = ["sample_entry", "sample_text"]

_PROMPT_TOKENS = 32
_NEW_TOKENS = 240


def sample_entry(
    config: RunConfig,
    model: ModularCapibaraModel,
    held_out: Callable[[], AbstractContextManager[Any]],
    has_held_out: bool,
) -> dict[str, Any]:
    """The sample for run.json, or why there is none: what cannot be generated does not undo a run that is done."""
    try:
        return {"sample": sample_text(config, model, held_out, has_held_out)}
    # The device's memory, a block that does not decode, tokens of files whose tokenizer is another.
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return {"sample_refusal": " ".join(f"{type(error).__name__}: {error}".split())[:500]}


def sample_text(
    config: RunConfig,
    model: ModularCapibaraModel,
    held_out: Callable[[], AbstractContextManager[Any]],
    has_held_out: bool,
    max_tokens: int = _NEW_TOKENS,
) -> tuple[str, str] | None:
    """A prompt and what the model writes after it; None where its weights lie on other machines too."""
    params = model.params
    if not all(leaf.is_fully_addressable for leaf in jax.tree.leaves(params)):
        return None
    tokenizer = model.tokenizer
    prompt = [tokenizer.bos_id] if tokenizer.bos_id is not None else tokenizer.encode("\n")
    if has_held_out:
        with held_out() as batches:
            prompt = _from_the_middle(next(iter(batches)))
    room = config.preset.model.max_length - len(prompt)
    if room < 1:
        return None
    first = jax.tree.leaves(params)[0].sharding
    if len(first.device_set) > 1 and next(iter(first.device_set)).platform == "cpu":
        # Devices that a CPU simulates would each do all of the work for one row.
        here = jax.local_devices(backend="cpu")[0]
        model = ModularCapibaraModel(model.config, params=jax.device_put(params, here), precision=model.precision)
    stop = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    tokens = model.generate(prompt, max_tokens=min(max_tokens, room), temperature=0.6, seed=0, stop=stop)
    return tokenizer.decode(prompt), tokenizer.decode(tokens)


def _from_the_middle(batch: Mapping[str, Any]) -> list[int]:
    """Some tokens of a batch's first row: from its middle, as texts often begin with a heading or a licence."""
    row = batch["inputs"][0]
    row = row[batch["mask"][0] != 0] if "mask" in batch and batch["mask"][0].any() else row
    start = max(0, (len(row) - _PROMPT_TOKENS) // 2)
    return [int(token) for token in row[start : start + _PROMPT_TOKENS]]
