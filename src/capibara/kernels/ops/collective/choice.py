"""Which form a product with a collective takes: overlapped where the product of a part covers that part's trip.

All figures are predicted, from the chip's published rates.
"""

from __future__ import annotations

import dataclasses

from capibara import hardware
from capibara.kernels.core.spec import Call


@dataclasses.dataclass(frozen=True)
class Overlap:
    """One step of the ring, in seconds: the product of a part, and its trip to the next device."""

    product: float
    trip: float

    @property
    def covered(self) -> bool:
        return self.product >= self.trip


def overlap(call: Call, directions: int) -> Overlap | None:
    """None where the chip or its links are not in the table, or are not a TPU's: there XLA's own is taken."""
    chip = hardware.chip_for(call.target.device_kind) if call.target.platform == "tpu" else None
    devices = call.params["devices"]
    assert isinstance(devices, int)
    if chip is None or chip.ici_link_bandwidth is None or devices < 2:
        return None
    cost = call.op.cost(call)
    # Matrix units take float32 operands at the rate of their own type unless a higher precision is asked for.
    product = cost.matrix_flops / devices / chip.peak_flops("bfloat16")
    return Overlap(product, cost.link_bytes / (devices - 1) / directions / chip.ici_link_bandwidth)


def ahead_of(call: Call, directions: int) -> tuple[str, ...]:
    """Before XLA's where the trip is covered; two ways, which halve the trip, before one."""
    found = overlap(call, directions)
    return ("xla", "xla_ring") if found is not None and found.covered else ()


def remark(call: Call, directions: int) -> str | None:
    found = overlap(call, directions)
    if found is None:
        return None
    verb = "covers" if found.covered else "does not cover"
    return (
        f"the product of a part, {found.product * 1e6:.1f} us, {verb} its trip to the next device, "
        f"{found.trip * 1e6:.1f} us (predicted)"
    )
