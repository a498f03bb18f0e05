"""The screen of `diagnose`, and the findings on that of `status`."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from scaletrain_cli.diagnosis.checks import Diagnosis
from scaletrain_cli.diagnosis.findings import Cause, Finding
from scaletrain_cli.text import counted, either
from scaletrain_cli.ui.console import escaped_text, line, marked, plain, show, stdout_console

_STYLES = {"error": "bold red", "warning": "bold yellow", "note": "cyan"}
_IN_STATUS = 3
_WIDEST_VALUE = 30


def show_diagnosis(diagnosis: Diagnosis, may_change: Callable[[str], bool]) -> None:
    """Print the findings, each with its causes, and what is not concluded, to stdout.

    ``may_change``: whether a resume of the run may change a key; the others are for a new run.
    """
    console = stdout_console()
    line(console, Text.assemble((plain(diagnosis.run_id), "bold"), f"  {_summary(diagnosis)}"))
    for finding in diagnosis.findings:
        show(console, Group("", *finding_in_full(finding)))
    proposed = {cause.change for finding in diagnosis.findings for cause in finding.causes}
    keys = sorted({change.key for change in proposed if change is not None and change.to is not None})
    if resumable := [key for key in keys if may_change(key)]:
        how = f"scaletrain resume {diagnosis.run_id} --set KEY=VALUE continues the run with another "
        show(console, escaped_text(how + either(resumable), "dim"))
    if others := [key for key in keys if not may_change(key)]:
        show(console, escaped_text(f"another {either(others)} needs a new run", "dim"))
    if diagnosis.not_concluded:
        rows = ((" ", escaped_text(str(reason), "dim")) for reason in diagnosis.not_concluded)
        show(console, Group("", Text("not concluded", "dim"), marked(rows)))


def finding_lines(findings: Sequence[Finding]) -> list[Text]:
    """Return a line for each of the first findings, and how many more there are, for the screen of `status`."""
    lines = [finding_headline(finding) for finding in findings[:_IN_STATUS]]
    if len(findings) > _IN_STATUS:
        lines.append(Text(f"and {counted(len(findings) - _IN_STATUS, 'more finding')}", "dim"))
    return lines


def _summary(diagnosis: Diagnosis) -> str:
    if not diagnosis.findings:
        return no_findings_text(diagnosis)
    steps = f"step {diagnosis.last_step:,}"
    counts = {name: sum(finding.severity == name for finding in diagnosis.findings) for name in _STYLES}
    return f"{steps}  " + ", ".join(counted(count, name) for name, count in counts.items() if count)


def no_findings_text(diagnosis: Diagnosis) -> str:
    """Return that nothing was found, or that there is no measured step to diagnose."""
    return f"no findings up to step {diagnosis.last_step:,}" if diagnosis.measured_steps else "no step to diagnose"


def finding_headline(finding: Finding) -> Text:
    head = Text.assemble((finding.severity, _STYLES[finding.severity]), " ")
    return head.append_text(escaped_text(str(finding.reason)))


def finding_in_full(finding: Finding) -> Iterator[RenderableType]:
    """Yield the text of a finding, and its likely causes with the changes of the spec."""
    yield finding_headline(finding).append(f" (confidence: {finding.confidence})", "dim")
    if finding.causes:
        yield Text("  likely causes" if len(finding.causes) > 1 else "  likely cause", "dim")
    yield Padding(cause_rows(finding.causes), (0, 0, 0, 2))


def cause_rows(causes: Sequence[Cause]) -> Table:
    """Return a numbered row for each cause, with the line of the spec to change."""
    return marked((f"{number}.", _cause(cause)) for number, cause in enumerate(causes, 1))


def _cause(cause: Cause) -> Text:
    text, change = escaped_text(str(cause.reason)), cause.change
    if change is not None:
        text.append("\n").append(f"{plain(change.place)} {change.key}", "green")
        values = "" if change.given is None else f" = {_shown(change.given)}"  # as far as they are known
        values += "" if change.to is None or change.to == change.given else f": try {_shown(change.to)}"
        text.append_text(escaped_text(values))
    return text


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    text = str(value)
    return text if len(text) <= _WIDEST_VALUE else f"{text[:_WIDEST_VALUE]}..."
