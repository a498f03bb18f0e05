"""What a whole run means, for people: checkpoints and interruptions, dollars on either market, the recipe's figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from scaletrain_cli.plan.result import Durability, Market, RunPlan, Sanity
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.ui.console import words
from scaletrain_cli.ui.units import bytes_text, dollars_text, seconds_text, whole_text

_VERDICT_STYLES = {"ok": "", "note": "cyan", "warning": "yellow"}


def durability_view(spec: RunSpec, durability: Durability) -> RenderableType:
    """How often it saves, whether the notice suffices, what interruptions cost."""
    grace = "within" if durability.grace_ok else "NOT within"
    steps = durability.interval_steps
    every = f"{whole_text(steps)} steps" if steps > 1 else "step"
    saves = (
        f"checkpoint of {bytes_text(durability.checkpoint_bytes)} every {every} "
        f"({seconds_text(durability.interval_seconds)}), saved in {seconds_text(durability.save_seconds)}, {grace} "
        f"the {seconds_text(spec.cluster.grace_seconds)} of grace"
    )
    lines = [words(saves), words(_interruptions(durability))]
    if durability.copy_bytes_per_node:
        copy = f"written from a copy that takes {bytes_text(durability.copy_bytes_per_node)} of each node's memory"
        lines.insert(1, words(copy))
    return Group(*lines)


def goodput_text(goodput: float) -> str:
    """Two nines must not read as 100 %."""
    return f"{min(goodput, 0.9999) * 100:.4g} %"


def cost_view(plan: RunPlan) -> RenderableType:
    """Dollars and days on demand and on spot; in one sentence where no price is known."""
    cost = plan.cost
    markets = {"on demand": cost.on_demand, "spot": cost.spot}
    known = {name: market for name, market in markets.items() if market and market.price_per_gpu_hour is not None}
    if not known:
        return words(cost_text(plan))
    table = Table.grid(padding=(0, 2, 0, 0))
    for justify in ("left", "right", "left", "left"):
        table.add_column(justify=justify, no_wrap=True)
    for name, market in known.items():
        table.add_row(name, *_market(market))
    sources = [words(f"{name}: {market.price_source}", "dim") for name, market in known.items()]
    return Group(table, *sources)


def cost_text(plan: RunPlan) -> str:
    """The expected cost in a few words."""
    cost = plan.cost
    if cost.price_per_gpu_hour is None:
        return cost.price_source
    price = f"{dollars_text(cost.price_per_gpu_hour)} per GPU and hour ({cost.price_source})"
    if cost.expected_usd is None:
        return f"without end: interruptions come faster than it can load; {price}"
    return f"{dollars_text(cost.expected_usd)} expected with interruptions; {price}"


def sanity_view(checks: Sequence[Sanity]) -> RenderableType:
    """A bullet for each check: topic, figure, and what to think of it."""
    table = Table.grid(padding=0)
    table.add_column(width=2)
    table.add_column(overflow="fold")
    for check in checks:
        style = _VERDICT_STYLES[check.verdict]
        said = f"{check.topic} {check.value}{f': {check.message}' if check.message else ''}"
        table.add_row(Text("• ", style), words(said, style))
    return table


def _interruptions(durability: Durability) -> str:
    goodput = f"expected goodput {goodput_text(durability.expected_goodput)}"
    expected = durability.interruptions_expected
    if expected is None:
        return goodput
    if durability.wall_seconds is None:
        return f"{goodput}: interruptions come so fast that the run would never end"
    count = f"{expected:,.0f}" if expected >= 9.5 else f"{expected:.2g}"
    lost = (
        f"{seconds_text(durability.lost_work_seconds)} of work on average"
        if durability.lost_work_seconds
        else "no work"
    )
    each = f"each losing {lost} and {seconds_text(durability.restart_seconds)} to restart"
    return f"{count} interruptions expected, {each}; {goodput}, {seconds_text(durability.wall_seconds)} in all"


def _market(market: Market) -> Iterator[Text]:
    yield words("never ends" if market.usd is None else dollars_text(market.usd), "bold")
    yield words("" if market.wall_seconds is None else seconds_text(market.wall_seconds))
    assert market.price_per_gpu_hour is not None
    yield words(f"{dollars_text(market.price_per_gpu_hour)} per GPU and hour")
