"""The Hopper kernel of state space duality, emulated: its arithmetic and the synchronisation of its ring."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import jax
import pytest

from capibara.kernels import target
from capibara.kernels.check import check_output, expected
from capibara.kernels.op import Case
from capibara.kernels.scan import SSD
from capibara.kernels.scan.ssd import pallas_gpu_body
from capibara.kernels.scan.ssd.cases import ALL, make_case
from capibara.kernels.scan.ssd.pallas_gpu import ChunksConfig, mosaic_gpu, refuses

_path = Path(__file__).parent.parent / "attention" / "hopper_emulator.py"
_spec = importlib.util.spec_from_file_location("ssd_hopper_emulator", _path)
assert _spec is not None
assert _spec.loader is not None
emulator: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(emulator)
emulator.KERNELS = (pallas_gpu_body,)

NONE: frozenset[str] = frozenset()
CASES = [
    # Chunks beyond the ring and a piece of one, two groups; a head of two slices; less than a chunk, no dt.
    (make_case("groups", 1, 201, 4, 64, 2, 64, NONE, **ALL), ChunksConfig(2)),
    (make_case("wide", 1, 128, 1, 128, 1, 128, NONE), ChunksConfig(3)),
    (make_case("short", 2, 5, 2, 64, 1, 64, NONE, dt=False, D=False, return_final_state=True), ChunksConfig(1)),
]


@pytest.mark.newest
@pytest.mark.parametrize(("case", "config"), CASES, ids=lambda given: getattr(given, "name", ""))
def test_emulated(case: Case, config: ChunksConfig) -> None:
    arrays = case.arrays()
    params = {**SSD.params, **case.params}
    with emulator.emulated():
        out = jax.jit(lambda *given: mosaic_gpu(*given, config=config, **params))(*arrays)
        jax.block_until_ready(out)
    result = check_output(out, expected(SSD, arrays, case.params))
    assert result.ok, result.why


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"states": 32}, "N is 64 or 128"),
        ({"width": 32}, "P is a multiple of 64"),
        ({"heads": 3}, "no pairs"),
        ({"dtype": "float32"}, "all bfloat16 or all float16"),
        ({"time": 0}, "empty"),
        ({"chunk": 128}, "chunks are 64 steps"),
    ],
)
def test_says_why_not(changed: dict[str, Any], words: str) -> None:
    sizes = {"batch": 1, "time": 64, "heads": 2, "width": 64, "groups": 1, "states": 64}
    given = {name: changed.get(name, size) for name, size in sizes.items()}
    case = make_case("no", *given.values(), NONE, dtype=changed.get("dtype", "bfloat16"))
    params = {"chunk": changed["chunk"]} if "chunk" in changed else {}
    with target("gpu", "NVIDIA H200"):
        reason = refuses(SSD.call(*case.args(), **params))
    assert reason is not None
    assert words in reason
