"""Prices of chips by region and kind, from a dated table that users lay their own over.

A user's table is TOML with the form of the shipped `prices.toml`: `[[price]]` rows that name a chip and a region. It
is the file that is passed, else the one $CAPIBARA_PRICING names, else `pricing.toml` in the current folder.
"""

from __future__ import annotations

import datetime
import functools
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capibara.errors import rule_error, unknown_name
from capibara.hardware.chips import chip as chip_by_name

__all__ = ["KINDS", "Price", "PriceTable", "price", "price_table"]

KINDS = ("on_demand", "spot", "flex_start", "committed_1y", "committed_3y")
"""Ways to pay: by the hour; by the hour until somebody else wants the chip; by the hour after waiting in a queue, for
some days at the most; and committed for one or three years."""

VARIABLE = "CAPIBARA_PRICING"
LOCAL = "pricing.toml"
SHIPPED = Path(__file__).with_name("prices.toml")

_TEXTS = ("chip", "region", "provider", "date", "source")
_KEYS = (*_TEXTS, *KINDS)


@dataclass(frozen=True)
class Price:
    """What one chip costs for an hour."""

    chip: str
    region: str
    kind: str
    usd: float
    """US dollars a chip-hour."""
    date: str
    """The day on which the source said so."""
    source: str
    provider: str = ""

    def __str__(self) -> str:
        return f"{self.usd:.4g} USD a chip-hour ({self.kind.replace('_', ' ')}, {self.region}, {self.date})"


@dataclass(frozen=True)
class PriceTable:
    """Prices in the order in which they are looked for: a user's rows before the shipped ones."""

    rows: tuple[Price, ...]
    files: tuple[str, ...]

    def find(self, chip: Any, region: str | None = None, kind: str = "on_demand") -> Price | None:
        """The price, or None where nobody wrote one down. Without a region, the first one listed for the chip."""
        if kind not in KINDS:
            raise unknown_name("kind of price", kind, KINDS)
        name = chip_by_name(chip).name
        of_chip = [row for row in self.rows if row.chip == name]
        if region is None:
            # One region for all kinds, so that spot is held against on demand in the same place.
            region = of_chip[0].region if of_chip else None
        elif of_chip and region not in (regions := dict.fromkeys(row.region for row in of_chip)):
            raise unknown_name(f"region with a price for {name}", region, regions)
        return next((row for row in of_chip if row.region == region and row.kind == kind), None)

    def price(self, chip: Any, region: str | None = None, kind: str = "on_demand") -> Price:
        """The price; a ValueError that says how to write one down where there is none."""
        found = self.find(chip, region, kind)
        if found is None:
            name = chip_by_name(chip).name
            where = "" if region is None else f" in {region}"
            listed = dict.fromkeys(f"{row.kind} in {row.region}" for row in self.rows if row.chip == name)
            chips = f"rows for {', '.join(dict.fromkeys(row.chip for row in self.rows))}"
            raise rule_error(
                f"The price table lists no {kind} price for {name}{where}: no dated source of one was found",
                ", ".join(listed) or chips,
                f"write a [[price]] row for it into {LOCAL} (chip, region, {kind}) or name another region or kind",
            )
        return found


def price(
    chip: Any, region: str | None = None, kind: str = "on_demand", *, table: PriceTable | str | Path | None = None
) -> Price:
    """What a chip costs for an hour.

    Args:
      chip: a chip by any of its names ("v4", "h200").
      region: the provider's name of it; the first that the table lists for the chip when None.
      kind: one of `KINDS`.
      table: a table, or the path of a TOML file laid over the shipped one.

    Examples:
        >>> price("v4").usd
        3.22
        >>> price("v4", "us-central2", "spot").usd
        0.9215
    """
    held = table if isinstance(table, PriceTable) else price_table(table)
    return held.price(chip, region, kind)


def price_table(path: str | Path | None = None) -> PriceTable:
    """The shipped prices under the user's: the file at `path`, $CAPIBARA_PRICING, or ./pricing.toml."""
    user = _user_file(path)
    shipped = _read(SHIPPED)
    if user is None:
        return PriceTable(shipped, (SHIPPED.name,))
    own = _read(user)
    overruled = {(row.chip, row.region, row.kind) for row in own}
    rest = tuple(row for row in shipped if (row.chip, row.region, row.kind) not in overruled)
    return PriceTable(own + rest, (str(user), SHIPPED.name))


def _user_file(path: str | Path | None) -> Path | None:
    named = path or os.environ.get(VARIABLE)
    if named:
        found = Path(named)
        if not found.is_file():
            who = "the path given" if path else f"${VARIABLE}"
            raise rule_error(
                "A price table is a TOML file", f"{str(named)!r} from {who}, which is not there", "name it"
            )
        return found
    local = Path(LOCAL)
    return local if local.is_file() else None


def _read(file: Path) -> tuple[Price, ...]:
    stat = file.stat()
    return _parsed(file, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=8)
def _parsed(file: Path, _changed: int, _size: int) -> tuple[Price, ...]:
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise rule_error("A price table is TOML", f"{file}: {error}", "mend that line") from error
    for key in document:
        if key != "price":
            raise unknown_name(f"key of {file.name}", key, ["price"])
    rows = document.get("price", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise rule_error("Prices are [[price]] tables", f"price = {rows!r} in {file}", "write [[price]] above each row")
    return tuple(one for row in rows for one in _row(row, file))


def _row(row: Mapping[str, Any], file: Path) -> list[Price]:
    for key, value in row.items():
        if key not in _KEYS:
            raise unknown_name(f"key of a price in {file.name}", key, _KEYS)
        if key in KINDS:
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not 0 <= value < math.inf:
                raise rule_error(
                    "A price is a number of dollars from 0 up", f"{key} = {value!r} in {file}", "write 3.22"
                )
    for key in ("chip", "region"):
        if not isinstance(row.get(key), str):
            raise rule_error("A price names its chip and its region", f"{dict(row)} in {file}", f"add {key} = '...'")
    if not any(kind in row for kind in KINDS):
        raise rule_error("A row has a price", f"{dict(row)} in {file}", f"add one of {', '.join(KINDS)}")
    date = row.get("date", datetime.date.fromtimestamp(file.stat().st_mtime).isoformat())
    return [
        Price(
            chip=chip_by_name(row["chip"]).name,
            region=row["region"],
            kind=kind,
            usd=float(row[kind]),
            date=str(date),
            source=str(row.get("source", file.name)),
            provider=str(row.get("provider", "")),
        )
        for kind in KINDS
        if kind in row
    ]
