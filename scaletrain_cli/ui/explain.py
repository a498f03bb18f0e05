"""The screen of `explain`: for each finding the headline, the evidence, and what to do."""

from __future__ import annotations

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from scaletrain_cli.launch.finding import Explanation, Finding
from scaletrain_cli.ui.console import escaped_text, line, marked, plain, show, stdout_console
from scaletrain_cli.ui.status import STYLES


def show_explanation(explanation: Explanation) -> None:
    """Print the explanation to stdout."""
    console = stdout_console()
    line(
        console,
        Text.assemble(
            (plain(explanation.run_id), "bold"), "  ", (explanation.state, STYLES.get(explanation.state, ""))
        ),
    )
    for finding in explanation.findings:
        show(console, Group("", _finding(finding)))


def _finding(finding: Finding) -> Group:
    style = "bold yellow" if finding.needs_action else "bold"
    note = " Waiting will not help; action is needed." if finding.needs_action else ""
    return Group(escaped_text(f"{finding.headline}.{note}", style), *_evidence(finding), *_actions(finding))


def _evidence(finding: Finding) -> list[Padding]:
    if not finding.evidence:
        return []
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", overflow="fold", max_width=32)
    table.add_column(overflow="fold")
    for evidence in finding.evidence:
        first, *rest = evidence.text.splitlines() or [""]
        table.add_row(escaped_text(evidence.source), escaped_text(first))
        for more in rest:
            table.add_row("", escaped_text(more))
    return [Padding(table, (0, 0, 0, 2))]


def _actions(finding: Finding) -> list[Padding]:
    if not finding.actions:
        return []
    return [Padding(marked(("→", escaped_text(action)) for action in finding.actions), (0, 0, 0, 2))]
