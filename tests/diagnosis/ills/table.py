"""The tables of planted ills and healthy runs, as lines and as a page. No tests here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.diagnosis.ills.healthy import HEALTHY
from tests.diagnosis.ills.planted import ILLS
from tests.diagnosis.ills.runs import Trial
from tests.diagnosis.ills.verdicts import WITHIN, Verdict

Line = str
HEADERS = {
    "ills": "| ill | planted | steps | finding | place | from step | evidence | seconds |\n|-|-|-|-|-|-|-|-|",
    "healthy": "| healthy run | settings | steps | notes | seconds |\n|-|-|-|-|-|",
}
_COMMAND = "make ills ARGS='--write docs/planted-ills.md'"


def ill_line(verdict: Verdict) -> Line:
    """Return the line of a run with an ill."""
    name, ill = verdict.name, ILLS[verdict.name]
    planted, outcome, finding = _planted(ill.trial), verdict.outcome, verdict.finding
    if outcome is None:
        return f"| {name} | {planted} | - | cannot be had on this machine | - | - | - | - |"
    if finding is None:
        return f"| {name} | {planted} | {outcome.steps} | **none** | - | - | {verdict.wrong} | {outcome.seconds:.1f} |"
    mark = f"**{finding.code}**" if verdict.wrong else f"`{finding.code}` ({finding.severity})"
    cells = [name, planted, str(outcome.steps), mark, f"{verdict.place} of {len(outcome.found)}", str(finding.since)]
    return f"| {' | '.join(cells)} | {finding.text} | {outcome.seconds:.1f} |"


def healthy_line(verdict: Verdict) -> Line:
    """Return the line of a healthy run."""
    outcome = verdict.outcome
    assert outcome is not None
    notes = ", ".join(f"`{found.code}`" for found in outcome.found if found.severity == "note") or "-"
    found = f"**{verdict.wrong}**" if verdict.wrong else notes
    planted = _planted(HEALTHY[verdict.name].trial)
    return f"| {verdict.name} | {planted} | {outcome.steps} | {found} | {outcome.seconds:.1f} |"


def page(lines: Mapping[str, Sequence[Line]], seconds: float) -> str:
    """Return the page with both tables."""
    return "\n".join(
        [
            "# Planted ills and healthy runs",
            "",
            f"Written by `{_COMMAND}`: {sum(map(len, lines.values()))} real runs on CPU processes, two at a time, in "
            f"{seconds:.0f} seconds. Each ill has to be the first or second finding of `scaletrain diagnose` within "
            f"{WITHIN} steps of showing, with a figure and a place in the spec; a healthy run may have notes only. "
            "*From step*: the first one, in steps of ten, from which on it is among the first two. Ills that no "
            "setting can have are planted into the ranks (`tests/diagnosis/ills/plants.py`). What concerns GPUs is "
            "tested with synthesized telemetry alone (`tests/diagnosis/test_findings.py`).",
            "",
            "## Ills",
            "",
            HEADERS["ills"],
            *lines["ills"],
            "",
            "## Healthy runs",
            "",
            HEADERS["healthy"],
            *lines["healthy"],
            "",
        ]
    )


def _planted(trial: Trial) -> str:
    parts = [trial.base, *trial.overrides]
    parts += [f"fault {trial.fault}"] if trial.fault else []
    parts += [f"in the ranks: {trial.plant}"] if trial.plant else []
    return "; ".join(f"`{part}`" for part in parts).replace("|", "\\|")
