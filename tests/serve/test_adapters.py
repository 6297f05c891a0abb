"""LoRA adapters by request: each answers as the model with that adapter's changes in its weights would."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.serve.engines import GREEDY, engine_of, model_of, plain, prompts_of, run, tokens_of, wanted

from capibara.checkpoints.store import Checkpoints
from capibara.models import ModularCapibaraModel
from capibara.models.blocks import spec
from capibara.models.weights.tensor_file import TensorWriter
from capibara.serve import LoraAdapter, Request, SamplingParams
from capibara.serve.adapters import _read
from capibara.train.config import LoraSettings
from capibara.train.lora import adapter_weights, merged


def adapter(name: str, seed: int, settings: LoraSettings) -> tuple[LoraAdapter, ModularCapibaraModel]:
    """Factors that change much, and the plain model that has them in its weights."""
    model = model_of(name)
    factors = spec.initial(adapter_weights(model.config, settings), jax.random.key(seed), jnp.float32)
    leaves, tree = jax.tree.flatten(factors)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    factors = tree.unflatten([jax.random.normal(key, leaf.shape) * 0.3 for key, leaf in zip(keys, leaves, strict=True)])
    changed = ModularCapibaraModel(
        model.config, params=merged(model.config, model.params, factors, settings), precision="float32"
    )
    return LoraAdapter(factors, settings.alpha), changed


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", ["hybrid", "attention"])
def test_each_request_is_answered_by_its_adapter(name: str, programs: Path) -> None:
    all_of_them = tuple({w for block in model_of(name).config.blocks.values() for w in block.products()})
    first, of_first = adapter(name, 1, LoraSettings(rank=2, alpha=4.0, targets=all_of_them))
    second, of_second = adapter(name, 2, LoraSettings(rank=3, alpha=3.0, targets=("out",)))
    engine = engine_of(model_of(name), programs, adapters={"first": first, "second": second})
    assert engine.adapters == ("first", "second")
    (prompt,) = prompts_of(9)
    asked: dict[str, Any] = {"max_tokens": 6, **GREEDY}
    requests = [
        Request("plain", prompt, SamplingParams(**asked)),
        Request("first", prompt, SamplingParams(adapter="first", **asked)),
        Request("second", prompt, SamplingParams(adapter="second", **asked)),
    ]
    tokens = tokens_of(run(engine, requests, every=2))
    expected = {
        "plain": wanted(name, prompt, 6), "first": plain(of_first, prompt, 6), "second": plain(of_second, prompt, 6),
    }  # fmt: skip
    assert tokens == expected
    assert len({tuple(each) for each in expected.values()}) == 3
    # The same tokens have other keys under another adapter: nothing of one is shared with another.
    assert engine.stats().prefix_hits == 0


def test_an_adapter_of_another_model_is_refused(programs: Path) -> None:
    other, _ = adapter("hybrid", 1, LoraSettings(rank=2))
    with pytest.raises(ValueError, match="An adapter has factors for the 1 layer"):
        engine_of(model_of("attention"), programs, adapters={"x": other})
    wrong, _ = adapter("moe", 1, LoraSettings(rank=2))
    with pytest.raises(ValueError, match="factors are of the model's own weights"):
        engine_of(model_of("attention"), programs, adapters={"x": wrong})
    with pytest.raises(ValueError, match="An adapter is a LoraAdapter, or the folder of a LoRA run or of one"):
        engine_of(model_of("attention"), programs, adapters={"x": 3})
    with pytest.raises(ValueError, match=r"with its config.toml"):
        engine_of(model_of("attention"), programs, adapters={"x": programs})


def test_a_runs_folder_is_an_adapter(tmp_path: Path) -> None:
    settings = LoraSettings(rank=2, alpha=4.0, targets=("query", "out"))
    made, _ = adapter("attention", 1, settings)
    table = '[lora]\nrank = 2\nalpha = 4.0\ntargets = ["query", "out"]\n'
    (tmp_path / "config.toml").write_text(model_of("attention").config.to_toml() + table)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(3, {"params": made.factors, "step": jnp.int32(3)})
    read = LoraAdapter.from_run(tmp_path)
    assert read.alpha == 4.0
    jax.tree.map(np.testing.assert_array_equal, read.factors, made.factors)
    (tmp_path / "config.toml").write_text(model_of("attention").config.to_toml())
    with pytest.raises(ValueError, match=r"trained LoRA factors.*lora.rank = 0"):
        LoraAdapter.from_run(tmp_path)


def test_a_folder_that_peft_saved_is_an_adapter(tmp_path: Path) -> None:
    config = model_of("attention").config
    made, _ = adapter("attention", 1, LoraSettings(rank=2, alpha=6.0, targets=("query", "out", "down")))
    names = {"query": "self_attn.q_proj", "out": "self_attn.o_proj", "down": "mlp.down_proj"}
    tensors = list(_as_peft(made, names))
    announced = [(name, "F32", tensor.shape) for name, tensor in tensors]
    with TensorWriter(tmp_path / "adapter_model.safetensors", announced) as writer:
        for name, tensor in tensors:
            writer.write(name, tensor)
    said = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "o_proj", "down_proj"]}
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(said))
    read = _read("x", tmp_path, config)
    assert read.alpha == 6.0
    jax.tree.map(np.testing.assert_array_equal, read.factors, jax.tree.map(np.asarray, made.factors))
    file.write_text(json.dumps({**said, "use_rslora": True}))
    assert _read("x", tmp_path, config).alpha == pytest.approx(6 * 2**0.5)
    file.write_text(json.dumps({**said, "use_dora": True}))
    with pytest.raises(ValueError, match="An adapter's use_dora is False"):
        _read("x", tmp_path, config)
    file.write_text(json.dumps({**said, "peft_type": "IA3"}))
    with pytest.raises(ValueError, match="of type LORA"):
        _read("x", tmp_path, config)


def _as_peft(made: LoraAdapter, names: dict[str, str]) -> Iterator[tuple[str, np.ndarray]]:
    """Factors as PEFT lays them out: A [rank, inputs], B [outputs, rank]."""
    for block in made.factors[0].values():
        for key, stacked in block.items():
            weight, _, which = key.partition("_lora_")
            for layer, factor in enumerate(np.asarray(stacked, np.float32)):
                flat = factor.reshape(-1, 2) if which == "down" else factor.reshape(2, -1)
                letter = "A" if which == "down" else "B"
                name = f"base_model.model.model.layers.{layer}.{names[weight]}.lora_{letter}.weight"
                yield name, np.ascontiguousarray(flat.T)
