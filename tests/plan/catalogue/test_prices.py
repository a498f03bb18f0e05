"""Every price has a source and a date and is plausible; the price for ``auto`` is the median."""

import json
import statistics
from datetime import date
from pathlib import Path
from typing import Any

import pytest

import scaletrain_cli.plan.catalogue.prices
from scaletrain_cli.plan import accelerator_names
from scaletrain_cli.plan.catalogue.prices import catalogue_price

CATALOGUE: dict[str, Any] = json.loads(
    Path(scaletrain_cli.plan.catalogue.prices.__file__).with_name("prices.json").read_text(encoding="utf-8")
)


def test_every_price_has_a_date_a_source_and_a_known_gpu() -> None:
    assert set(CATALOGUE["gpus"]) <= set(accelerator_names())
    for markets in CATALOGUE["gpus"].values():
        for offer in (*markets["on_demand"], *markets["spot"]):
            assert offer["source"] in CATALOGUE["sources"]
            assert date(2026, 1, 1) <= date.fromisoformat(offer["date"])
            assert 0.1 < offer["usd"] < 30


def test_every_source_is_used_and_is_an_address() -> None:
    rows = [offer for markets in CATALOGUE["gpus"].values() for market in markets.values() for offer in market]
    assert {row["source"] for row in rows} == set(CATALOGUE["sources"])
    assert all(address.startswith("https://") for address in CATALOGUE["sources"].values())


def test_auto_is_the_median_and_names_its_prices() -> None:
    offers = CATALOGUE["gpus"]["h100-sxm-80gb"]["on_demand"]
    quote = catalogue_price("h100-sxm-80gb", spot=False)
    assert quote.usd == statistics.median(offer["usd"] for offer in offers)
    assert str(quote.source).startswith(f"median of {len(offers)} on-demand list prices, 2.40 Vast to 12.29 Azure")
    assert "2026-09" in str(quote.source)


def test_the_spot_price_uses_the_ratio_of_offers_that_list_both_prices() -> None:
    spot, on_demand = (catalogue_price("a100-sxm-80gb", spot=spot) for spot in (True, False))
    assert spot.usd == pytest.approx(on_demand.usd * 2.928 / 5.069)
    assert str(spot.source) == (
        "0.58 of the on-demand median 2.75: the median ratio of the 1 of 6 offers that list both prices, 2026-09-11"
    )
    alone = catalogue_price("mi300x-192gb", spot=True)
    assert str(alone.source) == "the only spot list price in the catalogue, 1.71 Crusoe, 2026-05-18"


def test_spot_is_cheaper_where_both_are_known() -> None:
    prices = {name: [catalogue_price(name, spot=spot) for spot in (True, False)] for name in CATALOGUE["gpus"]}
    assert all(on_demand is not None for _, on_demand in prices.values())
    both = {name: (spot.usd, other.usd) for name, (spot, other) in prices.items() if spot and other}
    assert len(both) > 4
    assert {name: pair for name, pair in both.items() if pair[0] >= pair[1]} == {}


def test_a_gpu_without_list_prices_has_none() -> None:
    assert catalogue_price("gb300-279gb", spot=False) is None
    assert catalogue_price("cpu", spot=False) is None
    assert catalogue_price("somebody's own", spot=True) is None
