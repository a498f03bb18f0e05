"""The pages of `watch`: the content of each for a width and a height. Text of users and machines is escaped."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from rich.text import Text

from scaletrain_cli.launch.watching import Shown
from scaletrain_cli.ui.console import escaped_text
from scaletrain_cli.ui.diagnosis import finding_in_full, no_findings_text
from scaletrain_cli.ui.events import event_line
from scaletrain_cli.ui.watch.curves import curves
from scaletrain_cli.ui.watch.layout import Choices, Content, Page, cut, rendered, wrapped
from scaletrain_cli.ui.watch.overview import overview
from scaletrain_cli.ui.watch.tables import nodes_page, ranks_page


def page_content(shown: Shown, choices: Choices, width: int, height: int) -> Content:
    """Return the content of the chosen page."""
    return _PAGES[choices.page](shown, choices, width, height)


def _events(shown: Shown, choices: Choices, width: int, height: int) -> Content:
    """Return all events, the newest first."""
    lines = [event_line(event, with_date=width >= 100) for event in reversed(shown.view.events)]
    return Content([part for line in lines for part in wrapped(line, width, indent=2)] or [Text("none yet", "dim")])


def _findings(shown: Shown, choices: Choices, width: int, height: int) -> Content:
    """Return the findings with causes and changes of the spec, and what is not concluded."""
    diagnosis = shown.view.diagnosis
    lines: list[Text] = []
    for finding in diagnosis.findings:
        for renderable in finding_in_full(finding):
            lines += rendered(renderable, width)
        lines.append(Text(""))
    if not diagnosis.findings:
        lines += [Text(no_findings_text(diagnosis)), Text("")]
    if diagnosis.not_concluded:
        lines.append(Text("not concluded", "dim"))
        for reason in diagnosis.not_concluded:
            lines += wrapped(escaped_text(f"  {reason}", "dim"), width, indent=2)
    return Content(lines)


def _logs(shown: Shown, choices: Choices, width: int, height: int) -> Content:
    log = shown.log
    if log is None:
        command = f"scaletrain logs {shown.view.status.run_id} --follow"
        waits = escaped_text(f"No output in the run directory yet. `{command}` fetches it from a cluster.", "dim")
        return Content(wrapped(waits, width))
    of = f"rank {log.file.rank} on {log.file.node}, attempt {log.file.attempt}"
    head = escaped_text(f"{of}: log {log.number + 1} of {log.count}, left and right choose another", "dim")
    rows = [part for line in log.lines for part in wrapped(escaped_text(_without_origin(line)), width, indent=2)]
    return Content(rows or [Text("empty", "dim")], [cut(head, width)], from_end=True)


# The date and the source of a rank's own lines, which the first line of the page names.
_ORIGIN = re.compile(r"\d{4}-\d\d-\d\dT(\d\d:\d\d:\d\d)\.\d+Z INFO rank \d+: ")


def _without_origin(line: str) -> str:
    return _ORIGIN.sub(r"\1Z ", line, count=1) if _ORIGIN.match(line) else line


def _help(shown: Shown, choices: Choices, width: int, height: int) -> Content:
    keys = {
        "1 to 7, Tab, Shift-Tab": "choose a page",
        "Up, Down, Page Up, Page Down": "scroll; Home, End: first and last line",
        "s": "curves over steps or over time",
        "+ and -": "curves of a shorter or longer part, up to now",
        "o": "order of the ranks: rank, own time, memory",
        "Left, Right": "log of another rank",
        "r": "draw the screen again",
        "q, Ctrl-C": "quit; the run goes on",
    }
    lines = [Text("Keys", "bold"), Text("")]
    for key, meaning in keys.items():
        lines.append(Text.assemble("  ", (key.ljust(28), "cyan"), meaning))
    asks = "The run directory is read about once a second, and the scheduler is asked at most every 10 seconds."
    marks = "On the x axis of a curve: 2, 3 ... the start of that attempt, R a rollback, o a validation, dots the plan."
    return Content([*lines, Text(""), *wrapped(Text(marks), width), Text(""), *wrapped(Text(asks), width)])


_PAGES: Mapping[Page, Callable[[Shown, Choices, int, int], Content]] = {
    "overview": lambda shown, choices, width, height: overview(shown.view, choices, width, height),
    "curves": lambda shown, choices, width, height: Content(curves(shown.view, choices, width, height)),
    "ranks": ranks_page,
    "nodes": nodes_page,
    "events": _events,
    "findings": _findings,
    "logs": _logs,
    "help": _help,
}
