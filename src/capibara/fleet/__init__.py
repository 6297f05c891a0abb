"""What chips cost and what renting them by the hour means: prices, and runs on chips that can be taken away.

Importing this package does not import jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capibara.fleet.pricing import KINDS, Price, PriceTable, price, price_table
    from capibara.fleet.spot import SpotAssumptions, SpotRun, checkpoint_interval, spot_run

_HOME = {
    "KINDS": "pricing",
    "Price": "pricing",
    "PriceTable": "pricing",
    "SpotAssumptions": "spot",
    "SpotRun": "spot",
    "checkpoint_interval": "spot",
    "price": "pricing",
    "price_table": "pricing",
    "spot_run": "spot",
}

__all__ = [
    "KINDS",
    "Price",
    "PriceTable",
    "SpotAssumptions",
    "SpotRun",
    "checkpoint_interval",
    "price",
    "price_table",
    "spot_run",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"capibara.fleet.{_HOME[name]}"), name)
    raise AttributeError(f"module 'capibara.fleet' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
