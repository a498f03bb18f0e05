"""The first page of `watch`: state, progress, loss, and a line for each figure; and the output without a terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.text import Text

from scaletrain_cli.launch.view import RunView
from scaletrain_cli.text import bytes_text, counted, listed, percent_text, seconds_text
from scaletrain_cli.ui.console import escaped_text, line, plain, show, stdout_console, supports_unicode
from scaletrain_cli.ui.diagnosis import finding_headline
from scaletrain_cli.ui.events import event_line
from scaletrain_cli.ui.status import (
    NOT_SEEN,
    STYLES,
    cost_text,
    goodput_text,
    gpu_text,
    left_text,
    lost_text,
    measures_text,
    memory_text,
    planned_parts_text,
    progress_text,
    rank_memory_text,
    sources_text,
    step_parts_text,
    step_text,
)
from scaletrain_cli.ui.watch.curves import loss_curve
from scaletrain_cli.ui.watch.layout import Choices, Content, cut, elsewhere_text, joined, rows_of, wrapped

_LEAST_CHART_ROWS = 6
_TALL = 30


def progress_bar(done: int, total: int, width: int, unicode: bool = True) -> Text:
    """Return a bar with ``1,234 of 2,000 steps  61.7 %`` behind it."""
    share = min(1.0, done / total) if total else 0.0
    words = f" {done:,} of {total:,} steps  {100 * share:.1f} %"
    cells = max(4, width - len(words))
    full = int(cells * share)
    filled, empty = ("━", "─") if unicode else ("#", "-")
    return Text.assemble((filled * full, "bold green"), (empty * (cells - full), "dim"), words)


def overview(view: RunView, choices: Choices, width: int, height: int, *, more: str = "page 6") -> Content:
    """Return the state, the loss, and a line for each figure; the chart takes the lines that are left.

    ``more``: where to see the findings that are not shown.
    """
    bar = progress_bar(view.status.step, view.status.total_steps, width, choices.unicode)
    if not view.status.step_seen:
        bar = Text(progress_text(view.status))
    lines = 2 if height >= _TALL else 1
    figures = [line for label, text in _figures(view, height) if text for line in rows_of(label, text, width, lines)]
    findings = [cut(finding_headline(finding), width) for finding in view.diagnosis.findings]
    head = [bar, *_why(view, width)]
    left = height - len(head) - len(figures)
    shown_findings = findings[: 5 if height >= _TALL else 2]
    if len(findings) > len(shown_findings):
        rest = f"and {counted(len(findings) - len(shown_findings), 'more finding')}: {more}"
        shown_findings = [*shown_findings, cut(Text(plain(rest), "dim"), width)]
    left -= len(shown_findings)
    has_curve = len(view.case.history) > 1
    wanted = max(1, left // 4) if has_curve else left
    major = [event for event in view.events if event.get("event") not in _MINOR_EVENTS]
    newest = major[-max(1, wanted) :] if left > 0 or not has_curve else []
    shown_events = [cut(event_line(event), width) for event in newest]
    rows = left - len(shown_events)
    chart: list[Text] = []
    if has_curve and rows >= _LEAST_CHART_ROWS:
        chart = loss_curve(view, choices, width, rows)
    return Content([*head, *chart, *figures, *shown_findings, *shown_events])


_MINOR_EVENTS = ("measured", "first-loss", "mixture", "finding", "finding-cleared")


def _why(view: RunView, width: int) -> list[Text]:
    """Return why the run is in its state, where that needs a reason, in at most three lines."""
    status, lines = view.status, []
    if status.why and status.state not in ("finished", "running"):
        lines = wrapped(escaped_text(status.why), width)[:3]
    if view.is_elsewhere and status.state != "queued":
        lines += wrapped(escaped_text(elsewhere_text(view), "dim"), width)
    return lines


def _figures(view: RunView, height: int) -> list[tuple[str, str]]:
    """Return label and text of each line of figures; an empty text where nothing is known."""
    status, figures, plan, hardware = view.status, view.figures, view.record.plan, view.hardware
    left = [left_text(figures), cost_text(figures)]
    if figures.eta_seconds:
        end = time.localtime(view.now + figures.eta_seconds)
        is_today = end[:3] == time.localtime(view.now)[:3]
        left[0] += time.strftime(", until %H:%M" if is_today else ", until %b %d %H:%M", end)
    rate = [f"learning rate {status.learning_rate:.3g}"] if status.learning_rate is not None else []
    rate += [f"gradient norm {status.grad_norm:.3g}"] if status.grad_norm is not None else []
    mfu = "" if status.mfu is None else f"MFU {percent_text(status.mfu)}, planned {percent_text(plan.time.mfu)}"
    parts = "" if hardware is None else step_parts_text(hardware)
    is_beside = bool(parts) and height >= _TALL
    memory = ""
    if hardware is not None and hardware.memory is not None:
        memory = rank_memory_text(hardware.memory, plan)
    elif status.measured is not None:
        memory = memory_text(status.measured)
    return [
        ("left" if figures.eta_seconds else "cost", joined(left)),
        ("last", measures_text(status)),
        ("", ", ".join(rate)),
        ("sources", sources_text(status)),
        ("step", joined([step_text(figures), mfu])),
        ("measured", parts),
        ("planned", planned_parts_text(plan) if is_beside else ""),
        ("slow", str(status.straggler or "")),
        ("idle", str(status.idle or "")),
        ("memory", memory),
        ("GPU", gpu_text(hardware) if hardware is not None else ""),
        ("goodput", goodput_text(status.goodput) if status.goodput is not None else ""),
        ("saved", _saved(view)),
        ("job", _job_text(view)),
    ]


def _saved(view: RunView) -> str:
    if not view.status.files_seen:
        return NOT_SEEN
    step, seconds = view.status.last_checkpoint_step, view.figures.measured_step_seconds
    parts, took = [], ""
    if step is not None:
        commits = [event for event in view.events if event.get("event") == "checkpoint" and event.get("step") == step]
        saved: Mapping[str, Any] = commits[-1] if commits else {}
        at = saved.get("time")
        age = f", {seconds_text(max(0, round(view.now - at)))} ago" if isinstance(at, int | float) else ""
        parts.append(f"step {step:,}{age}")
        if isinstance(saved.get("bytes"), int) and isinstance(saved.get("seconds"), int | float):
            took = f"{bytes_text(saved['bytes'])} in {seconds_text(saved['seconds'])}"
    following = view.next_checkpoint_step
    if following is not None:
        wait = following - view.status.step
        when = f" in {seconds_text(wait * seconds)}" if seconds is not None and wait > 0 else ""
        parts.append(f"next at step {following:,}{when}")
    if view.status.steps_lost_total:
        parts.append(lost_text(view.status))
    return joined([*parts, took])


def _job_text(view: RunView) -> str:
    status = view.status
    where = f"{status.scheduler} job {status.job_id}" if status.job_id else status.scheduler
    nodes = f" on {listed(status.nodes)}" if status.nodes else ""
    attempt = f"attempt {status.attempt}, " if status.attempt > 1 else ""
    detail = f": {status.job.detail}" if status.state == "running" and status.job.detail else ""
    return attempt + where + nodes + detail


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
