"""The output of `watch` without a terminal: the overview once, or a line for each change."""

from __future__ import annotations

import time

from rich.text import Text

from scaletrain_cli.launch.view import RunView
from scaletrain_cli.ui.console import line, plain, show, stdout_console, supports_unicode
from scaletrain_cli.ui.diagnosis import finding_headline
from scaletrain_cli.ui.events import event_line
from scaletrain_cli.ui.status import STYLES, cost_text, left_text, measures_text, progress_text
from scaletrain_cli.ui.watch.layout import Choices
from scaletrain_cli.ui.watch.overview import overview

_ROWS = 34


def show_overview(view: RunView) -> None:
    """Print the first page of `watch` to stdout."""
    console = stdout_console()
    line(console, headline(view))
    choices = Choices(unicode=supports_unicode(console))
    for text in overview(view, choices, console.width, _ROWS, more=f"scaletrain diagnose {view.run.run_id}").body:
        show(console, text)


def show_change(view: RunView, before: RunView | None) -> None:
    """Print new events and findings, and then the state with the figures of the last step, each on a line."""
    console = stdout_console()
    for event in view.events[len(before.events) if before is not None else max(0, len(view.events) - 3) :]:
        line(console, event_line(event))
    known = {finding.code for finding in before.diagnosis.findings} if before is not None else set()
    for finding in view.diagnosis.findings:
        if finding.code not in known:
            line(console, finding_headline(finding))
    status, figures = view.status, view.figures
    why = status.why if status.state not in ("running", "finished") else ""
    words = [progress_text(status), measures_text(status), left_text(figures), cost_text(figures), why]
    when = time.strftime("%H:%M:%S", time.localtime(view.now))
    line(console, f"{when}  {status.state}  {'; '.join(word for word in words if word)}")


def headline(view: RunView) -> Text:
    """Return run id, state and attempt."""
    status = view.status
    text = Text.assemble((plain(status.run_id), "bold"), "  ", (status.state, STYLES.get(status.state, "")))
    if status.attempt > 1:
        text.append(f"  attempt {status.attempt}")
    return text
