"""Which of an engine's programs are launched kernel by kernel, so that kernels overlap (kernels/pallas/overlap.py).

XLA puts a program's kernels into a command buffer, which starts them without the host and one after the end of another.
Launched one by one they can overlap, and the host has to be faster than the device: by the rule here a program takes
the device longer, kernels not overlapping, than it takes the host to launch it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara import hardware
from capibara.kernels.pallas.hopper import refuses_chip
from capibara.kernels.pallas.overlap import LAUNCH_SECONDS, can_overlap
from capibara.models.blocks import Attention, Mlp

if TYPE_CHECKING:
    from capibara.models.config import ModularModelConfig
    from capibara.serve.config import EngineConfig
    from capibara.serve.programs import Shape

__all__ = ["cannot_overlap", "launched_one_by_one"]

_MOST_ROWS = 64
"""Of `few_rows`; products of more rows are the compiler's, and do not overlap."""
_KERNELS_OF_ONE_ROW, _KERNELS = 4, 8
"""Of a layer."""
_IDLE_SECONDS = 2e-6
"""Of the memory, between a kernel and the next that starts after its end."""
_PROGRAM_SECONDS = 1e-3
"""Of the host, for a program beside its launches: planning it, and what it brings."""
_KEYS = 512
"""Of a sequence, that are counted on, or half of what its table has room for."""


def cannot_overlap(model: ModularModelConfig, config: EngineConfig, device_kind: str) -> str | None:
    """Why no program of an engine has kernels that overlap; None where some may."""
    if not can_overlap():
        return "JAX launches kernels so from 0.11 on"
    if (chip := refuses_chip(device_kind)) is not None:
        return chip
    if not all(isinstance(model.blocks[name], Attention | Mlp) for names in model.period for name in names):
        return "it is for layers of attention and an mlp"
    if config.mesh is not None or config.adapters:
        return "it is for one device, without adapters"
    return None


def launched_one_by_one(
    model: ModularModelConfig, config: EngineConfig, shape: Shape, device_kind: str, *, layer_bytes: float,
    page_bytes: float,
) -> bool:  # fmt: skip
    """Whether a step's kernels are to overlap.

    Args:
      model: of the engine.
      config: of the engine, whose `overlap` goes before the rule.
      shape: several tokens in a row; a lone step is not worth a host that does nothing else.
      device_kind: of the chip.
      layer_bytes: of a layer's weights.
      page_bytes: of one page of a layer's cache.
    """
    if config.overlap is False or cannot_overlap(model, config, device_kind) is not None:
        return False
    if shape.steps == 1 or shape.sequences > _MOST_ROWS:
        return False
    chip = hardware.chip_for(device_kind)
    if config.overlap or chip is None:
        return bool(config.overlap)
    filled = min(shape.pages / 2, _KEYS / config.page_size)
    read = layer_bytes + shape.sequences * filled * page_bytes
    kernels = _KERNELS_OF_ONE_ROW if shape.sequences == 1 else _KERNELS
    layer = read / (chip.efficiency.memory.mid * chip.hbm_bandwidth) + kernels * _IDLE_SECONDS
    return shape.steps * model.layers * (layer - kernels * LAUNCH_SECONDS) >= _PROGRAM_SECONDS
