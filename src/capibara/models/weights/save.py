"""Parameters to a Hugging Face folder: config.json and safetensors, in one file or several with an index.

Written layer by layer, so that the host holds one layer beside what is on the devices. All of it goes to a folder
beside the final one first, which then takes its name: a disk that fills up or a process that is killed leaves what was
there before.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.errors import rule_error
from capibara.models import decoder
from capibara.models.blocks.spec import Weight
from capibara.models.config import ModularModelConfig
from capibara.models.weights.family import LM_HEAD, Place, key_path, places
from capibara.models.weights.folder import BESIDE, CONFIG, INDEX, SINGLE
from capibara.models.weights.hf_config import config_to_hf, family_of, origin
from capibara.models.weights.tensor_file import CODES, TensorWriter, code_of

__all__ = ["SHARD_BYTES", "save_hf"]

SHARD_BYTES = 5 * 2**30
_WORDS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
# transformers asks for it.
_METADATA = {"format": "pt"}


def save_hf(
    folder: str | Path,
    model: ModularModelConfig,
    params: Any,
    *,
    dtype: Any = None,
    shard_bytes: int = SHARD_BYTES,
    extra: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the folder that transformers, or `load_hf`, reads, with the tokenizer's files; gives the folder.

    Args:
        folder: Made where it is not there.
        model: The parameters' shape. One that came from a config.json is written with that one's keys.
        params: The tree that `decoder.weights` describes, of jax or numpy arrays; on a mesh as they lie.
        dtype: Convert to this type. By default each tensor has its parameter's, and routers, which are float32 here,
            the type of the others where that loses no bit.
        shard_bytes: The most tensors of one file, in bytes; a larger tensor has a file of its own.
        extra: More keys of config.json, over the others.
        overwrite: Replace the weights of a folder that has some.
    """
    if shard_bytes < 1:
        raise rule_error("shard_bytes is 1 or more", shard_bytes, f"use {SHARD_BYTES}")
    target = Path(folder)
    listed = _with_tied_head(model, places(model, family_of(model)))
    tree = _checked(model, params)
    codes = _codes(model, listed, tree, dtype)
    config = _config(model, codes, extra)
    files = _files(listed, codes, shard_bytes)
    tensors = _tensors(listed, tree)
    failure: Exception | None = None
    if jax.process_index() == 0:
        try:
            _check_target(target, overwrite)
            _check_room(target, sum(_nbytes(place, codes) for place in listed))
            _write_folder(target, model, files, codes, config, tensors)
        except (OSError, ValueError) as error:
            failure = error
    if jax.process_count() > 1:
        # Every process takes part in bringing together what lies on several hosts, to the last tensor, whether or not
        # the first one could write it; then all of them hear how it went, and the folder is there for all.
        for _ in tensors:
            pass
        failure = _shared(failure)
    if failure is not None:
        raise failure
    return target


def _shared(failure: Exception | None) -> Exception | None:
    from jax.experimental import multihost_utils

    failed = bool(multihost_utils.broadcast_one_to_all(np.array(failure is not None)))
    return (
        OSError("The first process could not write the weights; its own error says why.")
        if failed and not failure
        else failure
    )


def _write_folder(
    target: Path,
    model: ModularModelConfig,
    files: Mapping[str, Sequence[Place]],
    codes: Mapping[str, str],
    config: Mapping[str, Any],
    tensors: Iterator[tuple[str, np.ndarray]],
) -> None:
    # One name for all: what a killed process left there goes.
    stage = target.absolute().parent / f".{target.name}.partial"
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir(parents=True)
    try:
        _write_tensors(stage, files, codes, tensors)
        if len(files) > 1:
            total = sum(_nbytes(place, codes) for own in files.values() for place in own)
            index = {
                "metadata": {"total_size": total},
                "weight_map": {place.name: name for name, own in files.items() for place in own},
            }
            _write_json(stage / INDEX, index)
        _write_json(stage / CONFIG, config)
        _copy_tokenizer(model, stage)
        _move(stage, target)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _check_target(target: Path, overwrite: bool) -> None:
    if target.exists() and not target.is_dir():
        raise rule_error("Weights are written to a folder", f"{target}, which is a file", "name another place")
    there = _weights(target) if target.is_dir() else []
    if there and not overwrite:
        raise rule_error(
            "Weights are written where there are none",
            f"{target} with {', '.join(there[:3])}",
            "name another folder, or pass overwrite=True",
        )


def _check_room(target: Path, total: int) -> None:
    near = target
    while not near.exists():
        near = near.absolute().parent
    free = shutil.disk_usage(near).free
    if free < total:
        raise rule_error(
            f"The disk has room for the weights, {total / 2**30:.2f} GiB", f"{free / 2**30:.2f} GiB free", "make room"
        )


def _with_tied_head(model: ModularModelConfig, listed: list[Place]) -> list[Place]:
    """A tied head has no tensor of its own, but for a file that had one."""
    if not model.tied or LM_HEAD not in origin(model)["tensors"]:
        return listed
    return [*listed, replace(listed[0], name=LM_HEAD)]


def _checked(model: ModularModelConfig, params: Any) -> dict[tuple[str | int, ...], tuple[Weight, Any]]:
    """Every leaf by its path, with what the model says of it; an error where the two do not belong together."""
    weights = decoder.weights(model)
    structure: Any  # jax's stubs give it no methods
    expected, structure = jax.tree.flatten_with_path(weights, is_leaf=lambda node: isinstance(node, Weight))
    if structure != jax.tree.structure(params):
        names = {jax.tree_util.keystr(path) for path, _ in expected}
        given = {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(params)}
        raise rule_error(
            "Parameters are the tree that the model's config describes",
            f"without {sorted(names - given)[:3]}, with {sorted(given - names)[:3]}",
            "save them with the config that they were made for",
        )
    leaves = {}
    for (path, weight), leaf in zip(expected, jax.tree.leaves(params), strict=True):
        if tuple(leaf.shape) != weight.shape:
            raise rule_error(
                f"{jax.tree_util.keystr(path)} is {list(weight.shape)}", list(leaf.shape), "save it with its own config"
            )
        leaves[key_path(path)] = (weight, leaf)
    return leaves


def _codes(model: ModularModelConfig, listed: Sequence[Place], tree: Mapping[Any, Any], dtype: Any) -> dict[str, str]:
    """Each tensor's type in the file."""
    if dtype is not None:
        code = code_of(jnp.dtype(dtype))
        if code not in _WORDS:
            raise rule_error("dtype of weights is bfloat16, float16 or float32", dtype, 'use dtype="bfloat16"')
        return {place.name: code for place in listed}
    kept = origin(model)["tensors"]
    main = code_of(tree["embed",][1].dtype)
    codes = {}
    for place in listed:
        weight, leaf = tree[place.path]
        own = code_of(leaf.dtype)
        wanted = kept.get(place.name, main if weight.keep_float32 else own)
        codes[place.name] = wanted if wanted == own or _exact(leaf, place, CODES[wanted]) else own
    return codes


def _exact(leaf: Any, place: Place, dtype: Any) -> bool:
    """Whether this part of the leaf has the same values in another type."""
    part = leaf[place.index] if place.index else leaf
    return bool(jnp.array_equal(part.astype(dtype).astype(leaf.dtype), part, equal_nan=True))


def _config(model: ModularModelConfig, codes: Mapping[str, str], extra: Mapping[str, Any] | None) -> dict[str, Any]:
    config = config_to_hf(model)
    word = _WORDS[next(iter(codes.values()))]
    # The older name is read by every version of transformers.
    for key in [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"] * (
        origin(model)["config"] is None
    ):
        config[key] = word
    return {**config, **(extra or {})}


def _nbytes(place: Place, codes: Mapping[str, str]) -> int:
    size = CODES[codes[place.name]].itemsize
    for dimension in place.shape:
        size *= dimension
    return size


def _files(listed: Sequence[Place], codes: Mapping[str, str], shard_bytes: int) -> dict[str, list[Place]]:
    """File names and what is in each, in order."""
    groups: list[list[Place]] = [[]]
    filled = 0
    for place in listed:
        size = _nbytes(place, codes)
        if groups[-1] and filled + size > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(place)
        filled += size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{n:05d}-of-{len(groups):05d}.safetensors": own for n, own in enumerate(groups, start=1)}


def _tensors(listed: Sequence[Place], tree: Mapping[Any, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Each tensor as the file has it, in order; of a leaf one layer at a time is on the host."""
    here: dict[tuple[Any, int], np.ndarray] = {}
    number = None
    for place in listed:
        repeat = place.index[0] if place.index else None
        layer = place.path[1] if place.index else None
        if (layer, repeat) != number:
            here.clear()
            number = (layer, repeat)
        key = (place.path, repeat or 0)
        if key not in here:
            here[key] = _on_host(tree[place.path][1], repeat)
        part = here[key][place.index[1:]] if place.index[1:] else here[key]
        yield place.name, place.row.there(part)


def _on_host(leaf: Any, repeat: int | None) -> np.ndarray:
    """One layer of a leaf, or all of a leaf that has no layers, from wherever its parts lie.

    jax keeps what it once brought to the host for as long as the array lives, so what is brought is a copy that goes.
    """
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf) if repeat is None else np.asarray(leaf)[repeat]
    if not leaf.is_fully_addressable:
        from jax.experimental import multihost_utils

        part = leaf if repeat is None else _layer(leaf, repeat)
        return np.asarray(multihost_utils.process_allgather(part, tiled=True))
    whole = np.empty(leaf.shape if repeat is None else leaf.shape[1:], leaf.dtype)
    for shard in leaf.addressable_shards:
        if shard.replica_id:
            continue
        if repeat is None:
            whole[shard.index] = np.asarray(jnp.copy(shard.data))
            continue
        start, stop, _ = shard.index[0].indices(leaf.shape[0])
        if start <= repeat < stop:
            whole[shard.index[1:]] = np.asarray(_layer(shard.data, repeat - start))
    return whole


@jax.jit
def _layer(leaf: jax.Array, repeat: int) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(leaf, repeat, keepdims=False)


def _write_tensors(
    stage: Path,
    files: Mapping[str, Sequence[Place]],
    codes: Mapping[str, str],
    tensors: Iterator[tuple[str, np.ndarray]],
) -> None:
    for name, own in files.items():
        announced = [(place.name, codes[place.name], place.shape_there) for place in own]
        with TensorWriter(stage / name, announced, _METADATA) as writer:
            for _ in own:
                writer.write(*next(tensors))


def _write_json(file: Path, values: Mapping[str, Any]) -> None:
    with open(file, "w", encoding="utf-8") as out:
        json.dump(values, out, indent=2, ensure_ascii=False)
        out.write("\n")
        out.flush()
        os.fsync(out.fileno())


def _copy_tokenizer(model: ModularModelConfig, stage: Path) -> None:
    if model.tokenizer == "bytes":
        return
    place = Path(model.tokenizer)
    if place.is_file():
        shutil.copyfile(place, stage / BESIDE[0])
        return
    if not place.is_dir():
        raise rule_error(
            "A model is written with its tokenizer", f"{place}, which is not there", 'set tokenizer = "bytes"'
        )
    for name in BESIDE:
        if (place / name).is_file():
            shutil.copyfile(place / name, stage / name)


def _move(stage: Path, target: Path) -> None:
    """What was staged to where it belongs; of what was there before, all but the weights stays."""
    if not target.exists():
        stage.rename(target)
        return
    fresh = {file.name for file in stage.iterdir()}
    if not _weights(target):
        # The config last: without it no reader takes what is there for a model.
        for name in sorted(fresh, key=lambda name: name == CONFIG):
            os.replace(stage / name, target / name)
        return
    # Files replaced one by one could be a mixture of two models where the process is killed between them. So the whole
    # folder changes places; in between the two renames the old one is there under another name.
    stale = set(_weights(target)) | fresh
    shutil.copytree(
        target,
        stage,
        copy_function=_link,
        dirs_exist_ok=True,
        ignore=lambda folder, names: stale.intersection(names) if Path(folder) == target else set(),
    )
    before = stage.with_suffix(".before")
    shutil.rmtree(before, ignore_errors=True)
    target.rename(before)
    stage.rename(target)
    shutil.rmtree(before)


def _weights(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.glob("*.safetensors*"))


def _link(source: str, to: str) -> None:
    try:
        os.link(source, to)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, to)
