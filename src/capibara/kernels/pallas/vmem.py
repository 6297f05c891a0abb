"""How much of a TPU core's VMEM a kernel may plan with."""

from __future__ import annotations

from capibara import hardware
from capibara.kernels.core.spec import Call

# What a kernel gets unless it asks for more: all of a v4's, and no more on chips that have eight times as much (the
# v5p compiler refused tiles that were planned on its 128 MiB).
SCOPED_BYTES = 16 * 1024 * 1024
# Left for what the compiler adds to the tiles themselves.
RESERVED_BYTES = 1024 * 1024


def chip_of(call: Call) -> hardware.Chip:
    """The chip a call is for; a v4 where a TPU kernel is emulated or the chip is not in the table."""
    return hardware.chip_for(call.target.device_kind) or hardware.chip("tpu_v4")


def limit(call: Call) -> int:
    return min(chip_of(call).vmem_bytes or SCOPED_BYTES, SCOPED_BYTES) - RESERVED_BYTES
