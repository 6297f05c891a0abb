"""Which calls the Hopper kernels take, forward and backward: head sizes, types, and the order of their programs."""

from __future__ import annotations

import math

import numpy as np

from capibara.errors import rule_error
from capibara.kernels.core.spec import Call
from capibara.kernels.pallas.hopper import refuses_chip

MOST_HEAD_DIM = 256
LENGTH_AXIS = {"bhtd": 2, "bthd": 1}  # of the arrays as they lie in memory
AXES = ("batch", "head", "tile")  # of a launch
# Orders in which programs start, the slowest axis first. On an H200 heads that start together were best, or within 2 %
# of it, at every shape with head_dim up to 128 (by up to 9 %), and one head after another at 256 (by 3 to 25 %).
HEADS_TOGETHER, TILES_TOGETHER = "batch tile head", "head tile batch"
LONGEST_FIRST = "tile batch head"  # with causality: those of all batch elements


def check_order(order: str) -> None:
    if sorted(order.split()) != list(AXES):
        raise rule_error(
            f"order names {', '.join(AXES)} once each, the slowest first", repr(order), f"use {HEADS_TOGETHER!r}"
        )


def best_order(head_dim: int) -> str:
    return TILES_TOGETHER if head_dim > 128 else HEADS_TOGETHER


def refuses(call: Call) -> str | None:
    q, k, v = call.need("q"), call.need("k"), call.need("v")
    chip = refuses_chip(call.target.device_kind)
    if chip is not None:
        return chip
    if np.dtype(q.dtype).name not in ("bfloat16", "float16") or not q.dtype == k.dtype == v.dtype:
        return f"its tensor-core form takes bfloat16 or float16 alike for q, k and v, not {q.dtype} and {k.dtype}"
    if q.shape[-1] > MOST_HEAD_DIM:
        return f"head_dim is {MOST_HEAD_DIM} at the most here, not {q.shape[-1]}"
    if math.prod(q.shape) == 0 or math.prod(k.shape) == 0:
        return "an operand is empty"
    return None


AHEAD_OF_CUDNN, BEHIND_CUDNN = ("cudnn", "xla"), ("xla",)
