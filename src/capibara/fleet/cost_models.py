"""Cost models by name: "tpu_v4_pricing" is every way to pay for a v4 chip, "tpu_v4_spot" one of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from capibara.errors import rule_error, unknown_name
from capibara.hardware.chips import chip as chip_by_name
from capibara.hardware.facts import Chip
from capibara.prices.table import KINDS, Price, PriceTable, price_table

__all__ = ["CostModel", "cost_model", "cost_model_names"]

_EVERY_KIND = "pricing"


@dataclass(frozen=True)
class CostModel:
    """A chip, the ways to pay for it that are considered, and what each costs."""

    name: str
    chip: Chip
    prices: tuple[Price, ...]
    """One a kind, in the order of `KINDS`; the first is what is meant where one price is."""
    highest: float
    """Dollars that a chip-hour never costs more than: on demand where it is listed, since spot is at most that."""

    def price(self, kind: str | None = None) -> Price:
        """Of this kind; the first there is by default."""
        if kind is None:
            return self.prices[0]
        if kind not in KINDS:
            raise unknown_name("kind of price", kind, KINDS)
        found = next((one for one in self.prices if one.kind == kind), None)
        if found is None:
            raise rule_error(
                f"{self.name} has a price for what is asked",
                f"{kind}, and it has {', '.join(one.kind for one in self.prices)}",
                f"write a [[price]] row with {kind} for {self.chip.name} into pricing.toml, or ask for another kind",
            )
        return found


def cost_model_names(table: PriceTable) -> list[str]:
    """Every name that the table has prices for."""
    names = []
    for chip in dict.fromkeys(row.chip for row in table.rows):
        kinds = {row.kind for row in table.rows if row.chip == chip}
        names += [f"{chip}_{_EVERY_KIND}", *(f"{chip}_{kind}" for kind in KINDS if kind in kinds)]
    return names


def cost_model(
    name: str | CostModel, *, pricing: PriceTable | str | Path | None = None, region: str | None = None
) -> CostModel:
    """The cost model of this name, by the price table that is in force.

    Args:
      name: CHIP_pricing, or CHIP_ and a kind of `capibara.prices.KINDS`.
      pricing: a table, or a TOML file laid over the shipped one.
      region: whose prices; the chip's first in the table by default.

    Examples:
        >>> cost_model("tpu_v4_pricing").price().usd, cost_model("tpu_v4_spot").price().usd
        (3.22, 0.9215)
    """
    if isinstance(name, CostModel):
        return name
    table = pricing if isinstance(pricing, PriceTable) else price_table(pricing)
    suffix = next((word for word in (_EVERY_KIND, *KINDS) if str(name).endswith(f"_{word}")), None)
    try:
        chip = None if suffix is None else chip_by_name(name.removesuffix(f"_{suffix}"))
    except ValueError:
        chip = None
    if suffix is None or chip is None:
        raise unknown_name("cost model", name, cost_model_names(table))
    if suffix != _EVERY_KIND:
        prices: tuple[Price, ...] = (table.price(chip, region, suffix),)
    else:
        found = [table.find(chip, region, kind) for kind in KINDS]
        prices = tuple(one for one in found if one is not None)
        if not prices:
            table.price(chip, region)  # raises, and says how to write a price down
    on_demand = table.find(chip, region)
    listed = [*prices, *([] if on_demand is None else [on_demand])]
    return CostModel(name, chip, prices, max(one.usd for one in listed))
