"""Plans side by side, with the ratio of each figure to that of the first plan."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from scaletrain_cli.plan.advice.answer import Compared
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.text import bytes_text, count_text, dollars_text, percent_text, ratio_text, seconds_text, whole_text
from scaletrain_cli.ui.console import escaped_text, plain, show, stdout_console
from scaletrain_cli.ui.plan import AXES, CANNOT_RUN, differing
from scaletrain_cli.ui.plan_breakdown import VERDICT_STYLES

_LIST_GAP = 2
_WIDEST_NAME, _NARROWEST_NAME = 30, 12
# Columns in the order in which they are dropped if the console is too narrow.
_DROPPED_FIRST = (
    "of device",
    "MFU",
    "whole run",
    "cost",
    "virtual",
    "context",
    "expert",
    "seq",
    "pipe",
    "tensor",
    "data",
)


def comparison_list(compared: Sequence[Compared], width: int) -> Table:
    """Return a row per run: layout, memory, step and its ratio to the first that fits; more if ``width`` allows."""
    fields = differing([column.plan.layout for column in compared if column.plan is not None])
    titles = [*fields, "memory", "of device", "step", "", "MFU", "whole run", "cost"]
    first = next((column.plan.time.step for column in compared if column.plan and column.feasible), None)
    rows = [_list_cells(column, fields, first) for column in compared]
    name = min(_WIDEST_NAME, max(len(column.name) for column in compared))
    widths = {title: max(len(title), *(len(row.get(title, "")) for row in rows)) for title in titles}
    kept = [title for title in titles if any(row.get(title) for row in rows)]
    for title in _DROPPED_FIRST:
        if name + _taken(kept, widths) > width and title in kept:
            kept.remove(title)
    name = min(name, max(_NARROWEST_NAME, width - _taken(kept, widths)))
    table = Table.grid(padding=(0, _LIST_GAP, 0, 0))
    table.add_column(width=name, overflow="fold")
    for title in kept:
        table.add_column(justify="left" if title in fields else "right", no_wrap=True)
    table.add_row("", *(Text(title, "dim") for title in kept))
    for column, row in zip(compared, rows, strict=True):
        style = "" if column.feasible else "red"
        table.add_row(escaped_text(column.name), *(escaped_text(row.get(title, ""), style) for title in kept))
    return table


def _taken(titles: Sequence[str], widths: dict[str, int]) -> int:
    return sum(_LIST_GAP + widths[title] for title in titles)


def _list_cells(column: Compared, fields: dict[str, str], first: float | None) -> dict[str, str]:
    plan = column.plan
    if plan is None:
        return {"memory": "does not divide"}
    cells = {title: str(getattr(plan.layout, field)) for title, field in fields.items()}
    cells |= {
        "memory": bytes_text(plan.memory.peak),
        "of device": percent_text(plan.memory.peak / plan.memory.capacity),
    }
    if not column.feasible:
        return cells | {"step": "does not fit"}
    cost = plan.cost.expected_usd
    return cells | {
        "step": seconds_text(plan.time.step),
        "": ratio_text(plan.time.step / first) if first else "",
        "MFU": percent_text(plan.time.mfu),
        "whole run": seconds_text(plan.time.to_train),
        "cost": "" if cost is None else dollars_text(cost),
    }


_LABEL = 13
_COLUMN = 20  # the widest cell: `4 min 10 s  x12.34`
_GAP = 2
_SAME = "="


@dataclass(frozen=True)
class _Figure:
    """One row of the comparison: a figure of each plan (None if it has none), and whether its ratio is shown.

    The empty label is that of the throughput, whose unit depends on the runs.
    """

    label: str
    value: Callable[[Compared, RunPlan], float | str | None]
    text: Callable[[float], str] = count_text
    ratio: bool = True
    only_if_different: bool = False
    needs_fit: bool = True


def _layout(field: str) -> Callable[[Compared, RunPlan], float | str | None]:
    return lambda _, plan: str(getattr(plan.layout, field))


_FIGURES = (
    _Figure("parameters", lambda _, plan: plan.model.parameters, needs_fit=False, only_if_different=True),
    _Figure("GPU", lambda c, _: c.spec.cluster.gpu_name, needs_fit=False, only_if_different=True),
    _Figure("ranks", lambda _, p: p.layout.world_size, lambda n: whole_text(int(n)), needs_fit=False),
    *(
        _Figure(
            name, _layout(field), needs_fit=False, only_if_different=name not in ("ZeRO", "micro-batch", "recompute")
        )
        for name, field in {
            **AXES,
            "ZeRO": "zero_stage",
            "batch": "global_batch_size",
            "micro-batch": "micro_batch_size",
            "accumulation": "gradient_accumulation_steps",
            "recompute": "activation_checkpointing",
            "offload": "offload",
            "loss": "cross_entropy",
            "compile": "compile",
        }.items()
    ),
    _Figure("memory", lambda _, plan: plan.memory.peak, bytes_text, needs_fit=False),
    _Figure("of device", lambda _, plan: plan.memory.peak / plan.memory.capacity, percent_text, False, False, False),
    _Figure("step", lambda _, plan: plan.time.step, seconds_text),
    _Figure("", lambda _, plan: plan.time.tokens_per_second),
    _Figure("MFU", lambda _, plan: plan.time.mfu, percent_text, ratio=False),
    _Figure("whole run", lambda _, plan: plan.time.to_train, seconds_text),
    _Figure("goodput", lambda _, plan: plan.durability.expected_goodput, lambda x: f"{100 * x:.4g} %", ratio=False),
    _Figure("cost", lambda _, plan: plan.cost.expected_usd, dollars_text),
)


def show_comparison(compared: Sequence[Compared], console: Console | None = None) -> None:
    """Print a column for each run, compared with the first; a row for each if the console is too narrow."""
    console = console or stdout_console()
    side_by_side = _LABEL + len(compared) * (_COLUMN + _GAP) <= console.width + _GAP
    table = _table(compared) if side_by_side else comparison_list(compared, console.width)
    same = f"{_SAME} same as in the first column; " if side_by_side else ""
    legend = escaped_text(f"{same}x: ratio to the first run", "dim")
    reasons = [escaped_text(f"{column.name}: {column.reason}.", "red") for column in compared if not column.feasible]
    show(console, Group(table, "", legend, *reasons, *_own_warnings(compared)))


def _own_warnings(compared: Sequence[Compared]) -> Iterator[Text]:
    """Yield the warnings that not all runs share, except settings that the engine cannot run."""
    warned = {column.name: column.plan.warnings for column in compared if column.plan and column.feasible}
    texts = [{str(warning) for warning in warnings} for warnings in warned.values()]
    shared = set.intersection(*texts) if texts else set()
    for name, warnings in warned.items():
        for warning in warnings:
            if str(warning) not in shared and warning.code != CANNOT_RUN:
                yield escaped_text(f"{name}: {warning}.", "yellow")


def _table(columns: Sequence[Compared]) -> Table:
    table = Table.grid(padding=(0, _GAP, 0, 0))
    table.add_column(width=_LABEL, style="dim")
    for _ in columns:
        table.add_column(width=_COLUMN, overflow="fold")
    table.add_row("", *(Text(plain(column.name), "bold") for column in columns))
    table.add_row("", *map(_verdict, columns))
    units = {column.spec.unit for column in columns}
    unit = units.pop() if len(units) == 1 else "samples"  # of tokens and images
    for figure in _FIGURES:
        values = [_value(figure, column) for column in columns]
        if all(value is None for value in values) or (figure.only_if_different and len(set(values)) == 1):
            continue
        table.add_row(figure.label or f"{unit}/s", *_cells(figure, columns))
    return table


def _cells(figure: _Figure, columns: Sequence[Compared]) -> Iterator[Text]:
    first = _value(figure, columns[0])
    for index, column in enumerate(columns):
        value = _value(figure, column)
        text = "-" if value is None else value if isinstance(value, str) else figure.text(value)
        if index and value is not None and value == first:
            yield Text(_SAME, "dim")
        elif index and figure.ratio and isinstance(value, int | float) and isinstance(first, int | float) and first:
            yield Text.assemble(f"{plain(text)}  ", (ratio_text(value / first), "cyan"))
        else:
            yield escaped_text(text, "bold" if index and value is not None else "")


def _value(figure: _Figure, column: Compared) -> float | str | None:
    if column.plan is None or (figure.needs_fit and not column.feasible):
        return None
    return figure.value(column, column.plan)


def _verdict(column: Compared) -> Text:
    if column.plan is None:
        return Text("does not divide", "bold red")
    verdict = column.plan.memory.verdict
    return Text(verdict, f"bold {VERDICT_STYLES[verdict]}")
