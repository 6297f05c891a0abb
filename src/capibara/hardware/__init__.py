"""Facts about chips, the shapes they come in, and what is attached now.

Importing this package does not import jax; `attached` and its neighbours do, when they are called.
"""

from __future__ import annotations

from capibara.hardware.chips import CHIPS, chip, chip_for
from capibara.hardware.devices import AttachedDevice, attached, default, slice_attached, summary
from capibara.hardware.facts import Chip, dtype_key
from capibara.hardware.hosts import host, host_memory_bytes
from capibara.hardware.topology import (
    Slice,
    abstract_devices,
    slice_by_grid,
    slice_by_name,
    slice_for,
    slice_names,
)

__all__ = [
    "CHIPS",
    "AttachedDevice",
    "Chip",
    "Slice",
    "abstract_devices",
    "attached",
    "chip",
    "chip_for",
    "default",
    "dtype_key",
    "host",
    "host_memory_bytes",
    "slice_attached",
    "slice_by_grid",
    "slice_by_name",
    "slice_for",
    "slice_names",
    "summary",
]
