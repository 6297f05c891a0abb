"""What a token takes: joules of what the accelerators draw, dollars of what the chips cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from capibara.errors import unknown_name
from capibara.hardware.chips import chip_for
from capibara.observe.sensors.reading import Reading
from capibara.prices import KINDS, price_table

__all__ = ["Economy"]


class Economy:
    """Figures a token of a run or a server, from what the sensors of its machine say.

    Args:
      region: the provider's name of it; the first that the price table lists.
      price_kind: how the chips are paid for: "on_demand", "spot", "committed_1y", "committed_3y".
      pricing: a table of the user's own.
    """

    def __init__(
        self, region: str | None = None, price_kind: str = "on_demand", pricing: str | Path | None = None
    ) -> None:
        self._region, self._kind = region, price_kind
        self._table = price_table(pricing)
        self._usd_an_hour: dict[str, float | None] = {}
        if price_kind not in KINDS:
            raise unknown_name("kind of price", price_kind, KINDS)
        regions = dict.fromkeys(row.region for row in self._table.rows)
        if region is not None and region not in regions:
            raise unknown_name("region of the price table", region, regions)

    def of(self, reading: Reading, accelerators: Sequence[Reading]) -> dict[str, float]:
        """joules_per_token and dollars_per_token of a run or a server, as far as they are known."""
        rate = reading.values.get("tokens_per_second", 0.0)
        if rate <= 0:
            return {}
        figures = {}
        power = self._power(reading, accelerators)
        if power is not None:
            figures["joules_per_token"] = power / rate
        dollars = self._dollars_an_hour(reading, accelerators)
        if dollars is not None:
            figures["dollars_per_token"] = dollars / 3600 / rate
        return figures

    def _power(self, reading: Reading, accelerators: Sequence[Reading]) -> float | None:
        """Of all its chips. Where some are in other machines, or do not tell, nobody knows the sum."""
        told = [one.values["power"] for one in accelerators if "power" in one.values]
        whole = len(told) == len(accelerators) and reading.chips in (None, len(accelerators))
        return sum(told) if told and whole else None

    def _dollars_an_hour(self, reading: Reading, accelerators: Sequence[Reading]) -> float | None:
        kinds = {one.chip for one in accelerators}
        kind = reading.chip or (kinds.pop() if len(kinds) == 1 else None)
        devices = reading.chips or len(accelerators)
        if kind is None or not devices:
            return None
        if kind not in self._usd_an_hour and len(self._usd_an_hour) < 64:
            self._usd_an_hour[kind] = self._price(kind)
        each = self._usd_an_hour.get(kind)
        return None if each is None else each * devices

    def _price(self, kind: str) -> float | None:
        """Of a device, which is a chip but for those that have two."""
        chip = None if kind.lower() == "cpu" else chip_for(kind)
        if chip is None:
            return None
        rows = [row for row in self._table.rows if row.chip == chip.name]
        if self._region is not None and self._region not in {row.region for row in rows}:
            return None
        found = self._table.find(chip, self._region, self._kind)
        return None if found is None else found.usd / chip.devices_per_chip
