"""Kernels that start before the one before them is done (Hopper's programmatic dependent launch).

Between two kernels the memory has nothing to do: the last programs of one end, the next is started, finds out what it
is to do and asks for its first bytes, about two microseconds in all. Inside `overlapping` kernels that take part are
started early: each asks for its weights, which were there before, and only then waits for the kernel before it.

The rules that they keep. Before `await_previous` a program reads weights alone and writes nothing; and every program of
a kernel awaits, so that who awaits a kernel has awaited all before it. `let_next_start` may be called at any time: the
next kernel's programs take the places that this one's leave.

XLA has to launch the kernels one by one: in a command buffer (a CUDA graph) a kernel is started after the end of the
one before, whatever it says. `ONE_BY_ONE` are the compiler's options for that. Launching takes the host about 6 us a
kernel: a program whose kernels are shorter is better off in a command buffer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

__all__ = ["LAUNCH_SECONDS", "ONE_BY_ONE", "await_previous", "can_overlap", "let_next_start", "overlapping", "overlaps"]

ONE_BY_ONE: dict[str, Any] = {"xla_gpu_graph_min_graph_size": 1 << 30}
"""`compiler_options` of a program without command buffers."""
LAUNCH_SECONDS = 6e-6
"""Of the host, for a kernel that is not in a command buffer, on an H200's machine."""
_overlapping = jax.make_user_context(False)


@contextlib.contextmanager
def overlapping() -> Iterator[None]:
    """Let kernels that are traced inside start early.

    The caller promises that the weights of `few_rows`, `summed_row` and `between_attentions` are no result of the
    program: they are fetched while the kernels before may still run.
    """
    with _overlapping(True):
        yield


def can_overlap() -> bool:
    """Whether this JAX launches kernels so, which it does from 0.11 on."""
    return jax.__version_info__ >= (0, 11)


def overlaps() -> bool:
    """Whether kernels that are traced here start early."""
    return bool(_overlapping.value) and can_overlap()


def await_previous() -> None:
    """By a warpgroup: wait until all kernels before this one are done, and what they wrote is there."""
    plgpu.griddepcontrol_wait()


def let_next_start() -> None:
    """Let the programs of the next kernel start where there is room, as soon as all of this one's have said so."""
    plgpu.griddepcontrol_launch_dependents()
