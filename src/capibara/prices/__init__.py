"""What chips cost and what renting them by the hour means: prices, and runs on chips that can be taken away.

Importing this package does not import jax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.prices.spot import SpotAssumptions as SpotAssumptions
    from capibara.prices.spot import SpotRun as SpotRun
    from capibara.prices.spot import checkpoint_interval as checkpoint_interval
    from capibara.prices.spot import spot_run as spot_run
    from capibara.prices.table import KINDS as KINDS
    from capibara.prices.table import Price as Price
    from capibara.prices.table import PriceTable as PriceTable
    from capibara.prices.table import price as price
    from capibara.prices.table import price_table as price_table

__all__, __getattr__, __dir__ = exports(
    __name__,
    {
        "spot": "SpotAssumptions SpotRun checkpoint_interval spot_run",
        "table": "KINDS Price PriceTable price price_table",
    },
)
