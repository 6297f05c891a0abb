"""The decoder of benchmarks/plain_llama.py, traced: what was compiled for v4 and measured on an H200."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any

from capibara.program import Program, trace


@functools.cache
def llama() -> Any:
    path = Path(__file__).parents[2] / "benchmarks" / "plain_llama.py"
    spec = importlib.util.spec_from_file_location("plain_llama_of_the_costs", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks its own module up
    spec.loader.exec_module(module)
    return module


@functools.lru_cache(maxsize=4)
def traced_step(size: str, remat: str, batch: int, fused: bool, device_kind: str) -> Program:
    """One step of training on sequences of 2048, parameters and state donated."""
    config = dataclasses.replace(llama().SHAPES[size], remat=remat, fused=fused)
    params = llama().param_shapes(config)
    args = (params, llama().state_shapes(params), llama().batch_shapes(batch, 2048))
    step = functools.partial(llama().step, config=config)
    return trace(step, args, donate=(0, 1), roles=("params", "state", "batch"), device_kind=device_kind)
