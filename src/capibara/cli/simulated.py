"""Devices that a CPU simulates, for commands with --devices."""

from __future__ import annotations


def simulate_devices(devices: int | None, processes: int = 1) -> None:
    """Make this process's share of so many CPU devices; None leaves the machine's own. Before jax starts."""
    if devices is None:
        return
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices // processes)
