"""Prices per GPU hour: list prices with date and source (prices.json), and the one figure for ``auto``."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scaletrain_cli.project_files import packaged_data
from scaletrain_cli.reasons import Reason


@dataclass(frozen=True)
class Quote:
    """US dollars per GPU hour, and where the figure comes from."""

    usd: float
    source: Reason


def catalogue_price(gpu: str, spot: bool) -> Quote | None:
    """Return the price that ``auto`` stands for; None if the catalogue has no price of this GPU.

    On demand: the median of the list prices, of which the highest is up to four times the lowest. On spot: that median
    times the median ratio of spot to on-demand price over the offers that list both. Only few and expensive offers do,
    so the median of spot prices alone could exceed the on-demand price.
    """
    row = packaged_data("plan/catalogue/prices.json")["gpus"].get(gpu, {"on_demand": [], "spot": []})
    on_demand, on_spot = (_Offers(row[market]) for market in ("on_demand", "spot"))
    if not spot:
        return on_demand.quote("on-demand")
    shares = [usd / on_demand.usd[offer] for offer, usd in on_spot.usd.items() if offer in on_demand.usd]
    if not shares:
        return on_spot.quote("spot")
    share, whole = statistics.median(shares), on_demand.median
    params = {"share": share, "on_demand_usd": whole, "offers": len(shares), "listed": len(on_demand.usd)}
    return Quote(share * whole, Reason("plan.price-spot-share", {**params, "dates": on_spot.dates}))


def live_price(usd_by_provider: Mapping[str, Sequence[float]]) -> Quote | None:
    """Return the median over cloud providers of each provider's median; None without any price."""
    if not usd_by_provider:
        return None
    usd = statistics.median(statistics.median(prices) for prices in usd_by_provider.values())
    return Quote(usd, Reason("plan.price-live", {"providers": sorted(usd_by_provider)}))


class _Offers:
    """List prices of one GPU on one market, by offer."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.usd = {str(row["offer"]): float(row["usd"]) for row in rows}
        days = sorted({str(row["date"]) for row in rows})
        self.dates = " to ".join(days[:1] + days[1:][-1:])

    @property
    def median(self) -> float:
        return statistics.median(self.usd.values())

    def quote(self, market: str) -> Quote | None:
        if not self.usd:
            return None
        offers = sorted(self.usd, key=lambda offer: self.usd[offer])
        params = {"market": market, "lowest": f"{self.usd[offers[0]]:.2f} {offers[0]}", "dates": self.dates}
        if len(offers) == 1:
            return Quote(self.median, Reason("plan.price-single", params))
        params["highest"] = f"{self.usd[offers[-1]]:.2f} {offers[-1]}"
        return Quote(self.median, Reason("plan.price-median", {**params, "offers": len(offers)}))
