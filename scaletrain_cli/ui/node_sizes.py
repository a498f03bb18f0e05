"""The table of the sizes of a run with a range of nodes, and what a recorded spot market makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.text import Text

from scaletrain_cli.plan.reliability.node_sizes import NodeSize
from scaletrain_cli.text import dollars_text, seconds_text, whole_text
from scaletrain_cli.ui.console import escaped_text, show, stdout_console
from scaletrain_cli.ui.grids import titled_table
from scaletrain_cli.ui.plan import layout_text

if TYPE_CHECKING:
    from scaletrain_cli.plan.reliability.elastic import ElasticOutcome, PolicyOutcome

_TITLES = ("nodes", "step", "time", "expected cost", "layout, or why not used")


def sizes_view(sizes: Sequence[NodeSize]) -> RenderableType:
    """Return a row for each number of nodes of the range: step, days and dollars with interruptions, and layout."""
    table = titled_table(_TITLES, "rrrrw")
    for size in sizes:
        style = "" if size.why_not is None else "dim"
        table.add_row(*(escaped_text(cell, style) for cell in _cells(size)))
    return table


def _cells(size: NodeSize) -> tuple[str, ...]:
    plan = size.plan
    if size.why_not is not None or plan is None:
        return whole_text(size.nodes), "-", "-", "-", str(size.why_not)
    wall, usd = plan.durability.wall_seconds, plan.cost.expected_usd
    return (
        whole_text(size.nodes),
        seconds_text(plan.time.step),
        "-" if wall is None else seconds_text(wall),
        "-" if usd is None else dollars_text(usd),
        layout_text(plan.layout),
    )


def show_sizes(
    sizes: Sequence[NodeSize], outcome: ElasticOutcome | None = None, console: Console | None = None
) -> None:
    """Print the table, when the range pays, and the comparison on a spot trace, if there is one."""
    parts: list[RenderableType] = ["", Text("Sizes of the range", "bold"), sizes_view(sizes)]
    if (advice := NodeSize.range_advice(sizes)) is not None:
        parts.append(escaped_text(f"{advice}."))
    if outcome is not None:
        parts += ["", escaped_text(f"{outcome.advice}.", "bold"), _comparison(outcome)]
    show(console or stdout_console(), Group(*parts))


def _comparison(outcome: ElasticOutcome) -> RenderableType:
    titles = ("", "days", "samples per hour", "node hours", "waiting", "interruptions", "grown")
    table = titled_table(titles, "lrrrrrr")
    table.add_row(*map(escaped_text, ("the range", *_figures(outcome.elastic))))
    table.add_row(*map(escaped_text, (f"waiting for {whole_text(outcome.most)}", *_figures(outcome.waiting))))
    return table


def _figures(found: PolicyOutcome) -> tuple[str, ...]:
    if found.days is None:
        return ("never", *("-",) * 5)
    spreads = (found.samples_per_hour, found.node_hours, found.waiting_hours, found.interruptions, found.growths)
    samples, nodes, waiting, interruptions, growths = (0.0 if one is None else one.median for one in spreads)
    figures = (whole_text(round(samples)), whole_text(round(nodes)), seconds_text(waiting * 3600))
    return (f"{found.days.median:.3g}", *figures, f"{interruptions:.0f}", f"{growths:.0f}")
