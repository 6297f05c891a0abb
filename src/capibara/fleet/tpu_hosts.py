"""The hosts of a TPU slice: each runs one process of the program."""

from __future__ import annotations

from capibara.errors import rule_error
from capibara.hardware.topology import Slice, slice_by_name

__all__ = ["COORDINATOR_PORT", "slice_of_hosts"]

COORDINATOR_PORT = 8476
"""Where process 0 listens: the port that jax itself takes on TPUs."""


def slice_of_hosts(on: str, processes: int | None, slices: int = 1) -> Slice:
    """The slice of this name; `processes`, where somebody names them, are the hosts of so many slices."""
    wanted = slice_by_name(on)
    hosts = wanted.hosts * slices
    if processes not in (None, hosts):
        per_host = wanted.chips // wanted.hosts
        raise rule_error(
            "A TPU slice runs one process a host, over all of the host's chips",
            f"{processes} processes for {slices} x {wanted}, each with hosts of {per_host} chips: {hosts} hosts in all",
            f"leave --processes out, or say --processes {hosts}",
        )
    return wanted
