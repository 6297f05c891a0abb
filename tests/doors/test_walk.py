"""The walk in docs/architecture.md is the one that `query` takes: the files between a door and the kernel's body."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import vishwamai.kernels.tpu as vishwamai
from capibara import kernels
from capibara.jax import nn
from capibara.jax.tpu_v4.backend import TpuV4AttentionOps
from capibara.kernels import target, trust
from capibara.kernels.core.op import lookup
from capibara.mesh import tpu_v4_optimization_context

ROOT = Path(__file__).parents[2]
SOURCE = Path(kernels.__file__).parents[2]
ROWS = re.findall(r"^\| \d+ \|(.*)\|$", (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"), re.MULTILINE)
MOST = 10

HEADS_FIRST, HEADS_LAST = (2, 8, 512, 128), (2, 512, 8, 128)
DOORS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "capibara.kernels.attention": (lambda q, k, v: kernels.attention(q, k, v, causal=True, layout="bhtd"), HEADS_FIRST),
    "capibara.jax.nn": (lambda q, k, v: nn.dot_product_attention(q, k, v, is_causal=True), HEADS_LAST),
    "TpuV4AttentionOps": (
        lambda q, k, v: TpuV4AttentionOps().flash_attention(q, k, v, use_causal_mask=True),
        HEADS_FIRST,
    ),
    "vishwamai": (lambda q, k, v: vishwamai.flash_attention(q, k, v, causal=True), HEADS_FIRST),
}


def _has_array(x: Any) -> bool:
    if isinstance(x, tuple | list):
        return any(map(_has_array, x))
    return isinstance(x, jax.Array)


@functools.lru_cache(maxsize=4096)
def _file(filename: str) -> str | None:
    """A file below src, without what it has in common with all; the kernel's own are one. None for others."""
    path = Path(filename)
    if not path.is_relative_to(SOURCE):
        return None
    name = path.relative_to(SOURCE).as_posix()
    kernel = re.search(r"attention/(tpu|hopper)/|attention/pallas_", name)
    return "the kernel" if kernel else name.removeprefix("capibara/")


def _walk(fn: Callable[[], Any]) -> list[str]:
    """The files that hand the operand on before the body runs: those on the stack then, and those that returned it."""
    returned: list[str] = []
    stack: list[str] = []

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        name = _file(frame.f_code.co_filename)
        if name is None or event not in ("call", "return") or frame.f_code.co_name.startswith("<"):
            return
        if name == "the kernel" and event == "call" and any(map(_is_ref, frame.f_locals.values())):
            outer: FrameType | None = frame
            while outer is not None:
                stack.append(_file(outer.f_code.co_filename) or "")
                outer = outer.f_back
            sys.setprofile(None)
        elif event == "return" and _has_array(arg) and not _asks_for_a_tile(frame):
            returned.append(name)

    sys.setprofile(profile)
    try:
        fn()
    finally:
        sys.setprofile(None)
    assert stack, "no kernel was traced"
    return list(dict.fromkeys(name for name in (*returned, *stack) if name))


def _is_ref(x: Any) -> bool:
    return "Ref" in type(getattr(x, "aval", None)).__name__


def _asks_for_a_tile(frame: FrameType | None) -> bool:
    """What tile a block size is, is worked out on shapes: operands that are traced for it go nowhere."""
    while frame is not None:
        if frame.f_code.co_name == "config_for":
            return True
        frame = frame.f_back
    return False


@pytest.mark.parametrize("chip", [("tpu", "TPU v4"), ("gpu", "NVIDIA H200")], ids=lambda chip: chip[0])
@pytest.mark.parametrize("door", DOORS)
def test_the_walk_that_is_written_down(door: str, chip: tuple[str, str]) -> None:
    fn, shape = DOORS[door]
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    context = tpu_v4_optimization_context() if door == "capibara.jax.nn" else contextlib.nullcontext()
    with target(*chip), context, trust("predicted"):
        lookup("attention").runners.clear()
        jax.clear_caches()
        taken = _walk(lambda: jax.eval_shape(fn, x, x, x))
    column = [row.split("|")[list(DOORS).index(door)] for row in ROWS]
    written = {re.sub("`", "", cell.split(":")[0]).strip() for cell in column} - {""}
    assert set(taken) == written
    assert len(written) <= MOST
