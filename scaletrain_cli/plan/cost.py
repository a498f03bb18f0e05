"""US dollars of a run from its hours and a price. Invents no price: without one, the costs are unknown."""

from __future__ import annotations

from scaletrain_cli.plan.result import Cost, Durability, Layout, Time
from scaletrain_cli.spec import RunSpec


def plan_cost(spec: RunSpec, layout: Layout, time: Time, durability: Durability) -> Cost:
    """Cost of the bare training time at the stated price, and expected cost with interruptions paid for."""
    price = spec.cluster.price_per_gpu_hour
    if price == "auto":
        return Cost(None, "unknown: set cluster.price_per_gpu_hour", None, None, None)
    bare = price * layout.world_size * time.to_train / 3600
    goodput = durability.expected_goodput
    return Cost(
        price_per_gpu_hour=price,
        price_source="the run spec",
        on_demand_usd=None if spec.cluster.spot else bare,
        spot_usd=bare if spec.cluster.spot else None,
        expected_usd=bare / goodput if goodput > 0 else None,
    )
