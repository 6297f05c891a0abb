"""Grids of shapes on one GPU, for the models of times: what the lattice's draws leave thin.

    python benchmarks/shapes_gpu.py --part norm --out shapes.json
    python benchmarks/shapes_gpu.py --part attention --minutes 2

Rows are those of `capibara kernels bench --models`: compiled by several processes, timed by one at a time on the
device's clock, right before fast, dispatch's choice beside every implementation and what a user would write.
`tools/fitted_times.py` reads them. No shape of a model that the lattice holds back is here.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara import hardware
from capibara.cli.kernels.lattice import told
from capibara.kernels.core.op import lookup
from capibara.kernels.core.spec import Case
from capibara.kernels.lab.lattice import peers, report, run
from capibara.kernels.lab.lattice.workloads import Workload, attention_of, with_op
from capibara.kernels.ops.attention.hopper import backward, forward
from capibara.kernels.ops.attention.hopper.calls import LONGEST_FIRST, best_order
from capibara.kernels.ops.linalg.gemm.hopper import forward as gemm
from capibara.kernels.ops.linalg.gemm.hopper import turned
from capibara.kernels.ops.vq.nearest.hopper import forward as nearest
from capibara.kernels.pallas.hopper import multiprocessors

# columns and rows of each
NORMS = {
    128: (65536, 400000), 768: (300, 16384), 1024: (3000,), 1280: (8192,), 1600: (600, 13312), 2048: (200, 4096, 16384),
    2304: (6000,), 2880: (2000, 12288), 3072: (8192,), 3584: (12000,), 4096: (100, 3000, 16384), 5120: (100, 6000),
    6144: (3000,), 7168: (8192,), 8192: (100, 2048),
}  # fmt: skip
LAYER_NORMS = (768, 1280, 1600, 5120)
# tokens, width, words
LOSSES = (
    (4096, 2048, 32000), (16384, 2048, 32000), (6000, 5120, 32064), (4096, 4096, 128256), (3000, 2048, 151936),
    (4096, 3584, 256000), (8192, 1024, 50304),
)  # fmt: skip
# rows, columns: few rows, whose time is a launch and what a core does at a time
ACTIVATIONS = (
    (16, 5120), (100, 3072), (64, 16384), (300, 3072), (387, 10240), (700, 4096), (1000, 5120), (2000, 3072),
    (1500, 10240),
)  # fmt: skip
GATES = ((300, 14336), (1500, 6144), (2838, 14336), (8192, 7680), (8192, 13824), (20480, 5120))
# Products of numbers of rows that 8 does not divide, and of 3000 beside 3001; K and N.
PRODUCT_ROWS = (77, 270, 327, 1001, 1500, 3000, 3001)
PRODUCTS = ((768, 3072), (4096, 2048), (4096, 14336))
# The same by our kernel's tiles: M, K, N, and whether with a bias and an activation.
TILED = (
    ((3000, 4096, 2048), True), ((1504, 4096, 2048), True), ((1000, 4096, 2048), True), ((328, 4096, 2048), True),
    ((3000, 768, 3072), True), ((1504, 768, 3072), True), ((328, 768, 3072), True), ((80, 4096, 2048), True),
    ((1504, 4096, 14336), True), ((1000, 4096, 14336), True), ((328, 4096, 14336), True), ((4096, 4096, 4096), True),
    ((8192, 2048, 4096), True), ((4104, 2880, 5120), True), ((600, 5120, 17920), True),
    ((1504, 4096, 2048), False), ((328, 4096, 2048), False), ((2616, 2048, 2048), False), ((6768, 2048, 2048), False),
    ((4096, 10240, 2560), False), ((328, 13824, 5120), False), ((272, 5120, 2560), False), ((1001, 4096, 2048), True),
    ((120, 1024, 1024), False), ((200, 768, 768), False), ((272, 768, 3072), False),
    ((328, 768, 3072), False), ((504, 1024, 4096), False), ((64, 2048, 2048), False), ((160, 1600, 6400), True),
    ((424, 1024, 4096), True),
)  # fmt: skip
# The same of few rows, whose tiles do not fill the chip: K and N, and whether with a bias and an activation.
FEW_ROWS = (1, 8, 16, 40, 64, 128, 200, 256, 330)
FEW_TILED = {
    (768, 768): False, (1024, 4096): True, (2048, 2304): False, (2048, 6144): False, (4096, 1024): False,
    (1600, 6400): True, (8192, 2048): False,
}  # fmt: skip
# Stages of rings, of the kernel for few rows of gemm and of few_rows: M, K, N, and names of its cases.
STAGES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 13, 14, 15, 16)
RING_PRODUCTS = (
    (96, 4096, 1024), (96, 2048, 2304), (200, 2048, 2304), (128, 1024, 4096), (128, 2048, 6144), (64, 768, 2304),
    (128, 4096, 1024),
)  # fmt: skip
RING_CASES = (
    "llama-1b-qkv-1", "llama-1b-qkv-32", "llama-1b-down-1", "llama-1b-down-32", "llama-1b-gated-1", "llama-1b-head-1",
    "llama-8b-qkv-1", "llama-8b-down-32", "llama-8b-gated-1", "llama-1b-int8-qkv-1", "llama-8b-int8-down-1",
    "llama-8b-int8-qkv-1",
)  # fmt: skip
# batch, time, channels, taps
FILTERS = (
    (2, 8192, 4096, 8192), (1, 8192, 4096, 8192), (6, 512, 4096, 512), (4, 2367, 4096, 2367), (15, 1013, 4096, 1013),
    (8, 16384, 768, 16384), (8, 16384, 768, 64), (3, 4096, 1024, 4096), (1, 2000, 512, 2000), (1, 32768, 256, 32768),
)  # fmt: skip
# batch, length, heads, key heads, head_dim
ATTENTION = (
    (2, 3100, 32, 8, 64), (1, 3260, 32, 8, 64), (4, 1450, 32, 8, 64), (2, 2700, 16, 16, 64), (1, 5300, 14, 2, 64),
    (3, 1900, 32, 8, 128), (1, 4500, 28, 4, 128), (2, 2700, 32, 32, 96), (2, 1111, 40, 8, 128), (8, 700, 12, 12, 64),
    (2, 4096, 8, 8, 256), (1, 3000, 16, 8, 256), (3, 1900, 8, 4, 256), (4, 1024, 10, 1, 256), (1, 4096, 32, 32, 192),
    (2, 3000, 16, 16, 192), (1, 16384, 32, 8, 128), (1, 32768, 16, 2, 128), (1, 32768, 8, 8, 128),
)  # fmt: skip
# The same of gradients, in every way that programs may share tiles of keys and query heads; causal, and not.
GRADIENTS = (
    (1, 4500, 28, 4, 128), (66, 353, 14, 2, 64), (4, 1450, 32, 8, 64), (2, 3100, 32, 8, 64), (1, 5300, 14, 2, 64),
    (2, 4096, 32, 8, 64), (6, 1024, 28, 4, 128), (1, 2048, 32, 8, 128), (3, 1900, 32, 8, 128), (4, 4096, 32, 8, 128),
    (1, 16384, 32, 8, 128), (2, 2700, 32, 32, 96), (4, 1024, 10, 1, 256), (2, 4096, 8, 8, 256), (1, 3000, 16, 8, 256),
    (2, 3000, 16, 16, 192), (1, 4096, 32, 32, 192),
    (40, 512, 16, 16, 64), (64, 257, 12, 12, 64), (20, 700, 14, 2, 64), (16, 1024, 12, 12, 64),
    (39, 512, 40, 8, 128), (24, 512, 32, 32, 128), (48, 333, 16, 16, 128), (12, 1024, 32, 8, 128),
    (40, 256, 16, 16, 256), (17, 430, 16, 16, 192), (34, 512, 32, 32, 80), (20, 900, 16, 16, 96),
)  # fmt: skip
# Forward passes by the ways to walk the tiles; causal, without, in a window of so many keys, and with a soft cap.
FORWARD = (
    (1, 16384, 32, 8, 128), (1, 32768, 16, 2, 128), (2, 8192, 16, 16, 128), (4, 4096, 32, 8, 128),
    (8, 2048, 32, 8, 128), (16, 1024, 16, 16, 128), (8, 512, 40, 8, 128), (3, 1559, 16, 16, 128),
    (2, 2700, 32, 32, 96), (2, 4096, 16, 16, 80), (1, 5371, 64, 64, 192), (8, 2048, 16, 8, 256),
    (15, 1024, 16, 16, 64),
)  # fmt: skip
WHOLE_FORWARD = ((2, 4096, 16, 16, 128), (8, 2048, 16, 16, 128), (6, 1500, 16, 16, 128))
WINDOWED = (((2, 4096, 32, 8, 128), 1024), ((4, 4096, 32, 8, 128), 2048), ((1, 8192, 16, 8, 256), 4096))
WHOLE_GRADIENTS = ((6, 1500, 16, 16, 128), (3, 1500, 20, 20, 64), (4, 1100, 16, 16, 80))
SOFTCAPS = ((3, 4096, 16, 8, 256), (2, 3000, 32, 16, 128), (1, 8192, 8, 4, 256))
WINDOWED_GRADIENTS = (
    ((2, 4096, 32, 8, 64), 128), ((2, 3000, 16, 16, 64), 256), ((2, 4096, 16, 4, 128), 256),
    ((2, 4096, 16, 8, 256), 512), ((1, 8192, 32, 8, 128), 4096),
)  # fmt: skip
# rows, width, codes: narrow ones, and few rows, searched by parts of the codes
CODES = (
    (2236, 8, 1024), (500, 4, 256), (13244, 8, 1024), (9216, 8, 16384), (60480, 8, 16384), (1500, 64, 4096),
)  # fmt: skip


def norms() -> Iterator[Workload]:
    op = lookup("norm")
    for columns, counts in NORMS.items():
        for rows in counts:
            for kind in ("rms", "layer")[: 2 if columns in LAYER_NORMS else 1]:
                vectors = ((columns,), (columns,) if kind == "layer" else None)
                for residual in (False, True)[: 2 if kind == "rms" and columns > 128 else 1]:
                    params: dict[str, Any] = {"kind": kind} | ({"return_residual": True} if residual else {})
                    shapes = ((rows, columns), *vectors, (rows, columns) if residual else None)
                    case = Case("grid", shapes, "bfloat16", params)
                    for grad in (False, True):
                        what = f"{kind} {rows}x{columns}{' +residual' if residual else ''}"
                        plain = {} if residual else {"plain": peers.norm(kind)}
                        yield with_op("norm", "grid", what, op.name, case, grad, peers=plain)


def products() -> Iterator[Workload]:
    for (inner, columns), rows in itertools.product(PRODUCTS, PRODUCT_ROWS):
        endings: dict[str, tuple[Any, Any, dict[str, Any]]] = {
            "": (None, None, {}),
            " bias gelu": ((columns,), None, {"activation": "gelu"}),
            " +residual": (None, (rows, columns), {}),
        }
        for what, (bias, residual, params) in endings.items():
            case = Case("grid", ((rows, inner), (inner, columns), bias, residual), "bfloat16", params)
            plain, by_torch = {"plain": peers.gemm(params)}, peers.torch_gemm(params)
            said = f"{rows}x{inner}x{columns}{what}"
            yield with_op("gemm", "grid", said, "gemm", case, False, peers=plain, torch=by_torch)


def few_rows() -> Iterator[Workload]:
    """Products of few rows by XLA, by our kernel of large tiles, and by the one for few rows in its likeliest cuts."""
    op = lookup("gemm")
    for ((inner, columns), bias), rows in itertools.product(FEW_TILED.items(), FEW_ROWS):
        params: dict[str, Any] = {"activation": "gelu"} if bias else {}
        case = Case("grid", ((rows, inner), (inner, columns), (columns,) if bias else None, None), "bfloat16", params)
        plain, by_torch = {"plain": peers.gemm(params)}, peers.torch_gemm(params)
        said = f"{rows}x{inner}x{columns}{' bias gelu' if bias else ''}"
        made = with_op("gemm", "grid", said, "gemm", case, False, peers=plain, torch=by_torch)
        configs = {f"{c.rows} rows, {c.parts}": c for c in turned.candidates(op.call(*case.args(), **params))[:2]}

        def ours(*arrays: Any, form: str | None = None, configs: Any = configs, params: Any = params) -> Any:
            if form in configs:
                return op(*arrays, implementation="hopper_turned", config=configs[form], **params)
            return op(*arrays, implementation=form, **params)

        yield dataclasses.replace(made, ours=ours, forms=("xla", "hopper", *configs))


def rings() -> Iterator[Workload]:
    """The likeliest cuts of few rows with rings of every length up to the longest that fits."""
    for rows, inner, columns in RING_PRODUCTS:
        case = Case("grid", ((rows, inner), (inner, columns), None, None), "bfloat16", {})
        yield _by_rings("gemm", "hopper_turned", f"{rows}x{inner}x{columns}", case, 3)
    for name in RING_CASES:
        yield _by_rings("few_rows", "hopper", name, lookup("few_rows").case(name), 1)


def _by_rings(op_name: str, implementation: str, what: str, case: Case, cuts: int) -> Workload:
    op, params = lookup(op_name), dict(case.params)
    call = op.call(*case.args(), **params)
    found = op.implementations[implementation].candidates(call)[:cuts]
    configs = {str(c): c for cut in found for c in (dataclasses.replace(cut, stages=stages) for stages in STAGES)}

    def ours(*arrays: Any, form: str | None = None) -> Any:
        return op(
            *arrays, implementation=implementation if form in configs else None, config=configs.get(form), **params
        )

    made = with_op(op_name, "grid", what, op_name, case, False, peers={})
    return dataclasses.replace(made, ours=ours, forms=tuple(configs))


def tiles() -> Iterator[Workload]:
    """By XLA, by torch, and by our kernel in every size of tiles."""
    for (rows, inner, columns), bias in dict.fromkeys(TILED):
        params: dict[str, Any] = {"activation": "gelu"} if bias else {}
        shapes = ((rows, inner), (inner, columns), (columns,) if bias else None, None)
        case = Case("grid", shapes, "bfloat16", params)
        plain, by_torch = {"plain": peers.gemm(params)}, peers.torch_gemm(params)
        said = f"{rows}x{inner}x{columns}{' bias gelu' if bias else ''}"
        made = with_op("gemm", "grid", said, "gemm", case, False, peers=plain, torch=by_torch)
        call = made.op.call(*case.args(), **params)
        configs = {}
        for tile_m, tile_n, split in gemm.TILES:
            stages = gemm.deepest(call, tile_m, tile_n, split)
            if stages is not None:
                configs[f"{tile_m}x{tile_n} {split}"] = gemm.HopperConfig(tile_m, tile_n, 64, stages, split)

        def ours(*arrays: Any, form: str | None = None, configs: Any = configs, params: Any = params) -> Any:
            if form in configs:
                return lookup("gemm")(*arrays, implementation="hopper", config=configs[form], **params)
            return lookup("gemm")(*arrays, implementation=form, **params)

        yield dataclasses.replace(made, ours=ours, forms=("xla", *configs))


def codes() -> Iterator[Workload]:
    """By our configs for few rows, and by the one that has all codes."""
    op = lookup("nearest_code")
    for rows, width, count in CODES:
        case = Case("grid", ((rows, width), (count, width)), "float32", {})
        call = op.call(*case.args())
        found, dtype = nearest.sizes_of(call), np.dtype(np.float32)
        named = nearest.by_parts(found, dtype, multiprocessors(call.target.device_kind))
        configs = {str(config): config for config in [*named, *nearest.whole(found, dtype)[:1]]}

        def ours(*arrays: Any, form: str | None = None, configs: Any = configs) -> Any:
            if form in configs:
                return op(*arrays, implementation="hopper", config=configs[form])
            return op(*arrays, implementation=form)

        said, plain = f"{rows} rows of {width}, {count} codes", {"plain": peers.nearest_code}
        made = with_op("nearest code", "grid", said, "nearest_code", case, False, peers=plain)
        yield dataclasses.replace(made, ours=ours, forms=tuple(configs))


def attentions() -> Iterator[Workload]:
    for sizes in ATTENTION:
        for grad in (False, True):
            yield attention_of("grid", sizes, {"causal": True}, grad)


def gradients() -> Iterator[Workload]:
    for causal, shapes in ((True, GRADIENTS), (False, WHOLE_GRADIENTS)):
        for sizes in shapes:
            yield _by_configs(sizes, {"causal": True} if causal else {})
    for sizes, keys in WINDOWED_GRADIENTS:
        yield _by_configs(sizes, {"causal": True, "window": (keys - 1, 0)})


def _by_configs(sizes: tuple[int, int, int, int, int], params: dict[str, Any]) -> Workload:
    """The gradient by cuDNN, and by our kernel in the default's way and in others."""
    batch, length, heads, kv_heads, head_dim = sizes
    made = attention_of("grid", sizes, params, True)
    op, grad = lookup("attention"), lookup("attention_grad")
    q, k = (jax.ShapeDtypeStruct((batch, n, length, head_dim), jnp.bfloat16) for n in (heads, kv_heads))
    lse = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
    default = backward.default_config(grad.call(q, k, k, *(None,) * 6, q, lse, q, None, **params))
    configs = {
        "usual": dataclasses.replace(default, order=best_order(head_dim), sharers=0),
        "longest first": dataclasses.replace(default, order=LONGEST_FIRST, sharers=0),
        "a head a program": dataclasses.replace(
            default,
            order=best_order(head_dim),
            sharers=int(kv_heads < heads),
            rounded=default.rounded and kv_heads == heads,
        ),
    }
    if head_dim <= 64:
        configs["64 queries"] = dataclasses.replace(default, block_q=64)
    if default.rounded:
        configs["float32 sums"] = dataclasses.replace(default, rounded=False)
    elif not default.sharers and length <= 4096:
        configs["rounded sums"] = dataclasses.replace(default, rounded=True)
    configs = {name: config for name, config in configs.items() if config != default}
    if batch == 1 or not params:  # the same order
        configs.pop("longest first", None)

    def by(config: Any) -> Any:
        def with_lse(*arrays: Any) -> Any:
            return op(*arrays, *(None,) * 6, implementation="hopper", physical="bthd", return_lse=True, **params)

        @jax.custom_vjp
        def attended(q: Any, k: Any, v: Any) -> Any:
            return with_lse(q, k, v)[0]

        def saved(q: Any, k: Any, v: Any) -> Any:
            out, lse = with_lse(q, k, v)
            return out, (q, k, v, out, lse)

        def pulled(kept: Any, d_out: Any) -> Any:
            q, k, v, out, lse = kept
            absent = (None,) * 6
            how: dict[str, Any] = {"implementation": "hopper", "physical": "bthd", "config": config, **params}
            return grad(q, k, v, *absent, out, lse, d_out, None, **how)[:3]

        attended.defvjp(saved, pulled)
        return attended

    def ours(q: Any, k: Any, v: Any, *rest: Any, form: str | None = None) -> Any:
        if form not in configs:
            return made.ours(q, k, v, *rest, form=form)
        return by(configs[form])(*(x.swapaxes(1, 2) for x in (q, k, v))).swapaxes(1, 2)

    return dataclasses.replace(made, ours=ours, forms=("cudnn", "hopper", *configs), peers={}, torch={})


def forwards() -> Iterator[Workload]:
    yield from (_by_walks(sizes, {"causal": True}) for sizes in FORWARD)
    yield from (_by_walks(sizes, {}) for sizes in WHOLE_FORWARD)
    yield from (_by_walks(sizes, {"causal": True, "window": (keys - 1, 0)}) for sizes, keys in WINDOWED)


def _by_walks(sizes: tuple[int, int, int, int, int], params: dict[str, Any]) -> Workload:
    """The forward pass by its peers, by cuDNN, and by our kernel with the default's tiles walked in other ways."""
    made = attention_of("grid", sizes, params, False)
    op = lookup("attention")
    call = op.call(*made.case.args(), **params)
    default = forward.default_config(call)
    configs = {
        f"{'programs' if config.programs else 'a program a tile'}{', ahead' if config.ahead else ''}": config
        for config in forward.candidates(call)
        if config.block_q == 64 and config.stages == 2 and config.take_turns and config.block_k == default.block_k
        if config != default
    }

    def ours(q: Any, k: Any, v: Any, *rest: Any, form: str | None = None) -> Any:
        if form not in configs:
            return made.ours(q, k, v, *rest, form=form)
        turned = (x.swapaxes(1, 2) for x in (q, k, v))
        how: dict[str, Any] = {"implementation": "hopper", "physical": "bthd", "config": configs[form], **params}
        return op(*turned, *rest, **how).swapaxes(1, 2)

    return dataclasses.replace(made, ours=ours, forms=("cudnn", "hopper", *configs))


def gates() -> Iterator[Workload]:
    for kind in ("gelu_tanh", "gelu", "silu"):
        for shape in GATES:
            case = Case("grid", (shape, shape, None, None), "bfloat16", {"kind": kind})
            what = f"{kind} gated {shape[0]}x{shape[1]}"
            plain = {"plain": peers.activation(kind)}
            yield with_op("activation", "grid", what, "activation", case, False, peers=plain)


def softcaps() -> Iterator[Workload]:
    for sizes in SOFTCAPS:
        yield _by_walks(sizes, {"causal": True, "softcap": 50.0})


def activations() -> Iterator[Workload]:
    for kind in ("gelu", "gelu_tanh"):
        for shape in ACTIVATIONS:
            for grad in (False, True):
                case = Case("grid", (shape, None, None, None), "bfloat16", {"kind": kind})
                what = f"{kind} {shape[0]}x{shape[1]}"
                plain = {"plain": peers.activation(kind)}
                yield with_op("activation", "grid", what, "activation", case, grad, peers=plain)


def filters() -> Iterator[Workload]:
    for batch, time, channels, taps in FILTERS:
        for grad in (False, True):
            case = Case("grid", ((batch, time, channels), (taps, channels)), "float32", {})
            what = f"B{batch} T{time} {channels} channels, {taps} taps"
            yield with_op("long conv", "grid", what, "long_conv", case, grad, peers={"jnp.fft": peers.long_conv},
                          torch=peers.torch_long_conv())  # fmt: skip


def losses() -> Iterator[Workload]:
    for tokens, depth, words in LOSSES:
        shapes = ((tokens, depth), (depth, words), (tokens,), (tokens,))

        def labels(generator: Any, shape: tuple[int, ...], words: int = words) -> Any:
            return generator.integers(0, words, shape, dtype=np.int32)

        case = Case("grid", shapes, "bfloat16", {}, dtypes={2: "int32", 3: "float32"}, draw={2: labels})
        what = f"{tokens}x{depth}x{words}"
        yield with_op("cross-entropy", "grid", what, "cross_entropy_and_grad", case, False, peers={})


PARTS = {
    "gradient": gradients, "softcap": softcaps, "cross-entropy": losses, "norm": norms, "attention": attentions,
    "activation": activations, "forward": forwards, "gated": gates, "gemm": products, "tiles": tiles, "codes": codes,
    "long-conv": filters, "few-rows": few_rows, "rings": rings,
}  # fmt: skip


def chosen(settings: run.Settings, match: str = "") -> Iterator[Workload]:
    assert settings.families is not None
    for part in settings.families:
        yield from (workload for workload in PARTS[part]() if re.search(match, workload.what))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--match", default="", help="only shapes in whose name this is found, a regular expression")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    asked = parser.parse_args()
    parts = tuple(asked.part or PARTS)
    workers = max(1, min(8, (os.cpu_count() or 2) // 2))
    settings = run.Settings(
        minutes=asked.minutes, families=parts, workers=workers, workloads=functools.partial(chosen, match=asked.match)
    )
    count = sum(1 for _ in settings.workloads(settings))
    results = None

    def on_row(row: run.Row) -> None:
        assert results is not None
        results.add(row)
        print(told(row), flush=True)

    command = "python benchmarks/" + " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the workers' memory is what this process leaves
    results = report.Results(asked.out, hardware.default().device_kind, command, 0, asked.commit)
    run.run(run.dataclasses.replace(settings, most_rows=count), on_row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
