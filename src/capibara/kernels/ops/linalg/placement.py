"""Which chip a function that is jitted as a whole is dispatched for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import jax

from capibara.kernels.core import context
from capibara.kernels.core.context import Target


def target_for(arrays: Iterable[Any]) -> Target:
    """What dispatch takes for these operands: an explicit target, the device that holds them, the default."""
    chosen = context.explicit_target()
    if chosen is None:
        for x in arrays:
            if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
                return context.target_of(next(iter(x.devices())))
    return chosen or context.current_target()


def on_their_device(arrays: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """Dispatch inside a jit for the device that holds these arrays, as a call outside of one is.

    A jitted function sees tracers, which lie nowhere, so dispatch inside takes the default device: wrong for
    arrays that were put on another, e.g. on the host of a machine with a GPU.
    """
    found = target_for(arrays)
    if found == context.current_target():
        return contextlib.nullcontext()
    return context.target(found.platform, found.device_kind)
