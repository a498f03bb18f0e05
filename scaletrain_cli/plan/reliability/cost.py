"""US dollars and seconds of a run, on demand and on spot. Without a price the dollars are None."""

from scaletrain_cli.plan.catalogue.hardware import find_accelerator
from scaletrain_cli.plan.catalogue.prices import Quote, catalogue_price
from scaletrain_cli.plan.reliability.durability import plan_durability
from scaletrain_cli.plan.result import Cost, Durability, Layout, Market, Time
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import RunSpec

_STATED = Reason("plan.price-stated")


def plan_cost(spec: RunSpec, layout: Layout, time: Time, durability: Durability) -> Cost:
    """Return the dollars of the run on each market, without and with interruptions.

    Interruptions are preemptions and failures on spot, and only failures on demand. ``durability`` is that of the run's
    own market. Waiting for spot capacity is not counted, and costs nothing.
    """
    device = find_accelerator(spec.cluster)
    own = spec.cluster.spot
    gpu_hours = spec.allocated_devices * time.to_train / 3600
    quotes, markets = {spot: price_quote(spec, spot) for spot in (False, True)}, {}
    for spot, quote in quotes.items():
        durable = durability
        if spot != own:  # the interruption rate of the spec does not hold on the other market
            other = spec.with_changes("cluster", spot=spot, mean_time_between_interruptions=None)
            durable = plan_durability(other, layout, time, device)
        markets[spot] = _market(quote, spec.allocated_devices, durable)
    on_demand, on_spot = (None if quote is None else quote.usd * gpu_hours for quote in quotes.values())
    return Cost(
        price_per_gpu_hour=markets[own].price_per_gpu_hour,
        price_source=markets[own].price_source,
        on_demand_usd=on_demand,
        spot_usd=on_spot,
        expected_usd=markets[own].usd,
        on_demand=markets[False],
        spot=markets[True],
    )


def _market(quote: Quote | None, gpus: int, durable: Durability) -> Market:
    wall = durable.wall_seconds
    if quote is None:
        return Market(None, Reason("plan.price-unknown"), durable.expected_goodput, wall, None)
    usd = None if wall is None else quote.usd * gpus * wall / 3600
    return Market(quote.usd, quote.source, durable.expected_goodput, wall, usd)


def price_quote(spec: RunSpec, spot: bool) -> Quote | None:
    """Return the price per GPU and hour on a market: of the spec, or of the catalogue; None if it is not known.

    A single price in the spec is of the run's own market.
    """
    cluster = spec.cluster
    if spot and cluster.spot_price_per_gpu_hour != "auto":
        return Quote(cluster.spot_price_per_gpu_hour, _STATED)
    is_spot_price = cluster.spot and cluster.spot_price_per_gpu_hour == "auto"
    if cluster.price_per_gpu_hour != "auto" and spot == is_spot_price:
        return Quote(cluster.price_per_gpu_hour, _STATED)
    return catalogue_price(find_accelerator(cluster).name, spot)
