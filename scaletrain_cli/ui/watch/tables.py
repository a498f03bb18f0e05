"""The tables of `watch`: ranks with their times and memory, nodes with their GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.text import Text

from scaletrain_cli.diagnosis.hardware import Recent
from scaletrain_cli.launch.node.record import NodeRecord
from scaletrain_cli.launch.view import Shown
from scaletrain_cli.text import bytes_text, counted, percent_text, seconds_text
from scaletrain_cli.ui.console import escaped_text, plain
from scaletrain_cli.ui.watch.layout import Choices, Content, cut, elsewhere_text, wrapped

_Value = Callable[[Recent], float | None]
ORDERS: tuple[tuple[str, _Value | None], ...] = (
    ("rank", None),
    ("own time", lambda one: one.mean("own_seconds")),
    ("memory", lambda one: one.highest("memory_bytes")),
)
_RANK_COLUMNS: tuple[tuple[str, _Value, Callable[[float], str]], ...] = (
    ("step", lambda one: one.mean("step_seconds"), seconds_text),
    ("own", lambda one: one.mean("own_seconds"), seconds_text),
    ("data wait", lambda one: one.mean("data_wait_seconds"), seconds_text),
    ("communication", lambda one: one.mean("communication_seconds"), seconds_text),
    ("memory", lambda one: one.highest("memory_bytes"), bytes_text),
    ("reserved", lambda one: one.highest("memory_reserved_bytes"), bytes_text),
    ("retries", lambda one: one.highest("allocation_retries"), lambda value: f"{value:,.0f}"),
)


def _throttled_share(one: Recent) -> float | None:
    columns = ("throttled_by_power", "throttled_by_heat", "throttled_by_hardware")
    return max((value for column in columns if (value := one.mean(column)) is not None), default=None)


_GPU_COLUMNS: tuple[tuple[str, _Value, Callable[[float], str]], ...] = (
    ("used", lambda one: one.mean("utilization"), percent_text),
    ("clock", lambda one: one.mean("sm_clock_hertz"), lambda value: f"{value / 1e9:.2f} GHz"),
    ("heat", lambda one: one.highest("temperature_celsius"), lambda value: f"{value:.0f} °C"),
    ("power", lambda one: one.mean("power_watts"), lambda value: f"{value:,.0f} W"),
    ("memory", lambda one: one.latest("memory_used_bytes"), bytes_text),
    ("throttled", _throttled_share, percent_text),
    ("ECC", lambda one: one.highest("uncorrected_errors"), lambda value: f"{value:,.0f}"),
)
_NODE_COLUMNS: tuple[tuple[str, _Value, Callable[[float], str]], ...] = (
    ("CPU", lambda one: one.mean("cpu_utilization"), percent_text),
    ("free memory", lambda one: one.latest("memory_available_bytes"), bytes_text),
    ("disk write", lambda one: one.mean("disk_written_bytes_per_second"), lambda v: f"{bytes_text(v)}/s"),
    ("net in", lambda one: one.mean("network_received_bytes_per_second"), lambda v: f"{bytes_text(v)}/s"),
    ("net out", lambda one: one.mean("network_sent_bytes_per_second"), lambda v: f"{bytes_text(v)}/s"),
    ("IB in", lambda one: one.mean("infiniband_received_bytes_per_second"), lambda v: f"{bytes_text(v)}/s"),
)


def ranks_page(shown: Shown, choices: Choices, width: int, height: int) -> Content:
    """Return a line for each rank; columns that no rank has are left out."""
    hardware = shown.view.hardware
    if hardware is None or not hardware.ranks:
        return Content(_nothing(shown, width))
    ranks = hardware.ranks
    title, value = ORDERS[choices.order % len(ORDERS)]
    order = sorted(ranks)
    if value is not None:
        order.sort(key=lambda rank: -(value(ranks[rank]) or 0.0))
    on_nodes = [(rank, node.name) for node in shown.nodes for rank in node.ranks]
    places = {rank.rank + offset: name for rank, name in on_nodes for offset in range(rank.ranks)}
    names = [(str(rank), places.get(rank, "")) for rank in order]
    rows = _table(("rank", "node"), names, [ranks[rank] for rank in order], _RANK_COLUMNS, width)
    return Content(rows[1:], [Text(f"order: {title} (o changes it){_part(shown)}", "dim"), rows[0]])


def nodes_page(shown: Shown, choices: Choices, width: int, height: int) -> Content:
    """Return the state of each node of the attempt, and what its GPUs and the node itself measure."""
    hardware = shown.view.hardware
    lines: list[Text] = []
    for node in shown.nodes:
        lines += wrapped(_node_state(node), width, indent=2)
    if not shown.nodes:
        lines.append(Text("no node has begun in the run directory", "dim"))
    if hardware is None:
        return Content([*lines, Text(""), *_nothing(shown, width)])
    for series, columns, title in (
        (hardware.gpus, _GPU_COLUMNS, "GPU"),
        (hardware.nodes, _NODE_COLUMNS, "node"),
    ):
        if series:
            names = sorted(series)
            rows = _table((title,), [(name,) for name in names], [series[name] for name in names], columns, width)
            lines += [Text(""), *rows]
    return Content(lines, [Text(_part(shown).lstrip("; "), "dim")] if _part(shown) else [])


def _node_state(node: NodeRecord) -> Text:
    alive = sum(rank.ended is None for rank in node.ranks)
    ended = [f"rank {rank.rank} {rank.signal or f'exit {rank.exit_code}'}" for rank in node.ranks if rank.exit_code]
    state = "running" if node.ended is None else f"ended with exit code {node.exit_code}"
    text = Text.assemble((plain(node.name), "bold"), f"  {state}", style="red" if ended else "")
    words = f"  {counted(len(node.ranks), 'rank')}" + (f", {alive} alive" if node.ended is None else "")
    return text.append(words + (f"; {', '.join(ended[:4])}" if ended else ""))


def _nothing(shown: Shown, width: int) -> list[Text]:
    """Return why there are no measurements of ranks and nodes."""
    if shown.view.is_elsewhere:
        why = elsewhere_text(shown.view)
    elif not shown.view.record.spec.telemetry.enabled:
        why = "telemetry.enabled is false in the spec: nothing is measured on the nodes."
    else:
        why = "No measurements of ranks and nodes yet."
    return wrapped(escaped_text(why, "dim"), width)


def _part(shown: Shown) -> str:
    hardware = shown.view.hardware
    if hardware is None or hardware.is_whole:
        return ""
    return f"; some of the {shown.view.record.spec.cluster.nodes} nodes are read, not all"


def _table(
    titles: Sequence[str],
    names: Sequence[Sequence[str]],
    series: Sequence[Recent],
    columns: Sequence[tuple[str, _Value, Callable[[float], str]]],
    width: int,
) -> list[Text]:
    """Return the line of titles and a line for each series, without columns that are empty everywhere."""
    cells = [list(map(plain, (title, *(name[place] for name in names)))) for place, title in enumerate(titles)]
    for title, value, text in columns:
        found = [value(each) for each in series]
        if any(one is not None for one in found):
            cells.append([title, *("-" if one is None else text(one) for one in found)])
    widths = [max(map(len, column)) for column in cells]
    lines = []
    for number in range(len(series) + 1):
        parts = [
            column[number].ljust(widths[place]) if place < len(titles) else column[number].rjust(widths[place])
            for place, column in enumerate(cells)
        ]
        lines.append(cut(Text("  ".join(parts), "dim" if number == 0 else ""), width))
    return lines
