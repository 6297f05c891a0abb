"""Presets: shipped ones, files, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path

import jax
import numpy as np
import pytest

from capibara.models import decoder
from capibara.models.preset import Preset, load_preset, preset_names
from capibara.program import trace

TINY = "hidden = 64\nlayers = 2\nheads = 4\nkv_heads = 2\nffn = 128\nvocab = 256\nbatch = 2\nsequence = 16\n"


def _file(folder: Path, text: str) -> Path:
    file = folder / "tiny.toml"
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.quick
def test_the_shipped_presets_have_the_size_they_are_called_by() -> None:
    assert preset_names() == ["llama-13b", "llama-1b", "llama-70b", "llama-7b"]
    for name in preset_names():
        billions = float(name.removeprefix("llama-").removesuffix("b"))
        # Llama's own names round: 1.14, 6.7, 13.0 and 69.0 billion.
        assert load_preset(name).parameters / 1e9 == pytest.approx(billions, rel=0.15)


def test_parameters_are_those_of_the_decoder(tmp_path: Path) -> None:
    preset = load_preset(_file(tmp_path, TINY))
    leaves = jax.tree.leaves(decoder.param_shapes(preset))
    assert sum(math.prod(leaf.shape) for leaf in leaves) == preset.parameters
    assert preset.name == "tiny"


def test_the_loss_of_small_weights_is_that_of_guessing(tmp_path: Path) -> None:
    preset = load_preset(_file(tmp_path, TINY), attention="plain")
    params = jax.tree.map(lambda leaf: np.full(leaf.shape, 0.01, leaf.dtype), decoder.param_shapes(preset))
    batch = jax.tree.map(lambda leaf: np.arange(32, dtype=leaf.dtype).reshape(2, 16), decoder.batch_shapes(preset))
    # Equal weights give every word the same score, whatever it is.
    assert float(jax.jit(decoder.make_loss(preset))(params, batch)) == pytest.approx(math.log(256), rel=1e-6)


def test_attention_is_the_form_that_is_asked_for(tmp_path: Path) -> None:
    texts = []
    for form in ("fused", "plain"):
        preset = load_preset(_file(tmp_path, TINY), attention=form)
        shapes = decoder.param_shapes(preset), decoder.batch_shapes(preset)
        made = jax.make_jaxpr(decoder.make_loss(preset))(*shapes)
        assert [out.shape for out in made.out_avals] == [()]
        texts.append(str(made))
    assert texts[0] != texts[1]


def test_constraints_are_named_by_the_decoders_own_lines(tmp_path: Path) -> None:
    preset = load_preset(_file(tmp_path, TINY))
    program = trace(decoder.make_loss(preset), (decoder.param_shapes(preset), decoder.batch_shapes(preset)))
    nodes = [*program.nodes, *(inner for node in program.nodes if node.body for inner in node.body.nodes)]
    marked = [node.name for node in nodes if node.primitive == "logical_axes"]
    assert marked
    assert all("decoder.py:" in name for name in marked)


def test_overrides_that_are_given_replace_and_none_does_not() -> None:
    assert load_preset("llama-1b", batch=32, sequence=None).tokens == 32 * 2048


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TINY + "hiden = 3\n", "Did you mean 'hidden'"),
        (TINY.replace("ffn = 128\n", ""), "names ffn"),
        (TINY.replace("heads = 4", "heads = 5"), "heads must divide hidden.*use heads = 4"),
        (TINY.replace("kv_heads = 2", "kv_heads = 3"), "kv_heads must divide heads.*use kv_heads = 2"),
        (TINY.replace("layers = 2", "layers = 0"), "layers of a preset is a whole number"),
        (TINY + 'attention = "flash"\n', "'fused', 'plain'"),
        ("hidden = \n", "TOML"),
    ],
)
def test_a_bad_preset_says_what_to_change(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load_preset(_file(tmp_path, text))


def test_unknown_names_and_missing_files() -> None:
    with pytest.raises(ValueError, match="Did you mean 'llama-7b'"):
        load_preset("llama-8b")
    with pytest.raises(ValueError, match="which is not there"):
        load_preset("nowhere/tiny.toml")
    with pytest.raises(ValueError, match="even number wide"):
        Preset(hidden=12, layers=1, heads=4, ffn=8)
