"""A Hugging Face folder onto a mesh, one leaf of the tree at a time.

Of each leaf every device gets its part: a host buffer of that part is filled from the tensors it is stacked of, each
mapped from its file, and put onto the device. Beside what is on the devices the host holds one such buffer, never a
second copy of the model; a process of several reads only what its own devices hold.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.axes import Rules
from capibara.errors import rule_error, say_once
from capibara.mesh import logical_sharding
from capibara.models import decoder
from capibara.models.blocks.spec import Weight
from capibara.models.config import ModularModelConfig
from capibara.models.weights.family import LM_HEAD, Place, key_path, places
from capibara.models.weights.folder import TOKENIZER, read_config, tensor_entries
from capibara.models.weights.hf_config import config_from_hf, family_of, with_origin
from capibara.models.weights.tensor_file import CODES, TensorEntry, code_of

if TYPE_CHECKING:
    from jax.sharding import Mesh, Sharding

    from capibara.mesh import MeshConfig

__all__ = ["load_hf"]

_log = logging.getLogger(__name__)

_FLOATS = ("BF16", "F16", "F32")
_EMBED = "model.embed_tokens.weight"
# Tables that old versions saved with every layer, and that config.json says already.
_DERIVED = re.compile(r"\.rotary_emb\.inv_freq$|^model\.rotary_emb\.inv_freq$|\.self_attn\.masked_bias$")
_SHOWN = 6
_BLOCK = 256
_THREADS = min(16, os.cpu_count() or 1)


def load_hf(
    folder: str | Path, *, mesh: Mesh | MeshConfig | None = None, dtype: Any = None, rules: Rules | None = None
) -> tuple[ModularModelConfig, Any]:
    """(config, parameters) of a folder with config.json and safetensors; a tokenizer.json there is the model's.

    Args:
        folder: Where they are.
        mesh: Every parameter is put where its logical axes lie on it; by default on the default device.
        dtype: Convert to this type; by default each parameter has the file's. What the tree keeps in float32, routers,
            is float32 either way.
        rules: Logical axes to mesh axes; by default the table in force.
    """
    if not Path(folder).is_dir():
        raise rule_error("Weights are in a folder", f"{folder}, which is none", "name the folder with config.json")
    model = config_from_hf(read_config(folder))
    if (Path(folder) / TOKENIZER).is_file():
        model = replace(model, tokenizer=str(Path(folder).absolute()))
    entries = tensor_entries(folder)
    wanted = places(model, family_of(model))
    tied_head = _check_names(model, wanted, entries)
    _check_shapes(wanted, entries)
    _check_types(wanted, entries, dtype)
    if tied_head is not None:
        _check_tied(entries[_EMBED], tied_head)

    by_leaf: dict[tuple[str | int, ...], list[Place]] = {}
    for place in wanted:
        by_leaf.setdefault(place.path, []).append(place)

    unusual: dict[str, str] = {} if tied_head is None else {LM_HEAD: tied_head.code}
    main = entries[_EMBED].dtype

    def leaf(path: Any, weight: Weight) -> jax.Array:
        own = by_leaf[key_path(path)]
        kept = weight.dtype(dtype)
        if dtype is None:
            widest = jnp.result_type(*{entries[place.name].dtype for place in own})
            kept = weight.dtype(widest)
            # Written back, a tensor has its leaf's type, and a router that of the embedding.
            usual = code_of(main if weight.keep_float32 else widest)
            unusual.update({p.name: entries[p.name].code for p in own if entries[p.name].code != usual})
        sharding = _sharding(weight, mesh, rules)
        return _leaf(weight, kept, sharding, own, entries)

    tree = decoder.weights(model)
    params = jax.tree.map_with_path(leaf, tree, is_leaf=lambda node: isinstance(node, Weight))
    facts = {"tensors": unusual} if unusual else {}
    return with_origin(model, **facts), params


def _sharding(weight: Weight, mesh: Mesh | MeshConfig | None, rules: Rules | None) -> Sharding:
    if mesh is not None:
        return logical_sharding(mesh, weight.axes, weight.shape, rules)
    device = jax.config.jax_default_device or jax.local_devices()[0]  # type: ignore[attr-defined]
    if isinstance(device, str):
        device = jax.local_devices(backend=device)[0]
    return jax.sharding.SingleDeviceSharding(device)


def _leaf(
    weight: Weight, dtype: Any, sharding: Sharding, own: list[Place], entries: Mapping[str, TensorEntry]
) -> jax.Array:
    """One leaf, each part of it built once and put onto every device that holds it."""
    by_index = {place.index: place for place in own}
    holders: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(weight.shape).items():
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index or (), weight.shape, strict=True))
        holders.setdefault(bounds, []).append(device)
    lead = len(own[0].index)
    shards: list[jax.Array] = []
    for bounds, devices in holders.items():
        buffer = np.empty([stop - start for start, stop in bounds], dtype)
        inside = tuple(slice(start, stop) for start, stop in bounds[lead:])

        def fill(index: tuple[int, ...], bounds: Any = bounds, buffer: Any = buffer, inside: Any = inside) -> None:
            place = by_index[tuple(at + start for at, (start, _) in zip(index, bounds[:lead], strict=True))]
            _copy(buffer[index], place.row.here(entries[place.name].view(), place.shape)[inside])

        # numpy lets go of the interpreter while it moves numbers, and a transposition keeps one core busy.
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(fill, np.ndindex(*buffer.shape[:lead])))
        shards += [jax.device_put(buffer, device) for device in devices]
        # The next buffer is made when this one is no longer needed, or two would be there at a time.
        jax.block_until_ready(shards)
        del buffer, fill
    return jax.make_array_from_single_device_arrays(weight.shape, sharding, shards)


def _copy(to: np.ndarray, source: np.ndarray) -> None:
    """`to[...] = source`, for a source that lies transposed: by blocks, so that both sides stay in the cache."""
    if to.dtype == source.dtype:
        # Plain words: numpy moves those of its own types faster than those of ml_dtypes.
        word = np.dtype(f"u{to.dtype.itemsize}")
        to, source = to.view(word), source.view(word)
    if to.ndim < 2 or source.flags.c_contiguous:
        to[...] = source
        return
    for start in range(0, to.shape[0], _BLOCK):
        rows = slice(start, start + _BLOCK)
        for begin in range(0, to.shape[-1], _BLOCK):
            columns = slice(begin, begin + _BLOCK)
            to[rows, ..., columns] = source[rows, ..., columns]


def _check_names(
    model: ModularModelConfig, wanted: Sequence[Place], entries: Mapping[str, TensorEntry]
) -> TensorEntry | None:
    """The head's tensor where the embedding's table is the head and the file has both; errors for other names."""
    names = {place.name for place in wanted}
    missing = [place.name for place in wanted if place.name not in entries]
    extra = [name for name in entries if name not in names and not _DERIVED.search(name)]
    tied_head = entries.get(LM_HEAD) if model.tied else None
    if tied_head is not None:
        extra.remove(LM_HEAD)
    if missing or extra:
        parts = []
        if missing:
            parts.append(f"{len(missing)} missing: {_listed(missing, nearest_of=extra or list(entries))}")
        if extra:
            parts.append(f"{len(extra)} that the model has no place for: {_listed(extra)}")
        raise rule_error(
            f"Weights have the tensors that config.json describes, {len(names)} of them",
            "; ".join(parts),
            _advice(missing, extra),
        )
    derived = [name for name in entries if name not in names and _DERIVED.search(name)]
    if derived:
        say_once(
            _log, tuple(derived), "left out %d tensors that config.json says already: %s", len(derived), derived[0]
        )
    return tied_head


def _advice(missing: Sequence[str], extra: Sequence[str]) -> str:
    if missing == [LM_HEAD]:
        return 'set "tie_word_embeddings": true in config.json if the head is the embedding\'s table, or fetch the rest'
    if any(name.endswith((".experts.gate_up_proj", ".experts.down_proj")) for name in extra):
        return "save it with save_original_format=True, which writes every expert apart"
    if any("lora_" in name for name in extra):
        return "merge the adapter into its model first"
    return "fetch the files again, or the config.json that belongs to them"


def _listed(names: Sequence[str], nearest_of: Iterable[str] = ()) -> str:
    others = list(nearest_of)
    shown = []
    for number, name in enumerate(names[:_SHOWN]):
        # The nearest of many thousands takes long: only the first few are worth it.
        near = difflib.get_close_matches(name, others, n=1, cutoff=0.6) if number < 2 and others else []
        shown.append(f"{name} (nearest there: {near[0]})" if near else name)
    return ", ".join(shown) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _check_shapes(wanted: Sequence[Place], entries: Mapping[str, TensorEntry]) -> None:
    wrong = [place for place in wanted if entries[place.name].shape != place.shape_there]
    if wrong:
        first = wrong[0]
        raise rule_error(
            f"{first.name} is {list(first.shape_there)} by config.json",
            f"{list(entries[first.name].shape)} in {entries[first.name].file.name}"
            + (f", and {len(wrong) - 1} more tensors of other shapes" if len(wrong) > 1 else ""),
            "use the config.json that belongs to these weights",
        )


def _check_types(wanted: Sequence[Place], entries: Mapping[str, TensorEntry], dtype: Any) -> None:
    taken = (*_FLOATS, *(() if dtype is None else ("F64",)))
    for place in wanted:
        entry = entries[place.name]
        if entry.code not in taken:
            raise rule_error(
                f"Weights are {', '.join(_FLOATS)}",
                f"{entry.code} of {place.name}",
                "pass dtype= to convert them" if entry.code == "F64" else "save the model dequantized",
            )
    if dtype is not None and jnp.dtype(dtype) not in [CODES[code] for code in _FLOATS]:
        raise rule_error("dtype of weights is bfloat16, float16 or float32", dtype, 'use dtype="bfloat16"')


def _check_tied(table: TensorEntry, head: TensorEntry) -> None:
    if head.shape == table.shape:
        one, other = table.view(), head.view()
        blocks = (slice(start, start + _BLOCK) for start in range(0, table.shape[0], _BLOCK))
        if all(np.array_equal(one[rows], other[rows]) for rows in blocks):
            return
    raise rule_error(
        "With tie_word_embeddings the head is the embedding's table",
        f"{head.name} that differs from {table.name}",
        'set "tie_word_embeddings": false in config.json, or leave the head out of the file',
    )
