"""What is right and slow, or surely not what was meant: CAP3xx. Nothing here is an error.

Each rule says something only where the text shows it: which values are arrays, which functions jax traces, which key
is drawn from twice. What the text does not show (a helper that another module calls from jitted code) goes unsaid.
"""

from __future__ import annotations

from collections.abc import Iterator

from capibara.migrate.findings import Finding
from capibara.migrate.module import Module
from capibara.migrate.performance.compilations import check_compilations
from capibara.migrate.performance.dimensions import check_dimensions
from capibara.migrate.performance.donation import check_donation
from capibara.migrate.performance.float64 import check_float64
from capibara.migrate.performance.host import check_host
from capibara.migrate.performance.keys import check_keys
from capibara.migrate.performance.loops import check_loops
from capibara.migrate.performance.static_arguments import check_static_arguments
from capibara.migrate.settings import Settings

__all__ = ["check_performance"]

_RULES = (
    check_loops,
    check_host,
    check_float64,
    check_compilations,
    check_keys,
    check_dimensions,
    check_donation,
    check_static_arguments,
)


def check_performance(module: Module, settings: Settings) -> Iterator[Finding]:
    """Every finding of every rule."""
    if "jax" not in module.source:
        return
    for rule in _RULES:
        yield from rule(module)
