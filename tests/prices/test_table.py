"""Prices: what the shipped table says, and how a user's own is laid over it."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from capibara.prices.table import KINDS, SHIPPED, price, price_table


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without a pricing.toml, and no variable that names one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CAPIBARA_PRICING", raising=False)


@pytest.mark.quick
def test_the_documented_price_of_a_v4_chip() -> None:
    found = price("v4")
    assert (found.usd, found.region, found.kind) == (3.22, "us-central2", "on_demand")
    assert price("TPU v4", "us-central2", "spot").usd == pytest.approx(0.92, abs=0.005), "about 0.92"


def test_every_row_has_a_source_and_a_day() -> None:
    rows = price_table().rows
    assert {"tpu_v4", "tpu_v5e", "tpu_v5p", "tpu_v6e", "a100_80gb", "h100_sxm", "h200"} <= {row.chip for row in rows}
    for row in rows:
        assert row.source
        assert datetime.date.fromisoformat(row.date) <= datetime.date.today()
        assert row.kind in KINDS
        assert row.usd > 0
    assert len({(row.chip, row.region, row.kind) for row in rows}) == len(rows), "a price is listed twice"


def test_spot_is_cheaper_in_the_same_region() -> None:
    table = price_table()
    for row in table.rows:
        if row.kind == "spot":
            assert row.usd < table.price(row.chip, row.region).usd


def test_an_absent_price_is_an_error_that_says_how_to_write_it_down() -> None:
    with pytest.raises(ValueError, match=r"no committed_3y price for tpu_v4.*\[\[price\]\] row"):
        price("v4", kind="committed_3y")
    assert price_table().find("v4", kind="committed_3y") is None


def test_unknown_words_name_the_choices() -> None:
    with pytest.raises(ValueError, match="'spot', 'flex_start', 'committed_1y'"):
        price("v4", kind="spott")
    with pytest.raises(ValueError, match="us-central2"):
        price("v4", "us-central1")
    with pytest.raises(ValueError, match="Unknown chip"):
        price("v44")


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_a_users_row_comes_before_the_shipped_one(tmp_path: Path) -> None:
    mine = _write(
        tmp_path / "mine.toml",
        '[[price]]\nchip = "v4"\nregion = "us-central2"\non_demand = 2.0\ncommitted_1y = 1.5\n'
        '[[price]]\nchip = "v5e"\nregion = "lab"\non_demand = 0.1\n',
    )
    assert price("v4", table=mine).usd == 2.0
    assert price("v4", kind="committed_1y", table=mine).usd == 1.5
    assert price("v4", kind="spot", table=mine).usd == 0.9215, "what the user does not say stays"
    assert price("v5e", table=mine).region == "lab", "the first region listed is the user's"
    assert price("v5e", "us-central1", table=mine).usd == 1.2


def test_the_file_is_the_argument_then_the_variable_then_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = '[[price]]\nchip = "v4"\nregion = "us-central2"\non_demand = {}\n'
    _write(tmp_path / "pricing.toml", row.format(1.0))
    assert price("v4").usd == 1.0
    other = _write(tmp_path / "other.toml", row.format(2.0))
    monkeypatch.setenv("CAPIBARA_PRICING", str(other))
    assert price("v4").usd == 2.0
    assert price("v4", table=_write(tmp_path / "third.toml", row.format(3.0))).usd == 3.0
    monkeypatch.setenv("CAPIBARA_PRICING", str(tmp_path / "gone.toml"))
    with pytest.raises(ValueError, match=r"gone.toml' from \$CAPIBARA_PRICING"):
        price("v4")


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    file = _write(tmp_path / "mine.toml", '[[price]]\nchip = "v4"\nregion = "r"\non_demand = 1.0\n')
    assert price("v4", table=file).usd == 1.0
    _write(file, '[[price]]\nchip = "v4"\nregion = "r"\non_demand = 10.25\n')
    assert price("v4", table=file).usd == 10.25


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[price]]\nchip = "v4"\nregion = "r"\non_demnd = 1.0\n', "Did you mean 'on_demand'"),
        ('[[prices]]\nchip = "v4"\n', "Did you mean 'price'"),
        ('[[price]]\nchip = "v4"\non_demand = 1.0\n', "add region"),
        ('[[price]]\nchip = "v4"\nregion = "r"\non_demand = "cheap"\n', "number of dollars"),
        ('[[price]]\nchip = "v4"\nregion = "r"\nspot = -1.0\n', "number of dollars"),
        ('[[price]]\nchip = "v4"\nregion = "r"\n', "add one of on_demand"),
        ("price = 3\n", r"\[\[price\]\]"),
        ("[[price\n", "TOML"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        price_table(_write(tmp_path / "bad.toml", text))


def test_the_shipped_table_is_beside_the_code() -> None:
    assert SHIPPED.is_file()


@pytest.mark.quick
def test_a_kind_that_no_source_was_found_for_says_what_there_is() -> None:
    for kind in ("flex_start", "committed_1y", "committed_3y"):
        with pytest.raises(ValueError, match=f"no {kind} price for tpu_v4: no dated source") as refusal:
            price("v4", kind=kind)
        assert "on_demand in us-central2, spot in us-central2" in str(refusal.value)
